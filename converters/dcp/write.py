"""Declares DCP checkpoints: chunks for the reader's ranks, everything under torch's keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np

from reshard.box import Box
from reshard.checkpoint import Checkpoint, Json
from reshard.containers import dcp
from reshard.containers.carried import Carried
from reshard.containers.dcp import Chunk, ObjectItem, Place, TensorEntry, TensorItem
from reshard.containers.inert import TensorRef
from reshard.dtypes import FLOAT32, DType
from reshard.errors import FormatError
from reshard.format import Declaration, Fate, WriteOptions
from reshard.layout import Draft, Layout, Piece, place
from reshard.tensor import PARAM, LogicalTensor, TensorId
from reshard.topology import Target

from .extras import Kept, keep_extras, schedule_of, side_drafts
from .goal import Goal, goal, tensors, tied_copies
from .groups import TargetGroup, as_json, target_groups
from .leaves import dotted
from .read import NAMING
from .sources import NAME
from .state import STEP, State
from .values import ALLOWED, Path, own_values, tensor


@dataclass
class Store:
    """One DCP folder in the making: tensors and values by path, in the order they were added."""

    folder: str
    ranks: int
    tensors: dict[str, tuple[Path, LogicalTensor]] = field(default_factory=dict)
    values: dict[str, tuple[Path, Carried]] = field(default_factory=dict)

    def add_tensor(self, path: Path, logical: LogicalTensor) -> None:
        """Take in a tensor to be filled."""
        self._free(path)
        self.tensors[dotted(path)] = (path, logical)

    def add_value(self, path: Path, value: Carried) -> None:
        """Take in a value, or a small tensor with its bytes."""
        self._free(path)
        self.values[dotted(path)] = (path, value)

    def _free(self, path: Path) -> None:
        key = dotted(path)
        if key in self.tensors or key in self.values:
            raise FormatError(f"two entries of the target would have the key {key}")


def declare_dcp(source: Checkpoint, target: Target, options: WriteOptions) -> Declaration:
    """Lay out a DCP checkpoint of the source."""
    aim = goal(source, target, options)
    logical, explained = tensors(source, aim, options)
    copies, feeds = tied_copies(source, logical)
    logical |= copies
    kept = keep_extras(source, aim)
    groups: list[TargetGroup] = []
    fates: list[Fate] = []
    if not aim.weights_only:
        groups, fates = target_groups(source, options.like, base_lrs(source))
    stores = _stores(source, aim, logical, groups, kept)
    drafts: list[Draft] = []
    pieces: dict[TensorId, list[Piece]] = {}
    for store in stores:
        drafts += _drafts(store, aim, pieces)
    drafts += side_drafts(kept)
    step = source.iteration
    return Declaration(
        format=NAME,
        topology=aim.topology,
        folder=f"step-{step or 0}" if aim.dialect.kind == "torchtitan" else "",
        layout=Layout(logical, pieces.__getitem__, NAMING),
        drafts=drafts,
        losses=tuple(kept.losses),
        notes=notes(aim, explained),
        fates=(*fates, *kept.fates, *step_fates(source, aim)),
        recipe=recipe(source, aim, groups),
        explained=explained,
        feeds=feeds,
    )


def base_lrs(source: Checkpoint) -> list[float] | None:
    """The scheduler's rates before scheduling, by group, if it keeps them."""
    native = source.native
    schedule = schedule_of(native.extras) if isinstance(native, State) else None
    return schedule.base_lrs if schedule is not None else None


def step_fates(source: Checkpoint, aim: Goal) -> list[Fate]:
    """What becomes of Adam's counters."""
    if not source.steps:
        return []
    if aim.weights_only:
        return [Fate("steps", "drop", "weights only")]
    return [Fate("steps", "keep", f"{len(source.steps)} counters, float32 as torch keeps them")]


# ---------------------------------------------------------------------- what lies where


def _stores(
    source: Checkpoint,
    aim: Goal,
    logical: Mapping[TensorId, LogicalTensor],
    groups: Sequence[TargetGroup],
    kept: Kept,
) -> list[Store]:
    """The folders of the target, each with its entries."""
    dialect = aim.dialect
    model = Store(dialect.model_folder, aim.ranks)
    optimizer = model
    if dialect.optimizer_folder != dialect.model_folder and not aim.weights_only:
        optimizer = Store(dialect.optimizer_folder, aim.ranks)
    native = source.native if isinstance(source.native, State) else State(dialect)
    homes = {name: min(g.home, len(dialect.optimizers) - 1) for g in groups for name in g.members}
    for tensor_, held in logical.items():
        name = tensor_.name
        if tensor_.slot != PARAM:
            optimizer.add_tensor(dialect.state(name, tensor_.slot, homes.get(name, 0)), held)
        elif name in native.others:
            model.add_tensor(native.others[name], held)
        else:
            model.add_tensor(dialect.parameter(name), held)
    if not aim.weights_only:
        for name, step in steps_of(source, logical).items():
            raw = np.float32(step).tobytes()
            optimizer.add_value(
                dialect.state(name, STEP, homes.get(name, 0)), tensor(raw, (), FLOAT32)
            )
        _add_groups(optimizer, aim, groups)
    for path, value in kept.entries:
        inside = any(path[: len(c)] == c for c in dialect.optimizers)
        (optimizer if inside else model).add_value(path, value)
    return [model] if optimizer is model else [model, optimizer]


def steps_of(source: Checkpoint, logical: Mapping[TensorId, LogicalTensor]) -> dict[str, float]:
    """The counters of names that have state in the target."""
    stateful = {t.name for t in logical if t.slot != PARAM}
    return {name: step for name, step in source.steps.items() if name in stateful or not stateful}


