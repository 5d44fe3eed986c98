"""The join: which elements of which stored array go where, and what is lost on the way."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from reshard.box import Box, uncovered
from reshard.checkpoint import Checkpoint, Json
from reshard.dtypes import DType
from reshard.errors import CoverageError, LossError
from reshard.format import Declaration, Fate, Loss
from reshard.layout import Piece, refactor
from reshard.tensor import MASTER, PARAM, LogicalTensor, TensorId


class Shelf:
    """Boxes with their pieces, indexed along the axis they are cut on most often.

    The naive join is quadratic; with the index a grid of n boxes joins in n log n.
    """

    __slots__ = ("axis", "items", "longest", "starts")

    def __init__(self, boxes: Iterable[tuple[Box, Piece]]) -> None:
        self.items = list(boxes)
        self.axis: int | None = None
        self.longest = 0
        self.starts: list[int] = []
        rank = len(self.items[0][0].start) if len(self.items) > 1 else 0
        if rank:  # one box needs no index, and boxes without axes have none
            self._index(rank)

    def _index(self, rank: int) -> None:
        boxes = [box for box, _ in self.items]
        axis = max(range(rank), key=lambda i: len({b.start[i] for b in boxes}))
        self.axis = axis
        self.items.sort(key=lambda item: item[0].start[axis])
        self.starts = [b.start[axis] for b, _ in self.items]
        self.longest = max(b.stop[axis] - b.start[axis] for b in boxes)

    def near(self, box: Box) -> Sequence[tuple[Box, Piece]]:
        """The items that may overlap `box`."""
        if self.axis is None:
            return self.items
        low = bisect_right(self.starts, box.start[self.axis] - self.longest)
        high = bisect_left(self.starts, box.stop[self.axis])
        return self.items[low:high]


@dataclass(frozen=True, slots=True)
class Cover:
    """A tensor's elements, each from one holder; and the further holders of some of them."""

    parts: Shelf
    replicas: Sequence[tuple[Box, Piece]]


def cover(pieces: Sequence[Piece]) -> Cover:
    """Give every element to the first piece that holds it. Replicas overlap without being equal:
    the area already covered is subtracted, never "equal boxes" dropped."""
    if len(pieces) == 1:
        return Cover(Shelf([(pieces[0].box, pieces[0])]), ())
    rank = len(pieces[0].box.start) if pieces else 0
    axis = max(range(rank), key=lambda i: len({p.box.start[i] for p in pieces}), default=None)
    parts: list[tuple[Box, Piece]] = []
    order: list[tuple[int, int]] = []  # (start on axis, index in parts), sorted
    longest = 0
    replicas: list[tuple[Box, Piece]] = []
    for piece in pieces:
        rest = [piece.box]
        if axis is None:
            near = range(len(parts))
        else:
            low = bisect_right(order, (piece.box.start[axis] - longest, len(parts)))
            high = bisect_left(order, (piece.box.stop[axis], -1))
            near = [i for _, i in order[low:high]]  # type: ignore[assignment]  # both iterate ints
        for i in near:
            remaining: list[Box] = []
            for box in rest:
                common = parts[i][0] & box
                if common is None:
                    remaining.append(box)
                else:
                    remaining += box.minus(common)
                    replicas.append((common, piece))
            rest = remaining
            if not rest:
                break
        for box in rest:
            if axis is not None:
                insort(order, (box.start[axis], len(parts)))
                longest = max(longest, box.stop[axis] - box.start[axis])
            parts.append((box, piece))
    return Cover(Shelf(parts), replicas)


@dataclass(frozen=True, slots=True)
class Copy:
    """These elements of a logical tensor go from one stored array to another."""

    box: Box
    source: Piece
    target: Piece


@dataclass(frozen=True, slots=True)
class Fill:
    """These elements of the target's padding have no source and become zero."""

    box: Box
    target: Piece


