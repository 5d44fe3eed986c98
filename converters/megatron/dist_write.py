"""Declares torch_dist: chunks cut as the target's ranks cut them, optimizer, common.pt."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from reshard.checkpoint import Checkpoint, Json
from reshard.containers import torchfile
from reshard.containers.carried import Carried
from reshard.containers.dcp import ObjectItem
from reshard.dtypes import named
from reshard.errors import CoverageError, FormatError, UsageError
from reshard.format import Declaration, Fate, Loss, WriteOptions
from reshard.layout import Draft, Layout
from reshard.scaler import MEGATRON as GRAD_SCALER
from reshard.tensor import MASTER, PARAM, LogicalTensor, TensorId
from reshard.topology import Target

from . import module_order, names, run, run_rng
from .carry import numbered
from .dist_files import Held, Holders, dist_files
from .from_family import foreign_fates, foreign_notes, foreign_recipe, run_of
from .goal import Goal, goal
from .run import Optimizer, Options, Run
from .sizes import LOCAL, SEQUENTIAL, TE_GROUPED, need

_METADATA = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
FULLY_RESHARDABLE = "fully_reshardable"
#: Optimizer forms of a TARGET: a DistributedOptimizer's, or Float16Optimizer's.
FORMS = (FULLY_RESHARDABLE, "non_distributed")
#: What a DistributedOptimizer keeps of a weight beside its master.
ADAM = ("exp_avg", "exp_avg_sq")


def native_run(source: Checkpoint, target: Target, options: WriteOptions) -> Run:
    """What the source holds beside tensors: its own, or what its family says of a Megatron run."""
    return source.native if isinstance(source.native, Run) else run_of(source, target, options)


def declare_dist(source: Checkpoint, target: Target, options: WriteOptions) -> Declaration:
    """Lay out a torch_dist checkpoint of the source at the target's topology."""
    native = native_run(source, target, options)
    aim = goal(source, native, target, options)
    form = _form(native, aim, options)
    if native.optimizer is not None and not options.weights_only:
        run.common_step(source.steps.values())
        _check_adam(source, form)
    style = _style(native, aim, options)
    tensors = _tensors(source, native, aim, options, form)
    _check_like(options, tensors)
    held = Held(tensors, Holders(native, aim), style, form)
    objects, object_fates, losses = _objects(source, native, aim, style, tensors)
    drafts, metadata = dist_files(held, objects)
    common, fates, more = _common(native, aim, form, options, tensors)
    drafts += [common, metadata, _literal("metadata.json", json.dumps(_METADATA))]
    folder, tracker = run_folder(native)
    losses += more
    recipe = _recipe(native, aim, form, tensors, object_fates)
    if native is source.native and any(t.slot != PARAM for t in tensors):
        fates += _scaler_fate(native)
    elif native is not source.native:
        told, more = foreign_fates(source, native)
        fates, losses = [*fates, *told], [*losses, *more]
        recipe = {**recipe, **foreign_recipe(native)}
    feeds, explained = from_masters(source, tensors)
    return Declaration(
        format="megatron",
        topology=aim.topology,
        folder=folder,
        layout=Layout(tensors, held.pieces, "megatron"),
        drafts=drafts,
        trackers={"latest_checkpointed_iteration.txt": tracker.encode()},
        losses=tuple(losses),
        notes=(*aim.notes, *foreign_notes(source, native), *_group_notes(native, aim, tensors)),
        fates=(*fates, *object_fates, *dropped(native)),
        recipe=recipe,
        explained=explained,
        feeds=feeds,
        vocab_size=vocab_of(tensors),
    )


def run_folder(native: Run) -> tuple[str, str]:
    """(folder, tracker text): iter_0000003 and "3", or release and "release"."""
    iteration = native.common.get("iteration")
    if isinstance(iteration, int) and (iteration > 0 or native.optimizer is not None):
        return f"iter_{iteration:07d}", str(iteration)
    return "release", "release"


