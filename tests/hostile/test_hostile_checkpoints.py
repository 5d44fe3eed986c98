"""Whole checkpoints made to hang, exhaust, mislead or escape: refused in a line, with exit 1.

Every case is run by the command line in a fork with 1 GiB of memory and five seconds.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import reshard
from reshard.containers import dcp, torchfile
from reshard.containers.inert import Global, Record
from reshard.converters.universal.nodes import sealed
from support import ROOT

Unpack = Callable[[str], Path]
Spoil = Callable[[Path], None]
ANYTHING: Any = type("Anything", (), {"__contains__": lambda _, item: True})()
SECRET = "the secret of another user"


def attacked(jobs: list[list[object]]) -> list[dict[str, Any]]:
    """How the commands ended."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "hostile" / "attack.py")],
        input=json.dumps([[str(a) for a in job] for job in jobs]),
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def problem(ended: Mapping[str, Any]) -> str | None:
    """What is wrong with how a refusal ended."""
    said = ended["said"]
    if ended["code"] != 1:
        return f"exit {ended['code']} after {ended['seconds']:.1f} s: {said[-300:]!r}"
    if "a bug in" in said or "Traceback" in said or not said.startswith("reshard: "):
        return f"says {said[-300:]!r}"
    if not said.split(": ")[1].endswith("Error"):
        return f"is no ReshardError: {said[:300]!r}"
    return f"says {len(said)} characters: {said[:200]!r}" if len(said) > 3000 else None


# --- .metadata of torch.distributed.checkpoint ---------------------------------------------------

