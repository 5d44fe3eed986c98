"""Mutants of real checkpoints: one value of one file's tree replaced, renamed or left out.

    python tests/hostile/mutants.py FOLDER FORMAT SEED COUNT SECONDS [FROM]

Opens each, asks every tensor for its pieces, and plans a conversion of it to its own format. Prints
those that end in anything but a result or a ReshardError, take more than five seconds, or need more
memory than RLIMIT_AS leaves.
"""

from __future__ import annotations

import json
import math
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from reshard.containers import torchfile
from reshard.containers.inert import Global, Record, TensorRef
from reshard.converters.universal.nodes import sealed
from reshard.errors import ReshardError
from reshard.planning import Options, make_plan

LIMIT = 5.0  # seconds of CPU time
MEMORY = 2 << 30  # bytes beyond what the process has at the start
ANYTHING: Any = type("Anything", (), {"__contains__": lambda _, item: True})()
_TOO_BIG = 64 << 20

Set = Callable[[Any], None]


def nested(depth: int) -> list[Any]:
    """A list in a list in a list."""
    out: list[Any] = []
    for _ in range(depth):
        out = [out]
    return out


def hostile(rng: random.Random, *, plain: bool) -> Any:
    """A value that hardly any field expects. `plain`: one that JSON can hold."""
    values: list[Any] = [
        None, True, False, -1, 0, 1, 2, 3, 7, 1 << 31, 1 << 62, 1 << 63, 1 << 64, 10**9, 10**30,
        0.5, -0.0, math.nan, math.inf, -math.inf, "", "x", ".", "..", "../../x", "/etc/passwd",
        "a\0b", "a\\b", "C:x", "x" * 5000, "9" * 5000, "0", "-1", "1e9", "tp", "e|t*999999999|L",
        "(" * 50 + ")" * 50, "*" * 500, "\n", "é" * 300, [], {}, [[]], [None], [0], [-1], [1 << 63],
        ["x"], {"": None}, {"x": 1}, {"0": 0}, nested(40), list(range(2000)),
    ]  # fmt: skip
    if not plain:
        values += [
            b"\xff", (), (0,), (1 << 62, 1 << 62), {0: 0}, {None: None}, {(): ()}, {1, 2}, 1j,
            "\ud800", Global("os", "system"), Record(Global("os", "system"), ("true",)),
            Record(Global("os", "system"), ("true",), made="reduce"), nested(900), {-1: {}},
        ]  # fmt: skip
    return rng.choice(values)


def slots(
    value: Any,
    put: Set,
    seen: set[int],
    remove: Callable[[], None] | None = None,
    rename: Set | None = None,
) -> Iterator[tuple[Any, Set, Any, Any]]:
    """Every place of a tree: its value, how to put another there, remove it, rename its key."""
    yield value, put, remove, rename
    if id(value) in seen or isinstance(value, str | bytes | int | float | None):
        return
    seen.add(id(value))
    match value:
        case dict():
            for key in list(value):

                def set_(v: Any, key: Any = key) -> None:
                    value[key] = v

                def away(key: Any = key) -> None:
                    value.pop(key, None)

                def called(name: Any, key: Any = key) -> None:
                    if key in value:
                        value[name] = value.pop(key)

                yield from slots(value[key], set_, seen, away, called)
        case list():
            for i in range(len(value)):

                def at(v: Any, i: int = i) -> None:
                    value[i] = v

                yield from slots(value[i], at, seen)
        case tuple():
            for i in range(len(value)):

                def made(v: Any, i: int = i) -> None:
                    put((*value[:i], v, *value[i + 1 :]))

                yield from slots(value[i], made, seen)
        case Record():

            def state(v: Any) -> None:
                value.state = v

            def args(v: Any) -> None:
                value.args = v if isinstance(v, tuple) else (v,)

            yield from slots(value.state, state, seen)
            yield from slots(value.args, args, seen)


def bent(ref: TensorRef, rng: random.Random) -> TensorRef:
    """A tensor whose shape is another, inside its storage."""
    shape = rng.choice([(), (0,), (1,), ref.shape[::-1], (*ref.shape, 1), ref.shape[:1]])
    if math.prod(shape) > math.prod(ref.shape):
        shape = (0,)
    stride, n = [], 1
    for size in reversed(shape):
        stride.insert(0, n)
        n *= max(size, 1)
    return replace(ref, shape=shape, stride=tuple(stride))


@dataclass
class Tree:
    """A file's values, and how the file is made of them again."""

    path: Path
    root: Any
    write: Callable[[Any], bytes]
    plain: bool = False


