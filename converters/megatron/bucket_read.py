"""Reads dp_reshardable optimizers: flat buckets of every model-parallel group, placed by rule."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

from reshard.containers.dcp import Metadata
from reshard.containers.inert import Global
from reshard.dtypes import DType
from reshard.errors import CorruptError, FormatError
from reshard.layout import Piece, StoredArray
from reshard.tensor import EXP_AVG, EXP_AVG_SQ, MASTER, PARAM, LogicalTensor, TensorId

from . import buckets, module_order, objects, optim_groups, tp_rules, zarr_read
from .buckets import Buffer, bucket_key
from .carry import mapping, sequence
from .run import Place, Run, data_parallel, places
from .shards import Shard, shard
from .sizes import LOCAL, TE
from .stages import Chunk

FIELDS = {"param": MASTER, "exp_avg": EXP_AVG, "exp_avg_sq": EXP_AVG_SQ}


@dataclass(frozen=True, slots=True)
class Run1D:
    """Where a shard's flattening begins: element `start` of the 1-D tensor `key`."""

    key: str
    start: int
    shard: Shard


@dataclass(frozen=True, slots=True)
class Group:
    """One model-parallel group of one optimizer: the rank whose shards its buffers hold."""

    chained: int | None
    index: int  # dp_group_idx
    expert: bool
    stage: int
    place: Place


def bucket_tensors(
    folder: Path,
    metadata: Metadata,
    run: Run,
    weights: Mapping[TensorId, LogicalTensor],
) -> tuple[dict[TensorId, LogicalTensor], Callable[[TensorId], Sequence[Piece]]]:
    """The optimizer's tensors in bucket space, and where each one's elements lie.

    Raises FormatError if no layout, or more than one, agrees with the recorded lengths.
    """
    if run.pipeline is None:
        raise FormatError(
            f"{folder}: a dp_reshardable optimizer is laid out by pipeline stage, and the args do "
            "not describe the stages. Give --from tpNppM."
        )
    tensors: dict[TensorId, LogicalTensor] = {}
    runs: dict[TensorId, list[Run1D]] = {}
    dtypes = {t.name: v.dtype for t, v in weights.items() if t.slot == PARAM}
    known = {t.name: v for t, v in weights.items() if t.slot == PARAM}
    expected: set[str] = set()
    stored = {b.field for k in metadata.tensors if (b := bucket_key(k)) is not None}
    # before its first step a run has masters and no moments
    fields = FIELDS if stored & {"exp_avg", "exp_avg_sq"} else {"param": MASTER}
    for group in groups_of(metadata, run):
        lengths = _lengths(folder, metadata, group)
        for i, (label, params) in enumerate(buffers_of(run, group, dtypes)):
            made = _solve(run, group, i, params, label, lengths, known, folder)
            for legacy, canonical in params[0][1]:
                slot = made.slot(legacy)
                part = shard_of(run, group, canonical, known)
                for field_, name in fields.items():
                    key = str(buckets.BucketKey(
                        group.chained, group.index, i, label, slot.bucket, field_
                    ))  # fmt: skip
                    if key not in metadata.tensors:
                        raise CorruptError(f"{folder}: {key} is missing; the save was incomplete")
                    expected.add(key)
                    tensor = TensorId(canonical, name)
                    runs.setdefault(tensor, []).append(Run1D(key, slot.start, part))
                    whole = known[canonical]
                    kind = metadata.tensors[key].dtype
                    tensors[tensor] = LogicalTensor(
                        tensor, whole.shape, kind, whole.padded, whole.stored_name
                    )
    found = {k for k in metadata.tensors if bucket_key(k) is not None}
    if found != expected:
        odd = sorted(found ^ expected)[0]
        raise CorruptError(
            f"{folder}: {odd} is not explained by the run's layout ({len(found)} bucket tensors "
            f"stored, {len(expected)} expected). Two checkpoints may be mixed in this folder."
        )
    return tensors, _Located(folder, metadata, runs).pieces


