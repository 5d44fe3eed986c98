"""Declares native checkpoints: ZeRO 1, 2 and 3 for any number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from reshard.checkpoint import Checkpoint
from reshard.containers.inert import Ordered, TensorRef
from reshard.dtypes import named
from reshard.errors import FormatError, LayoutError
from reshard.format import Declaration, WriteOptions
from reshard.layout import Layout
from reshard.tensor import MASTER, PARAM, TensorId
from reshard.topology import Target

from . import flat
from .carry import carried_entries, fates_of, losses_of, recipe_of
from .goal import Goal, goal
from .names import expert_parts
from .native import Native, Pipeline
from .optim_write import optimizer_files
from .pipeline import TIED
from .plans import Plans, laid_out, local_shapes
from .read import NAMING
from .sheet import Sheet, size
from .table import Table
from .wrapper_write import side_drafts


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
    if not aim.groups and aim.pipeline is not None and _tied(aim.pipeline):
        raise FormatError(
            "the pipeline ties layers, which its optimizer's files tell; weights alone are "
            "written as torch or hf"
        )
    for mp in range(aim.mp):
        shapes = _param_shapes(plans, mp) if aim.groups else None
        for dp in range(aim.dp if aim.stage == 3 else 1):
            _model_file(plans, mp, dp, shapes)
    _layer_files(plans)
    _expert_files(plans)
    if aim.groups:
        for mp in range(aim.mp):
            optimizer_files(plans, mp)
    drafts, table = laid_out(plans)
    fates, losses = list(fates_of(source, aim)), list(losses_of(source, aim))
    if wrapper is not None and own is not None:
        more, more_fates = side_drafts(wrapper, own, aim, table)
        drafts, fates = drafts + more, fates + more_fates
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


def _tied(pipeline: Pipeline) -> bool:
    return any(n.startswith(TIED) for table in pipeline.layers.values() for n in table.values())


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


# --- model states --------------------------------------------------------------------------------


def _model_file(plans: Plans, mp: int, dp: int, shapes: list[object] | None) -> None:
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
        "param_shapes": shapes,
        **_frozen(plans, sheet, mp, dp, refs),
        "shared_params": _shared(aim, dp, mp),
    }
    plans.finish(sheet, {**head, **carried_entries(sheet, plans.source, aim, mp, dp)})


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
            ref = sheet.placeholder(named(aim.kind(owner)))
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
        local = local_shapes(plans, group, mp, 0)
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
    """The files of a PipelineModule's layers, which hold its weights, by tensor-parallel rank."""
    pipeline, tp = plans.aim.pipeline, plans.aim.topology.tp
    for layer, table in pipeline.layers.items() if pipeline is not None else ():
        for rank in range(tp):
            axis = f"-model_{rank:02d}" if tp > 1 else ""
            sheet = plans.sheet(f"layer_{layer:02d}{axis}-model_states.pt")
            root = Ordered()
            for key, name in table.items():
                shard = plans.shard(name, rank)
                ref = sheet.tensor(shard.shape, plans.dtype(name, PARAM))
                plans.wholes.append((name, PARAM, shard, (sheet, ref)))
                root[key] = ref
            plans.finish(sheet, root)


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
                plans.finish(sheet, root)
