"""zarr v3 arrays of shards: where every chunk lies, and the JSON that says so.

One form only, the one whose every offset is known before a byte is written: a regular grid of
shards (`sharding_indexed`), in each the inner chunks as `bytes` (little-endian) and `crc32c`, one
after the other, and at the end the index of (offset, bytes) pairs with a CRC-32C of its own. For
the archive the shards are rewritten with `zstd` between the two, once they are whole.
Sources: zarr v3 core specification 3.1, codecs sharding-indexed, bytes and crc32c 1.0, zstd of
zarr-extensions
(zarr-specs.readthedocs.io). tensorstore 0.1.86 and zarr-python 3.1.6 read it: tests/peers/store.py.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from reshard.box import Box
from reshard.checksums import NBYTES, crc32c
from reshard.containers.marks import DOCUMENT as DOCUMENT
from reshard.dtypes import DType, named
from reshard.errors import CorruptError, FormatError
from reshard.layout import Checksum, Draft, Piece, StoredArray, place, place_flat
from reshard.values import Json

#: Offset and size of a chunk that a shard does not hold.
_NONE = (1 << 64) - 1
_ENTRY = 16  # bytes of a chunk in the index
#: Types that every zarr v3 reader has (core specification, "Core data types"), under torch's names.
_CORE = frozenset(
    ["bool", "complex64", "complex128"]
    + [f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)]
    + [f"float{bits}" for bits in (16, 32, 64)]
)


@dataclass(frozen=True, slots=True)
class Array:
    """A zarr array of at least one axis. `node` is its path below the store's folder.

    `chunk` and `shard` count elements; a shard is a whole number of chunks along every axis.
    """

    node: str
    shape: tuple[int, ...]
    dtype: DType
    chunk: tuple[int, ...]
    shard: tuple[int, ...]
    attributes: Mapping[str, Json] = field(default_factory=dict)
    level: int | None = None  # of zstd; None: chunks are not compressed

    @property
    def packed(self) -> int:
        """Bytes of a chunk with its checksum, before it is compressed."""
        return prod(self.chunk) * self.dtype.itemsize + NBYTES

    @property
    def inner(self) -> tuple[int, ...]:
        """Chunks of a shard along each axis."""
        return tuple(s // c for s, c in zip(self.shard, self.chunk, strict=True))

    @property
    def index_nbytes(self) -> int:
        """Bytes of a shard's index with its checksum."""
        return prod(self.inner) * _ENTRY + NBYTES

    def shards(self) -> Iterator[tuple[int, ...]]:
        """The places of all shards in their grid, the last axis fastest."""
        grid = [-(-n // s) for n, s in zip(self.shape, self.shard, strict=True)]
        for number in range(prod(grid)):  # np.ndindex would take memory for a grid that is a lie
            at: list[int] = []
            for n in reversed(grid):
                number, i = divmod(number, n)
                at.append(i)
            yield tuple(reversed(at))

    def file(self, shard: Sequence[int]) -> str:
        """A shard's file. Source: core specification, chunk key encoding "default" with "."."""
        return f"{self.node}/c.{'.'.join(map(str, shard))}"


@dataclass(frozen=True, slots=True)
class Chunk:
    """An inner chunk: its place in the array's grid, its elements, its number in the index.

    `box` ends with the array; what is stored does not, and is filled up with zeros.
    """

    at: tuple[int, ...]
    box: Box
    number: int


def chunks(array: Array, shard: Sequence[int]) -> Iterator[Chunk]:
    """The chunks of a shard that hold elements of the array, in the order of its index."""
    whole = Box.whole(array.shape)
    for number, inside in enumerate(np.ndindex(*array.inner)):
        at = tuple(s * n + i for s, n, i in zip(shard, array.inner, inside, strict=True))
        box = Box.at([i * c for i, c in zip(at, array.chunk, strict=True)], array.chunk) & whole
        if box is not None:
            yield Chunk(at, box, number)


def cut(
    shape: Sequence[int], itemsize: int, chunk_nbytes: int, shard_nbytes: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(chunk, shard) so that chunks are row-major runs of equal size, at most `chunk_nbytes`.

    They are cut along the first axis of which one index fits; the last chunk is little padded.
    """
    axis = 0
    while axis < len(shape) - 1 and prod(shape[axis + 1 :]) * itemsize > chunk_nbytes:
        axis += 1
    row = prod(shape[axis + 1 :]) * itemsize
    rows = _even(shape[axis], max(1, chunk_nbytes // row))
    count = -(-shape[axis] // rows)
    each = _even(count, max(1, shard_nbytes // (rows * row)))
    lead, tail = (1,) * axis, tuple(shape[axis + 1 :])
    return (*lead, rows, *tail), (*lead, rows * each, *tail)


def _even(n: int, most: int) -> int:
    """The size of parts when n is cut in as few parts of at most `most` as can be, evenly."""
    return -(-n // -(-n // most))


# ---------------------------------------------------------------------- the JSON


def document(array: Array) -> dict[str, Json]:
    """What zarr.json says of an array."""
    little: Json = {"name": "bytes", "configuration": {"endian": "little"}}
    zstd: Json = {"name": "zstd", "configuration": {"level": array.level, "checksum": False}}
    crc: Json = {"name": "crc32c"}
    sharding: Json = {
        "chunk_shape": list(array.chunk),
        "codecs": [little, crc] if array.level is None else [little, zstd, crc],
        "index_codecs": [little, crc],
        "index_location": "end",
    }
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(array.shape),
        "data_type": data_type(array.dtype),
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(array.shard)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": _zero(array.dtype),
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
        "attributes": {"dtype": array.dtype.name, **array.attributes},
    }


def data_type(dtype: DType) -> str:
    """The zarr type: its own, or the unsigned integer of the same width where zarr has none.

    zarr-python 3.1.6 knows neither bfloat16 nor any float8.
    """
    return dtype.name if dtype.name in _CORE else f"uint{8 * dtype.itemsize}"


def _zero(dtype: DType) -> Json:
    if dtype.name == "bool":
        return False
    return [0.0, 0.0] if dtype.name.startswith("complex") else 0


def parse(raw: bytes, node: str, where: Path) -> Array:
    """The array that a zarr.json describes.

    Raises CorruptError for what is no zarr array, FormatError for one of another form.
    """
    found = mapping(raw, where)
    try:
        attributes = found["attributes"]
        (codec,) = found["codecs"]
        array = Array(
            node,
            _lengths(found["shape"]),
            named(attributes["dtype"]),
            _lengths(codec["configuration"]["chunk_shape"]),
            _lengths(found["chunk_grid"]["configuration"]["chunk_shape"]),
            {k: v for k, v in attributes.items() if k != "dtype"},
            _level(codec["configuration"]["codecs"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptError(f"{where}: not an array of this store ({error!r}). Copy it.") from None
    ranks = {len(array.shape), len(array.chunk), len(array.shard)}
    if len(ranks) > 1 or 0 in array.chunk or any(
        s == 0 or s % c for s, c in zip(array.shard, array.chunk, strict=True)
    ):  # fmt: skip
        raise CorruptError(f"{where}: shards {array.shard} are not made of chunks {array.chunk}")
    for key, wanted in document(array).items():
        if key != "attributes" and found.get(key) != wanted:
            raise FormatError(
                f"{where}: {key} is {json.dumps(found.get(key))}; only {json.dumps(wanted)} is "
                "read here. Write the store again with reshard."
            )
    return array


def _level(codecs: Sequence[Mapping[str, Any]]) -> int | None:
    """The level of zstd among the codecs of chunks, None without it."""
    for codec in codecs:
        if codec["name"] == "zstd":
            return int(codec["configuration"]["level"])
    return None


def _lengths(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or any(type(n) is not int or n < 0 for n in value):
        raise ValueError(f"{value!r:.60} is no shape")
    return tuple(value)


def mapping(raw: bytes, where: Path) -> dict[str, Any]:
    """A JSON file that holds an object. Raises CorruptError for anything else."""
    try:
        found = json.loads(raw, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{where}: not JSON ({error}). Copy it again.") from None
    if not isinstance(found, dict):
        raise CorruptError(f"{where}: holds no JSON object. Copy it again.")
    return found


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


# ---------------------------------------------------------------------- the shards


#: The chunks of a shard, each with the bytes it lies in.
Stored = Callable[[tuple[int, ...]], Sequence[tuple[Chunk, StoredArray]]]


def _stored(
    array: Array, file: str, chunk: Chunk, offset: int, nbytes: int, codec: str = "crc32c"
) -> StoredArray:
    said = f"chunk {list(chunk.at)}"
    return StoredArray(file, offset, array.chunk, array.dtype, array.node, said, codec, nbytes)


def laid(array: Array, shard: Sequence[int]) -> list[tuple[Chunk, StoredArray]]:
    """The chunks of a shard as they are laid out: one after the other, not compressed."""
    file = array.file(shard)
    return [
        (chunk, _stored(array, file, chunk, i * array.packed, array.packed))
        for i, chunk in enumerate(chunks(array, shard))
    ]


def drafts(array: Array) -> Iterator[Draft]:
    """The files of an array: zarr.json, and its shards with their indexes."""
    raw = json.dumps(document(array)).encode()
    yield Draft(f"{array.node}/{DOCUMENT}", len(raw), [(0, raw)])
    for shard in array.shards():
        held = laid(array, shard)
        index = _indexed(array, {c.number: (s.offset, s.packed) for c, s in held})
        end = len(held) * array.packed
        yield Draft(
            array.file(shard),
            end + array.index_nbytes,
            [(end, index)],
            [stored for _, stored in held],
            [Checksum(s, (s.offset + s.nbytes,), "crc32c") for _, s in held],
        )


def _indexed(array: Array, places: Mapping[int, tuple[int, int]]) -> bytes:
    """A shard's index with its checksum, of (offset, bytes) by chunk number."""
    index = np.full((prod(array.inner), 2), _NONE, "<u8")
    for number, place_ in places.items():
        index[number] = place_
    entries = index.tobytes()
    return entries + crc32c(entries).to_bytes(NBYTES, "little")


def compress(array: Array, shard: Sequence[int], laid_out: Path, made: Path) -> int:
    """Write a shard of `made` with the chunks of the one that is laid out, compressed; its bytes.

    One chunk is in memory at a time. Raises FormatError without the package zstandard.
    """
    packer = _compressor(array.level)
    name = array.file(shard)
    places: dict[int, tuple[int, int]] = {}
    with open(laid_out / name, "rb") as source, open(made / name, "wb") as out:
        for chunk, stored in laid(array, shard):
            source.seek(stored.offset)
            packed = packer.compress(source.read(stored.nbytes))
            places[chunk.number] = (out.tell(), len(packed) + NBYTES)
            out.write(packed)
            out.write(crc32c(packed).to_bytes(NBYTES, "little"))
        out.write(_indexed(array, places))
        return out.tell()


def _compressor(level: int | None) -> Any:
    try:
        import zstandard
    except ImportError:
        raise FormatError("zstd needs the package zstandard: pip install zstandard") from None
    return zstandard.ZstdCompressor(level or 3)


def read_shard(folder: Path, array: Array, shard: Sequence[int]) -> list[tuple[Chunk, StoredArray]]:
    """The chunks of a shard as its index says. Raises CorruptError if one is not there.

    A chunk without an entry would be read as zeros by other readers; here it is lost.
    """
    file = array.file(shard)
    path = folder / file
    what = f"{path}: {array.node}: shard {list(shard)}"
    size, raw = _index(path, array.index_nbytes, what)
    if crc32c(raw[:-NBYTES]) != int.from_bytes(raw[-NBYTES:], "little"):
        raise CorruptError(
            f"{what}: the index at its end fails its CRC-32C: the file is cut short or damaged. "
            "Copy it again."
        )
    entries = np.frombuffer(raw[:-NBYTES], "<u8").reshape(-1, 2)
    out = []
    for chunk in chunks(array, shard):
        offset, nbytes = map(int, entries[chunk.number])
        if _NONE in (offset, nbytes):
            raise CorruptError(f"{what}: chunk {list(chunk.at)} is lost: its index entry is empty")
        whole = nbytes > NBYTES if array.level is not None else nbytes == array.packed
        if not whole or offset + nbytes > size - array.index_nbytes:
            raise CorruptError(
                f"{what}: chunk {list(chunk.at)}: bytes {offset} to {offset + nbytes} are not "
                f"{array.packed} bytes, or those of a compressed chunk, before the index"
            )
        codec = "crc32c" if array.level is None else "zstd+crc32c"
        out.append((chunk, _stored(array, file, chunk, offset, nbytes, codec)))
    return out


def _index(path: Path, nbytes: int, what: str) -> tuple[int, bytes]:
    """(size of a shard's file, its index)."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < nbytes:
                raise CorruptError(f"{what}: {size} bytes, cut short. Copy it again.")
            file.seek(size - nbytes)
            return size, file.read(nbytes)
    except OSError as error:
        raise CorruptError(f"{what} is lost: {error}. Copy it again.") from None


def pieces(array: Array, stored: Stored) -> list[Piece]:
    """The pieces of a tensor that is all of an array."""
    return [
        place(chunk.box, held)
        for shard in array.shards()
        for chunk, held in stored(shard)
    ]  # fmt: skip


def run_pieces(array: Array, stored: Stored, shape: Sequence[int], start: int) -> list[Piece]:
    """The pieces of a tensor that lies flat in a 1-D array from element `start` on."""
    stop, out = start + prod(shape), list[Piece]()
    if start == stop:
        return out
    for shard in range(start // array.shard[0], -(-stop // array.shard[0])):
        for chunk, held in stored((shard,)):
            first, last = chunk.box.start[0], chunk.box.stop[0]
            low, high = max(start, first), min(stop, last)
            if low < high:
                out += place_flat(shape, low - start, high - start, held, low - first)
    return out
