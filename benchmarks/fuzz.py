"""Fuzzes a parser: coverage-guided over bytes (atheris), or mutants of a real checkpoint's values.

    python -m benchmarks.fuzz PARSER --seconds 180         one of: pickle zip torch safetensors dcp
                                                           zarr json target
    python -m benchmarks.fuzz FOLDER --to TARGET --seconds 180       mutants of that checkpoint

Anything but a value or a ReshardError is a finding: it is printed, and the input kept. atheris is
not among the dependencies: pip install atheris (it has wheels for Python 3.11).
"""

from __future__ import annotations

import argparse
import io
import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 30  # seconds of the clock for one input: the machine may be busy
MEMORY = 2048  # MiB

Parse = Callable[[bytes], object]


def parsers(work: Path) -> dict[str, tuple[Parse, list[bytes]]]:
    """What each name parses, and the inputs to start from."""
    from reshard.containers import dcp, pickles, safetensors, torchfile, zarr3
    from reshard.containers.inert_json import Reader
    from reshard.containers.zips import Window, read_members
    from reshard.dtypes import named
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
            lambda d: parse_target(d.decode("utf-8", "replace")),
            [b"megatron:tp2pp4,optim=x,layout=E|t*3|L", b"dcp.torchtitan:dp8", b"tp2pp4vpp2ep8"],
        ),
    }


def guided(name: str, seconds: int, corpus: Path | None) -> None:
    """Fuzz one parser of bytes. Does not return: libFuzzer ends the process."""
    import atheris  # type: ignore[import-not-found,unused-ignore]  # not a dependency

    with atheris.instrument_imports(include=["reshard"]):
        from reshard.errors import ReshardError

        work = Path(tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
        parse, seeds = parsers(work)[name]
    place = corpus or work / "corpus"
    place.mkdir(exist_ok=True, parents=True)
    for i, seed in enumerate(seeds):
        (place / f"seed{i}").write_bytes(seed)

    def once(data: bytes) -> None:
        try:
            parse(data)
        except ReshardError:
            return

    flags = [
        f"-max_total_time={seconds}",
        f"-timeout={LIMIT}",
        f"-rss_limit_mb={MEMORY}",
        f"-artifact_prefix={tempfile.gettempdir()}/fuzz-{name}-",
        "-max_len=4096",
        "-print_final_stats=1",
    ]
    atheris.Setup([sys.argv[0], *flags, str(place)], once)
    atheris.Fuzz()


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
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("what", metavar="PARSER|FOLDER")
    arguments.add_argument("--seconds", type=int, default=60)
    arguments.add_argument("--corpus", type=Path, help="keep what was found, and start from it")
    arguments.add_argument("--to", default="torch", help="TARGET that mutants are planned to")
    arguments.add_argument("--seed", type=int, default=1)
    said = arguments.parse_args()
    if Path(said.what).is_dir():
        sys.exit(mutants(said.what, said.to, said.seconds, said.seed))
    guided(said.what, said.seconds, said.corpus)


if __name__ == "__main__":
    main()
