"""The loss scale of fp16 in three frameworks' words: each goes on as the real ones would."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import reshard
from reshard.scaler import LossScale, loss_scale

Unpack = Callable[[str], Path]
WINDOW = 3


def megatrons(scale: float, tracker: int, overflows: list[bool]) -> list[float]:
    """DynamicGradScaler's scales. Source: grad_scaler.py update @ core_v0.16.1."""
    out, left = [], 2
    for overflow in overflows:
        if overflow:
            tracker, left = 0, left - 1
            scale = max(scale / 2, 1.0) if left <= 0 else scale
        else:
            tracker += 1
            if tracker == WINDOW:
                tracker, left, scale = 0, 2, scale * 2
        out.append(scale)
    return out


def deepspeeds(state: Any, overflows: list[bool]) -> list[float]:
    """DeepSpeed's own DynamicLossScaler from a state."""
    from deepspeed.runtime.fp16 import loss_scaler

    real = loss_scaler.DynamicLossScaler(1.0, WINDOW, 1.0, 2, False)
    for name in ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window"):
        setattr(real, name, state[name])
    real.delayed_shift, real.cur_hysteresis = state["delayed_shift"], state["cur_hysteresis"]
    out = []
    with pytest.MonkeyPatch.context() as alone:
        alone.setattr(loss_scaler.dist, "get_rank", lambda: 1)  # for what it logs
        for overflow in overflows:
            real.update_scale(overflow)
            out.append(real.cur_scale)
    return out


def extras_of(state: Any) -> dict[str, Any]:
    return {"optimizer.loss_scaler": {k: v for k, v in state.items() if k != "dynamic_loss_scale"}}


@pytest.mark.parametrize("clean", range(-1, WINDOW))
@pytest.mark.parametrize("bad", [None, 0, 2])
def test_deepspeed_goes_on_as_megatron(clean: int, bad: int | None):
    """Growth at the same step, shrinking after the same overflows."""
    held = LossScale(512.0, clean, WINDOW, hysteresis=2, full=2)
    overflows = [bad is not None and i in (bad, bad + 1) for i in range(9)]
    state = held.for_deepspeed(7)
    # after one that shrinks it, DeepSpeed waits a step longer than Megatron before it grows again
    shown = 9 if bad is None else bad + 2
    assert deepspeeds(state, overflows)[:shown] == megatrons(512.0, clean, overflows)[:shown]
    read = loss_scale(extras_of(state))
    assert read is not None
    assert (read.scale, read.clean, read.window, read.hysteresis, read.full) == (
        512.0, clean, WINDOW, 2, 2,
    )  # fmt: skip


@pytest.mark.parametrize("clean", range(-1, WINDOW))
def test_torchs_grad_scaler_goes_on_as_megatron(clean: int):
    real = torch.amp.GradScaler("cpu", init_scale=1.0)
    real.load_state_dict(LossScale(512.0, clean, WINDOW).for_torch())
    real._lazy_init_scale_growth_tracker(torch.device("cpu"))
    assert real._scale is not None
    assert real._growth_tracker is not None
    out = []
    for _ in range(8):
        torch._amp_update_scale_(
            real._scale, real._growth_tracker, torch.zeros(1), 2.0, 0.5, WINDOW
        )
        out.append(float(real._scale))
    assert out == megatrons(512.0, clean, [False] * 8)
    state = {f"scaler.{k}": v for k, v in LossScale(512.0, clean, WINDOW).for_torch().items()}
    read = loss_scale(state)
    assert read is not None
    assert (read.scale, read.clean, read.window) == (512.0, clean, WINDOW)


@pytest.mark.parametrize("name", ["z0_dp2_fp16", "z1_dp2_fp16", "z3_dp2_fp16"])
@pytest.mark.parametrize("kind", ["dcp:dp2", "dcp.accelerate:dp2"])
def test_deepspeeds_scale_goes_into_torchs_scaler_and_back(
    unpacked: Unpack, tmp_path: Path, name: str, kind: str
):
    source = unpacked(f"deepspeed/{name}") / "ckpt"
    report: Any = reshard.convert(source, tmp_path / "there", kind)
    before = loss_scale(reshard.open(source).extras)
    after = loss_scale(reshard.open(tmp_path / "there").extras)
    assert before is not None
    assert after is not None
    assert before.scale == 512.0
    assert (after.scale, after.clean, after.window) == (before.scale, before.clean, before.window)
    told = {f["path"]: f["kind"] for f in report["fates"]}
    assert {told[p] for p in before.fields} == {"remap"}
    reshard.convert(tmp_path / "there", tmp_path / "back", "deepspeed:zero1dp2", dtype="fp16")
    back = loss_scale(reshard.open(tmp_path / "back").extras)
    assert back is not None
    assert (back.scale, back.clean, back.window) == (before.scale, before.clean, before.window)
