"""The seam: every operation of a process that changes a disk is counted, and one is spoilt.

It stands in for `os` and `open` of one forked process, never of the tests' own.
"""

from __future__ import annotations

import builtins
import io
import os
import signal
from collections.abc import Callable
from typing import Any

#: What changes a disk. `open` counts where it may create or cut a file.
CHANGES = (
    "ftruncate", "truncate", "write", "pwrite", "pwritev", "copy_file_range", "sendfile", "fsync",
    "fdatasync", "rename", "replace", "unlink", "remove", "mkdir", "rmdir", "link", "symlink",
)  # fmt: skip
READS = ("read", "pread", "preadv", "readv")
_WRITES = ("write", "pwrite", "pwritev")
#: What a full disk or quota still allows.
_FREES = ("unlink", "remove", "rmdir", "rename", "replace", "fsync", "fdatasync")
_CREATING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

Before = Callable[[int, str, tuple[Any, ...]], None]  # may raise, kill, or dump


class Seam:
    """Counts operations; `before` is told of each, `after` of its outcome."""

    def __init__(self, before: Before, after: Callable[..., None] | None = None) -> None:
        self.before, self.after = before, after
        self.count = 0
        self.log: list[str] = []
        self.most: int | None = None  # bytes that one write or read moves
        self.real = {name: getattr(os, name) for name in (*CHANGES, *READS, "open")}
        self.reading = False  # count reads, not changes

    def install(self) -> None:
        """Stand in for `os` and `open` in this process, from now on."""
        for name in CHANGES:
            setattr(os, name, self._counted(name))
        for name in READS:
            setattr(os, name, self._read(name))
        os.open = self._open  # type: ignore[assignment]
        self._real_open = io.open
        io.open = builtins.open = self._file  # type: ignore[assignment]

    def _tick(self, name: str, args: tuple[Any, ...]) -> None:
        self.count += 1
        self.log.append(name)
        self.before(self.count, name, args)

    def _counted(self, name: str) -> Callable[..., Any]:
        real = self.real[name]

        def call(*args: Any, **kwargs: Any) -> Any:
            if not self.reading:
                self._tick(name, args)
            if self.most is not None and name in _WRITES and name != "pwritev":
                args = (args[0], memoryview(args[1])[: self.most], *args[2:])
            result = real(*args, **kwargs)
            if self.after is not None:
                self.after(name, args, kwargs, result)
            return result

        return call

    def _read(self, name: str) -> Callable[..., Any]:
        real = self.real[name]

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.reading:
                self._tick(name, args)
            if self.most is not None and name in ("read", "pread"):
                args = (args[0], min(args[1], self.most), *args[2:])
            elif self.most is not None:
                args = (args[0], [memoryview(args[1][0]).cast("B")[: self.most]], *args[2:])
            return real(*args, **kwargs)

        return call

    def _open(self, path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        changes = bool(flags & _CREATING)
        if changes != self.reading:
            self._tick("open", (path, flags))
        fd: int = self.real["open"](path, flags, *args, **kwargs)
        if self.after is not None:
            self.after("open", (path, flags), kwargs, fd)
        return fd

    def _file(self, file: Any, mode: str = "r", buffering: int = -1, *rest: Any, **kw: Any) -> Any:
        """`open` over a raw file whose descriptor and writes go through the seam."""
        if not set(mode) & set("wax+"):
            if self.reading and not isinstance(file, int):
                self._tick("open", (file,))
            return self._real_open(file, mode, buffering, *rest, **kw)
        raw = _Raw(file, mode.replace("b", "").replace("t", ""), opener=os.open)
        buffered = io.BufferedWriter(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, *rest, **kw)


class _Raw(io.FileIO):
    def write(self, data: Any) -> int:
        return os.write(self.fileno(), data)


def kill(at: int, *, torn: bool = False) -> Before:
    """SIGKILL before operation `at`; a torn write is half done first."""
    real = {"write": os.write, "pwrite": os.pwrite}

    def before(n: int, name: str, args: tuple[Any, ...]) -> None:
        if n == at:
            if torn:
                half = memoryview(args[1])[: len(args[1]) // 2]
                real[name](args[0], half, *args[2:])
            os.kill(os.getpid(), signal.SIGKILL)

    return before


def fail(at: int, error: int, *, stays: bool = False) -> Before:
    """An error at operation `at`; one that `stays` meets all that follow and need space."""

    def before(n: int, name: str, args: tuple[Any, ...]) -> None:
        if n == at or (stays and n > at and name not in _FREES):
            path = None if isinstance(args[0], int) else os.fspath(args[0])  # as the system does
            raise OSError(error, os.strerror(error), path)

    return before


def interrupt(at: int, number: int) -> Before:
    """A signal before operation `at`."""

    def before(n: int, name: str, args: tuple[Any, ...]) -> None:
        if n == at:
            os.kill(os.getpid(), number)

    return before
