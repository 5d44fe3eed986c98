"""Drops from a long pickle what its memo keeps for nobody, so that unpickling it stays small.

torch pickles a `.metadata` with every object in the memo: the state dicts and tuples of millions
of chunks live until the end, though almost none is ever fetched again.
"""

from __future__ import annotations

import io
from array import array
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

from reshard.containers.pickles import LARGEST, loads, memo_token, scan, step
from reshard.containers.small import read_small
from reshard.errors import CorruptError

_FRAME = b"\x95"
_PUTS = (b"q", b"r", b"p", b"g")


_Longs = npt.NDArray[np.uint32]
_BLOCK = 1 << 20  # bytes rewritten together
_LONG = 8 << 20  # bytes: shorter ones are small enough as they are


def load_large(
    path: Path, classes: Mapping[str, type], *, intern: tuple[str, str] | None = None
) -> object:
    """The value of a plain pickle file (`.metadata`), inert but for objects of `classes`.

    Those stand for classes of their names in any module: slots, no code of the file. Equal
    tuples made by `intern` (module and name) are one object. Raises CorruptError for a file of
    more than 1 GiB, some six million chunks, which would take about 3 GB of memory.
    """
    data = read_small(path, LARGEST)
    if len(data) > _LONG:
        with suppress(CorruptError):  # `loads` says it, with the file's name
            data = slimmed(data) if scan(data) == len(data) else data
    tuples: dict[object, object] = {}

    def one(value: object = ()) -> object:
        if type(value) is not tuple:
            value = tuple(value)  # type: ignore[arg-type]  # what is none fails the pickle
        return tuples.setdefault(value, value)

    def known(module: str, name: str) -> object:
        if (module, name) == intern:
            return one
        return classes.get(name)  # whatever the module: torch has moved them

    return loads(data, str(path), None, known)


def slimmed(data: bytes) -> bytes:
    """The same pickle, memoizing only what it fetches, without frames. `data` has been scanned.

    Returned as it is where it numbers its memo by other opcodes than MEMOIZE (protocols < 4).
    """
    found = _tokens(data)
    if found is None:
        return data
    memo, frames, at, fetched, wide = found
    used = np.unique(fetched)
    if len(used) and used[-1] >= len(memo):
        return data  # it fetches what is not there: the unpickler says so
    kept = np.zeros(len(memo), np.bool_)
    kept[used] = True
    renumbered = (np.cumsum(kept, dtype=np.uint32) - np.uint32(1))[fetched]
    drop = memo[~kept]
    del found, memo, kept
    out = io.BytesIO()
    for start in range(0, len(data), _BLOCK):
        stop = min(start + _BLOCK, len(data))
        raw = np.frombuffer(data, np.uint8, stop - start, start).copy()
        keep = np.ones(len(raw), np.bool_)
        keep[_within(drop, start, stop)] = False
        for i in range(9):
            keep[_within(frames + np.uint32(i), start, stop)] = False
        low, high = np.searchsorted(at, [max(0, start - 4), stop])
        for i in range(4):
            places = at[low:high].astype(np.int64) + 1 + i - start
            mine = (places >= 0) & (places < len(raw)) & ((wide[low:high] == 1) | (i == 0))
            raw[places[mine]] = (renumbered[low:high][mine] >> (8 * i)) & 0xFF
        out.write(raw[keep].tobytes())
    return out.getvalue()


def _within(places: _Longs, start: int, stop: int) -> _Longs:
    """Those of sorted places that lie in a block, counted from its start."""
    low, high = np.searchsorted(places, [start, stop])
    return places[low:high] - np.uint32(start)


_Found = tuple[_Longs, _Longs, _Longs, _Longs, npt.NDArray[np.uint8]]


def _tokens(data: bytes) -> _Found | None:
    """Where MEMOIZE and FRAME stand; where GETs do, what they fetch, and whether in four bytes."""
    memo, frames, at, fetched = array("I"), array("I"), array("I"), array("I")
    wide = array("B")
    token, position = memo_token(), 0
    while True:
        scanner = token.scanner(data, position)  # type: ignore[attr-defined]  # CPython's own
        for match in iter(scanner.match, None):
            which = match.lastindex
            position = match.end()
            if which == 1:
                memo.append(position - 1)
            elif which is None:
                break
            else:
                at.append(position - (2 if which == 2 else 5))
                fetched.append(int.from_bytes(match[which], "little"))
                wide.append(which == 3)
        op = data[position : position + 1]
        if op == b".":
            break
        if op in _PUTS:
            return None
        if op == _FRAME:
            frames.append(position)
        position = step(data, position)
    longs = (np.frombuffer(a, np.uint32) for a in (memo, frames, at, fetched))
    return (*longs, np.frombuffer(wide, np.uint8))  # type: ignore[return-value]  # four and one
