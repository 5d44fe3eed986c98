"""Every parser fuzzed for some seconds, guided by coverage (atheris), from a fixed seed on.

The inputs come in the same order each time; how many there are depends on the machine.
"""

from __future__ import annotations

import base64
import os
import re
import subprocess
import sys
from pathlib import Path

from benchmarks.fuzz import again, parsers
from support import ROOT

SECONDS = 5  # for each of twelve, two at a time; and about eight to instrument the modules
ENVIRONMENT = {**os.environ, "PYTHONHASHSEED": "0"}

PLANTED = """
import pathlib
from benchmarks.fuzz import Bounds, together

def parse(data):
    if data[:2] == b"\\x07\\xff":
        raise OverflowError("planted")

def loop(data):
    while data[:1] == b"\\x07":
        pass

def make(work):
    import atheris
    hooked = {"parse": atheris.instrument_func(parse), "loop": loop, "fine": len}
    return {name: (hooked[name], [b"\\x01\\x02"]) for name in hooked}

raise SystemExit(together(make, 2, Bounds(4, limit=2)))
"""


def test_no_parser_ends_otherwise(tmp_path: Path) -> None:
    """Each input gives a value or a ReshardError."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.fuzz", "all", "--seconds", str(SECONDS), "--seed", "1"],
        cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    said = re.findall(r"^(\w+): ([\d,]+) inputs, no finding", done.stdout, re.M)
    assert sorted(name for name, _ in said) == sorted(parsers(tmp_path))
    assert all(int(n.replace(",", "")) > 100 for _, n in said), done.stdout


def test_what_is_planted_is_found() -> None:
    """An exception of another kind and a loop, with the input and the command; the rest goes on."""
    done = subprocess.run(
        [sys.executable, "-c", PLANTED],
        cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr[-2000:]
    assert "parse: A FINDING" in done.stdout
    assert "OverflowError: planted" in done.stdout
    assert "loop: A FINDING" in done.stdout
    assert re.search(r"^fine: [\d,]+ inputs, no finding", done.stdout, re.M)
    inputs = re.findall(r"benchmarks.fuzz (\w+) --input (\S+)$", done.stdout, re.M)
    assert {name: base64.b64decode(text)[:1] for name, text in inputs} == {
        "parse": b"\x07",
        "loop": b"\x07",
    }


def test_an_input_can_be_repeated() -> None:
    command = again("target", b"dcp:dp2").split()[1:]
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("a value: ")
