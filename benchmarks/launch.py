"""Runs `reshard` with what a measurement changes: no fsync, or zeros kept as holes.

    python -m benchmarks.launch [--no-fsync] [--holes] -- convert SRC DST …

--holes: a write of zeros into a file that is all hole is left out: the same bytes are in the file,
and none on the disk. So a sparse source of any size is moved (read, joined, summed, compared) into
a result that is whole and takes no room. The check of free space is left out, too.
"""

from __future__ import annotations

import os
import sys

import numpy as np

from reshard import cli, commit
from reshard.files import Files


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


def main() -> None:
    """The command."""
    at = sys.argv.index("--")
    if "--no-fsync" in sys.argv[:at]:
        without_fsync()
    if "--holes" in sys.argv[:at]:
        with_holes()
    cli.main(args=sys.argv[at + 1 :])


if __name__ == "__main__":
    main()
