"""Declares DCP checkpoints: chunks for the reader's ranks, everything under torch's keys."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import chain, islice
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
from reshard.layout import Draft, Layout, Made, Piece, StoredArray, place
from reshard.tensor import PARAM, LogicalTensor, TensorId
from reshard.topology import Target

from .extras import Kept, keep_extras, schedule_of, side_drafts
from .goal import Goal, goal, other_names, tensors
from .groups import TargetGroup, as_json, options_left, spread, target_groups
from .leaves import dotted
from .read import NAMING
from .recognise import DCP
from .state import STEP, Dialect, State
from .values import ALLOWED, Path, own_values, tensor


@dataclass
class Store:
    """One DCP folder in the making: tensors and values by path, in the order they were added."""

    folder: str
    ranks: int
    tensors: dict[str, tuple[Path, LogicalTensor]] = field(default_factory=dict)
    values: dict[str, tuple[Path, Carried]] = field(default_factory=dict)
    aliases: dict[str, tuple[Path, str]] = field(default_factory=dict)  # with the key of the tensor

    def add_tensor(self, path: Path, logical: LogicalTensor) -> None:
        """Take in a tensor to be filled."""
        self._free(path)
        self.tensors[dotted(path)] = (path, logical)

    def add_alias(self, path: Path, of: Path) -> None:
        """Take in another key of a tensor: its chunks lie in the same bytes."""
        self._free(path)
        self.aliases[dotted(path)] = (path, dotted(of))

    def add_value(self, path: Path, value: Carried) -> None:
        """Take in a value, or a small tensor with its bytes."""
        self._free(path)
        self.values[dotted(path)] = (path, value)

    def add_option(self, path: Path, value: Carried) -> None:
        """Take in an option of a group; of a dict, each leaf, as torch descends into it."""
        for inside, leaf in spread(value.obj):
            self.add_value((*path, *inside), Carried(leaf, value.values))

    def _free(self, path: Path) -> None:
        key = dotted(path)
        if key in self.tensors or key in self.values or key in self.aliases:
            raise FormatError(f"two entries of the target would have the key {key}")


def declare_dcp(source: Checkpoint, target: Target, options: WriteOptions) -> Declaration:
    """Lay out a DCP checkpoint of the source."""
    aim = goal(source, target, options)
    logical, explained = tensors(source, aim, options)
    aliases = other_names(source, options.like, logical)
    kept = keep_extras(source, aim)
    groups: list[TargetGroup] = []
    fates: list[Fate] = []
    if not aim.weights_only:
        groups, fates = target_groups(source, options.like, base_lrs(source))
        kept.losses += options_left(source)
    stores = _stores(source, aim, logical, groups, kept, aliases)
    drafts: list[Draft] = []
    held = _Held(aim)
    for store in stores:
        drafts += _drafts(store, aim, held)
    drafts += side_drafts(kept)
    step = source.iteration
    return Declaration(
        format=DCP,
        topology=aim.topology,
        folder=f"step-{step or 0}" if aim.dialect.kind == "torchtitan" else "",
        layout=Layout(logical, held.pieces, NAMING),
        drafts=drafts,
        losses=tuple(kept.losses),
        notes=notes(aim, explained),
        fates=(*fates, *kept.fates, *step_fates(source, aim)),
        recipe=recipe(source, aim, groups),
        explained=explained,
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
    aliases: Mapping[str, str],
) -> list[Store]:
    """The folders of the target, each with its entries."""
    dialect = aim.dialect
    model = Store(dialect.model_folder, aim.ranks)
    optimizer = model
    if dialect.optimizer_folder != dialect.model_folder and not aim.weights_only:
        optimizer = Store(dialect.optimizer_folder, aim.ranks)
    native = source.native if isinstance(source.native, State) else State(dialect)
    homes = {name: min(g.home, len(dialect.optimizers) - 1) for g in groups for name in g.members}
    numbers = _numbers(dialect, groups)

    def state(name: str, slot: str) -> Path:
        return dialect.state(name, slot, homes.get(name, 0), numbers.get(name))

    for tensor_, held in logical.items():
        name = tensor_.name
        if tensor_.slot != PARAM:
            optimizer.add_tensor(state(name, tensor_.slot), held)
        elif name in native.others:
            model.add_tensor(native.others[name], held)
        else:
            model.add_tensor(dialect.parameter(name), held)
    for alias, name in aliases.items():
        model.add_alias(dialect.parameter(alias), dialect.parameter(name))
    if not aim.weights_only:
        counters: dict[float, Carried] = {}  # mostly one for all
        for name, step in steps_of(source, logical).items():
            raw = np.float32(step).tobytes()
            if step not in counters:
                counters[step] = tensor(raw, (), FLOAT32)
            optimizer.add_value(state(name, STEP), counters[step])
        _add_groups(optimizer, aim, groups, numbers)
    for path, value in kept.entries:
        inside = any(path[: len(c)] == c for c in dialect.optimizers)
        (optimizer if inside else model).add_value(path, value)
    return [model] if optimizer is model else [model, optimizer]


def steps_of(source: Checkpoint, logical: Mapping[TensorId, LogicalTensor]) -> dict[str, float]:
    """The counters of names that have state in the target."""
    stateful = {t.name for t in logical if t.slot != PARAM}
    return {name: step for name, step in source.steps.items() if name in stateful or not stateful}


def _numbers(dialect: Dialect, groups: Sequence[TargetGroup]) -> dict[str, int]:
    """The number of each parameter in its optimizer: group by group, as torch.optim counts.

    Source: torch 2.13 optim/optimizer.py, state_dict. None, where parameters go by name.
    """
    out: dict[str, int] = {}
    counts: dict[int, int] = {}
    for group in groups if dialect.numbered else ():
        home = min(group.home, len(dialect.optimizers) - 1)
        for name in group.members:
            out[name] = counts.get(home, 0)
            counts[home] = out[name] + 1
    return out


def _add_groups(
    store: Store, aim: Goal, groups: Sequence[TargetGroup], numbers: Mapping[str, int]
) -> None:
    """Options by group number, or by member where keys are flat."""
    dialect = aim.dialect
    counts: dict[int, int] = {}
    for group in groups:
        home = min(group.home, len(dialect.optimizers) - 1)
        number = counts[home] = counts.get(home, -1) + 1
        if dialect.flat:
            for name in group.members:
                for option, value in group.options.items():
                    store.add_option(dialect.option(dialect.named(name), option, home), value)
            continue
        for option, value in group.options.items():
            store.add_option(dialect.option(number, option, home), value)
        members = [numbers.get(name, dialect.named(name)) for name in group.members]
        store.add_value(dialect.option(number, "params", home), Carried(members))


# ---------------------------------------------------------------------- files


def _starts(shape: tuple[int, ...], dtype: DType, aim: Goal) -> range:
    """The first rows of a tensor's chunks: cut as torch.chunk cuts for the ranks, or by size.

    Every rank holds one, then every rank another.
    Source: torch 2.13 tensor/placement_types.py, Shard._split_tensor (ceil, later ranks may have
    none).
    """
    if prod(shape) == 0:
        return range(0)
    if not shape:
        return range(1)
    rows = -(-shape[0] // aim.ranks)
    if aim.chunk is not None:
        row = prod(shape[1:]) * dtype.itemsize
        rows = max(1, aim.chunk // row)
    return range(0, shape[0], rows)


def _box(shape: tuple[int, ...], starts: range, start: int) -> Box:
    """The chunk that begins at one of `_starts`."""
    if not shape:
        return Box((), ())
    rest = (0,) * (len(shape) - 1)
    return Box.at((start, *rest), (min(starts.step, shape[0] - start), *shape[1:]))


def _of_rank(logical: LogicalTensor, aim: Goal, rank: int) -> list[Box]:
    """The chunks of a tensor that one rank's file holds."""
    starts = _starts(logical.shape, logical.dtype, aim)
    return [_box(logical.shape, starts, start) for start in starts[rank :: aim.ranks]]


