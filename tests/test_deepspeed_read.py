"""Every DeepSpeed fixture, read: each master, moment, step and frozen tensor is the live run's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import reshard
from peers.deepspeed_truth import compared, equal_bits, truth_of
from support import FIXTURES

Unpacked = Callable[[str], Path]
EVERY = sorted(
    p.name.removesuffix(".tar.xz")
    for p in (FIXTURES / "deepspeed").glob("*.tar.xz")
    if not p.name.startswith("universal_")
)
#: The 16-bit wrappers of ZeRO 0 let no one look at their state: the truth holds no tensors.
BLIND = {"z0_dp2_bf16", "z0_dp2_fp16", "tp2_dp1_z0_bf16"}


@pytest.mark.parametrize("name", EVERY)
def test_every_tensor_and_step_is_the_live_runs(unpacked: Unpacked, name: str):
    fixture = unpacked(f"deepspeed/{name}")
    opened = reshard.open(fixture / "ckpt")
    wrong = [
        what for what, wanted, value in compared(opened, truth_of(fixture))
        if not equal_bits(wanted, value)
    ]  # fmt: skip
    assert wrong == []
    assert bool(truth_of(fixture)) == (name not in BLIND)
    steps = set(json.loads((fixture / "truth.json").read_text())["steps"])
    assert set(opened.steps.values()) <= steps
    assert opened.steps
    assert opened.checkpoint.iteration == 5


@pytest.mark.parametrize("name", EVERY)
def test_masters_round_to_weights_and_replicas_agree(unpacked: Unpacked, name: str):
    report = reshard.verify(unpacked(f"deepspeed/{name}") / "ckpt")
    assert report["status"] == "ok"
    assert report["findings"] == []


@pytest.mark.parametrize(
    ("name", "topology", "version"),
    [
        ("z0_dp2_fp32", "zero0tp1pp1dp2", "no ZeRO"),
        ("z0_dp2_bf16", "zero0tp1pp1dp2", "FP16_UnfusedOptimizer"),
        ("z1_dp2_bf16_gradacc32", "zero1tp1pp1dp2", "ZeRO-1 (BF16_Optimizer)"),
        ("z1_dp4_bf16_elastic", "zero1tp1pp1dp4", "ZeRO-1, elastic"),
        ("z3_dp4_bf16", "zero3tp1pp1dp4", "ZeRO-3"),
        ("tp2_dp2_z2_bf16", "zero2tp2pp1dp2", "ZeRO-2"),
        ("pp2_dp2_z1_bf16_tied", "zero1tp1pp2dp2", "ZeRO-1"),
        ("moe_ep2_dp2_z1_bf16", "zero1tp1pp1ep2dp2", "ZeRO-1"),
    ],
)
def test_the_topology_is_told(unpacked: Unpacked, name: str, topology: str, version: str):
    checkpoint = reshard.open(unpacked(f"deepspeed/{name}") / "ckpt").checkpoint
    assert str(checkpoint.topology) == topology
    assert checkpoint.version == f"DeepSpeed 0.19.8, {version}"


def test_buffers_keep_their_dtype(unpacked: Unpacked):
    opened = reshard.open(unpacked("deepspeed/z3_dp2_bf16") / "ckpt")
    assert np.array_equal(opened["model.probe_int"][...], np.arange(7))
    assert opened["model.probe_int"].dtype == np.int64
    assert np.array_equal(opened["model.probe_float"][...], np.linspace(-1, 1, 5, dtype=np.float32))


def test_groups_name_their_members_and_options(unpacked: Unpacked):
    groups = reshard.open(unpacked("deepspeed/z2_dp2_bf16_roundrobin") / "ckpt").checkpoint.groups
    plain = reshard.open(unpacked("deepspeed/z2_dp2_bf16") / "ckpt").checkpoint.groups
    assert groups is not None
    assert plain is not None
    assert [g.options["weight_decay"] for g in groups] == [0.1, 0.0]
    # the declared order, not the one that round_robin_gradients stores
    assert [g.members for g in groups] == [g.members for g in plain]


def test_zero_0_wrappers_count_one_step_more(unpacked: Unpacked):
    """They step once on zero gradients; bias correction uses the value, so it is kept."""
    opened = reshard.open(unpacked("deepspeed/z0_dp2_bf16") / "ckpt")
    assert set(opened.steps.values()) == {6.0}
    assert opened.checkpoint.iteration == 5


def test_a_tie_is_one_tensor(unpacked: Unpacked):
    opened = reshard.open(unpacked("deepspeed/z2_dp2_bf16_tied") / "ckpt")
    assert ("lm_head.weight", "param") not in opened.tensors
    assert opened.extras["ties"] == {"lm_head.weight": "model.embed_tokens.weight"}


def test_muons_momentum_is_read_as_whole_matrices(unpacked: Unpacked):
    opened = reshard.open(unpacked("deepspeed/z2_dp2_bf16_muon") / "ckpt")
    held = [n for n, slot in opened.tensors if slot == "momentum_buffer"]
    assert len(held) == 21
    assert all(opened[n, "momentum_buffer"].dtype.name == "bfloat16" for n in held)
    straddling = "model.layers.0.mlp.down_proj.weight"
    assert (
        len(opened.checkpoint.layout.pieces(opened[straddling, "momentum_buffer"].logical.id)) == 2
    )


def test_zero_3_gives_a_model_in_the_dtype_it_trains_in(unpacked: Unpacked, tmp_path: Path):
    """Its files keep masters alone; placeholders of its weights say what they are rounded to."""
    source = unpacked("wrappers/trainer_ds_z2_dp2_bf16") / "ckpt" / "checkpoint-6"
    reshard.convert(source, tmp_path / "z3", "deepspeed:zero3dp3")
    for name, folder in (("one", source), ("three", tmp_path / "z3")):
        reshard.convert(folder, tmp_path / name, "hf")
    one, three = (tmp_path / n / "model.safetensors" for n in ("one", "three"))
    assert one.read_bytes() == three.read_bytes()
    assert {v.dtype.name for v in reshard.open(three.parent).tensors.values()} == {"bfloat16"}
    reshard.convert(tmp_path / "z3", tmp_path / "wide", "hf", dtype="fp32")
    assert {v.dtype.name for v in reshard.open(tmp_path / "wide").tensors.values()} == {"float32"}