def dropped(native: Run) -> list[Fate]:
    """Fates of fields that Megatron makes anew."""
    return [Fate(name, "drop", "made anew by the run that resumes") for name in native.unread]


def vocab_of(tensors: Mapping[TensorId, LogicalTensor]) -> int | None:
    """True rows of the vocabulary."""
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        if TensorId(name) in tensors:
            return tensors[TensorId(name)].shape[0]
    return None


def _form(native: Run, aim: Goal, options: WriteOptions) -> str | None:
    """The optimizer form to write: None for Float16Optimizer's."""
    if native.optimizer is None or options.weights_only:
        return None
    asked = aim.optim
    if asked is None:
        like = options.like.native if options.like else None
        distributed = native.optimizer.distributed
        if isinstance(like, Run) and like.optimizer is not None:
            distributed = like.optimizer.distributed
        return FULLY_RESHARDABLE if distributed else None
    if asked == "non_distributed":
        return None
    if asked == FULLY_RESHARDABLE:
        return FULLY_RESHARDABLE
    if asked == "dp_reshardable":
        raise FormatError(
            "optim=dp_reshardable is not written: its buffers depend on bucket sizes that the job "
            "chooses when it runs. optim=fully_reshardable loads at every topology."
        )
    raise UsageError(f"optim={asked}: choose one of {', '.join(FORMS)}")


def _check_adam(source: Checkpoint, form: str | None) -> None:
    """Raises FormatError for states that DistributedOptimizer cannot hold.

    Source: distrib_optimizer.py __init__ @ core_v0.16.1.
    """
    if form != FULLY_RESHARDABLE:
        return
    slots = {t.slot for t in source.layout.tensors}
    if MASTER in slots and slots.isdisjoint(ADAM):
        raise FormatError(
            f"optim={form} has Adam's moments, and the source has masters and no moments: it was "
            "saved before the run's first step. Give --weights-only, or write "
            "optim=non_distributed."
        )
    others = slots - {*ADAM, PARAM, MASTER, run.STEP}
    if others:
        raise FormatError(
            f"optim={form} is Adam's alone, and this optimizer keeps {', '.join(sorted(others))}. "
            "Write optim=non_distributed."
        )


def _style(native: Run, aim: Goal, options: WriteOptions) -> names.Style:
    """How keys are spelled: as the reference or the source does, else as the model would."""
    like = options.like.native if options.like else None
    if isinstance(like, Run) and like.style is not None:
        return like.style
    if native.style is not None and aim.spec == native.spec:
        return native.style
    return names.style_of_sizes(native.model, aim.spec)


def _tensors(
    source: Checkpoint, native: Run, aim: Goal, options: WriteOptions, form: str | None
) -> dict[TensorId, LogicalTensor]:
    """The target's logical tensors: the source's, with a weight derived for a lone master.

    FP32Optimizer keeps no masters, as its weights are their own; DistributedOptimizer and
    Float16Optimizer get them of such weights.

    Another framework's moments become fp32, which is what Megatron keeps.
    """
    out: dict[TensorId, LogicalTensor] = {}
    weight = named(options.dtype) if options.dtype else None
    model_dtype = named("bfloat16")
    present = source.layout.tensors
    foreign = native is not source.native and native.optimizer is not None
    for tensor, logical in present.items():
        if tensor.slot == "step":
            continue
        dtype = logical.dtype
        if foreign and tensor.slot != PARAM:
            dtype = named("float32")
        if weight is not None and tensor.slot == PARAM and logical.dtype.floating:
            fixed = logical.fixed or names.is_buffer(tensor.name)
            dtype = logical.dtype if fixed else weight
        out[tensor] = _target(tensor, logical, aim, dtype)
        lone = TensorId(tensor.name, PARAM)
        if tensor.slot == MASTER and lone not in present:
            out[lone] = _target(lone, logical, aim, weight or model_dtype)
    if native.optimizer is None:
        return out
    if form is None and _own_masters(native, aim, out):
        return {t: v for t, v in out.items() if t.slot != MASTER}
    for tensor in [t for t in out if t.slot == "exp_avg"]:
        param, made = TensorId(tensor.name, PARAM), TensorId(tensor.name, MASTER)
        needed = form is not None or (param in out and out[param].dtype.itemsize < 4)
        if needed and made not in out and param in present:
            out[made] = _target(made, present[param], aim, named("float32"))
    return out


