"""Whether fp32 masters round to the stored weights, and what it means if they do not.

Megatron's fully_reshardable writer, in every release up to core 0.19.0, reads parameters after
the first bucket from shifted offsets and pads with zeros (Megatron-LM PR #5077; fixture
f-dp3-buckets). A master one step away from its weight is legitimate (ties, stochastic rounding).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from reshard.box import Box
from reshard.errors import CorruptError
from reshard.format import Loss
from reshard.tensor import MASTER, PARAM, LogicalTensor

Array = npt.NDArray[Any]
_RUN = 8  # consecutive elements that make a signature


def _ordered(bits: Array) -> Array:
    """16-bit float patterns as integers in the order of their values."""
    signed = bits.astype(np.int32)
    return np.where(signed >= 0x8000, 0x8000 - signed, signed)


@dataclass(slots=True)
class Rounding:
    """Compares blocks of a 16-bit weight with its fp32 master."""

    weight: np.dtype[Any]
    true: Box
    different: int = 0
    far: int = 0
    zeroed: int = 0
    shifted: int = 0
    elements: int = 0
    matrix: bool = True  # a norm may be a 16-bit gain less 1: far from its fp32 master
    examples: list[str] = field(default_factory=list)

    @classmethod
    def between(cls, tensors: Iterable[LogicalTensor]) -> Rounding | None:
        """A comparison, if these slots of one name hold a 16-bit weight and an fp32 master."""
        slots = {t.id.slot: t for t in tensors}
        weight, master = slots.get(PARAM), slots.get(MASTER)
        if weight is None or master is None or weight.shape != master.shape:
            return None
        if weight.dtype.name not in ("bfloat16", "float16") or master.dtype.name != "float32":
            return None
        return cls(weight.dtype.numpy, weight.true, matrix=len(weight.shape) > 1)

    def compare(
        self, box: Box, weights: Sequence[tuple[Box, Array]], masters: Sequence[tuple[Box, Array]]
    ) -> None:
        """Take in one block, given as read: boxes with their values."""
        true = box & self.true
        if true is None:
            return
        if [b for b, _ in weights] == [b for b, _ in masters]:
            for (b, w), (_, m) in zip(weights, masters, strict=True):
                part = b & true
                if part is not None:
                    self._take(part, inner(w, b, part), inner(m, b, part))
            return
        whole_w, whole_m = assemble(true, weights), assemble(true, masters)
        if whole_w is not None and whole_m is not None:
            self._take(true, whole_w, whole_m)

    def _take(self, true: Box, w: Array, m: Array) -> None:
        with np.errstate(over="ignore", invalid="ignore"):
            rounded = m.astype(self.weight)
        a, b = w.view(np.uint16).reshape(-1), rounded.view(np.uint16).reshape(-1)
        self.elements += a.size
        unequal = a != b
        count = int(np.count_nonzero(unequal))
        if not count:
            return
        far = unequal & (np.abs(_ordered(a) - _ordered(b)) > 1)
        self.different += count
        self.far += int(np.count_nonzero(far))
        if far.any():
            flat = m.reshape(-1)
            if _has_run(far & (flat == 0)):
                self.zeroed += int(np.count_nonzero(far & (flat == 0)))
                self.examples.append(f"zeros in {true}")
            elif _is_shifted(a, b, far):
                self.shifted += int(np.count_nonzero(far))
                self.examples.append(f"a shifted run in {true}")

    def findings(self, name: str) -> list[Loss]:
        """What was found, as notes; raises CorruptError on the signature of known corruption."""
        if self.zeroed or self.shifted:
            raise CorruptError(
                f"{name}: {self.different} of {self.elements} fp32 masters do not round to the "
                f"stored weight ({self.examples[0]}). This is the corruption that Megatron's "
                "fully_reshardable writer makes when a buffer has several buckets (Megatron-LM PR "
                "#5077). The weights are right, the optimizer state is not: take it from a "
                "checkpoint in another optimizer format, or convert with --weights-only."
            )
        if self.matrix and 2 * self.far > self.elements >= _RUN:
            raise CorruptError(
                f"{name}: {self.far} of {self.elements} fp32 masters are not those of the stored "
                "weight, nor one step from it: weights and optimizer state are of two saves, or a "
                "rank's file lies under another rank's name. Copy the checkpoint again, or convert "
                "the weights with --weights-only."
            )
        if self.different:
            detail = f"{self.different} of {self.elements} masters do not round to the weight"
            return [Loss("master-differs", name, detail)]
        return []


def assemble(box: Box, values: Sequence[tuple[Box, Array]]) -> Array | None:
    """The values of `box` from the parts that hold it, or None if they do not cover it."""
    out: Array | None = None
    covered = 0
    for b, v in values:
        common = b & box
        if common is None:
            continue
        part = v[
            tuple(
                slice(a - o, z - o)
                for a, z, o in zip(common.start, common.stop, b.start, strict=True)
            )
        ]
        if common == box:
            return np.ascontiguousarray(part)
        if out is None:
            out = np.empty(box.shape, v.dtype)
        out[
            tuple(
                slice(a - o, z - o)
                for a, z, o in zip(common.start, common.stop, box.start, strict=True)
            )
        ] = part
        covered += common.numel
    return out if covered == box.numel else None


def inner(values: Array, outer: Box, box: Box) -> Array:
    """The contiguous values of `box` out of those of a box around it."""
    if box == outer:
        return np.ascontiguousarray(values)
    at = (slice(a - o, z - o) for a, z, o in zip(box.start, box.stop, outer.start, strict=True))
    return np.ascontiguousarray(values[tuple(at)])


def _has_run(mask: Array) -> bool:
    """Whether `_RUN` consecutive elements are set."""
    if mask.size < _RUN:
        return bool(mask.all()) and mask.size > 0
    total = np.cumsum(np.concatenate(([0], mask)))
    return bool((total[_RUN:] - total[:-_RUN] == _RUN).any())


def _is_shifted(weights: Array, rounded: Array, far: Array) -> bool:
    """Whether a run of the rounded masters stands elsewhere in the weights' block."""
    first = int(np.argmax(far))
    run = rounded[first : first + _RUN]
    if run.size < _RUN or len(np.unique(run)) < _RUN // 2:
        return False
    windows = np.lib.stride_tricks.sliding_window_view(weights, _RUN)
    return bool((windows == run).all(axis=1).any())
