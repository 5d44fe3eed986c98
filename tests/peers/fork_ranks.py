"""Runs the ranks of a distributed job as forks of this process, which has the imports done."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

#: How long the others may live on after the first rank has failed: they wait for it in vain.
GRACE_SECONDS = 5.0
LOG_TAIL_CHARACTERS = 4000


def fork_ranks(
    rank_main: Callable[[int], None], world: int, logs: Path, seconds: float
) -> str | None:
    """None when `rank_main(rank)` returned on every rank, else what the failed ranks printed.

    A rank that runs longer than `seconds` prints the stack of all its threads and ends.
    Each rank writes to `logs`/rank-N.
    """
    logs.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    running: dict[int, int] = {}
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            run_rank(rank_main, rank, logs / f"rank-{rank}", seconds)
        running[pid] = rank
    failed = wait_for(running, seconds + GRACE_SECONDS)
    if not failed:
        return None
    return "\n".join(
        f"rank {rank} {end}:\n{(logs / f'rank-{rank}').read_text()[-LOG_TAIL_CHARACTERS:]}"
        for rank, end in sorted(failed.items())
    )


def run_rank(rank_main: Callable[[int], None], rank: int, log: Path, seconds: float) -> None:
    """The life of a forked rank; never returns."""
    code = 1
    try:
        sys.stdout = sys.stderr = log.open("w", buffering=1)
        os.dup2(sys.stderr.fileno(), 1)  # and what C++ writes
        os.dup2(sys.stderr.fileno(), 2)
        faulthandler.enable(file=2)
        faulthandler.dump_traceback_later(seconds, exit=True, file=2)
        rank_main(rank)
        code = 0
    except BaseException:  # also SystemExit: whatever ends a rank belongs in its log
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for child in multiprocessing.active_children():  # Megatron's writer keeps a manager, 260 MB
            child.kill()
        os._exit(code)  # the parent's atexit hooks and open files are not this process's


def wait_for(running: dict[int, int], seconds: float) -> dict[int, str]:
    """{rank: how it ended} of the ranks that failed by themselves, or that had to be stopped."""
    failed: dict[int, str] = {}
    deadline = time.monotonic() + seconds
    while running:
        for pid in list(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended:
                continue
            rank = running.pop(pid)
            if status:
                failed[rank] = f"ended with {os.waitstatus_to_exitcode(status)}"
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if running and time.monotonic() > deadline:
            for pid, rank in running.items():
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                failed.setdefault(rank, "was stopped")
            running.clear()
        time.sleep(0.02)
    return failed
