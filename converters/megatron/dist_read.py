"""Reads torch_dist: stacked and per-layer keys, the common state, every optimizer form."""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from reshard.box import Box
from reshard.checkpoint import Checkpoint
from reshard.containers import dcp, torchfile
from reshard.containers.carried import Carried, carry
from reshard.containers.dcp import Metadata, TensorEntry
from reshard.containers.inert import TensorRef
from reshard.dtypes import DType
from reshard.errors import CorruptError, FormatError, ReshardError
from reshard.format import OpenOptions
from reshard.layout import Layout, Piece, StoredArray, place
from reshard.tensor import EXP_AVG, EXP_AVG_SQ, MASTER, PARAM, LogicalTensor, TensorId
from reshard.topology import Topology, topology

from . import flattened_read, names, nemo, objects, old_args, precision_aware, run, zarr_read
from .bucket_read import bucket_tensors
from .buckets import bucket_key
from .carry import fields_of, mapping, plain, scalar, sequence
from .dp_zero_read import is_dp_zero, object_tensors
from .flattened_read import Grid
from .recognise import backend
from .run import Optimizer, Options, Run
from .sizes import LEGACY_GROUPED, LOCAL, Sizes, sizes
from .stages import Pipeline, pipeline_of_args

NAME = "megatron"
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(\w+)\.(.+)")
#: How the optimizer's entries are called on disk. DistributedOptimizer calls the fp32 master
#: `param`, Float16Optimizer `fp32_param`. Source: fixtures a-tp4pp2, b-tp2pp2dp2.
_SLOTS = {"exp_avg": EXP_AVG, "exp_avg_sq": EXP_AVG_SQ, "fp32_param": MASTER, "param": MASTER}
_OBJECT = re.compile(r"(.+)/shard_([\d.]+)_([\d.]+)")
_VOCAB = ("embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias")
#: How a DistributedOptimizer was saved. fully_sharded_bucket_space is the older name of
#: dp_reshardable. Source: distrib_optimizer.py sharded_state_dict @ core_v0.14.0, core_v0.16.1.
_FORMS = (
    "fully_reshardable",
    "dp_reshardable",
    "fully_sharded_model_space",
    "fully_sharded_bucket_space",
    "dp_zero_gather_scatter",
)
PiecesOf = Callable[[TensorId], Sequence[Piece]]
_KNOWN = ("args", "optimizer", "content_metadata", *run.KEPT)


@dataclass(frozen=True, slots=True)
class Source:
    """Where one logical tensor's chunks are: a stored key and the index of its leading axes."""

    key: str
    index: tuple[int, ...]
    grid: Grid | None = None  # of flattened shards


@dataclass(frozen=True, slots=True)
class _Located:
    """The chunks of a key with their arrays: `rows` are those of each index of leading axes."""

    entry: TensorEntry
    arrays: Sequence[StoredArray]
    rows: Mapping[tuple[int, ...], array[int]]

    def pieces(self, index: tuple[int, ...], made: Grid | None) -> list[Piece]:
        """The pieces of one tensor of the key, made when asked for."""
        out: list[Piece] = []
        axes = len(index)
        for row in self.rows.get(index, ()):
            chunk, held = self.entry.chunks[row], self.arrays[row]
            if made is not None:
                out += flattened_read.pieces(made, index, chunk, held)
                continue
            at = (*(i - a for i, a in zip(index, chunk.offsets, strict=False)),
                  *(0 for _ in chunk.sizes[axes:]))  # fmt: skip
            out.append(place(Box.at(chunk.offsets[axes:], chunk.sizes[axes:]), held, at))
        return out


@dataclass
class Chunks:
    """Model-space tensors; their chunks are located key by key on request."""

    folder: Path
    metadata: Metadata
    tensors: Mapping[TensorId, LogicalTensor]
    sources: Mapping[TensorId, Source]
    _keys: dict[str, _Located] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._blobs = zarr_read.blobs(self.folder, self.metadata)

    def pieces(self, tensor: TensorId) -> Sequence[Piece]:
        """All pieces of a tensor. A stacked key is located as a whole, once."""
        source = self.sources[tensor]
        found = self._keys.get(source.key)
        if found is None:
            if len(self._keys) > 64:
                self._keys.clear()
            found = self._keys[source.key] = self._locate(source)
        return found.pieces(source.index, source.grid)

    def _locate(self, source: Source) -> _Located:
        entry, axes = self.metadata.tensors[source.key], len(source.index)
        rows: dict[tuple[int, ...], array[int]] = {}
        for row, chunk in enumerate(entry.chunks):
            for index in _indices(Box.at(chunk.offsets[:axes], chunk.sizes[:axes])):
                rows.setdefault(index, array("I")).append(row)
        return _Located(entry, self._blobs.located(source.key, entry), rows)


