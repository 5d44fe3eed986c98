"""CRC-32 and CRC-32C of bytes, taken in part by part, in any order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import lru_cache

import google_crc32c
import numpy as np
from isal import isal_zlib

#: Bytes of one checksum, little-endian wherever it is stored.
NBYTES = 4


def crc32c(data: memoryview | bytes, start: int = 0) -> int:
    """The CRC-32C (Castagnoli) of `data`, going on from `start`.

    Source: RFC 3720 B.4; zarr v3 crc32c codec 1.0.
    """
    if not len(data):
        return start
    view = np.frombuffer(data, np.uint8)
    view.flags.writeable = False  # google-crc32c takes read-only buffers alone
    return int(google_crc32c.extend(start, view))


#: How a checksum of each kind goes on: (bytes, what came before) -> value.
KINDS: Mapping[str, Callable[[memoryview, int], int]] = {"crc32": isal_zlib.crc32, "crc32c": crc32c}

#: The generators, without x^32, the lowest bit the coefficient of x^31.
_POLYNOMIALS: Mapping[str, int] = {"crc32": 0xEDB88320, "crc32c": 0x82F63B78}
_ONES = 0xFFFFFFFF  # what a register begins with, and is inverted by at the end


class Runs:
    """The checksum of one array's bytes, taken in run by run, in any order, by any thread.

    `torn`: runs have met that cannot be put together, so that it has to be taken anew.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.torn = False
        self._runs: dict[int, tuple[int, int]] = {}  # end -> start, checksum
        self._lock = threading.Lock()

    def add(self, start: int, data: memoryview, *, again: bool = False) -> None:
        """Take in the bytes from `start`. `again`: the same bytes may come twice."""
        with self._lock:
            first, crc = self._runs.pop(start, (start, 0))
        end = start + len(data)
        made = (first, KINDS[self.kind](data, crc))
        with self._lock:
            if end in self._runs and not (again and self._runs[end] == made):
                self.torn = True
            self._runs[end] = made

    def all_of(self, nbytes: int) -> int | None:
        """The checksum, once one run covers all `nbytes`."""
        first, crc = self._runs.get(nbytes, (-1, 0))
        return crc if first == 0 and not self.torn else None

    def whole(self, nbytes: int, gap: Callable[[int, int], int | None]) -> int | None:
        """The checksum of all `nbytes`; `gap` gives that of a range no run took in, or None.

        None where it cannot be told.
        """
        if self.torn:
            return None
        crc = at = 0
        runs = sorted((s, end, part) for end, (s, part) in self._runs.items())
        for start, end, part in (*runs, (nbytes, nbytes, 0)):
            if start < at:
                return None
            if start > at:
                between = gap(at, start)
                if between is None:
                    return None
                crc = joined(self.kind, crc, between, start - at)
            crc = joined(self.kind, crc, part, end - start) if end > start else crc
            at = end
        return crc


def joined(kind: str, first: int, second: int, nbytes: int) -> int:
    """The checksum of two runs of bytes, one behind the other, the second `nbytes` long."""
    return _times(kind, first, _power(kind, nbytes)) ^ second


def with_zeros(kind: str, first: int, nbytes: int) -> int:
    """The checksum of a run of bytes (`first`; 0 of none) with `nbytes` zeros behind it."""
    return _times(kind, first ^ _ONES, _power(kind, nbytes)) ^ _ONES


@lru_cache(maxsize=1024)
def _power(kind: str, nbytes: int) -> int:
    """x^(8 * nbytes) modulo the generator: what so many bytes behind it make of a register."""
    power, square = 1 << 31, 1 << 23  # 1 and x^8
    while nbytes:
        if nbytes & 1:
            power = _times(kind, power, square)
        square = _times(kind, square, square)
        nbytes >>= 1
    return power


def _times(kind: str, a: int, b: int) -> int:
    """The product of two polynomials over GF(2), modulo the generator."""
    out, generator = 0, _POLYNOMIALS[kind]
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            out ^= b
        b = b >> 1 ^ (generator if b & 1 else 0)
    return out
