"""Opens the files of a tag folder, each that of the rank in its name."""

from __future__ import annotations

from pathlib import Path

from reshard.containers import rank_names
from reshard.containers.torchfile import TorchFile

from .recognise import PATTERNS


def load(folder: Path, name: str) -> TorchFile:
    """A rank's file below a folder. Raises CorruptError for another rank's under its name."""
    return rank_names.load(folder, name, PATTERNS.values())
