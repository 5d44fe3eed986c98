"""Reads a universal checkpoint: one small file a parameter and state under zero/."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path

from reshard.checkpoint import Checkpoint, ParamGroup
from reshard.containers import torchfile
from reshard.containers.carried import carry
from reshard.containers.inert import TensorRef
from reshard.dtypes import named
from reshard.errors import CorruptError, FormatError
from reshard.files import Files
from reshard.format import OpenOptions
from reshard.layout import Layout, Piece, StoredArray, place_flat
from reshard.tensor import MASTER, PARAM, STEP, TensorId
from reshard.topology import Topology

from .flat import declared
from .folder import tag_files
from .grid import Grid, check_given, degrees_of, model_files, replicas_of
from .model_read import ModelFile
from .names import Names, expert_parts, names_of
from .native import Experts, Group
from .optim_read import SETTINGS, param_groups
from .plain_read import rounds
from .read import NAMING, extras_of, module_tensors, native_run
from .table import Table, add_state
from .values import mapping, number, plain, sequence, whole

NAME = "deepspeed-universal"
#: What ds_to_universal calls the fp32 weights. Source: checkpoint/constants.py @ 0.19.8.
FP32 = "fp32"
_REFUSED = ("is_expert_param", "ep_num_experts", "sub_param_shape")


@dataclass(frozen=True, slots=True)
class FileHolder:
    """A whole tensor in a file of its own, flat or in its shape."""

    shape: tuple[int, ...]
    array: StoredArray

    def pieces(self) -> list[Piece]:
        """One run."""
        return place_flat(self.shape, 0, prod(self.shape), self.array, 0)


@dataclass
class Parameters:
    """What zero/ holds: steps by name, and whether they are tensors."""

    steps: dict[str, float] = field(default_factory=dict)
    step_tensor: dict[str, bool] = field(default_factory=dict)
    slots: dict[str, tuple[str, ...]] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)


def open_universal(folder: Path, options: OpenOptions) -> Checkpoint:
    """Read the headers of a universal checkpoint.

    Raises CorruptError for files that are missing or contradict themselves, FormatError for
    forms that are refused by name.
    """
    grid = _grid(folder, options)
    names = names_of(grid)
    shapes = _shapes(grid, names)
    state_file = folder / "zero" / "optimizer_state.pt"
    if not state_file.is_file():
        raise CorruptError(f"{state_file}: is missing; DeepSpeed does not load without it")
    optimizer = torchfile.load(state_file, "zero/optimizer_state.pt")
    top = mapping(optimizer.root, str(state_file))
    table, found = Table(), Parameters()
    _default_kinds(grid, names, shapes)
    _walk(folder, "", table, names, shapes, found)
    lost = [n for n in shapes if n not in found.slots]
    if lost:
        raise CorruptError(
            f"{folder / 'zero' / lost[0]}: is missing ({len(lost)} of {len(shapes)} parameters are)"
        )
    groups = _groups(grid, names, top, optimizer, found, str(state_file))
    names.experts = _experts(groups)
    model = module_tensors(table, grid, names, groups)
    if grid.round_robin and not options.weights_only:
        _check_order(folder, table, groups)
    settings = carry(optimizer, {k: top[k] for k in SETTINGS if k in top}, "settings/")
    stage = whole(grid.first.zero_config.get("stage", 1), f"{grid.first.name}: zero stage")
    native = replace(native_run(grid, names, groups, model, settings), stage=stage)
    repeated = sorted(set(found.slots) - set(shapes))
    return Checkpoint(
        path=folder,
        format=NAME,
        version=f"DeepSpeed {native.version}, universal, from ZeRO-{stage}",
        topology=Topology(dp=grid.dp, zero=stage),
        layout=Layout(table.tensors, table.pieces, NAMING),
        files=tuple(sorted({*grid.files.names, "zero/optimizer_state.pt", *found.files})),
        groups=tuple(
            ParamGroup({k: plain(v) for k, v in (g.options or {}).items()}, g.members)
            for g in groups
        ),
        steps=found.steps
        or {n: g.numbers[STEP] for g in groups for n in g.members if STEP in g.numbers},
        iteration=grid.first.steps,
        extras=extras_of(grid, native),
        problems=tuple(f"zero/{n} repeats a weight that has no optimizer state" for n in repeated),
        native=native,
    )


def _grid(folder: Path, options: OpenOptions) -> Grid:
    files = tag_files(folder)
    zero3 = not files.model
    models = model_files(files, zero3)
    first = models[0]
    stage = whole(first.zero_config.get("stage", 1), f"{first.name}: zero stage")
    complete = zero3 and all((mp, dp) in files.model3 for mp in range(first.mp)
                             for dp in range(first.dp))  # fmt: skip
    fragments, replicas = replicas_of(files, models) if complete else ((), ())
    if zero3 and not complete:
        models = tuple(replace(m, frozen=None, fragments={}) for m in models)
        fragments, replicas = ((),) * len(models), ((),) * len(models)
    tp, pp = degrees_of(files, first)
    check_given(options, {"dp": first.dp, "zero": stage})
    return Grid(
        files, 3 if zero3 else min(stage, 2), "zero", tp, pp, first.dp, models, (), fragments,
        replicas,
        round_robin=bool(first.zero_config.get("round_robin_gradients")) and not zero3,
    )  # fmt: skip


def _shapes(grid: Grid, names: Names) -> dict[str, tuple[int, ...]]:
    """The logical shape of every trained parameter, as the model states say."""
    out: dict[str, tuple[int, ...]] = {}
    for mp, model in enumerate(grid.models):
        for row in model.shapes or ():
            for name, shape in row.items():
                spot = names.place(name, shape, mp, None)
                out[spot.name] = spot.shape
    if not out:
        raise CorruptError(f"{grid.first.name}: has no param_shapes")
    return out


def _default_kinds(grid: Grid, names: Names, shapes: Mapping[str, object]) -> None:
    """The weights' dtype where no module says: what the config enables."""
    kind = "float32"
    for word, enabled in (("float16", "fp16"), ("bfloat16", "bf16")):
        found = grid.first.config.get(enabled)
        if isinstance(found, Mapping) and found.get("enabled") is True:
            kind = word
    for name in shapes:
        names.kinds.setdefault(name, named(kind))


