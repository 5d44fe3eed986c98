"""What torch works out is what numpy works out, bit for bit; whole conversions, too.

torch's CPU tensors run the code that a GPU runs. Where a GPU is found, it is held to the same.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

import reshard
from reshard.box import Box
from reshard.device import CPU, Device, device
from reshard.errors import LossError, UsageError
from reshard.fingerprints import lanes

DEVICES = ["torch", *(["cuda"] if torch.cuda.is_available() else [])]
FLOATS = [np.float32, np.float16, ml_dtypes.bfloat16]
SPECIAL = [0x00000000, 0x80000000, 0x7F800000, 0xFF800000, 0x00000001, 0x33800000, 0x477FF000]
NANS = [0x7F800001, 0xFFC12345, 0x7FFFFFFF]


@pytest.fixture(params=DEVICES)
def other(request: pytest.FixtureRequest) -> Device:
    return device(request.param)


def patterns(seed: int, n: int) -> np.ndarray:
    """fp32 values of random bits that are numbers, ties of both narrow types among them."""
    bits = np.random.default_rng(seed).integers(0, 1 << 32, n, np.uint64).astype(np.uint32)
    bits[::3] &= 0xFFFF8000
    bits[1::3] &= 0xFFFFF000
    bits[: len(SPECIAL)] = SPECIAL
    values = bits.view(np.float32)
    return np.where(np.isnan(values), np.float32(1.5), values)


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@pytest.mark.parametrize("to", FLOATS)
@pytest.mark.parametrize("given", FLOATS)
def test_casts_round_alike(other: Device, given: type, to: type):
    values = CPU.cast(patterns(1, 3000), np.dtype(given)).reshape(50, 60)
    assert same(other.cast(values, np.dtype(to)), CPU.cast(values, np.dtype(to)))


def test_payloads_of_nans_are_numpys(other: Device):
    values = np.array([*SPECIAL, *NANS], np.uint32).view(np.float32)
    for to in FLOATS:
        assert same(other.cast(values, np.dtype(to)), CPU.cast(values, np.dtype(to)))


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.float32, np.float64, ml_dtypes.bfloat16])
def test_permutations_are_numpys(other: Device, dtype: type):
    raw = np.random.default_rng(2).integers(0, 256, 4096, np.uint8).view(dtype)
    for strides in ((1, 8, 64), (64, 1, 8), (2, 40, 9)):
        mine, theirs = np.empty((5, 4, 7), dtype), np.empty((5, 4, 7), dtype)
        other.gather(raw, strides, mine)
        CPU.gather(raw, strides, theirs)
        assert same(mine, theirs)


@pytest.mark.parametrize("to", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_scales_multiply_alike(other: Device, to: type):
    fp8 = np.tile(np.arange(256, dtype=np.uint8), 4).view(ml_dtypes.float8_e4m3fn)
    real = fp8[~np.isnan(fp8.astype(np.float32))].reshape(4, -1)
    factors = np.random.default_rng(3).random(real.shape, np.float32) * np.float32(3)
    for values in (real, real.astype(np.float32), fp8[:256]):  # the last has NaNs
        f = factors if values.ndim == 2 else np.full(256, 0.75, np.float32)
        assert same(other.scaled(values, f, np.dtype(to)), CPU.scaled(values, f, np.dtype(to)))


@pytest.mark.parametrize("dtype", [np.uint8, ml_dtypes.bfloat16, np.float32, np.int64])
def test_fingerprints_are_numpys(other: Device, dtype: type):
    item = np.dtype(dtype).itemsize
    raw = np.random.default_rng(4).integers(0, 256, 12 * 56 * item, np.uint8)
    values = raw.view(dtype).reshape(12, 56)
    for box in (Box((0, 0), (12, 56)), Box((3, 8), (9, 48)), Box((0, 5), (12, 50))):
        part = values[box.start[0] : box.stop[0], box.start[1] : box.stop[1]]
        expected = lanes(values.shape, box, part)
        assert lanes(values.shape, box, part, sums=other.by_rows) == expected
    cast = other.cast(values.astype(np.float32), np.dtype(ml_dtypes.bfloat16))
    whole = Box((0, 0), (12, 56))
    first = lanes(cast.shape, whole, cast, sums=other.by_rows)  # of the tensor that cast made
    cast[0, 0] = 7
    assert first == lanes(cast.shape, whole, other.cast(values.astype(np.float32), cast.dtype))


CASES = [
    ("megatron/h-llama-tp2pp2/dist", "hf", {"dtype": "bf16"}),  # QKV re-laid, masters rounded
    ("megatron/a-tp4pp2/dist", "tp2pp4", {}),
    ("hf/deepseek_v3/fp8_mtp", "torch", {"dtype": "bf16"}),  # fp8 blocks dequantised
    ("hf/gpt_oss/square_mxfp4", "torch", {"dtype": "fp32"}),  # MXFP4 dequantised
]


@pytest.mark.parametrize(("source", "to", "options"), CASES)
@pytest.mark.parametrize("name", DEVICES)
def test_a_conversion_gives_the_same_bytes(
    unpacked: Callable[[str], Path],
    tmp_path: Path,
    source: str,
    to: str,
    options: dict[str, str],
    name: str,
):
    root, _, inner = source.rpartition("/")
    found = unpacked(root) / inner
    reports = [
        reshard.convert(found, tmp_path / where, to, device=where, **options)
        for where in ("cpu", name)
    ]
    digests = [{n: f["digest"] for n, f in r["files"].items()} for r in reports]
    assert digests[0] == digests[1]
    assert all(digests[0].values())
    assert reports[0]["fingerprints"] == reports[1]["fingerprints"]


def test_a_device_that_is_not_there_is_named():
    with pytest.raises(UsageError, match=r"cuda:99: torch .* finds \d+ GPUs here"):
        device("cuda:99")
    with pytest.raises(UsageError, match="there are cpu, cuda and cuda:N"):
        device("gpu")


def test_a_value_out_of_the_targets_range_is_refused(tmp_path: Path):
    torch.save({"fits": torch.tensor([65504.0, -1.0])}, tmp_path / "fits.pt")
    reshard.convert(tmp_path / "fits.pt", tmp_path / "a", "torch", dtype="fp16")
    torch.save({"large": torch.tensor([1.0, 70000.0, -80000.0])}, tmp_path / "large.pt")
    with pytest.raises(LossError, match=r"large.*2 values .* up to 80000, .* float16 holds"):
        reshard.convert(tmp_path / "large.pt", tmp_path / "b", "torch", dtype="fp16")
    top = torch.tensor([0x7F7FFFFF], dtype=torch.int32).view(torch.float32)
    torch.save({"top": top}, tmp_path / "top.pt")
    with pytest.raises(LossError, match="bfloat16 holds"):
        reshard.convert(tmp_path / "top.pt", tmp_path / "c", "torch", dtype="bf16")