_MODULE = "torch.distributed.checkpoint.metadata"
INDEX, INFO = (
    Global(_MODULE, "MetadataIndex"),
    Global("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
)
TENSOR, CHUNK, BYTES = (
    Global(_MODULE, n)
    for n in ("TensorStorageMetadata", "ChunkStorageMetadata", "BytesStorageMetadata")
)
PROPERTIES, METADATA = Global(_MODULE, "TensorProperties"), Global(_MODULE, "Metadata")
SIZE = Global("torch", "Size")


def size(*numbers: object) -> Record:
    """A torch.Size."""
    return Record(SIZE, (numbers,), made="reduce")


def made(kind: Global, **fields: object) -> Record:
    """An object with these attributes."""
    return Record(kind, state=dict(fields))


def chunk(offsets: Record, sizes: Record) -> Record:
    return made(CHUNK, offsets=offsets, sizes=sizes)


def tensor(shape: Record, chunks: object, dtype: object = Global("torch", "float32")) -> Record:
    properties = Record(PROPERTIES, state=(dtype, None, False, None, False))
    return made(TENSOR, properties=properties, size=shape, chunks=chunks)


def stored(key: object, offset: object, file: object, at: object = 0, n: object = 8) -> Any:
    return made(INDEX, fqn=key, index=0, offset=offset), made(
        INFO, relative_path=file, offset=at, length=n
    )


def metadata(entries: object, storage: object, **more: object) -> bytes:
    """A .metadata of these entries."""
    root = made(METADATA, state_dict_metadata=entries, storage_data=storage, **more)
    return torchfile.dumps(root, ANYTHING, {})


def one(
    shape: Record | None = None,
    chunks: object = None,
    *,
    key: object = "w",
    file: object = "__0_0.distcp",
    at: object = 0,
    n: object = 8,
    dtype: object = Global("torch", "float32"),
    where: object = None,
) -> bytes:
    """A .metadata of one tensor, in one way not what it should be."""
    shape = shape or size(2)
    chunks = [chunk(size(0), shape)] if chunks is None else chunks
    return metadata(
        {key: tensor(shape, chunks, dtype)},
        dict([stored(key, size(0) if where is None else where, file, at, n)]),
    )


def _many(n: int) -> bytes:
    tensors = {f"layers.{i}.w": dcp.TensorEntry((4,), _float(), [_chunk(i)]) for i in range(n)}
    return dcp.MetadataDraft(tensors, {}).pickled()


def _float() -> Any:
    from reshard.dtypes import named

    return named("float32")


def _chunk(i: int) -> Any:
    return dcp.Chunk((0,), (4,), dcp.Place("__0_0.distcp", 0, 16))


LOOP: dict[str, object] = {}
LOOP["x"] = LOOP
HUGE = 1 << 62
FILES = ("/etc/passwd", "../secret", "a/../../secret", "a\\..\\secret", "x\0y", "", ".", "..", "/",
         "x" * 5000, "/".join("y" * 200 for _ in range(40)), "\udcff", "link", "loop", "fifo",
         "zero",
         "sub", ".metadata", "C:secret", "\n", "//etc/passwd", "sub/../__0_0.distcp")  # fmt: skip


def dcp_cases() -> dict[str, bytes]:
    """Contents of .metadata."""
    cases = {f"a file named {name!r:.30}": one(file=name) for name in FILES}
    cases |= {
        f"{what} {value!r:.30}": one(**{what: value})
        for what in ("at", "n")
        for value in (-1, 1 << 40, 1 << 63, 1 << 70, True, 0.0, "0", None, [0])
    }
    shapes = [
        (-1,),
        (HUGE,),
        (1 << 63,),
        (1 << 70,),
        (HUGE, HUGE),
        (True,),
        (0.5,),
        ("2",),
        (None,),
    ]
    cases |= {f"shape {s!r}": one(size(*s)) for s in shapes}
    cases |= {f"offset {s!r}": one(where=size(*s), chunks=[chunk(size(*s), size(2))])
              for s in [(-1,), (1,), (HUGE,), (0, 0), (), (True,)]}  # fmt: skip
    cases |= {f"dtype {d!r:.40}": one(dtype=d) for d in (
        Global("os", "system"), Global("torch", "nothing"), Global("torch", "Tensor"), None,
        "float32", Global("torch", "float64"), [])}  # fmt: skip
    cases |= {
        "a thousand axes": one(size(*(1,) * 1000), [chunk(size(*(0,) * 1000), size(*(1,) * 1000))]),
        "a scalar that is none": one(size(), [chunk(size(), size())], where=size()),
        "two chunks in one place": one(chunks=[chunk(size(0), size(2))] * 2),
        "a chunk twice as long": one(chunks=[chunk(size(0), size(4))]),
        "no chunk": one(chunks=[]),
        "chunks in a dict": one(chunks={}),
        "chunks of numbers": one(chunks=[1, 2]),
        "a key that is no text": one(key=7),
        "a key of bytes": one(key=b"w"),
        "a long key": one(key="k" * 100_000),
        "an odd key": one(key="../../\0\n\udcff"),
        "no entries": metadata({}, {}),
        "entries in a list": metadata([], {}),
        "storage in a list": metadata({}, []),
        "storage of text": metadata({"w": made(BYTES)}, {"w": "x"}),
        "an object without bytes": metadata({"w": made(BYTES)}, {}),
        "an object of nothing": metadata({"w": made(BYTES)}, dict([stored("w", None, "sub/x")])),
        "an unknown entry": metadata({"w": made(Global("os", "system"))}, {}),
        "a loop": metadata(LOOP, LOOP),
        "a loop in a chunk": one(chunks=[LOOP]),
        "only a call": torchfile.dumps(Record(Global("os", "system"), ("true",)), ANYTHING, {}),
        "a number": b"\x80\x02K\x01.",
        "nothing": b"",
        "zeros": bytes(100_000),
        "text": b"hello",
        "deep": b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b".",
        "a key that is deep": b"\x80\x02}" + b")" + b"\x85" * 200_000 + b"K\x01s.",
        "20,000 tensors in one place": _many(20_000),
    }
    return cases


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A folder beside a secret and a canary."""
    (tmp_path / "secret").write_text(SECRET)
    yield tmp_path
    assert (tmp_path / "secret").read_text() == SECRET
    assert not (tmp_path / "canary").exists()


def around(folder: Path) -> None:
    """Things that a name may point to."""
    (folder / "link").symlink_to(folder.parent / "secret")
    (folder / "loop").symlink_to("loop")
    (folder / "zero").symlink_to("/dev/zero")
    (folder / "sub").mkdir(exist_ok=True)
    os.mkfifo(folder / "fifo")


def run_cases(place: Path, cases: Mapping[str, Path], to: str) -> None:
    """Inspected, planned, verified and converted, each is refused each time, and leaves nothing."""
    names = list(cases)
    jobs: list[list[object]] = []
    for name in names:
        jobs.append(["verify", cases[name]])
        jobs.append(["convert", cases[name], place / "out", "--to", to])
    ended = attacked(jobs)
    bad = []
    for i, name in enumerate(names):
        for command, end in zip(("verify", "convert"), ended[2 * i : 2 * i + 2], strict=True):
            wrong = problem(end)
            if wrong is None and SECRET in end["said"]:
                wrong = "tells the secret"
            if wrong is not None:
                bad.append(f"{name}: {command}: {wrong}")
    assert bad == [], "\n".join(bad)
    assert not (place / "out").exists()
    assert not (place / "out.reshard-staging").exists()


def test_metadata(place: Path) -> None:
    cases = {}
    for i, (name, raw) in enumerate(dcp_cases().items()):
        folder = cases[name] = place / f"{i}" / "checkpoint"
        folder.mkdir(parents=True)
        (folder.parent / "secret").write_text(SECRET)
        around(folder)
        (folder / "__0_0.distcp").write_bytes(b"x" * 64)
        (folder / ".metadata").write_bytes(raw)
    run_cases(place, cases, "torch")


# --- safetensors and its index -------------------------------------------------------------------


def safe(header: object, body: bytes = b"\0" * 8, length: int | None = None) -> bytes:
    """A safetensors file with this header, JSON or bytes."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + body


def row(**change: object) -> dict[str, object]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **change}


