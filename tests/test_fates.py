"""Every field of a source that is no tensor has a fate by its full path, whatever the target."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import reshard
from reshard.errors import LossError, ReshardError
from reshard.format import OpenOptions, open_checkpoint

Unpack = Callable[[str], Path]

#: A source of each kind: fixture, the checkpoint in it.
SOURCES = (
    ("megatron/a-tp4pp2", "dist"),
    ("megatron/a-tp4pp2", "torch"),
    ("megatron/h-llama-tp2pp2", "dist"),
    ("megatron/c-pp2ep2", "dist"),
    ("megatron/made-fp32-tp2", "dist"),
    ("deepspeed/z3_dp2_bf16", "ckpt"),
    ("deepspeed/z1_dp2_fp16", "ckpt"),
    ("deepspeed/z0_dp2_fp16", "ckpt"),
    ("deepspeed/pp2_dp2_z1_bf16_tied", "ckpt"),
    ("deepspeed/moe_ep2_dp2_z1_bf16", "ckpt"),
    ("deepspeed/universal_z2_dp2_bf16_frozen", "global_step5_universal"),
    ("dcp/fsdp2_w2_fp32", "checkpoint"),
    ("dcp/torchtitan_w2", "checkpoint/step-4"),
    ("dcp/accelerate_fsdp2_w2_sharded", "checkpoint"),
    ("dcp/ddp_w2_torchsave", "checkpoint"),
    ("dcp/verl_fsdp2_w4", "checkpoint"),
    ("hf/llama2", "plain"),
    ("wrappers/trainer_ds_z2_dp2_bf16", "ckpt/checkpoint-6"),
    ("wrappers/accelerate_ds_z2_dp2_bf16", "ckpt/step_6"),
    ("wrappers/lightning_ds_z2_dp2_bf16", "ckpt/epoch=1-step=6.ckpt"),
    ("wrappers/lightning_fsdp2_dp2_fp32", "ckpt/epoch=1-step=6.ckpt"),
    ("wrappers/lightning_single_fp32", "ckpt/epoch=1-step=6.ckpt"),
    ("wrappers/trainer_fsdp2_dp2_bf16", "ckpt/checkpoint-6"),
)
TARGETS = (
    "megatron:tp1pp1", "megatron-legacy:tp1pp1", "deepspeed:zero2dp2", "deepspeed-universal",
    "dcp:dp2", "dcp.torchtitan:dp2", "dcp.accelerate:dp2", "torch", "hf", "universal",
)  # fmt: skip


@pytest.mark.parametrize("weights_only", [False, True])
@pytest.mark.parametrize(("name", "inner"), SOURCES)
def test_no_field_is_without_a_fate(unpacked: Unpack, name: str, inner: str, weights_only: bool):
    """A fate of a path above a field's counts as none."""
    source = unpacked(name) / inner
    opened = open_checkpoint(source, OpenOptions(weights_only=weights_only))
    expected = {*opened.extras}
    expected |= {f"param_groups[{i}]" for i in range(len(opened.groups or ()))}
    expected |= {"steps"} if opened.steps else set()
    planned = []
    untold = {}
    for to in TARGETS:
        try:
            report: Any = reshard.plan(source, to, weights_only=weights_only)
        except ReshardError:
            continue  # refused, as the matrix says
        planned.append(to)
        told = {f["path"]: f for f in report["fates"]}
        assert len(report["fates"]) == len(told), f"{to}: a field has two fates"
        assert opened.steps or "steps" not in told, to
        above = {f"with {p}" for p, f in told.items() if f["detail"]}
        assert above.isdisjoint(f["detail"] for f in told.values()), f"{to}: a reason is not told"
        if left := sorted(expected - told.keys()):
            untold[to] = left
        training = report["target"]["per_rank"].keys() > {"param"}
        neutral = {told[p]["kind"] for p in (expected & told.keys()) - opened.extras.keys()}
        assert neutral <= {"keep"} if training else "keep" not in neutral or to == "universal", to
        placeless = {p for p, f in told.items() if f["detail"].endswith("has no place for it")}
        lost = {x["what"] for x in report["losses"] if x["detail"].endswith("has no place for it")}
        assert placeless == lost, to
        assert training or not lost, to
    assert planned
    assert untold == {}


# --- opaque pickles ------------------------------------------------------------------------------

HOSTILE = b"cos\nsystem\n(S'touch /tmp/never'\ntR."


@pytest.mark.parametrize("to", ["deepspeed:zero2dp4", "dcp:dp2", "torch", "universal"])
def test_opaque_pickles_are_left_behind_or_copied_as_they_are(
    unpacked: Unpack, tmp_path: Path, to: str
):
    """As a declared loss, or with --keep-opaque byte for byte, unread."""
    source = tmp_path / "source"
    shutil.copytree(unpacked("wrappers/trainer_ds_z2_dp2_bf16") / "ckpt/checkpoint-6", source)
    args = source / "training_args.bin"
    args.chmod(0o644)
    args.write_bytes(HOSTILE)
    left: Any = reshard.convert(source, tmp_path / "left", to)
    assert ("opaque-dropped", args.name) in {(x["code"], x["what"]) for x in left["losses"]}
    assert list((tmp_path / "left").rglob(args.name)) == []
    with pytest.raises(LossError, match="opaque-dropped"):
        reshard.plan(source, to, strict=True)
    kept: Any = reshard.convert(source, tmp_path / "kept", to, keep_opaque=True)
    assert "opaque-dropped" not in {x["code"] for x in kept["losses"]}
    (copy,) = (tmp_path / "kept").rglob(args.name)
    assert copy.read_bytes() == HOSTILE
    assert {f["path"]: f["kind"] for f in kept["fates"]}[args.name] == "keep"
    assert reshard.diff(tmp_path / "left", tmp_path / "kept", extras=True)["differences"] == []
