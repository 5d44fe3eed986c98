"""Which box of a logical tensor lies where in one model-parallel rank's copy of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from reshard.box import Box, flat_boxes, row_major
from reshard.errors import CorruptError, FormatError
from reshard.layout import Piece, place_flat

from .flat import Run
from .values import mapping, sequence, shape_of, whole


@dataclass(frozen=True, slots=True)
class Part:
    """A box of the logical tensor and where its first element lies in the shard."""

    box: Box
    at: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's copy of a tensor: its shape, and the parts of the logical tensor it is made of."""

    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    def pieces(self, runs: Iterable[Run]) -> list[Piece]:
        """The pieces of flat runs of the shard."""
        found: list[Piece] = []
        for run in runs:
            if len(self.parts) == 1 and self.parts[0].box == Box.whole(self.shape):
                found += place_flat(self.shape, run.start, run.stop, run.array, run.base)
            else:
                found += self._cut(run)
        return found

    def _cut(self, run: Run) -> list[Piece]:
        steps = row_major(self.shape)
        found: list[Piece] = []
        for box in flat_boxes(self.shape, run.start, run.stop):
            for part in self.parts:
                mine = box & Box.at(part.at, part.box.shape)
                if mine is None:
                    continue
                first = sum(s * a for s, a in zip(steps, mine.start, strict=True))
                move = [b - a for a, b in zip(part.at, part.box.start, strict=True)]
                base = run.base + first - run.start
                found.append(Piece(mine.shift(move), run.array, base, steps))
        return found


def same(shape: Sequence[int]) -> Shard:
    """The shard that is all of a tensor of this shape."""
    whole_box = Box.whole(shape)
    return Shard(tuple(shape), (Part(whole_box, whole_box.start),))


def sliced(shape: Sequence[int], axis: int, start: int, stop: int) -> Shard:
    """The shard that is the slice [start, stop) of one axis."""
    low, high = [0] * len(shape), list(shape)
    low[axis], high[axis] = start, stop
    box = Box(tuple(low), tuple(high))
    return Shard(box.shape, (Part(box, (0,) * len(shape)),))


def joined(local: Sequence[tuple[int, ...]], axis: int) -> Affine:
    """The cut of a tensor into shards of these shapes, one after the other along an axis."""
    ends = [0]
    for shape in local:
        ends.append(ends[-1] + shape[axis])
    whole = (*local[0][:axis], ends[-1], *local[0][axis + 1 :])
    shards = {r: sliced(whole, axis, ends[r], ends[r + 1]) for r in range(len(local))}
    return Affine(whole, shards)


def paired(local: Sequence[tuple[int, ...]]) -> Affine:
    """The cut of two tensors that stand one above the other, each shard holding a part of both.

    Megatron's gate and up: [gate of rank 0; up of rank 0], and whole [gate; up].
    """
    rows, rest = [shape[0] // 2 for shape in local], local[0][1:]
    half, whole = sum(rows), (2 * sum(rows), *rest)
    shards, start = {}, 0
    for rank, n in enumerate(rows):
        parts = tuple(
            Part(Box.at((base + start, *(0 for _ in rest)), (n, *rest)), (at, *(0 for _ in rest)))
            for base, at in ((0, 0), (half, n))
        )
        shards[rank] = Shard((2 * n, *rest), parts)
        start += n
    return Affine(whole, shards)


@dataclass(frozen=True, slots=True)
class Affine:
    """A parameter's affine map: its logical shape and every tensor-parallel rank's shard.

    Source: universal_checkpoint_info["affine_map"] @ DeepSpeed 0.19.8; fixtures tp2_*.
    """

    shape: tuple[int, ...]
    shards: Mapping[int, Shard]


def affine(found: object, name: str) -> Affine:
    """The map of one parameter. Raises FormatError for a form that is not a set of boxes."""
    entry = mapping(found, f"affine map of {name}")
    shape = shape_of(entry.get("logical_shape"), f"affine map of {name}")
    shards: dict[int, Shard] = {}
    for rank, row in mapping(entry.get("ranks"), f"affine map of {name}").items():
        fields = mapping(row, f"affine map of {name}")
        local = shape_of(fields.get("shard_shape"), f"affine map of {name}")
        parts = [
            _part(mapping(p, name), shape, local, name)
            for p in sequence(fields.get("pieces"), f"affine map of {name}")
        ]
        if sum(p.box.numel for p in parts) != prod(local):
            raise CorruptError(f"affine map of {name}: rank {rank}'s pieces do not fill its shard")
        shards[whole(rank, name)] = Shard(local, tuple(parts))
    return Affine(shape, shards)


def _part(
    piece: Mapping[object, object], shape: tuple[int, ...], local: tuple[int, ...], name: str
) -> Part:
    scale = piece.get("scale", 1)
    if isinstance(scale, (int, float)) and scale != 1:
        raise FormatError(
            f"{name}: its tensor-parallel shards are scaled by {scale} (a bias divided before the "
            "all-reduce); re-cutting it changes values, which is not done yet"
        )
    size = shape_of(piece.get("shape"), name)
    source = _start(piece.get("source"), shape, size, name)
    dest = _start(piece.get("dest"), local, size, name)
    return Part(Box.at(source, size), dest)


def _start(
    found: object, shape: tuple[int, ...], size: tuple[int, ...], name: str
) -> tuple[int, ...]:
    """Where as_strided(offset, strides) begins, if it is a box of a row-major tensor."""
    offset_, strides_ = sequence(found, f"affine map of {name}")
    offset, strides = whole(offset_, name), shape_of(strides_, name)
    steps = row_major(shape)
    if len(size) != len(shape) or any(
        n > 1 and a != b for n, a, b in zip(size, strides, steps, strict=True)
    ):
        raise FormatError(
            f"{name}: its affine map takes strides {list(strides)} of shape {list(shape)}; only "
            "boxes are read"
        )
    at = []
    for step in steps:
        at.append(offset // step)
        offset %= step
    if offset or any(a + n > m for a, n, m in zip(at, size, shape, strict=True)):
        raise CorruptError(f"{name}: its affine map leaves the shape {list(shape)}")
    return tuple(at)
