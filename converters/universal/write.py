"""Declares a universal store: whole tensors in shards, small ones side by side, state as JSON."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from math import prod
from pathlib import Path

from reshard.checkpoint import Checkpoint, Json
from reshard.containers import zarr3
from reshard.dtypes import DType, named
from reshard.errors import FormatError, UsageError
from reshard.format import Declaration, Fate, Loss, WriteOptions, pack
from reshard.layout import Draft, Layout, Piece
from reshard.namings import dialects
from reshard.tensor import PARAM, LogicalTensor, TensorId
from reshard.topology import Target
from reshard.workers import Each

from . import state
from .nodes import NATIVE, PACKED, group, node_name, sealed
from .recognise import KEY, NAME

_LEAST = 256  # bytes of a chunk
_MOST_SHARDS, _MOST_CHUNKS = 10**6, 10**8  # that a cut finer than the usual may make
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
    asked = target.take("chunk", "shard", "small")
    found = Grain(**{key: _bytes(key, text) for key, text in asked.items()})
    if found.chunk < _LEAST:
        raise UsageError(
            f"chunk={asked['chunk']}: each chunk has 20 bytes of checksum and index, is read for "
            f"itself; give {_LEAST} bytes at least, as in chunk=64KiB"
        )
    if "shard" not in asked:
        return replace(found, shard=max(found.shard, found.chunk))
    if found.shard < found.chunk:
        raise UsageError(
            f"{target.text!r}: a shard of {found.shard} bytes holds no chunk of {found.chunk}: "
            "give both, as in chunk=1MiB,shard=8MiB"
        )
    return found


def _refuse_many(arrays: Sequence[zarr3.Array], size: Grain) -> None:
    """Raises UsageError for a cut that makes more files or chunks than anybody wants."""
    for key, most in (("shard", _MOST_SHARDS), ("chunk", _MOST_CHUNKS)):
        cuts = (zip(a.shape, getattr(a, key), strict=True) for a in arrays)
        n = sum(prod(-(-long // step) for long, step in cut) for cut in cuts)
        asked = getattr(size, key)
        if n > most and asked < getattr(Grain(), key):
            raise UsageError(
                f"{key}={asked} bytes cuts this checkpoint into {n:,} {key}s, more than {most:,}; "
                f"give a larger {key}"
            )


def _bytes(key: str, text: str) -> int:
    match = re.fullmatch(r"(\d+)(|KiB|MiB|GiB)", text)
    if match is None or (int(match[1]) == 0 and key != "small"):
        raise UsageError(f"{key}={text}: write a size as 8MiB")
    return int(match[1]) * _UNITS[match[2]]


def declare_universal(source: Checkpoint, target: Target, options: WriteOptions) -> Declaration:
    """Lay out a store of the source."""
    if options.like is not None:
        raise UsageError("--like has no meaning here: a universal store takes what the source has")
    if source.quantised is not None:
        raise FormatError(
            f"{source.path} is quantised in blocks (fp8 or MXFP4), and a store does not say which "
            "scales belong to which weights. Dequantise it with --dtype bf16."
        )
    size = grain(target)
    tensors = {t: _tensor(v, options) for t, v in source.layout.tensors.items()}
    places, bodies = _places(tensors, size)
    arrays = list({p.array.node: p.array for p in places.values()}.values())
    _refuse_many(arrays, size)
    drafts, losses, fates = _state(source, tensors, arrays)
    level = options.compress
    for array in arrays:
        said = {KEY: sealed(bodies(array.node))}
        drafts += zarr3.drafts(replace(array, attributes=said, level=level))
    notes: tuple[str, ...] = ()
    if level is not None:
        notes = (f"zstd {level}: files end smaller than is said; until then both are on the disk",)
    return Declaration(
        format=NAME,
        topology=source.topology,
        folder="",
        layout=Layout(tensors, lambda t: places[t].pieces(tensors[t].extent), source.layout.naming),
        drafts=drafts,
        losses=losses,
        notes=notes,
        fates=fates,
        recipe=_recipe(tensors, options),
        compress=None if level is None else _Compressed(tuple(arrays), level, tuple(drafts)),
    )


@dataclass(frozen=True)
class _Compressed:
    """The files of a store with compressed shards."""

    arrays: tuple[zarr3.Array, ...]
    level: int
    drafts: tuple[Draft, ...]

    def __call__(self, laid_out: Path, made: Path, each: Each) -> list[Draft]:
        """Write all of them into `made`; what each is, with its size."""
        arrays = [replace(array, level=self.level) for array in self.arrays]
        shards = {array.file(at): (array, at) for array in arrays for at in array.shards()}
        for draft in self.drafts:
            (made / draft.name).parent.mkdir(parents=True, exist_ok=True)

        def write(draft: Draft) -> Draft:
            if draft.name not in shards:
                (made / draft.name).write_bytes((laid_out / draft.name).read_bytes())  # JSON
                return Draft(draft.name, draft.size, ())
            array, at = shards[draft.name]
            return Draft(draft.name, zarr3.compress(array, at, laid_out, made), ())

        return list(each(write, self.drafts))


def _tensor(logical: LogicalTensor, options: WriteOptions) -> LogicalTensor:
    """The tensor as it is stored: counted in its own shape, cast where --dtype asks."""
    cast = options.dtype is not None and logical.id.slot == PARAM and not logical.fixed
    dtype = named(options.dtype) if cast and options.dtype else logical.dtype
    return replace(logical, dtype=dtype if logical.dtype.floating else logical.dtype, factors=None)


def _places(
    tensors: Mapping[TensorId, LogicalTensor], size: Grain
) -> tuple[dict[TensorId, _Place], Callable[[str], dict[str, Json]]]:
    """Where every tensor lies, and what is said of them at each array's node."""
    places: dict[TensorId, _Place] = {}
    large: dict[str, tuple[int, LogicalTensor]] = {}
    small: dict[str, list[tuple[int, LogicalTensor]]] = {}
    for position, (tensor, logical) in enumerate(tensors.items()):
        nbytes = prod(logical.extent) * logical.dtype.itemsize
        if nbytes < size.small or nbytes == 0 or not logical.extent:
            slot = node_name(tensor.slot)
            node = f"{PACKED}/{slot}.{logical.dtype.name}"
            small.setdefault(node, []).append((position, logical))
        else:
            node = f"{node_name(tensor.slot, (PACKED, NATIVE))}/{node_name(tensor.name)}"
            places[tensor] = _Place(_array(node, logical.extent, logical.dtype, size))
            large[node] = (position, logical)
    for node, members in small.items():
        starts = list(accumulate((prod(m.extent) for _, m in members), initial=0))
        array = _array(node, (max(1, starts[-1]),), members[0][1].dtype, size)
        for (_, logical), start in zip(members, starts, strict=False):
            places[logical.id] = _Place(array, start)

    def body(node: str) -> dict[str, Json]:
        if node in large:
            return state.row(*large[node])
        rows = [{**state.row(i, m), "start": places[m.id].start} for i, m in small[node]]
        return {"tensors": rows}

    return places, body


def _array(node: str, shape: tuple[int, ...], dtype: DType, size: Grain) -> zarr3.Array:
    return zarr3.Array(
        node, shape, dtype, *zarr3.cut(shape, dtype.itemsize, size.chunk, size.shard)
    )


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
