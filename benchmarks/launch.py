"""Runs `reshard` with what a measurement changes: no fsync, zeros kept as holes, a clock.

    python -m benchmarks.launch [--no-fsync] [--holes] [--phases FILE] -- convert SRC DST …

--holes: a write of zeros into a file that is all hole is left out: the same bytes are in the file,
and none on the disk. So a sparse source of any size is moved (read, joined, summed, compared) into
a result that is whole and takes no room. The check of free space is left out, too.

--phases: what each part of a conversion took, as JSON: {"plan": [seconds, CPU seconds], …}.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from reshard import cli, commit, conversion
from reshard.files import Files

#: What a conversion does one after another, by the functions that do it.
PHASES = {"plan": "make_plan", "move": "_move", "verify": "_verify"}


def without_fsync() -> None:
    """Nothing is waited for."""
    for name in ("fsync", "fdatasync"):
        setattr(os, name, lambda _: None)


def with_holes() -> None:
    """Zeros are not written."""
    real = Files.pwrite

    def pwrite(files: Files, name: str, offset: int, data: memoryview) -> None:
        if np.frombuffer(data, np.uint8).any():
            real(files, name, offset, data)

    setattr(Files, "pwrite", pwrite)  # noqa: B010  # a seam, for this process only
    setattr(commit, "check_space", lambda *_, **__: None)  # noqa: B010  # the same


def with_phases(file: Path) -> None:
    """Write down what each phase took; "start" is all before the plan, "rest" all else."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    born = ticks / os.sysconf("SC_CLK_TCK")  # since boot
    seen: dict[str, tuple[float, float]] = {}

    def clock() -> tuple[float, float]:
        return time.clock_gettime(time.CLOCK_BOOTTIME) - born, time.process_time()

    def timed(phase: str, do: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            before = clock()
            seen.setdefault("start", before)
            done = do(*args, **kwargs)
            after = clock()
            seen[phase] = (after[0] - before[0], after[1] - before[1])
            return done

        return run

    for phase, name in PHASES.items():
        setattr(conversion, name, timed(phase, getattr(conversion, name)))
    real = commit.Staging.publish

    def publish(*args: Any, **kwargs: Any) -> None:
        real(*args, **kwargs)
        whole = clock()
        rest = (whole[i] - sum(s[i] for s in seen.values()) for i in (0, 1))
        file.write_text(json.dumps({**seen, "rest": tuple(rest)}))

    setattr(commit.Staging, "publish", publish)  # noqa: B010  # a seam, for this process only


def main() -> None:
    """The command."""
    at = sys.argv.index("--")
    if "--phases" in sys.argv[:at]:
        with_phases(Path(sys.argv[sys.argv.index("--phases") + 1]))
    if "--no-fsync" in sys.argv[:at]:
        without_fsync()
    if "--holes" in sys.argv[:at]:
        with_holes()
    cli.main(args=sys.argv[at + 1 :])


if __name__ == "__main__":
    main()
