"""Digests of logical tensors that do not depend on format, topology or order.

Two lanes over the canonical row-major tensor: rows of 64-bit words, sum mod 2^64 of
word * C[word in row] * R[row], with odd weights from a mixer. Additive over disjoint boxes, so any
shard contributes alone and in any order. An element narrower than a word enters shifted to its
place, the rest zero. A single lane is blind at the top (an even number of sign flips, x and -x
swapped): the second lane sees `word >> 32` with its own weights. It is for mistakes, not malice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from reshard.box import Box, row_major
from reshard.tensor import LogicalTensor, TensorId

_MASK = (1 << 64) - 1
_COLUMN, _ROW = (0x1D8E4E27C47D124F, 0xA0761D6478BD642F), (0xE7037ED1A0B428DB, 0x8EBC6AF09C88C6E3)
_CACHED = 1 << 16  # words of weights kept per lane

Words = npt.NDArray[np.uint64]
Values = npt.NDArray[Any]
ByRows = Callable[[Values, int, tuple[Words, Words]], tuple[Words, Words]]


def _mix(index: Words, seed: int) -> Words:
    """Odd 64-bit weights for these indices (the finaliser of splitmix64)."""
    with np.errstate(over="ignore"):
        z = index * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return (z ^ (z >> np.uint64(31))) | np.uint64(1)


@lru_cache(maxsize=4)
def _cached(seed: int) -> Words:
    return _mix(np.arange(_CACHED, dtype=np.uint64), seed)


def _weights(start: int, count: int, seed: int) -> Words:
    if start + count <= _CACHED:
        return _cached(seed)[start : start + count]
    return _mix(np.arange(start, start + count, dtype=np.uint64), seed)


def _row_numbers(shape: Sequence[int], box: Box) -> Words:
    """The number of each row (last axis) of `box` among all rows of the tensor."""
    rows = np.zeros((), np.uint64)
    for stride, a, b in zip(row_major(shape[:-1]), box.start[:-1], box.stop[:-1], strict=True):
        rows = np.add.outer(rows, np.arange(a, b, dtype=np.uint64) * np.uint64(stride))
    return rows.reshape(-1)


def lanes(
    shape: Sequence[int],
    box: Box,
    values: Values,
    columns: int | None = None,
    sums: ByRows | None = None,
) -> tuple[int, int]:
    """What the elements of `box`, given as an array of its shape, add to a tensor's two lanes.

    `shape` is the whole tensor's. Bits are hashed, not numbers: -0.0 and NaN payloads count.
    `columns`: elements of a row, where the last axes of `shape` are the parts of one row. `sums`:
    what does the work of `by_rows`, to the bit.
    """
    if not shape:
        shape, box = (1,), Box((0,), (1,))
    if box.numel == 0:
        return (0, 0)
    axis = _row_axis(shape, columns or shape[-1])
    rows = _row_numbers((*shape[:axis], 1), Box((*box.start[:axis], 0), (*box.stop[:axis], 1)))
    values = values.reshape(box.shape)
    if axis == len(shape) - 1:
        return _run(rows, box.start[-1], values, sums or by_rows)
    a = b = 0
    steps = row_major(shape[axis:-1])
    for inner in np.ndindex(*box.shape[axis:-1]):
        at = sum(s * (i + o) for s, i, o in zip(steps, inner, box.start[axis:-1], strict=True))
        part = values[(*(slice(None),) * axis, *inner)]
        x, y = _run(rows, at * shape[-1] + box.start[-1], part, sums or by_rows)
        a, b = a + x, b + y
    return (a & _MASK, b & _MASK)


def _row_axis(shape: Sequence[int], columns: int) -> int:
    """The first of the last axes that together make up one row."""
    axis, n = len(shape) - 1, shape[-1]
    while n < columns and axis > 0:
        axis -= 1
        n *= shape[axis]
    if n != columns:
        raise ValueError(f"rows of {columns} elements are not made of the last axes of {shape}")
    return axis


def _run(rows: Words, column: int, values: Values, sums: ByRows) -> tuple[int, int]:
    """The lanes of a rectangle: these rows, from element `column` of each on."""
    flat = np.ascontiguousarray(values).reshape(len(rows), -1)
    word, lead = divmod(column * flat.itemsize, 8)
    words = -(-(lead + flat.shape[1] * flat.itemsize) // 8)
    weights = (_weights(word, words, _COLUMN[0]), _weights(word, words, _COLUMN[1]))
    a, b = sums(flat, lead, weights)
    return int(np.dot(a, _mix(rows, _ROW[0]))), int(np.dot(b, _mix(rows, _ROW[1])))


def by_rows(values: Values, lead: int, weights: tuple[Words, Words]) -> tuple[Words, Words]:
    """For both lanes, the sum mod 2^64 over each row of its words times their weights.

    `values` [rows, columns], contiguous; each row's bytes lie `lead` behind the start of a word.
    The second lane takes the upper halves of words.
    """
    flat = values.view(np.uint8)
    width = lead + flat.shape[1]
    if lead or width % 8:
        padded = np.zeros((flat.shape[0], -(-width // 8) * 8), np.uint8)
        padded[:, lead:width] = flat
        flat = padded
    words = flat.view(np.uint64)
    first = np.einsum("ij,j->i", words, weights[0])
    return first, np.einsum("ij,j->i", words >> np.uint64(32), weights[1])


@dataclass(slots=True)
class Sum:
    """The running fingerprint of one tensor, and how many elements went into it."""

    a: int = 0
    b: int = 0
    elements: int = 0

    def add(
        self, tensor: LogicalTensor, box: Box, values: Values, sums: ByRows | None = None
    ) -> None:
        """Take in the values of a box; elements of padding are left out."""
        true = box & tensor.true
        if true is None:
            return
        if true != box:
            values = values[
                tuple(
                    slice(c - a, d - a)
                    for a, c, d in zip(box.start, true.start, true.stop, strict=True)
                )
            ]
        columns = tensor.shape[-1] if tensor.factors else None
        a, b = lanes(tensor.factors or tensor.shape, true, values, columns, sums)
        self.a, self.b = (self.a + a) & _MASK, (self.b + b) & _MASK
        self.elements += true.numel

    def merge(self, other: Sum) -> None:
        """Take in what another worker has summed of the same tensor."""
        self.a, self.b = (self.a + other.a) & _MASK, (self.b + other.b) & _MASK
        self.elements += other.elements

    @property
    def hex(self) -> str:
        """32 hex digits."""
        return f"{self.a:016x}{self.b:016x}"


def slot_digests(tensors: Iterable[LogicalTensor], sums: Mapping[TensorId, str]) -> dict[str, str]:
    """One digest per slot over (name, dtype, shape, fingerprint), sorted by name."""
    by_slot: dict[str, list[LogicalTensor]] = {}
    for t in tensors:
        by_slot.setdefault(t.id.slot, []).append(t)
    out = {}
    for slot, members in sorted(by_slot.items()):
        h = hashlib.blake2b(digest_size=16)
        for t in sorted(members, key=lambda t: t.id):
            shape = "x".join(map(str, t.shape))
            h.update(f"{t.id.name}\t{t.dtype.name}\t{shape}\t{sums[t.id]}\n".encode())
        out[slot] = h.hexdigest()
    return out


def complete(tensor: LogicalTensor, total: Sum) -> bool:
    """Whether as many elements went in as the tensor has."""
    return total.elements == prod(tensor.shape)
