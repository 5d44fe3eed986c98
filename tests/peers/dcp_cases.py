"""Real torch as the judge of DCP checkpoints: cases, and what comes back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from peers import run_module


@dataclass(frozen=True, slots=True, kw_only=True)
class DcpCase:
    """A checkpoint that torch loads into a sharded model, compares with a truth and trains on.

    `fixture` has config.json, losses.json and truth.safetensors. `keys` says how the state dict is
    laid out: "plain" (model, optim), "torchtitan", "accelerate" or "torch" (one torch.save file).
    """

    name: str
    fixture: Path
    checkpoint: Path
    mode: str = "fsdp2"  # single | fsdp2 | hsdp | tp
    world: int = 2
    keys: str = "plain"
    flatten: bool = False
    #: Where the scheduler's state lies in the checkpoint, dotted; "" to leave it out; "last_epoch":
    #: only that of lr_scheduler.
    schedule: str = "lr_scheduler"
    rates: tuple[float, ...] = ()  # of each step over the first, where not those of fixtures/dcp
    #: A checkpoint of the same state that torch wrote, loaded at the same mesh: the noise floor.
    native: Path | None = None
    native_keys: str = "plain"
    native_flatten: bool = False
    steps: int = 4
    spoil: str | None = None  # "step", "decay", "beta", "moment": does the judge notice?
    seconds: float = 120.0


def judge(cases: Sequence[DcpCase], folder: Path) -> dict[str, dict[str, Any]]:
    """What torch says of each case, by name.

    Keys of a result: error (None, or the tracebacks of the ranks), tensors (how many were
    compared), different (which are not equal to the truth, bit for bit), losses, recorded (those
    of the run that wrote the fixture), native (of the native reload at the same mesh).
    """
    folder.mkdir(parents=True, exist_ok=True)
    wanted, found = folder / "cases.json", folder / "results.jsonl"
    wanted.write_text(json.dumps([asdict(case) for case in cases], default=str))
    run_module("peers.dcp_judge", str(wanted), str(found))
    results = [json.loads(line) for line in found.read_text().splitlines()]
    return {result["name"]: result for result in results}


def run_writer(job: str, folder: Path) -> Path:
    """Have torch write small checkpoints of forms that no fixture has; see peers.dcp_make."""
    folder.mkdir(parents=True, exist_ok=True)
    run_module("peers.dcp_make", job, str(folder))
    return folder