def groups_of(metadata: Metadata, run: Run) -> Iterator[Group]:
    """The model-parallel groups: dense ones, then those of experts if they have an optimizer."""
    topology = run.topology
    keys = (*metadata.tensors, *metadata.objects)
    chained = any((b := bucket_key(k)) and b.chained is not None for k in keys)
    spots = places(topology)
    for stage in range(topology.pp):
        for spot in spots:
            if spot.dp == 0:
                index = buckets.dense_group(spot.tp, stage, topology.tp)
                yield Group(0 if chained else None, index, False, stage, spot)
    if topology.ep == 1 or run.model.experts is None:
        return
    for stage in range(topology.pp):
        for spot in spots:
            if spot.edp == 0 and any(_has_experts(run, c) for c in _chunks(run, stage)):
                index = buckets.expert_group(
                    spot.etp, spot.ep, stage, topology.expert_tp, topology.ep
                )
                yield Group(1 if chained else None, index, True, stage, spot)


def _chunks(run: Run, stage: int) -> Sequence[Chunk]:
    assert run.pipeline is not None
    return run.pipeline.chunks[stage]


def _has_experts(run: Run, chunk: Chunk) -> bool:
    return any(run.model.moe_layers[layer] for layer in chunk.layers) or bool(
        chunk.mtp and run.model.moe_layers[-1]
    )


_Params = list[tuple[str, str]]  # (legacy name, canonical) in module order


def buffers_of(
    run: Run, group: Group, dtypes: Mapping[str, DType]
) -> Iterator[tuple[str, list[tuple[Chunk, _Params]]]]:
    """(dtypes label, its parameters) of every buffer: one per chunk and parameter dtype."""
    for chunk in _chunks(run, group.stage):
        by_dtype: dict[str, _Params] = {}
        for legacy, canonical in _parameters(run, chunk, group.place.ep, _spec(run)):
            expert = optim_groups.is_expert_parallel(canonical, run.topology.ep)
            if expert != group.expert:
                continue
            if canonical not in dtypes:
                raise CorruptError(
                    f"{canonical}: a parameter of this model, and no weight of it is stored"
                )
            label = f"(torch.{dtypes[canonical].name}, torch.{_grad_dtype(run)})"
            by_dtype.setdefault(label, []).append((legacy, canonical))
        for label, params in by_dtype.items():
            yield label, [(chunk, params)]


def _spec(run: Run) -> str:
    return run.spec if run.spec in (LOCAL, TE) else LOCAL


def _parameters(run: Run, chunk: Chunk, ep_rank: int, spec: str) -> _Params:
    entries = module_order.legacy_entries(
        run.model, chunk, spec=spec, ep=run.topology.ep, ep_rank=ep_rank
    )
    return module_order.parameters(entries)


def _grad_dtype(run: Run) -> str:
    """Gradients are reduced in fp32 for bf16 runs unless args say otherwise."""
    if run.args.get("grad_reduce_in_bf16"):
        return "bfloat16"
    if run.args.get("accumulate_allreduce_grads_in_fp32") is False and run.args.get("fp16"):
        return "float16"
    return "float32"


def shard_of(run: Run, group: Group, canonical: str, known: Mapping[str, LogicalTensor]) -> Shard:
    rule = tp_rules.tp_rule(canonical, run.model, run.mla_down)
    return shard(canonical, known[canonical].extent, rule, run.topology, group.place)


def _lengths(
    folder: Path, metadata: Metadata, group: Group
) -> dict[str, list[Mapping[str, Sequence[int]]]]:
    """Recorded bucket lengths, padded and not, of each buffer of a group."""
    out: dict[str, list[Mapping[str, Sequence[int]]]] = {}
    for field_ in ("per_bucket_numel", "per_bucket_numel_unpadded"):
        key = f"{buckets.BucketKey(group.chained, group.index, None, '', None, field_)}/shard_0_1"
        place = metadata.objects.get(key)
        if place is None:
            raise CorruptError(
                f"{folder}: {key} is missing: a rank's save is incomplete, or args and files are "
                "of two runs"
            )
        rows = sequence(objects.load(folder, place, key)[1], key)
        out[field_] = [_by_label(mapping(row, key), key) for row in rows]
    return out


