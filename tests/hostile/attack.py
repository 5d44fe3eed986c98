"""Runs commands of reshard in forked processes with little memory and little time.

    python tests/hostile/attack.py < jobs.json

`jobs.json`: a list of lists of arguments. Prints for each its exit code, stderr and seconds.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pkgutil
import resource
import signal
import sys
import tempfile
import time
from pathlib import Path

import reshard
from reshard import cli

MEMORY = 1 << 30  # bytes beyond what the process has at the start
SECONDS = 5  # of CPU time


def attack(args: list[str], err: Path) -> dict[str, object]:
    """One command, in a fork."""
    start = time.monotonic()
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 1))
            signal.alarm(4 * SECONDS)  # waits for nothing; the machine may be busy
            os.dup2(os.open(err, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            sys.stderr = os.fdopen(2, "w", closefd=False, errors="backslashreplace")
            cli.main(args=args, standalone_mode=False)
        except SystemExit as stop:
            code = int(stop.code or 0)
        except BaseException as error:
            print(f"escaped: {error!r}", file=sys.stderr)
        sys.stderr.flush()
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    seconds = time.monotonic() - start
    return {"code": code, "said": err.read_text(errors="replace"), "seconds": seconds}


def main() -> None:
    """All jobs, one after the other."""
    for package in (reshard, importlib.import_module("reshard.converters")):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not found.name.endswith("__main__"):
                with contextlib.suppress(ImportError):  # of an optional package
                    importlib.import_module(found.name)  # once, before the forks
    with tempfile.TemporaryDirectory() as folder:
        err = Path(folder) / "stderr"
        json.dump([attack(job, err) for job in json.load(sys.stdin)], sys.stdout)


if __name__ == "__main__":
    main()
