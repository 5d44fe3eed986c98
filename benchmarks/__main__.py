"""Prints the tables of benchmarks/README.md: one command, all of them or some.

    python -m benchmarks FOLDER [--only startup,plan,headers,cp,workers,memory,peers]
                                [--size 4GB] [--rounds 5] [--no-fsync] [--cold]

FOLDER takes sources and targets (about 3 * SIZE) while this runs; all is removed at the end.
A smoke run: --size 50MB --rounds 1 --most 1GB --tensors 2000 --ranks 64.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable
from pathlib import Path

from reshard.cli import parse_size

TABLES = ("startup", "plan", "headers", "cp", "workers", "memory", "peers")


def main() -> None:
    """Measure, print, and leave nothing behind."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default=",".join(TABLES), help=f"of {','.join(TABLES)}")
    parser.add_argument("--case", default="", help="rows whose name holds this")
    parser.add_argument("--size", type=parse_size, default=4 << 30, help="state of cp and workers")
    parser.add_argument("--peer-size", type=parse_size, help="of peers; 1300MB or SIZE")
    parser.add_argument("--most", type=parse_size, default=256 << 30, help="state of memory")
    parser.add_argument("--tensors", type=int, default=100_000, help="of plan; headers: ten times")
    parser.add_argument("--ranks", type=int, default=2048, help="of plan")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory", default="256MiB", help="budget of cp")
    parser.add_argument(
        "--no-fsync", action="store_true", help="cp, workers: no fsync on either side"
    )
    parser.add_argument("--cold", action="store_true", help="cp: source not in the page cache")
    asked = parser.parse_args()
    chosen = asked.only.split(",")
    if unknown := set(chosen) - set(TABLES):
        parser.error(f"{', '.join(unknown)}: not a table; those are {', '.join(TABLES)}")
    asked.folder.mkdir(parents=True, exist_ok=True)
    work = asked.folder.resolve() / "reshard-benchmarks"
    for name in chosen:
        work.mkdir()  # fails where a run is under way or was killed: remove it by hand
        try:
            lines = tables(work, asked)[name]()
        finally:
            shutil.rmtree(work)
        print(f"\n## {name}\n", *lines, sep="\n", flush=True)


def tables(work: Path, asked: argparse.Namespace) -> dict[str, Callable[[], list[str]]]:
    """What makes each table."""
    from . import headers, memory, planning, versus_cp, versus_peers

    small = min(asked.size, 1300 << 20)
    return {
        "startup": lambda: planning.startup(work, asked.rounds),
        "plan": lambda: planning.scale(work, asked.tensors, asked.ranks),
        "headers": lambda: headers.measure(work, 10 * asked.tensors),
        "cp": lambda: versus_cp.measure(
            work, asked.size, asked.rounds, asked.memory,
            synced=not asked.no_fsync, cold=asked.cold, only=asked.case,
        ),
        "workers": lambda: versus_cp.workers(
            work, asked.size, asked.rounds, synced=not asked.no_fsync, only=asked.case
        ),
        "memory": lambda: memory.measure(work, asked.most, only=asked.case),
        "peers": lambda: versus_peers.measure(
            work, asked.peer_size or small, asked.rounds, only=asked.case
        ),
    }  # fmt: skip


if __name__ == "__main__":
    main()
