"""How the elements of one stored tensor lie in another: boxes of both, in finer shapes of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from reshard.box import Box, row_major
from reshard.dialect import View
from reshard.errors import LayoutError
from reshard.layout import Piece, refactor

#: More boxes than this for one logical tensor mean that a layout is not made of strides.
_MOST = 1 << 14


@dataclass(frozen=True, slots=True)
class Part:
    """A box of the source tensor that is a box of the target tensor, axes exchanged.

    `axes[k]` is the source axis that runs along target axis k; None: the box has one element
    there. Counted in the finer shapes of the splice.
    """

    source: Box
    target: Box
    axes: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Splice:
    """Every element that a source tensor gives to a target tensor."""

    source_factors: tuple[int, ...]
    parts: tuple[Part, ...]

    def pieces(self, held: Sequence[Piece], space: Sequence[int]) -> Iterator[Piece]:
        """The source's pieces (counted in `space`) as pieces of the target tensor."""
        fine = held
        if tuple(space) != self.source_factors:
            fine = [q for p in held for q in refactor(p, space, self.source_factors)]
        for part in self.parts:
            for piece in fine:
                common = piece.box & part.source
                if common is not None:
                    yield _carried(piece, common, part)


def _carried(piece: Piece, common: Box, part: Part) -> Piece:
    """The piece of the target for `common`, a box of the source inside piece and part."""
    start, stop, strides = list(part.target.start), list(part.target.stop), []
    for k, axis in enumerate(part.axes):
        if axis is None:
            strides.append(0)
            continue
        move = start[k] - part.source.start[axis]
        start[k], stop[k] = common.start[axis] + move, common.stop[axis] + move
        strides.append(piece.strides[axis])
    box = Box(tuple(start), tuple(stop))
    return Piece(box, piece.array, piece.base_of(common), tuple(strides), piece.codec)


@dataclass(frozen=True, slots=True)
class Link:
    """One logical tensor as it lies in a target tensor and in a source tensor."""

    target: View
    source: View
    source_shape: tuple[int, ...]  # the shape that the source counts its boxes in


@lru_cache(maxsize=1 << 14)
def splice(
    shape: tuple[int, ...], links: tuple[Link, ...]
) -> tuple[tuple[int, ...], tuple[Splice, ...]]:
    """(finer shape of the target, a splice per link) for a target tensor of this shape.

    Raises LayoutError if a logical tensor is not made of strided boxes in both.
    """
    shared = [_shared(link) for link in links]
    steps = [stride for axes in shared for n, stride, _ in axes if n > 1]
    factors = finer(shape, steps)
    return factors, tuple(
        _splice(link, axes, factors) for link, axes in zip(links, shared, strict=True)
    )


_Axes = list[tuple[int, int, int]]  # (elements, stride in the target, stride in the source)


def _shared(link: Link) -> _Axes:
    """The axes of a logical tensor, cut so that each is one stride in both stored tensors."""
    out: _Axes = []
    for t, s in zip(link.target.axes, link.source.axes, strict=True):
        mine, theirs = list(t), list(s)
        while mine and theirs:
            (n, stride), (m, other) = mine[-1], theirs[-1]
            if n == m:
                take = n
            elif n % m == 0:
                take = m
            elif m % n == 0:
                take = n
            else:
                raise LayoutError(f"an axis cut in {n} and in {m} has no common parts")
            out.append((take, stride, other))
            mine[-1:] = [(n // take, stride * take)] if n > take else []
            theirs[-1:] = [(m // take, other * take)] if m > take else []
        if prod(n for n, _ in mine) != 1 or prod(n for n, _ in theirs) != 1:
            raise LayoutError("a logical tensor has two shapes")
    return out


def finer(shape: Sequence[int], steps: Sequence[int]) -> tuple[int, ...]:
    """The finest shape of the same row-major elements whose strides divide one another.

    Every axis of `shape` is a run of its axes; a step that does not fit in is left out.
    """
    out: list[int] = []
    for n, stride in zip(shape, row_major(shape), strict=True):
        inside = sorted({s for s in steps if stride < s < n * stride}, reverse=True)
        top = n * stride
        for step in inside:
            if top % step == 0 and step % stride == 0:
                out.append(top // step)
                top = step
        out.append(top // stride)
    return tuple(out)


def _splice(link: Link, axes: _Axes, factors: tuple[int, ...]) -> Splice:
    steps = [other for n, _, other in axes if n > 1]
    theirs = finer(link.source_shape, steps)
    parts = list(_parts(axes, link.target.base, link.source.base, factors, theirs))
    return Splice(theirs, tuple(parts))


def _parts(
    axes: _Axes, base: int, other: int, mine: tuple[int, ...], theirs: tuple[int, ...]
) -> Iterator[Part]:
    """Boxes of both, one axis to one axis; an axis that does not fit is cut until it does."""
    work = [(list(axes), base, other)]
    made = 0
    my_strides, their_strides = row_major(mine), row_major(theirs)
    while work:
        rest, at, from_ = work.pop()
        cut = _first_cut(rest, at, from_, (mine, my_strides), (theirs, their_strides))
        if cut is None:
            made += 1
            yield _part(rest, at, from_, (mine, my_strides), (theirs, their_strides))
            continue
        k, replaced = cut
        for move, pieces in replaced:
            _, stride, source_stride = rest[k]
            new = [*rest[:k], *pieces, *rest[k + 1 :]]
            work.append((new, at + move * stride, from_ + move * source_stride))
        if made + len(work) > _MOST:
            raise LayoutError(f"more than {_MOST} boxes: this layout is not made of strides")


_Space = tuple[tuple[int, ...], tuple[int, ...]]  # factors, their strides


def _first_cut(
    axes: _Axes, base: int, other: int, mine: _Space, theirs: _Space
) -> tuple[int, list[tuple[int, _Axes]]] | None:
    """(which axis, its parts as (elements to skip, axes)) for the first that does not fit."""
    for k, (n, stride, source) in enumerate(axes):
        if n == 1:
            continue
        for (sizes, strides), step, start in ((mine, stride, base), (theirs, source, other)):
            if step not in strides:
                return k, [(i, []) for i in range(n)]
            axis = _axis_of(step, sizes, strides)
            size = sizes[axis]
            first = start // step % size
            if first + n <= size:
                continue
            if first == 0 and n % size == 0:
                return k, [(0, [(n // size, stride * size, source * size), (size, stride, source)])]
            low = size - first if first else n // size * size
            return k, [(0, [(low, stride, source)]), (low, [(n - low, stride, source)])]
    return None


def _axis_of(step: int, sizes: Sequence[int], strides: Sequence[int]) -> int:
    """The axis of this stride; of several, the one with more than one element."""
    found = [i for i, s in enumerate(strides) if s == step]
    return max(found, key=lambda i: sizes[i])


def _part(axes: _Axes, base: int, other: int, mine: _Space, theirs: _Space) -> Part:
    boxes = []
    for (sizes, strides), at, which in ((mine, base, 1), (theirs, other, 2)):
        start = [at // s % n for n, s in zip(sizes, strides, strict=True)]
        size = [1] * len(sizes)
        for axis in axes:
            if axis[0] > 1:
                size[_axis_of(axis[which], sizes, strides)] = axis[0]
        boxes.append(Box.at(start, size))
    along: list[int | None] = [None] * len(mine[0])
    for n, stride, source in axes:
        if n > 1:
            along[_axis_of(stride, *mine)] = _axis_of(source, *theirs)
    return Part(boxes[1], boxes[0], tuple(along))
