"""Where the tensors and objects of Megatron's zarr backend (until core 0.15) lie, as torch_dist's.

Each key is a folder with a zarr v2 array: `.zarray`, and a file per chunk ("0.1.0"), row-major and
uncompressed, always of the full chunk's size; bf16 is spelled "bfloat16", which zarr itself does
not know. A ShardedObject is a file of torch.save, `KEY/shard_1.0_2.2.pt`, without the list that
torch_dist puts around it.
Source: megatron/core/dist_checkpointing/strategies/zarr.py, serialization.py @ core_v0.12.3;
fixtures made-v012-moe-pp2ep2-zarr, made-v012-llama-tp2dp2-zarr.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from math import prod
from pathlib import Path

from reshard.containers import dcp
from reshard.containers.dcp import Chunk, Metadata, Place, TensorEntry
from reshard.containers.small import read_object
from reshard.dtypes import DType, named
from reshard.errors import CorruptError, FormatError
from reshard.layout import StoredArray

_ARRAY = ".zarray"
_DTYPES = {
    "bfloat16": "bfloat16", "<f4": "float32", "<f2": "float16", "<f8": "float64",
    "<i8": "int64", "<i4": "int32", "<i2": "int16", "|i1": "int8", "|u1": "uint8", "|b1": "bool",
}  # fmt: skip
_MOST = 1 << 24  # chunks of one array


class Arrays:
    """The chunks' files, in place of a torch_dist folder's blobs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def arrays(self, items: Iterable[tuple[str, Chunk, DType]]) -> list[StoredArray]:
        """The stored array of each chunk: the whole chunk, also where the tensor ends inside it."""
        out, shapes = [], dict[str, tuple[int, ...]]()
        for key, chunk, dtype in items:
            shape = shapes.get(key)
            if shape is None:
                shape = shapes[key] = _header(self.folder, key)[1]
            file = chunk.place.file
            out.append(StoredArray(file, 0, shape, dtype, key, file))
        return out

    def located(self, key: str, entry: TensorEntry) -> list[StoredArray]:
        """The stored array of each of a tensor's chunks."""
        return self.arrays((key, chunk, entry.dtype) for chunk in entry.chunks)


def blobs(folder: Path, metadata: Metadata) -> Arrays | dcp.Blobs:
    """What finds the elements of a folder's chunks."""
    return Arrays(folder) if metadata.version == "zarr" else dcp.Blobs(folder)


def read_metadata(folder: Path) -> Metadata:
    """Every array and object of the folder; headers and file sizes only.

    Raises CorruptError for a chunk that is missing or cut short, FormatError for an array that is
    compressed.
    """
    tensors: dict[str, TensorEntry] = {}
    objects: dict[str, Place] = {}
    for sub in sorted(p for p in folder.iterdir() if p.is_dir()):
        if sub.suffix == ".sync":  # locks of zarr.ProcessSynchronizer, for flattened shards
            continue
        if (sub / _ARRAY).is_file():
            shape, chunk, dtype, separator = _header(folder, sub.name)
            chunks = list(_chunks(folder, sub.name, shape, chunk, dtype, separator))
            tensors[sub.name] = TensorEntry(shape, dtype, chunks)
            continue
        for file in sorted(sub.glob("shard_*.pt")):
            place = Place(f"{sub.name}/{file.name}", 0, file.stat().st_size)
            objects[f"{sub.name}/{file.stem}"] = place
    if not tensors:
        raise CorruptError(
            f"{folder}: metadata.json names the zarr backend and no array is there. Copy it again."
        )
    return Metadata(tensors, objects, version="zarr")


def _header(folder: Path, key: str) -> tuple[tuple[int, ...], tuple[int, ...], DType, str]:
    """(shape, shape of a chunk, dtype, separator in file names) of an array."""
    path = folder / key / _ARRAY
    found = read_object(path)
    if found.get("zarr_format") != 2:
        raise FormatError(f"{path}: is not of zarr format 2, which Megatron wrote")
    for field, read in (("compressor", None), ("filters", None), ("order", "C")):
        if found.get(field) != read:
            raise FormatError(
                f"{path}: {field} is {json.dumps(found.get(field))[:80]}; arrays are read as "
                "Megatron writes them, raw and row-major. Save it again without compression."
            )
    kind = found.get("dtype")
    if not isinstance(kind, str) or kind not in _DTYPES:
        raise FormatError(f"{path}: dtype {kind!r:.40} is not read")
    shape, chunks = (_sizes(path, found, field) for field in ("shape", "chunks"))
    if len(shape) != len(chunks) or 0 in chunks:
        raise CorruptError(f"{path}: chunks {list(chunks)} do not cut the shape {list(shape)}")
    separator = found.get("dimension_separator", ".")
    if separator not in (".", "/"):
        raise CorruptError(f"{path}: dimension_separator is {separator!r:.20}")
    return shape, chunks, named(_DTYPES[kind]), separator


def _sizes(path: Path, found: Mapping[str, object], field: str) -> tuple[int, ...]:
    value = found.get(field)
    if not isinstance(value, list) or not all(type(n) is int and n >= 0 for n in value):
        raise CorruptError(f"{path}: {field} is {value!r:.80}")
    return tuple(value)


def _chunks(
    folder: Path,
    key: str,
    shape: Sequence[int],
    chunk: Sequence[int],
    dtype: DType,
    separator: str,
) -> Iterator[Chunk]:
    """The chunks of an array; those at its end hold less of it than they store."""
    counts = [-(-n // c) for n, c in zip(shape, chunk, strict=True)]
    if prod(counts) > _MOST:
        raise CorruptError(f"{folder / key}: {prod(counts):,} chunks are no checkpoint's")
    size = prod(chunk) * dtype.itemsize
    for at in product(*map(range, counts)):
        file = f"{key}/{separator.join(map(str, at)) or '0'}"
        try:
            there = (folder / file).stat().st_size
        except OSError:
            raise CorruptError(
                f"{folder / file}: this chunk is missing: the save was incomplete, or the copy was"
            ) from None
        if there != size:
            raise CorruptError(
                f"{folder / file}: has {there} bytes, a chunk of {list(chunk)} {dtype} has {size}. "
                "Copy it again."
            )
        start = tuple(i * c for i, c in zip(at, chunk, strict=True))
        sizes = tuple(min(c, n - a) for c, n, a in zip(chunk, shape, start, strict=True))
        yield Chunk(start, sizes, Place(file, 0, size))
