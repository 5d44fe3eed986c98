"""Reading and writing byte ranges of many files with a bounded number of them open."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from reshard.box import Box, row_major
from reshard.checksums import NBYTES, crc32c
from reshard.device import CPU, Device
from reshard.errors import CorruptError, FormatError
from reshard.layout import Codec, Piece, Scaled, StoredArray
from reshard.workers import for_syncs

Array = npt.NDArray[Any]

_OPEN_FILES = 128
#: A strided read takes the whole span if at most this many times the wanted bytes lie in it.
_SPAN = 4
_KEEP = 64 << 20


class Files:
    """The files below one folder, opened on demand, the least recently used one closed.

    `keep`: bytes of grains (arrays that are read whole) kept decoded; the last always is.
    """

    def __init__(
        self, folder: Path, *, writable: bool = False, keep: int = _KEEP, device: Device = CPU
    ) -> None:
        self.folder = folder
        self.device = device
        self._flags = os.O_RDWR if writable else os.O_RDONLY
        self._open: OrderedDict[str, int] = OrderedDict()
        self._busy: dict[str, int] = {}
        self._grains: OrderedDict[StoredArray, Array] = OrderedDict()
        self._keep = keep
        self._lock = threading.Lock()
        self._written: set[str] = set()
        #: Is told of every run of an uncompressed array that is read: array, offset in file, bytes.
        self.watch: Callable[[StoredArray, int, memoryview], None] | None = None

    def _acquire(self, name: str) -> int:
        with self._lock:
            self._busy[name] = self._busy.get(name, 0) + 1
            fd = self._open.get(name)
            if fd is not None:
                self._open.move_to_end(name)
                return fd
            for other in list(self._open):
                if len(self._open) < _OPEN_FILES:
                    break
                if not self._busy.get(other):
                    os.close(self._open.pop(other))
            try:
                fd = os.open(self.folder / name, self._flags | os.O_CLOEXEC | os.O_NONBLOCK)
            except OSError as error:
                self._busy[name] -= 1
                raise CorruptError(f"{self.folder / name}: cannot be opened: {error}") from error
            self._open[name] = fd
            return fd

    def _release(self, name: str) -> None:
        with self._lock:
            self._busy[name] -= 1

    def pread(self, name: str, offset: int, out: memoryview) -> None:
        """Fill `out` with the bytes at `offset`. Raises CorruptError if the file ends before."""
        fd = self._acquire(name)
        try:
            done = 0
            while done < len(out):
                n = os.preadv(fd, [out[done:]], offset + done)
                if n == 0:
                    raise CorruptError(
                        f"{self.folder / name}: cut short: {len(out)} bytes wanted at {offset}, "
                        f"{done} there. Copy or save it again."
                    )
                done += n
        except OSError as error:
            raise self._named(error, name) from None
        finally:
            self._release(name)

    def pwrite(self, name: str, offset: int, data: memoryview) -> None:
        """Write all of `data` at `offset`."""
        fd = self._acquire(name)
        try:
            done = 0
            while done < len(data):
                done += os.pwrite(fd, data[done:], offset + done)
        except OSError as error:
            raise self._named(error, name) from None
        finally:
            self._release(name)
        with self._lock:
            self._written.add(name)

    def _named(self, error: OSError, name: str) -> OSError:
        return OSError(error.errno, error.strerror, str(self.folder / name))

    def sync_written(self, workers: int = 1) -> set[str]:
        """Make what was written since the last call durable; the files' names."""
        with self._lock:
            names, self._written = self._written, set()
        with for_syncs(workers) as each:
            for _ in each(self._sync, sorted(names)):
                pass
        return names

    def _sync(self, name: str) -> None:
        fd = self._acquire(name)
        try:
            os.fsync(fd)
        except OSError as error:
            raise self._named(error, name) from None
        finally:
            self._release(name)

    def close(self) -> None:
        """Close every file."""
        with self._lock:
            for fd in self._open.values():
                os.close(fd)
            self._open.clear()

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, piece: Piece, box: Box) -> Array:
        """The values of `box` (inside the piece), as a row-major array of its shape."""
        if piece.codec is not None:
            return self._decoded(piece.codec, piece, box)
        array = piece.array
        if array.codec is not None:
            return self._read_packed(piece, box)
        out = np.empty(box.shape, array.dtype.numpy)
        if out.size:
            self._read_into(piece, box, out)
        return out

    def _decoded(self, codec: Codec, piece: Piece, box: Box) -> Array:
        """The values of `box` through a codec; where it multiplies, on the device."""
        if not isinstance(codec, Scaled):
            return codec.decode(self.read, piece, box)
        values, factors = codec.parts(self.read, piece, box)
        return self.device.scaled(values, factors, codec.dtype.numpy)

    def _read_packed(self, piece: Piece, box: Box) -> Array:
        """The values of `box` out of a grain: an array that is read whole, the last ones kept."""
        array = piece.array
        strides = tuple(s * array.dtype.itemsize for s in piece.strides)
        start = piece.base_of(box) * array.dtype.itemsize
        grain = self._grain(array)
        return np.ndarray(box.shape, array.dtype.numpy, grain.data, start, strides).copy()

    def _grain(self, array: StoredArray) -> Array:
        """The bytes of a grain's elements."""
        with self._lock:
            found = self._grains.get(array)
            if found is not None:
                self._grains.move_to_end(array)
                return found
        raw = self._raw(array)
        if array.codec in ("crc32c", "zstd+crc32c"):
            raw = self._checked(array, raw)
        made = raw if array.codec == "crc32c" else self._decode(array, raw)
        with self._lock:
            self._grains[array] = made
            held = sum(g.nbytes for g in self._grains.values())
            while held > self._keep and len(self._grains) > 1:
                held -= self._grains.popitem(last=False)[1].nbytes
        return made

    def _raw(self, array: StoredArray) -> Array:
        """The bytes of a grain as they are stored."""
        raw = np.empty(array.packed, np.uint8)
        self.pread(array.file, array.offset, as_bytes(raw))
        return raw

    def _checked(self, array: StoredArray, raw: Array) -> Array:
        """What lies before the CRC-32C at the end. Raises CorruptError if that is off."""
        elements, stored = raw[:-NBYTES], raw[-NBYTES:]
        found = crc32c(as_bytes(elements))
        if found != int.from_bytes(stored.tobytes(), "little"):
            raise CorruptError(
                f"{self.folder / array.file}: {array.key}: {array.holder} at byte {array.offset}: "
                f"its bytes have CRC-32C {found:08x}, {stored.tobytes()[::-1].hex()} is stored. "
                "The data is damaged; copy it again."
            )
        return elements

    def _decode(self, array: StoredArray, raw: Array) -> Array:
        """The elements of a compressed array."""
        where = self.folder / array.file
        if array.codec not in ("zstd", "zstd+crc32c"):
            raise FormatError(f"{where}: {array.key}: the codec {array.codec!r} is not known")
        try:
            import zstandard
        except ImportError:
            raise FormatError(
                f"{where}: {array.key} is compressed with zstd; install the package zstandard"
            ) from None
        end = array.inner + array.nbytes
        try:
            with zstandard.ZstdDecompressor().stream_reader(raw.tobytes()) as stream:
                data = stream.read(end)
        except zstandard.ZstdError as error:
            raise CorruptError(f"{where}: {array.key}: not a whole zstd stream ({error})") from None
        if len(data) < end:
            raise CorruptError(
                f"{where}: {array.key}: the zstd stream ends before its last element"
            )
        return np.frombuffer(data, np.uint8)[array.inner :]

    def _read_into(self, piece: Piece, box: Box, out: Array) -> None:
        item = piece.array.dtype.itemsize
        base = piece.base_of(box)
        span = 1 + sum((n - 1) * s for n, s in zip(box.shape, piece.strides, strict=True))
        if is_dense(box.shape, piece.strides) and out.flags.c_contiguous:
            self._pread(piece.array, base * item, as_bytes(out))
        elif span <= _SPAN * out.size:
            raw = np.empty(span, out.dtype)
            self._pread(piece.array, base * item, as_bytes(raw))
            self.device.gather(raw, piece.strides, out)
        else:
            for i, part in enumerate(_along(box, _widest(box, piece.strides))):
                axis = _widest(box, piece.strides)
                self._read_into(piece, part, out[(slice(None),) * axis + (slice(i, i + 1),)])

    def _pread(self, array: StoredArray, start: int, out: memoryview) -> None:
        """Fill `out` with the bytes of an array from its byte `start` on."""
        self.pread(array.file, array.offset + start, out)
        if self.watch is not None:
            self.watch(array, array.offset + start, out)

    def write(self, piece: Piece, box: Box, values: Array) -> None:
        """Put the values of `box` (inside the piece) where they belong."""
        if not values.size:
            return
        item = piece.array.dtype.itemsize
        if is_dense(box.shape, piece.strides):
            data = np.ascontiguousarray(values)
            offset = piece.array.offset + piece.base_of(box) * item
            self.pwrite(piece.array.file, offset, as_bytes(data))
            return
        axis = _widest(box, piece.strides)
        for i, part in enumerate(_along(box, axis)):
            self.write(piece, part, values[(slice(None),) * axis + (slice(i, i + 1),)])


