"""Zip archives that contradict themselves, point outside, or hide what they hold: all refused."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from reshard.containers import torchfile
from reshard.errors import CorruptError, FormatError, ReshardError, UnsafeError

Edit = Callable[[bytearray], None]
LOCAL, CENTRAL, END, END64 = b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06", b"PK\x06\x06"


def saved() -> bytearray:
    """What torch.save writes for two tensors."""
    buffer = io.BytesIO()
    torch.save({"a": torch.arange(40.0), "b": torch.arange(7)}, buffer)
    return bytearray(buffer.getvalue())


def refused(data: bytes, tmp_path: Path) -> ReshardError:
    """How the file is refused; its name is in the message."""
    path = tmp_path / "hostile.pt"
    path.write_bytes(data)
    with pytest.raises(ReshardError, match=r"hostile\.pt") as info:
        torchfile.load(path)
    return info.value


def central(data: bytearray, name: bytes) -> int:
    """Where a member's directory entry is."""
    at = data.index(CENTRAL)
    while data[at + 46 : at + 46 + len(name)] != name:
        at = data.index(CENTRAL, at + 4)
    return at


def local(data: bytearray, name: bytes) -> int:
    """Where a member's local header is."""
    return int.from_bytes(data[(at := central(data, name) + 42) : at + 4], "little")


def put(data: bytearray, at: int, form: str, value: int) -> None:
    """Writes a number."""
    struct.pack_into("<" + form, data, at, value)