def from_masters(
    source: Checkpoint, tensors: Iterable[TensorId]
) -> tuple[dict[TensorId, TensorId], frozenset[TensorId]]:
    """The weights that are filled from the source's masters, as the target keeps one copy.

    And the source's own narrower weights, for which those stand.
    """
    written, held = set(tensors), source.layout.tensors
    alone = held.keys() - written
    feeds = {
        t: master
        for t in written
        if t.slot == PARAM and (master := TensorId(t.name, MASTER)) in alone
    }
    return feeds, frozenset(t for t in feeds if t in held)


def _check_like(options: WriteOptions, tensors: Mapping[TensorId, LogicalTensor]) -> None:
    """Raises CoverageError where the weights are not those of a Megatron reference."""
    like = options.like
    if like is None or not isinstance(like.native, Run):
        return
    theirs = like.layout.tensors
    for tensor in sorted(t for t in theirs.keys() | tensors.keys() if t.slot == PARAM):
        ours, wanted = (_shown(held.get(tensor)) for held in (tensors, theirs))
        if ours != wanted:
            raise CoverageError(
                f"{tensor}: written as {ours}, the reference {like.path} has {wanted}. It is of "
                "another model: give the degrees with --to instead."
            )


def _shown(logical: LogicalTensor | None) -> str:
    return "none" if logical is None else f"{logical.dtype} {list(logical.extent)}"


def _own_masters(native: Run, aim: Goal, tensors: Mapping[TensorId, LogicalTensor]) -> bool:
    """Whether the run trains in fp32, with FP32Optimizer unless its optimizer is distributed.

    Source: get_megatron_optimizer in megatron/core/optimizer/__init__.py @ core_v0.16.1; fixture
    made-fp32-tp2.
    """
    trained = (t.name for t in tensors if t.slot == "exp_avg")
    narrow = any(tensors[TensorId(name, PARAM)].dtype.itemsize < 4 for name in trained)
    told = {**native.args, **aim.precision}
    return not narrow and not told.get("bf16") and not told.get("fp16")


def _target(tensor: TensorId, logical: LogicalTensor, aim: Goal, dtype: object) -> LogicalTensor:
    vocab = tensor.name in ("embedding.word_embeddings.weight", "output_layer.weight")
    kind = named(str(dtype))
    return LogicalTensor(tensor, logical.shape, kind, aim.padded(logical, vocab))


def _objects(
    source: Checkpoint,
    native: Run,
    aim: Goal,
    style: names.Style,
    tensors: Mapping[TensorId, LogicalTensor],
) -> tuple[dict[int, list[ObjectItem]], list[Fate], list[Loss]]:
    """Extra states and random states, by the rank whose file holds them."""
    out: dict[int, list[ObjectItem]] = {}
    per_stage = len(run.places(aim.topology))
    for key, value in extra_states(source, native, aim, style):
        out.setdefault(0, []).append(ObjectItem(key, value))
    grid = run_rng.rng_grid(aim.topology)
    states, fates, losses = run_rng.rng_states(native, aim.topology, grid)
    size = "_".join((".".join(map(str, grid)),))
    for position, state in states.items():
        rank = position[0] * per_stage + position[1]
        name = f"rng_state/shard_{'.'.join(map(str, position))}_{size}"
        obj, keys = numbered([state.obj])
        values = {keys[k]: v for k, v in state.values.items() if k in keys}
        out.setdefault(rank, []).append(ObjectItem(name, obj, run.ALLOWED, values))
    said = [f"{k}: {v}" for k, v in native.extra_states.items() if v is not None]
    if said:
        detail = f"{len(said)} extra states (fp8 scales) written empty, as {said[0]}"
        fates = [*fates, Fate("_extra_state", "drop", detail)]
        losses = [*losses, Loss("extra-state-dropped", "_extra_state", detail)]
    return out, fates, losses


