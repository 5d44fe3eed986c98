"""Reads dp_zero_gather_scatter optimizers: the buffers of distrib_optim.pt in one object a group.

Its keys are `[chained_{k}.]optimizer.distributed.dp_group_idx_{g}.param_state`, objects whose
tensors are whole buffers; the layout inside them is that of distrib_optim.pt (buckets.py).
Source: distrib_optimizer.py sharded_param_state_dp_zero, get_parameter_state_dp_zero
@ core_v0.14.0; fixtures made-v014-gpt-tied-pp2dp2-dpzero, made-v014-moe-pp2ep2-dpzero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from reshard.containers.dcp import Metadata
from reshard.containers.inert import TensorRef
from reshard.containers.torchfile import TorchFile
from reshard.dtypes import FLOAT32
from reshard.errors import CorruptError, FormatError
from reshard.layout import Piece, StoredArray
from reshard.tensor import PARAM, LogicalTensor, TensorId

from . import buckets, objects, run
from .bucket_read import (
    FIELDS,
    Group,
    buffers_of,
    groups_of,
    label_of,
    orders_of,
    shard_of,
    sharers,
)
from .buckets import BucketKey, Buffer, bucket_key
from .carry import mapping, plain
from .run import Run
from .shards import Shard
from .stages import Chunk

_COALESCED, _NUMEL, _STATE = "buckets_coalesced", "numel_unpadded", "param_state"


def is_dp_zero(metadata: Metadata) -> bool:
    """Whether a folder holds an optimizer of this form."""
    return any((b := bucket_key(k)) and b.field == _STATE for k in metadata.objects)


@dataclass
class Located:
    """The optimizer's tensors, and where the shards of each begin in which buffer."""

    tensors: dict[TensorId, LogicalTensor] = field(default_factory=dict)
    runs: dict[TensorId, list[tuple[StoredArray, int, Shard]]] = field(default_factory=dict)

    def pieces(self, tensor: TensorId) -> Sequence[Piece]:
        """All pieces of a tensor, of every group that holds some of it."""
        return [
            piece
            for array, start, part in self.runs[tensor]
            for piece in part.flat_pieces(start, 0, array)
        ]


def object_tensors(
    folder: Path, metadata: Metadata, run: Run, weights: Mapping[TensorId, LogicalTensor]
) -> Located:
    """The optimizer's tensors in the groups' objects.

    Raises FormatError if no layout, or more than one, agrees with the recorded lengths.
    """
    if run.pipeline is None:
        raise FormatError(
            f"{folder}: a dp_zero_gather_scatter optimizer is laid out by pipeline stage, and the "
            "args do not describe the stages. Give --from tpNppM."
        )
    known = {t.name: v for t, v in weights.items() if t.slot == PARAM}
    dtypes = {name: v.dtype for name, v in known.items()}
    out = Located()
    for group in groups_of(metadata, run):
        file, state = _state(folder, metadata, group)
        wanted = list(buffers_of(run, group, dtypes))
        if set(state) - {_COALESCED} != set(range(len(wanted))):
            raise CorruptError(
                f"{_key(group)} holds the buffers {sorted(map(str, state))}; the model makes "
                f"{len(wanted)}"
            )
        for i, (label, params) in enumerate(wanted):
            held = _buffer(state[i], label, f"{_key(group)}, buffer {i}")
            size = _bucket_size(run, group, params[0][0], known)
            made = _solved(run, group, params, known, size, held)
            arrays = _arrays(file, held, made, f"{_key(group)}, buffer {i}")
            for legacy, canonical in params[0][1]:
                part = shard_of(run, group, canonical, known)
                for key, array in arrays.items():
                    tensor = TensorId(canonical, FIELDS[key])
                    whole = known[canonical]
                    out.runs.setdefault(tensor, []).append((array, made.slot(legacy).flat, part))
                    out.tensors[tensor] = LogicalTensor(
                        tensor, whole.shape, FLOAT32, whole.padded, whole.stored_name
                    )
    return out


