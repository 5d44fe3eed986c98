"""Lays out torch_dist files: which rank's `.distcp` holds which chunk of which key."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from reshard.box import Box
from reshard.containers import dcp
from reshard.containers.dcp import ObjectItem, TensorEntry, TensorItem
from reshard.dtypes import named
from reshard.errors import CoverageError, LayoutError
from reshard.layout import Draft, Piece, StoredArray, place
from reshard.tensor import MASTER, PARAM, LogicalTensor, TensorId

from . import names, run, tp_rules
from .goal import Goal
from .run import Run
from .shards import shard
from .sizes import need


@dataclass(frozen=True)
class Holders:
    """Which global rank writes which box of a logical tensor, each element once."""

    native: Run
    aim: Goal
    _cuts: dict[tuple[object, ...], list[tuple[Box, int]]] = field(default_factory=dict, repr=False)

    def boxes(self, name: str, logical: LogicalTensor) -> Iterator[tuple[Box, int]]:
        """The boxes of a tensor in rank order, with the rank whose file holds them."""
        topology = self.aim.topology
        rule = tp_rules.tp_rule(name, self.native.model, self.native.mla_down)
        home = None  # the expert-parallel rank that holds it
        if rule.expert:
            experts = need(self.native.model.experts, "experts") // topology.ep
            home = int(name.partition(".experts.")[2].partition(".")[0]) // experts
        alike = (rule, logical.extent, home)
        if alike not in self._cuts:
            self._cuts[alike] = list(self._cut(name, logical, rule, home))
        first = self._stage(name) * len(run.places(topology))
        for box, rank in self._cuts[alike]:
            yield box, first + rank

    def _cut(
        self, name: str, logical: LogicalTensor, rule: tp_rules.Rule, home: int | None
    ) -> Iterator[tuple[Box, int]]:
        """The boxes, with the rank within the stage; layers and slots are cut alike."""
        seen: set[Box] = set()
        topology = self.aim.topology
        for spot in run.places(topology):
            if home is not None and home != spot.ep:
                continue
            for part in shard(name, logical.extent, rule, topology, spot).parts:
                if part.box not in seen:
                    seen.add(part.box)
                    yield part.box, spot.rank

    def _stage(self, name: str) -> int:
        """The pipeline stage that holds a tensor (the first, where several do)."""
        parts = name.split(".")
        pipe = self.aim.pipeline
        if name.startswith("decoder.layers."):
            return pipe.where(int(parts[2]))[0]
        for p, row in enumerate(pipe.chunks):
            for chunk in row:
                if name.startswith("embedding.") and chunk.embedding:
                    return p
                if name.startswith("output_layer.") and chunk.head:
                    return p
                if name.startswith("decoder.final") and chunk.final_norm:
                    return p
                if name.startswith("mtp.layers.") and int(parts[2]) in chunk.mtp:
                    return p
        return 0


def _prefix(slot: str, form: str | None) -> str:
    if slot == PARAM:
        return ""
    if slot == MASTER:
        slot = "fp32_param" if form is None else "param"
    return f"optimizer.state.{slot}."


@dataclass
class _Keys:
    """The global shape of every stored key, grown as logical tensors are placed."""

    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...], str]] = field(default_factory=dict)

    def add(self, key: str, index: Sequence[int], shape: tuple[int, ...], dtype: str) -> None:
        """Take in one logical tensor under a key. Raises LayoutError if its like differs."""
        lead = tuple(i + 1 for i in index)
        known = self.shapes.get(key)
        if known is None:
            self.shapes[key] = (lead, shape, dtype)
            return
        if known[1:] != (shape, dtype):
            raise LayoutError(
                f"{key}: layers or experts of shapes {list(known[1])} {known[2]} and {list(shape)} "
                f"{dtype} cannot be stacked under one key"
            )
        self.shapes[key] = (tuple(map(max, known[0], lead)), shape, dtype)

    def shape(self, key: str) -> tuple[int, ...]:
        """The whole stored shape of a key."""
        lead, shape, _ = self.shapes[key]
        return (*lead, *shape)


@dataclass
class Held:
    """The target's tensors in its ranks' files: keys, and where each one's chunks begin.

    Pieces are made when asked for, of the same cuts that the files were laid out by.
    """

    tensors: Mapping[TensorId, LogicalTensor]
    holders: Holders
    style: names.Style
    form: str | None
    begins: dict[TensorId, array[int]] = field(default_factory=dict)  # in the order of the boxes

    def stored(self, tensor: TensorId) -> tuple[str, tuple[int, ...]]:
        """The key of a tensor, and its index on the key's leading axes."""
        bare, index = names.to_dist(tensor.name, self.style)
        return _prefix(tensor.slot, self.form) + bare, index

    def boxes(self, tensor: TensorId) -> Iterator[tuple[Box, int]]:
        """The boxes of a tensor, each with the rank whose file holds it."""
        return self.holders.boxes(tensor.name, self.tensors[tensor])

    def pieces(self, tensor: TensorId) -> list[Piece]:
        """The pieces of a tensor in rank order."""
        key, index = self.stored(tensor)
        dtype, lead = self.tensors[tensor].dtype, (1,) * len(index)
        out = []
        for (box, rank), begin in zip(self.boxes(tensor), self.begins[tensor], strict=True):
            file, sizes = _file(rank), (*lead, *box.shape)
            out.append(place(box, StoredArray(file, begin, sizes, dtype, key, file)))
        return out