def _experts_form(native: Run, aim: Goal) -> str:
    """Grouped experts are Transformer Engine's: the local spec has one module per expert."""
    form = native.model.experts_form
    return SEQUENTIAL if aim.spec == LOCAL and form == TE_GROUPED else form


def extra_states(
    source: Checkpoint, native: Run, aim: Goal, style: names.Style
) -> Iterator[tuple[str, object]]:
    """The `_extra_state` objects of a torch_dist checkpoint: empty, as a bf16 or fp32 run has them.

    Keys are the source's own where it is torch_dist in the same style, else those of the module
    tree. A missing one is a load error in Megatron's strict paths.
    """
    if native.extra_states and style == native.style:
        for key in native.extra_states:
            yield key, [None]
        return
    layers = need(native.model.layers, "layers")
    experts = native.model.experts or 1
    # tied or not, an output layer has no extra state here
    model = replace(native.model, experts_form=_experts_form(native, aim), tied=False)
    for chunk in (c for row in aim.pipeline.chunks for c in row):
        for legacy in module_order.extra_states(model, chunk, spec=aim.spec):
            if not legacy.startswith("output_layer."):
                yield _extra_key(legacy, chunk.layers, style, layers, experts), [None]


def _extra_key(
    legacy: str, held: Sequence[int], style: names.Style, layers: int, experts: int
) -> str:
    """The torch_dist key of an extra state: `<key>/shard_<layer>[.<expert>]_<L>[.<E>]`."""
    stem = legacy.removesuffix(names.EXTRA_STATE)
    found = names.from_legacy(stem + "weight", held)
    assert found.canonical is not None
    key, index = names.to_dist(found.canonical, style)
    key = key.removesuffix("weight") + names.EXTRA_STATE
    if not index:
        return f"{key}/shard_0_1"
    stacked = style.stacked and found.canonical.startswith("decoder.")
    sizes = [layers] if stacked else []
    if len(index) > len(sizes):
        sizes.append(experts)
    return f"{key}/shard_{'.'.join(map(str, index))}_{'.'.join(map(str, sizes))}"


def _literal(name: str, text: str) -> Draft:
    return Draft(name, len(text.encode()), [(0, text.encode())])


def _common(
    native: Run,
    aim: Goal,
    form: str | None,
    options: WriteOptions,
    tensors: Mapping[TensorId, LogicalTensor],
) -> tuple[Draft, list[Fate], list[Loss]]:
    """common.pt: args, schedule, param groups, content metadata."""
    with_optimizer = native.optimizer is not None and any(t.slot != PARAM for t in tensors)
    changes = {
        **aim.flags,
        **aim.precision,
        "ckpt_format": "torch_dist",
        "use_dist_ckpt": True,
        "dist_ckpt_optim_fully_reshardable": form == FULLY_RESHARDABLE,
    }
    if with_optimizer:
        changes["use_distributed_optimizer"] = form is not None
    if aim.rows is not None:
        changes["padded_vocab_size"] = aim.rows
    if aim.spec is not None:
        changes["transformer_impl"] = aim.spec
    if _experts_form(native, aim) != native.model.experts_form:
        changes["moe_grouped_gemm"] = False
    losses: list[Loss] = []
    fates: list[Fate] = []
    root: dict[str, object] = {}
    if native.args:
        root["args"], fates, losses = run.target_args(native, aim.topology, changes)
    for name in run.KEPT:
        if name in native.common and (with_optimizer or name != "opt_param_scheduler"):
            root[name] = native.common[name]
            fates.append(Fate(name, "keep"))
    values: dict[str, bytes] = {}
    if with_optimizer and native.optimizer is not None:
        groups, more = run.regrouped(native, aim.topology.ep)
        losses += more
        bare = form is None and not any(t.slot == MASTER for t in tensors)
        state = _optimizer(native.optimizer, groups, form, bare=bare)
        root["optimizer"], keys = numbered(state.obj)
        values = {keys[k]: v for k, v in state.values.items() if k in keys}
        fates += [Fate(f"optimizer.param_groups[{i}]", "keep") for i in range(len(groups))]
    root["content_metadata"] = _content(form)
    fates.append(Fate("content_metadata", "derive", "of the optimizer form that is written"))
    draft, _ = torchfile.draft(
        "common.pt", root, allow=run.ALLOWED, archive="common", values=values
    )
    return draft, fates, losses


