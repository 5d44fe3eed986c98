"""Integer geometry of half-open boxes and flat runs over a tensor's index space."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from operator import sub


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """The elements with start <= index < stop on every axis. Rank 0 holds one element."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """All of a tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @classmethod
    def at(cls, start: Sequence[int], shape: Sequence[int]) -> Box:
        """The box of this shape whose first element is `start`; equal ones are mostly one object.

        Layers and experts are cut alike: a plan of many tensors holds few different boxes.
        """
        return _at(tuple(start), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements along each axis."""
        return tuple(map(sub, self.stop, self.start))

    @property
    def numel(self) -> int:
        """How many elements the box holds."""
        return prod(map(sub, self.stop, self.start))

    def __and__(self, other: Box) -> Box | None:
        """The common part, or None if it is empty."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        for a, b in zip(start, stop, strict=True):
            if a >= b:
                return None
        return Box(start, stop)

    def __contains__(self, other: Box) -> bool:
        return all(a <= c for a, c in zip(self.start, other.start, strict=True)) and all(
            d <= b for b, d in zip(self.stop, other.stop, strict=True)
        )

    def minus(self, hole: Box) -> list[Box]:
        """This box without `hole`, which lies inside it: at most 2*rank disjoint boxes."""
        out: list[Box] = []
        start, stop = list(self.start), list(self.stop)
        for i, (a, b) in enumerate(zip(hole.start, hole.stop, strict=True)):
            if start[i] < a:
                out.append(Box(tuple(start), (*stop[:i], a, *stop[i + 1 :])))
            if b < stop[i]:
                out.append(Box((*start[:i], b, *start[i + 1 :]), tuple(stop)))
            start[i], stop[i] = a, b
        return out

    def shift(self, by: Sequence[int]) -> Box:
        """The box moved by `by` elements on each axis."""
        return Box(
            tuple(a + d for a, d in zip(self.start, by, strict=True)),
            tuple(b + d for b, d in zip(self.stop, by, strict=True)),
        )

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.start, self.stop, strict=True)) + "]"


@lru_cache(maxsize=1 << 14)
def _at(start: tuple[int, ...], shape: tuple[int, ...]) -> Box:
    return Box(start, tuple(a + n for a, n in zip(start, shape, strict=True)))


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides, in elements, of a contiguous row-major array of this shape."""
    return _row_major(tuple(shape))


@lru_cache(maxsize=1 << 14)
def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


def flat_boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """The boxes covered by elements [start, stop) of the row-major flattening of `shape`.

    At most 2*rank - 1 boxes, disjoint, in flat order. Offsets are elements, not bytes.
    Raises ValueError if the run leaves the tensor.
    """
    if not 0 <= start <= stop <= prod(shape):
        raise ValueError(f"run [{start}, {stop}) leaves a tensor of shape {tuple(shape)}")
    return _flat_boxes(tuple(shape), start, stop)


def _flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    if start >= stop:
        return []
    if len(shape) <= 1:
        return [Box((start,), (stop,))] if shape else [Box((), ())]
    row = prod(shape[1:])
    first, low = divmod(start, row)
    last, high = divmod(stop, row)

    def lift(i: int, boxes: list[Box]) -> list[Box]:
        return [Box((i, *b.start), (i + 1, *b.stop)) for b in boxes]

    if first == last:
        return lift(first, _flat_boxes(shape[1:], low, high))
    out: list[Box] = []
    if low:
        out += lift(first, _flat_boxes(shape[1:], low, row))
        first += 1
    if first < last:
        out.append(Box((first, *(0,) * (len(shape) - 1)), (last, *shape[1:])))
    if high:
        out += lift(last, _flat_boxes(shape[1:], 0, high))
    return out


def uncovered(whole: Box, boxes: Sequence[Box]) -> list[Box]:
    """What of `whole` no box covers, as disjoint boxes. Linear for a sorted cut of one axis."""
    missing = [whole] if whole.numel else []
    for box in sorted(boxes):
        rest: list[Box] = []
        for part in missing:
            common = part & box
            rest += [part] if common is None else part.minus(common)
        missing = rest
        if not missing:
            break
    return missing