def zipped(members: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    """An archive of Python's own making, with the members a torch file needs beside these."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, body in {"archive/data.pkl": b"N.", **members}.items():
            archive.writestr(zipfile.ZipInfo(name), body, method)
    return buffer.getvalue()


def test_archives_of_other_writers_are_read(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(zipped({"archive/version": b"3\n"}))
    assert torchfile.load(path).root is None


@pytest.mark.parametrize(
    "name",
    [
        "../x",
        "archive/../x",
        "/etc/x",
        "archive//x",
        "archive/./x",
        "archive/x/",
        "C:/x",
        "a\\b",
        "",
    ],
)
def test_names_that_leave_the_archive_are_unsafe(name: str, tmp_path: Path) -> None:
    assert isinstance(refused(zipped({name: b"x"}), tmp_path), UnsafeError)


def test_a_name_with_nul_is_unsafe(tmp_path: Path) -> None:
    data = zipped({"archive/xyz": b""}).replace(b"archive/xyz", b"archive/x\0z")
    assert isinstance(refused(data, tmp_path), UnsafeError)


def test_compressed_members_are_refused(tmp_path: Path) -> None:
    error = refused(zipped({"archive/x": b"a" * 99}, zipfile.ZIP_DEFLATED), tmp_path)
    assert isinstance(error, FormatError)
    assert "compressed" in str(error)


def test_duplicate_members_are_refused(tmp_path: Path) -> None:
    data = zipped({"archive/data/0": b"one", "archive/data/1": b"two"})
    assert "two members" in str(refused(data.replace(b"data/1", b"data/0"), tmp_path))


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"archive/constants.pkl": b"N."}, "TorchScript"),
        ({"archive/byteorder": b"big"}, "big-endian"),
        ({"archive/byteorder": b"middle"}, "byteorder"),
        ({"other/x": b"1"}, "not one of torch.save"),
    ],
)
def test_archives_of_another_kind_are_refused_by_name(
    members: dict[str, bytes], words: str, tmp_path: Path
) -> None:
    assert words in str(refused(zipped(members), tmp_path))


def _entry(name: bytes, at: int, form: str, value: int) -> Edit:
    return lambda data: put(data, central(data, name) + at, form, value)


def _header(name: bytes, at: int, form: str, value: int) -> Edit:
    return lambda data: put(data, local(data, name) + at, form, value)


def _end(mark: bytes, at: int, form: str, value: int) -> Edit:
    return lambda data: put(data, data.rindex(mark) + at, form, value)


def _overlap(data: bytearray) -> None:
    """Both tensors in one place."""
    place = local(data, b"archive/data/0")
    put(data, central(data, b"archive/data/1") + 42, "I", place)
    data[place + 30 : place + 44] = b"archive/data/1"


def _inside(data: bytearray) -> None:
    """A whole local header inside another member's bytes."""
    source, target = local(data, b"archive/version"), local(data, b"archive/data/0") + 64
    data[target : target + 45] = data[source : source + 45]
    put(data, central(data, b"archive/version") + 42, "I", target)


def _longer(data: bytearray) -> None:
    """A tensor that runs into what follows it, in both places that say its size."""
    at = central(data, b"archive/data/0")
    put(data, at + 20, "I", 400)
    put(data, at + 24, "I", 400)


def _renamed(data: bytearray) -> None:
    at = local(data, b"archive/data/0") + 30
    data[at : at + 14] = b"archive/data/9"


A = b"archive/data/0"
EDITS: dict[str, Edit] = {
    "encrypted": _entry(A, 8, "H", 0x809),
    "unknown flag": _entry(A, 8, "H", 0x848),
    "local flag": _header(A, 6, "H", 0x809),
    "method": _entry(A, 10, "H", 8),
    "local method": _header(A, 8, "H", 8),
    "sizes differ": _entry(A, 20, "I", 12),
    "longer than the pickle says": _longer,
    "size beyond the file": _entry(A, 24, "I", 0x7FFFFFFF),
    "zip64 without its field": _entry(A, 24, "I", 0xFFFFFFFF),
    "another disk": _entry(A, 34, "H", 1),
    "offset beyond the file": _entry(A, 42, "I", 0x7FFFFFFF),
    "offset one off": _header(A, 0, "I", 0),
    "local size": _header(A, 18, "I", 12),
    "local name length": _header(A, 26, "H", 13),
    "local extra length": _header(A, 28, "H", 60000),
    "local name": _renamed,
    "overlap": _overlap,
    "inside another": _inside,
    "name length": _entry(A, 28, "H", 60000),
    "central mark": _entry(A, 0, "I", 0),
    "comment": _end(END, 20, "H", 1),
    "entries": _end(END, 10, "H", 3),
    "many entries": _end(END64, 32, "Q", 1 << 60),
    "directory size": _end(END64, 40, "Q", 7),
    "directory offset": _end(END64, 48, "Q", 1 << 62),
    "end records disagree": _end(END, 16, "I", 64),
    "disks": _end(END, 4, "H", 1),
    "zip64 mark": _end(END64, 0, "I", 0),
    "zip64 length": _end(END64, 4, "Q", 1 << 40),
}


@pytest.mark.parametrize("name", sorted(EDITS))
def test_archives_that_contradict_themselves_are_refused(name: str, tmp_path: Path) -> None:
    data = saved()
    EDITS[name](data)
    error = refused(bytes(data), tmp_path)
    assert isinstance(error, CorruptError | FormatError)


def test_bytes_before_after_or_missing_are_refused(tmp_path: Path) -> None:
    data = bytes(saved())
    for bad in (b"x" + data, data + b"x", data[1:], data[:-1], data + data, data[: len(data) // 2]):
        refused(bad, tmp_path)


def test_a_storage_that_is_missing_or_of_another_size_is_refused(tmp_path: Path) -> None:
    pickled = (
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nFloatStorage"
        b"\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x03tQK\x00K\x03\x85K\x01\x85\x89NtR."
    )
    path = tmp_path / "x.pt"
    path.write_bytes(zipped({"archive/data.pkl": pickled, "archive/data/0": b"x" * 12}))
    assert torchfile.load(path).storages["0"][1] == 12
    data = zipped({"archive/data.pkl": pickled})
    assert "not in the archive" in str(refused(data, tmp_path))
    for n in (0, 11, 13):
        data = zipped({"archive/data.pkl": pickled, "archive/data/0": b"x" * n})
        assert f"has {n} bytes, not 12" in str(refused(data, tmp_path))