def _key(group: Group) -> str:
    return f"{BucketKey(group.chained, group.index, None, '', None, _STATE)}/shard_0_1"


def _state(
    folder: Path, metadata: Metadata, group: Group
) -> tuple[TorchFile, Mapping[object, object]]:
    """The object of a group, with the places of its buffers."""
    key = _key(group)
    place = metadata.objects.get(key)
    if place is None:
        raise CorruptError(
            f"{folder}: {key} is missing: a rank's save is incomplete, or args and files are of "
            "two runs"
        )
    if place.transform:
        raise FormatError(f"{folder}: {key} is compressed; such an optimizer is not read")
    file, found = objects.load(folder, place, key)
    state = mapping(found, key)
    if state.get(_COALESCED) is not True:
        raise FormatError(
            f"{folder}: {key}: an older form (buckets are not coalesced, before core 0.6) is not "
            "read. Load and save it with a newer Megatron, or convert with --weights-only."
        )
    return file, state


def _buffer(found: object, label: str, where: str) -> Mapping[object, object]:
    by_dtype = mapping(found, where)
    if len(by_dtype) != 1:
        raise FormatError(f"{where} has {len(by_dtype)} dtypes, not one")
    ((kinds, content),) = by_dtype.items()
    if label_of(kinds, where) != label:
        raise CorruptError(f"{where} is of {label_of(kinds, where)}, the weights make it {label}")
    return mapping(content, where)


def _bucket_size(
    native: Run, group: Group, chunk: Chunk, known: Mapping[str, LogicalTensor]
) -> int | None:
    """What the args say of a chunk's bucket size."""
    assert native.pipeline is not None
    dtypes = {name: v.dtype for name, v in known.items()}
    numel = 0  # of all chunks and of both optimizers: --ddp-num-buckets divides them
    for expert in (False, True):
        for _, params in buffers_of(native, replace(group, expert=expert), dtypes):
            orders, _ = orders_of(native, group, params, known)
            numel += sum(n for order in orders.values() for _, n in order)
    at = native.pipeline.chunks[group.stage].index(chunk)
    dp = run.data_parallel(native.topology)
    return buckets.bucket_size_of_args(native.args, group.stage, at, dp, numel)


def _solved(
    native: Run,
    group: Group,
    params: list[tuple[Chunk, list[tuple[str, str]]]],
    known: Mapping[str, LogicalTensor],
    size: int | None,
    held: Mapping[object, object],
) -> Buffer:
    """Where each parameter lies, by what the buffer's length tells of the bucket size."""
    length = held.get(_NUMEL)
    if not isinstance(length, int):
        raise CorruptError(f"{_key(group)} does not say {_NUMEL}")
    orders, own = orders_of(native, group, params, known)
    try:
        return buckets.solve(
            orders,
            dp=sharers(native, group),
            own_bucket=own,
            numel_unpadded=length,
            bucket_sizes=[size],
        )
    except FormatError as error:
        raise FormatError(f"{_key(group)}: {error}") from None


def _arrays(
    file: TorchFile, held: Mapping[object, object], made: Buffer, where: str
) -> dict[str, StoredArray]:
    """The buffer's masters and moments."""
    out: dict[str, StoredArray] = {}
    for key, ref in held.items():
        if key == _NUMEL:
            continue
        if (
            key not in FIELDS
            or not isinstance(ref, TensorRef)
            or ref.shape != (made.numel_unpadded,)
            or ref.dtype != FLOAT32
        ):
            raise FormatError(f"{where}: {key} is {plain(ref)}, which is not read")
        out[str(key)] = file.array(ref, f"{where}: {key}")
    if out.keys() != FIELDS.keys():
        raise CorruptError(f"{where} holds {sorted(out)}, not {sorted(FIELDS)}")
    return out
