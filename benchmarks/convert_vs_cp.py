"""What a conversion costs beside `cp` of the same bytes, as the table in the README.

    python -m benchmarks.convert_vs_cp FOLDER [--size 4GB] [--rounds 3] [--memory 256MiB]

FOLDER takes the source and one copy of it (about 2 * SIZE) while this runs; both are removed. Each
round runs every case once, in turn, so that a busy machine is busy for all of them. Every case ends
with its bytes on the disk (cp is followed by sync, reshard calls fsync itself). The source is read
once beforehand: how much of it the page cache keeps depends on the memory, which is printed.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from reshard.cli import parse_size
from reshard.topology import parse_degrees

from .make_megatron import make

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one run of a case: seconds of wall and of CPU, and the most memory it held."""

    wall: float
    cpu: float
    peak: int  # bytes


def run(command: list[str], log: Path) -> Cost:
    """Run a command until what it wrote is on the disk. If it fails, exit with its output."""
    started = time.perf_counter()
    peak = 0
    with open(log, "wb") as out:
        child = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        while (done := os.wait4(child.pid, os.WNOHANG))[0] == 0:
            # not ru_maxrss: that counts the process which forked this one, too
            peak = max(peak, _peak(child.pid))
            time.sleep(0.02)
    _, status, used = done
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"{' '.join(command)}\n{log.read_text(errors='replace')}")
    os.sync()
    wall = time.perf_counter() - started
    return Cost(wall, used.ru_utime + used.ru_stime, peak)


def _peak(pid: int) -> int:
    """Bytes a process held at most until now."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def cases(source: Path, target: Path, to: str, memory: str) -> dict[str, list[str]]:
    """The commands that are compared, by the name they have in the table."""
    convert = [sys.executable, "-m", "reshard", "convert", str(source), str(target)]
    convert += ["--to", to, "--memory", memory]
    return {
        "cp -r": ["cp", "-r", str(source), str(target)],
        f"reshard convert --to {to} --no-verify": [*convert, "--no-verify"],
        f"reshard convert --to {to}": convert,
    }


def size_of(folder: Path) -> int:
    """Bytes of the files below a folder."""
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


def measure(folder: Path, size: int, at: str, to: str, memory: str, rounds: int) -> list[str]:
    """The lines of the table."""
    source, target = folder / "source", folder / "target"
    make(size, source, parse_degrees(at))
    nbytes = size_of(source)
    for path in sorted(p for p in source.rglob("*") if p.is_file()):
        with open(path, "rb") as file:
            while file.read(16 * MIB):
                pass
    costs: dict[str, list[Cost]] = {}
    for _ in range(rounds):
        for name, command in cases(source, target, to, memory).items():
            costs.setdefault(name, []).append(run(command, folder / "log"))
            shutil.rmtree(target)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    lines = [
        f"{nbytes / 1e9:.2f} GB, torch_dist {at} with optimizer, --memory {memory}; "
        f"medians of {rounds}; {os.cpu_count()} cores ({platform.machine()}), "
        f"{total / (1 << 30):.0f} GiB of memory, Python {platform.python_version()}",
        "",
        "| command | wall | CPU | peak RSS | wall of cp | CPU of cp |",
        "|---|---|---|---|---|---|",
    ]
    base = [_median(costs["cp -r"], k) for k in ("wall", "cpu")]
    for name, seen in costs.items():
        wall, cpu, peak = (_median(seen, k) for k in ("wall", "cpu", "peak"))
        lines.append(
            f"| `{name}` | {wall:.1f} s | {cpu:.1f} s | {peak / MIB:.0f} MiB | "
            f"{wall / base[0]:.2f} x | {cpu / base[1]:.2f} x |"
        )
    return lines


def _median(seen: list[Cost], what: str) -> float:
    return statistics.median(getattr(cost, what) for cost in seen)


def main() -> None:
    """Measure, print, and leave nothing behind."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", type=parse_size, default=4 << 30)
    parser.add_argument("--from", dest="at", default="tp4pp2")
    parser.add_argument("--to", default="tp2pp4")
    parser.add_argument("--memory", default="256MiB")
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    work = asked.folder / "convert-vs-cp"
    work.mkdir()  # fails where a run is under way or was killed: remove it by hand
    try:
        lines = measure(work, asked.size, asked.at, asked.to, asked.memory, asked.rounds)
    finally:
        shutil.rmtree(work)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
