"""Real DeepSpeed 0.19.8 as a judge, started in a process of its own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from peers import run_module

#: How far the next losses may lie from those of the run that went on, at most.
CAP = {"bf16": 1e-3, "fp16": 1e-3, "fp32": 1e-5}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeedCase:
    """A checkpoint that DeepSpeed loads at a topology, compares with a truth and trains on.

    `changes` are put over the fixture's recipe. `floor`: train nine steps afresh first, which
    shows how far this topology's losses are from the source's by rounding alone.
    """

    name: str
    checkpoint: Path  # a run folder
    fixture: Path  # whose recipe and truth it is held to
    world: int
    changes: dict[str, Any] = field(default_factory=dict)
    universal: bool = False
    tag: str | None = None
    steps: int = 4
    floor: bool = False
    spoil: str | None = None  # "step", "decay", "moment", "lr"
    seconds: float = 200.0


def judge(cases: Sequence[DeepSpeedCase], tmp_path: Path) -> dict[str, dict[str, Any]]:
    """What DeepSpeed says of each case, by name; one that fails does not stop the others.

    Keys: error (None, or the ranks' tracebacks), different, compared, adam_steps, options,
    losses, distance (from the truth's next losses), and with `floor` the floor.
    """
    tmp_path.mkdir(parents=True, exist_ok=True)
    wanted, found = tmp_path / "cases.json", tmp_path / "results.jsonl"
    rows = []
    for case in cases:
        recipe = json.loads((case.fixture / "recipe.json").read_text())
        row = asdict(case) | {
            "recipe": recipe | case.changes,
            "truth": case.fixture,
            "truth_ep": recipe.get("ep_size", 1),
        }
        rows.append(row)
    wanted.write_text(json.dumps(rows, default=str))
    run_module("peers.deepspeed_judge", str(wanted), str(found))
    results = [json.loads(line) for line in found.read_text().splitlines()]
    return {r["name"]: r for r in results}


def make(recipes: Sequence[dict[str, Any]], folder: Path) -> None:
    """Have DeepSpeed train and save a checkpoint of each recipe; see peers.deepspeed_make.

    Raises RuntimeError with the ranks' tracebacks if one of them fails.
    """
    wanted = folder / "recipes.json"
    wanted.write_text(json.dumps(recipes))
    run_module("peers.deepspeed_make", str(wanted), str(folder))
    for recipe in recipes:
        error = folder / recipe["name"] / "error"
        if error.exists():
            raise RuntimeError(f"{recipe['name']}: {error.read_text()[-4000:]}")
