"""Declares native checkpoints: ZeRO 1, 2 and 3 for any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod

from reshard.checkpoint import Checkpoint
from reshard.containers.inert import Ordered, TensorRef
from reshard.dtypes import FLOAT32, DType, named
from reshard.errors import FormatError, LayoutError
from reshard.format import Declaration, WriteOptions
from reshard.layout import Draft, Layout, StoredArray
from reshard.tensor import MASTER, PARAM, STEP, TensorId
from reshard.topology import Target

from . import flat
from .carry import carried_entries, config_of, fates_of, losses_of, recipe_of, settings_entries
from .cuts import Shard
from .flat import FlatGroup, SubGroup
from .goal import Goal, goal
from .names import expert_parts
from .native import Group, Native
from .read import NAMING
from .recut import shard_of
from .sheet import Sheet, fragment, size, stage_enum
from .table import FlatHolder, FragmentHolder, Holder, MatrixHolder, Table, WholeHolder
from .wrapper_write import side_drafts

Place = tuple[Sheet, TensorRef]


@dataclass
class Plans:
    """The files of a target, and which tensor goes where in them.

    `arrays` are known once the files are laid out: holders are made then.
    """

    source: Checkpoint
    aim: Goal
    under: str = ""  # the tag folder, where a trainer's folder lies around it
    sheets: list[Sheet] = field(default_factory=list)
    wholes: list[tuple[str, str, Shard, Place]] = field(default_factory=list)
    fragments: list[tuple[str, Shard, list[Place]]] = field(default_factory=list)
    flats: list[tuple[Group, str, FlatGroup | SubGroup, Mapping[str, str], int, list[Place]]] = (
        field(default_factory=list)
    )

    def sheet(self, name: str) -> Sheet:
        """A new file."""
        made = Sheet(f"{self.under}/{name}" if self.under else name)
        self.sheets.append(made)
        return made

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's logical shape."""
        tensors = self.source.layout.tensors
        found = tensors.get(TensorId(name)) or tensors[TensorId(name, MASTER)]
        return found.shape

    def shard(self, name: str, mp: int) -> Shard:
        """A model-parallel rank's shard of a tensor."""
        return shard_of(self.aim.affine, name, self.shape(name), mp % self.aim.topology.tp)

    def dtype(self, name: str, slot: str) -> DType:
        """What a slot is stored in."""
        if slot == PARAM:
            return named(self.aim.kind(name))
        found = self.source.layout.tensors.get(TensorId(name, slot))
        return found.dtype if found is not None else FLOAT32


def declare_native(source: Checkpoint, target: Target, options: WriteOptions) -> Declaration:
    """Lay out a tag folder of the source at the target's stage and ranks.

    Raises a ReshardError for what cannot be.
    """
    aim = goal(source, target, options, None)
    own = source.native if isinstance(source.native, Native) else None
    wrapper = own.wrapper if own is not None and aim.groups else None
    plans = Plans(source, aim, aim.tag if wrapper else "")
    if aim.stage == 3:
        if not aim.groups:
            raise FormatError(
                "zero3 keeps weights in the optimizer's files alone; a checkpoint of weights is "
                "written as zero1, zero2, hf or torch"
            )
        _check_zero3(aim)
    for mp in range(aim.mp):
        for dp in range(aim.dp if aim.stage == 3 else 1):
            _model_file(plans, mp, dp)
    _layer_files(plans)
    _expert_files(plans)
    if aim.groups:
        for mp in range(aim.mp):
            _optimizer_files(plans, mp)
    drafts, table = laid_out(plans)
    fates, losses = list(fates_of(source, aim)), list(losses_of(source, aim))
    if wrapper is not None and own is not None:
        more, more_fates, more_losses = side_drafts(source.path, wrapper, own, aim, table)
        drafts, fates, losses = drafts + more, fates + more_fates, losses + more_losses
    return Declaration(
        format="deepspeed",
        topology=aim.topology,
        folder="" if wrapper else aim.tag,
        layout=Layout(table.tensors, table.pieces, NAMING),
        drafts=drafts,
        trackers={} if wrapper else {"latest": aim.tag.encode()},
        losses=tuple(losses),
        notes=aim.notes,
        fates=tuple(fates),
        recipe=recipe_of(source, aim),
        explained=_explained(source, table),
    )


