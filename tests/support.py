"""Where things lie in the repository."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FIXTURES = ROOT / "fixtures"


def archive_of(name: str) -> Path:
    """The archive that holds a fixture: its own, or that of its set.

    Checkpoints of one state share an archive, where they cost next to nothing: megatron/a-tp4pp2
    lies in megatron/a.tar.xz.
    """
    stem = name
    while not (found := FIXTURES / f"{stem}.tar.xz").exists():
        stem, dash, _ = stem.rpartition("-")
        if not dash:
            raise FileNotFoundError(f"no archive holds the fixture {name}")
    return found


def repository_files() -> list[Path]:
    """Every file that git tracks or would track, relative to the repository."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    names = listing.stdout.decode().split("\0")
    return [Path(name) for name in names if name and (ROOT / name).exists()]