def safe_cases() -> dict[str, bytes]:
    """Contents of model.safetensors."""
    values: list[object] = [-1, 1 << 63, 1 << 70, 0.0, 2.0, True, "2", None, [2], float("nan")]
    text = json.dumps(row())
    twice = ",".join(f'"w{i}": {text}' for i in range(60_000)) + f', "w59999": {text}'
    return {
        **{f"a dimension {v!r}": safe({"w": row(shape=[v])}) for v in values},
        **{f"an offset {v!r}": safe({"w": row(data_offsets=[v, 8])}) for v in values},
        **{f"an end {v!r}": safe({"w": row(data_offsets=[0, v])}) for v in values},
        **{f"a row {v!r:.20}": safe({"w": v}) for v in (None, 1, [], "x", {})},
        **{f"a header {v!r:.20}": safe(v) for v in (None, 1, [], "x", b"\xff", b"", b"{", b"{}{}")},
        **{f"a length {n}": safe({"w": row()}, length=n)
           for n in (0, 1, 1 << 20, 10**8, 10**8 + 1, 1 << 63, (1 << 64) - 1)},
        "shapes that overflow": safe({"w": row(shape=[1 << 32, 1 << 32, 0], data_offsets=[0, 8])}),
        "a product that wraps to 8": safe({"w": row(shape=[(1 << 62) + 2])}),
        "backwards": safe({"w": row(data_offsets=[8, 0])}),
        "a hole": safe({"w": row(), "v": row(data_offsets=[12, 20])}, bytes(20)),
        "an overlap": safe({"w": row(), "v": row(data_offsets=[4, 12])}, bytes(12)),
        "aliases": safe({"w": row(), "v": row()}),
        "bytes behind": safe({"w": row()}, bytes(9)),
        "too few bytes": safe({"w": row()}, bytes(7)),
        "an unknown type": safe({"w": row(dtype="F33")}),
        "a type of four bits": safe({"w": row(dtype="F4", shape=[16])}),
        "metadata of numbers": safe({"__metadata__": {"a": 1}, "w": row()}),
        "metadata in a list": safe({"__metadata__": [], "w": row()}),
        "a name twice": safe(b'{"w": %b, "w": %b}' % (text.encode(), text.encode())),
        "a name twice among 60,000": safe(b"{" + twice.encode() + b"}"),
        "deep": safe(b'{"w":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
        "NaN": safe(b'{"w": {"dtype": "F32", "shape": [NaN], "data_offsets": [0, Infinity]}}'),
        "a number of a million digits": safe(b'{"w": {"dtype": "F32", "shape": [1' + b"0" * 10**6
                                             + b'], "data_offsets": [0, 8]}}'),
        "nothing": b"",
        "seven bytes": b"\x08" * 7,
    }  # fmt: skip


def index_cases() -> dict[str, object]:
    """Contents of model.safetensors.index.json, beside a good shard and a secret."""
    names = ["../secret", "/etc/passwd", "a/b.safetensors", "..", ".", "", "a\\b.safetensors",
             "x\0.safetensors", "x" * 5000 + ".safetensors", "\udcff.safetensors", "fifo", "link",
             "fifo.safetensors", "zero.safetensors", "loop.safetensors",
             "sub.safetensors"]  # fmt: skip
    return {
        **{f"a file {n!r:.30}": {"weight_map": {"w": n}} for n in names},
        **{f"a weight_map {v!r:.20}": {"weight_map": v} for v in (None, [], {}, 1, "x", {"w": 1})},
        "a tensor that no file holds": {"weight_map": dict.fromkeys("wv", "ok.safetensors")},
        "a tensor that it does not name": {"weight_map": {"v": "ok.safetensors"}},
        "no object": [],
        "deep": b"[" * 200_000,
        "nothing": b"",
        "no text": b"\xff\xfe",
    }  # fmt: skip


def test_safetensors(place: Path) -> None:
    cases = {}
    for i, (name, raw) in enumerate(safe_cases().items()):
        folder = cases[name] = place / f"{i}"
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(raw)
    for i, (name, value) in enumerate(index_cases().items()):
        folder = cases[f"an index with {name}"] = place / f"index{i}"
        folder.mkdir()
        around(folder)
        (folder / "ok.safetensors").write_bytes(safe({"w": row()}))
        os.mkfifo(folder / "fifo.safetensors")
        (folder / "zero.safetensors").symlink_to("/dev/zero")
        (folder / "loop.safetensors").symlink_to("loop.safetensors")
        (folder / "sub.safetensors").mkdir()
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        (folder / "model.safetensors.index.json").write_bytes(data)
    run_cases(place, cases, "torch")


# --- trackers ------------------------------------------------------------------------------------

TRACKED = ("../../secret", "/etc/passwd", "..", "", "\0", "x" * 100_000, "9" * 400, "-1", "1e9",
           " ", "iter_0000003", "\xff", "release", "link", "loop", "fifo", "3\n4", "٣")  # fmt: skip


@pytest.mark.parametrize("tracker", ["latest_checkpointed_iteration.txt", "latest"])
def test_trackers(place: Path, tracker: str) -> None:
    cases = {}
    for i, text in enumerate(TRACKED):
        folder = cases[f"{text!r:.30}"] = place / f"{i}"
        folder.mkdir()
        around(folder)
        (folder / tracker).write_bytes(text.encode("latin1", "replace"))
    for kind in ("fifo", "zero", "loop", "sub"):
        folder = cases[f"a tracker that is {kind}"] = place / kind
        folder.mkdir()
        around(folder)
        (folder / tracker).symlink_to(kind)
    sparse = cases["a tracker of a terabyte"] = place / "sparse"
    sparse.mkdir()
    with open(sparse / tracker, "wb") as file:
        file.truncate(1 << 40)
    run_cases(place, cases, "torch")


# --- files that are no files ---------------------------------------------------------------------

SMALL = {
    "megatron": ("megatron/a-tp1pp1", "dist"),
    "legacy": ("megatron/a-tp1pp1", "torch"),
    "dcp": ("dcp/tp_only_w2", "checkpoint"),
    "torch": ("dcp/verl_fsdp2_w4", "checkpoint"),
    "deepspeed": ("deepspeed/z1_dp2_fp16", "ckpt"),
    "deepspeed3": ("deepspeed/z3_dp2_bf16", "ckpt"),
    "hf": ("hf/gpt2", "plain"),
    "trainer": ("wrappers/trainer_single_fp32", "ckpt/checkpoint-6"),
    "trainer-fsdp": ("wrappers/trainer_fsdp2_dp2_bf16_full", "ckpt/checkpoint-6"),
    "trainer-deepspeed": ("wrappers/trainer_ds_z2_dp2_bf16", "ckpt/checkpoint-6"),
    "accelerate": ("wrappers/accelerate_ds_z2_dp2_bf16", "ckpt/step_6"),
}


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _linked(to: str) -> Spoil:
    def link(path: Path) -> None:
        path.unlink()
        path.symlink_to(to)

    return link


def _sparse(path: Path) -> None:
    os.truncate(path, 1 << 40)


def _half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


SPOILT: dict[str, Spoil] = {
    "empty": _empty, "a folder": _folder, "a fifo": _fifo, "/dev/zero": _linked("/dev/zero"),
    "a loop": _linked("loop"), "a terabyte": _sparse, "half": _half,
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(SMALL))
def test_files_that_are_not_what_they_were(name: str, place: Path, unpacked: Unpack) -> None:
    """Every file of a checkpoint emptied, cut, swollen, or made something that is no file.

    A file that is not needed may be ignored: then the checkpoint is read as before.
    """
    fixture, inner = SMALL[name]
    source = unpacked(fixture) / inner
    files = sorted(p for p in source.rglob("*") if p.is_file())
    jobs: list[list[object]] = []
    what = []
    for i, file in enumerate(files):
        for j, (how, spoil) in enumerate(SPOILT.items()):
            if i > 4 and (i + j) % 3:
                continue  # files of further ranks are read by the same code
            folder = place / f"{i}-{j}" / source.name
            shutil.copytree(source, folder, copy_function=os.symlink)
            path = folder / file.relative_to(source)
            path.unlink()
            shutil.copyfile(file, path)
            spoil(path)
            what.append(f"{file.relative_to(source)} is {how}")
            jobs.append(["verify", folder])
    bad = []
    for case, end in zip(what, attacked(jobs), strict=True):
        wrong = problem(end) if end["code"] != 0 else None
        if wrong is not None:
            bad.append(f"{case}: {wrong}")
    assert bad == [], "\n".join(bad)


# --- the universal store -------------------------------------------------------------------------


def test_a_store_that_names_arrays_outside(place: Path, unpacked: Unpack) -> None:
    """The JSON may name any node: none outside the store is opened."""
    store = place / "inner" / "store"
    reshard.convert(unpacked("dcp/tp_only_w2") / "checkpoint", store, "universal")
    other = place / "inner" / "other"
    shutil.copytree(store / "packed", other)
    cases = {}
    root = json.loads((store / "zarr.json").read_bytes())
    for i, name in enumerate(["../other", str(other), "packed/../../other", "packed\\x", "x\0", "",
                              "packed/..", "x" * 5000, 7, None, ["packed"]]):  # fmt: skip
        folder = cases[f"{name!r:.30}"] = place / f"{i}"
        shutil.copytree(store, folder)
        body = dict(root["attributes"]["reshard"])
        body.pop("digest")
        body["arrays"] = [name]
        made_ = {**root, "attributes": {**root["attributes"], "reshard": sealed(body)}}
        (folder / "zarr.json").write_text(json.dumps(made_))
    run_cases(place, cases, "torch")