def _explained(source: Checkpoint, table: Table) -> frozenset[TensorId]:
    """Weights that ZeRO 3 does not store: the job rounds its masters when it loads them."""
    return frozenset(
        t
        for t in source.layout.tensors
        if t.slot == PARAM and t not in table.tensors and TensorId(t.name, MASTER) in table.tensors
    )


def _check_zero3(aim: Goal) -> None:
    if aim.pipeline is not None:
        raise LayoutError("a PipelineModule runs under ZeRO 1 at most; zero3 cannot be")
    if aim.experts is not None:
        raise FormatError("DeepSpeed-MoE under ZeRO 3 is not written")
    if aim.elastic:
        raise FormatError(
            "an elastic checkpoint records no optimizer options (rate, betas, decay), and "
            "ZeRO 3 loads them. Give --like DIR, a checkpoint of the job that resumes, or write "
            "zero1 or zero2, which keep the job's own."
        )
    if any(g.whole for g in aim.groups):
        raise FormatError("Muon's whole matrices under ZeRO 3 are not written; use zero1 or zero2")


# --- model states --------------------------------------------------------------------------------


def _model_file(plans: Plans, mp: int, dp: int) -> None:
    aim = plans.aim
    if aim.stage == 3:
        sheet = plans.sheet(f"zero_pp_rank_{dp}_mp_rank_{mp:02d}_model_states.pt")
    else:
        sheet = plans.sheet(f"mp_rank_{mp:02d}_model_states.pt")
    module: Ordered | None = None
    refs: dict[str, TensorRef] = {}
    if aim.pipeline is None:
        module, refs = _module(plans, sheet, mp)
    head: dict[object, object] = {
        "module": module,
        "buffer_names": [aim.model.prefix + n for n in aim.model.buffers],
        "optimizer": None,
        "param_shapes": _param_shapes(plans, mp) if aim.groups else None,
        **_frozen(plans, sheet, mp, dp, refs),
        "shared_params": _shared(aim, dp, mp),
    }
    sheet.root = {**head, **carried_entries(sheet, plans.source, aim, mp, dp)}


def _module(plans: Plans, sheet: Sheet, mp: int) -> tuple[Ordered, dict[str, TensorRef]]:
    """The module's state dict; under ZeRO 3 weights are placeholders without elements."""
    aim = plans.aim
    refs: dict[str, TensorRef] = {}
    out = Ordered()
    for name in aim.model.order:
        owner = aim.model.aliases.get(name, name)
        if _expert_file(aim, owner):
            continue
        buffer = owner in aim.model.buffers
        if aim.stage == 3 and not buffer:
            ref = sheet.tensor((0,), named(aim.kind(owner)))
        elif owner in refs:
            ref = refs[owner]
        else:
            shard = plans.shard(owner, mp)
            ref = sheet.tensor(shard.shape, plans.dtype(owner, PARAM))
            plans.wholes.append((owner, PARAM, shard, (sheet, ref)))
            refs[owner] = ref
        out[aim.model.prefix + name] = ref
    return out, refs


def _expert_file(aim: Goal, name: str) -> bool:
    """Whether a tensor lies in an expert's file instead of the module's."""
    parts = expert_parts(name)
    return aim.experts is not None and parts is not None and parts[0] in aim.experts.counts


