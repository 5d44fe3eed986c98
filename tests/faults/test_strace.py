"""The same without our seam, a sample: strace kills the process in a system call, or fails it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import reshard
from faults.runner import difference, digests
from reshard.errors import ReshardError

Unpack = Callable[[str], Path]
STRACE = shutil.which("strace")


def permitted() -> bool:
    """Whether strace is here and may trace."""
    if STRACE is None:
        return False
    return subprocess.run([STRACE, "-o", os.devnull, "true"], check=False).returncode == 0


#: What is done, in which call, from which one on (of each thread); the exit code; workers.
CASES = [
    ("signal=KILL", "pwrite64", "25", 137, 2),
    ("signal=KILL", "fsync", "9", 137, 1),
    ("signal=KILL", "rename", "1", 137, 2),
    ("signal=KILL", "unlinkat", "1", 137, 2),
    ("error=EINTR", "pwrite64", "7", 0, 2),  # Python tries again
    ("error=EIO", "fsync", "5", 1, 1),
    ("signal=KILL", "fsync", "2", 137, 2),
    ("error=EIO", "fsync", "2+", 1, 2),
    ("error=EIO", "pread64", "30", 1, 2),
    ("error=ENOSPC", "pwrite64", "10+", 1, 2),
    ("error=EXDEV", "rename", "1", 1, 2),
]


@pytest.mark.skipif(not permitted(), reason="strace is not installed or may not trace")
def test_killed_and_failed_in_system_calls(unpacked: Unpack, tmp_path: Path) -> None:
    source = unpacked("dcp/tp_only_w2") / "checkpoint"
    whole = tmp_path / "whole"
    only = ["--weights-only", "--include", "*layers.0.*"]
    reshard.convert(source, whole, "torch", weights_only=True, include=(only[-1],))
    bad = []
    for action, call, when, code, workers in CASES:
        out = tmp_path / "out"
        command = [sys.executable, "-m", "reshard", "convert", str(source), str(out)]
        command += ["--to", "torch", *only, "--workers", str(workers)]
        inject = f"inject={call}:{action}:when={when}"
        trace = [str(STRACE), "-f", "-o", os.devnull, "-e", f"trace={call}", "-e", inject, *command]
        done = subprocess.run(trace, capture_output=True, text=True, check=False)
        ended = done.returncode if done.returncode >= 0 else 128 - done.returncode
        if ended != code or "Traceback" in done.stderr or "a bug in" in done.stderr:
            bad.append(f"{inject}: exit {ended}: {done.stderr[-300:]}")
        try:
            reshard.open(out)
        except ReshardError:
            pass
        else:
            if digests(out) != digests(whole):
                bad.append(f"{inject}: opens, and is not whole")
        again = subprocess.run(command, capture_output=True, text=True, check=False)
        if again.returncode or digests(out) != digests(whole):
            bad.append(
                f"{inject}: then {again.stderr[-300:]} {difference(digests(out), digests(whole))}"
            )
        shutil.rmtree(out, ignore_errors=True)
        if left := [p.name for p in tmp_path.iterdir() if p.name not in ("whole", "fixtures0")]:
            bad.append(f"{inject}: left {left}")
    assert bad == [], "\n".join(bad)