@dataclass(frozen=True)
class TensorJoin:
    """Everything that is to be done for one tensor of the target."""

    target: LogicalTensor
    source: LogicalTensor
    cover: Cover
    pieces: Sequence[Piece]  # of the target

    @cached_property
    def wanted(self) -> Shelf:
        """The pieces of the target, indexed."""
        return Shelf((p.box, p) for p in self.pieces)

    @cached_property
    def again(self) -> Shelf:
        """The further holders of the source, indexed."""
        return Shelf(self.cover.replicas)

    @property
    def decoded(self) -> bool:
        """Whether what is read of the source is not what is stored: a sum, a product."""
        return any(piece.codec is not None for _, piece in self.cover.parts.items)

    def shares(self) -> Iterator[tuple[Piece, list[tuple[Box, Piece]]]]:
        """Each target piece, and the boxes of it that the source holds, each with its holder."""
        near = self.cover.parts.near
        for piece in self.pieces:
            yield (
                piece,
                [
                    (common, holder)
                    for box, holder in near(piece.box)
                    if (common := box & piece.box) is not None
                ],
            )

    def copies(self) -> Iterator[Copy]:
        """The copies, target piece by target piece."""
        for piece, held in self.shares():
            for common, holder in held:
                yield Copy(common, holder, piece)

    def fills(self) -> Iterator[Fill]:
        """Padding of the target that the source does not hold.

        Raises CoverageError if a true element has no source.
        """
        for piece, held in self.shares():
            boxes = [common for common, _ in held]
            if sum(b.numel for b in boxes) != piece.box.numel:
                yield from self.gaps(piece, boxes)

    def gaps(self, piece: Piece, held: Sequence[Box]) -> Iterator[Fill]:
        """What of a target piece these boxes leave to be filled.

        Raises CoverageError if it is no padding.
        """
        true = self.target.true
        for gap in uncovered(piece.box, held):
            if gap & true is not None:
                raise CoverageError(
                    f"{self.target.id}: no stored array of the source holds {gap} of shape "
                    f"{list(self.target.shape)}"
                )
            yield Fill(gap, piece)


@dataclass(frozen=True)
class Plan:
    """What a conversion does, before a byte is moved. Joins are made per tensor on request."""

    source: Checkpoint
    target: Declaration
    feeds: Mapping[TensorId, TensorId]  # target tensor -> the source tensor that fills it
    losses: tuple[Loss, ...]
    notes: tuple[str, ...]
    bytes_read: int
    bytes_written: int
    copies: int
    fills: int
    replicas: int  # elements held more than once, compared on the way
    migration: tuple[Mapping[str, Json], ...] = ()  # the steps that the source has gone through

    def join(self, tensor: TensorId, held: Sequence[Piece] | None = None) -> TensorJoin:
        """The join for one tensor of the target. `held`: the source's pieces, if at hand."""
        return self._join(tensor, self.feeds[tensor], self.target.layout.pieces(tensor), held)

    def witness(self, tensors: Iterable[TensorId]) -> TensorJoin | None:
        """The weight of the source that these tensors of one name do not take, beside a master
        that they take: it is read to be compared with the master, and goes nowhere."""
        feeds = {self.feeds[t]: t for t in tensors}
        for feed, tensor in feeds.items():
            weight = TensorId(feed.name, PARAM)
            held = self.source.layout.tensors
            left = feed.slot == MASTER and weight not in feeds and weight in held
            if left and held[weight].shape == held[feed].shape:
                found = self._join(tensor, weight, (), None)
                return None if found.decoded else found
        return None

    def _join(
        self,
        tensor: TensorId,
        feed: TensorId,
        wanted: Sequence[Piece],
        held: Sequence[Piece] | None,
    ) -> TensorJoin:
        source, target = self.source.layout.tensors[feed], self.target.layout.tensors[tensor]
        held = self.source.layout.pieces(feed) if held is None else held
        if source.factors is not None and target.factors is None:
            wanted = [q for p in wanted for q in refactor(p, target.extent, source.factors)]
            target = replace(target, factors=source.factors)
        elif source.factors is None and target.factors is not None:
            held = [q for p in held for q in refactor(p, source.extent, target.factors)]
            source = replace(source, factors=target.factors)
        elif source.factors != target.factors:
            raise CoverageError(
                f"{tensor}: counted as {source.factors} in the source and as {target.factors} in "
                "the target, and neither is the finer one"
            )
        return TensorJoin(target, source, cover(held), wanted)

    @property
    def names(self) -> dict[str, list[TensorId]]:
        """The target's tensors by name: the slots of one name move together."""
        out: dict[str, list[TensorId]] = {}
        for t in self.target.layout.tensors:
            out.setdefault(t.name, []).append(t)
        return out


