"""By what a universal store is known."""

from __future__ import annotations

import json
from pathlib import Path

from reshard.containers.marks import DOCUMENT
from reshard.containers.small import JSON, read_small
from reshard.errors import CorruptError

NAME = "universal"
#: The attribute of every node that is reshard's; "digest" in it seals the rest.
KEY = "reshard"


def recognise(folder: Path) -> str | None:
    """Why a folder is a store: its root is a zarr group with reshard's attribute."""
    try:
        found = json.loads(read_small(folder / DOCUMENT, JSON))
        return f"zarr.json has the attribute {KEY!r}" if KEY in found["attributes"] else None
    except (CorruptError, ValueError, KeyError, TypeError, RecursionError):
        return None
