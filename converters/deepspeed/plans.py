"""The files of a DeepSpeed target in the making: which tensor goes where in them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod

from reshard.checkpoint import Checkpoint
from reshard.containers.inert import TensorRef
from reshard.dtypes import FLOAT32, DType, named
from reshard.errors import LayoutError
from reshard.layout import Draft, StoredArray
from reshard.tensor import MASTER, PARAM, TensorId

from . import flat
from .cuts import Shard
from .flat import FlatGroup, SubGroup
from .goal import Goal
from .names import expert_parts
from .native import Group
from .recut import shard_of
from .sheet import Sheet
from .table import FlatHolder, FragmentHolder, Holder, MatrixHolder, Table, WholeHolder

Place = tuple[Sheet, TensorRef]


@dataclass
class Plans:
    """The files of a target, and which tensor goes where in them.

    A file is laid out as soon as its tree is whole, and the tree is let go: ZeRO 3 has one for
    every rank, with every weight in it. Holders are made when all of `arrays` are known.
    """

    source: Checkpoint
    aim: Goal
    under: str = ""  # the tag folder, where a trainer's folder lies around it
    drafts: list[Draft] = field(default_factory=list)
    arrays: dict[tuple[str, str], StoredArray] = field(default_factory=dict)  # by file and key
    wholes: list[tuple[str, str, Shard, Place]] = field(default_factory=list)
    fragments: list[tuple[str, Shard, list[Place]]] = field(default_factory=list)
    flats: list[tuple[Group, str, FlatGroup | SubGroup, Mapping[str, str], int, list[Place]]] = (
        field(default_factory=list)
    )

    def sheet(self, name: str) -> Sheet:
        """A new file, to be finished."""
        return Sheet(f"{self.under}/{name}" if self.under else name)

    def finish(self, sheet: Sheet, root: object) -> None:
        """Lay out a file, all of whose tensors `root` holds."""
        draft, made = sheet.draft(root)
        sheet.values.clear()
        self.drafts.append(draft)
        self.arrays |= {(sheet.name, key): made[key] for key in sheet.awaited}

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's logical shape."""
        tensors = self.source.layout.tensors
        found = tensors.get(TensorId(name)) or tensors.get(TensorId(name, MASTER))
        if found is None:
            raise LayoutError(
                f"--like holds {name}, and {self.source.path} does not: they are of different "
                "models, or name their parameters otherwise"
            )
        return found.shape

    def shard(self, name: str, mp: int) -> Shard:
        """A model-parallel rank's shard of a tensor."""
        return shard_of(self.aim.affine, name, self.shape(name), mp % self.aim.topology.tp)

    def dtype(self, name: str, slot: str) -> DType:
        """What a slot is stored in."""
        if slot == PARAM:
            return named(self.aim.kind(name))
        found = self.source.layout.tensors.get(TensorId(name, slot))
        return found.dtype if found is not None else FLOAT32


def local_members(aim: Goal, group: Group, mp: int, ep: int) -> dict[str, str]:
    """Local name -> global name of a group's members on one rank, in flat order."""
    if aim.pipeline is not None:
        stage = aim.stages[mp // aim.topology.tp]
        return {n: n for n in group.members if n in stage}
    if aim.experts is None or not is_moe(group):
        return {n: n for n in group.members}
    out: dict[str, str] = {}
    for name in group.members:
        parts = expert_parts(name)
        assert parts is not None
        each = aim.experts.counts[parts[0]] // aim.experts.ep
        if parts[2] // each == ep:
            out[f"{parts[0]}{parts[1]}.{parts[2] % each}.{parts[3]}"] = name
    return out


def is_moe(group: Group) -> bool:
    """Whether a group is of experts."""
    return bool((group.options or {}).get("moe"))


def local_shapes(plans: Plans, group: Group, mp: int, ep: int) -> dict[str, tuple[int, ...]]:
    """The local shapes of a group's members on one rank, in flat order; empty ones left out."""
    aim = plans.aim
    members = local_members(aim, group, mp, ep)
    shapes = {n: plans.shard(g, mp).shape for n, g in members.items()}
    shapes = {n: s for n, s in shapes.items() if prod(s)}
    if aim.round_robin and not is_moe(group):
        order = flat.round_robin(list(shapes), aim.dp)
        shapes = {n: shapes[n] for n in order}
    return shapes


# --- arrays --------------------------------------------------------------------------------------


def laid_out(plans: Plans) -> tuple[list[Draft], Table]:
    """Every file, all being finished, and the table of who holds which tensor."""
    table = Table()
    for name, slot, holder, where in _holders(plans):
        dtype = plans.dtype(name, slot)
        if slot == MASTER and dtype.name == plans.aim.kind(name):
            slot = PARAM
        table.add(TensorId(name, slot), plans.shape(name), dtype, holder, where)
    return plans.drafts, table


def _holders(plans: Plans) -> Iterator[tuple[str, str, Holder, str]]:
    def of(place: Place) -> StoredArray:
        return plans.arrays[place[0].name, place[1].key]

    for name, slot, shard, place in plans.wholes:
        yield name, slot, WholeHolder(shard, of(place)), place[0].name
    for name, shard, places in plans.fragments:
        held = [of(p) for p in places]
        yield name, PARAM, FragmentHolder(shard, held), places[0][0].name
    for group, slot, space, names, mp, places in plans.flats:
        held = [of(p) for p in places]
        for local in space.members:
            name = names[local]
            shard = plans.shard(name, mp)
            if slot in group.whole:
                assert isinstance(space, FlatGroup)
                yield name, slot, MatrixHolder(shard, space, local, held), places[0][0].name
            else:
                yield name, slot, FlatHolder(shard, space, local, held), places[0][0].name
