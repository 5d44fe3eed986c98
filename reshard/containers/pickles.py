"""Reads pickles into inert values: nothing a pickle names is imported, called or mutated.

The C unpickler does the work, after a scan for the few opcodes that could harm it.
"""

from __future__ import annotations

import gc
import io
import pickle
import re
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from mmap import mmap
from pathlib import Path

from reshard import dtypes
from reshard.containers.inert import Global, StorageRef, interned
from reshard.containers.small import read_small
from reshard.errors import CorruptError, ReshardError

# Opcodes in runs, matched by `re` at C speed: 44 MB (300,000 chunks) in 0.6 s on one core.


def _counted(opcode: bytes, count: str) -> bytes:
    """A pattern for a length-prefixed opcode with fewer than 256 bytes."""
    lengths = b"|".join(
        re.escape(struct.pack(count, n)) + (b".{%d}" % n if n else b"") for n in range(256)
    )
    return re.escape(opcode) + b"(?:" + lengths + b")"


_PLAIN = (
    rb"[\x94\x85\x86\x87\x81\x88\x89\x8f-\x93()}\]Rbutsaedlo01NQ]"
    rb"|[Khq\x80].|M..|[Jj]....|G.{8}|\x8a(?:\x00|\x01.|\x02..|\x03...|\x04....|\x08.{8})"
)
_LARGE = 1 << 20
#: The same without the opcodes that put into the memo or fetch from it.
_UNREMEMBERED = (
    _PLAIN.replace(rb"[\x94\x85", rb"[\x85").replace(rb"[Khq\x80].", rb"[K\x80].")
    .replace(rb"[Jj]....", rb"J....")
)  # fmt: skip


@cache
def memo_token() -> re.Pattern[bytes]:
    """Matches a run of opcodes and what follows it: MEMOIZE (group 1), BINGET (2), LONG_BINGET (3),
    or nothing of these."""
    counted = [_counted(b"\x8c", "<B"), _counted(b"X", "<I"), _counted(b"U", "<B")]
    run = b"(?:" + b"|".join([_UNREMEMBERED, *counted]) + b")*+"
    return re.compile(b"(?s:" + run + rb"(?:(\x94)|h(.)|j(....))?)")


@cache
def _run(large: bool) -> re.Pattern[bytes]:
    """Matches a run of harmless opcodes; for a large pickle, counted strings too.

    That pattern takes 30 ms to compile, which a small pickle would never win back.
    """
    if not large:
        return re.compile(b"(?s:" + _PLAIN + b")*+")
    counted = [_counted(b"\x8c", "<B"), _counted(b"X", "<I"), _counted(b"U", "<B")]
    return re.compile(b"(?s:" + b"|".join([_PLAIN, *counted]) + b")*+")


_LINE = re.compile(rb"[^\n]*+\n")
_LINES = {b"c": 2, b"i": 2} | dict.fromkeys((b"p", b"g", b"P", b"I", b"L", b"F", b"S", b"V"), 1)
_SIZES = {
    b"\x8c": "<B", b"U": "<B", b"C": "<B", b"\x8a": "<B", b"X": "<I", b"T": "<I", b"B": "<I",
    b"\x8b": "<I", b"\x8d": "<Q", b"\x8e": "<Q", b"\x96": "<Q",
}  # fmt: skip
_REFUSED = {
    b"\x82": "EXT1", b"\x83": "EXT2", b"\x84": "EXT4", b"2": "DUP", b"\x97": "NEXT_BUFFER",
    b"\x98": "READONLY_BUFFER",
}  # fmt: skip


def scan(data: bytes | mmap, start: int = 0) -> int:
    """Where the pickle at `start` ends, one past its STOP.

    Raises CorruptError for opcodes no pickler of ours or torch's writes (the extension registry,
    out-of-band buffers, DUP) and for a memo index beyond the bytes before it, for which the C
    unpickler would allocate without limit.
    """
    at, size = start, len(data)
    run = _run(size - start > _LARGE)
    while True:
        found = run.match(data, at)
        at = found.end() if found else at
        if at >= size:
            raise CorruptError(
                "the pickle ends early: the file is cut short; copy or save it again"
            )
        if data[at : at + 1] == b".":
            return at + 1
        at = step(data, at, start)


