"""The CRC-32s that torch.save's archives hold of their members, which torch does not look at.

Source: torch 2.13 caffe2/serialize/inline_container.cc: a save with `set_crc32_options(False)`
records zero for every member.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from math import prod
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from reshard.checkpoint import Checkpoint
from reshard.checksums import KINDS
from reshard.containers import dcp
from reshard.containers.dcp import Chunk, Place
from reshard.containers.zips import Member, Window, read_members
from reshard.errors import ReshardError

_BLOCK = 1 << 20  # bytes in memory of a member that is longer
_WHOLE = 64 << 10  # archives up to this size are read in one call
_SHOWN = 20  # findings of one file that are listed each


class _Blob(NamedTuple):
    """One archive inside a `.distcp` file: what it holds, and where."""

    place: Place
    key: str
    chunk: Chunk | None = None  # of a tensor
    nbytes: int = 1 << 30  # of what it holds, at most

    def __str__(self) -> str:
        start, stop = self.place.offset, self.place.offset + self.place.length
        of = f" at {list(self.chunk.offsets)}" if self.chunk else ""
        return f"{self.key}{of}, bytes {start} to {stop}"


def check_archives(checkpoint: Checkpoint, names: Iterable[str]) -> list[str]:
    """What has changed in the archives of these files since they were saved, a line each.

    Files of other kinds are passed over, and archives whose CRCs were never taken.
    """
    wanted = set(names)
    blobs = _blobs(checkpoint, wanted)
    found: list[str] = []
    for name in sorted(wanted):
        path = checkpoint.path / name
        with Window(path) as window:
            if name in blobs:
                root = checkpoint.path / PurePosixPath(name).parent
                wrong = list(_wrong_blobs(root, window, blobs.pop(name)))
            else:
                wrong = [detail] if (detail := _wrong(window)) else []
        found += [f"{path}: {detail}" for detail in wrong[:_SHOWN]]
        if wrong[_SHOWN:]:
            found.append(f"{path}: {len(wrong) - _SHOWN} more archives in it have changed")
    return found


def _blobs(checkpoint: Checkpoint, wanted: set[str]) -> dict[str, list[_Blob]]:
    """The archives inside each of the files that a torch.distributed.checkpoint folder names."""
    out: dict[str, list[_Blob]] = defaultdict(list)
    for listed in checkpoint.files:
        at = PurePosixPath(listed)
        if not dcp.is_metadata(at.name):
            continue
        held = dcp.read_metadata(checkpoint.path / at.parent, at.name)
        blobs = [_Blob(p, k) for k, p in held.objects.items()]
        for key, entry in held.tensors.items():
            for chunk in entry.chunks:
                nbytes = prod(chunk.sizes) * entry.dtype.itemsize
                blobs.append(_Blob(chunk.place, key, chunk, nbytes))
        for blob in blobs:
            file = str(at.parent / blob.place.file)
            if file in wanted:
                out[file].append(blob)
    return out


def _wrong_blobs(root: Path, window: Window, blobs: list[_Blob]) -> Iterator[str]:
    for blob in sorted(blobs, key=lambda b: b.place[:2]):
        window.move(blob.place.offset, blob.place.length)
        if blob.place.transform:
            detail = _wrong(dcp.unpacked(root, blob.place, blob.key, blob.nbytes))
        else:
            if window.length <= _WHOLE:
                window.hold(0, window.length)
            detail = _wrong(window)
        if detail:
            yield f"{blob}: {detail}"


def _wrong(window: Window) -> str | None:
    """Which members of an archive have another CRC-32 than it says, in words; None: none has."""
    if window.length < 4 or window.read(0, 4) != b"PK\x03\x04":
        return None
    try:
        members = read_members(window)
    except ReshardError as error:  # what is needed of it was read when the checkpoint was opened
        return f"an archive that cannot be looked into: {error}"
    if not any(m.crc32 for m in members.values()):
        return None
    wrong = [m for m in members.values() if _crc32(window, m) != m.crc32]
    if not wrong:
        return None
    shown = ", ".join(f"{m.name} at byte {m.offset}" for m in wrong[:3])
    shown = f"{shown:.300}" + (f" and {len(wrong) - 3} more" if wrong[3:] else "")
    return (
        f"{len(wrong)} of {len(members)} members have another CRC-32 than the archive says "
        f"({shown}): bytes have changed since it was saved; copy it again"
    )


def _crc32(window: Window, member: Member) -> int:
    crc, at = 0, member.offset - window.start
    stop = at + member.size
    while at < stop:
        data = window.read(at, min(stop - at, _BLOCK))
        crc = KINDS["crc32"](memoryview(data), crc)
        at += len(data)
    return crc
