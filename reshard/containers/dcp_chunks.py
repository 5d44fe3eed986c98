"""Chunks of tensors of torch.distributed.checkpoint, held as numbers: there can be millions."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, overload

from reshard.dtypes import DType


class Place(NamedTuple):
    """Where a blob lies: bytes [offset, offset + length) of `file`, encoded by `transform`."""

    file: str  # relative to the checkpoint's folder
    offset: int
    length: int
    transform: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Chunk:
    """The box of a tensor at `offsets`, of `sizes`, and the blob that holds it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: Place


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A whole tensor and its chunks, in the metadata's order, empty ones left out."""

    shape: tuple[int, ...]
    dtype: DType
    chunks: Sequence[Chunk]


_Kind = tuple[tuple[int, ...], str, tuple[str, ...]]


@dataclass(slots=True)
class Kinds:
    """What few chunks differ in, each once: sizes, file and encoding."""

    listed: list[_Kind] = field(default_factory=list)
    numbers: dict[_Kind, int] = field(default_factory=dict)

    def number(self, chunk: Chunk) -> int:
        """The number of a chunk's kind."""
        kind = (chunk.sizes, chunk.place.file, chunk.place.transform)
        found = self.numbers.get(kind)
        if found is None:
            found = self.numbers[kind] = len(self.listed)
            self.listed.append(kind)
        return found


class Chunks(Sequence[Chunk]):
    """The chunks of one tensor, each a row of numbers: 8 bytes an axis and 24 more.

    A chunk is made when it is asked for. `kinds` is shared by the tensors of one metadata.
    """

    __slots__ = ("kinds", "rank", "rows")

    def __init__(self, rank: int, kinds: Kinds) -> None:
        self.rank = rank
        self.kinds = kinds
        self.rows = array("q")  # per chunk: its offsets, its place's offset and length, its kind

    def append(self, chunk: Chunk) -> None:
        """Take in a chunk."""
        place = chunk.place
        rows, number = self.rows, self.kinds.number(chunk)
        rows.extend(chunk.offsets)
        rows.extend((place.offset, place.length, number))

    def __len__(self) -> int:
        return len(self.rows) // (self.rank + 3)

    @overload
    def __getitem__(self, at: int) -> Chunk: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Chunk]: ...
    def __getitem__(self, at: int | slice) -> Chunk | Sequence[Chunk]:
        which = range(len(self))[at]
        return self._chunk(which) if isinstance(which, int) else [self._chunk(i) for i in which]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # it grows

    def __iter__(self) -> Iterator[Chunk]:
        return map(self._chunk, range(len(self)))

    def _chunk(self, at: int) -> Chunk:
        begin = at * (self.rank + 3)
        end = begin + self.rank
        *offsets, where, length, number = self.rows[begin : end + 3]
        sizes, file, transform = self.kinds.listed[number]
        return Chunk(tuple(offsets), sizes, Place(file, where, length, transform))
