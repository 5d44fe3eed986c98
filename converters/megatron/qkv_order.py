"""The order of fused attention rows in checkpoints of version 0, 1 and 2.

A rank's query_key_value rows count (part, head, dim) in version 0, (head, dim, part) in 1 and
(head, part, dim) from 2 on, part being q, k, v; key_value of cross attention has k, v. Megatron
re-orders weights and biases on loading, not the masters and moments, which lie as they do.
Source: megatron/training/checkpointing.py fix_query_key_value_ordering @ core_v0.16.1; fixture
e-legacy-v0-tp2pp2.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from reshard.box import Box, row_major
from reshard.errors import FormatError, LayoutError

from .sizes import Sizes, need

_FUSED = re.compile(r".*_attention\.(linear_qkv|linear_kv)\.(?:weight|bias)")
#: version -> stored order of the axes head, part, dim
_AXES = {0: (1, 0, 2), 1: (0, 2, 1)}


@dataclass(frozen=True, slots=True)
class RowOrder:
    """A fused tensor whose rows lie in another order of (head, part, dim) than today's."""

    heads: int  # of the whole tensor
    parts: int
    head_dim: int
    stored: tuple[int, ...]  # the axes head 0, part 1, dim 2, slowest first

    def factors(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape, of the tensor or a rank's part, with its rows counted as head, part, dim."""
        heads, over = divmod(shape[0], self.parts * self.head_dim)
        if over or not heads or self.heads % heads:
            raise LayoutError(
                f"{name}: {shape[0]} rows are {heads} heads of {self.parts} x {self.head_dim} and "
                f"{over} rows; the args say {self.heads} heads. Give --from kv_channels=… "
                "(Megatron's --kv-channels)."
            )
        return (heads, self.parts, self.head_dim, *shape[1:])

    def whole(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """The whole tensor's shape, counted so. Raises LayoutError for fewer heads than it has."""
        counted = self.factors(name, shape)
        if counted[0] != self.heads:
            raise LayoutError(
                f"{name}: {shape[0]} rows are {counted[0]} heads of {self.parts} x "
                f"{self.head_dim}; the args say {self.heads} heads. Give --from kv_channels=… "
                "(Megatron's --kv-channels)."
            )
        return counted

    def strides(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """The strides of a rank's rows along head, part, dim, and of the axes after them."""
        counted = self.factors(name, shape)
        lying = row_major([counted[axis] for axis in self.stored])
        row = prod(shape[1:])
        steps = [0, 0, 0]
        for axis, step in zip(self.stored, lying, strict=True):
            steps[axis] = step * row
        return (*steps, *row_major(shape)[1:])

    def box(self, name: str, box: Box) -> Box:
        """A box of whole heads, counted so."""
        each = self.parts * self.head_dim
        if box.start[0] % each or box.stop[0] % each:
            raise LayoutError(f"{name}: rows {box.start[0]}:{box.stop[0]} cut a head of {each}")
        return Box(
            (box.start[0] // each, 0, 0, *box.start[1:]),
            (box.stop[0] // each, self.parts, self.head_dim, *box.stop[1:]),
        )


def row_order(version: float, name: str, model: Sizes) -> RowOrder | None:
    """How the rows of a canonical tensor lie in a checkpoint of this version; None: as today.

    Raises FormatError for grouped-query attention, which no version below 2 had.
    """
    m = _FUSED.fullmatch(name)
    if m is None or version >= 2:
        return None
    if model.query_groups != model.heads:
        raise FormatError(
            f"{name}: checkpoint_version {version} with {model.query_groups} query groups of "
            f"{model.heads} heads: grouped-query attention came after version 2"
        )
    parts = 3 if m[1] == "linear_qkv" else 2
    heads, head_dim = need(model.heads, "heads"), need(model.head_dim, "head_dim")
    return RowOrder(heads, parts, head_dim, _AXES[int(version)])