def _indices(box: Box) -> Iterable[tuple[int, ...]]:
    out: list[tuple[int, ...]] = [()]
    for a, b in zip(box.start, box.stop, strict=True):
        out = [(*p, i) for p in out for i in range(a, b)]
    return out


def open_dist(folder: Path, options: OpenOptions) -> Checkpoint:
    """Read a torch_dist or zarr checkpoint's headers.

    Raises FormatError for a form that is not read, CorruptError for files that contradict
    themselves.
    """
    read_metadata = {"zarr": zarr_read.read_metadata}.get(str(backend(folder)), dcp.read_metadata)
    metadata = read_metadata(folder)
    common = _common(folder, metadata)
    root = mapping(common.obj, f"{folder}: the common state")
    found = fields_of(root.get("args", {}), str(folder)) if root.get("args") is not None else {}
    if nemo.is_lightning(root):
        root, found = nemo.lightning(root), {**nemo.context_args(folder), **found}
    args = old_args.given(found, options)
    model = sizes(args)
    if options.vocab_size is not None:
        model = replace(model, vocab=options.vocab_size)
    _check_form(folder, root.get("content_metadata"))
    read = Chunks(folder, metadata, *_tensors(metadata, model))
    native = _native(read, common, root, args, model, options)
    tensors, pieces_of, problems = _whole(read, native, options)
    groups, steps = run.param_groups(native, tensors)
    iteration = root.get("iteration")
    return Checkpoint(
        path=folder,
        format=NAME,
        version=_version(metadata, root),
        topology=native.topology,
        layout=Layout(tensors, pieces_of, "megatron"),
        files=_files(folder, metadata),
        groups=groups if native.optimizer is not None else None,
        steps=steps,
        iteration=iteration if isinstance(iteration, int) else None,
        extras=run.extras(native),
        rows_left=run.rows_left(native),
        problems=problems,
        native=native,
    )


def _native(
    read: Chunks,
    common: Carried,
    root: Mapping[object, object],
    args: Mapping[str, object],
    model: Sizes,
    options: OpenOptions,
) -> Run:
    """Everything beside the tensors; the optimizer only if its tensors are wanted."""
    folder, metadata = read.folder, read.metadata
    degrees = _topology(args, options)
    unread = tuple(str(k) for k in root if k not in _KNOWN)
    return Run(
        args=args,
        model=model,
        topology=degrees,
        pipeline=_pipeline(args, degrees),
        common={k: root[k] for k in run.KEPT if k in root},
        optimizer=None if options.weights_only else _optimizer(common, root, folder, metadata),
        spec=model.spec,
        style=_style(read.sources, root),
        extra_states=_extra_states(folder, metadata, model.spec),
        rng=_rng(folder, metadata),
        rng_grid=_rng_grid(metadata),
        mla_down=_mla_down(metadata, read.sources),
        unread=unread + _unread(metadata, options.weights_only),
    )


def _whole(
    read: Chunks, native: Run, options: OpenOptions
) -> tuple[Mapping[TensorId, LogicalTensor], PiecesOf, tuple[str, ...]]:
    """Model-space tensors, those of flat buffers, and masters rebuilt; and what is to be said."""
    tensors: Mapping[TensorId, LogicalTensor] = read.tensors
    pieces_of: PiecesOf = read.pieces
    if options.weights_only:
        return tensors, pieces_of, ()
    flat = _flat_optimizer(read.folder, read.metadata, native, tensors)
    if flat is not None:
        more, flat_pieces = flat
        tensors = {**tensors, **more}

        def pieces_of(tensor: TensorId) -> Sequence[Piece]:
            return read.pieces(tensor) if tensor in read.sources else flat_pieces(tensor)

    return precision_aware.rebuilt(read.folder, tensors, pieces_of, native.args)


def _style(sources: Mapping[TensorId, Source], root: Mapping[object, object]) -> names.Style:
    """How the model's keys are spelled; a NeMo prefix goes, as what is written is Megatron-LM's."""
    style = names.style_of_keys(s.key for t, s in sources.items() if t.slot == PARAM)
    return replace(style, prefix="") if nemo.is_lightning(root) else style


