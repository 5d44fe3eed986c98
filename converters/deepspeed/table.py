"""The tensors of a checkpoint in the making, and who holds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Protocol

from reshard.dtypes import DType
from reshard.errors import CorruptError
from reshard.layout import Piece, StoredArray
from reshard.tensor import MASTER, PARAM, LogicalTensor, TensorId

from . import flat
from .cuts import Shard
from .flat import FlatGroup, Run, SubGroup


class Holder(Protocol):
    """One holder's copy of a tensor."""

    def pieces(self) -> list[Piece]:
        """Where the elements lie."""
        ...


@dataclass(frozen=True, slots=True)
class WholeHolder:
    """A shard stored as an array of its own."""

    shard: Shard
    array: StoredArray

    def pieces(self) -> list[Piece]:
        """One run: all of the array."""
        return self.shard.pieces([Run(0, self.array.numel, self.array, 0)])


@dataclass(frozen=True, slots=True)
class FlatHolder:
    """A shard inside the flat partitions of a group, one array a partition."""

    shard: Shard
    group: FlatGroup | SubGroup
    name: str
    arrays: Sequence[StoredArray | None]

    def pieces(self) -> list[Piece]:
        """The runs of the flat partitions."""
        return self.shard.pieces(self.group.runs(self.name, self.arrays))


@dataclass(frozen=True, slots=True)
class MatrixHolder:
    """A shard inside a state that holds whole matrices (Muon)."""

    shard: Shard
    group: FlatGroup
    name: str
    arrays: Sequence[StoredArray | None]

    def pieces(self) -> list[Piece]:
        """The matrix on every partition that holds a part of it."""
        return self.shard.pieces(flat.whole_runs(self.group, self.name, self.arrays))


@dataclass(frozen=True, slots=True)
class FragmentHolder:
    """A frozen parameter's shard in flat fragments, one a rank (ZeRO 3)."""

    shard: Shard
    arrays: Sequence[StoredArray | None]

    def pieces(self) -> list[Piece]:
        """The fragments without their padding."""
        return self.shard.pieces(flat.fragment_runs(prod(self.shard.shape), self.arrays))


@dataclass
class Table:
    """The checkpoint in the making: tensors and who holds them."""

    tensors: dict[TensorId, LogicalTensor] = field(default_factory=dict)
    holders: dict[TensorId, list[Holder]] = field(default_factory=dict)

    def add(
        self, tensor: TensorId, shape: tuple[int, ...], dtype: DType, holder: Holder, where: str
    ) -> None:
        """Take in one holder of a tensor. Raises CorruptError if its like differs."""
        known = self.tensors.get(tensor)
        if known is None:
            self.tensors[tensor] = LogicalTensor(tensor, shape, dtype)
            self.holders[tensor] = [holder]
            return
        if (known.shape, known.dtype) != (shape, dtype):
            raise CorruptError(
                f"{where}: {tensor} is {list(shape)} {dtype}, elsewhere {list(known.shape)} "
                f"{known.dtype}: the files are of different saves"
            )
        self.holders[tensor].append(holder)

    def pieces(self, tensor: TensorId) -> list[Piece]:
        """All pieces of a tensor, each stored run once."""
        found: dict[tuple[str, int, int, object], Piece] = {}
        for holder in self.holders[tensor]:
            for p in holder.pieces():
                found.setdefault((p.array.file, p.array.offset, p.base, p.box), p)
        return list(found.values())


def add_state(
    table: Table,
    kind: DType | None,
    name: str,
    slot: str,
    shape: tuple[int, ...],
    dtype: DType,
    holder: Holder,
    where: str,
) -> None:
    """A master of the model's own type is the weight itself: an fp32 run has one copy."""
    if slot == MASTER and kind == dtype:
        slot = PARAM
    table.add(TensorId(name, slot), shape, dtype, holder, where)