def _param_shapes(plans: Plans, mp: int) -> list[object]:
    aim = plans.aim
    out: list[object] = []
    for group in aim.groups:
        local = _local(plans, group, mp, 0)
        rows = [local]
        if aim.stage == 3:
            rows = flat.sub_groups(local, aim.dp, aim.sub_group_size)
        out += [
            Ordered((aim.model.prefix + n, size(shape)) for n, shape in row.items()) for row in rows
        ]
    return out


def _frozen(
    plans: Plans, sheet: Sheet, mp: int, dp: int, refs: Mapping[str, TensorRef]
) -> dict[object, object]:
    """Frozen parameters: listed from ZeRO 2 on, cut in flat fragments under ZeRO 3.

    Source: runtime/engine.py save_frozen_param @ 0.19.8; fixtures z2_dp2_bf16_frozen,
    z3_dp4_bf16_frozen.
    """
    aim = plans.aim
    empty: dict[object, object] = {"frozen_param_shapes": None, "frozen_param_fragments": None}
    if aim.stage < 2 or aim.pipeline is not None or not aim.groups:
        return empty
    shapes, fragments = Ordered(), Ordered()
    for name in aim.model.frozen:
        shard = plans.shard(name, mp)
        shapes[aim.model.prefix + name] = size(shard.shape)
        if aim.stage == 3:
            each = flat.share(prod(shard.shape), aim.dp)
            ref = sheet.tensor((each,), plans.dtype(name, PARAM))
            if dp == 0:
                plans.fragments.append((name, shard, []))
            row = next(f for f in reversed(plans.fragments) if f[0] == name)
            row[2].append((sheet, ref))
        else:
            ref = refs[name]
        fragments[aim.model.prefix + name] = ref
    return {"frozen_param_shapes": shapes, "frozen_param_fragments": fragments}


def _shared(aim: Goal, dp: int, mp: int) -> dict[object, object]:
    if dp or mp:
        return {}
    prefix = aim.model.prefix
    return {prefix + a: prefix + o for a, o in aim.model.aliases.items()}


def _layer_files(plans: Plans) -> None:
    """The files of a PipelineModule's layers, which hold its weights."""
    pipeline = plans.aim.pipeline
    for layer, table in pipeline.layers.items() if pipeline is not None else ():
        sheet = plans.sheet(f"layer_{layer:02d}-model_states.pt")
        root = Ordered()
        for key, name in table.items():
            shard = plans.shard(name, 0)
            ref = sheet.tensor(shard.shape, plans.dtype(name, PARAM))
            plans.wholes.append((name, PARAM, shard, (sheet, ref)))
            root[key] = ref
        sheet.root = root


def _expert_files(plans: Plans) -> None:
    """One file an expert and MoE layer, under global numbers."""
    experts = plans.aim.experts
    if experts is None:
        return
    tensors = plans.source.layout.tensors
    by_expert: dict[tuple[str, int], list[str]] = {}
    for name in dict.fromkeys(t.name for t in tensors if t.slot in (PARAM, MASTER)):
        parts = expert_parts(name)
        if parts is not None and parts[0] in experts.counts:
            by_expert.setdefault((parts[0], parts[2]), []).append(name)
    for mp in range(plans.aim.mp):
        for ordinal, (path, n) in enumerate(experts.counts.items()):
            for number in range(n):
                sheet = plans.sheet(
                    f"layer_{ordinal}_expert_{number}_mp_rank_{mp:02d}_model_states.pt"
                )
                root: dict[object, object] = {}
                for name in by_expert.get((path, number), ()):
                    shard = plans.shard(name, mp)
                    ref = sheet.tensor(shard.shape, plans.dtype(name, PARAM))
                    plans.wholes.append((name, PARAM, shard, (sheet, ref)))
                    root[name] = ref
                sheet.root = root


# --- optimizer states ----------------------------------------------------------------------------


