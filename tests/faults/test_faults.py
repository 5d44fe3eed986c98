"""One conversion to each format, killed, failed, stopped and cut from power at its operations.

`every` samples pwrites, of which a file has as many as tensors: the kill comes at each of them, the
run after it, and every error, at one in so many. RESHARD_FAULTS=all leaves nothing out: every kind
of error, every stop and every power cut at every operation, for every format.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support import ROOT

ALL = os.environ.get("RESHARD_FAULTS") == "all"
MEGATRON, DCP = "megatron/a-tp1pp1", "dcp/tp_only_w2"
LAYER = ["--include", "*layers.0.mlp.*"]
EVERYTHING = (
    "short",
    "stopped",
    "killed",
    "killed_again",
    "failing",
    "failing_reads",
    "power",
    "overwriting",
)
#: What the format itself decides: when its files are whole, and under which names.
OWN = ("short", "killed", "power")
CASES: dict[str, dict[str, Any]] = {
    "megatron": {"from": MEGATRON, "to": "tp2", "trials": EVERYTHING,
                 "options": ["--weights-only", "--include", "decoder.layers.0.*"]},
    "megatron-legacy": {"from": MEGATRON, "to": "megatron-legacy:tp1", "trials": OWN,
                        "options": ["--weights-only"]},
    "dcp": {"from": DCP, "to": "dcp:dp2", "trials": ("short", "killed", "power", "overwriting"),
            "options": LAYER},
    "torch": {"from": DCP, "to": "torch", "trials": OWN, "options": LAYER},
    "hf": {"from": DCP, "to": "hf", "trials": OWN, "options": LAYER},
    "deepspeed": {"from": DCP, "to": "deepspeed:zero1dp2", "trials": OWN, "options": LAYER},
    "universal": {"from": DCP, "to": "universal", "trials": OWN, "options": LAYER},
    "universal-zstd": {"from": DCP, "to": "universal", "trials": (*OWN, "failing"),
                       "options": [*LAYER, "--compress", "zstd"]},
}  # fmt: skip


@pytest.fixture(scope="module")
def memory() -> Iterator[Path]:
    """A folder in memory where there is one: a run syncs some thirty times."""
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=place) as folder:
        yield Path(folder)


@pytest.mark.parametrize("name", sorted(CASES))
def test_every_operation(name: str, unpacked: Callable[[str], Path], memory: Path) -> None:
    case = CASES[name]
    inner = "dist" if case["from"] == MEGATRON else "checkpoint"
    spec = {
        "source": str(unpacked(case["from"]) / inner),
        "work": str(memory / name),
        "to": case["to"],
        "options": case["options"],
        "every": 1 if ALL else 20,
        "all": ALL,
        "kills": 1 if ALL or name in ("megatron", "dcp") else 6,
        "trials": EVERYTHING if ALL else case["trials"],
    }
    done = subprocess.run(
        [sys.executable, "-m", "faults.runner", json.dumps(spec)],
        cwd=ROOT / "tests",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["operations"] > 30
    assert all(n > 0 for n in found["runs"].values())
    assert found["bad"] == [], "\n".join(found["bad"][:20])
