"""Which box of a logical tensor lies where in one rank's shard of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from reshard.box import Box, flat_boxes, row_major
from reshard.errors import LayoutError
from reshard.layout import Piece, StoredArray
from reshard.topology import Topology, divide

from .run import Place
from .sizes import Sizes
from .tp_rules import Rule


@dataclass(frozen=True, slots=True)
class Part:
    """A box of the logical tensor and where its first element lies in the shard."""

    box: Box
    at: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's shard: its shape, and the parts it is made of."""

    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    def pieces(self, array: StoredArray) -> list[Piece]:
        """The pieces of a stored array that is this shard, row-major."""
        strides = row_major(self.shape)
        return [
            Piece(p.box, array, sum(s * a for s, a in zip(strides, p.at, strict=True)), strides)
            for p in self.parts
        ]

    def flat_pieces(self, start: int, chunk: int, array: StoredArray) -> list[Piece]:
        """The pieces of the shard that lie in a 1-D array of a buffer.

        The shard's flattening begins at element `start` of the buffer; `array` holds the buffer
        from element `chunk` on.
        """
        low = max(start, chunk)
        high = min(start + prod(self.shape), chunk + array.numel)
        if low >= high:
            return []
        steps = row_major(self.shape)
        found: list[Piece] = []
        for run in flat_boxes(self.shape, low - start, high - start):
            for part in self.parts:
                mine = run & Box.at(part.at, part.box.shape)
                if mine is None:
                    continue
                first = sum(s * a for s, a in zip(steps, mine.start, strict=True))
                move = [b - a for a, b in zip(part.at, part.box.start, strict=True)]
                found.append(Piece(mine.shift(move), array, start + first - chunk, steps))
        return found


def degree_of(rule: Rule, topology: Topology, place: Place) -> tuple[int, int, str]:
    """(degree, rank, its name) along which a tensor is cut."""
    if rule.expert:
        return topology.expert_tp, place.etp, "etp"
    return topology.tp, place.tp, "tp"


def shard(name: str, shape: Sequence[int], rule: Rule, topology: Topology, place: Place) -> Shard:
    """A rank's shard of a tensor of this (padded) global shape.

    Raises LayoutError for a cut that does not divide.
    """
    if rule.axis is None:
        whole = Box.whole(shape)
        return Shard(tuple(shape), (Part(whole, whole.start),))
    degree, rank, word = degree_of(rule, topology, place)
    halves = 2 if rule.gated else 1
    axis = rule.axis
    if shape[axis] % halves:
        raise LayoutError(f"{name}: axis {axis} of {list(shape)} holds gate and up and is odd")
    half = shape[axis] // halves
    each = divide(half, degree, name, _axis_name(name, axis), word)
    parts = []
    for i in range(halves):
        start = [0] * len(shape)
        size = list(shape)
        start[axis], size[axis] = i * half + rank * each, each
        at = [0] * len(shape)
        at[axis] = i * each
        parts.append(Part(Box.at(start, size), tuple(at)))
    local = list(shape)
    local[axis] = each * halves
    return Shard(tuple(local), tuple(parts))


def global_shape(local: Sequence[int], rule: Rule, topology: Topology) -> tuple[int, ...]:
    """The (padded) shape of the tensor whose shard has this shape."""
    out = list(local)
    if rule.axis is not None:
        out[rule.axis] *= topology.expert_tp if rule.expert else topology.tp
    return tuple(out)


def _axis_name(name: str, axis: int) -> str:
    for part, words in _AXES.items():
        if part in name:
            return words[axis] if axis < len(words) else str(axis)
    return str(axis)


_AXES = {
    "linear_qkv": ("query groups x heads x head_dim", "hidden"),
    "linear_proj": ("hidden", "heads x head_dim"),
    "linear_fc1": ("ffn", "hidden"),
    "linear_fc2": ("hidden", "ffn"),
    "word_embeddings": ("padded vocabulary", "hidden"),
    "output_layer": ("padded vocabulary", "hidden"),
    "up_proj": ("heads x head_dim", "latent"),
    "down_proj": ("latent", "hidden"),
    "q_proj": ("heads x head_dim", "hidden"),
}


def check_degrees(model: Sizes, topology: Topology) -> None:
    """Raises LayoutError for degrees that Megatron refuses, naming axis and degrees that fit.

    Source: transformer_config.py __post_init__, attention.py, moe/experts.py @ core_v0.16.1.
    """
    if model.heads is not None:
        divide(model.heads, topology.tp, "self_attention", "attention heads", "tp")
    groups = model.query_groups
    if groups and not model.mla and groups % topology.tp and topology.tp % groups:
        fits = [
            d for d in range(1, (model.heads or groups) + 1) if groups % d == 0 or d % groups == 0
        ]
        raise LayoutError(
            f"self_attention.linear_qkv: {groups} query groups and tp={topology.tp}: one must "
            f"divide the other. Use tp in {{{', '.join(map(str, fits[:16]))}}}."
        )
    if any(model.delta_layers) and model.delta_heads is not None:
        for heads, what in zip(model.delta_heads, ("key heads", "value heads"), strict=True):
            divide(heads, topology.tp, "self_attention.in_proj", f"linear attention {what}", "tp")
    if model.ffn is not None and not all(model.moe_layers or (False,)):
        divide(model.ffn, topology.tp, "mlp.linear_fc1", "ffn", "tp")
    if model.experts is None:
        if topology.ep > 1 or topology.etp not in (None, topology.tp):
            raise LayoutError(
                f"the model has no experts; ep={topology.ep}, etp={topology.expert_tp} cannot be"
            )
        return
    divide(model.experts, topology.ep, "mlp.experts", "experts", "ep")
    if model.moe_ffn is not None:
        divide(model.moe_ffn, topology.expert_tp, "mlp.experts.linear_fc1", "moe ffn", "etp")
    if model.shared_ffn is not None:
        divide(model.shared_ffn, topology.tp, "mlp.shared_experts.linear_fc1", "ffn", "tp")
