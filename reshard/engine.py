"""Moves bytes: tensor by tensor, block by block, within a memory budget."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from reshard.box import Box
from reshard.checksums import Runs, with_zeros
from reshard.dtypes import holds
from reshard.errors import LossError, ReplicaError, UsageError
from reshard.files import Files, as_bytes, blocks, is_dense
from reshard.fingerprints import Sum
from reshard.format import Loss
from reshard.join import Plan, TensorJoin
from reshard.layout import Checksum, Draft, Piece
from reshard.rounding import Rounding
from reshard.tensor import MASTER, PARAM, LogicalTensor, TensorId

Array = npt.NDArray[Any]

#: Bytes of the budget that one block may take: a block is held as read, as cast, and as written.
_SHARE = 8
#: Bytes below which a budget or a block costs more in calls than in bytes.
_LEAST, _LEAST_BLOCK = 1 << 20, 1 << 12
#: The bits of floats of two bytes that are all set where the value is infinite or NaN.
_EXPONENTS = {"float16": 0x7C00, "bfloat16": 0x7F80}


@dataclass(slots=True)
class Moved:
    """What moving one name's tensors gave: fingerprints of what was read, as the target's dtype."""

    sums: dict[TensorId, Sum] = field(default_factory=dict)
    losses: list[Loss] = field(default_factory=list)


def block_elements(memory: int, block: int, workers: int) -> int:
    """Elements of one block, for the widest dtype (8 bytes), within the memory budget.

    Raises UsageError for a budget or block too small to work with.
    """
    if memory < _LEAST or block < _LEAST_BLOCK:
        raise UsageError(
            f"--memory {memory} and --block {block} bytes: at least {_LEAST} and {_LEAST_BLOCK}"
        )
    return max(_LEAST_BLOCK, min(block, memory // (_SHARE * max(1, workers)))) // 4


class _Awaited:
    """The arrays of one file whose checksums are wanted, by where they begin; as numbers."""

    def __init__(self, wanted: Iterable[Checksum]) -> None:
        found = sorted((c.array.offset, c.kind) for c in wanted)
        self.offsets = array("q", (offset for offset, _ in found))
        self.kinds = [kind for _, kind in found]
        self.values = array("L", bytes(array("L").itemsize * len(found)))
        self.known = bytearray(len(found))

    def at(self, offset: int) -> int | None:
        """The number of the array that begins there."""
        i = bisect_left(self.offsets, offset)
        return i if i < len(self.offsets) and self.offsets[i] == offset else None


class Checksums:
    """CRC-32s of arrays, taken while their parts are written, in any order.

    `fresh`: nothing of the files was written by an earlier run, so that what is not seen is zero.
    An array costs an object only while it is being written: there can be millions.
    """

    def __init__(self, drafts: Sequence[Draft], *, fresh: bool) -> None:
        self._files = {d.name: _Awaited(d.checksums) for d in drafts if d.checksums}
        self._runs: dict[tuple[str, int], Runs] = {}
        self._fresh = fresh

    def saw(self, piece: Piece, box: Box, values: Array) -> None:
        """Take in a part of an array that has just been written."""
        file, offset = piece.array.file, piece.array.offset
        awaited = self._files.get(file)
        number = awaited.at(offset) if awaited is not None else None
        if awaited is None or number is None:
            return
        runs = self._runs.get((file, offset))
        if runs is None:
            runs = self._runs.setdefault((file, offset), Runs(awaited.kinds[number]))
        if not is_dense(box.shape, piece.strides):
            runs.torn = True  # the cold reading takes it
            return
        start = piece.base_of(box) * piece.array.dtype.itemsize
        runs.add(start, as_bytes(np.ascontiguousarray(values)))
        whole = runs.all_of(piece.array.nbytes)
        if whole is not None:
            awaited.values[number], awaited.known[number] = whole, True
            self._runs.pop((file, offset), None)

    def patch(self, files: Files, draft: Draft) -> Draft:
        """Write those of a file that are known; the draft with those that are still wanted."""
        left = []
        for c in draft.checksums:
            crc = self._known(draft.name, c)
            if crc is None:
                left.append(c)
                continue
            for at in c.at:
                files.pwrite(draft.name, at, memoryview(crc.to_bytes(4, "little")))
        return replace(draft, checksums=tuple(left))

    def _known(self, file: str, wanted: Checksum) -> int | None:
        """The checksum of an array, if it can be told of what was seen."""
        awaited, offset = self._files[file], wanted.array.offset
        number = awaited.at(offset)
        runs = self._runs.get((file, offset))
        if number is not None and awaited.known[number]:
            return awaited.values[number] if runs is None else None  # None: some of it came again

        def unseen(start: int, stop: int) -> int | None:
            return with_zeros(wanted.kind, 0, stop - start) if self._fresh else None

        return (runs or Runs(wanted.kind)).whole(wanted.array.nbytes, unseen)


@dataclass(frozen=True)
class Mover:
    """Moves the tensors of a plan from the source's files to the staged ones."""

    plan: Plan
    source: Files
    target: Files
    elements: int  # per block
    checksums: Checksums
    first_replica: bool = False  # --replicas first
    fingerprint: bool = True
    progress: Callable[[int], object] = lambda _: None

    def move(self, name: str, tensors: Sequence[TensorId]) -> Moved:
        """Move all slots of one name, block by block, comparing replicas and master with weight."""
        moved = Moved()
        joins = {t: self.plan.join(t) for t in tensors}
        witness = self.plan.witness(tensors)
        compared = [*joins.values(), *([witness] if witness else [])]
        rounding = Rounding.between(j.source for j in compared)
        for join in joins.values():
            moved.sums[join.target.id] = Sum()
        for space in sorted({j.target.space for j in joins.values()}):
            same = [j for j in joins.values() if j.target.space == space]
            for box in blocks(space, self.elements):
                taken: dict[TensorId, list[tuple[Box, Array]]] = {}  # a derived slot's is another's
                for join in same:
                    if join.source.id not in taken:
                        taken[join.source.id] = self._take(join, box, moved)
                    self._give(join, box, taken[join.source.id], moved)
                if rounding is None:
                    continue
                if witness is not None and witness.target.space == space:
                    taken[witness.source.id] = self._take(witness, box, moved)
                read = {t.slot: values for t, values in taken.items()}
                if PARAM in read and MASTER in read:
                    rounding.compare(box, read[PARAM], read[MASTER])
        if rounding is not None:
            moved.losses += rounding.findings(name)
        return moved

    def _take(self, join: TensorJoin, box: Box, moved: Moved) -> list[tuple[Box, Array]]:
        """Read one block, and compare it with what other holders have."""
        values: list[tuple[Box, Array]] = []
        for held, piece in join.cover.parts.near(box):
            common = held & box
            if common is not None:
                values.append((common, self.source.read(piece, common)))
        self._compare(join, box, values, moved)
        return values

    def _give(
        self, join: TensorJoin, box: Box, values: Sequence[tuple[Box, Array]], moved: Moved
    ) -> None:
        """Write one block to every target piece that shares it."""
        dtype = join.target.dtype.numpy
        total = moved.sums[join.target.id]
        cast = []
        for b, read in values:
            v = self.source.device.cast(read, dtype)
            if v is not read and not holds(dtype, read.dtype):
                _in_range(join.target, b, read, v)
            cast.append((b, v))
            if self.fingerprint:
                total.add(join.target, b, v, self.source.device.by_rows)
            elif (inside := b & join.target.true) is not None:
                total.elements += inside.numel
        for target_box, piece in join.wanted.near(box):
            wanted = target_box & box
            if wanted is not None:
                self._write(piece, wanted, cast)

    def _write(self, piece: Piece, wanted: Box, values: Sequence[tuple[Box, Array]]) -> None:
        """Write what was read of a box; what no part holds, as zeros."""
        parts = [(c, b, v) for b, v in values if (c := b & wanted) is not None]
        whole = sum(c.numel for c, _, _ in parts) == wanted.numel
        if whole and all(is_dense(c.shape, piece.strides) for c, _, _ in parts):
            for common, b, v in parts:  # a part is a run of the target: nothing to put together
                self._put(piece, common, v if common == b else v[_slices(common, b)])
            return
        make = np.empty if whole else np.zeros
        out = make(wanted.shape, piece.array.dtype.numpy)
        for common, b, v in parts:
            out[_slices(common, wanted)] = v[_slices(common, b)]
        self._put(piece, wanted, out)

    def _put(self, piece: Piece, box: Box, values: Array) -> None:
        self.target.write(piece, box, values)
        self.checksums.saw(piece, box, values)
        self.progress(values.nbytes)

    def _compare(
        self, join: TensorJoin, box: Box, values: Sequence[tuple[Box, Array]], moved: Moved
    ) -> None:
        """Read every further holder of the block and compare it with what the first one gave."""
        for held, piece in join.again.near(box):
            common = held & box
            if common is None:
                continue
            other = self.source.read(piece, common)
            for b, v in values:
                both = b & common
                if both is None:
                    continue
                mine = np.ascontiguousarray(v[_slices(both, b)])
                theirs = np.ascontiguousarray(other[_slices(both, common)])
                if mine.tobytes() == theirs.tobytes():
                    continue
                first = next(p for h, p in join.cover.parts.near(both) if h & both is not None)
                detail = (
                    f"{first.array.holder or first.array.file} and "
                    f"{piece.array.holder or piece.array.file} hold different values in {both}"
                )
                if not self.first_replica:
                    raise ReplicaError(
                        f"{join.source.id}: {detail}; replicas must agree. The run that saved "
                        "them had diverged. Choose the first holder's with --replicas first."
                    )
                moved.losses.append(Loss("replica-dropped", str(join.source.id), detail))


