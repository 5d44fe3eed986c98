"""CRC-32s that the source's archives record, held against the bytes that a conversion reads.

torch.save writes a stored zip: each member's CRC-32 stands in the directory at the archive's end
and in a data descriptor behind the member's bytes. torch looks at neither. A `.distcp` file is many
such archives, one behind the other. Source: torch 2.13 caffe2/serialize/inline_container.cc; a
save with `set_crc32_options(False)` records zero.
"""

from __future__ import annotations

import struct
import threading
from bisect import bisect_right
from collections.abc import Iterable
from functools import partial
from typing import Final

from reshard.checksums import KINDS, Runs
from reshard.containers.zips import Window, read_members
from reshard.errors import CorruptError, ReshardError
from reshard.files import Files
from reshard.layout import StoredArray

_DESCRIPTORS: Final = (struct.Struct("<IIQQ"), struct.Struct("<IIII"))  # mark, CRC, bytes, bytes
_MARK = 0x08074B50
_BLOCK = 1 << 20


class _Member:
    """Bytes [start, start + size) of a file, and what the archive says of them."""

    __slots__ = ("crc", "file", "key", "runs", "size", "start")

    def __init__(self, array: StoredArray, start: int, size: int, crc: int) -> None:
        self.file, self.key = array.file, array.key  # of the first array that was met in it
        self.start, self.size, self.crc = start, size, crc
        self.runs = Runs("crc32")


class Recorded:
    """Takes in what is read of the source's archives, and compares it with what they record.

    A member is compared as soon as all of it has been read; `check` ends those that were read in
    part. One that was not read at all is not looked at, nor are files of other kinds.
    """

    def __init__(self, files: Files) -> None:
        self._files = files
        self._whole: dict[str, list[tuple[int, int, int]] | None] = {}  # of a file that is a zip
        self._members: dict[tuple[str, int], _Member | None] = {}  # None: compared
        self._of: dict[tuple[str, int], int] = {}  # an array's offset -> its member's, -1: none
        self._lock = threading.Lock()

    def saw(self, array: StoredArray, offset: int, data: memoryview) -> None:
        """Take in bytes of an array, read from `offset` of its file.

        Raises CorruptError if they end a member whose CRC-32 is another.
        """
        member = self._member(array)
        if member is None:
            return
        start = offset - member.start
        if start < 0 or start + len(data) > member.size:
            member.runs.torn = True
            return
        member.runs.add(start, data, again=True)
        crc = member.runs.all_of(member.size)
        if crc is not None:
            self._compare(member, crc)

    def expect(self, arrays: Iterable[StoredArray]) -> None:
        """Have `check` look at arrays that an earlier run has read."""
        for array in arrays:
            self._member(array)

    def check(self) -> None:
        """Read what is missing of every member. Raises CorruptError for one that has changed."""
        for member in list(self._members.values()):
            if member is None:
                continue
            crc = member.runs.whole(member.size, partial(self._read, member))
            self._compare(member, self._read(member, 0, member.size) if crc is None else crc)

    def _member(self, array: StoredArray) -> _Member | None:
        """The member an array lies in; None: there is none, it records nothing, or is compared."""
        key = (array.file, array.offset)
        with self._lock:
            start = self._of.get(key)
            if start is None:
                start = self._of[key] = self._find(array)
            return self._members[array.file, start] if start >= 0 else None

    def _find(self, array: StoredArray) -> int:
        if array.codec is not None:
            return -1
        if array.file not in self._whole:
            self._whole[array.file] = self._listed(array.file)
        listed = self._whole[array.file]
        if listed is None:
            start, size, crc = array.offset, array.nbytes, self._described(array)
        else:
            at = bisect_right(listed, (array.offset, 1 << 63, 0)) - 1
            if at < 0:
                return -1
            start, size, crc = listed[at]
            if array.offset + array.nbytes > start + size:
                return -1
        if not crc:
            return -1
        self._members.setdefault((array.file, start), _Member(array, start, size, crc))
        return start

    def _listed(self, file: str) -> list[tuple[int, int, int]] | None:
        """Offset, bytes and CRC of each member of a file that is one archive, in order."""
        path = self._files.folder / file
        try:
            with Window(path) as window:
                if window.length < 4 or window.read(0, 4) != b"PK\x03\x04":
                    return None
                members = read_members(window)
        except ReshardError:
            return None  # several archives in one file
        return sorted((m.offset, m.size, m.crc32) for m in members.values() if m.size)

    def _described(self, array: StoredArray) -> int:
        """The CRC in the data descriptor right behind an array; 0: there is none."""
        for kind in _DESCRIPTORS:
            raw = bytearray(kind.size)
            try:
                self._files.pread(array.file, array.offset + array.nbytes, memoryview(raw))
            except CorruptError:
                continue  # the file ends before
            mark, crc, size, packed = kind.unpack(raw)
            if mark == _MARK and size == packed == array.nbytes:
                return int(crc)
        return 0

    def _read(self, member: _Member, start: int, stop: int) -> int:
        """The CRC of bytes [start, stop) of a member, read for this alone."""
        crc, at = 0, start
        buffer = memoryview(bytearray(min(_BLOCK, stop - start)))
        while at < stop:
            part = buffer[: min(_BLOCK, stop - at)]
            self._files.pread(member.file, member.start + at, part)
            crc = KINDS["crc32"](part, crc)
            at += len(part)
        return crc

    def _compare(self, member: _Member, crc: int) -> None:
        if crc != member.crc:
            raise CorruptError(
                f"{self._files.folder / member.file}: {member.key}: bytes {member.start} to "
                f"{member.start + member.size} have CRC-32 {crc:08x}; the archive recorded "
                f"{member.crc:08x}: they have changed since they were saved, or the disk returns "
                "other bytes. Copy the file again, or take an earlier checkpoint; if it was "
                "changed on purpose, --no-verify converts what is there."
            )
        with self._lock:
            self._members[member.file, member.start] = None