def _file(rank: int) -> str:
    return f"__{rank}_0.distcp"


def dist_files(held: Held, objects: Mapping[int, list[ObjectItem]]) -> tuple[list[Draft], Draft]:
    """One `.distcp` per rank that holds anything: objects first, then tensors in order.

    And `.metadata`.
    """
    keys = _Keys()
    by_rank: dict[int, list[tuple[TensorId, Box]]] = {}
    for tensor, logical in held.tensors.items():
        key, index = held.stored(tensor)
        keys.add(key, index, logical.extent, logical.dtype.name)
        held.begins[tensor] = array("q")
        for box, rank in held.boxes(tensor):
            by_rank.setdefault(rank, []).append((tensor, box))
    drafts: list[Draft] = []
    kinds = dcp.Kinds()
    chunks: dict[str, dcp.Chunks] = {}
    stored: dict[str, dcp.Place] = {}
    for rank in sorted(by_rank.keys() | objects.keys()):
        others = objects.get(rank, [])
        mine = [_tensor_item(held, tensor, box) for tensor, box in by_rank.get(rank, ())]
        made = dcp.distcp_file(_file(rank), [*others, *mine])
        drafts.append(made.draft)
        tail = len(others)
        stored |= zip((entry.key for entry in others), made.places, strict=False)
        for item, spot in zip(mine, made.places[tail:], strict=True):
            listed = chunks.get(item.key)
            if listed is None:
                listed = chunks[item.key] = dcp.Chunks(len(item.sizes), kinds)
            listed.append(dcp.Chunk(item.offsets, item.sizes, spot))
        for (tensor, _), begin in zip(by_rank.pop(rank, ()), made.begins[tail:], strict=True):
            assert begin is not None
            held.begins[tensor].append(begin)
    return drafts, _metadata(keys, chunks, stored)


def _tensor_item(held: Held, tensor: TensorId, box: Box) -> TensorItem:
    key, index = held.stored(tensor)
    sizes = (*(1 for _ in index), *box.shape)
    return TensorItem(key, (*index, *box.start), sizes, held.tensors[tensor].dtype)


def _metadata(
    keys: _Keys, chunks: Mapping[str, dcp.Chunks], stored: Mapping[str, dcp.Place]
) -> Draft:
    entries = {}
    for key, (_, _, dtype) in keys.shapes.items():
        shape = keys.shape(key)
        entries[key] = TensorEntry(shape, named(dtype), chunks[key])
        held = sum(prod(c.sizes) for c in chunks[key])
        if held != prod(shape):
            raise CoverageError(
                f"{key}: {held} of {prod(shape)} elements have a place; layers or experts are "
                "missing from the source"
            )
    return Draft(".metadata", len(raw := dcp.MetadataDraft(entries, stored).pickled()), [(0, raw)])
