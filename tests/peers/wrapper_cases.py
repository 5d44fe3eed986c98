"""Real Trainer, accelerate and Lightning as judges, started in a process of their own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from peers import run_module


@dataclass(frozen=True, slots=True, kw_only=True)
class WrapperCase:
    """A folder that the fixture's wrapper resumes from at a world size, and trains on.

    `checkpoint` None: train afresh through the fixture's save and on, which shows how far this
    topology's losses are from the fixture's by rounding alone. `changes` are put over its recipe.
    """

    name: str
    fixture: Path
    checkpoint: Path | None
    world: int
    changes: dict[str, Any] = field(default_factory=dict)
    steps: int = 4
    spoil: str | None = None  # "step", "decay", "moment"
    seconds: float = 120.0


def judge(cases: Sequence[WrapperCase], folder: Path) -> dict[str, dict[str, Any]]:
    """What the wrappers say of each case, by name; one that fails does not stop the others.

    Keys: error (None, or the ranks' tracebacks), different and compared (states in the live
    engine against the fixture's truth), adam_steps, decays, losses, rates, distance (from the
    losses of the run that went on), wanted_rate (that run's last).
    """
    folder.mkdir(parents=True, exist_ok=True)
    wanted, found = folder / "cases.json", folder / "results.jsonl"
    rows = []
    for case in cases:
        recipe = json.loads((case.fixture / "recipe.json").read_text())
        rows.append(asdict(case) | {"recipe": recipe | case.changes})
    wanted.write_text(json.dumps(rows, default=lambda path: str(path)))
    run_module("peers.wrapper_judge", str(wanted), str(found))
    results = [json.loads(line) for line in found.read_text().splitlines()]
    return {r["name"]: r for r in results}
