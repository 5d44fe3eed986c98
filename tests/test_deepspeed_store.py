"""A universal zarr store between two DeepSpeed checkpoints changes nothing; weights alone cross."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import reshard
from reshard.checkpoint import Checkpoint
from reshard.errors import CorruptError, FormatError, UnsafeError
from reshard.format import find, pack
from torch_trees import same_files

Unpacked = Callable[[str], Path]
CASES = [
    ("deepspeed/z1_dp4_bf16", "zero3dp3"), ("deepspeed/z3_dp2_bf16", "zero3dp2"),
    ("deepspeed/z2_dp2_bf16_frozen", "zero3dp3"), ("deepspeed/z0_dp2_fp16", "zero1dp2"),
    ("deepspeed/z2_dp2_bf16_muon", "zero2dp3"), ("deepspeed/z1_dp4_bf16_elastic", "zero1dp2"),
    ("deepspeed/z2_dp2_bf16_roundrobin", "zero2dp3"), ("deepspeed/tp2_dp2_z2_bf16", "zero2tp2dp1"),
    ("deepspeed/pp2_dp2_z1_bf16_tied", "zero1pp2dp2"),
    ("deepspeed/moe_ep2_dp2_z1_bf16", "zero2dp2ep2"),
    ("wrappers/trainer_ds_z2_dp2_bf16", "zero3dp3"),
    ("wrappers/accelerate_ds_z2_dp2_bf16", "zero1dp3"),
    ("wrappers/lightning_ds_z3_dp2_bf16", "zero2dp3"),
]  # fmt: skip


def source_of(unpacked: Unpacked, name: str) -> Path:
    folder = unpacked(name) / "ckpt"
    return next(folder.iterdir()) if name.startswith("wrappers/") else folder


@pytest.mark.proves("deepspeed", "universal", "training state")
@pytest.mark.proves("universal", "deepspeed", "training state")
@pytest.mark.parametrize(("name", "target"), CASES)
def test_by_the_store_as_directly(unpacked: Unpacked, tmp_path: Path, name: str, target: str):
    """Files, options, scheduler, random states, the trainer's folder: all as without the store."""
    source = source_of(unpacked, name)
    direct, store, back = (tmp_path / n for n in ("direct", "store", "back"))
    reshard.convert(source, direct, f"deepspeed:{target}")
    reshard.convert(source, store, "universal", strict=not name.startswith("wrappers/trainer"))
    reshard.convert(store, back, f"deepspeed:{target}")
    files = {p.relative_to(direct) for p in direct.rglob("*") if p.is_file()}
    assert files == {p.relative_to(back) for p in back.rglob("*") if p.is_file()}
    ours = {f for f in files if f.name.startswith("reshard")}
    assert [f for f in files - ours if not same_files(direct / f, back / f)] == []


def kept(source: Path) -> tuple[Checkpoint, dict[str, Any]]:
    checkpoint = reshard.open(source).checkpoint
    assert isinstance(checkpoint, Checkpoint)
    found = pack(checkpoint)
    assert found is not None
    name, packed = found
    assert name == "deepspeed"
    assert isinstance(packed.state, dict)
    return checkpoint, copy.deepcopy(packed.state)


@pytest.mark.parametrize(
    ("damage", "error", "words"),
    [
        (lambda s: s.update(version=9), CorruptError, "version"),
        (lambda s: s["native"].pop("groups"), CorruptError, "without groups"),
        (lambda s: s["native"].update(colour=1), CorruptError, "unknown field 'colour'"),
        (lambda s: s["native"].update(stage="2"), CorruptError, "'2' where int belongs"),
        (lambda s: s["native"].update(stage=True), CorruptError, "True where int belongs"),
        (lambda s: s["native"]["groups"][0].update(members=[3]), CorruptError, "str belongs"),
        (lambda s: s["native"].update(clients=[[[0], {}]]), CorruptError, "2 values"),
        (lambda s: s["native"].update(model=[]), CorruptError, "fields of a Model"),
        (
            lambda s: s["native"].update(top={"$global": ["os", "system"]}),
            UnsafeError,
            r"os\.system",
        ),
    ],
)
def test_a_damaged_state_is_told(
    unpacked: Unpacked,
    damage: Callable[[dict[str, Any]], object],
    error: type[Exception],
    words: str,
):
    checkpoint, state = kept(unpacked("deepspeed/z2_dp2_bf16") / "ckpt")
    form: Any = find("deepspeed")
    assert form.unpack(state, checkpoint).groups == checkpoint.native.groups  # type: ignore[attr-defined]  # DeepSpeed's own
    damage(state)
    with pytest.raises(error, match=words):
        form.unpack(state, checkpoint)


WEIGHTS = [
    "z0_dp2_fp16", "z1_dp4_bf16", "z3_dp2_bf16", "z1_dp4_bf16_elastic", "pp2_dp2_z0_fp32",
    "tp2_dp2_z2_bf16", "moe_ep2_dp2_z0_fp32", "moe_ep2_dp2_z1_bf16",
]  # fmt: skip


@pytest.mark.parametrize("target", ["torch", "dcp:dp2", "deepspeed:zero1dp3", "universal"])
@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_alone(unpacked: Unpacked, tmp_path: Path, name: str, target: str):
    source = unpacked(f"deepspeed/{name}") / "ckpt"
    reshard.convert(source, tmp_path / "out", target, weights_only=True)
    wanted = {n: v for (n, slot), v in reshard.open(source).tensors.items() if slot == "param"}
    opened = reshard.open(tmp_path / "out")
    assert {slot for _, slot in opened.tensors} == {"param"}
    for key, value in wanted.items():  # of ZeRO 3, buffers: its weights are rounded masters
        assert opened[key][...].tobytes() == value[...].tobytes()


def test_weights_alone_do_not_say_which_layers_are_tied(unpacked: Unpacked, tmp_path: Path):
    source = unpacked("deepspeed/pp2_dp2_z1_bf16_tied") / "ckpt"
    with pytest.raises(FormatError, match="ties layers"):
        reshard.convert(source, tmp_path / "out", "deepspeed:zero1dp1", weights_only=True)
