"""Reading a checkpoint back: file by file in sequence for what was written, or tensor by tensor."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from reshard import digests
from reshard.box import Box
from reshard.checkpoint import Checkpoint
from reshard.checksums import KINDS
from reshard.device import CPU, Device
from reshard.dtypes import DType
from reshard.errors import CorruptError, ReplicaError, VerifyError
from reshard.files import Files, as_bytes, blocks, is_dense
from reshard.fingerprints import Sum
from reshard.join import cover
from reshard.layout import Checksum, Draft, Piece
from reshard.tensor import LogicalTensor, TensorId
from reshard.workers import behind, spread

Array = npt.NDArray[Any]


@dataclass(slots=True)
class ReadBack:
    """What a cold reading gave: a fingerprint per tensor, a digest per file."""

    sums: dict[TensorId, Sum] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)


class _Stream:
    """One file read forward once: every byte hashed, arrays' CRCs patched in ahead."""

    def __init__(
        self,
        files: Files,
        name: str,
        draft: Draft,
        digest: digests.Digest,
        progress: Callable[[int], object],
    ) -> None:
        self.files, self.name, self.at, self.size = files, name, 0, draft.size
        self.digest = digest
        self.progress = progress
        # array start -> end, what is wanted
        self.crcs = {c.array.offset: (c.array.offset + c.array.nbytes, c) for c in draft.checksums}
        self.stops = sorted({o for start, (end, _) in self.crcs.items() for o in (start, end)})
        self.crc = 0
        self.current: tuple[int, Checksum] | None = None

    def take(self, n: int) -> Array:
        """The next n bytes."""
        out = np.empty(n, np.uint8)
        view = as_bytes(out)
        self.files.pread(self.name, self.at, view)
        self.digest.update(view)
        self._checksum(view)
        self.at += n
        self.progress(n)
        return out

    def _checksum(self, view: memoryview) -> None:
        found = self.crcs.get(self.at)
        if found is not None:
            self.crc, self.current = 0, found
        if self.current is None:
            return
        end, wanted = self.current
        self.crc = KINDS[wanted.kind](view, self.crc)
        if self.at + len(view) == end:
            for at in wanted.at:
                self.files.pwrite(self.name, at, memoryview(self.crc.to_bytes(4, "little")))
            self.current = None

    def skip_to(self, offset: int, block: int) -> None:
        """Read on to an offset, stopping at every array whose CRC is wanted."""
        stops = self.stops[bisect_right(self.stops, self.at) : bisect_left(self.stops, offset)]
        for stop in (*stops, offset):
            while self.at < stop:
                self.take(min(block, stop - self.at))


def read_files(
    checkpoint: Checkpoint,
    drafts: Sequence[Draft],
    *,
    elements: int,
    workers: int = 1,
    device: Device = CPU,
    digest: str = digests.USUAL,
    progress: Callable[[int], object] = lambda _: None,
) -> ReadBack:
    """Read staged files cold: one forward pass gives CRCs (patched in), digest, fingerprints.

    `workers` files are read at a time, by blocks of `elements` each. `digest`: its kind.
    """
    result = ReadBack()
    parts = _Parts(checkpoint)
    named = {d.name: d for d in drafts}
    for name in parts.rows:
        if name not in named:
            raise VerifyError(f"{checkpoint.path / name}: read back, but never written")
    share = sum(d.size for d in drafts) // workers
    with (
        Files(checkpoint.path, writable=True, device=device) as files,
        spread(workers) as each,
    ):

        def read(name: str) -> tuple[str, str]:
            taken = digests.KINDS[digest]()
            stream = _Stream(files, name, named[name], taken, progress)
            spare = workers if named[name].size > share else 1  # else others have their own file
            _read_file(parts, stream, elements, spare)
            return name, digests.spelled(digest, taken)

        result.digests.update(each(read, sorted(named)))

        def combine(number: int) -> Sum:
            return _combine(checkpoint, parts, number, files, elements)

        tensors = checkpoint.layout.tensors
        result.sums.update(zip(tensors, each(combine, range(len(tensors))), strict=True))
    return result