def _cuts(logical: LogicalTensor, aim: Goal) -> Sequence[tuple[int, Box]]:
    """The chunks of a tensor, each with the rank whose file holds it, rank by rank."""
    starts = _starts(logical.shape, logical.dtype, aim)
    made = _known_cut if len(starts) <= aim.ranks else _cut  # layers are cut alike
    return made(logical.shape, starts, aim.ranks)


def _cut(shape: tuple[int, ...], starts: range, ranks: int) -> Sequence[tuple[int, Box]]:
    held = range(min(ranks, len(starts)))
    return [(rank, _box(shape, starts, a)) for rank in held for a in starts[rank::ranks]]


_known_cut = lru_cache(maxsize=64)(_cut)


@dataclass
class _Held:
    """A target's tensors in its ranks' files: where each one's chunks begin.

    Pieces are made when asked for, of the same cuts that the files were laid out by.
    """

    aim: Goal
    keys: dict[TensorId, tuple[str, str, LogicalTensor]] = field(default_factory=dict)
    begins: dict[TensorId, array[int]] = field(default_factory=dict)  # in the order of the boxes

    def add(self, store: Store, key: str, logical: LogicalTensor) -> None:
        """Take in a tensor of a store."""
        self.keys[logical.id] = (store.folder, key, logical)
        self.begins[logical.id] = array("q")

    def pieces(self, tensor: TensorId) -> list[Piece]:
        """The pieces of a tensor, rank by rank."""
        folder, key, logical = self.keys[tensor]
        out = []
        for (rank, box), begin in zip(_cuts(logical, self.aim), self.begins[tensor], strict=True):
            file = _below(folder, _file(rank))
            out.append(place(box, StoredArray(file, begin, box.shape, logical.dtype, key, file)))
        return out

    def chunks(self, logical: LogicalTensor) -> Iterator[Chunk]:
        """The same as `.metadata` has them."""
        cuts, begins = _cuts(logical, self.aim), self.begins[logical.id]
        spans: dict[tuple[int, ...], tuple[int, int]] = {}  # one, but for the last rows
        for (rank, box), begin in zip(cuts, begins, strict=True):
            shape = box.shape
            span = spans.get(shape)
            if span is None:
                span = spans[shape] = dcp.tensor_span(shape, logical.dtype)
            yield Chunk(box.start, shape, Place(_file(rank), begin - span[0], span[1]))


