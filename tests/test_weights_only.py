"""An optimizer that is left behind is a loss, whichever format it is left in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import reshard
from reshard.errors import LossError

Unpack = Callable[[str], Path]


def codes(source: Path, to: str, **options: Any) -> list[str]:
    losses: Any = reshard.plan(source, to, weights_only=True, **options)["losses"]
    return [loss["code"] for loss in losses]


@pytest.mark.parametrize("to", ["universal", "hf"])
@pytest.mark.parametrize(
    "source",
    [
        "dcp/tp_only_w2/checkpoint",
        "dcp/ddp_w2_torchsave/checkpoint",
        "dcp/accelerate_fsdp2_w2_sharded/checkpoint",
        "dcp/verl_fsdp2_w4/checkpoint",
        "deepspeed/z0_dp2_fp32/ckpt",
        "deepspeed/z2_dp2_bf16/ckpt",
        "deepspeed/z3_dp2_bf16/ckpt",
        "deepspeed/pp2_dp2_z0_fp32/ckpt",
        "deepspeed/moe_ep2_dp2_z1_bf16/ckpt",
        "megatron/a-tp2pp4/torch",
        "megatron/a-tp2pp4/dist",
    ],
)
def test_of_every_source(unpacked: Unpack, source: str, to: str) -> None:
    first, second, rest = source.split("/")
    options = {} if first == "megatron" else {"schema": "none"}
    assert "weights-only" in codes(unpacked(f"{first}/{second}") / rest, to, **options)


def test_of_our_own_and_of_none(unpacked: Unpack, tmp_path: Path) -> None:
    source = unpacked("dcp/tp_only_w2") / "checkpoint"
    for to in ("hf:optimizer=yes", "universal"):
        made = tmp_path / to[:3]
        reshard.convert(source, made, to, schema="none")
        assert codes(made, "dcp:dp2", schema="none") == ["weights-only"]
        with pytest.raises(LossError, match=r"strict forbids .*optimizer.* left behind"):
            reshard.plan(made, "dcp:dp2", schema="none", weights_only=True, strict=True)
    reshard.convert(source, tmp_path / "bare", "dcp:dp2", weights_only=True)
    assert codes(tmp_path / "bare", "dcp:dp3") == []
