"""Checksums of parts that come in any order are those of the whole."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import reshard
from reshard import conversion
from reshard.box import Box
from reshard.checksums import KINDS, crc32c, joined, with_zeros
from reshard.dtypes import FLOAT32
from reshard.engine import Checksums
from reshard.files import Files
from reshard.layout import Checksum, Draft, StoredArray, place


@pytest.mark.parametrize("kind", list(KINDS))
@given(first=st.binary(max_size=300), second=st.binary(max_size=300), zeros=st.integers(0, 5000))
def test_joined_is_the_checksum_of_both(kind: str, first: bytes, second: bytes, zeros: int):
    take = KINDS[kind]
    a, b = take(memoryview(first), 0), take(memoryview(second), 0)
    assert joined(kind, a, b, len(second)) == take(memoryview(first + second), 0)
    assert with_zeros(kind, a, zeros) == take(memoryview(first + bytes(zeros)), 0)


def test_long_runs_are_joined():
    assert with_zeros("crc32", zlib.crc32(b"head"), 10**7) == zlib.crc32(b"head" + bytes(10**7))
    assert with_zeros("crc32c", crc32c(b""), 10**6) == crc32c(bytes(10**6))


ARRAY = StoredArray("f", 8, (40,), FLOAT32, "k", "h")
DRAFT = Draft("f", 8 + 160 + 4, (), (ARRAY,), (Checksum(ARRAY, (168,)),))


def patched(tmp_path: Path, order: list[tuple[int, int]], *, fresh: bool) -> tuple[Draft, bytes]:
    """The draft after parts were seen in this order, and the file."""
    values = np.arange(40, dtype=np.float32)
    content = np.zeros(40, np.float32)
    (tmp_path / "f").write_bytes(bytes(DRAFT.size))
    sums = Checksums([DRAFT], fresh=fresh)
    piece = place(Box((0,), (40,)), ARRAY)
    with Files(tmp_path, writable=True) as files:
        for start, stop in order:
            files.write(piece, Box((start,), (stop,)), values[start:stop])
            sums.saw(piece, Box((start,), (stop,)), values[start:stop])
            content[start:stop] = values[start:stop]
        left = sums.patch(files, DRAFT)
    stored = (tmp_path / "f").read_bytes()
    assert stored[8:168] == content.tobytes()
    return left, stored[168:]


@pytest.mark.parametrize(
    "order",
    [
        [(0, 40)],
        [(0, 10), (10, 40)],
        [(20, 40), (0, 10), (10, 20)],
        [(30, 40), (20, 30), (10, 20), (0, 10)],
        [(10, 20), (20, 30), (0, 10), (30, 40)],
    ],
)
def test_parts_in_any_order(tmp_path: Path, order: list[tuple[int, int]]):
    for fresh in (True, False):
        left, stored = patched(tmp_path, order, fresh=fresh)
        whole = np.arange(40, dtype=np.float32).tobytes()
        assert (left.checksums, stored) == ((), zlib.crc32(whole).to_bytes(4, "little"))


@pytest.mark.parametrize("order", [[], [(5, 20)], [(20, 35), (5, 10)]])
def test_what_a_fresh_run_does_not_write_is_zero(tmp_path: Path, order: list[tuple[int, int]]):
    left, stored = patched(tmp_path, order, fresh=True)
    content = (tmp_path / "f").read_bytes()[8:168]
    assert (left.checksums, stored) == ((), zlib.crc32(content).to_bytes(4, "little"))
    left, stored = patched(tmp_path, order, fresh=False)  # an earlier run may have written it
    assert (left, stored) == (DRAFT, bytes(4))


def test_what_is_written_twice_or_scattered_is_read_again(tmp_path: Path):
    for order in ([(0, 20), (10, 40)], [(0, 40), (20, 40)], [(20, 40), (0, 40)]):
        left, _ = patched(tmp_path, order, fresh=True)
        assert left == DRAFT
    grid = StoredArray("f", 8, (8, 5), FLOAT32, "k", "h")
    sums = Checksums([DRAFT], fresh=True)
    sums.saw(place(Box((0, 0), (8, 5)), grid), Box((0, 0), (8, 2)), np.zeros((8, 2), np.float32))
    with Files(tmp_path, writable=True) as files:
        assert sums.patch(files, DRAFT) == DRAFT


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize(
    ("source", "to"),
    [
        ("deepspeed/z1_dp4_bf16", "deepspeed:zero3dp3"),
        ("deepspeed/z3_dp2_bf16", "deepspeed:zero2dp3"),
        ("dcp/fsdp2_w2_fp32", "dcp:dp3"),
        ("deepspeed/z2_dp2_bf16", "universal"),
    ],
)
def test_nothing_written_is_read_back_without_verification(
    unpacked: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    source: str,
    to: str,
    workers: int,
):
    root = unpacked(source)
    found = root / ("ckpt" if source.startswith("deepspeed") else "checkpoint")
    reshard.convert(found, tmp_path / "a", to)
    monkeypatch.setattr(conversion, "read_files", lambda *_, **__: pytest.fail("read back"))
    reshard.convert(found, tmp_path / "b", to, verify=False, workers=workers)
    assert reshard.verify(tmp_path / "b")["status"] == "ok"
    assert reshard.diff(tmp_path / "a", tmp_path / "b")["differences"] == []