def _walk(
    folder: Path,
    under: str,
    table: Table,
    names: Names,
    shapes: Mapping[str, tuple[int, ...]],
    found: Parameters,
) -> None:
    """Take in every parameter's folder below zero/ (a name with "/" nests)."""
    root = folder / "zero" / under
    for entry in sorted(os.scandir(root), key=lambda e: e.name):
        name = f"{under}/{entry.name}" if under else entry.name
        if entry.is_symlink():
            raise CorruptError(f"{root / entry.name}: is a link; a universal checkpoint has none")
        if not entry.is_dir():
            continue
        states = sorted(f for f in os.listdir(entry.path) if f.endswith(".pt"))
        if not states:
            _walk(folder, name, table, names, shapes, found)
            continue
        _parameter(folder, name, states, table, names, shapes, found)


def _parameter(
    folder: Path,
    stored: str,
    states: Sequence[str],
    table: Table,
    names: Names,
    shapes: Mapping[str, tuple[int, ...]],
    found: Parameters,
) -> None:
    name = stored.removeprefix(names.prefix)
    slots: list[str] = []
    for state in states:
        slot = state.removesuffix(".pt")
        relative = f"zero/{stored}/{state}"
        file = torchfile.load(folder / relative, relative)
        if file.saved_as != slot and f"{file.saved_as}.pt" in states:
            raise CorruptError(
                f"{folder / relative}: was saved as {file.saved_as}.pt: files have been swapped or "
                "renamed. Give it its name back, or copy the checkpoint again."
            )
        found.files.append(relative)
        if slot == STEP:
            value = number(file, file.root)
            if value is None:
                raise CorruptError(f"{folder / relative}: is no step")
            found.steps[name] = value
            found.step_tensor[name] = isinstance(file.root, TensorRef)
            continue
        if name not in shapes:
            continue  # a weight without optimizer state, as ZeRO's module has it
        ref = _tensor(file.root, f"{folder / relative}")
        if prod(ref.shape) != prod(shapes[name]):
            raise CorruptError(
                f"{folder / relative}: shape {list(ref.shape)}, the model states say "
                f"{list(shapes[name])}"
            )
        array = file.array(ref, relative, relative)
        holder = FileHolder(shapes[name], array)
        held = MASTER if slot == FP32 else slot
        add_state(table, names.kind(name), name, held, shapes[name], array.dtype, holder, relative)
        if slot != FP32:
            slots.append(slot)
    if name in shapes and f"{FP32}.pt" not in states:
        raise CorruptError(f"{folder / 'zero' / stored / 'fp32.pt'}: is missing")
    found.slots[name] = tuple(slots)


def _tensor(root: object, where: str) -> TensorRef:
    if isinstance(root, TensorRef):
        return root
    fields = mapping(root, where)
    for key in _REFUSED:
        if fields.get(key):
            raise FormatError(f"{where}: {key} is set; experts and sub-parameters are not read yet")
    ref = fields.get("param")
    if not isinstance(ref, TensorRef):
        raise CorruptError(f"{where}: holds no 'param'")
    return ref


