"""The optimizer files of a native target: flat partitions of ZeRO 1 and 2, sub-groups of ZeRO 3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from reshard.containers.inert import Ordered, TensorRef
from reshard.dtypes import FLOAT32, named
from reshard.tensor import MASTER, STEP

from . import flat
from .carry import config_of, settings_entries
from .flat import FlatGroup, SubGroup
from .goal import Goal
from .native import Group
from .plans import Place, Plans, is_moe, local_members, local_shapes
from .sheet import Sheet, fragment, stage_enum


def optimizer_files(plans: Plans, mp: int) -> None:
    """Every data-parallel rank's optimizer file of one model-parallel rank."""
    aim = plans.aim
    prefix = "bf16_" if "bfloat16" in {aim.kind(n) for g in aim.groups for n in g.members} else ""
    sheets = [
        plans.sheet(f"{prefix}zero_pp_rank_{dp}_mp_rank_{mp:02d}_optim_states.pt")
        for dp in range(aim.dp)
    ]
    rows = _zero3_rows(plans, sheets, mp) if aim.stage == 3 else _flat_rows(plans, sheets, mp)
    for sheet, state in zip(sheets, rows, strict=True):
        root = {"optimizer_state_dict": state, "ds_config": dict(config_of(aim))}
        plans.finish(sheet, {**root, "ds_version": version_of(aim)})


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
        names = local_members(aim, group, mp, ep)
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
    return aim.experts.ep if aim.experts is not None and is_moe(group) else 1


def _space(plans: Plans, group: Group, mp: int, ep: int) -> FlatGroup:
    shapes = local_shapes(plans, group, mp, ep)
    pads = _paddings(plans, group, list(shapes), mp, ep)
    return flat.flat_group(shapes, plans.aim.dp // _ranks(plans.aim, group), pads)


def _paddings(plans: Plans, group: Group, names: list[str], mp: int, ep: int) -> list[int]:
    members = local_members(plans.aim, group, mp, ep)
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
        parts = flat.sub_groups(local_shapes(plans, group, mp, 0), aim.dp, aim.sub_group_size)
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
