"""Real DeepSpeed 0.19.8 as a judge, started in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from peers import TESTS

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
    environment = os.environ | {
        "PYTHONPATH": str(TESTS),
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONWARNINGS": "ignore",
    }
    run = subprocess.run(
        [sys.executable, "-m", "peers.deepspeed_judge", str(wanted), str(found)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode:
        raise RuntimeError(f"the judge itself failed:\n{run.stderr[-8000:]}")
    results = [json.loads(line) for line in found.read_text().splitlines()]
    return {r["name"]: r for r in results}