def _in_range(tensor: LogicalTensor, box: Box, values: Array, cast: Array) -> None:
    """Raises LossError if the target's type cannot hold a value: it has become infinite or NaN."""
    exponent = _EXPONENTS.get(cast.dtype.name)
    if exponent is not None:  # numpy's isfinite takes ten times as long
        if not np.any(cast.view(np.uint16) & exponent == exponent):
            return
    elif np.isfinite(cast).all():
        return
    lost = np.isfinite(values) & ~np.isfinite(cast)
    if lost.any():
        worst = np.abs(values[lost]).max()
        raise LossError(
            f"{tensor.id}: {int(lost.sum())} values in {box}, up to {float(worst):g}, lie beyond "
            f"what {tensor.dtype.name} holds. Choose a wider --dtype."
        )


def _slices(inner: Box, outer: Box) -> tuple[slice, ...]:
    return tuple(
        slice(a - c, b - c) for a, b, c in zip(inner.start, inner.stop, outer.start, strict=True)
    )


def move_all(
    mover: Mover,
    work: Mapping[str, Sequence[TensorId]],
    executor: Executor | None,
    done: Callable[[str, Moved], None],
    *,
    workers: int = 2,
) -> None:
    """Move every name; `done` is called in this thread as each is finished.

    `workers` of the executor begin as far apart as the names go: neighbours lie in one file, and
    two writers of one file wait for each other.
    """
    if executor is None:
        for name, tensors in work.items():
            done(name, mover.move(name, tensors))
        return
    pending: dict[Future[Moved], str] = {}
    names = list(work)
    step = -(-len(names) // workers)
    queue = ((n, work[n]) for i in range(step) for n in names[i::step])
    try:
        for name, tensors in queue:
            pending[executor.submit(mover.move, name, tensors)] = name
            if len(pending) >= 64:
                _drain(pending, done)
        while pending:
            _drain(pending, done)
    finally:
        for future in pending:
            future.cancel()
        wait(pending)


def _drain(pending: dict[Future[Moved], str], done: Callable[[str, Moved], None]) -> None:
    finished, _ = wait(pending, return_when="FIRST_COMPLETED")
    for future in finished:
        name = pending.pop(future)
        done(name, future.result())