def _groups(
    grid: Grid,
    names: Names,
    top: Mapping[object, object],
    file: torchfile.TorchFile,
    found: Parameters,
    where: str,
) -> tuple[Group, ...]:
    """The param groups: members from the model states, options from optimizer_state.pt."""
    inner = top.get("optimizer_state_dict")
    nested = inner if isinstance(inner, Mapping) else {}
    listed = top.get("param_groups")
    if listed is None:
        listed = nested.get("param_groups")
    options = param_groups(file, listed, where) if listed else None
    rows = _members(grid, names, nested, where)
    if options is not None and len(options) != len(rows):
        raise CorruptError(
            f"{where}: {len(options)} param groups, the model states list {len(rows)}"
        )
    shared = _shared_step(file, nested)
    out = []
    for i, members in enumerate(rows):
        steps = {found.steps[n] for n in members if n in found.steps}
        if len(steps) > 1:
            raise CorruptError(f"{where}: group {i} counts steps {sorted(steps)[:4]}")
        numbers = {STEP: steps.pop()} if steps else ({STEP: shared} if shared is not None else {})
        slots = dict.fromkeys(s for n in members for s in found.slots.get(n, ()))
        tensor = next((found.step_tensor[n] for n in members if n in found.step_tensor), True)
        given = options[i] if options is not None and options[i] else None
        out.append(Group(given, tuple(members), tuple(slots), frozenset(), numbers, tensor))
    return tuple(out)


def _check_order(folder: Path, table: Table, groups: Sequence[Group]) -> None:
    """Raises CorruptError if masters are not those of the weights beside them.

    ds_to_universal takes the flat weights of a run with round_robin_gradients for those of another
    order, and says nothing. Source: DeepSpeed 0.19.8 on fixture z2_dp2_bf16_roundrobin.
    """
    seen = wrong = 0
    with Files(folder) as files:
        for name in (n for g in groups for n in g.members):
            held = [table.holders.get(TensorId(name, s), [None])[0] for s in (PARAM, MASTER)]
            weight, master = (getattr(h, "array", None) for h in held)
            if weight is not None and master is not None and weight.numel == master.numel > 8:
                seen += 1
                wrong += not rounds(files, weight, master, 0)
    if wrong * 2 > seen:
        raise CorruptError(
            f"{folder}: {wrong} of {seen} masters are not those of the weights beside them. The "
            "run had round_robin_gradients, whose order ds_to_universal mistakes: masters and "
            "moments are wrong. Convert the run's own checkpoint, or --weights-only."
        )


def _experts(groups: Sequence[Group]) -> Experts | None:
    """The experts of DeepSpeed-MoE, which have their global numbers here: those of one rank."""
    counts: dict[str, int] = {}
    for group in groups:
        for name in group.members if (group.options or {}).get("moe") else ():
            parts = expert_parts(name)
            if parts is not None:
                counts[parts[0]] = max(counts.get(parts[0], 0), parts[2] + 1)
    return Experts(counts, 1) if counts else None


def _members(
    grid: Grid, names: Names, nested: Mapping[object, object], where: str
) -> list[list[str]]:
    """Names of every param group in the order the model declares them."""
    rows: list[dict[str, None]] = []
    for mp, model in enumerate(grid.models):
        for i, row in enumerate(_by_group(model, grid, nested, where)):
            if i == len(rows):
                rows.append({})
            local = list(row)
            if grid.round_robin:
                local = declared(local, grid.dp)
            rows[i] |= dict.fromkeys(names.place(n, row[n], mp, None).name for n in local)
    return [list(row) for row in rows]


def _by_group(
    model: ModelFile, grid: Grid, nested: Mapping[object, object], where: str
) -> list[dict[str, tuple[int, ...]]]:
    """param_shapes by param group: sub-groups put together where the file says how."""
    shapes = [dict(s) for s in model.shapes or ()]
    listed = nested.get("param_groups")
    if grid.stage != 3 or not isinstance(listed, (list, tuple)):
        return shapes
    ids = [
        [whole(i, where) for i in sequence(mapping(g, where).get("params"), where)] for g in listed
    ]
    if sorted(i for row in ids for i in row) != list(range(len(shapes))):
        return shapes
    return [{n: s for i in row for n, s in shapes[i].items()} for row in ids]


def _shared_step(file: torchfile.TorchFile, nested: Mapping[object, object]) -> float | None:
    """The one step that a checkpoint of ZeRO 3 keeps for all parameters."""
    states = nested.get("state")
    if not isinstance(states, Mapping):
        return None
    for row in states.values():
        if isinstance(row, Mapping) and STEP in row:
            return number(file, row[STEP])
    return None
