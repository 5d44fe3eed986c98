"""Runs the ranks of a distributed job as forks of this process, which has the imports done."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

#: How long the others may live on after the first rank has failed: they wait for it in vain.
GRACE_SECONDS = 5.0
#: Of a long log: its start, where a stack of all threads has what hung, and its end.
LOG_START_CHARACTERS, LOG_END_CHARACTERS = 2000, 4000


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
        f"rank {rank} {end}:\n{shortened((logs / f'rank-{rank}').read_text())}"
        for rank, end in sorted(failed.items())
    )


def fork_job(
    rank_main: Callable[[int], None], world: int, logs: Path, seconds: float
) -> str | None:
    """`fork_ranks` for frameworks that find each other by MASTER_ADDR and MASTER_PORT.

    The system chooses the port of the store they meet at, so no other job of this machine can have
    taken it.
    """
    with meeting_store() as port:

        def join(rank: int) -> None:
            os.environ.update(
                RANK=str(rank), LOCAL_RANK=str(rank), NODE_RANK="0", GROUP_RANK="0",
                WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world), LOCAL_SIZE=str(world),
                MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
                TORCHELASTIC_USE_AGENT_STORE="True",  # rank 0 serves none of its own
            )  # fmt: skip
            rank_main(rank)

        return fork_ranks(join, world, logs, seconds)


@contextmanager
def meeting_store() -> Iterator[int]:
    """The port of a TCPStore for ranks to meet at.

    A process of its own serves it: it has a thread, and a fork of a process with threads may
    inherit a lock that nobody will open.
    """
    mine, its = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        try:
            from torch.distributed import TCPStore

            mine.close()
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            its.sendall(str(store.port).encode())
            its.recv(1)  # until nobody holds the other end
        finally:
            os._exit(0)
    its.close()
    try:
        yield int(mine.recv(16))
    finally:
        mine.close()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def shortened(log: str) -> str:
    """The start and the end of a rank's log."""
    cut = len(log) - LOG_START_CHARACTERS - LOG_END_CHARACTERS
    if cut <= 0:
        return log
    start, end = log[:LOG_START_CHARACTERS], log[-LOG_END_CHARACTERS:]
    return f"{start}\n[{cut} characters]\n{end}"


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
