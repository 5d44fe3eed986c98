"""Declares universal checkpoints, as ds_to_universal writes them: one folder for every stage."""

from __future__ import annotations

from dataclasses import replace

from reshard.checkpoint import Checkpoint
from reshard.containers.inert import Ordered
from reshard.dtypes import named
from reshard.errors import FormatError, UnsafeError, UsageError
from reshard.format import Declaration, WriteOptions
from reshard.layout import Layout
from reshard.tensor import MASTER, PARAM, STEP, TensorId
from reshard.topology import Target

from .carry import carried_entries, fates_of, losses_of, recipe_of, settings_entries
from .cuts import same
from .goal import Goal, goal
from .native import Group, Native
from .optim_write import version_of
from .plans import Plans, laid_out
from .read import NAMING
from .recut import is_muon
from .sheet import Sheet, size, stage_enum
from .table import Table
from .universal_read import FP32, NAME


def declare_universal(source: Checkpoint, target: Target, options: WriteOptions) -> Declaration:
    """Lay out a universal checkpoint of the source.

    It has no degrees of its own: a job of any stage and size loads it.
    """
    odd = [k for k in target.degrees if k not in ("dp", "zero")]
    if odd:
        raise UsageError(
            f"{target.text!r}: a universal checkpoint has no degree {odd[0]}; every job loads it"
        )
    stage = _stage(source, target)
    flat = Target(target.format, target.variant, {"dp": _dp(source, target)}, target.options,
                  target.text)  # fmt: skip
    aim = goal(source, flat, options, stage)
    _check(aim, source)
    aim = replace(aim, round_robin=False, aligned=False, pipeline=None, tag=f"{aim.tag}_universal")
    plans = Plans(source, aim)
    _model_files(plans, source)
    _state_file(plans)
    for group in aim.groups:
        for name in group.members:
            _parameter_files(plans, group, name)
    drafts, table = laid_out(plans)
    return Declaration(
        format=NAME,
        topology=aim.topology,
        folder=aim.tag,
        layout=Layout(table.tensors, table.pieces, NAMING),
        drafts=drafts,
        trackers={"latest_universal": aim.tag.encode()},
        losses=losses_of(source, aim),
        notes=(*aim.notes, *_notes(source, aim)),
        fates=fates_of(source, aim),
        recipe={
            **recipe_of(source, aim),
            "config": {"checkpoint": {"load_universal": True}},
            "verdict": "same sample sequence",
        },
        explained=_explained(source, aim, table),
    )


def _stage(source: Checkpoint, target: Target) -> int:
    asked = target.degrees.get("zero")
    if asked is not None:
        return asked
    own = source.native
    return own.stage if isinstance(own, Native) and own.stage in (1, 2, 3) else 1


def _dp(source: Checkpoint, target: Target) -> int:
    return target.degrees.get("dp") or source.topology.dp or 1


def _check(aim: Goal, source: Checkpoint) -> None:
    if not aim.groups:
        raise FormatError("a universal checkpoint is made of optimizer states, and there are none")
    if any(map(is_muon, aim.groups)):
        raise FormatError(
            "Muon keeps whole matrices, and DeepSpeed's loader of universal checkpoints takes "
            "every state for a flat partition, or under ZeRO 3 loads Adam's moments alone; write "
            "deepspeed:zero1, zero2 or zero3"
        )
    if aim.stage not in (1, 2, 3):
        raise UsageError(f"zero{aim.stage}: a universal checkpoint is of stage 1, 2 or 3")
    for group in aim.groups:
        for name in group.members:
            parts = name.split("/")
            if "" in parts or ".." in parts or "." in parts:
                raise UnsafeError(f"{name!r} cannot be a folder's name below zero/")


def _model_files(plans: Plans, source: Checkpoint) -> None:
    """Model states under both names: those of stages 1 and 2, and those that stage 3 looks for."""
    aim = plans.aim
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
        sheet = plans.sheet(name)
        zero3 = name.startswith("zero")
        module = Ordered()
        for key in aim.model.order:
            owner = aim.model.aliases.get(key, key)
            if zero3 or not _stored(source, owner):
                module[aim.model.prefix + key] = sheet.placeholder(named(aim.kind(owner)))
                continue
            shape = plans.shape(owner)
            known = module.get(aim.model.prefix + owner)
            if known is None:
                known = sheet.tensor(shape, plans.dtype(owner, PARAM))
                plans.wholes.append((owner, PARAM, same(shape), (sheet, known)))
            module[aim.model.prefix + key] = known
        prefix = aim.model.prefix
        root: dict[object, object] = {
            "module": module,
            "buffer_names": [prefix + n for n in aim.model.buffers],
            "optimizer": None,
            "param_shapes": [
                Ordered((prefix + n, size(plans.shape(n))) for n in g.members) for g in aim.groups
            ],
            "frozen_param_shapes": None,
            "shared_params": {prefix + a: prefix + o for a, o in aim.model.aliases.items()},
            "frozen_param_fragments": None,
            **carried_entries(sheet, source, _one_rank(aim), 0, 0),
        }
        plans.finish(sheet, root)