def trees(folder: Path) -> list[Tree]:
    """The files of a checkpoint that hold more than tensors."""
    out = []
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        raw = path.read_bytes()[:4]
        if path.stat().st_size > _TOO_BIG or path.name.startswith("reshard"):
            continue
        if path.name == ".metadata":
            root = torchfile.load_pickle(path)
            out.append(Tree(path, root, lambda r: torchfile.dumps(r, ANYTHING, {})))
        elif path.suffix == ".json":
            out.append(Tree(path, json.loads(path.read_bytes()), _json, True))
        elif path.suffix == ".safetensors":
            out.append(_safetensors(path))
        elif raw.startswith(b"PK\x03\x04") and path.suffix != ".distcp":
            file = torchfile.load(path)
            values = file.values()

            def write(root: Any, values: dict[str, bytes] = values) -> bytes:
                return _archive(root, values)

            out.append(Tree(path, file.root, write))
        elif path.suffix == "" or path.suffix == ".txt":
            out.append(Tree(path, path.read_text(errors="replace"), lambda r: _text(r), True))
    return out


def _json(root: Any) -> bytes:
    """The JSON; a node of a store gets its digest anew, or nothing behind it would be reached."""
    try:
        body = dict(root["attributes"]["reshard"])
        body.pop("digest")
        made = {**root["attributes"], "reshard": sealed(body)}
        return json.dumps({**root, "attributes": made}).encode()
    except (KeyError, TypeError, ValueError):
        return json.dumps(root).encode()


def _text(root: Any) -> bytes:
    return (root if isinstance(root, str) else repr(root)).encode("utf-8", "surrogatepass")


def _safetensors(path: Path) -> Tree:
    raw = path.read_bytes()
    n = int.from_bytes(raw[:8], "little")
    body = raw[8 + n :]

    def write(root: Any) -> bytes:
        head = json.dumps(root).encode()
        return len(head).to_bytes(8, "little") + head + body

    return Tree(path, json.loads(raw[8 : 8 + n]), write, True)


def _archive(root: Any, values: dict[str, bytes]) -> bytes:
    sizes: dict[str, int] = {}
    torchfile.dumps(root, ANYTHING, sizes)
    kept = {k: v for k, v in values.items() if k in sizes}
    made, _ = torchfile.draft("x", root, allow=ANYTHING, values=kept)
    out = bytearray(made.size)
    for at, data in made.literals:
        out[at : at + len(data)] = data
    return bytes(out)


class Late(BaseException):
    """A mutant took too long."""


def _late(*_: object) -> None:
    raise Late


def read(folder: Path, target: str) -> str:
    """Opens and plans; how that ended."""
    try:
        plan = make_plan(folder, Options(to=target))
        for tensor in plan.source.layout.tensors:
            plan.source.layout.check(tensor)
    except ReshardError as error:
        return type(error).__name__
    return "read"


def mutate(tree: Tree, rng: random.Random) -> tuple[str, bytes] | None:
    """The file with one thing changed, and what that is; the tree is as before afterwards."""
    holder = [tree.root]

    def whole(v: Any) -> None:
        holder[0] = v

    everything = list(slots(tree.root, whole, set()))
    value, put, remove, rename = rng.choice(everything)
    kind = rng.choice(["put", "put", "put", "remove", "rename"])
    bad = hostile(rng, plain=tree.plain)
    if isinstance(value, TensorRef) and rng.random() < 0.5:
        bad = bent(value, rng)
    try:
        if kind == "remove" and remove is not None:
            remove()
        elif kind == "rename" and rename is not None:
            rename(bad)
        else:
            kind = "put"
            put(bad)
        return f"{kind} {bad!r:.60} for {value!r:.60}", tree.write(holder[0])
    except (ReshardError, TypeError, ValueError, RecursionError):
        return None  # cannot be written


def main() -> None:
    """The mutants of one checkpoint."""
    source, target, seed, count, seconds = sys.argv[1:6]
    signal.signal(signal.SIGVTALRM, _late)
    work = Path(tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    bad: list[str] = []
    ended: dict[str, int] = {}
    done = 0
    try:
        folder = work / "checkpoint"
        shutil.copytree(source, folder, copy_function=shutil.copyfile)
        assert read(folder, target) == "read", "the checkpoint itself is not read"
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
        files = [t.path for t in trees(folder)]
        stop = time.monotonic() + float(seconds)
        while done < int(count) and time.monotonic() < stop:
            rng = random.Random(int(seed) + done)
            path = rng.choice(files)
            raw = path.read_bytes()
            tree = next(t for t in trees(path.parent) if t.path == path)
            made = mutate(tree, rng)
            done += 1
            if made is None:
                continue
            what, data = made
            path.write_bytes(data)
            name = f"seed {int(seed) + done - 1}: {path.relative_to(folder)}: {what}"
            signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT)
            try:
                how = read(folder, target)
                ended[how] = ended.get(how, 0) + 1
            except Late:
                bad.append(f"{name}: more than {LIMIT} s {_where()}")
            except BaseException as error:
                bad.append(f"{name}: {type(error).__name__}: {error!s:.200} {_where()}")
            finally:
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            path.write_bytes(raw)
    finally:
        shutil.rmtree(work)
    json.dump({"mutants": done, "ended": ended, "bad": bad}, sys.stdout)


def _where() -> str:
    frames = traceback.extract_tb(sys.exc_info()[2])
    ours = [f for f in frames if "mutants.py" not in f.filename]
    return " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in reversed(ours[-4:]))


if __name__ == "__main__":
    main()
