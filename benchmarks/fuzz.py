"""Fuzzes a parser: coverage-guided over bytes (atheris), or mutants of a real checkpoint's values.

    python -m benchmarks.fuzz all --seconds 5              every parser, two at a time
    python -m benchmarks.fuzz PARSER --seconds 180         one of: pickle zip torch safetensors dcp
                                                           zarr json target manifest migration
                                                           expression family
    python -m benchmarks.fuzz PARSER --input BASE64        this input alone, without atheris
    python -m benchmarks.fuzz FOLDER --to TARGET --seconds 180       mutants of that checkpoint

Anything but a value or a ReshardError is a finding: it is printed, with the command that repeats
it. --seed fixes the order of inputs; how many of them are tried depends on the machine.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import hashlib
import io
import json
import os
import pickle
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 30  # seconds of the clock for one input: the machine may be busy
MEMORY = 2048  # MiB

MIGRATION = """
[[step]]
kind = "rename"
match = "a.*"
to = "b.*"
[[step]]
kind = "resize"
names = ["x"]
rows = 8
[[step]]
kind = "reset"
step = 0.0
"""

Parse = Callable[[bytes], object]
Parsers = Mapping[str, tuple[Parse, Sequence[bytes]]]


def parsers(work: Path) -> dict[str, tuple[Parse, list[bytes]]]:
    """What each name parses, and the inputs to start from."""
    from reshard import manifest, schema, tables
    from reshard.containers import dcp, pickles, safetensors, torchfile, zarr3
    from reshard.containers.inert_json import Reader
    from reshard.containers.zips import Window, read_members
    from reshard.dtypes import named
    from reshard.expression import Value, evaluate
    from reshard.migrate import read_migration
    from reshard.topology import parse_target

    def in_file(name: str, read: Callable[[Path], object]) -> Parse:
        path = work / name

        def parse(data: bytes) -> object:
            path.write_bytes(data)
            return read(path)

        return parse

    def members(data: bytes) -> object:
        with Window.over(Path("x"), data) as window:
            return read_members(window)

    def metadata(path: Path) -> object:
        found = dcp.read_metadata(path.parent)
        for key, place in found.objects.items():
            dcp.read_object(path.parent, place, key)
        return [
            dcp.Blobs(path.parent).arrays((k, c, e.dtype) for c in e.chunks)
            for k, e in found.tensors.items()
        ]

    def zarr(data: bytes) -> object:
        array = zarr3.parse(data, "w", work)
        (work / "w").mkdir(exist_ok=True)
        return [zarr3.read_shard(work, array, at) for at, _ in zip(array.shards(), range(3))]  # noqa: B905  # the first three

    def recorded(path: Path) -> object:
        found = manifest.read(path.parent)
        return found and manifest.read_tensors(path.parent, found)

    def text(parse: Callable[[str], object]) -> Parse:
        return lambda data: parse(data.decode("utf-8", "replace"))

    known: dict[str, Value] = {"heads": 8, "rope": {"type": "x"}, "a": [0, 1]}
    f32 = named("float32")
    file = dcp.distcp_file(
        "__0_0.distcp",
        [dcp.TensorItem("w", (0,), (3,), f32), dcp.ObjectItem("o", [1, {"a": (2, None)}])],
    )
    raw = bytearray(file.draft.size)
    for at, data in file.draft.literals:
        raw[at : at + len(data)] = data
    (work / file.draft.name).write_bytes(raw)
    entry = dcp.TensorEntry((3,), f32, [dcp.Chunk((0,), (3,), file.places[0])])
    made = dcp.MetadataDraft({"w": entry}, {"o": file.places[1]}).pickled()
    blob = bytes(raw[: file.places[0].length])
    plain = [pickle.dumps({"a": [1, 2.5, {"b": (None, b"x")}], "c": {1, 2}}, p) for p in range(6)]
    safe = b'{"w":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]},"__metadata__":{"a":"b"}}'
    array = zarr3.Array("w", (5, 3), f32, (2, 3), (4, 3))
    buffer = io.BytesIO()
    state = {"$tuple": [1, {"$float": "7ff8000000000000"}, {"$bytes": "AAA="}]}
    return {
        "pickle": (lambda d: pickles.loads(d, "x"), [*plain, made]),
        "zip": (members, [blob]),
        "torch": (in_file("x.pt", torchfile.load), [blob, bytes(raw), buffer.getvalue()]),
        "safetensors": (
            in_file("m.safetensors", lambda p: safetensors.read_header(p.parent, p.name)),
            [len(safe).to_bytes(8, "little") + safe + bytes(8)],
        ),
        "dcp": (in_file(".metadata", metadata), [made]),
        "zarr": (zarr, [json.dumps(zarr3.document(array)).encode()]),
        "json": (
            lambda d: Reader(("a.b",), "x").read(zarr3.mapping(d, Path("x"))),
            [json.dumps(state).encode()],
        ),
        "target": (
            text(parse_target),
            [b"megatron:tp2pp4,optim=x,layout=E|t*3|L", b"dcp.torchtitan:dp8", b"tp2pp4vpp2ep8"],
        ),
        "manifest": (
            in_file(manifest.NAME, recorded),
            [b'{"manifest": 1, "tensors": 0, "tensor_files": [], "files": {"a": {"bytes": 1}}}'],
        ),
        "migration": (in_file("m.toml", read_migration), [MIGRATION.encode()]),
        "expression": (
            text(lambda t: evaluate(t, lambda key: known.get(key))),
            [b"heads * 2 // 3 if rope.type == 'x' else 1", b"a.zeros + a[0]", b"not heads in a"],
        ),
        "family": (
            text(lambda t: schema.parse_family(t, "x")),
            [tables.text("families", n).encode() for n in tables.names("families")[:3]],
        ),
    }


@contextlib.contextmanager
def workplace() -> Iterator[Path]:
    """A folder that goes away, in memory where there is one."""
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=place) as folder:
        yield Path(folder)


def instrumented(work: Path) -> Parsers:
    """The parsers, of modules that tell atheris which of their branches were taken."""
    import atheris  # type: ignore[import-untyped]  # it has no types

    with atheris.instrument_imports(include=["reshard"]), contextlib.redirect_stderr(io.StringIO()):
        return parsers(work)


@dataclass(frozen=True)
class Bounds:
    """How long a parser is fuzzed, from which seed on, and with inputs of how many bytes."""

    seconds: int = 60
    seed: int = 1
    longest: int = 4096
    limit: int = LIMIT  # seconds of one input


def guided(parse: Parse, seeds: Sequence[bytes], corpus: Path, found: str, bounds: Bounds) -> None:
    """Fuzz one parser, and end the process, as libFuzzer does; findings go to `found`*."""
    import atheris

    from reshard.errors import ReshardError

    corpus.mkdir(exist_ok=True, parents=True)
    for i, seed in enumerate(seeds):
        (corpus / f"seed{i}").write_bytes(seed)

    def once(data: bytes) -> None:
        try:
            parse(data)
        except ReshardError:
            return
        except BaseException:
            Path(f"{found}crash-{hashlib.sha1(data).hexdigest()}").write_bytes(data)
            raise

    flags = [
        f"-seed={bounds.seed}",
        f"-max_total_time={bounds.seconds}",
        f"-timeout={bounds.limit}",
        f"-rss_limit_mb={MEMORY}",
        f"-artifact_prefix={found}",
        f"-max_len={bounds.longest}",
        "-reload=0",
        "-print_final_stats=1",
    ]
    atheris.Setup([sys.argv[0], *flags, str(corpus)], once)
    atheris.Fuzz()


def again(name: str, data: bytes) -> str:
    """The command that gives a parser one input."""
    text = base64.b64encode(data).decode()
    return shlex.join(["python", "-m", "benchmarks.fuzz", name, "--input", text])


def one_input(name: str, data: bytes) -> int:
    """Give a parser one input; the exit code."""
    from reshard.errors import ReshardError

    with workplace() as work:
        try:
            print(f"a value: {parsers(work)[name][0](data)!r:.200}")
        except ReshardError as error:
            print(f"refused: {error}")
    return 0


@dataclass
class Running:
    """A parser that is fuzzed in a forked process."""

    name: str
    pid: int
    folder: Path
    until: float  # by this time it ends, or hangs

    def ended(self) -> int | None:
        """How it ended, once it has; one that is late is killed."""
        done, status = os.waitpid(self.pid, os.WNOHANG)
        if not done and time.monotonic() < self.until:
            return None
        if not done:
            os.kill(self.pid, signal.SIGKILL)
            status = os.waitpid(self.pid, 0)[1]
        return os.waitstatus_to_exitcode(status)

    def says(self, code: int) -> tuple[str, bool]:
        """What became of it, and whether that is no finding."""
        said = (self.folder / "said").read_text(errors="replace")
        inputs = re.search(r"number_of_executed_units: (\d+)", said)
        memory = re.search(r"peak_rss_mb: +(\d+)", said)
        if code == 0 and inputs and memory:
            line = f"{self.name}: {int(inputs[1]):,} inputs, no finding, {memory[1]} MiB at most"
            return line, True
        shown = "\n".join(said.splitlines()[-60:])
        lines = [f"{self.name}: A FINDING (exit {code})", shown]
        for path in sorted(self.folder.glob("found-*")):
            data = path.read_bytes()
            lines += [f"the input: {data!r}", f"to repeat it: {again(self.name, data)}"]
        return "\n".join(lines), False


def start(name: str, make: Callable[[Path], Parsers], work: Path, bounds: Bounds) -> Running:
    """Fuzz a parser in a process and a folder of its own."""
    folder = work / f"of-{name}"
    folder.mkdir()
    until = time.monotonic() + bounds.seconds + 2 * bounds.limit + 30
    pid = os.fork()
    if pid == 0:
        try:
            out = os.open(folder / "said", os.O_WRONLY | os.O_CREAT)
            os.dup2(out, 1)
            os.dup2(out, 2)
            place = folder / "work"
            place.mkdir()
            guided(*make(place)[name], folder / "corpus", f"{folder}/found-", bounds)
        finally:
            os._exit(99)
    return Running(name, pid, folder, until)


def together(make: Callable[[Path], Parsers], jobs: int, bounds: Bounds) -> int:
    """Fuzz every parser, `jobs` at a time; the exit code."""
    good = True
    with workplace() as work:
        waiting, running = list(make(work)), list[Running]()  # what is imported here is so for all
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(start(waiting.pop(0), make, work, bounds))
            time.sleep(0.05)
            for one in list(running):
                code = one.ended()
                if code is not None:
                    line, fine = one.says(code)
                    print(line, flush=True)
                    good = good and fine
                    running.remove(one)
                    shutil.rmtree(one.folder)
    return 0 if good else 1


def mutants(folder: str, to: str, seconds: int, seed: int) -> int:
    """Fuzz the values of a checkpoint; the exit code."""
    script = ROOT / "tests" / "hostile" / "mutants.py"
    command = [sys.executable, str(script), folder, to, str(seed), "1000000000", str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        return done.returncode
    found = json.loads(done.stdout)
    print(f"{found['mutants']} mutants: {found['ended']}, {len(found['bad'])} findings")
    print("\n".join(found["bad"]))
    return 1 if found["bad"] else 0


def main() -> None:
    """The command."""
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    arguments.add_argument("what", metavar="all|PARSER|FOLDER")
    arguments.add_argument("--seconds", type=int, default=60, help="for each parser")
    arguments.add_argument("--jobs", type=int, default=2, help="parsers at a time, with `all`")
    arguments.add_argument("--max-len", type=int, default=4096, help="bytes of an input")
    arguments.add_argument("--corpus", type=Path, help="keep what was found, and start from it")
    arguments.add_argument("--input", type=base64.b64decode, help="one input, in base64")
    arguments.add_argument("--to", default="torch", help="TARGET that mutants are planned to")
    arguments.add_argument("--seed", type=int, default=1)
    said = arguments.parse_args()
    bounds = Bounds(said.seconds, said.seed, said.max_len)
    if said.what == "all":
        sys.exit(together(instrumented, said.jobs, bounds))
    if Path(said.what).is_dir():
        sys.exit(mutants(said.what, said.to, said.seconds, said.seed))
    if said.input is not None:
        sys.exit(one_input(said.what, said.input))
    with workplace() as work:
        parse, seeds = instrumented(work)[said.what]
        found = f"{tempfile.gettempdir()}/fuzz-{said.what}-"
        guided(parse, seeds, said.corpus or work / "corpus", found, bounds)


if __name__ == "__main__":
    main()
