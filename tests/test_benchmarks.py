"""The benchmarks run: figures that nobody can take again are no figures."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from support import ROOT


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--only", "startup"], "| `--help` |"),
        (["--only", "plan", "--tensors", "96", "--ranks", "16"], "deepspeed:zero3dp16"),
        (["--only", "headers", "--tensors", "100"], "safetensors of 1,000 tensors"),
        (["--only", "cp", "--case", "PP:", "--size", "1MB"], "PP: torch_dist tp1pp2 to pp4"),
        (["--only", "workers", "--case", "HF", "--size", "1MB"], "the machine gives"),
        (["--only", "memory", "--most", "1GiB"], "≤ 200: held"),
    ],
)
def test_a_table_is_printed(options: list[str], says: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", str(tmp_path), "--rounds", "1", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert says in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_the_phases_of_a_conversion_are_timed(
    unpacked: Callable[[str], Path], tmp_path: Path
) -> None:
    phases = tmp_path / "phases.json"
    source = unpacked("hf/gpt2") / "plain"
    command = [sys.executable, "-m", "benchmarks.launch", "--no-fsync", "--phases", str(phases)]
    subprocess.run(
        [*command, "--", "convert", str(source), str(tmp_path / "out"), "--to", "hf"],
        cwd=ROOT, capture_output=True, check=True,
    )  # fmt: skip
    seen = json.loads(phases.read_text())
    assert set(seen) == {"start", "plan", "move", "verify", "rest"}
    assert all(wall >= 0 and cpu >= 0 for wall, cpu in seen.values())


def test_one_thing_is_changed_in_a_mutant() -> None:
    command = [sys.executable, "-m", "benchmarks.mutate", "box", "--only", "Box.shift"]
    done = subprocess.run(
        [*command, "--seconds", "60", "--tests", "tests/test_layout.py"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert " 0 survive" in done.stdout
    assert not done.stdout.startswith("0 of")