class _Parts:
    """Every piece of a checkpoint by its number, as a row of numbers: there can be millions.

    `rows` by file: of each piece that lies in it front to back its number, its tensor's, that of
    its type, the byte where it starts, its axes and its box.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.tensors = list(checkpoint.layout.tensors.values())
        self.begins = array("q")  # the number of each tensor's first piece
        self.rows: dict[str, array[int]] = {}
        known: dict[DType, int] = {}
        count = 0
        for at, logical in enumerate(self.tensors):
            self.begins.append(count)
            for piece in checkpoint.layout.pieces(logical.id):
                row = self.rows.setdefault(piece.array.file, array("q"))
                if piece.array.plain and is_dense(piece.box.shape, piece.strides):
                    kind = known.setdefault(piece.array.dtype, len(known))
                    first, last = piece.box.start, piece.box.stop
                    row.extend((count, at, kind, _start(piece), len(first), *first, *last))
                count += 1
        self.dtypes: list[DType] = list(known)
        self.sums = np.zeros((count, 2), np.uint64)
        self.summed = np.zeros(count, np.bool_)

    def front_to_back(self, file: str) -> list[tuple[int, int, LogicalTensor, DType, Box]]:
        """Where each piece of a file starts, its number, tensor, type and box."""
        row, at, out = self.rows.get(file, ()), 0, []
        while at < len(row):
            number, tensor, kind, start, axes = row[at : at + 5]
            stop = at + 5 + axes
            box = Box(tuple(row[at + 5 : stop]), tuple(row[stop : stop + axes]))
            out.append((start, number, self.tensors[tensor], self.dtypes[kind], box))
            at = stop + axes
        return sorted(out, key=lambda found: found[0])

    def saw(self, number: int, total: Sum) -> None:
        """Keep the fingerprint of a piece."""
        self.sums[number] = (total.a, total.b)
        self.summed[number] = True

    def sum_of(self, number: int) -> tuple[int, int] | None:
        """The fingerprint of a piece, where it was taken."""
        if not self.summed[number]:
            return None
        a, b = self.sums[number].tolist()
        return a, b


def _read_file(parts: _Parts, stream: _Stream, elements: int, workers: int) -> None:
    """Read one file to its end; fingerprints of the pieces that lie in it front to back are kept.

    With several workers, what was read is summed while what follows is read.
    """
    totals: list[tuple[int, Sum]] = []
    with behind(Sum.add, workers) as add:
        for start, number, logical, dtype, whole in parts.front_to_back(stream.name):
            if start < stream.at:
                continue  # shares bytes with a piece already read; read again when combined
            stream.skip_to(start, elements * 8)
            total = Sum()
            totals.append((number, total))
            for part in blocks(whole.shape, elements):
                box = part.shift(whole.start)
                values = stream.take(box.numel * dtype.itemsize)
                shaped = values.view(dtype.numpy).reshape(box.shape)
                add(total, logical, box, shaped, stream.files.device.by_rows)
        stream.skip_to(stream.size, elements * 8)
    for number, total in totals:
        parts.saw(number, total)


def _start(piece: Piece) -> int:
    return piece.array.offset + piece.base * piece.array.dtype.itemsize


def _combine(checkpoint: Checkpoint, parts: _Parts, at: int, files: Files, elements: int) -> Sum:
    """A tensor's fingerprint from its parts; its replicas compared with them."""
    logical = parts.tensors[at]
    pieces = list(checkpoint.layout.pieces(logical.id))
    seen = {
        id(p): found
        for i, p in enumerate(pieces)
        if (found := parts.sum_of(parts.begins[at] + i)) is not None
    }
    whole = cover(pieces)
    true = logical.true
    total = Sum()
    by_box: dict[Box, tuple[int, int]] = {}
    for box, piece in whole.parts.items:
        a, b = _part(logical, box, piece, seen, files, elements)
        by_box[box] = (a, b)
        inside = box & true
        total.merge(Sum(a, b, 0 if inside is None else inside.numel))
    for box, piece in whole.replicas:
        mine = by_box.get(box)
        if mine is None:
            mine = (0, 0)
            for held, holder in whole.parts.near(box):
                common = held & box
                if common is not None:
                    a, b = _part(logical, common, holder, {}, files, elements)
                    mine = ((mine[0] + a) % 2**64, (mine[1] + b) % 2**64)
        if _part(logical, box, piece, seen, files, elements) != mine:
            raise ReplicaError(
                f"{logical.id}: {piece.array.file} and another holder differ in {box}"
            )
    return total


def _part(
    logical: LogicalTensor,
    box: Box,
    piece: Piece,
    seen: Mapping[int, tuple[int, int]],
    files: Files,
    elements: int,
) -> tuple[int, int]:
    """The fingerprint of a box of a piece. `seen`: of whole pieces, by their id()."""
    if box == piece.box and (found := seen.get(id(piece))) is not None:
        return found
    total = Sum()
    for part in blocks(box.shape, elements):
        inner = part.shift(box.start)
        total.add(logical, inner, files.read(piece, inner), files.device.by_rows)
    return (total.a, total.b)


def fingerprints(
    checkpoint: Checkpoint,
    *,
    elements: int,
    replicas: bool = True,
    progress: Callable[[int], object] = lambda _: None,
) -> dict[TensorId, Sum]:
    """The fingerprint of every tensor, read tensor by tensor; replicas are compared.

    Raises CoverageError for a gap, ReplicaError for copies that differ, CorruptError for a file
    that is cut short.
    """
    out: dict[TensorId, Sum] = {}
    with Files(checkpoint.path) as files:
        for tensor, logical in checkpoint.layout.tensors.items():
            checkpoint.layout.check(tensor)
            whole = cover(checkpoint.layout.pieces(tensor))
            total = Sum()
            for box in blocks(logical.space, elements):
                values = read_block(files, whole.parts.near(box), box, logical)
                total.add(logical, box, values)
                if replicas:
                    _compare(files, whole.replicas, box, values, logical)
                progress(values.nbytes)
            out[tensor] = total
    return out


def read_block(files: Files, parts: Any, box: Box, logical: LogicalTensor) -> Array:
    """The values of one box of a tensor, from whichever stored arrays hold it."""
    out: Array | None = None
    for held, piece in parts:
        common = held & box
        if common is None:
            continue
        values = files.read(piece, common)
        if common == box:
            return values
        if out is None:
            out = np.empty(box.shape, logical.dtype.numpy)
        out[_slices(common, box)] = values
    if out is None:
        raise CorruptError(f"{logical.id}: no stored array holds {box}")
    return out


def _compare(
    files: Files,
    replicas: Sequence[tuple[Box, Piece]],
    box: Box,
    values: Array,
    logical: LogicalTensor,
) -> None:
    for held, piece in replicas:
        common = held & box
        if common is None:
            continue
        other = files.read(piece, common)
        if np.ascontiguousarray(values[_slices(common, box)]).tobytes() != other.tobytes():
            raise ReplicaError(
                f"{logical.id}: {piece.array.holder or piece.array.file} holds other values than "
                f"the first holder in {common}; replicas must agree. The run that saved them had "
                "diverged. Convert with --replicas first to take the first holder's."
            )


def _slices(inner: Box, outer: Box) -> tuple[slice, ...]:
    return tuple(
        slice(a - c, b - c) for a, b, c in zip(inner.start, inner.stop, outer.start, strict=True)
    )
