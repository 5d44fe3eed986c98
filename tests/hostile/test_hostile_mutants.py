"""Real checkpoints with one value of their trees changed: read, or refused as a ReshardError."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from support import ROOT

Unpack = Callable[[str], Path]
SEEDS = 20
BASES = {
    "megatron": ("megatron/a-tp1pp1", "dist", "megatron:tp1"),
    "megatron buckets": ("megatron/made-gpt-tied-pp2-buckets-dpr", "dist", "megatron"),
    "megatron-legacy": ("megatron/a-tp1pp1", "torch", "megatron-legacy:tp1"),
    "dcp": ("dcp/tp_only_w2", "checkpoint", "dcp:dp2"),
    "torch": ("dcp/ddp_w2_torchsave", "checkpoint", "torch"),
    "torch of ranks": ("dcp/verl_fsdp2_w4", "checkpoint", "torch"),
    "zero 1": ("deepspeed/z1_dp2_fp16", "ckpt", "deepspeed"),
    "zero 3": ("deepspeed/z3_dp2_bf16", "ckpt", "deepspeed"),
    "hf": ("hf/gpt2", "plain", "hf"),
}


@pytest.mark.parametrize("name", sorted(BASES))
def test_mutants(name: str, unpacked: Unpack) -> None:
    """benchmarks/fuzz.py makes more of them."""
    fixture, inner, target = BASES[name]
    script = ROOT / "tests" / "hostile" / "mutants.py"
    args = [str(unpacked(fixture) / inner), target, "1", str(SEEDS), "60"]
    done = subprocess.run(
        [sys.executable, str(script), *args], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["mutants"] == SEEDS
    assert found["bad"] == [], "\n".join(found["bad"])
