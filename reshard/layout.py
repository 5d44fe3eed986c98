"""Stored arrays, pieces and layouts, and the check for gaps and clashes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol, TypeVar, overload, runtime_checkable

import numpy as np
import numpy.typing as npt

from reshard.box import Box, flat_boxes, row_major, uncovered
from reshard.dtypes import DType
from reshard.errors import CoverageError
from reshard.tensor import LogicalTensor, TensorId

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StoredArray:
    """A contiguous row-major array at a byte offset of one file.

    `file` is relative to the checkpoint's folder, "/" between parts. `key` is the framework's own
    name, for messages. `holder` names the rank or file group that wrote it, for messages.
    `codec` "zstd": the elements lie somewhere in a compressed run, read and written whole:
    bytes [offset, offset + packed) hold the stream, the elements start at byte `inner` of it.
    `codec` "crc32c": the elements as they are, then their CRC-32C; read whole and checked.
    `codec` "zstd+crc32c": a compressed run of exactly the elements, then the CRC-32C of that run.
    """

    file: str
    offset: int  # bytes from the start of the file
    shape: tuple[int, ...]
    dtype: DType
    key: str
    holder: str = ""
    codec: str | None = None
    packed: int = 0  # bytes of the compressed run, or of elements and checksum
    inner: int = 0  # bytes into the decompressed run

    @property
    def plain(self) -> bool:
        """Whether the elements lie in the file as they are."""
        return self.codec in (None, "crc32c")

    @property
    def numel(self) -> int:
        """Elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, uncompressed."""
        return prod(self.shape) * self.dtype.itemsize


#: Reads the values of a box of a piece as they are stored.
Read = Callable[["Piece", Box], npt.NDArray[Any]]


class Codec(Protocol):
    """What stands between stored values and logical ones, where a map changes them."""

    def decode(self, read: Read, piece: Piece, box: Box) -> npt.NDArray[np.generic]:
        """The logical values of a box of the piece."""
        ...


@runtime_checkable
class Scaled(Codec, Protocol):
    """A codec that multiplies, once, by factors: a device can do that."""

    @property
    def dtype(self) -> DType:
        """Of the values that it gives."""
        ...

    def parts(
        self, read: Read, piece: Piece, box: Box
    ) -> tuple[npt.NDArray[np.generic], npt.NDArray[np.generic]]:
        """The stored values of a box of the piece, and the fp32 factor of each."""
        ...


@dataclass(frozen=True, slots=True)
class Piece:
    """This box of a logical tensor lies in these elements of a stored array.

    Element `i` of the tensor (i inside `box`) is element
    `base + sum(strides[k] * (i[k] - box.start[k]))` of the array's row-major order.
    A column cut, a transpose, a fused or stacked tensor, a flat run: all are strides.
    """

    box: Box
    array: StoredArray
    base: int  # elements
    strides: tuple[int, ...]  # elements, one per logical axis
    codec: Codec | None = None  # sources only: what is read is not what is stored

    def base_of(self, box: Box) -> int:
        """Where the first element of `box`, which lies inside self.box, is in the array."""
        return self.base + sum(
            s * (a - b) for s, a, b in zip(self.strides, box.start, self.box.start, strict=True)
        )


def place(box: Box, array: StoredArray, at: Sequence[int] | None = None) -> Piece:
    """The piece for `box` lying in `array` as the equal-sized box that starts at `at`.

    `at` has the array's rank and defaults to its origin. If the array has more axes than the
    tensor, the extra leading ones have size one in the box (a stack of layers or experts).
    """
    strides = row_major(array.shape)
    start = tuple(at) if at is not None else (0,) * len(array.shape)
    base = sum(s * a for s, a in zip(strides, start, strict=True))
    return Piece(box, array, base, strides[len(strides) - len(box.start) :])


def whole(array: StoredArray) -> Piece:
    """The piece for a tensor that is all of `array`."""
    return Piece(Box.whole(array.shape), array, 0, row_major(array.shape))


def place_flat(
    shape: Sequence[int], start: int, stop: int, array: StoredArray, base: int
) -> list[Piece]:
    """Pieces for elements [start, stop) of a flattened tensor, from element `base` of `array`."""
    pieces: list[Piece] = []
    strides = row_major(shape)
    for box in flat_boxes(shape, start, stop):
        first = sum(s * a for s, a in zip(strides, box.start, strict=True))
        pieces.append(Piece(box, array, base + first - start, strides))
    return pieces


def refactor(piece: Piece, shape: Sequence[int], factors: Sequence[int]) -> list[Piece]:
    """The piece counted in a finer shape of the same row-major elements.

    Each axis of `shape` is a run of axes of `factors` with the same product. A range of a split
    axis is at most 2*n - 1 boxes of its n parts.
    """
    found: list[tuple[tuple[int, ...], tuple[int, ...], int]] = [((), (), 0)]
    strides: list[int] = []
    at = 0
    for axis, n in enumerate(shape):
        low, high = piece.box.start[axis], piece.box.stop[axis]
        part: list[int] = []
        last = axis == len(shape) - 1
        while at < len(factors) and (last or prod(part) < n):
            part.append(factors[at])
            at += 1
        if prod(part) != n:
            raise ValueError(f"{tuple(factors)} is no finer shape of {tuple(shape)}")
        steps = row_major(part)
        strides += [piece.strides[axis] * s for s in steps]
        grown = []
        for box in flat_boxes(part, low, high):
            first = sum(s * a for s, a in zip(steps, box.start, strict=True)) - low
            for start, stop, base in found:
                move = base + first * piece.strides[axis]
                grown.append(((*start, *box.start), (*stop, *box.stop), move))
        found = grown
    return [
        Piece(Box(start, stop), piece.array, piece.base + move, tuple(strides), piece.codec)
        for start, stop, move in found
    ]


@dataclass(frozen=True)
class Layout:
    """Which logical tensors there are, and where each one's elements lie.

    Pieces are made per tensor on request and never held as one list.
    `naming` says whose names these are: two layouts are joined only under one naming.
    """

    tensors: Mapping[TensorId, LogicalTensor]
    pieces_of: Callable[[TensorId], Sequence[Piece]]
    naming: str

    def pieces(self, tensor: TensorId) -> Sequence[Piece]:
        """All pieces of a tensor, replicas included, in the order their holders wrote them."""
        return self.pieces_of(tensor)

    def check(self, tensor: TensorId, pieces: Sequence[Piece] | None = None) -> None:
        """Raises CoverageError if the pieces leave a gap in the tensor or leave its bounds.

        `pieces`: the tensor's, where they are at hand.
        """
        whole = self.tensors[tensor]
        bounds = Box.whole(whole.space)
        pieces = self.pieces(tensor) if pieces is None else pieces
        if len(pieces) == 1 and pieces[0].box == bounds:
            return
        for p in pieces:
            if len(p.box.start) != len(bounds.start) or p.box not in bounds:
                raise CoverageError(
                    f"{tensor}: box {p.box} in {p.array.file} lies outside the tensor's shape "
                    f"{list(whole.space)}. The checkpoint contradicts itself; save it again."
                )
        gap = uncovered(bounds, [p.box for p in pieces])
        if gap:
            files = sorted({p.array.file for p in pieces})
            raise CoverageError(
                f"{tensor}: no stored array holds {gap[0]} of shape {list(whole.space)}"
                + (f" (the rest is in {', '.join(files[:4])})" if files else "")
                + ". A file of the checkpoint is missing or was saved by another run."
            )


@dataclass(frozen=True, slots=True)
class Checksum:
    """Where the checksum of an array's bytes is to be patched in (little-endian, 4 bytes each)."""

    array: StoredArray
    at: tuple[int, ...]  # byte offsets in the same file, all after the array's end
    kind: str = "crc32"  # or "crc32c"


class Made(Sequence[T]):
    """A sequence that is made anew whenever it is gone through, so that none of it is held."""

    __slots__ = ("make",)

    def __init__(self, make: Callable[[], Iterable[T]]) -> None:
        self.make = make

    def __iter__(self) -> Iterator[T]:
        return iter(self.make())

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __bool__(self) -> bool:
        return any(True for _ in self)

    @overload
    def __getitem__(self, at: int) -> T: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[T]: ...
    def __getitem__(self, at: int | slice) -> T | Sequence[T]:
        return list(self)[at]


@dataclass(frozen=True, slots=True)
class Draft:
    """A file to be written: literal bytes around stored arrays, every offset known beforehand.

    Literals and arrays do not overlap; what neither covers is zero.
    """

    name: str  # relative to the checkpoint's folder
    size: int  # bytes
    literals: Sequence[tuple[int, bytes]]
    arrays: Sequence[StoredArray] = ()
    checksums: Sequence[Checksum] = ()