def _by_label(row: Mapping[object, object], key: str) -> dict[str, Sequence[int]]:
    out: dict[str, Sequence[int]] = {}
    for kinds, numels in row.items():
        values = sequence(numels, key)
        if not all(isinstance(n, int) and n >= 0 for n in values):
            raise CorruptError(f"{key}: bucket lengths are {values}")
        out[label_of(kinds, key)] = [n for n in values if isinstance(n, int)]
    return out


def label_of(kinds: object, key: str) -> str:
    """A buffer's (parameter, gradient) dtypes as keys spell them."""
    pair = sequence(kinds, key)
    return f"({', '.join(k.path if isinstance(k, Global) else str(k) for k in pair)})"


def _solve(
    run: Run,
    group: Group,
    i: int,
    params: list[tuple[Chunk, _Params]],
    label: str,
    lengths: Mapping[str, list[Mapping[str, Sequence[int]]]],
    known: Mapping[str, LogicalTensor],
    folder: Path,
) -> Buffer:
    unpadded, padded = lengths["per_bucket_numel_unpadded"], lengths["per_bucket_numel"]
    if i >= len(unpadded) or label not in unpadded[i]:
        raise CorruptError(f"{folder}: dp_group_idx_{group.index} records no buffer {i} of {label}")
    orders, own = orders_of(run, group, params, known)
    return buckets.solve(
        orders,
        dp=sharers(run, group),
        own_bucket=own,
        numels_unpadded=unpadded[i][label],
        numels=padded[i][label],
    )


def orders_of(
    run: Run,
    group: Group,
    params: list[tuple[Chunk, _Params]],
    known: Mapping[str, LogicalTensor],
) -> tuple[dict[str, list[tuple[str, int]]], list[str]]:
    """A buffer's parameters with their sizes in module order, and those with an own bucket."""
    chunk, mine = params[0]
    sized = [(a, prod(shard_of(run, group, c, known).shape)) for a, c in mine]
    own = module_order.shared_embedding(run.model, chunk, run.topology.pp)
    return {f"{_spec(run)} spec": sized}, [own] if own else []


def sharers(run: Run, group: Group) -> int:
    """The ranks that share a group's buffers: DP x CP, of experts their own."""
    if group.expert:
        return len(places(run.topology)) // (run.topology.expert_tp * run.topology.ep)
    return run.topology.cp * data_parallel(run.topology)


@dataclass
class _Located:
    """Pieces of bucket-space tensors, a bucket's chunks located once."""

    folder: Path
    metadata: Metadata
    runs: Mapping[TensorId, list[Run1D]]
    _keys: dict[str, tuple[list[int], list[StoredArray]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._blobs = zarr_read.blobs(self.folder, self.metadata)

    def pieces(self, tensor: TensorId) -> Sequence[Piece]:
        """All pieces of a tensor, of every group that holds some of it."""
        out: list[Piece] = []
        for run in self.runs[tensor]:
            starts, arrays = self._chunks(run.key)
            stop = run.start + prod(run.shard.shape)
            at = max(0, bisect_right(starts, run.start) - 1)
            while at < len(starts) and starts[at] < stop:
                out += run.shard.flat_pieces(run.start, starts[at], arrays[at])
                at += 1
        return out

    def _chunks(self, key: str) -> tuple[list[int], list[StoredArray]]:
        found = self._keys.get(key)
        if found is None:
            entry = self.metadata.tensors[key]
            chunks = sorted(entry.chunks, key=lambda c: c.offsets)
            arrays = self._blobs.arrays((key, c, entry.dtype) for c in chunks)
            found = self._keys[key] = ([c.offsets[0] for c in chunks], arrays)
        return found
