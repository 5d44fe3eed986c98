"""Where things lie in the repository."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FIXTURES = ROOT / "fixtures"


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