def _flat_optimizer(
    folder: Path, metadata: Metadata, native: Run, tensors: Mapping[TensorId, LogicalTensor]
) -> tuple[dict[TensorId, LogicalTensor], Callable[[TensorId], Sequence[Piece]]] | None:
    """The optimizer's tensors and their pieces, where they lie in flat buffers."""
    if any(bucket_key(k) for k in metadata.tensors):
        return bucket_tensors(folder, metadata, native, tensors)
    if is_dp_zero(metadata):
        located = object_tensors(folder, metadata, native, tensors)
        return located.tensors, located.pieces
    return None


def _common(folder: Path, metadata: Metadata) -> Carried:
    """The common dict: common.pt up to core 0.18, an object among the shards from 0.19 on."""
    path = folder / "common.pt"
    if path.exists():
        file = torchfile.load(path, "common.pt")
        return carry(file, file.root, "common/")
    found = metadata.objects.get("common_state/shard_0_1")
    if found is None:
        raise CorruptError(
            f"{folder}: neither common.pt nor a common_state object is there; the checkpoint is "
            "incomplete. Copy it again."
        )
    file = dcp.load_object(folder, found, "common_state")
    listed = sequence(file.root, f"{folder}: common_state")
    if len(listed) != 1:
        raise CorruptError(f"{folder}: common_state holds {len(listed)} objects, not one")
    return carry(file, listed[0], "common/")


def _topology(args: Mapping[str, object], options: OpenOptions) -> Topology:
    """What the args say, checked against --from."""
    said: dict[str, int] = {}
    for degree, field_ in (
        ("tp", "tensor_model_parallel_size"),
        ("pp", "pipeline_model_parallel_size"),
        ("vpp", "virtual_pipeline_model_parallel_size"),
        ("ep", "expert_model_parallel_size"),
        ("etp", "expert_tensor_parallel_size"),
        ("cp", "context_parallel_size"),
        ("dp", "data_parallel_size"),
    ):
        value = args.get(field_)
        if isinstance(value, int) and not isinstance(value, bool):
            said[degree] = value
    given = {k: v for k, v in options.given.degrees.items() if k != "zero"}
    for degree, n in given.items():
        if said.get(degree, n) != n:
            raise FormatError(
                f"--from says {degree}={n}, the checkpoint's args say {degree}={said[degree]}"
            )
    return topology({**said, **given})


def _pipeline(args: Mapping[str, object], place_: Topology) -> Pipeline | None:
    if args.get("num_layers") is None and args.get("encoder_num_layers") is None:
        return None
    try:
        return pipeline_of_args({**args, "pipeline_model_parallel_size": place_.pp})
    except ReshardError:
        return None  # torch_dist is topology-free: the split is only shown


def _check_form(folder: Path, content: object) -> None:
    form = content.get("distrib_optim_sharding_type") if isinstance(content, Mapping) else None
    if form is not None and form not in _FORMS:
        raise FormatError(f"{folder}: the optimizer form {form!r} is not read")


def _tensors(
    metadata: Metadata, model: Sizes
) -> tuple[dict[TensorId, LogicalTensor], dict[TensorId, Source]]:
    """Every model-space tensor: one per layer and expert."""
    tensors: dict[TensorId, LogicalTensor] = {}
    sources: dict[TensorId, Source] = {}
    for key, entry in metadata.tensors.items():
        if bucket_key(key) is not None:
            continue
        m = _STATE.fullmatch(key)
        slot, bare = (_SLOTS.get(m[1], m[1]), m[2]) if m else (PARAM, key)
        found = names.from_dist(bare)
        made = None if slot == PARAM else _flattened(metadata, key, bare, found, model)
        shape = entry.shape[found.axes :] if made is None else made.shape
        lead = Box.whole(entry.shape[: found.axes])
        for index in _indices(lead):
            name = found.canonical(index)
            tensor = TensorId(name, slot)
            if tensor in tensors:
                raise CorruptError(f"{tensor} is stored under {sources[tensor].key} and {key}")
            tensors[tensor] = _logical(tensor, shape, entry.dtype, model, bare, index)
            sources[tensor] = Source(key, index, made)
    return tensors, sources