def step(data: bytes | mmap, at: int, start: int = 0) -> int:
    """Where the opcode at `at`, which is in no run, ends. Raises CorruptError as `scan` says."""
    op, size = data[at : at + 1], len(data)
    if op in _REFUSED:
        raise CorruptError(f"pickle opcode {_REFUSED[op]} at byte {at - start} is refused")
    if op == b"r":
        return _memo(int.from_bytes(data[at + 1 : at + 5], "little"), at, start) + 5
    if op == b"\x95":
        frame = int.from_bytes(data[at + 1 : at + 9], "little")
        if at + 9 + frame > size:
            raise CorruptError("a pickle frame ends beyond the file, which is cut short")
        return at + 9
    if op in _SIZES:
        head = struct.calcsize(_SIZES[op]) + 1
        # a length beyond the file is one past its end, which numbers of C still hold
        return at + head + min(int.from_bytes(data[at + 1 : at + head], "little"), size)
    if op not in _LINES:
        raise CorruptError(f"byte {op!r} at {at - start} is no pickle opcode; the file is damaged")
    end = at + 1
    for _ in range(_LINES[op]):
        line = _LINE.match(data, end)
        if line is None:
            raise CorruptError("the pickle ends inside a line")
        end = line.end()
    if op == b"p":
        text = data[at + 1 : end - 1].strip()
        _memo(int(text) if text.isdigit() and len(text) < 20 else 1 << 62, at, start)
    return end


def _memo(index: int, at: int, start: int) -> int:
    if index > at - start:
        raise CorruptError(f"pickle memo index {index} at byte {at - start} is refused")
    return at


# ---------------------------------------------------------------------- unpickling

Persist = Callable[[object], object]
#: What stands for a global of this module and name, where not a `Global`: a class of ours.
Known = Callable[[str, str], object]


class _Unpickler(pickle.Unpickler):
    """Python's own machine with every name inert."""

    def __init__(self, data: bytes, persist: Persist | None, known: Known | None) -> None:
        # buffered: a pickle without frames is else asked for a few bytes at a time
        super().__init__(io.BufferedReader(io.BytesIO(data), 1 << 16), encoding="utf-8")
        self._persist, self._known = persist, known

    def find_class(self, module: str, name: str) -> object:
        found = self._known(module, name) if self._known is not None else None
        return interned(module, name) if found is None else found

    def persistent_load(self, pid: object) -> object:
        if self._persist is None:
            raise CorruptError("the pickle refers to storages, but the file has none")
        return self._persist(pid)


def storage(pid: object) -> StorageRef:
    """The storage a torch persistent id names.

    torch 2.13 serialization.py: ("storage", type, key, location, elements); a sixth member,
    view metadata, only in legacy files, where None is written.
    """
    match pid:
        case ("storage", Global() as kind, str() as key, str() as location, int() as numel) | (
            "storage", Global() as kind, str() as key, str() as location, int() as numel, None
        ) if numel >= 0:  # fmt: skip
            if kind.module not in ("torch", "torch.storage", "torch.cuda"):
                raise CorruptError(
                    f"storage {key!r:.60} is of type {kind.path}, not a torch storage"
                )
            if kind.name in ("UntypedStorage", "_UntypedStorage"):
                return StorageRef(key, None, numel, location)
            element = dtypes.of_storage(kind.name)
            return StorageRef(key, element, numel * element.itemsize, location)
    raise CorruptError(f"a storage reference has an unknown form: {pid!r:.100}")


#: Bytes of a `.metadata`; a million chunks are about 160 MB.
LARGEST = 1 << 30
#: Hashing nested tuples (dict keys) recurses in C without a check, about 80 bytes a level.
_DEEP = 50_000


def loads(
    data: bytes, where: str, persist: Persist | None = storage, known: Known | None = None
) -> object:
    """The value of one pickle, inert. `where` names the file in errors.

    Raises CorruptError for anything off, bytes after the end included.
    """
    try:
        if scan(data) != len(data):
            raise CorruptError("there are bytes after the pickle's end")
        tuples = sum(map(data.count, (b"\x85", b"\x86", b"\x87", b"t")))
        run = _Unpickler(data, persist, known).load
        with _no_collections(len(data) > 1 << 20):
            return run() if tuples < _DEEP else _on_tall_stack(run, tuples)
    except ReshardError as error:
        raise type(error)(f"{where}: {error}") from None
    except Exception as error:  # a hostile pickle can raise anything
        text = f"{type(error).__name__}: {error}"
        raise CorruptError(
            f"{where}: not a readable pickle ({text:.300}). Save it again."
        ) from None


@contextmanager
def _no_collections(wanted: bool) -> Iterator[None]:
    """Holds the cycle collector off: it doubles the time of building millions of live objects."""
    wanted = wanted and gc.isenabled()
    if wanted:
        gc.disable()
    try:
        yield
    finally:
        if wanted:
            gc.enable()


def _on_tall_stack(run: Callable[[], object], levels: int) -> object:
    """The result of `run` in a thread whose stack holds `levels` nested calls (virtual memory)."""
    out: list[object] = []
    failed: list[Exception] = []

    def work() -> None:
        try:
            out.append(run())
        except Exception as error:
            failed.append(error)

    before = threading.stack_size((16 << 20) + levels * 128 // 4096 * 4096)
    try:
        thread = threading.Thread(target=work)
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
    if failed:
        raise failed[0]
    return out[0]


def load_pickle(path: Path) -> object:
    """The value of a plain pickle file (`.metadata`), inert."""
    return loads(read_small(path, LARGEST), str(path), None)
