"""Where a rank's shard of a DTensor or ShardedTensor lies in the whole tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from reshard.box import Box
from reshard.containers.inert import Record, TensorRef
from reshard.errors import CorruptError, FormatError

_DTENSOR = ("torch.distributed.tensor", "torch.distributed._tensor")


@dataclass(frozen=True, slots=True)
class Sharded:
    """A whole tensor's shape, and the boxes of it that one rank's pickle holds."""

    shape: tuple[int, ...]
    parts: tuple[tuple[Box, TensorRef], ...]


def sharded(value: object, where: str) -> Sharded | None:
    """The shards of a DTensor or ShardedTensor as its pickle describes it; None for another value.

    Raises FormatError for a placement that is not read, CorruptError where shapes disagree.
    """
    if not isinstance(value, Record):
        return None
    found = _subclass(value)
    if found is None:
        return None
    kind, state = found
    if kind.endswith(".ShardedTensor"):
        return _sharded_tensor(state, where)
    if kind.endswith(".DTensor") and kind.startswith(_DTENSOR):
        return _dtensor(state, where)
    return None


def _subclass(value: Record) -> tuple[str, object] | None:
    """Type and state of a tensor subclass. Source: torch 2.13 _tensor.py, _rebuild_from_type_v2."""
    if value.type.path != "torch._tensor._rebuild_from_type_v2" or len(value.args) != 4:
        return None
    kind = getattr(value.args[1], "path", "")
    return (kind, value.args[3]) if isinstance(kind, str) else None


def _fields(state: object) -> dict[str, object]:
    """The attributes that a pickled state sets."""
    if isinstance(state, Record):
        return {str(k): v for k, v in state.fields.items()}
    if isinstance(state, dict):
        return {str(k): v for k, v in state.items()}
    if isinstance(state, tuple) and len(state) == 2:
        return {**_fields(state[0]), **_fields(state[1])}
    return {}


# ---------------------------------------------------------------------- ShardedTensor


def _sharded_tensor(state: object, where: str) -> Sharded:
    """FSDP1's: every shard says its offsets.

    Source: torch 2.13 _shard/sharded_tensor/api.py, __getstate__; fixture fsdp1_w2_sharded_orig.
    """
    if not isinstance(state, tuple) or len(state) < 2 or not isinstance(state[0], list):
        raise CorruptError(f"{where}: a ShardedTensor of another form than torch writes")
    shape = _sizes(_fields(state[1]).get("size"), where)
    parts: list[tuple[Box, TensorRef]] = []
    for shard in state[0]:
        held = _fields(shard)
        meta = _fields(held.get("metadata"))
        box = Box.at(
            _sizes(meta.get("shard_offsets"), where), _sizes(meta.get("shard_sizes"), where)
        )
        ref = held.get("tensor")
        parts += _part(box, ref, shape, where)
    return Sharded(shape, tuple(parts))


def _sizes(value: object, where: str) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or not all(type(n) is int and n >= 0 for n in value):
        raise CorruptError(f"{where}: {value!r:.60} where a size or offset belongs")
    return tuple(value)


def _part(box: Box, ref: object, shape: tuple[int, ...], where: str) -> list[tuple[Box, TensorRef]]:
    if not isinstance(ref, TensorRef):
        raise CorruptError(f"{where}: its shard is {ref!r:.60}, not a tensor")
    if ref.shape != box.shape or len(shape) != len(box.start) or box not in Box.whole(shape):
        raise CorruptError(
            f"{where}: its shard has shape {list(ref.shape)}; {box} of {list(shape)} was expected"
        )
    return [(box, ref)] if box.numel else []


# ---------------------------------------------------------------------- DTensor


def _dtensor(state: object, where: str) -> Sharded:
    """FSDP2's, HSDP's and TP's: the mesh, this rank's coordinate in it, and a placement per axis.

    Source: torch 2.13 distributed/tensor/_dtensor_spec.py; fixture verl_fsdp2_w4.
    """
    fields = _fields(state)
    spec = _fields(fields.get("_spec"))
    meta = spec.get("tensor_meta")
    args = meta.args if isinstance(meta, Record) and meta.args else (_fields(meta).get("shape"),)
    shape = _sizes(args[0], where)
    mesh = _fields(spec.get("mesh"))
    sizes, at = _mesh(mesh, where)
    placements = spec.get("placements")
    if not isinstance(placements, tuple | list) or len(placements) != len(sizes):
        raise CorruptError(f"{where}: {placements!r:.60} for a mesh of {len(sizes)} axes")
    cuts = [_cut(p, where) for p in placements]
    start, stop = list((0,) * len(shape)), list(shape)
    for dim in range(len(shape)):
        for axis in _sequence(dim, cuts, sizes, spec, where):
            rows = -(-(stop[dim] - start[dim]) // sizes[axis])
            low = min(start[dim] + rows * at[axis], stop[dim])
            start[dim], stop[dim] = low, min(low + rows, stop[dim])
    box = Box(tuple(start), tuple(stop))
    return Sharded(shape, tuple(_part(box, fields.get("_local_tensor"), shape, where)))


def _mesh(mesh: dict[str, object], where: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The mesh's shape, and this rank's coordinate."""
    at = mesh.get("_coordinate_on_dim")
    if not isinstance(at, list | tuple):
        raise FormatError(f"{where}: its device mesh does not say this rank's coordinate")
    coordinate = _sizes(at, where)
    drawn = mesh.get("mesh", mesh.get("_mesh"))
    layout = _fields(mesh.get("_layout"))
    if isinstance(drawn, TensorRef):  # torch < 2.9
        sizes = drawn.shape
    elif "axes" in layout:  # torch 2.13
        axes = layout["axes"]
        if not isinstance(axes, tuple | list):
            raise CorruptError(f"{where}: the axes of its device mesh are {axes!r:.60}")
        sizes = tuple(prod(_sizes(_fields(a).get("shape"), where)) for a in axes)
    else:  # between: shape is a nested tuple of ints
        shape = layout.get("shape", ())
        listed = shape if isinstance(shape, tuple | list) else (shape,)
        sizes = tuple(prod(_sizes(n, where)) if not isinstance(n, int) else n for n in listed)
    if len(sizes) != len(coordinate) or any(c >= n for c, n in zip(coordinate, sizes, strict=True)):
        raise CorruptError(f"{where}: coordinate {list(coordinate)} in a mesh of {list(sizes)}")
    return sizes, coordinate