def _flattened(
    metadata: Metadata, key: str, bare: str, name: names.DistName, model: Sizes
) -> Grid | None:
    """The grid of an optimizer key that is stored flattened, None if it lies as its weight does."""
    stored = metadata.tensors[key].shape
    weight = metadata.tensors[bare].shape if bare in metadata.tensors else None
    original = flattened_read.original_shape(metadata, key)
    if stored == weight or (weight is None and original is None):
        return None
    grouped = model.experts_form == LEGACY_GROUPED and ".mlp.experts." in name.template
    return flattened_read.grid(key, stored, name.axes, weight, original, grouped)


def _logical(
    tensor: TensorId,
    shape: tuple[int, ...],
    dtype: DType,
    model: Sizes,
    key: str,
    index: tuple[int, ...],
) -> LogicalTensor:
    true, padded = true_shape(tensor.name, shape, model)
    return LogicalTensor(tensor, true, dtype, padded, _own_name(key, index, tensor.name))


def true_shape(
    name: str, shape: tuple[int, ...], model: Sizes
) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """(true shape, padded shape or None) of a stored tensor."""
    if name not in _VOCAB or model.vocab is None or shape[0] == model.vocab:
        return shape, None
    if shape[0] < model.vocab:
        raise FormatError(
            f"{name}: {shape[0]} rows are stored, the true vocabulary is said to be {model.vocab}. "
            "Give the true one with --vocab-size."
        )
    return (model.vocab, *shape[1:]), shape


def _own_name(key: str, index: Sequence[int], canonical: str) -> str | None:
    """The stored key with the index of its leading axes put in."""
    at = list(index)
    own = key
    if at and re.search(r"(?:decoder|mtp)\.layers\.(?!\d)", own):
        own = re.sub(r"((?:decoder|mtp)\.layers\.)", rf"\g<1>{at.pop(0)}.", own, count=1)
    if at:
        own = own.replace("experts.experts.", f"experts.experts.{at.pop(0)}.", 1)
    return own if own != canonical else None


def _optimizer(
    common: Carried, root: Mapping[object, object], folder: Path, metadata: Metadata
) -> Optimizer | None:
    """The optimizers' options and step: in the common state, or in the buckets' objects."""
    found = root.get("optimizer")
    bucket_objects = _of_buckets(metadata, "optimizer")
    if bucket_objects:
        made = _bucket_optimizer(folder, bucket_objects)
        return replace(made, scaler=_bucket_scaler(folder, metadata))
    if found is None:
        return None
    listed = _chain(mapping(found, f"{folder}: optimizer"))
    groups: list[Options] = []
    steps: list[float | None] = []
    in_groups = False
    for member in listed:
        inner = member  # FP32Optimizer's state is that of Adam itself; fixture made-fp32-tp2
        if "param_groups" not in member:
            inner = mapping(member.get("optimizer"), f"{folder}: optimizer.optimizer")
        for group in sequence(inner.get("param_groups"), f"{folder}: param_groups"):
            values = {
                str(k): v
                for k, v in mapping(group, f"{folder}: a param group").items()
                if k != "params"
            }
            groups.append(Options(values))
            if run.STEP in values:
                in_groups = True
                steps.append(scalar(common, values[run.STEP]))
        state = inner.get("state")
        if isinstance(state, Mapping) and "common_step" in state:
            steps.append(scalar(common, state["common_step"]))
    scaler = next((m["grad_scaler"] for m in listed if m.get("grad_scaler") is not None), None)
    return Optimizer(
        tuple(groups),
        run.common_step(steps),
        in_groups,
        any("param_state_sharding_type" in m for m in listed),
        None if scaler is None else Carried(scaler, common.values),
        chained=len(listed) > 1,
    )


def _chain(found: Mapping[object, object]) -> list[Mapping[object, object]]:
    """The members of a chained optimizer (keys 0, 1, …), or the only one."""
    if found.keys() & {"optimizer", "param_state_sharding_type", "param_groups"}:
        return [found]
    return [v for k, v in sorted(found.items(), key=lambda i: str(i[0])) if isinstance(v, Mapping)]


def _of_buckets(metadata: Metadata, field: str) -> dict[str, dcp.Place]:
    """An object of every data-parallel group's optimizer, by its key."""
    return {k: e for k, e in metadata.objects.items() if (b := bucket_key(k)) and b.field == field}


def _bucket_scaler(folder: Path, metadata: Metadata) -> Carried | None:
    """The fp16 loss scaler beside the groups' options, equal in each.

    Source: distrib_optimizer.py state_dict, sharded_state_dict @ core_v0.16.1.
    """
    for key, at in sorted(_of_buckets(metadata, "grad_scaler").items()):
        return carry(*objects.load(folder, at, key), "scaler/")
    return None


