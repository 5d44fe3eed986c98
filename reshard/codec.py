"""The maps that change values on reading: a constant added, block-scaled fp8, MXFP4."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from reshard.box import Box, row_major
from reshard.device import CPU
from reshard.dtypes import DType
from reshard.layout import Piece, Read, StoredArray

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Add:
    """Values with a constant added, in fp32, rounded once to `dtype` (a norm as gain - 1)."""

    value: float
    dtype: DType

    def decode(self, read: Read, piece: Piece, box: Box) -> Array:
        """The values of a box."""
        raw = read(replace(piece, codec=None), box).astype(np.float32)
        return np.asarray((raw + np.float32(self.value)).astype(self.dtype.numpy))


def shifted(pieces: Iterable[Piece], add: Add) -> Iterator[Piece]:
    """The pieces with a constant added on reading."""
    for piece in pieces:
        yield replace(piece, codec=add)


@dataclass(frozen=True, slots=True)
class BlockScaled:
    """fp8 elements of a matrix, times the fp32 scale of the block each lies in, as `dtype`.

    Scales multiply, despite the name weight_scale_inv. Source: DeepSeek-V3 inference
    kernel.py weight_dequant; fixture variants/deepseek_v3_fp8_mtp.
    """

    scales: StoredArray
    block: tuple[int, int]  # rows, columns of a block; the last of an axis may be cut short
    dtype: DType

    def parts(self, read: Read, piece: Piece, box: Box) -> tuple[Array, Array]:
        """The values of a box, and the factor of each."""
        raw = read(replace(piece, codec=None), box)
        scales = _whole(read, self.scales)
        rows, columns = np.divmod(_indices(piece, box), piece.array.shape[1])
        return raw, scales[rows // self.block[0], columns // self.block[1]]

    def decode(self, read: Read, piece: Piece, box: Box) -> Array:
        """The values of a box, times their factors."""
        return CPU.scaled(*self.parts(read, piece, box), self.dtype.numpy)


#: The sixteen values of fp4 e2m1. Source: OCP Microscaling Formats 1.0, table 5.
_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_FP4 = np.concatenate([_FP4, -_FP4])
_PAIR = 32  # elements that share a scale


@dataclass(frozen=True, slots=True)
class MicroScaled:
    """MXFP4: two e2m1 elements a byte (the even one in the low nibble), a power of two per 32.

    The piece counts elements of a virtual array; `blocks` and `scales` are what is stored.
    Source: transformers 5.24.0 integrations/mxfp4.py convert_moe_packed_tensors; fixture
    variants/gpt_oss_square_mxfp4.
    """

    blocks: StoredArray
    scales: StoredArray
    dtype: DType

    def parts(self, read: Read, piece: Piece, box: Box) -> tuple[Array, Array]:
        """The values of a box, and the factor of each."""
        at = _indices(piece, box)
        low, high = int(at.min()), int(at.max())
        data = _range(read, self.blocks, low // 2, high // 2 + 1)[(at // 2) - low // 2]
        nibble = np.where(at % 2, data >> 4, data & 15)
        first = low // _PAIR
        scale = _range(read, self.scales, first, high // _PAIR + 1)[at // _PAIR - first]
        return _FP4[nibble], np.ldexp(np.float32(1), scale.astype(np.int32) - 127)

    def decode(self, read: Read, piece: Piece, box: Box) -> Array:
        """The values of a box, times their factors."""
        return CPU.scaled(*self.parts(read, piece, box), self.dtype.numpy)


def _indices(piece: Piece, box: Box) -> npt.NDArray[np.int64]:
    """The element of the stored array behind every element of a box."""
    out = np.array(piece.base_of(box), np.int64)
    for n, stride in zip(box.shape, piece.strides, strict=True):
        out = np.add.outer(out, np.arange(n, dtype=np.int64) * stride)
    return out


def _whole(read: Read, array: StoredArray) -> Array:
    return _range(read, array, 0, prod(array.shape)).reshape(array.shape)


def _range(read: Read, array: StoredArray, start: int, stop: int) -> Array:
    piece = Piece(Box((0,), (array.numel,)), array, 0, (1,))
    return read(piece, Box((start,), (stop,)))


@dataclass(frozen=True, slots=True)
class Constant:
    """One value that no file holds, as `dtype`: what a migration sets elements to."""

    value: float
    dtype: DType

    def decode(self, read: Read, piece: Piece, box: Box) -> Array:
        """The values of a box."""
        return np.full(box.shape, self.value, self.dtype.numpy)


def constant(box: Box, value: float, dtype: DType) -> Piece:
    """A piece that holds one value in every element of a box, and lies in no file."""
    array = StoredArray("", 0, box.shape, dtype, "", "migration")
    return Piece(box, array, 0, row_major(box.shape), Constant(value, dtype))
