"""Reads fully_sharded_model_space of core <= 0.14: each tensor a grid of flattened local shards.

A tensor [X, Y] cut into shards [x, y] is stored as [X/x, Y/y, x*y], and the DP ranks cut the last
axis. Megatron reads it back only up to core 0.15.
Source: megatron/core/dist_checkpointing/strategies/resharding.py
nd_flattened_tensor_reformulated_global_shape, transformer/mlp.py apply_swiglu_sharded_factory,
transformer/moe/experts.py GroupedMLP.sharded_state_dict @ core_v0.12.3; fixture
g-v012-fsms-tp2pp2dp2, made-v012-llama-tp2dp2-fsms, made-v014-moe-pp2ep2-fsms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from reshard.box import Box, flat_boxes, row_major
from reshard.containers.dcp import Chunk, Metadata
from reshard.errors import CorruptError, FormatError
from reshard.layout import Piece, StoredArray

from .carry import mapping


@dataclass(frozen=True, slots=True)
class Grid:
    """The shards of a key's tensors, leading layer and expert axes left out."""

    shards: tuple[int, ...]  # how many along each axis
    shard: tuple[int, ...]  # elements of each
    transposed: bool  # a GroupedMLP's experts lie as [in, out], their weights as [out, in]

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical tensor's."""
        whole = tuple(n * s for n, s in zip(self.shards, self.shard, strict=True))
        return whole[::-1] if self.transposed else whole

    def pieces(self, at: Sequence[int], start: int, array: StoredArray, base: int) -> list[Piece]:
        """Elements from `start` on of the flattened shard at this grid position.

        `array` holds them from element `base` on; its last axis is the flattened one.
        """
        strides = row_major(self.shard)
        move = [i * n for i, n in zip(at, self.shard, strict=True)]
        turn = -1 if self.transposed else 1
        out: list[Piece] = []
        for run in flat_boxes(self.shard, start, start + array.shape[-1]):
            first = sum(s * a for s, a in zip(strides, run.start, strict=True)) - start
            box = run.shift(move)
            out.append(
                Piece(
                    Box(box.start[::turn], box.stop[::turn]), array, base + first, strides[::turn]
                )
            )
        return out


def original_shape(metadata: Metadata, key: str) -> tuple[int, ...] | None:
    """The shape of a flattened tensor before it became a grid, as core >= 0.9 records it."""
    recorded = mapping(metadata.other.get("mcore_data") or {}, ".metadata: mcore_data").get(key)
    if recorded is None:
        return None
    shape = mapping(recorded, f".metadata: {key}").get("nd_reformulated_orig_global_shape")
    if shape is None:
        return None
    if not isinstance(shape, tuple) or not all(isinstance(n, int) for n in shape):
        raise CorruptError(f".metadata: {key}: its original shape is {shape!r:.80}")
    return tuple(int(n) for n in shape)


def grid(
    key: str,
    stored: Sequence[int],
    axes: int,
    weight: Sequence[int] | None,
    original: Sequence[int] | None,
    grouped: bool,
) -> Grid:
    """The grid of a key stored in this shape, whose tensors have `axes` leading axes.

    `weight`: the shape of the weight's key. `original`: the recorded one, None in older files.
    `grouped`: the tensor is of a legacy GroupedMLP's experts, which tells where nothing else does.
    Raises FormatError if the stored shape is no grid of the weight's.
    """
    turned = None if weight is None else (*weight[:-2], *weight[-2:][::-1])
    whole = original or (turned if grouped else weight)
    if whole is None:
        raise FormatError(
            f"{key}: stored as flattened shards {list(stored)}, and neither its weight nor its "
            "original shape is there"
        )
    transposed = grouped if weight == turned else tuple(whole) == turned
    if weight is not None and tuple(whole) not in (tuple(weight), turned):
        raise FormatError(f"{key}: was {list(whole)}, its weight is {list(weight)}")
    if transposed and not grouped:
        raise FormatError(f"{key}: was {list(whole)}, the transpose of its weight {weight}")
    shards, flat = tuple(stored[axes:-1]), stored[-1]
    rest = tuple(whole[axes:])
    if (
        len(shards) != len(rest)
        or tuple(stored[:axes]) != tuple(whole[:axes])
        or 0 in shards
        or any(n % s for n, s in zip(rest, shards, strict=True))
        or prod(rest) != prod(shards) * flat
    ):
        raise FormatError(
            f"{key}: shape {list(stored)} is no grid of flattened shards of {list(whole)}, nor the "
            "shape itself: this optimizer form is not known. Convert with --weights-only."
        )
    return Grid(shards, tuple(n // s for n, s in zip(rest, shards, strict=True)), transposed)


def pieces(made: Grid, index: Sequence[int], chunk: Chunk, array: StoredArray) -> list[Piece]:
    """Pieces in one chunk of the tensor at this index of the key's leading axes."""
    axes = len(index)
    steps = row_major(chunk.sizes)
    heads = Box.at(chunk.offsets[axes:-1], chunk.sizes[axes:-1])
    out: list[Piece] = []
    for rest in _indices(heads):
        at = (*index, *rest)
        base = sum(s * (i - a) for s, i, a in zip(steps, at, chunk.offsets, strict=False))
        out += made.pieces(rest, chunk.offsets[-1], array, base)
    return out


def _indices(box: Box) -> list[tuple[int, ...]]:
    out: list[tuple[int, ...]] = [()]
    for a, b in zip(box.start, box.stop, strict=True):
        out = [(*p, i) for p in out for i in range(a, b)]
    return out
