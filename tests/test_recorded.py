"""What a conversion reads is held against the CRC-32s that the source's archives record."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch

import reshard
from reshard.box import Box
from reshard.errors import CorruptError
from reshard.files import Files, as_bytes
from reshard.layout import Piece, StoredArray
from reshard.recorded import Recorded
from support import flip

Unpack = Callable[[str], Path]

CASES = (
    ("megatron/a-tp4pp2", "dist", "tp2pp4"),
    ("megatron/a-tp4pp2", "torch", "megatron-legacy:tp2pp4"),
    ("megatron/b-tp2pp2dp2", "torch", "tp1"),
    ("deepspeed/z1_dp4_bf16", "ckpt", "deepspeed:zero1dp2"),
    ("deepspeed/z3_dp2_bf16", "ckpt", "deepspeed:zero2dp3"),
    ("deepspeed/universal_z2_dp2_bf16_frozen", ".", "deepspeed:zero1dp2"),
    ("dcp/tp_only_w2", "checkpoint", "dcp:dp2"),
    ("wrappers/lightning_single_fp32", "ckpt", "dcp:dp2"),
)


def place_of(array: StoredArray) -> int:
    """A byte in the middle of an array."""
    return array.offset + array.nbytes // 2


@pytest.mark.parametrize(("fixture", "inner", "to"), CASES)
def test_a_flipped_bit_is_refused(
    unpacked: Unpack, tmp_path: Path, fixture: str, inner: str, to: str
) -> None:
    source = tmp_path / "source"
    shutil.copytree(unpacked(fixture) / inner, source)
    checkpoint = reshard.open(source).checkpoint
    moments = [t for t in checkpoint.layout.tensors if t.slot == "exp_avg"]
    tensor = moments[len(moments) // 2]
    array = checkpoint.layout.pieces(tensor)[0].array
    flip(checkpoint.path / array.file, place_of(array))
    with pytest.raises(CorruptError, match=rf"{Path(array.file).name}: .*CRC-32") as raised:
        reshard.convert(source, tmp_path / "out", to)
    assert "--no-verify" in str(raised.value)
    assert not (tmp_path / "out").exists()
    assert reshard.convert(source, tmp_path / "out", to, verify=False)["status"] == "ok"


def saved(path: Path, *, crc: bool = True) -> tuple[torch.Tensor, StoredArray]:
    """A file of torch.save, and where its array lies."""
    values = torch.arange(4096, dtype=torch.float32)
    torch.serialization.set_crc32_options(crc)
    try:
        torch.save({"a": values, "b": torch.ones(3)}, path)
    finally:
        torch.serialization.set_crc32_options(True)
    offset = path.read_bytes().index(values.numpy().tobytes())
    dtype = reshard.dtypes.FLOAT32
    return values, StoredArray(path.name, offset, (4096,), dtype, "a")


def read(files: Files, array: StoredArray, start: int, stop: int) -> None:
    files.read(Piece(Box((0,), (4096,)), array, 0, (1,)), Box((start,), (stop,)))


@pytest.fixture
def file(tmp_path: Path) -> tuple[Path, StoredArray]:
    path = tmp_path / "file.pt"
    return path, saved(path)[1]


@pytest.mark.parametrize(
    "runs",
    [[(0, 4096)], [(100, 4096), (0, 100)], [(1000, 2000)], [(0, 2000), (1000, 4096)],
     [(0, 4096), (0, 4096)], [(5, 6), (4095, 4096)]],
)  # fmt: skip
def test_any_part_of_a_member_has_the_whole_compared(
    file: tuple[Path, StoredArray], runs: list[tuple[int, int]]
) -> None:
    path, array = file
    expected: tuple[AbstractContextManager[object], ...] = (
        nullcontext(),
        pytest.raises(CorruptError, match=r"file\.pt: a: bytes"),
    )
    for what in expected:
        with what, Files(path.parent) as files:
            recorded = Recorded(files)
            files.watch = recorded.saw
            for start, stop in runs:
                read(files, array, start, stop)
            recorded.check()
        flip(path, array.offset + 4 * 1500)


def test_what_an_earlier_run_read_is_read_again(file: tuple[Path, StoredArray]) -> None:
    path, array = file
    flip(path, array.offset)
    with Files(path.parent) as files:
        recorded = Recorded(files)
        recorded.check()
        recorded.expect([array])
        with pytest.raises(CorruptError, match="CRC-32"):
            recorded.check()


def test_what_no_member_holds_is_not_compared(file: tuple[Path, StoredArray]) -> None:
    path, array = file
    flip(path, array.offset)
    around = StoredArray(path.name, array.offset - 4, (4100,), array.dtype, "a")
    with Files(path.parent) as files:
        recorded = Recorded(files)
        files.watch = recorded.saw
        read(files, around, 0, 4096)
        recorded.check()


def test_a_save_without_checksums_is_not_accused(tmp_path: Path) -> None:
    _, array = saved(tmp_path / "file.pt", crc=False)
    flip(tmp_path / "file.pt", array.offset)
    with Files(tmp_path) as files:
        recorded = Recorded(files)
        files.watch = recorded.saw
        read(files, array, 0, 4096)
        recorded.check()


def test_archives_one_behind_the_other(tmp_path: Path) -> None:
    """As in a `.distcp` file: the data descriptor behind the array tells."""
    _, array = saved(tmp_path / "one")
    one = (tmp_path / "one").read_bytes()
    (tmp_path / "two").write_bytes(b"\0" * 64 + one + one)
    moved = StoredArray("two", 64 + len(one) + array.offset, (4096,), array.dtype, "a")
    for spoilt in (False, True):
        if spoilt:
            flip(tmp_path / "two", moved.offset + 4)
        with Files(tmp_path) as files:
            recorded = Recorded(files)
            files.watch = recorded.saw
            if spoilt:
                with pytest.raises(CorruptError, match="CRC-32"):
                    read(files, moved, 0, 4096)
            else:
                read(files, moved, 0, 4096)
                recorded.check()


def test_it_is_told_the_bytes_as_they_are_in_the_file(file: tuple[Path, StoredArray]) -> None:
    path, array = file
    seen: list[tuple[int, bytes]] = []
    with Files(path.parent) as files:
        files.watch = lambda _, at, data: seen.append((at, bytes(data)))
        columns = Piece(Box((0, 0), (64, 64)), array, 0, (1, 64))
        files.read(columns, Box((0, 0), (64, 2)))
    raw = path.read_bytes()
    assert all(raw[at : at + len(data)] == data for at, data in seen)
    assert sum(len(data) for _, data in seen) >= as_bytes(np.zeros(128, np.float32)).nbytes