@lru_cache(maxsize=1 << 12)
def _file(rank: int) -> str:
    return f"__{rank}_0.distcp"


def _below(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _drafts(store: Store, aim: Goal, held: _Held) -> list[Draft]:
    """The `.distcp` files and `.metadata` of a store; values lie in the first file, as torch has
    them before tensors."""
    listed = list(store.tensors.items())
    by_rank: dict[int, array[int]] = {}  # which of them a rank's file holds chunks of
    for number, (key, (_, logical)) in enumerate(listed):
        held.add(store, key, logical)
        for rank in range(min(aim.ranks, len(_starts(logical.shape, logical.dtype, aim)))):
            by_rank.setdefault(rank, array("I")).append(number)
    spots: dict[str, Place] = {}
    drafts: list[Draft] = []
    for rank in sorted(by_rank.keys() | {0}):
        values = list(store.values.items()) if rank == 0 else []
        mine = [
            (key, logical, _of_rank(logical, aim, rank))
            for number in by_rank.pop(rank, ())
            for key, (_, logical) in [listed[number]]
        ]
        items: chain[TensorItem | ObjectItem] = chain(
            (ObjectItem(key, value.obj, ALLOWED, own_values(value)) for key, (_, value) in values),
            (TensorItem(k, b.start, b.shape, t.dtype) for k, t, boxes in mine for b in boxes),
        )
        made = dcp.distcp_file(_below(store.folder, _file(rank)), items)
        drafts.append(made.draft)
        for (key, _), spot in zip(values, made.places, strict=False):
            spots[key] = Place(_file(rank), spot.offset, spot.length)
        begins = iter(made.begins[len(values) :])
        for _, logical, boxes in mine:
            for begin in islice(begins, len(boxes)):
                assert begin is not None
                held.begins[logical.id].append(begin)
    name = _below(store.folder, dcp.METADATA)
    return [*drafts, dcp.metadata_file(name, lambda: _metadata(store, held, spots))]


def _metadata(store: Store, held: _Held, spots: Mapping[str, Place]) -> dcp.MetadataDraft:
    entries: dict[str, TensorEntry] = {
        key: TensorEntry(logical.shape, logical.dtype, Made(partial(held.chunks, logical)))
        for key, (_, logical) in store.tensors.items()
    }
    entries |= {key: entries[of] for key, (_, of) in store.aliases.items()}
    objects: dict[str, Place] = {}
    for key, (_, value) in store.values.items():
        ref = value.obj
        if isinstance(ref, TensorRef):
            whole = Chunk((0,) * len(ref.shape), ref.shape, spots[key])
            entries[key] = TensorEntry(ref.shape, ref.dtype, [whole])
        else:
            objects[key] = spots[key]
    listed = (*store.tensors.items(), *store.aliases.items(), *store.values.items())
    return dcp.MetadataDraft(entries, objects, {key: path for key, (path, _) in listed})


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