def is_dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether a box with these strides is one contiguous row-major run."""
    return all(n == 1 or s == r for n, s, r in zip(shape, strides, row_major(shape), strict=True))


def _widest(box: Box, strides: tuple[int, ...]) -> int:
    """The axis of more than one element with the longest stride."""
    return max((i for i, n in enumerate(box.shape) if n > 1), key=lambda i: strides[i], default=0)


def _along(box: Box, axis: int) -> list[Box]:
    """The box cut into slices of one element along an axis."""
    return [
        Box(
            (*box.start[:axis], i, *box.start[axis + 1 :]),
            (*box.stop[:axis], i + 1, *box.stop[axis + 1 :]),
        )
        for i in range(box.start[axis], box.stop[axis])
    ]


def as_bytes(array: Array) -> memoryview:
    """The bytes of a contiguous array, writable where it is."""
    return array.reshape(-1).view(np.uint8).data


def blocks(shape: tuple[int, ...], limit: int) -> list[Box]:
    """The tensor cut into row-major runs of whole leading indices, `limit` elements at most."""
    if prod(shape) == 0:
        return []
    return _blocks(Box.whole(shape), 0, max(1, limit))


def _blocks(box: Box, axis: int, limit: int) -> list[Box]:
    if axis >= len(box.start) or box.numel <= limit:
        return [box]
    row = prod(box.shape[axis + 1 :])
    a, b = box.start[axis], box.stop[axis]
    step = max(1, limit // row)
    out: list[Box] = []
    for i in range(a, b, step):
        part = Box(
            (*box.start[:axis], i, *box.start[axis + 1 :]),
            (*box.stop[:axis], min(i + step, b), *box.stop[axis + 1 :]),
        )
        out += _blocks(part, axis + 1, limit) if row > limit else [part]
    return out
