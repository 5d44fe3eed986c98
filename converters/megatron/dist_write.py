"""Declares torch_dist: chunks cut as the target's ranks cut them, optimizer, common.pt."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from reshard.box import Box
from reshard.checkpoint import Checkpoint, Json
from reshard.containers import dcp, torchfile
from reshard.containers.carried import Carried
from reshard.containers.dcp import ObjectItem, TensorEntry, TensorItem
from reshard.dtypes import named
from reshard.errors import CoverageError, FormatError, LayoutError, UsageError
from reshard.format import Declaration, Fate, Loss, WriteOptions
from reshard.layout import Draft, Layout, Piece, place
from reshard.tensor import MASTER, PARAM, LogicalTensor, TensorId
from reshard.topology import Target

from . import names, run
from .carry import numbered
from .from_family import foreign_fates, foreign_recipe, master_of, run_of
from .goal import Goal, goal
from .run import Optimizer, Options, Run
from .shards import shard
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


@dataclass(frozen=True, slots=True)
class _Item:
    """One chunk: which logical box it is, in which rank's file."""

    tensor: TensorId
    box: Box  # of the logical tensor, padding included
    key: str
    index: tuple[int, ...]
    rank: int


@dataclass
class _Keys:
    """The global shape of every stored key, grown as logical tensors are placed."""

    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...], str]] = field(default_factory=dict)

    def add(self, key: str, index: Sequence[int], shape: tuple[int, ...], dtype: str) -> None:
        """Take in one logical tensor under a key. Raises LayoutError if its like differs."""
        lead = tuple(i + 1 for i in index)
        known = self.shapes.get(key)
        if known is None:
            self.shapes[key] = (lead, shape, dtype)
            return
        if known[1:] != (shape, dtype):
            raise LayoutError(
                f"{key}: layers or experts of shapes {list(known[1])} {known[2]} and {list(shape)} "
                f"{dtype} cannot be stacked under one key"
            )
        self.shapes[key] = (tuple(map(max, known[0], lead)), shape, dtype)

    def shape(self, key: str) -> tuple[int, ...]:
        """The whole stored shape of a key."""
        lead, shape, _ = self.shapes[key]
        return (*lead, *shape)


def native_run(source: Checkpoint, target: Target) -> Run:
    """What the source holds beside tensors: its own, or what its family says of a Megatron run."""
    return source.native if isinstance(source.native, Run) else run_of(source, target)


