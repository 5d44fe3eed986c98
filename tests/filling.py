"""Fills drafts with bytes, as the engine does, and checks that what they promise holds."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from reshard.layout import Draft, StoredArray


def fill(draft: Draft, folder: Path, bytes_of: Callable[[StoredArray], bytes]) -> Path:
    """Writes the draft's file below `folder`, its arrays from `bytes_of`; gives its path.

    Literals and arrays must not overlap, and each checksum must lie after its array.
    """
    out = bytearray(draft.size)
    spans: list[tuple[int, int]] = []
    for at, raw in draft.literals:
        out[at : at + len(raw)] = raw
        spans.append((at, at + len(raw)))
    for array in draft.arrays:
        raw = bytes_of(array)
        assert len(raw) == array.nbytes
        out[array.offset : array.offset + array.nbytes] = raw
        spans.append((array.offset, array.offset + array.nbytes))
    spans.sort()
    assert all(stop <= start for (_, stop), (start, _) in pairwise(spans))
    assert spans[-1][1] <= draft.size == len(out)
    for checksum in draft.checksums:
        array = checksum.array
        crc = zlib.crc32(out[array.offset : array.offset + array.nbytes])
        for at in checksum.at:
            assert at >= array.offset + array.nbytes
            out[at : at + 4] = crc.to_bytes(4, "little")
    path = folder / draft.name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(out)
    return path