@dataclass(frozen=True, slots=True)
class _Cut:
    dim: int | None  # None: a replica
    split: int | None = None  # of a strided shard: what cuts the axis before it


def _cut(placement: object, where: str) -> _Cut:
    name = placement.type.name if isinstance(placement, Record) else ""
    fields = _fields(placement)
    if isinstance(placement, Record) and placement.args and not fields:
        fields = dict(zip(("dim", "split_factor"), placement.args, strict=False))
    if name == "Replicate":
        return _Cut(None)
    dim = fields.get("dim")
    if name == "Shard" and isinstance(dim, int):
        return _Cut(dim)
    split = fields.get("split_factor")
    if name == "_StridedShard" and isinstance(dim, int) and isinstance(split, int):
        return _Cut(dim, split)
    raise FormatError(f"{where}: the placement {name or repr(placement)[:60]} is not read")


def _sequence(
    dim: int,
    cuts: Sequence[_Cut],
    sizes: Sequence[int],
    spec: dict[str, object],
    where: str,
) -> list[int]:
    """The mesh axes that cut `dim`, in the order in which they do.

    From left to right, but a strided shard comes after the axes to its right whose sizes make its
    split factor: FSDP over TP cuts for TP first. Source: torch 2.13 placement_types.py,
    _StridedShard; pytorch#129229.
    """
    order: list[int] = []
    for axis in reversed(range(len(cuts))):
        cut = cuts[axis]
        if cut.dim is None or cut.dim % max(1, len(_shape_of(spec))) != dim:
            continue
        after = 0
        while cut.split is not None and prod(sizes[a] for a in order[:after]) < cut.split:
            if after == len(order):
                raise FormatError(
                    f"{where}: a strided shard of split factor {cut.split} in a mesh of "
                    f"{list(sizes)} is not read"
                )
            after += 1
        order.insert(after, axis)
    if all(cuts[a].split is None for a in order):
        return _said_order(dim, spec) or order
    return order


def _shape_of(spec: dict[str, object]) -> Sequence[object]:
    meta = spec.get("tensor_meta")
    first = meta.args[0] if isinstance(meta, Record) and meta.args else _fields(meta).get("shape")
    return first if isinstance(first, tuple | list) else ()


def _said_order(dim: int, spec: dict[str, object]) -> list[int] | None:
    """The order that torch >= 2.9 writes beside the placements, if it does."""
    said = spec.get("shard_order")
    for entry in said if isinstance(said, tuple | list) else ():
        if isinstance(entry, Record) and len(entry.args) == 2 and entry.args[0] == dim:
            axes = entry.args[1]
            if isinstance(axes, tuple | list) and all(isinstance(a, int) for a in axes):
                return list(axes)
    return None
