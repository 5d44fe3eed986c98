"""Which rank file of a legacy checkpoint holds which logical tensor, read or declared."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from reshard.box import row_major
from reshard.dtypes import DType
from reshard.errors import CorruptError, LayoutError
from reshard.layout import Piece, StoredArray
from reshard.tensor import LogicalTensor, TensorId
from reshard.topology import Topology

from . import names, tp_rules
from .dist_read import true_shape
from .legacy_ranks import RankFile
from .qkv_order import row_order
from .shards import global_shape, shard
from .sizes import Sizes
from .tp_rules import Rule


@dataclass(frozen=True, slots=True)
class Spot:
    """Where one logical tensor's shard lies in a stored parameter, and so in its master."""

    name: str  # canonical
    shape: tuple[int, ...]  # of the shard
    base: int  # elements
    strides: tuple[int, ...]
    own: str | None  # the checkpoint's own global spelling, where it differs


@dataclass(frozen=True, slots=True)
class Param:
    """One tensor of a rank's model chunk; a GroupedMLP's holds several logical tensors."""

    key: str
    chunk: int
    shape: tuple[int, ...]
    dtype: DType
    spots: tuple[Spot, ...]

    @property
    def name(self) -> str:
        """The canonical name of the first logical tensor."""
        return self.spots[0].name


@dataclass(frozen=True, slots=True)
class Entry:
    """A logical tensor's shard in a stored array, but for the array's offset.

    Ranks that hold the same entries share one tuple of them and keep only offsets.
    """

    tensor: TensorId
    spot: Spot
    key: str
    stored: tuple[int, ...]  # shape of the stored array
    dtype: DType
    base: int = 0  # elements before the parameter in the array (flat buffers)


@dataclass(frozen=True, slots=True)
class Held:
    """A rank file's offsets of the entries it holds."""

    rank: RankFile
    file: str
    offsets: npt.NDArray[np.int64]  # bytes


@dataclass(frozen=True, slots=True)
class Table:
    """The entries that some rank files have in common, and those files."""

    entries: tuple[Entry, ...]
    held: list[Held] = field(default_factory=list)


