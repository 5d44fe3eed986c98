"""Reads the optimizer of ZeRO 0, which records no names: they are solved, or it is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from reshard.box import Box
from reshard.containers.carried import carry
from reshard.containers.torchfile import TorchFile
from reshard.errors import CorruptError, FormatError
from reshard.files import Files
from reshard.layout import StoredArray, place
from reshard.tensor import MASTER, STEP

from .flat import flat_group
from .grid import Grid
from .join import merged, set_stages
from .model_read import Held
from .names import Names, Spot, expert_parts
from .native import Group
from .optim_read import GroupState, group_state, param_groups
from .rank_file import load
from .solve import Entry, Weight, solve, solve_flat
from .table import FlatHolder, Table, WholeHolder, add_state
from .values import mapping, sequence

#: Elements of a weight that are compared with a master to tell parameters of one shape apart.
SAMPLE = 256


@dataclass(frozen=True)
class PlainState:
    """The optimizer of one model-parallel (and expert-parallel) rank.

    `states` are by parameter in the order of the groups (by group where `flat`); `sizes` how many
    parameters each group has.
    """

    file: TorchFile
    form: str  # plain | unfused | fused
    states: tuple[GroupState, ...]
    sizes: tuple[int, ...]
    options: tuple[Mapping[str, object], ...]


#: Entries of the 16-bit wrappers' state dicts that are settings of the loss scaler.
#: Source: runtime/fp16/unfused_optimizer.py, fused_optimizer.py state_dict @ 0.19.8.
_SETTINGS = (
    "dynamic_loss_scale", "cur_scale", "cur_iter", "last_overflow_iter", "scale_factor",
    "scale_window", "clip_grad",
)  # fmt: skip


def plain_groups(table: Table, grid: Grid, names: Names) -> tuple[tuple[Group, ...], str]:
    """Groups, masters and moments of ZeRO 0, named by order, shape and value; and the form.

    Raises FormatError if more than one naming fits.
    """
    per_mp: list[list[Group]] = []
    start, form = 0, "plain"
    for mp in range(len(grid.models)):
        rows: list[list[Group]] = []
        for ep, state in enumerate(_states(grid, mp)):
            form = state.form
            weights = _weights(grid, names, mp, ep)[start:]
            found = _solve(grid, state, weights, grid.pp > 1)
            rows.append(_rank_groups(table, names, state, found, (mp, ep)))
            if names.pipeline is not None:
                start += sum(map(len, found))
        per_mp.append(list(merged(rows)) if rows else [])
    if any(per_mp):  # else weights alone were saved
        _all_named(grid, names, start)
    set_stages(grid, names, per_mp)
    return (merged(per_mp) if per_mp[0] else ()), form


def _all_named(grid: Grid, names: Names, found: int) -> None:
    """Raises CorruptError unless the stages' optimizers hold all that the layer files do."""
    if names.pipeline is None or grid.weights_only:
        return
    total = len(_weights(grid, names, 0, 0))
    if found != total:
        raise CorruptError(
            f"{grid.files.folder}: the stages' optimizers hold {found} parameters, the layer files "
            f"{total}: layer files are left over, or parameters frozen"
        )


def _rank_groups(
    table: Table,
    names: Names,
    state: PlainState,
    found: Sequence[Sequence[Weight]],
    at: tuple[int, int],
) -> list[Group]:
    """The groups of one rank's optimizer, its states put into the table. `at` is (mp, ep)."""
    mp, ep = at
    groups: list[Group] = []
    first_entry = 0
    for g, members in enumerate(found):
        moe = bool(state.options[g].get("moe"))
        spots = [names.place(w.name, w.local, mp, ep if moe else None) for w in members]
        if state.form == "fused":
            first = state.states[g]
            _flat_states(table, names, first, members, spots, state.file.name)
        else:
            mine = state.states[first_entry : first_entry + len(members)]
            first_entry += len(members)
            first = mine[0] if mine else GroupState({})
            _own_states(table, names, mine, spots, state.file.name)
        groups.append(
            Group(
                state.options[g],
                tuple(s.name for s in spots),
                tuple(s for s in first.tensors if s != MASTER),
                frozenset(),
                first.numbers,
                first.step_tensor,
                names.experts.ep if names.experts and moe else 1,
            )
        )
    return groups


def _flat_states(
    table: Table,
    names: Names,
    state: GroupState,
    members: Sequence[Weight],
    spots: Sequence[Spot],
    where: str,
) -> None:
    """One flat tensor a group and state, without padding (FP16_Optimizer)."""
    space = flat_group({w.name: w.local for w in members}, 1, None, 1)
    for weight, spot in zip(members, spots, strict=True):
        kind = names.kind(spot.name)
        for slot, array in state.tensors.items():
            holder = FlatHolder(spot.shard, space, weight.name, [array])
            add_state(table, kind, spot.name, slot, spot.shape, array.dtype, holder, where)


def _own_states(
    table: Table, names: Names, states: Sequence[GroupState], spots: Sequence[Spot], where: str
) -> None:
    """One tensor a parameter and state."""
    for spot, state in zip(spots, states, strict=True):
        kind = names.kind(spot.name)
        for slot, array in state.tensors.items():
            holder = WholeHolder(spot.shard, array)
            add_state(table, kind, spot.name, slot, spot.shape, array.dtype, holder, where)
        if state.numbers != states[0].numbers and STEP in state.numbers:
            names.steps[spot.name] = state.numbers[STEP]