def _add_groups(store: Store, aim: Goal, groups: Sequence[TargetGroup]) -> None:
    """Options by group number, or by member where keys are flat."""
    dialect = aim.dialect
    counts: dict[int, int] = {}
    for group in groups:
        home = min(group.home, len(dialect.optimizers) - 1)
        number = counts[home] = counts.get(home, -1) + 1
        if dialect.flat:
            for name in group.members:
                for option, value in group.options.items():
                    store.add_value(dialect.option(dialect.named(name), option, home), value)
            continue
        for option, value in group.options.items():
            store.add_value(dialect.option(number, option, home), value)
        members = [dialect.named(name) for name in group.members]
        store.add_value(dialect.option(number, "params", home), Carried(members))


# ---------------------------------------------------------------------- files


def boxes(shape: tuple[int, ...], dtype: DType, aim: Goal) -> list[Box]:
    """The chunks of a tensor: rows cut as torch.chunk cuts them for the ranks, or by size.

    Source: torch 2.13 tensor/placement_types.py, Shard._split_tensor (ceil, later ranks may have
    none).
    """
    if prod(shape) == 0:
        return []
    if not shape:
        return [Box((), ())]
    rows = -(-shape[0] // aim.ranks)
    if aim.chunk is not None:
        row = prod(shape[1:]) * dtype.itemsize
        rows = max(1, aim.chunk // row)
    whole = Box.whole(shape)
    return [
        Box((a, *whole.start[1:]), (min(a + rows, shape[0]), *whole.stop[1:]))
        for a in range(0, shape[0], rows)
    ]


@dataclass(frozen=True, slots=True)
class _Cut:
    key: str
    box: Box
    logical: LogicalTensor


def _drafts(store: Store, aim: Goal, pieces: dict[TensorId, list[Piece]]) -> list[Draft]:
    """The `.distcp` files and `.metadata` of a store; values lie in the first file, as torch has
    them before tensors."""
    by_rank: dict[int, list[_Cut]] = {}
    for key, (_, logical) in store.tensors.items():
        for i, box in enumerate(boxes(logical.shape, logical.dtype, aim)):
            by_rank.setdefault(i % aim.ranks, []).append(_Cut(key, box, logical))
    chunks: dict[str, list[Chunk]] = {key: [] for key in store.tensors}
    spots: dict[str, Place] = {}
    drafts: list[Draft] = []
    for rank in sorted(by_rank.keys() | {0}):
        cuts = by_rank.get(rank, [])
        values = list(store.values.items()) if rank == 0 else []
        items: list[TensorItem | ObjectItem] = [
            ObjectItem(key, value.obj, ALLOWED, own_values(value)) for key, (_, value) in values
        ]
        items += [TensorItem(c.key, c.box.start, c.box.shape, c.logical.dtype) for c in cuts]
        name = f"__{rank}_0.distcp"
        made = dcp.distcp_file(f"{store.folder}/{name}" if store.folder else name, items)
        drafts.append(made.draft)
        places = [Place(name, p.offset, p.length) for p in made.places]
        spots |= {key: spot for (key, _), spot in zip(values, places, strict=False)}
        tail = len(values)
        for cut, spot, array in zip(cuts, places[tail:], made.arrays[tail:], strict=True):
            chunks[cut.key].append(Chunk(cut.box.start, cut.box.shape, spot))
            assert array is not None
            pieces.setdefault(cut.logical.id, []).append(place(cut.box, array))
    return [*drafts, _metadata(store, chunks, spots)]


def _metadata(
    store: Store, chunks: Mapping[str, Sequence[Chunk]], spots: Mapping[str, Place]
) -> Draft:
    entries: dict[str, TensorEntry] = {
        key: TensorEntry(logical.shape, logical.dtype, chunks[key])
        for key, (_, logical) in store.tensors.items()
    }
    objects: dict[str, Place] = {}
    for key, (_, value) in store.values.items():
        ref = value.obj
        if isinstance(ref, TensorRef):
            whole = Chunk((0,) * len(ref.shape), ref.shape, spots[key])
            entries[key] = TensorEntry(ref.shape, ref.dtype, [whole])
        else:
            objects[key] = spots[key]
    paths = {key: path for key, (path, _) in (*store.tensors.items(), *store.values.items())}
    raw = dcp.MetadataDraft(entries, objects, paths).pickled()
    name = f"{store.folder}/{dcp.METADATA}" if store.folder else dcp.METADATA
    return Draft(name, len(raw), [(0, raw)])


# ---------------------------------------------------------------------- what is said


def notes(aim: Goal, explained: frozenset[TensorId]) -> tuple[str, ...]:
    """What a person should know of the target."""
    said = []
    if aim.chunk is None and not aim.dp_given:
        said.append(f"dp is not said: cut for {aim.ranks} ranks; any mesh loads it")
    if explained:
        said.append(
            f"{len(explained)} weights are the source's masters in full width: torch keeps one "
            "copy, and rounds it itself under mixed precision"
        )
    return tuple(said)


def recipe(source: Checkpoint, aim: Goal, groups: Sequence[TargetGroup]) -> Mapping[str, Json]:
    """What the job that loads this needs to know."""
    shown: list[Json] = [
        {"members": len(g.members), **dict(g.options)} for g in as_json(list(groups))
    ]
    same = source.topology.dp == aim.ranks and aim.same_kind
    return {
        "load": "torch.distributed.checkpoint.load, under any mesh",
        "model_key": dotted(aim.dialect.model),
        "optimizer_keys": [dotted(c) for c in aim.dialect.optimizers] if groups else [],
        "flat_optimizer_keys": aim.dialect.flat,
        "step": source.iteration,
        "param_groups": shown,
        "verdict": "weights only"
        if aim.weights_only
        else ("exact" if same else "same sample sequence, if the global batch is kept"),
    }
