"""Cases for real accelerate and transformers' Trainer under FSDP2, and what they say."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from peers import run_module
from peers.parity import CONFIG


@dataclass(frozen=True, slots=True, kw_only=True)
class WrapperCase:
    """A run of one wrapper: from a seed or from `load`, with `steps` after step `at`.

    `save`: where the state at step `at` goes (accelerate), or the run folder (Trainer). `state` is
    where the live tensors go (slot.name): those at the save, else those after the load. `spoil`:
    "moment" or "step" of the loaded state.
    """

    name: str
    wrapper: str  # accelerate | trainer
    state: Path
    world: int = 2
    at: int = 3
    steps: int = 4
    load: Path | None = None
    save: Path | None = None
    spoil: str | None = None
    config: Mapping[str, Any] = field(default_factory=lambda: CONFIG)
    seconds: float = 150.0


def judge(cases: Sequence[WrapperCase], folder: Path) -> dict[str, dict[str, Any]]:
    """What the wrappers say of each case, by name: error (None, or the tracebacks), losses."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted, found = folder / "cases.json", folder / "results.jsonl"
    wanted.write_text(json.dumps([asdict(case) for case in cases], default=str))
    run_module("peers.fsdp_wrapper_judge", str(wanted), str(found))
    results = [json.loads(line) for line in found.read_text().splitlines()]
    return {result["name"]: result for result in results}
