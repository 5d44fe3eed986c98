"""A disk that forgets: what is left after a power cut is what was fsynced, and no more.

The strictest reading of POSIX: a file's bytes last from its own fsync on, a name (of a new file, a
rename, a removal) from the fsync of the folder that holds it.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(eq=False)
class Node:
    """A file or folder, with what it is now in names, and what of it is durable."""

    folder: bool
    names: dict[str, Node] = field(default_factory=dict)  # now
    kept: dict[str, Node] = field(default_factory=dict)  # durable
    data: bytes = b""  # durable


class Disk:
    """Follows the operations below `root`; all that is there at the start is durable."""

    def __init__(self, root: Path, real_open: Any) -> None:
        self.root = root.resolve()
        self.real_open = real_open
        self.top = self._found(self.root)
        self.open: dict[int, Node] = {}

    def _found(self, path: Path) -> Node:
        if not path.is_dir():
            return Node(False, data=path.read_bytes())
        names = {p.name: self._found(p) for p in path.iterdir()}
        return Node(True, dict(names), dict(names))

    def _parent(self, path: Any, dir_fd: int | None) -> tuple[Node, str] | None:
        if dir_fd is not None:
            node = self.open.get(dir_fd)
            return (node, os.fspath(path)) if node is not None else None
        full = Path(os.path.abspath(path))
        if not full.is_relative_to(self.root) or full == self.root:
            return None
        node = self.top
        for part in full.relative_to(self.root).parts[:-1]:
            node = node.names[part]
        return node, full.name

    def saw(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Takes in an operation that has been done."""
        if name == "open":
            self._opened(args[0], kwargs.get("dir_fd"), result)
        elif name in ("mkdir", "rmdir", "unlink", "remove"):
            found = self._parent(args[0], kwargs.get("dir_fd"))
            if found is not None and name == "mkdir":
                found[0].names[found[1]] = Node(True)
            elif found is not None:
                del found[0].names[found[1]]
        elif name in ("rename", "replace"):
            source, target = self._parent(args[0], None), self._parent(args[1], None)
            assert source is not None
            assert target is not None
            target[0].names[target[1]] = source[0].names.pop(source[1])
        elif name in ("fsync", "fdatasync"):
            node = self.open.get(args[0])
            if node is not None and node.folder:
                node.kept = dict(node.names)
            elif node is not None:
                with self.real_open(f"/proc/self/fd/{args[0]}", "rb") as file:
                    node.data = file.read()
        else:
            assert name in ("ftruncate", "write", "pwrite"), name

    def _opened(self, path: Any, dir_fd: int | None, fd: int) -> None:
        self.open.pop(fd, None)
        if dir_fd is None and Path(os.path.abspath(path)) == self.root:
            self.open[fd] = self.top
            return
        found = self._parent(path, dir_fd)
        if found is None:
            return
        folder = stat.S_ISDIR(os.fstat(fd).st_mode)
        self.open[fd] = found[0].names.setdefault(found[1], Node(folder))

    def dump(self, place: Path) -> None:
        """Write what is durable into an empty folder."""
        self._dump(self.top, place)

    def _dump(self, node: Node, place: Path) -> None:
        place.mkdir()
        for name, inner in node.kept.items():
            if inner.folder:
                self._dump(inner, place / name)
            else:
                with self.real_open(place / name, "wb") as out:
                    out.write(inner.data)
