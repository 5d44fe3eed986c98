"""Half a gigabyte of ZeRO state moves within the budget, and each byte is read once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from peers import run_module

#: VmHWM and not ru_maxrss, which a process has from the one that forked it.
_CONVERT = """
import json, sys
import reshard
report = reshard.convert(sys.argv[1], sys.argv[2], sys.argv[3], memory=int(sys.argv[4]))
peak = next(x.split()[1] for x in open("/proc/self/status") if x.startswith("VmHWM"))
print(json.dumps({"peak": int(peak) / 1024, "amplification": report["read_amplification"],
                  "temporary": report["temporary_bytes"], "torch": "torch" in sys.modules}))
"""


@pytest.mark.parametrize(
    ("stage", "target"),
    [(1, "deepspeed:zero3dp3"), (3, "deepspeed:zero1dp2"), (3, "deepspeed-universal")],
)
def test_memory_stays_within_the_budget(tmp_path: Path, stage: int, target: str):
    """Peak RSS in MiB, interpreter and numpy included."""
    source = tmp_path / "source"
    run_module("peers.deepspeed_big", str(source), str(stage), "4", "4608")
    done = subprocess.run(
        [sys.executable, "-c", _CONVERT, str(source), str(tmp_path / "out"), target, str(64 << 20)],
        check=True,
        capture_output=True,
        text=True,
    )
    found = json.loads(done.stdout)
    assert found["peak"] < 200
    assert found["amplification"] <= 1.1
    assert found["temporary"] == 0
    assert not found["torch"]
