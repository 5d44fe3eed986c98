"""A rank that crashes or hangs fails its own job, with its traceback, and nothing else."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path

from peers.fork_ranks import fork_job, fork_ranks


def test_ranks_that_return_give_none(tmp_path: Path):
    def rank_main(rank: int) -> None:
        (tmp_path / str(rank)).write_text("was here")

    assert fork_ranks(rank_main, 3, tmp_path / "logs", seconds=10) is None
    assert {name.name for name in tmp_path.iterdir()} == {"0", "1", "2", "logs"}


def test_a_rank_that_raises_gives_its_traceback(tmp_path: Path):
    def rank_main(rank: int) -> None:
        if rank == 1:
            raise ValueError("heads do not divide")

    error = fork_ranks(rank_main, 2, tmp_path, seconds=10)
    assert error
    assert "rank 1 ended with 1" in error
    assert "ValueError: heads do not divide" in error
    assert "rank 0" not in error


def test_a_rank_ends_with_the_processes_that_it_started(tmp_path: Path):
    def rank_main(rank: int) -> None:
        left = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
        left.start()
        (tmp_path / "pid").write_text(str(left.pid))

    assert fork_ranks(rank_main, 1, tmp_path / "logs", seconds=20) is None
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 10
    while os.path.exists(f"/proc/{pid}/exe") and time.monotonic() < deadline:
        time.sleep(0.05)  # an orphan's end is init's to see
    assert not os.path.exists(f"/proc/{pid}/exe")


def test_a_rank_that_is_killed_says_by_what(tmp_path: Path):
    error = fork_ranks(lambda _: os.kill(os.getpid(), signal.SIGKILL), 1, tmp_path, seconds=10)
    assert error
    assert "rank 0 ended with -9" in error


def test_a_rank_that_hangs_shows_where_and_is_ended(tmp_path: Path):
    def wait_for_nobody(rank: int, depth: int = 60) -> None:
        if depth:
            wait_for_nobody(rank, depth - 1)
        time.sleep(60 * rank)

    began = time.monotonic()
    error = fork_ranks(wait_for_nobody, 2, tmp_path, seconds=0.5)
    assert time.monotonic() - began < 10
    assert error
    assert "Timeout" in error
    assert "in wait_for_nobody" in error


def test_ranks_meet_at_a_port_that_nobody_chose(tmp_path: Path):
    import torch.distributed as dist

    def rank_main(rank: int) -> None:
        dist.init_process_group("gloo")
        seen: list[int | None] = [None] * 3
        dist.all_gather_object(seen, rank)
        assert seen == [0, 1, 2]
        dist.destroy_process_group()

    assert fork_job(rank_main, 3, tmp_path, seconds=60) is None
