"""The zip archives of torch.save: stored members only, at known byte offsets.

Layout from torch 2.13 (caffe2/serialize/inline_container.cc over miniz), seen in every fixture:
all members stored, flag 0x808 (UTF-8 names, sizes in a data descriptor after the data), data
aligned to 64 bytes from the archive's start by an "FB" extra field, zip64 end record always.
"""

from __future__ import annotations

import os
import stat
import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from reshard.errors import CorruptError, FormatError, UnsafeError

ALIGNMENT = 64
_END = struct.Struct("<IHHHHIIH")
_END64 = struct.Struct("<IQHHIIQQQQ")
_LOCATOR = struct.Struct("<IIQI")
_CENTRAL = struct.Struct("<IHHHHHHIIIHHHHHII")
_LOCAL = struct.Struct("<IHHHHHIIIHH")
_FULL = 0xFFFFFFFF
_CUT = "The file is cut short or damaged: copy it again, or save the checkpoint again."


@dataclass(frozen=True, slots=True)
class Member:
    """A stored member: `offset` is where its bytes start in the file, `header` its local header."""

    name: str
    offset: int
    size: int  # bytes
    crc32: int
    header: int


class Window:
    """Bytes [start, start + length) of a file, read in few calls. A context manager.

    Offsets are from `start`. `held` are runs already read, kept for the small reads that follow.
    """

    def __init__(self, path: Path, start: int = 0, length: int | None = None) -> None:
        self.path = path
        try:
            self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise CorruptError(f"{path}: cannot be opened ({error.strerror})") from None
        found = os.fstat(self.fd)
        if not stat.S_ISREG(found.st_mode):  # opening a pipe the other way would wait for ever
            self.close()
            raise CorruptError(f"{path}: is no regular file")
        size = found.st_size
        self.move(start, size - start if length is None else length)
        if start < 0 or self.length < 0 or start + self.length > size:
            self.close()
            raise CorruptError(
                f"{path}: bytes {start} to {start + self.length} are wanted, but the file has only "
                f"{size}. {_CUT}"
            )

    @classmethod
    def over(cls, path: Path, data: bytes) -> Window:
        """Bytes already in memory, which came from `path`."""
        window = cls.__new__(cls)
        window.path, window.fd = path, -1
        window.start, window.length, window.held = 0, len(data), [(0, data)]
        return window

    def move(self, start: int, length: int) -> None:
        """Looks at another range of the file."""
        self.start, self.length = start, length
        self.held: list[tuple[int, bytes]] = []

    def hold(self, offset: int, size: int) -> None:
        """Reads ahead, so that later reads inside [offset, offset + size) cost nothing."""
        self.held.append((offset, self.read(offset, size)))

    def read(self, offset: int, size: int) -> bytes:
        """Exactly `size` bytes at `offset`."""
        if offset < 0 or size < 0 or offset + size > self.length:
            raise CorruptError(f"{self}: bytes {offset} to {offset + size} lie outside it. {_CUT}")
        for begin, data in self.held:
            if begin <= offset and offset + size <= begin + len(data):
                return data[offset - begin : offset - begin + size]
        parts: list[bytes] = []
        at, left = self.start + offset, size
        while left:
            try:
                part = os.pread(self.fd, min(left, 1 << 30), at)
            except OSError as error:
                raise CorruptError(f"{self.path}: cannot be read ({error.strerror})") from None
            if not part:
                raise CorruptError(f"{self.path}: ends at byte {at} while being read. {_CUT}")
            parts.append(part)
            at, left = at + len(part), left - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        """Closes the file."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> Window:
        return self

    def __exit__(self, *what: object) -> None:
        self.close()

    def __str__(self) -> str:
        return f"{self.path} at byte {self.start}" if self.start else str(self.path)


# ---------------------------------------------------------------------- reading


def read_members(window: Window) -> dict[str, Member]:
    """The members of the archive that is all of `window`, by name, in the directory's order.

    Every directory entry is compared with its local header. Raises CorruptError for anything
    but stored, named, disjoint members inside bounds; UnsafeError for a name that leaves the
    archive.
    """
    count, begin, size = _directory(window)
    data = window.read(begin, size)
    members: dict[str, Member] = {}
    spans: list[tuple[int, int, str]] = []
    at = 0
    for _ in range(count):
        name, entry_size, crc, header, at = _entry(data, at, window)
        if name in members:
            raise CorruptError(f"{window}: two members are named {name!r:.200}")
        offset, described = _local(window, name, header, entry_size)
        if offset + entry_size > begin:
            raise CorruptError(f"{window}: member {name} runs into the directory. {_CUT}")
        members[name] = Member(name, window.start + offset, entry_size, crc, header)
        spans.append((header, offset + entry_size + described, name))
    if at != size:
        raise CorruptError(f"{window}: the zip directory holds bytes beyond its entries. {_CUT}")
    spans.sort()
    for (_, stop, name), (start, _, other) in zip(spans, [*spans[1:], (begin, 0, "")], strict=True):
        if stop > start:
            raise CorruptError(f"{window}: member {name} runs into {other or 'the directory'}")
    return members


def _directory(window: Window) -> tuple[int, int, int]:
    """Entries, start and bytes of the central directory."""
    if window.length < _END.size:
        raise CorruptError(f"{window}: {window.length} bytes are too few for a zip archive. {_CUT}")
    tail = min(window.length, 1024)
    window.hold(window.length - tail, tail)
    at = window.length - _END.size
    mark, disk, first, here, count, size, begin, comment = _END.unpack(window.read(at, _END.size))
    if mark != 0x06054B50 or comment:
        raise CorruptError(f"{window}: does not end as a zip archive does. {_CUT}")
    if disk or first or here != count:
        raise FormatError(f"{window}: a zip archive in several volumes is not read")
    end = at
    if at >= _LOCATOR.size + _END64.size:
        mark, disk, where, disks = _LOCATOR.unpack(window.read(at - _LOCATOR.size, _LOCATOR.size))
        if mark == 0x07064B50:
            end = at - _LOCATOR.size - _END64.size
            if disk or disks > 1 or where != end:
                raise CorruptError(
                    f"{window}: the zip64 end record is not where it should be. {_CUT}"
                )
            raw = _END64.unpack(window.read(end, _END64.size))
            if raw[0] != 0x06064B50 or raw[1] != _END64.size - 12 or raw[4] or raw[5]:
                raise CorruptError(f"{window}: the zip64 end record is damaged. {_CUT}")
            count64, size64, begin64 = raw[7:]
            pairs = ((count, count64, 0xFFFF), (size, size64, _FULL), (begin, begin64, _FULL))
            if raw[6] != count64 or any(a not in (b, full) for a, b, full in pairs):
                raise CorruptError(f"{window}: its two zip end records disagree. {_CUT}")
            count, size, begin = count64, size64, begin64
    if begin + size != end or count * _CENTRAL.size > size:
        raise CorruptError(f"{window}: the zip directory is not where its end record says. {_CUT}")
    return count, begin, size


def _entry(data: bytes, at: int, window: Window) -> tuple[str, int, int, int, int]:
    """Name, bytes, CRC, local header offset of the entry at `at`, and where the next one is."""
    if at + _CENTRAL.size > len(data):
        raise CorruptError(f"{window}: the zip directory ends inside an entry. {_CUT}")
    (mark, _, _, flags, method, _, _, crc, packed, size, n, e, c, disk, _, _, header) = (
        _CENTRAL.unpack_from(data, at)
    )
    at += _CENTRAL.size
    if mark != 0x02014B50 or at + n + e + c > len(data):
        raise CorruptError(f"{window}: the zip directory is damaged. {_CUT}")
    name = _name(data[at : at + n], window)
    extra = data[at + n : at + n + e]
    if flags & ~0x808:
        raise FormatError(
            f"{window}: member {name} has zip flags {flags:#x} (encrypted?); not read"
        )
    if method:
        raise FormatError(f"{window}: member {name} is compressed; torch.save never does so")
    wide = _zip64(extra, window)
    values = [size, packed, header]
    for i, value in enumerate(values):
        if value == _FULL:
            if len(wide) < 8:
                raise CorruptError(f"{window}: member {name} lacks its zip64 sizes. {_CUT}")
            values[i], wide = int.from_bytes(wide[:8], "little"), wide[8:]
    if values[0] != values[1] or disk:
        raise CorruptError(f"{window}: member {name} contradicts itself on its size. {_CUT}")
    return name, values[0], crc, values[2], at + n + e + c


def _name(raw: bytes, window: Window) -> str:
    try:
        name = raw.decode("utf-8")
    except UnicodeDecodeError:
        raise CorruptError(f"{window}: a member's name is not UTF-8: {raw!r:.100}") from None
    parts = name.split("/")
    if "\\" in name or "\0" in name or any(part in ("", ".", "..") for part in parts):
        raise UnsafeError(f"{window}: member name {name!r:.200} leaves the archive; not read")
    if ":" in parts[0]:
        raise UnsafeError(f"{window}: member name {name!r:.200} names a drive; not read")
    return name


def _zip64(extra: bytes, window: Window) -> bytes:
    """The body of the zip64 extra field, empty if there is none."""
    at = 0
    while at + 4 <= len(extra):
        kind, size = struct.unpack_from("<HH", extra, at)
        if at + 4 + size > len(extra):
            break
        if kind == 1:
            return extra[at + 4 : at + 4 + size]
        at += 4 + size
    return b""


def _local(window: Window, name: str, header: int, size: int) -> tuple[int, int]:
    """Where a member's data starts, and how many bytes of data descriptor follow at least."""
    wanted = name.encode()
    raw = window.read(header, _LOCAL.size + len(wanted))
    mark, _, flags, method, _, _, _, packed, plain, n, e = _LOCAL.unpack_from(raw)
    if mark != 0x04034B50 or method or n != len(wanted) or raw[_LOCAL.size :] != wanted:
        raise CorruptError(f"{window}: the local header of member {name} differs. {_CUT}")
    described = bool(flags & 8)
    if flags & ~0x808 or not (packed in (size, _FULL) or (described and packed == 0)):
        raise CorruptError(f"{window}: the local header of member {name} differs. {_CUT}")
    if plain != packed:
        raise CorruptError(f"{window}: the local header of member {name} differs. {_CUT}")
    return header + _LOCAL.size + n + e, 12 if described else 0