def _feed(target: LogicalTensor, source: Checkpoint, derive: Mapping[str, str]) -> TensorId | None:
    """The source tensor that fills this one: the same slot, else the slot it derives from.

    The master is the authoritative weight: a weight in a type with values that the stored one
    lacks is taken from it, so that nothing is rounded twice.
    """
    same = source.layout.tensors.get(target.id)
    if same is not None:
        if target.id.slot == PARAM and target.dtype.floating and not same.dtype.holds(target.dtype):
            master = TensorId(target.id.name, MASTER)
            return master if master in source.layout.tensors else target.id
        return target.id
    other = derive.get(target.id.slot)
    if other is not None and TensorId(target.id.name, other) in source.layout.tensors:
        return TensorId(target.id.name, other)
    return None


def _cast_loss(source: DType, target: DType, tensor: TensorId, allowed: bool) -> Loss | None:
    if source.floating == target.floating and target.holds(source):
        return None  # float16 and bfloat16 are as wide, and neither holds the other's numbers
    if not allowed:
        raise LossError(
            f"{tensor}: the target stores {target.name}, the source holds {source.name}; "
            "bits would be lost. Ask for it with --dtype, or choose a target that keeps it."
        )
    return Loss("narrowed", str(tensor), f"{source.name} rounded to {target.name}")


#: A slot the source lacks may be made from another: a weight is its master rounded, and a lone
#: fp32 weight is its own master.
DERIVED = {"param": "master", "master": "param"}


def plan(source: Checkpoint, target: Declaration, *, narrow: bool = False) -> Plan:
    """Join a source with a declared target. Reads headers only; moves nothing.

    Raises CoverageError for a target tensor that no source tensor fills or a shape that differs,
    LossError for a narrowing that nobody asked for (`narrow` allows it).
    """
    if source.layout.naming != target.layout.naming:
        raise CoverageError(
            f"the source's tensors are named as {source.layout.naming!r}, the target's as "
            f"{target.layout.naming!r}; no family joins the two"
        )
    feeds: dict[TensorId, TensorId] = {}
    losses = list(target.losses)
    notes = list(target.notes)
    read = written = copies = fills = replicas = 0
    derived: dict[tuple[str, str], int] = {}
    present = source.layout.tensors
    for tensor, logical in target.layout.tensors.items():
        feed = target.feeds.get(tensor) or _feed(logical, source, DERIVED)
        if feed is None:
            raise CoverageError(
                f"{tensor}: the target needs it and the source does not hold it. "
                "Give a source that does, or leave the slot out (--weights-only)."
            )
        given = present[feed]
        if given.shape != logical.shape:
            raise CoverageError(
                f"{tensor}: shape {list(logical.shape)} in the target, {list(given.shape)} in the "
                "source. They are different models, or the vocabulary size is not the same "
                "(--vocab-size)."
            )
        own = present.get(tensor)
        if feed.slot != tensor.slot and own is None and tensor not in target.feeds:
            derived[(tensor.slot, feed.slot)] = derived.get((tensor.slot, feed.slot), 0) + 1
        asked = narrow or (feed.slot, tensor.slot) == ("master", "param")
        own = given if own is None else own
        loss = _cast_loss(own.dtype, logical.dtype, tensor, asked)
        if loss is not None and (feed.slot == tensor.slot or own is not given):
            losses.append(loss)
        feeds[tensor] = feed
    plan_ = Plan(source, target, feeds, (), (), 0, 0, 0, 0, 0)
    dropped_rows: dict[str, int] = {}
    used = set(feeds.values())
    once: set[tuple[TensorId, object]] = set()  # what feeds two slots is read for both together
    for tensor, feed in feeds.items():
        held = source.layout.pieces(feed)
        source.layout.check(feed, held)
        join = plan_.join(tensor, held)
        read_before = (feed, join.target.space) in once
        for piece, shared in join.shares():
            copies += len(shared)
            elements, wanted = sum(box.numel for box, _ in shared), piece.box.numel
            written += wanted * join.target.dtype.itemsize
            if not read_before:
                read += elements * join.source.dtype.itemsize
            if elements != wanted:
                fills += sum(1 for _ in join.gaps(piece, [box for box, _ in shared]))
        if len(used) < len(feeds):
            once.add((feed, join.target.space))
        replicas += sum(box.numel for box, _ in join.cover.replicas)
        if (
            join.source.extent != join.target.extent
            and join.source.extent[1:] == join.target.extent[1:]
        ):
            dropped_rows[tensor.name] = join.target.extent[0] - join.source.extent[0]
    for name, rows in sorted(dropped_rows.items()):
        word = f"{rows} zero rows added" if rows > 0 else f"{-rows} padding rows dropped"
        notes.append(
            f"padding: {name}: {word} beyond the true vocabulary; they count in a softmax over the "
            "padded vocabulary, so the next loss changes unless the padded size is kept"
        )
    for (slot, other), n in sorted(derived.items()):
        losses.append(
            Loss("derived", slot, f"{n} tensors made from {other}: the source has no {slot}")
        )
    left: dict[str, int] = {}
    for tensor in source.layout.tensors:
        if tensor not in used and tensor not in target.explained and tensor not in feeds:
            left[tensor.slot] = left.get(tensor.slot, 0) + 1
            if tensor.slot == "param":
                raise CoverageError(
                    f"{tensor}: the source holds it and the target has no place for it: this model "
                    "cannot be written so. If it runs without the tensor, --exclude leaves it out."
                )
    losses += [
        Loss("slot-dropped", slot, f"{n} tensors of slot {slot} have no place in the target")
        for slot, n in sorted(left.items())
    ]
    return Plan(
        source, target, feeds, tuple(losses), tuple(notes), read, written, copies, fills, replicas
    )