def _stored(source: Checkpoint, name: str) -> bool:
    """Whether the source holds a weight of the module, which is then kept beside the masters."""
    return TensorId(name) in source.layout.tensors


def _one_rank(aim: Goal) -> Goal:
    return replace(aim, affine={})


def _state_file(plans: Plans) -> None:
    """optimizer_state.pt with the keys that stages 1, 2 and 3 look for.

    Source: runtime/base_optimizer.py load_hp_checkpoint_state_from_checkpoint_dir, stage3.py
    load_hp_checkpoint_state_from_checkpoint_dir_stage3 @ 0.19.8.
    """
    aim = plans.aim
    sheet = plans.sheet("zero/optimizer_state.pt")
    groups = [{**(g.options or {}), "params": [i]} for i, g in enumerate(aim.groups)]
    states: dict[object, object] = {}
    for i, group in enumerate(aim.groups):
        if STEP in group.numbers:
            states[i] = {STEP: _step(sheet, group)}
    root = {
        **settings_entries(sheet, replace(aim, stage=1)),
        "zero_stage": stage_enum(aim.stage),
        "ds_version": version_of(aim),
        "param_groups": groups,
        "optimizer_state_dict": {"state": states, "param_groups": groups},
    }
    plans.finish(sheet, root)


def _step(sheet: Sheet, group: Group) -> object:
    value = group.numbers[STEP]
    if group.step_tensor:
        return sheet.number(value)
    return int(value) if value == int(value) else value


def _parameter_files(plans: Plans, group: Group, name: str) -> None:
    """fp32.pt, one file a state, and step.pt of one parameter."""
    aim = plans.aim
    folder = f"zero/{aim.model.prefix}{name}"
    shape = plans.shape(name)
    rows = [(FP32, MASTER), *((s, s) for s in group.states)]
    for stem, slot in rows:
        sheet = plans.sheet(f"{folder}/{stem}.pt")
        ref = sheet.tensor(shape, plans.dtype(name, slot))
        plans.finish(sheet, {**_cut(aim, name), "param": ref})
        plans.wholes.append((name, slot, same(shape), (sheet, ref)))
    if STEP in group.numbers:
        sheet = plans.sheet(f"{folder}/step.pt")
        plans.finish(sheet, _step(sheet, group))


def _cut(aim: Goal, name: str) -> dict[str, object]:
    """How a tensor-parallel job is to cut a parameter: its axis, and whether it is vocabulary."""
    out: dict[str, object] = {"cat_dim": aim.cuts.get(name, 0) or 0}
    if name in aim.vocabulary:
        out["vocab_tensor"] = True
    if name in aim.pairs:
        out["param_n_sub_params"] = 2
    return out


def _notes(source: Checkpoint, aim: Goal) -> list[str]:
    notes = []
    own = source.native
    if isinstance(own, Native) and own.round_robin:
        notes.append(
            "DeepSpeed 0.19.8 loads a universal checkpoint wrongly under round_robin_gradients: "
            "switch it off in the job, or write deepspeed:zero2dpN"
        )
    decays = {(g.options or {}).get("weight_decay") for g in aim.groups}
    if len(decays) > 1:
        notes.append(
            "under ZeRO 3, DeepSpeed 0.19.8 gives every group the options of the first and counts "
            "a step once a sub-group; write deepspeed:zero3dpN for such a job"
        )
    if aim.experts is not None:
        notes.append(
            "in a job of ep_size above 1, ranks call different experts by one name: DeepSpeed "
            "0.19.8 loads this universal checkpoint rightly in a job of ep_size 1 alone; for "
            "others write deepspeed:zero1 or zero2 with epN"
        )
    if aim.model.frozen or aim.model.buffers:
        notes.append(
            "DeepSpeed 0.19.8 restores neither frozen parameters nor buffers from a universal "
            "checkpoint; write deepspeed:zeroNdpM for a job that has them"
        )
    return notes


def _explained(source: Checkpoint, aim: Goal, table: Table) -> frozenset[TensorId]:
    """Weights that the target does not store: their masters stand for them."""
    return frozenset(
        t
        for t in source.layout.tensors
        if t.slot == PARAM and t not in table.tensors and TensorId(t.name, MASTER) in table.tensors
    )