# ---------------------------------------------------------------------- writing


@dataclass(frozen=True, slots=True)
class Slot:
    """A member to be filled later. Offsets, those of its CRC too, are from the archive's start."""

    name: str
    offset: int
    size: int
    crc_at: tuple[int, ...]


@dataclass(slots=True)
class _Open:
    name: bytes
    size: int
    crc: int
    header: int
    extra: bytes
    patches: list[int] = field(default_factory=list)


def lay_out(
    members: Iterable[tuple[str, bytes | int]],
) -> tuple[int, list[tuple[int, bytes]], list[Slot]]:
    """An archive's length, its literal bytes with their offsets, and the members to be filled.

    A member given as bytes is literal; one given as a number is that many bytes, filled later.
    Offsets are from the archive's start, to which the data is aligned (64 bytes).
    """
    at = 0
    literals: list[tuple[int, bytes]] = []
    run = bytearray()  # literal bytes up to `at`
    entries: list[_Open] = []
    slots: list[Slot] = []
    for title, body in members:
        name = title.encode()
        size = body if isinstance(body, int) else len(body)
        crc = zlib.crc32(body) if not isinstance(body, int) else 0
        wide = _wide(size, at)
        entry = _Open(name, size, crc, at, wide)
        head = at + _LOCAL.size + len(name) + len(wide) + 4
        pad = -head % ALIGNMENT
        extra = wide + b"FB" + struct.pack("<H", pad) + b"Z" * pad
        # sizes and CRC stand in the descriptor; miniz leaves them zero here
        flags = 0x808 if size else 0x800  # miniz gives empty members no descriptor
        run += _LOCAL.pack(0x04034B50, 0, flags, 0, 0, 0, 0, 0, 0, len(name), len(extra))
        run += name + extra
        data = head + pad
        at = data + size
        if isinstance(body, int) and size:
            literals.append((data - len(run), bytes(run)))
            run.clear()
            entry.patches.append(at + 4)
        elif not isinstance(body, int):
            run += body
        if size:
            run += struct.pack("<IIQQ" if wide else "<IIII", 0x08074B50, crc, size, size)
            at += 24 if wide else 16
        entries.append(entry)
        if isinstance(body, int):
            slots.append(Slot(title, data, size, ()))
    begin = at
    for entry in entries:
        if entry.patches:
            entry.patches.append(at + 16)
        small, low = min(entry.size, _FULL), min(entry.header, _FULL)
        flags = 0x808 if entry.size else 0x800
        run += _CENTRAL.pack(0x02014B50, 0, 0, flags, 0, 0, 0, entry.crc, small, small,
                             len(entry.name), len(entry.extra), 0, 0, 0, 0, low)  # fmt: skip
        run += entry.name + entry.extra
        at += _CENTRAL.size + len(entry.name) + len(entry.extra)
    size, n = at - begin, len(entries)
    run += _END64.pack(0x06064B50, 44, 0x031E, 45, 0, 0, n, n, size, begin)
    run += _LOCATOR.pack(0x07064B50, 0, at, 1)
    run += _END.pack(0x06054B50, 0, 0, min(n, 0xFFFF), min(n, 0xFFFF), min(size, _FULL),
                     min(begin, _FULL), 0)  # fmt: skip
    length = at + _END64.size + _LOCATOR.size + _END.size
    literals.append((length - len(run), bytes(run)))
    places = {entry.name: tuple(entry.patches) for entry in entries}
    done = [Slot(s.name, s.offset, s.size, places[s.name.encode()]) for s in slots]
    return length, literals, done


def _wide(size: int, header: int) -> bytes:
    """The zip64 extra field miniz writes, in both headers, for a big member or a far one."""
    body = struct.pack("<QQ", size, size) if size >= _FULL else b""
    if header >= _FULL:
        body += struct.pack("<Q", header)
    return struct.pack("<HH", 1, len(body)) + body if body else b""
