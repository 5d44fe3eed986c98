"""Moves bytes: tensor by tensor, block by block, within a memory budget."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from reshard.box import Box
from reshard.checksums import KINDS
from reshard.errors import ReplicaError, UsageError
from reshard.files import Files, as_bytes, blocks, is_dense
from reshard.fingerprint import Sum
from reshard.format import Loss
from reshard.layout import Draft, Piece
from reshard.plan import Plan, TensorJoin
from reshard.rounding import Rounding
from reshard.tensor import MASTER, PARAM, TensorId

Array = npt.NDArray[Any]

#: Bytes of the budget that one block may take: a block is held as read, as cast, and as written.
_SHARE = 8
#: Bytes below which a budget or a block costs more in calls than in bytes.
_LEAST, _LEAST_BLOCK = 1 << 20, 1 << 12


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


class Checksums:
    """CRC-32s of arrays, taken while they are written, where that happens front to back."""

    def __init__(self, drafts: Sequence[Draft]) -> None:
        self.wanted = {(d.name, c.array.offset): c for d in drafts for c in d.checksums}
        self._running: dict[tuple[str, int], tuple[int, int]] = {}
        self._lock = threading.Lock()

    def saw(self, piece: Piece, box: Box, values: Array) -> None:
        """Take in a part of an array that has just been written."""
        key = (piece.array.file, piece.array.offset)
        if key not in self.wanted or not is_dense(box.shape, piece.strides):
            return
        start = piece.base_of(box) * piece.array.dtype.itemsize
        crc, done = self._running.get(key, (0, 0))
        if start != done:
            return  # not front to back: the cold reading takes it
        data = as_bytes(np.ascontiguousarray(values))
        crc = KINDS[self.wanted[key].kind](data, crc)
        with self._lock:
            self._running[key] = (crc, done + len(data))

    def patch(self, files: Files, draft: Draft) -> Draft:
        """Write the finished ones of a file; the draft with those that are still wanted."""
        left = []
        for c in draft.checksums:
            crc, done = self._running.get((draft.name, c.array.offset), (0, -1))
            if done != c.array.nbytes:
                left.append(c)
                continue
            for at in c.at:
                files.pwrite(draft.name, at, memoryview(crc.to_bytes(4, "little")))
        return replace(draft, checksums=tuple(left))


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
        rounding = Rounding.between(j.source for j in joins.values())
        for join in joins.values():
            moved.sums[join.target.id] = Sum()
        for space in sorted({j.target.space for j in joins.values()}):
            same = [j for j in joins.values() if j.target.space == space]
            for box in blocks(space, self.elements):
                read = {j.target.id.slot: self._block(j, box, moved) for j in same}
                if rounding is not None and PARAM in read and MASTER in read:
                    rounding.compare(box, read[PARAM], read[MASTER])
        if rounding is not None:
            moved.losses += rounding.findings(name)
        return moved

    def _block(self, join: TensorJoin, box: Box, moved: Moved) -> list[tuple[Box, Array]]:
        """Read one block, write it to every target piece that shares it; what was read."""
        values: list[tuple[Box, Array]] = []
        for held, piece in join.cover.parts.near(box):
            common = held & box
            if common is not None:
                values.append((common, self.source.read(piece, common)))
        self._compare(join, box, values, moved)
        dtype = join.target.dtype.numpy
        cast = [(b, v if v.dtype == dtype else v.astype(dtype)) for b, v in values]
        total = moved.sums[join.target.id]
        for b, v in cast:
            if self.fingerprint:
                total.add(join.target, b, v)
            elif (inside := b & join.target.true) is not None:
                total.elements += inside.numel
        for target_box, piece in join.wanted.near(box):
            wanted = target_box & box
            if wanted is not None:
                self._write(piece, wanted, cast)
        return values

    def _write(self, piece: Piece, wanted: Box, values: Sequence[tuple[Box, Array]]) -> None:
        out: Array | None = None
        for b, v in values:
            if b == wanted:
                out = v
                break
            common = b & wanted
            if common is None:
                continue
            part = v[_slices(common, b)]
            if common == wanted:
                out = part
                break
            if out is None:
                out = np.zeros(wanted.shape, v.dtype)
            out[_slices(common, wanted)] = part
        if out is None:
            out = np.zeros(wanted.shape, piece.array.dtype.numpy)
        self.target.write(piece, wanted, out)
        self.checksums.saw(piece, wanted, out)
        self.progress(out.nbytes)

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


def _slices(inner: Box, outer: Box) -> tuple[slice, ...]:
    return tuple(
        slice(a - c, b - c) for a, b, c in zip(inner.start, inner.stop, outer.start, strict=True)
    )


def move_all(
    mover: Mover,
    work: Mapping[str, Sequence[TensorId]],
    executor: Executor | None,
    done: Callable[[str, Moved], None],
) -> None:
    """Move every name; `done` is called in this thread as each is finished."""
    if executor is None:
        for name, tensors in work.items():
            done(name, mover.move(name, tensors))
        return
    pending: dict[Future[Moved], str] = {}
    queue = iter(work.items())
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