def told_in_full(
    source: Checkpoint, target: Declaration
) -> tuple[tuple[Fate, ...], tuple[Loss, ...]]:
    """The declared fates with one for every field of the source by its full path; and new losses.

    A field inside one that has a fate shares it. One that a format does not name is dropped: as
    all are where no optimizer is written, and as a loss otherwise.
    """
    told = {f.path: f for f in target.fates}
    training = any(t.slot != PARAM for t in target.layout.tensors)
    out, losses = list(target.fates), list[Loss]()
    neutral = [f"param_groups[{i}]" for i in range(len(source.groups or ()))]
    neutral += ["steps"] if source.steps else []
    for path in neutral:
        if path not in told:
            out.append(Fate(path, "keep") if training else Fate(path, "drop", "weights only"))
    for path in source.extras:
        if path in told:
            continue
        above = next((told[p] for p in _above(path) if p in told), None)
        if above is not None:
            out.append(Fate(path, above.kind, above.detail or f"with {above.path}"))
        elif not training:
            out.append(Fate(path, "drop", "weights only"))
        else:
            why = f"{target.format} has no place for it"
            out.append(Fate(path, "drop", why))
            losses.append(Loss("extra-dropped", path, why))
    return tuple(out), tuple(losses)


def _above(path: str) -> Iterator[str]:
    """The paths that a field lies in, the innermost first."""
    while "." in path:
        path = path.rpartition(".")[0]
        yield path


def loss_lines(losses: Iterable[Loss]) -> list[str]:
    """Losses as a person reads them, equal kinds folded together."""
    folded: dict[tuple[str, str], list[str]] = {}
    for loss in losses:
        folded.setdefault((loss.code, loss.detail), []).append(loss.what)
    out = []
    for (code, detail), whats in folded.items():
        more = f" and {len(whats) - 3} more" if len(whats) > 3 else ""
        out.append(f"{code}: {', '.join(whats[:3])}{more}: {detail}")
    return out
