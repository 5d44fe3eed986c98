"""Small files read whole, trackers and JSON: within a bound, and never from what is no file."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from reshard.errors import CorruptError, UsageError

#: Bytes of a tracker: it holds a number or a name.
TRACKER = 4096
#: Bytes of a small JSON file; an index of 10^6 tensors is about 100 MB.
JSON = 256 << 20


def read_small(path: Path, most: int) -> bytes:
    """All bytes of a regular file.

    Raises CorruptError if it is longer than `most` bytes, is no regular file (opening a pipe would
    wait for ever), or cannot be read.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise CorruptError(f"{path}: cannot be read ({error.strerror})") from None
    with os.fdopen(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise CorruptError(f"{path}: is no regular file")
        if found.st_size > most:
            raise CorruptError(f"{path}: {found.st_size} bytes, too many for such a file")
        try:
            return file.read(found.st_size + 1)
        except OSError as error:
            raise CorruptError(f"{path}: cannot be read ({error.strerror})") from None


def read_tracker(path: Path) -> str:
    """What a tracker says, stripped. Raises CorruptError as `read_small` does."""
    return read_small(path, TRACKER).decode("utf-8", "replace").strip()


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object that a file holds. Raises CorruptError for anything else."""
    return parse_object(read_small(path, JSON), path)


def parse_object(raw: bytes, where: Path | str) -> dict[str, Any]:
    """The JSON object in these bytes, of `where`. Raises CorruptError for anything else."""
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{where}: not JSON: {error}") from error
    if not isinstance(found, dict):
        raise CorruptError(f"{where}: not a JSON object")
    return found


def object_beside(path: Path) -> dict[str, Any] | None:
    """The same; None where nothing is at the path."""
    return read_object(path) if os.path.lexists(path) else None


def read_config(given: str | Path) -> dict[str, Any]:
    """The config.json that --config names, by itself or its folder.

    Raises UsageError if there is none, or it is no JSON object.
    """
    path = Path(given)
    path = path if path.name.endswith(".json") else path / "config.json"
    try:
        return read_object(path)
    except CorruptError as error:
        raise UsageError(f"no config.json can be read: {error}") from error