@dataclass
class Holdings:
    """Which rank files hold what, compactly."""

    model: Sizes
    topology: Topology
    mla_down: bool | None
    version: float = 3.0  # checkpoint_version, which says how fused attention rows lie
    tensors: dict[TensorId, LogicalTensor] = field(default_factory=dict)
    tables: dict[tuple[Entry, ...], Table] = field(default_factory=dict)
    index: dict[TensorId, list[tuple[Table, int]]] = field(default_factory=dict)
    rules: dict[str, Rule] = field(default_factory=dict)

    def add(self, rank: RankFile, file: str, found: Sequence[tuple[Entry, int]]) -> None:
        """Take in what one file holds. Raises CorruptError where ranks disagree on a tensor."""
        if not found:
            return
        entries = tuple(entry for entry, _ in found)
        table = self.tables.get(entries)
        if table is None:
            table = self.tables[entries] = Table(entries)
            for i, entry in enumerate(entries):
                self._declare(entry, file)
                self.index.setdefault(entry.tensor, []).append((table, i))
        table.held.append(Held(rank, file, np.array([at for _, at in found], np.int64)))

    def _declare(self, entry: Entry, file: str) -> None:
        shape = global_shape(entry.spot.shape, self.rule(entry.tensor.name), self.topology)
        true, padded = true_shape(entry.tensor.name, shape, self.model)
        order = row_order(self.version, entry.tensor.name, self.model)
        factors = None if order is None else order.whole(entry.tensor.name, true)
        made = LogicalTensor(
            entry.tensor, true, entry.dtype, padded, entry.spot.own, factors=factors
        )
        known = self.tensors.setdefault(entry.tensor, made)
        if (known.extent, known.dtype) != (made.extent, made.dtype):
            raise CorruptError(
                f"{file}: {entry.key} makes {entry.tensor} {list(made.extent)} {made.dtype}, "
                f"another rank file makes it {list(known.extent)} {known.dtype}. The files are of "
                "different runs."
            )

    def rule(self, name: str) -> Rule:
        """How ranks share a tensor. On one rank no rule is needed."""
        found = self.rules.get(name)
        if found is None:
            try:
                found = tp_rules.tp_rule(name, self.model, self.mla_down)
            except LayoutError:
                if self.topology.tp > 1 or self.topology.expert_tp > 1:
                    raise
                found = Rule(None)
            self.rules[name] = found
        return found

    def pieces(self, tensor: TensorId) -> list[Piece]:
        """All pieces of a tensor, the copies of ranks that hold the same included."""
        out: list[Piece] = []
        logical = self.tensors[tensor]
        rule = self.rule(tensor.name)
        order = row_order(self.version, tensor.name, self.model)
        for table, i in self.index[tensor]:
            entry = table.entries[i]
            steps = entry.spot.strides
            lying = steps if order is None else order.strides(tensor.name, entry.spot.shape)
            for held in table.held:
                array = StoredArray(
                    held.file, int(held.offsets[i]), entry.stored, entry.dtype, entry.key,
                    held.rank.folder,
                )  # fmt: skip
                part = shard(tensor.name, logical.extent, rule, self.topology, held.rank.place)
                for p in part.parts:
                    first = sum(s * a for s, a in zip(steps, p.at, strict=True))
                    base = entry.base + entry.spot.base + first
                    box = p.box if order is None else order.box(tensor.name, p.box)
                    out.append(Piece(box, array, base, lying))
        return out


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts that a rank holds."""

    first: int
    count: int


def spots_of(
    key: str, name: names.LegacyName, shape: tuple[int, ...], experts: Experts
) -> Iterator[Spot]:
    """Where the logical tensors of a stored parameter of this shape lie in it.

    GroupedMLP keeps weight1 as [hidden, experts * ffn] and weight2 as [experts * ffn, hidden],
    both used as `.view(experts, …)`: expert e is a run of its own, transposed.
    Source: megatron/core/transformer/moe/experts.py GroupedMLP.forward @ core_v0.16.1.
    """
    assert name.canonical is not None
    if name.kind == "tensor":
        yield Spot(name.canonical, shape, 0, row_major(shape), own_name(key, name.canonical))
        return
    down = name.kind == "grouped_fc2"
    hidden, width = (shape[1], shape[0]) if down else shape
    if not experts.count or width % experts.count:
        raise LayoutError(f"{key}: {width} columns do not divide into {experts.count} experts")
    ffn = width // experts.count
    for e in range(experts.count):
        canonical = name.canonical.replace("{expert}", str(experts.first + e))
        inner, strides = ((hidden, ffn), (1, hidden)) if down else ((ffn, hidden), (1, ffn))
        own = f"{own_name(key, canonical)}[{experts.first + e}]"
        yield Spot(canonical, inner, e * ffn * hidden, strides, own)


def own_name(key: str, canonical: str) -> str | None:
    """A legacy name with the layer and expert counted globally, where it is not the canonical."""
    m = re.search(r"^(.*(?:decoder|encoder|transformer|mtp)\.layers\.)\d+(\..+)$", key)
    c = re.match(r"(?:decoder|mtp)\.layers\.(\d+)\.(?:.*mlp\.experts\.(\d+)\.)?", canonical)
    if m is None or c is None:
        return None if key == canonical else key
    rest = m[2]
    if c[2] is not None:
        rest = re.sub(r"(\.local_experts\.)\d+\.", rf"\g<1>{c[2]}.", rest)
        rest = re.sub(r"(\.experts\.linear_fc[12]\.(?:weight|bias))\d+$", rf"\g<1>{c[2]}", rest)
    own = f"{m[1]}{c[1]}{rest}"
    return None if own == canonical else own
