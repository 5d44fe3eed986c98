"""Doing many independent things, one after another or on several threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import TYPE_CHECKING, ParamSpec, Protocol, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import Future

T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")

_MOST = 4  # one disk is full before
#: Syncs under way together: what waits goes into one commit of the file system's journal.
_SYNCS = 4
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


class Each(Protocol):
    """Like the built-in map: results in the order of the items."""

    def __call__(self, do: Callable[[T], R], items: Iterable[T], /) -> Iterable[R]: ...


@contextmanager
def spread(workers: int) -> Iterator[Each]:
    """A map over items: in this thread, in order, for one worker; else on that many threads."""
    if workers <= 1:
        yield map
        return
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(workers) as pool:
        yield pool.map


def for_syncs(workers: int) -> AbstractContextManager[Each]:
    """A map for what waits for the disk: one after another for one worker, else several at once."""
    return spread(_SYNCS if workers > 1 else 1)


@contextmanager
def behind(do: Callable[P, None], workers: int) -> Iterator[Callable[P, None]]:
    """`do`, on a thread of its own where there are several workers, else as it is.

    One call runs at a time, in order: the next call, and the end, wait for the last one and raise
    what it raised.
    """
    if workers <= 1:
        yield do
        return
    from concurrent.futures import ThreadPoolExecutor

    last: list[Future[None]] = []

    def later(*args: P.args, **kwargs: P.kwargs) -> None:
        if last:
            last.pop().result()
        last.append(pool.submit(do, *args, **kwargs))

    with ThreadPoolExecutor(1) as pool:
        yield later
        if last:
            last.pop().result()


def usual() -> int:
    """The workers a conversion has where nobody says: the cores it may run on, 4 at most."""
    return min(_MOST, len(os.sched_getaffinity(0)))


def keep_freed_memory() -> None:
    """Have glibc keep what blocks free for the blocks that follow, in this whole process.

    Giving it back costs a page fault per 4 KiB of the next block: a third of the system time of a
    move. Other libraries of C are left as they are.
    """
    import ctypes

    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        mallopt(_M_TRIM_THRESHOLD, 128 << 20)
