"""Runs commands and says what each cost: wall, CPU, peak memory, bytes read and written."""

from __future__ import annotations

import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

MIB = 1 << 20
LAUNCH = [sys.executable, "-m", "benchmarks.launch"]
RESHARD = [sys.executable, "-m", "reshard"]
#: The frameworks print and warn at will; compiled modules are kept as on any machine of a user.
_LEFT_OUT = ("PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED")
_ON_DISK = "/var/tmp"  # /tmp may be memory


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one run of a command."""

    wall: float  # seconds
    user: float  # seconds of CPU
    system: float  # seconds of CPU
    peak: int  # bytes held at most (VmHWM of the process itself, looked at every 5 ms)
    read: int  # bytes asked of read calls, from the page cache or not
    written: int  # bytes given to write calls

    @property
    def cpu(self) -> float:
        """Seconds of CPU, user and system."""
        return self.user + self.system


def run(command: Sequence[str], log: Path) -> Cost:
    """Run a command to its end. If it fails, exit with its output."""
    environ = {k: v for k, v in os.environ.items() if k not in _LEFT_OUT}
    peak = 0
    started = time.perf_counter()
    with open(log, "wb") as out:
        child = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environ)
        ended = os.WEXITED | os.WNOWAIT  # what it has read is asked of the zombie
        while os.waitid(os.P_PID, child.pid, ended | os.WNOHANG) is None:
            # not ru_maxrss: that counts the process which forked this one, too
            peak = max(peak, _field(child.pid, "status", "VmHWM:") * 1024)
            time.sleep(0.005)
        wall = time.perf_counter() - started
        read, written = (_field(child.pid, "io", f) for f in ("rchar:", "wchar:"))
        _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"{' '.join(command)}\n{log.read_text(errors='replace')[-3000:]}")
    return Cost(wall, used.ru_utime, used.ru_stime, peak, read, written)


def _field(pid: int, file: str, name: str) -> int:
    return _number(Path(f"/proc/{pid}/{file}"), name)


def _number(file: Path, name: str) -> int:
    for line in file.read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1])
    return 0


def in_turn(
    commands: Mapping[str, Sequence[str]],
    rounds: int,
    log: Path,
    source: Path,
    target: Path,
    *,
    cold: bool = False,
    also: Sequence[Path] = (),
    made: Callable[[], object] = lambda: None,
) -> dict[str, list[Cost]]:
    """Every command once a round, in turn, so that a busy machine is busy for all of them.

    The first command runs once before, uncounted. What one leaves at `target` is removed when the
    next begins. `also`: what a command reads beside `source`. `made` is called when a target is
    complete.
    """
    sources = (source, *also)
    size = sum(map(size_of, sources))
    costs: dict[str, list[Cost]] = {name: [] for name in commands}
    first = next(iter(commands))
    with tempfile.TemporaryFile(dir=_ON_DISK) as filler:
        for turn, name in enumerate([first, *list(commands) * rounds]):
            empty(target)
            if size > 256 * MIB:  # else the start outweighs the writes
                fill_memory(filler, 0 if _in_memory(source) else size)
            for one in sources:
                settle(one, cold=cold)
            cost = run(commands[name], log)
            made()
            if turn:
                costs[name].append(cost)
    empty(target)
    return costs


def median(costs: Sequence[Cost], what: str) -> float:
    """The median of one field."""
    return float(statistics.median(getattr(c, what) for c in costs))


def paired(costs: Sequence[Cost], base: Sequence[Cost], what: str) -> float:
    """The median over the rounds of a command's cost over the base's in the same round."""
    ratios = (getattr(c, what) / getattr(b, what) for c, b in zip(costs, base, strict=True))
    return float(statistics.median(ratios))


def files_of(folder: Path) -> list[Path]:
    """Every file below a folder, or the file itself."""
    return sorted(p for p in (folder, *folder.rglob("*")) if p.is_file())


def size_of(folder: Path) -> int:
    """Bytes of the files below a folder."""
    return sum(p.stat().st_size for p in files_of(folder))


def settle(source: Path, *, cold: bool) -> None:
    """Write back what is dirty; then have the source in the page cache, or (`cold`) not."""
    os.sync()
    for path in files_of(source):
        with open(path, "rb", buffering=0) as file:
            if cold:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while file.read(16 * MIB):
                    pass


def fill_memory(filler: IO[bytes], source: int) -> None:
    """Leave next to no memory free: the rest is the page cache's, as on a machine that runs long.

    A virtual machine gives pages that lie free for a second or two back to its host (free page
    reporting). Writing to a page that it has given costs ten times as much, and chance would say
    which command pays. `filler` is a hole, made to measure at the first call, with room for
    `source` bytes beside it; its pages are clean and used once: what the kernel takes first. It
    lies on a disk: of a hole in memory nothing is cached.
    """
    fd = filler.fileno()
    if not os.fstat(fd).st_size:
        nbytes = _number(Path("/proc/meminfo"), "MemAvailable:") * 1024 - source
        os.truncate(fd, max(0, nbytes))
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_NOREUSE)
    os.lseek(fd, 0, os.SEEK_SET)
    block = bytearray(MIB)
    while os.readv(fd, [block]):
        pass


def _in_memory(folder: Path) -> bool:
    """Whether a folder lies on a tmpfs: its files are no page cache that must find room."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    kinds = dict(mounts)
    return next(kinds[str(p)] for p in (folder, *folder.parents) if str(p) in kinds) == "tmpfs"


def empty(folder: Path) -> None:
    """Remove a folder or file, where there is one."""
    if folder.is_file():
        folder.unlink()
    shutil.rmtree(folder, ignore_errors=True)


def convert(source: Path, target: Path, to: str, *more: str) -> list[str]:
    """The command of a conversion."""
    return [*RESHARD, "convert", str(source), str(target), "--to", to, *more]


def made(source: Path, target: Path, to: str, *more: str) -> Path:
    """A source for a measurement, converted from another one."""
    run(convert(source, target, to, "--no-verify", *more), target.with_name("log"))
    return target


def machine() -> str:
    """What the numbers were taken on, in one line."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return (
        f"{os.cpu_count()} cores ({platform.machine()}), {total / (1 << 30):.0f} GiB of memory, "
        f"Linux {platform.release().split('-')[0]}, Python {platform.python_version()}, "
        f"load average at the end {os.getloadavg()[0]:.1f}"
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of Markdown."""
    return ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)]


def bar(value: float, limit: float, *, least: bool = False) -> str:
    """A figure against its bar: at most `limit`, or at least."""
    held = value >= limit if least else value <= limit
    return f"{'≥' if least else '≤'} {limit:g}: {'held' if held else 'missed'}"
