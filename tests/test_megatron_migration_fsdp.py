"""Megatron-FSDP's fsdp_dtensor, made by its source's rule from the state of a live run.

Megatron-FSDP needs a GPU. The files are torch DCP's own; which keys there are, and what each holds,
follows checkpointing.py and fsdp_dtensor_checkpoint.py @ core_v0.16.1.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

import reshard
from reshard.errors import CorruptError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

Unpack = Callable[[str], Path]
ITERATION = "iter_0000003"
SWIGLU = re.compile(r".*\.linear_fc1\.(weight|bias)\d*$")


def fsdp_names(canonical: str) -> str:
    """The module's name: TEGroupedMLP numbers experts at the end, globally."""
    m = re.fullmatch(r"(.*\.experts)\.(\d+)\.(linear_fc[12])\.(weight|bias)", canonical)
    return f"{m[1]}.{m[3]}.{m[4]}{m[2]}" if m else canonical


def halves(name: str, values: torch.Tensor) -> dict[str, torch.Tensor]:
    if not SWIGLU.match(name):
        return {name: values}
    gate, up = values.chunk(2, 0)
    return {f"{name}_w": gate.contiguous(), f"{name}_v": up.contiguous()}


def as_fsdp(source: Path, target: Path) -> Path:
    """The state of a torch_dist run as generate_state_dict and its preprocessing leave it."""
    opened = reshard.open(source)
    common = torch.load(source / ITERATION / "common.pt", weights_only=False)
    tensors = opened.logical
    native: Any = opened.checkpoint.native
    recorded = zip(opened.checkpoint.groups or (), native.optimizer.groups, strict=True)
    groups = {n: dict(options.values) for g, options in recorded for n in g.members}
    model: dict[str, Any] = {}
    state: dict[str, Any] = {}
    meta: dict[str, Any] = {}
    for name in sorted({n for n, _ in tensors}):
        own = fsdp_names(name)
        main = "master" if (name, "master") in tensors else "param"
        weights = torch.from_numpy(opened[name, main][...].astype(np.float32))
        for key, part in halves(own, weights).items():
            model[f"module.{key}"] = part
        if main == "param":
            continue  # a buffer
        for slot in ("exp_avg", "exp_avg_sq"):
            values = torch.from_numpy(opened[name, slot][...])
            for key, part in halves(own, values).items():
                state.setdefault(f"module.{key}", {})[slot] = part
        meta[f"module.{own}"] = {**groups[name], "step": 3}
    folder = target / ITERATION
    folder.mkdir(parents=True)
    whole = {
        "args": common["args"],
        "checkpoint_version": 3.0,
        "iteration": 3,
        "model": model,
        "optimizer": {"state": state, "param_to_group_meta": meta},
        "opt_param_scheduler": common["opt_param_scheduler"],
    }
    save(whole, storage_writer=FileSystemWriter(folder), no_dist=True)
    (target / "latest_checkpointed_iteration.txt").write_text("3")
    return target


@pytest.mark.parametrize(
    ("name", "to"), [("h-llama-tp2pp1dp2-fr", "tp1pp4"), ("h-moe-pp2ep2", "tp1pp1ep4")]
)
def test_it_is_read_and_goes_on_as_torch_dist(
    unpacked: Unpack, tmp_path: Path, name: str, to: str
) -> None:
    source = unpacked(f"megatron/{name}") / "dist"
    made = as_fsdp(source, tmp_path / "fsdp")
    opened, whole = reshard.open(made), reshard.open(source)
    assert opened.checkpoint.version == "fsdp_dtensor"
    names = {n for n, slot in whole.logical if slot == "param"}
    assert {n for n, slot in opened.logical if slot == "param"} == names
    for key, slot in whole.logical:
        if slot in ("exp_avg", "exp_avg_sq") or slot in ("param", "master"):
            assert opened[key, slot][...].tobytes() == whole[key, slot][...].tobytes()
    assert set(opened.steps.values()) == {3.0}
    assert len(opened.checkpoint.groups or ()) >= 2
    reshard.convert(made, tmp_path / "out", to)
    assert reshard.diff(source, tmp_path / "out")["differences"] == []


def test_a_gate_without_its_up_is_refused(unpacked: Unpack, tmp_path: Path) -> None:
    source = unpacked("megatron/h-llama-tp2pp1dp2-fr") / "dist"
    made = as_fsdp(source, tmp_path / "fsdp") / ITERATION / ".metadata"
    made.write_bytes(made.read_bytes().replace(b"weight_v", b"weight_u"))
    with pytest.raises(CorruptError, match="no gate and up"):
        reshard.open(tmp_path / "fsdp")