def declare_dist(source: Checkpoint, target: Target, options: WriteOptions) -> Declaration:
    """Lay out a torch_dist checkpoint of the source at the target's topology."""
    native = native_run(source, target)
    aim = goal(source, native, target, options)
    form = _form(native, aim, options)
    style = _style(native, aim, options)
    tensors = _tensors(source, native, aim, options, form)
    _check_like(options, tensors)
    items, keys = _items(native, aim, style, tensors, form)
    objects, object_fates, losses = _objects(source, native, aim, style, tensors)
    drafts, places, pieces = _files(native, items, keys, objects, aim)
    common, fates, more = _common(native, aim, form, options, tensors)
    drafts += [common, _metadata(keys, places), _literal("metadata.json", json.dumps(_METADATA))]
    folder, tracker = run_folder(native)
    losses += more
    recipe = _recipe(native, aim, form, tensors, object_fates)
    if native is not source.native:
        told, more = foreign_fates(source)
        fates, losses = [*fates, *told], [*losses, *more]
        recipe = {**recipe, **foreign_recipe(native)}
    return Declaration(
        format="megatron",
        topology=aim.topology,
        folder=folder,
        layout=Layout(tensors, pieces.__getitem__, "megatron"),
        drafts=drafts,
        trackers={"latest_checkpointed_iteration.txt": tracker.encode()},
        losses=tuple(losses),
        notes=aim.notes,
        fates=(*fates, *object_fates, *dropped(native)),
        recipe=recipe,
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

    Where another framework's weights are their own masters, masters are made of them; there, Adam's
    moments become fp32, which is what Megatron keeps.
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
        made = master_of(source, tensor, dtype) if foreign else None
        if made is not None:
            out[made] = _target(made, logical, aim, named("float32"))
        lone = TensorId(tensor.name, PARAM)
        if tensor.slot == MASTER and lone not in present:
            out[lone] = _target(lone, logical, aim, weight or model_dtype)
    if foreign or native.optimizer is None:
        return out
    if form is None and _own_masters(native, out):
        return {t: v for t, v in out.items() if t.slot != MASTER}
    for tensor in [t for t in out if t.slot == "exp_avg"]:
        param, made = TensorId(tensor.name, PARAM), TensorId(tensor.name, MASTER)
        needed = form is not None or (param in out and out[param].dtype.itemsize < 4)
        if needed and made not in out and param in present:
            out[made] = _target(made, present[param], aim, named("float32"))
    return out


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


def _own_masters(native: Run, tensors: Mapping[TensorId, LogicalTensor]) -> bool:
    """Whether the run trains in fp32, with FP32Optimizer unless its optimizer is distributed.

    Source: get_megatron_optimizer in megatron/core/optimizer/__init__.py @ core_v0.16.1; fixture
    made-fp32-tp2.
    """
    trained = (t.name for t in tensors if t.slot == "exp_avg")
    narrow = any(tensors[TensorId(name, PARAM)].dtype.itemsize < 4 for name in trained)
    return not narrow and not native.args.get("bf16") and not native.args.get("fp16")


def _target(tensor: TensorId, logical: LogicalTensor, aim: Goal, dtype: object) -> LogicalTensor:
    vocab = tensor.name in ("embedding.word_embeddings.weight", "output_layer.weight")
    kind = named(str(dtype))
    return LogicalTensor(tensor, logical.shape, kind, aim.padded(logical, vocab))


def _items(
    native: Run,
    aim: Goal,
    style: names.Style,
    tensors: Mapping[TensorId, LogicalTensor],
    form: str | None,
) -> tuple[list[_Item], _Keys]:
    keys = _Keys()
    items: list[_Item] = []
    where = Holders(native, aim)
    for tensor, logical in tensors.items():
        bare, index = names.to_dist(tensor.name, style)
        key = _prefix(tensor.slot, form) + bare
        keys.add(key, index, logical.extent, logical.dtype.name)
        for box, rank in where.boxes(tensor.name, logical):
            items.append(_Item(tensor, box, key, index, rank))
    return items, keys


def _prefix(slot: str, form: str | None) -> str:
    if slot == PARAM:
        return ""
    if slot == MASTER:
        slot = "fp32_param" if form is None else "param"
    return f"optimizer.state.{slot}."


@dataclass(frozen=True)
class Holders:
    """Which global rank writes which box of a logical tensor, each element once."""

    native: Run
    aim: Goal

    def boxes(self, name: str, logical: LogicalTensor) -> Iterator[tuple[Box, int]]:
        """The boxes of a tensor in rank order, with the rank whose file holds them."""
        topology = self.aim.topology
        rule = names.tp_rule(name, self.native.model, self.native.mla_down)
        per_stage = len(run.places(topology))
        stage = self._stage(name)
        seen: set[Box] = set()
        for spot in run.places(topology):
            if rule.expert:
                experts = need(self.native.model.experts, "experts") // topology.ep
                if int(name.partition(".experts.")[2].partition(".")[0]) // experts != spot.ep:
                    continue
            for part in shard(name, logical.extent, rule, topology, spot).parts:
                if part.box not in seen:
                    seen.add(part.box)
                    yield part.box, stage * per_stage + spot.rank

    def _stage(self, name: str) -> int:
        """The pipeline stage that holds a tensor (the first, where several do)."""
        parts = name.split(".")
        pipe = self.aim.pipeline
        if name.startswith("decoder.layers."):
            return pipe.where(int(parts[2]))[0]
        for p, row in enumerate(pipe.chunks):
            for chunk in row:
                if name.startswith("embedding.") and chunk.embedding:
                    return p
                if name.startswith("output_layer.") and chunk.head:
                    return p
                if name.startswith("decoder.final") and chunk.final_norm:
                    return p
                if name.startswith("mtp.layers.") and int(parts[2]) in chunk.mtp:
                    return p
        return 0


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
    grid = run.rng_grid(aim.topology)
    states, fates, losses = run.rng_states(native, aim.topology, grid)
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
        entries = names.legacy_entries(model, chunk, spec=aim.spec)
        for legacy, canonical in entries:
            if canonical is None and not legacy.startswith("output_layer."):
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


def _files(
    native: Run,
    items: Sequence[_Item],
    keys: _Keys,
    objects: Mapping[int, list[ObjectItem]],
    aim: Goal,
) -> tuple[list[Draft], dict[str, object], dict[TensorId, list[Piece]]]:
    """One `.distcp` per rank that holds anything: objects first, then tensors in order."""
    by_rank: dict[int, list[_Item]] = {}
    for item in items:
        by_rank.setdefault(item.rank, []).append(item)
    drafts: list[Draft] = []
    pieces: dict[TensorId, list[Piece]] = {}
    chunks: dict[str, list[dcp.Chunk]] = {}
    stored: dict[str, dcp.Place] = {}
    for rank in sorted(by_rank.keys() | objects.keys()):
        mine = by_rank.get(rank, [])
        others = objects.get(rank, [])
        wanted: list[TensorItem | ObjectItem] = list(others)
        wanted += [_tensor_item(item, keys) for item in mine]
        made = dcp.distcp_file(f"__{rank}_0.distcp", wanted)
        drafts.append(made.draft)
        for entry, spot in zip(others, made.places, strict=False):
            stored[entry.key] = spot
        tail = len(others)
        for item, spot, array in zip(mine, made.places[tail:], made.arrays[tail:], strict=True):
            if array is None:
                continue
            offsets, sizes = _chunk_box(item)
            chunks.setdefault(item.key, []).append(dcp.Chunk(offsets, sizes, spot))
            pieces.setdefault(item.tensor, []).append(place(item.box, array, (0,) * len(sizes)))
    return drafts, {"chunks": chunks, "objects": stored}, pieces


def _chunk_box(item: _Item) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return (*item.index, *item.box.start), (*(1 for _ in item.index), *item.box.shape)


def _tensor_item(item: _Item, keys: _Keys) -> TensorItem:
    offsets, sizes = _chunk_box(item)
    return TensorItem(item.key, offsets, sizes, named(keys.shapes[item.key][2]))


def _metadata(keys: _Keys, places: Mapping[str, object]) -> Draft:
    chunks, stored = places["chunks"], places["objects"]
    assert isinstance(chunks, dict)
    assert isinstance(stored, dict)
    entries = {}
    for key, (_, _, dtype) in keys.shapes.items():
        shape = keys.shape(key)
        entries[key] = TensorEntry(shape, named(dtype), chunks[key])
        held = sum(_volume(c.sizes) for c in chunks[key])
        if held != _volume(shape):
            raise CoverageError(
                f"{key}: {held} of {_volume(shape)} elements have a place; layers or experts are "
                "missing from the source"
            )
    return Draft(".metadata", len(raw := dcp.MetadataDraft(entries, stored).pickled()), [(0, raw)])


def _volume(shape: Sequence[int]) -> int:
    n = 1
    for d in shape:
        n *= d
    return n


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
    if not in_groups:
        step = run.step_tensor(float(run.whole_step(optimizer.step)), f"step/{i}")
        values |= step.values
        inner["state"] = {"common_step": step.obj}
    listed = []
    for g in groups:
        made = {k: v for k, v in g.values.items() if k not in ("params", run.STEP)}
        if in_groups:
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