def _states(grid: Grid, mp: int) -> list[PlainState]:
    """The optimizers of one model-parallel rank: one, or one an expert-parallel rank."""
    found = sorted(ep for m, ep in grid.files.expert_optim if m == mp)
    if not found:
        model = grid.models[mp]
        held = model.top.get("optimizer")
        return [] if held is None or grid.weights_only else [_parse(model.file, held)]
    out = []
    for ep in range(found[-1] + 1):
        name = grid.files.expert_optim.get((mp, ep))
        if name is None:
            raise CorruptError(
                f"{grid.files.folder / f'expp_rank_{ep}_mp_rank_{mp:02d}_optim_states.pt'}: is "
                "missing"
            )
        file = load(grid.files.folder, name)
        held = mapping(file.root, name).get("optimizer")
        if held is not None and not grid.weights_only:
            out.append(_parse(file, held))
    return out


def _parse(file: TorchFile, found: object) -> PlainState:
    where = f"{file.path}: optimizer"
    top = mapping(found, where)
    inner, form, masters = top, "plain", list[object]()
    if "optimizer_state_dict" in top:
        inner = mapping(top["optimizer_state_dict"], where)
        if "fp32_groups_flat" in top:
            form, masters = "fused", list(sequence(top["fp32_groups_flat"], where))
        elif "fp32_groups" in top:
            form = "unfused"
            for group in sequence(top["fp32_groups"], where):
                masters += list(sequence(group, where))
        else:
            raise FormatError(f"{where}: a wrapper without fp32 groups, which is not read")
    if "param_groups" not in inner or "state" not in inner:
        raise FormatError(
            f"{where}: an optimizer whose state dict has {', '.join(map(str, top))[:120]}, which "
            "is not read"
        )
    listed = sequence(inner["param_groups"], where)
    sizes = tuple(len(sequence(mapping(g, where).get("params"), where)) for g in listed)
    total = sum(sizes)
    held = mapping(inner["state"], where)
    states = tuple(
        group_state(file, masters[i] if masters else None, held.get(i), f"{where}: parameter {i}")
        for i in range(total)
    )
    if masters and len(masters) != total:
        raise CorruptError(f"{where}: {total} parameters and {len(masters)} fp32 weights")
    return PlainState(file, form, states, sizes, param_groups(file, listed, where))


def settings_of(grid: Grid) -> object:
    """The loss scaler's settings of the 16-bit wrappers."""
    held = grid.first.top.get("optimizer")
    if not isinstance(held, Mapping):
        return {}
    return carry(grid.first.file, {k: held[k] for k in _SETTINGS if k in held}, "settings/").obj


# --- names ---------------------------------------------------------------------------------------


def _weights(grid: Grid, names: Names, mp: int, ep: int) -> list[Weight]:
    """The weights that one rank's optimizer may name, in the order the model declares them."""
    model = grid.models[mp]
    own = set(model.buffers)
    held: list[tuple[str, Held]] = [
        (n, h)
        for n, h in (model.module or {}).items()
        if n not in own and n.removeprefix(names.prefix) not in names.aliases
    ]
    if names.pipeline is not None:
        held = [(s.name, h) for s, h, _ in names.files]
    out = [Weight(n, h.array.shape, h.array) for n, h in held]
    if names.experts is None:
        return out
    mine: list[Weight] = []
    for spot, expert, _ in names.files:
        parts = expert_parts(spot.name)
        assert parts is not None
        size = names.local_experts[parts[0]]
        if parts[2] // size == ep:
            local = f"{parts[0]}{parts[1]}.{parts[2] % size}.{parts[3]}"
            mine.append(Weight(local, expert.array.shape, expert.array))
    return out + mine


def _solve(
    grid: Grid, state: PlainState, weights: Sequence[Weight], prefix: bool
) -> list[list[Weight]]:
    """The members of every group. `prefix`: the weights go on with those of later stages."""
    where = str(state.file.path)
    with Files(grid.files.folder) as files:

        def alike(weight: Weight, entry: StoredArray | None, base: int) -> bool:
            return entry is None or rounds(files, weight.array, entry, base)

        if state.form == "fused":
            flats = [s.tensors[MASTER] for s in state.states]
            return solve_flat(weights, flats, alike, where)
        entries: list[list[Entry]] = []
        at = 0
        for size in state.sizes:
            row = state.states[at : at + size]
            entries.append([_entry(s, where) for s in row])
            at += size
        total = sum(state.sizes)
        if prefix:
            weights = weights[:total]
        return solve(weights, entries, alike, where)


def _entry(state: GroupState, where: str) -> Entry:
    """The shape of a parameter, as its master or moments have it, and its master."""
    master = state.tensors.get(MASTER)
    shapes = {a.shape for a in state.tensors.values()}
    if len(shapes) != 1:
        raise FormatError(
            f"{where}: an optimizer state of shapes {sorted(map(list, shapes))} for one parameter "
            + ("(it was never stepped)" if not shapes else "")
            + ": its name cannot be told. Convert with --weights-only."
        )
    return Entry(shapes.pop(), master)


def rounds(files: Files, weight: StoredArray, master: StoredArray, base: int) -> bool:
    """Whether a master's elements from `base` on, rounded, are a weight's first, bit for bit."""
    n = min(SAMPLE, weight.numel)
    if base + n > master.numel:
        return False

    def first(array: StoredArray, start: int) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
        row = StoredArray(array.file, array.offset, (array.numel,), array.dtype, array.key)
        piece = place(Box((start,), (start + n,)), row, (start,))
        return files.read(piece, piece.box)

    rounded = first(master, base).astype(weight.dtype.numpy)
    return rounded.tobytes() == first(weight, 0).tobytes()
