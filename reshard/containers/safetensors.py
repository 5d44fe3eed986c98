"""safetensors files: a strict reader of headers, and files laid out before a byte is written."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TypeGuard

from reshard.dtypes import DType, of_safetensors
from reshard.errors import CorruptError, FormatError
from reshard.layout import Draft, StoredArray

#: A header longer than this is refused, as the safetensors library does.
LONGEST_HEADER = 100_000_000
#: The library's order of element types in a file: the widest first.
#: Source: safetensors 24b0b28 src/tensor.rs Dtype, sorted descending by prepare().
_ORDER = (
    "BOOL", "F4", "F6_E2M3", "F6_E3M2", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ",
    "F8_E5M2FNUZ", "I16", "U16", "F16", "BF16", "I32", "U32", "F32", "C64", "F64", "I64", "U64",
)  # fmt: skip
_RANK = {code: i for i, code in enumerate(_ORDER)}


@dataclass(frozen=True, slots=True)
class Header:
    """What a safetensors file holds: arrays by name, in the order of their bytes; metadata."""

    arrays: Mapping[str, StoredArray]
    metadata: Mapping[str, str]


def read_header(folder: Path, name: str) -> Header:
    """The header of one file.

    Raises CorruptError unless the arrays tile the file from the header to its end: no hole, no
    overlap, no byte behind them; and for a name that stands twice, which the library lets pass.
    Source: safetensors 24b0b28 src/tensor.rs validate(); formats/hf.md.
    """
    path = folder / name
    try:
        size = os.stat(path).st_size
        with open(path, "rb") as file:
            start, raw = _raw_header(file.read(8), size, path, file.read)
    except OSError as error:
        raise CorruptError(f"{path}: cannot be read: {error}") from error
    table = _json(raw, path)
    del raw
    metadata = table.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CorruptError(f"{path}: __metadata__ is not a table of strings")
    # the table is used up: of a million entries it takes more memory than what is made of them
    arrays = {key: _array(name, key, table.pop(key), start, path) for key in list(table)}
    wrong = _untiled(arrays, start, size)
    if wrong is not None:
        arrays = dict(sorted(arrays.items(), key=lambda i: (i[1].offset, i[1].nbytes)))
        wrong = _untiled(arrays, start, size)
    if wrong is not None:
        raise CorruptError(f"{path}: {wrong}")
    return Header(arrays, metadata)


def _raw_header(
    first: bytes, size: int, path: Path, read: Callable[[int], bytes]
) -> tuple[int, bytes]:
    if len(first) < 8:
        raise CorruptError(f"{path}: {size} bytes, too short for a safetensors file")
    n = int.from_bytes(first, "little")
    if n > LONGEST_HEADER:
        raise CorruptError(f"{path}: a header of {n} bytes is announced; at most {LONGEST_HEADER}")
    if 8 + n > size:
        raise CorruptError(f"{path}: cut short: the header ends at {8 + n}, the file at {size}")
    return 8 + n, read(n)


#: dtype, shape, first byte and end behind the header, of an entry that is well formed.
_Row = tuple[str, tuple[int, ...], int, int]


def _json(raw: bytes, path: Path) -> dict[str, object]:
    """The header's table; entries that are well formed as rows, others as they are.

    Raises CorruptError for a key that stands twice, at any depth.
    """

    def once(pairs: list[tuple[str, object]]) -> dict[str, object] | _Row:
        table = dict(pairs)
        if len(table) != len(pairs):
            counts = Counter(k for k, _ in pairs)
            twice = next(k for k, n in counts.items() if n > 1)
            raise CorruptError(f"{path}: {twice!r} stands twice in the header")
        return _row(table) or table  # here, while it is at hand: it is smaller by far

    try:
        found = json.loads(raw.decode("utf-8"), object_pairs_hook=once)
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise CorruptError(f"{path}: the header is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise CorruptError(f"{path}: the header is not a JSON object")
    return found


def _row(table: Mapping[str, object]) -> _Row | None:
    span = table.get("data_offsets")
    if span is None:
        return None
    code, dims = table.get("dtype"), table.get("shape")
    if isinstance(code, str) and _sizes(dims) and _sizes(span) and len(span) == 2:
        return code, tuple(dims), span[0], span[1]
    return None


def _array(file: str, key: str, row: object, start: int, path: Path) -> StoredArray:
    if not isinstance(row, tuple):
        wrong = "dtype, shape or data_offsets are missing or malformed"
        wrong = wrong if isinstance(row, dict) else "its entry is not a JSON object"
        raise CorruptError(f"{path}: {key}: {wrong}")
    code, dims, first, end = row
    try:
        dtype = of_safetensors(code)
    except FormatError as error:
        raise FormatError(f"{path}: {key}: {error}") from error
    if end - first != prod(dims) * dtype.itemsize:
        raise CorruptError(f"{path}: {key}: {end - first} bytes for shape {list(dims)} of {code}")
    return StoredArray(file, start + first, dims, dtype, key)


def _sizes(value: object) -> TypeGuard[list[int]]:
    if not isinstance(value, list):
        return False
    for n in value:  # noqa: SIM110  # all() would make a generator for each
        if type(n) is not int or n < 0:  # a bool is an int, too
            return False
    return True


def _untiled(arrays: Mapping[str, StoredArray], start: int, size: int) -> str | None:
    """What keeps the arrays, in this order, from lying end to end from `start` to the file's end;
    None if nothing does."""
    at = start
    for key, array in arrays.items():
        if array.offset != at:
            kind = "overlaps what is before it" if array.offset < at else "leaves a hole before it"
            return f"{key} {kind}: it begins at {array.offset}, not at {at}"
        at += array.nbytes
    if at != size:
        what = f"{size - at} bytes behind the last tensor" if at < size else "cut short"
        return f"{what}: the tensors end at {at}, the file at {size}"
    return None


@dataclass(frozen=True, slots=True)
class Item:
    """A tensor to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: DType

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return prod(self.shape) * self.dtype.itemsize


def draft(name: str, items: Sequence[Item]) -> Draft:
    """A file with these tensors, in the library's own order: the widest type first, then by name.

    One metadata key, as transformers writes it: with several the library's bytes differ from run
    to run. Raises FormatError for an element type that safetensors has no code for.
    """
    ordered = sorted(items, key=lambda i: (-_rank(i.dtype, i.name), i.name.encode()))
    header = _header(ordered)
    arrays, offset = [], len(header)
    for item in ordered:
        arrays.append(StoredArray(name, offset, item.shape, item.dtype, item.name))
        offset += item.nbytes
    return Draft(name, offset, [(0, header)], arrays)


def _header(items: Iterable[Item]) -> bytes:
    """The header of a file that holds these tensors one behind another."""
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for item in items:
        stop = at + item.nbytes
        table[item.name] = {
            "dtype": item.dtype.safetensors, "shape": item.shape, "data_offsets": (at, stop)
        }  # fmt: skip
        at = stop
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _rank(dtype: DType, name: str) -> int:
    if dtype.safetensors is None:
        raise FormatError(f"{name}: safetensors has no element type {dtype.name}")
    return _RANK[dtype.safetensors]
