"""Whether a rank's file is the one that its name says: torch writes the name into the archive.

Source: torch 2.13 caffe2/serialize/inline_container.cc, PyTorchStreamWriter: the folder of all
members is the file's name up to its last dot, or "archive" where a buffer was written. Seen in all
fixtures of deepspeed, wrappers and dcp.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from reshard.containers import torchfile
from reshard.containers.torchfile import TorchFile
from reshard.errors import CorruptError

_NOT_RANKS = ("prefix", "stem", "world")  # groups that a user may have renamed


def load(folder: Path, name: str, patterns: Iterable[str]) -> TorchFile:
    """The torch.save file `name` of a folder, held against its name."""
    file = torchfile.load(folder / name, name)
    refuse_other(file, patterns)
    return file


def refuse_other(file: TorchFile, patterns: Iterable[str]) -> None:
    """Raises CorruptError for a file that was saved under another rank's name.

    The groups of a pattern are a name's ranks; a name without any says nothing.
    """
    own = PurePosixPath(file.name)
    said = f"{file.saved_as}{own.suffix}"
    for pattern in map(re.compile, patterns):
        mine, its = pattern.fullmatch(own.name), pattern.fullmatch(said)
        if mine is None or its is None:
            continue
        ranks = {k for k in pattern.groupindex if k not in _NOT_RANKS}
        if any((mine[k] or "").lstrip("0") != (its[k] or "").lstrip("0") for k in ranks):
            raise CorruptError(
                f"{file.path}: was saved as {said:.200}, by another rank: files have been "
                "swapped or renamed. Give it its name back, or copy the checkpoint again."
            )