def _bucket_optimizer(folder: Path, places: Mapping[str, dcp.Place]) -> Optimizer:
    """Options of a dp_reshardable optimizer: every model-parallel group has its own copy."""
    first: dict[int | None, tuple[Options, ...]] = {}
    steps: list[float | None] = []
    for key in sorted(places):
        found = bucket_key(key)
        assert found is not None
        state = mapping(objects.load(folder, places[key], key)[1], key)
        options = tuple(
            Options({str(k): v for k, v in mapping(g, key).items() if k != "params"})
            for g in sequence(state.get("param_groups"), key)
        )
        for o in options:
            step = o.values.get(run.STEP)
            steps.append(float(step) if isinstance(step, (int, float)) else None)
        if len(options) > len(first.get(found.chained, ())):
            first[found.chained] = options
    groups = [o for _, options in sorted(first.items(), key=lambda i: i[0] or 0) for o in options]
    return Optimizer(tuple(groups), run.common_step(steps), True, True, chained=len(first) > 1)


def _extra_states(folder: Path, metadata: Metadata, spec: str | None) -> dict[str, object]:
    """`_extra_state` objects by key: None for one without content, else a few words on it.

    The local spec has none of its own; Transformer Engine keeps fp8 scales there.
    """
    out: dict[str, object] = {}
    for key, place_ in metadata.objects.items():
        m = _OBJECT.fullmatch(key)
        if m is None or not m[1].endswith(names.EXTRA_STATE):
            continue
        found = None if spec == LOCAL else dcp.read_object(folder, place_, key)
        out[key] = None if _is_empty(found) else str(plain(found))[:80]
    return out


def _is_empty(state: object) -> bool:
    """Whether an extra state says nothing: None, or a tensor without elements."""
    if isinstance(state, (list, tuple)):
        return all(_is_empty(s) for s in state)
    return state is None or (isinstance(state, TensorRef) and 0 in state.shape)


def _rng(folder: Path, metadata: Metadata) -> dict[tuple[int, ...], Carried]:
    out: dict[tuple[int, ...], Carried] = {}
    for key, entry in metadata.objects.items():
        m = _OBJECT.fullmatch(key)
        if m is None or m[1] != "rng_state":
            continue
        file, states = objects.load(folder, entry, key)
        position = tuple(int(n) for n in m[2].split("."))
        out[position] = carry(file, states, f"rng/{m[2]}/")
    return out


def _rng_grid(metadata: Metadata) -> tuple[int, ...]:
    for key in metadata.objects:
        m = _OBJECT.fullmatch(key)
        if m is not None and m[1] == "rng_state":
            return tuple(int(n) for n in m[3].split("."))
    return ()


def _mla_down(metadata: Metadata, sources: Mapping[TensorId, Source]) -> bool | None:
    """Whether MLA's down projections were cut: their chunks say so; None if nothing does."""
    for tensor, source in sources.items():
        if tensor.slot == PARAM and "linear_kv_down_proj" in tensor.name:
            entry = metadata.tensors[source.key]
            axes = len(source.index)
            cut = any(c.sizes[axes] != entry.shape[axes] for c in entry.chunks)
            return True if cut else None
    return None


def _unread(metadata: Metadata, weights_only: bool) -> tuple[str, ...]:
    """Objects that have no place in a target, folded by name."""
    seen: dict[str, int] = {}
    for key in metadata.objects:
        m = _OBJECT.fullmatch(key)
        stem = m[1] if m else key
        if stem in ("rng_state", "common_state") or stem.endswith(names.EXTRA_STATE):
            continue
        if bucket_key(key) is not None:
            stem = "optimizer.distributed"
            if not weights_only:
                continue
        seen[stem] = seen.get(stem, 0) + 1
    return tuple(sorted(seen))


def _version(metadata: Metadata, root: Mapping[object, object]) -> str:
    home = "common_state" if "common_state/shard_0_1" in metadata.objects else "common.pt"
    backend = metadata.version if metadata.version == "zarr" else "torch_dist"
    return f"{backend}, {home}, checkpoint_version {root.get('checkpoint_version')}"


def _files(folder: Path, metadata: Metadata) -> tuple[str, ...]:
    held = {c.place.file for e in metadata.tensors.values() for c in e.chunks}
    held |= {e.file for e in metadata.objects.values()}
    known = {".metadata", "metadata.json", "common.pt"}
    return tuple(sorted(held | {k for k in known if (folder / k).exists()}))
