"""What other packages register under an entry-point group."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


def registered(group: str) -> Iterable[EntryPoint]:
    """The entry points of a group, of every installed package.

    importlib.metadata, which takes a tenth of a second, is asked only where some package names the
    group at all.
    """
    if not _named(group.encode()):
        return ()
    from importlib.metadata import entry_points

    return entry_points(group=group)


def _named(group: bytes) -> bool:
    """Whether an installed package may have entry points of a group: its text holds the name.

    True, too, where packages are found in other ways than in folders.
    """
    for finder in sys.meta_path:
        if finder is not PathFinder and hasattr(finder, "find_distributions"):
            return True
    for root in sys.path:
        try:
            found = os.listdir(root or ".")
        except NotADirectoryError:
            return True  # a zip
        except OSError:
            continue
        for name in found:
            if name.lower().endswith((".dist-info", ".egg-info")) or name.lower() == "egg-info":
                try:
                    with open(os.path.join(root, name, "entry_points.txt"), "rb") as file:
                        if group in file.read():
                            return True
                except OSError:
                    continue
    return False
