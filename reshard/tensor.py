"""Identity and shape of a logical tensor: the whole, unsharded thing a model is made of."""

from __future__ import annotations

from dataclasses import dataclass

from reshard.box import Box
from reshard.dtypes import DType

#: What the model stores, the optimizer's fp32 copy, and Adam's two moments.
PARAM, MASTER, EXP_AVG, EXP_AVG_SQ, STEP = "param", "master", "exp_avg", "exp_avg_sq", "step"


@dataclass(frozen=True, slots=True, order=True)
class TensorId:
    """A tensor's name, per layer and expert, and which copy of it is meant."""

    name: str
    slot: str = PARAM

    def __str__(self) -> str:
        return self.name if self.slot == PARAM else f"{self.name} ({self.slot})"


@dataclass(frozen=True, slots=True)
class LogicalTensor:
    """A whole tensor of a checkpoint.

    `shape` is the true one. `padded` is what the checkpoint stores where it rounds an axis up
    (vocabulary rows); elements beyond `shape` are padding: moved where both sides hold them,
    never compared, never fingerprinted.
    """

    id: TensorId
    shape: tuple[int, ...]
    dtype: DType
    padded: tuple[int, ...] | None = None
    stored_name: str | None = None  # the checkpoint's own global spelling, where it differs
    #: A finer shape of the same row-major elements (an axis of heads split in groups, heads and
    #: head_dim): the space that boxes are counted in, where a layout needs it.
    factors: tuple[int, ...] | None = None
    fixed: bool = False  # --dtype leaves its dtype alone (a router's correction bias)

    @property
    def extent(self) -> tuple[int, ...]:
        """The shape with its padding."""
        return self.padded or self.shape

    @property
    def space(self) -> tuple[int, ...]:
        """The shape that boxes of this tensor are counted in, padding included."""
        return self.factors or self.extent

    @property
    def true(self) -> Box:
        """The elements that are not padding, in `space`."""
        return Box.whole(self.factors or self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the true tensor."""
        n = self.dtype.itemsize
        for d in self.shape:
            n *= d
        return n
