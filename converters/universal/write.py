"""Declares a universal store: whole tensors in shards, small ones side by side, state as JSON."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod

from reshard.checkpoint import Checkpoint, Json
from reshard.containers import zarr3
from reshard.dtypes import named
from reshard.errors import FormatError, UsageError
from reshard.format import Declaration, Fate, Loss, WriteOptions, pack
from reshard.layout import Draft, Layout, Piece
from reshard.schema import dialects
from reshard.tensor import PARAM, LogicalTensor, TensorId
from reshard.topology import Target

from . import state
from .nodes import KEY, NATIVE, PACKED, group, node_name, sealed

NAME = "universal"
_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


@dataclass(frozen=True, slots=True)
class Grain:
    """How the store is cut, in bytes: what is checked at once, what is one file, what is small."""

    chunk: int = 8 << 20
    shard: int = 64 << 20
    small: int = 64 << 10


@dataclass(frozen=True)
class _Place:
    """Where a tensor lies: all of an array, or a run of a shared one."""

    array: zarr3.Array
    start: int | None = None

    def pieces(self, shape: Sequence[int]) -> list[Piece]:
        """The pieces of the tensor, which has this shape."""
        stored = partial(zarr3.laid, self.array)
        if self.start is None:
            return zarr3.pieces(self.array, stored)
        return zarr3.run_pieces(self.array, stored, shape, self.start)


def grain(target: Target) -> Grain:
    """What a TARGET asks for. Raises UsageError for what a store does not have."""
    if target.degrees:
        raise UsageError(
            f"{target.text!r}: a universal store has no degrees; it holds whole tensors"
        )
    if target.variant is not None and target.variant not in dialects():
        raise UsageError(
            f"{target.text!r}: universal.{target.variant} is no dialect; `reshard schemas` lists "
            "them. `universal` alone keeps the source's names."
        )
    asked = target.take("chunk", "shard", "small", "compress")
    if "compress" in asked:
        raise FormatError(
            f"compress={asked['compress']} is not written: a store is laid out before a byte is "
            "moved, and compressed chunks have no size until then. Pack the finished store "
            "instead (tar, squashfs), or leave compression to the file system."
        )
    return Grain(**{key: _bytes(key, text) for key, text in asked.items()})


def _bytes(key: str, text: str) -> int:
    match = re.fullmatch(r"(\d+)(|KiB|MiB|GiB)", text)
    if match is None or (int(match[1]) == 0 and key != "small"):
        raise UsageError(f"{key}={text}: write a size as 8MiB")
    return int(match[1]) * _UNITS[match[2]]


def declare_universal(source: Checkpoint, target: Target, options: WriteOptions) -> Declaration:
    """Lay out a store of the source."""
    if options.like is not None:
        raise UsageError("--like has no meaning here: a universal store takes what the source has")
    size = grain(target)
    tensors = {t: _tensor(v, options) for t, v in source.layout.tensors.items()}
    places, arrays = _places(tensors, size)
    drafts, losses, fates = _state(source, tensors, arrays)
    for array in arrays:
        drafts += zarr3.drafts(array)
    return Declaration(
        format=NAME,
        topology=source.topology,
        folder="",
        layout=Layout(tensors, lambda t: places[t].pieces(tensors[t].extent), source.layout.naming),
        drafts=drafts,
        losses=losses,
        fates=fates,
        recipe=_recipe(tensors, options),
    )


def _tensor(logical: LogicalTensor, options: WriteOptions) -> LogicalTensor:
    """The tensor as it is stored: counted in its own shape, cast where --dtype asks."""
    cast = options.dtype is not None and logical.id.slot == PARAM and not logical.fixed
    dtype = named(options.dtype) if cast and options.dtype else logical.dtype
    return replace(logical, dtype=dtype if logical.dtype.floating else logical.dtype, factors=None)


def _places(
    tensors: Mapping[TensorId, LogicalTensor], size: Grain
) -> tuple[dict[TensorId, _Place], list[zarr3.Array]]:
    """Where every tensor lies, and the arrays that hold them."""
    places: dict[TensorId, _Place] = {}
    small: dict[str, list[tuple[int, LogicalTensor]]] = {}
    for position, (tensor, logical) in enumerate(tensors.items()):
        nbytes = prod(logical.extent) * logical.dtype.itemsize
        if nbytes < size.small or nbytes == 0 or not logical.extent:
            slot = node_name(tensor.slot)
            small.setdefault(f"{slot}.{logical.dtype.name}", []).append((position, logical))
        else:
            places[tensor] = _Place(_own(logical, position, size))
    arrays = [p.array for p in places.values()]
    for name, members in small.items():
        array, starts = _shared(name, members, size)
        arrays.append(array)
        for (_, logical), start in zip(members, starts, strict=True):
            places[logical.id] = _Place(array, start)
    return places, arrays


def _own(logical: LogicalTensor, position: int, size: Grain) -> zarr3.Array:
    """The array of one tensor, its padding included."""
    slot = node_name(logical.id.slot, (PACKED, NATIVE))
    chunk, shard = zarr3.cut(logical.extent, logical.dtype.itemsize, size.chunk, size.shard)
    body = sealed(state.row(logical, position))
    node = f"{slot}/{node_name(logical.id.name)}"
    return zarr3.Array(node, logical.extent, logical.dtype, chunk, shard, {KEY: body})


def _shared(
    name: str, members: Sequence[tuple[int, LogicalTensor]], size: Grain
) -> tuple[zarr3.Array, list[int]]:
    """One array for all small tensors of a slot and dtype, and where each begins in it."""
    starts, at, rows = list[int](), 0, list[Json]()
    for position, logical in members:
        starts.append(at)
        rows.append({**state.row(logical, position), "start": at})
        at += prod(logical.extent)
    dtype = members[0][1].dtype
    shape = (max(1, at),)
    chunk, shard = zarr3.cut(shape, dtype.itemsize, size.chunk, size.shard)
    body = sealed({"tensors": rows})
    return zarr3.Array(f"{PACKED}/{name}", shape, dtype, chunk, shard, {KEY: body}), starts


def _state(
    source: Checkpoint, tensors: Mapping[TensorId, LogicalTensor], arrays: Sequence[zarr3.Array]
) -> tuple[list[Draft], tuple[Loss, ...], tuple[Fate, ...]]:
    """The groups of the store, with everything that is no tensor."""
    listed: dict[str, list[Json]] = {}
    for array in arrays:
        above, _, own = array.node.rpartition("/")
        listed.setdefault(above, []).append(own)
    found = {**state.root(source, tensors), "arrays": sorted(listed)}
    losses: tuple[Loss, ...] = ()
    drafts = [group(node, {"arrays": own}) for node, own in listed.items()]
    packed = pack(_held(source, tensors))
    if packed is not None:
        name, kept = packed
        found["native"], losses = name, kept.losses
        drafts.append(group(NATIVE, {"format": name, "state": kept.state}))
    elif source.native is not None:
        what = f"what only the writers of {source.format} use, beyond the extras that are shown"
        losses = (Loss("native-dropped", source.format, f"{what}, is not kept in the store"),)
    return [group("", found), *drafts], losses, _fates(source, found)


def _held(source: Checkpoint, tensors: Mapping[TensorId, LogicalTensor]) -> Checkpoint:
    return replace(source, layout=replace(source.layout, tensors=dict(tensors)))


def _fates(source: Checkpoint, found: Mapping[str, Json]) -> tuple[Fate, ...]:
    fates = [Fate(path, "keep", "as JSON") for path in source.extras]
    kept = found["groups"] is not None
    for i in range(len(source.groups or ())):
        fates.append(Fate(f"param_groups[{i}]", "keep" if kept else "drop"))
    if source.steps:
        fates.append(Fate("steps", "keep" if found["steps"] else "drop"))
    if source.native is not None:
        kind = "keep" if "native" in found else "drop"
        fates.append(Fate("native", kind, f"typed JSON for the writers of {source.format}"))
    return tuple(fates)


def _recipe(tensors: Mapping[TensorId, LogicalTensor], options: WriteOptions) -> dict[str, Json]:
    whole = any(t.slot != PARAM for t in tensors) and not options.weights_only
    return {
        "load": "reshard convert STORE OUT --to TARGET; any zarr v3 reader for single tensors",
        "verdict": "archive" if whole else "weights only",
    }
