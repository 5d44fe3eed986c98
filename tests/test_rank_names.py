"""A rank's file that lies under another rank's name is refused, and no other."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import reshard
from reshard.errors import CorruptError

Unpack = Callable[[str], Path]


def copy_of(unpacked: Unpack, source: str, to: Path) -> Path:
    """A copy that may be changed of a folder inside a fixture."""
    first, second, *rest = source.split("/")
    shutil.copytree(unpacked(f"{first}/{second}").joinpath(*rest), to)
    for path in to.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return to


def swap(a: Path, b: Path) -> None:
    """Give each of two files the other's name."""
    spare = a.with_name("spare")
    a.rename(spare)
    b.rename(a)
    spare.rename(b)


DS = "deepspeed/z2_dp2_bf16/ckpt/global_step5"
OPTIM = "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"


@pytest.mark.parametrize(
    ("source", "name", "a", "b"),
    [
        (DS, OPTIM, "0", "1"),
        (DS.replace("z2", "z3"), "zero_pp_rank_{}_mp_rank_00_model_states.pt", "0", "1"),
        ("deepspeed/tp2_dp1_z1_bf16/ckpt/global_step5", "mp_rank_{}_model_states.pt", "00", "01"),
        ("deepspeed/pp2_dp1_z1_bf16/ckpt/global_step5", "layer_{}-model_states.pt", "01", "02"),
        ("dcp/verl_fsdp2_w4/checkpoint", "model_world_size_4_rank_{}.pt", "1", "2"),
        ("dcp/verl_fsdp2_w4/checkpoint", "optim_world_size_4_rank_{}.pt", "0", "3"),
        ("dcp/accelerate_fsdp2_w2_sharded/checkpoint", "random_states_{}.pkl", "0", "1"),
    ],
)
def test_files_that_were_swapped(
    unpacked: Unpack, tmp_path: Path, source: str, name: str, a: str, b: str
) -> None:
    folder = copy_of(unpacked, source, tmp_path / "ckpt")
    reshard.open(folder)
    one, other = name.format(a), name.format(b)
    swap(folder / one, folder / other)
    with pytest.raises(CorruptError, match=f"{one}: was saved as {other}.*name back"):
        reshard.open(folder)


def test_legacy_folders_that_were_swapped(unpacked: Unpack, tmp_path: Path) -> None:
    """All are called model_optim_rng.pt: the args say which rank wrote each."""
    folder = copy_of(unpacked, "megatron/a-tp4pp2/torch/iter_0000003", tmp_path / "iter_0000003")
    reshard.open(folder)
    swap(folder / "mp_rank_01_000", folder / "mp_rank_02_000")
    with pytest.raises(CorruptError, match=r"mp_rank_01_000/.* rank 2, .* mp_rank_02_000/"):
        reshard.open(folder)


def test_legacy_files_of_one_process_are_read(unpacked: Unpack, tmp_path: Path) -> None:
    """Megatron's own tools/checkpoint writes every file as rank 0."""
    folder = copy_of(unpacked, "megatron/a-tp2pp4/torch/iter_0000003", tmp_path / "iter_0000003")
    before = reshard.fingerprint(folder)
    for file in folder.glob("*/model_optim_rng.pt"):
        raw = file.read_bytes()
        found = re.search(rb"X\x04\0\0\0rank(?:q.|r....)K(?=.)", raw, flags=re.S)
        assert found
        file.write_bytes(raw[: found.end()] + b"\0" + raw[found.end() + 1 :])
    assert reshard.fingerprint(folder) == before


def test_moments_that_were_swapped(unpacked: Unpack, tmp_path: Path) -> None:
    source = unpacked("deepspeed/z2_dp2_bf16") / "ckpt"
    reshard.convert(source, tmp_path / "out", "deepspeed-universal")
    opened = reshard.open(tmp_path / "out").checkpoint
    (tmp_path / "out" / "reshard.json").unlink(missing_ok=True)
    folder = next((opened.path / "zero").iterdir())
    swap(folder / "exp_avg.pt", folder / "exp_avg_sq.pt")
    with pytest.raises(CorruptError, match=r"was saved as exp_avg(_sq)?\.pt"):
        reshard.open(tmp_path / "out")


def test_names_that_do_not_contradict(unpacked: Unpack, tmp_path: Path) -> None:
    """Another prefix, a buffer's `archive`, and the older format, which has no name."""
    folder = copy_of(unpacked, DS, tmp_path / "global_step5")
    before = reshard.fingerprint(folder)
    for rank, old in ((0, False), (1, True)):
        name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        (folder / f"bf16_{name}").rename(folder / name)
        if old:
            state = torch.load(folder / name, weights_only=False)
            torch.save(state, folder / name, _use_new_zipfile_serialization=False)
    model = folder / "mp_rank_00_model_states.pt"
    state = torch.load(model, weights_only=False)
    with model.open("wb") as buffer:
        torch.save(state, buffer)
    assert reshard.fingerprint(folder) == before