def _group_notes(native: Run, aim: Goal, tensors: Iterable[TensorId]) -> Iterator[str]:
    if native.optimizer is not None and any(t.slot != PARAM for t in tensors):
        yield from run.alike_notes(run.regrouped(native, aim.topology.ep)[0])


def _scaler_fate(native: Run) -> list[Fate]:
    scaled = native.optimizer is not None and native.optimizer.scaler is not None
    return [Fate(GRAD_SCALER, "keep")] if scaled else []


def _content(form: str | None) -> dict[str, object]:
    """What the loader builds its request from. Source: fixtures a-tp4pp2, b-tp2pp2dp2."""
    content: dict[str, object] = {}
    if form is not None:
        content["distrib_optim_sharding_type"] = form
        content["distrib_optim_fully_reshardable_mem_efficient"] = False
    return {**content, "singleton_local_shards": False, "chained_optim_avoid_prefix": True}


def _optimizer(
    optimizer: Optimizer, groups: Sequence[Options], form: str | None, *, bare: bool
) -> Carried:
    """The common part of the optimizer: one dict, or one per member of the chain.

    `bare`: FP32Optimizer's, which is the state dict of Adam itself.
    """
    experts = [g for g in groups if g.expert]
    dense = [g for g in groups if not g.expert]
    chain = [dense, experts] if experts else [dense]
    values: dict[str, bytes] = {}
    members = []
    for i, mine in enumerate(chain):
        member, more = _member(optimizer, mine, form, i, bare=bare)
        members.append(member)
        values |= more
    if optimizer.scaler is not None and not bare:
        values |= optimizer.scaler.values
        for member in members:
            member["grad_scaler"] = optimizer.scaler.obj
    if len(members) == 1:
        return Carried(members[0], values)
    return Carried(dict(enumerate(members)), values)


def _member(
    optimizer: Optimizer, groups: Sequence[Options], form: str | None, i: int, *, bare: bool
) -> tuple[dict[str, object], dict[str, bytes]]:
    inner: dict[str, object] = {}
    values: dict[str, bytes] = {}
    in_groups = optimizer.step_in_groups or form is not None
    counted = optimizer.step is not None  # SGD counts no steps
    if counted and not in_groups:
        step = run.step_tensor(float(run.whole_step(optimizer.step)), f"step/{i}")
        values |= step.values
        inner["state"] = {"common_step": step.obj}
    listed = []
    for g in groups:
        made = {k: v for k, v in g.values.items() if k not in ("params", run.STEP)}
        if counted and in_groups:
            made[run.STEP] = run.whole_step(optimizer.step)
        listed.append(made)
    inner["param_groups"] = listed
    if form is None:
        inner = inner if "state" in inner else {"state": {}, **inner}
        return inner if bare else {"optimizer": inner}, values
    return {"optimizer": inner, "param_state_sharding_type": form}, values


def _recipe(
    native: Run,
    aim: Goal,
    form: str | None,
    tensors: Mapping[TensorId, LogicalTensor],
    rng: Sequence[Fate],
) -> Mapping[str, Json]:
    groups = run.regrouped(native, aim.topology.ep)[0] if native.optimizer else ()
    return run.recipe(
        native,
        aim.topology,
        groups,
        {k: v for k, v in aim.flags.items() if v not in (None, False)},
        aim.rows,
        aim.rows_before,
        weights_only=not any(t.slot != PARAM for t in tensors),
        rng_kept=any(f.kind == "keep" for f in rng),
        distributed=form,
    )