def _members(aim: Goal, group: Group, mp: int, ep: int) -> dict[str, str]:
    """Local name -> global name of a group's members on one rank, in flat order."""
    if aim.pipeline is not None:
        stage = aim.stages[mp // aim.topology.tp]
        return {n: n for n in group.members if n in stage}
    if aim.experts is None or not _is_moe(group):
        return {n: n for n in group.members}
    out: dict[str, str] = {}
    for name in group.members:
        parts = expert_parts(name)
        assert parts is not None
        each = aim.experts.counts[parts[0]] // aim.experts.ep
        if parts[2] // each == ep:
            out[f"{parts[0]}{parts[1]}.{parts[2] % each}.{parts[3]}"] = name
    return out


def _is_moe(group: Group) -> bool:
    return bool((group.options or {}).get("moe"))


def _local(plans: Plans, group: Group, mp: int, ep: int) -> dict[str, tuple[int, ...]]:
    """The local shapes of a group's members on one rank, in flat order; empty ones left out."""
    aim = plans.aim
    members = _members(aim, group, mp, ep)
    shapes = {n: plans.shard(g, mp).shape for n, g in members.items()}
    shapes = {n: s for n, s in shapes.items() if prod(s)}
    if aim.round_robin and not _is_moe(group):
        order = flat.round_robin(list(shapes), aim.dp)
        shapes = {n: shapes[n] for n in order}
    return shapes


def _optimizer_files(plans: Plans, mp: int) -> None:
    aim = plans.aim
    prefix = "bf16_" if "bfloat16" in {aim.kind(n) for g in aim.groups for n in g.members} else ""
    sheets = [
        plans.sheet(f"{prefix}zero_pp_rank_{dp}_mp_rank_{mp:02d}_optim_states.pt")
        for dp in range(aim.dp)
    ]
    rows = _zero3_rows(plans, sheets, mp) if aim.stage == 3 else _flat_rows(plans, sheets, mp)
    for sheet, state in zip(sheets, rows, strict=True):
        sheet.root = {
            "optimizer_state_dict": state,
            "ds_config": dict(carried_config(aim)),
            "ds_version": version_of(aim),
        }


def carried_config(aim: Goal) -> Mapping[object, object]:
    """The config to be recorded."""
    return config_of(aim)


def version_of(aim: Goal) -> str:
    """The DeepSpeed version to be recorded: the source's, else the one this layout is of."""
    found = aim.top.obj
    said = found.get("ds_version") if isinstance(found, dict) else None
    return said if isinstance(said, str) and said else "0.19.8"


def _options(group: Group, params: list[int]) -> dict[object, object]:
    out: dict[object, object] = {"params": params}
    out.update(group.options or {})
    return out


def _row(
    plans: Plans, sheet: Sheet, group: Group, sizes: Mapping[str, int]
) -> tuple[dict[object, object], dict[str, TensorRef]]:
    """One group's state on one rank, and the tensors in it that are to be filled."""
    row: dict[object, object] = {}
    refs: dict[str, TensorRef] = {}
    for key, value in group.numbers.items():
        whole = int(value) if value == int(value) else value
        row[key] = sheet.number(value) if key != STEP or group.step_tensor else whole
    for slot in group.states:
        dtype = plans.dtype(group.members[0], slot) if group.members else FLOAT32
        refs[slot] = sheet.tensor((sizes[slot],), dtype)
        row[slot] = refs[slot]
    return row, refs


def _flat_rows(plans: Plans, sheets: list[Sheet], mp: int) -> list[dict[object, object]]:
    """optimizer_state_dict of every rank under ZeRO 1 and 2.

    Source: runtime/zero/stage_1_and_2.py state_dict @ 0.19.8. An elastic source, which records no
    options, is written so that _restore_base_optimizer_state and
    _restore_elastic_base_optimizer_state both take it: partitions with their padding.
    """
    aim = plans.aim
    spaces = [[_space(plans, g, mp, e) for e in range(_ranks(aim, g))] for g in aim.groups]
    places: dict[tuple[int, int, str], list[Place]] = {}
    rows: list[dict[object, object]] = []
    for dp, sheet in enumerate(sheets):
        parts = [
            _flat_part(plans, sheet, (i, mp, dp), spaces[i], places) for i in range(len(aim.groups))
        ]
        rows.append(
            {
                **settings_entries(sheet, aim),
                **_base(aim, {i: p.row for i, p in enumerate(parts)}),
                "single_partition_of_fp32_groups": [p.master for p in parts],
                "zero_stage": stage_enum(aim.stage),
                "group_paddings": [p.padding for p in parts],
                "param_alignment_paddings": [p.aligned for p in parts],
                "partition_count": [row[0].count for row in spaces],
                "ds_version": version_of(aim),
                "param_slice_mappings": [p.slices for p in parts],
            }
        )
    for (i, ep, slot), held in places.items():
        group = aim.groups[i]
        names = _members(aim, group, mp, ep)
        plans.flats.append((group, slot, spaces[i][ep], names, mp, held))
    return rows


@dataclass(frozen=True, slots=True)
class FlatPart:
    """One rank's part of one param group, as its entries stand in the file."""

    row: dict[object, object]
    master: TensorRef
    padding: int
    aligned: list[int]
    slices: Ordered


def _flat_part(
    plans: Plans,
    sheet: Sheet,
    at: tuple[int, int, int],
    spaces: list[FlatGroup],
    places: dict[tuple[int, int, str], list[Place]],
) -> FlatPart:
    """One group on one rank. `at` is (group, mp, dp); `spaces` are by expert-parallel rank."""
    i, mp, dp = at
    aim, group = plans.aim, plans.aim.groups[i]
    ep, k = dp % len(spaces), dp // len(spaces)
    space = spaces[ep]
    sizes = {s: flat.whole_size(space, k) if s in group.whole else space.size for s in group.states}
    row, refs = _row(plans, sheet, group, sizes)
    kind = plans.dtype(group.members[0], MASTER) if group.members else FLOAT32
    length = space.size if aim.elastic else space.valid(k)
    refs[MASTER] = sheet.tensor((length,), kind, grad=True)
    for slot, ref in refs.items():
        places.setdefault((i, ep, slot), []).append((sheet, ref))
    return FlatPart(
        row,
        refs[MASTER],
        space.size - length,
        _paddings(plans, group, list(space.members), mp, ep),
        _slices(aim, space, k),
    )


def _base(aim: Goal, states: Mapping[object, object]) -> dict[object, object]:
    """The base optimizer's state: with its options, or (elastic) without."""
    if aim.elastic:
        steps = {g.numbers.get(STEP) for g in aim.groups}
        step = next(iter(steps)) if len(steps) == 1 else None
        return {
            "base_optimizer_state": list(states.values()),
            "base_optimizer_state_step": int(step) if step is not None else None,
        }
    groups = [_options(g, [i]) for i, g in enumerate(aim.groups)]
    held = {i: row for i, row in states.items() if row}
    return {"base_optimizer_state": {"state": held, "param_groups": groups}}


def _ranks(aim: Goal, group: Group) -> int:
    """Expert-parallel ranks of a group."""
    return aim.experts.ep if aim.experts is not None and _is_moe(group) else 1


def _space(plans: Plans, group: Group, mp: int, ep: int) -> FlatGroup:
    shapes = _local(plans, group, mp, ep)
    pads = _paddings(plans, group, list(shapes), mp, ep)
    return flat.flat_group(shapes, plans.aim.dp // _ranks(plans.aim, group), pads)


def _paddings(plans: Plans, group: Group, names: list[str], mp: int, ep: int) -> list[int]:
    members = _members(plans.aim, group, mp, ep)
    shapes = [plans.shard(members[n], mp).shape for n in names]
    item = named(plans.aim.kind(members[names[0]])).itemsize if names else 2
    return flat.paddings(shapes, item, plans.aim.aligned)


def _slices(aim: Goal, space: FlatGroup, partition: int) -> Ordered:
    """param_slice_mappings of one partition, in the flat order that the file has."""
    low, high = partition * space.size, (partition + 1) * space.size
    out = Ordered()
    for m in space.overlapping(partition):
        start, stop = max(m.offset, low), min(m.offset + m.numel, high)
        out[aim.model.prefix + m.name] = fragment(stop - start, start - low)
    return out


def _zero3_rows(plans: Plans, sheets: list[Sheet], mp: int) -> list[dict[object, object]]:
    """optimizer_state_dict of every rank under ZeRO 3.

    Source: runtime/zero/stage3.py _rigid_state_dict @ 0.19.8.
    """
    aim = plans.aim
    spaces: list[tuple[Group, SubGroup]] = []
    options: list[dict[object, object]] = []
    for group in aim.groups:
        parts = flat.sub_groups(_local(plans, group, mp, 0), aim.dp, aim.sub_group_size)
        ids = list(range(len(spaces), len(spaces) + len(parts)))
        spaces += [(group, flat.sub_group(p, aim.dp)) for p in parts]
        options.append(_options(group, ids))
    places: dict[tuple[int, str], list[Place]] = {}
    rows: list[dict[object, object]] = []
    for sheet in sheets:
        states: dict[object, object] = {}
        masters = []
        for s, (group, space) in enumerate(spaces):
            row, refs = _row(plans, sheet, group, dict.fromkeys(group.states, space.size))
            kind = plans.dtype(group.members[0], MASTER) if group.members else FLOAT32
            refs[MASTER] = sheet.tensor((space.size,), kind, grad=True)
            masters.append(refs[MASTER])
            if row:
                states[s] = row
            for slot, ref in refs.items():
                places.setdefault((s, slot), []).append((sheet, ref))
        rows.append(
            {
                "zero_stage": stage_enum(3),
                **settings_entries(sheet, aim),
                "partition_count": aim.dp,
                "optimizer_state_dict": {"state": states, "param_groups": options},
                "fp32_flat_groups": masters,
            }
        )
    for (s, slot), held in places.items():
        group, space = spaces[s]
        plans.flats.append((group, slot, space, {n: n for n in space.members}, mp, held))
    return rows


# --- arrays --------------------------------------------------------------------------------------


def laid_out(plans: Plans) -> tuple[list[Draft], Table]:
    """Every file laid out, and the table of who holds which tensor."""
    drafts: list[Draft] = []
    arrays: dict[tuple[str, str], StoredArray] = {}
    for sheet in plans.sheets:
        draft, made = sheet.draft()
        drafts.append(draft)
        arrays |= {(sheet.name, key): array for key, array in made.items()}
    table = Table()
    for name, slot, holder, where in _holders(plans, arrays):
        dtype = plans.dtype(name, slot)
        if slot == MASTER and dtype.name == plans.aim.kind(name):
            slot = PARAM
        table.add(TensorId(name, slot), plans.shape(name), dtype, holder, where)
    return drafts, table


def _holders(
    plans: Plans, arrays: Mapping[tuple[str, str], StoredArray]
) -> Iterator[tuple[str, str, Holder, str]]:
    def of(place: Place) -> StoredArray:
        return arrays[place[0].name, place[1].key]

    for name, slot, shard, place in plans.wholes:
        yield name, slot, WholeHolder(shard, of(place)), place[0].name
    for name, shard, places in plans.fragments:
        held = [of(p) for p in places]
        yield name, PARAM, FragmentHolder(shard, held), places[0][0].name
    for group, slot, space, names, mp, places in plans.flats:
        held = [of(p) for p in places]
        for local in space.members:
            name = names[local]
            shard = plans.shard(name, mp)
            if slot in group.whole:
                assert isinstance(space, FlatGroup)
                yield name, slot, MatrixHolder(shard, space, local, held), places[0][0].name
            else:
                yield name, slot, FlatHolder(shard, space, local, held), places[0][0].name
