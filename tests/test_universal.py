"""The universal store: round trips, partial reads, resume, damage, refusals, memory."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

import reshard
from reshard.box import Box, uncovered
from reshard.containers import torchfile, zarr3
from reshard.containers.inert import tensors_in
from reshard.containers.inert_json import to_json
from reshard.converters.universal.nodes import node_name
from reshard.dtypes import TABLE, named
from reshard.errors import CorruptError, FormatError, UnsafeError, UsageError
from reshard.files import Files
from support import ROOT

Unpack = Callable[[str], Path]
#: Cuts that give even a fixture's matrices several chunks and shards.
CUT = "universal:chunk=2KiB,shard=8KiB,small=1KiB"

#: Every family of Megatron fixtures, and a target that its model divides into.
MEGATRON = [
    ("a-tp4pp2/dist", "megatron:tp2pp2"),
    ("a-tp2pp2vpp2/torch", "megatron-legacy:tp2pp2"),
    ("b-tp2pp2dp2/dist", "megatron:tp2pp2"),
    ("c-pp2ep2/dist", "megatron:tp2pp2"),
    ("c-pp2ep2/torch", "megatron:pp2ep2"),
    ("d-tied-tp4pp2/dist", "megatron:tp2pp2"),
    ("e-legacy-tp2pp2/torch", "megatron:tp2pp2"),
    ("h-llama-tp2pp1dp2-dpr/dist", "megatron:tp2pp2"),
    ("h-llama-tp2pp1dp2-fr/dist", "megatron:tp2pp2"),
    ("h-mla-tp2/dist", "megatron:tp2pp2"),
    ("h-moe-pp2ep2/dist", "megatron:tp2pp2"),
    ("h-moe-pp2ep2/dist", "megatron:pp2ep2"),
    ("h-mtp-pp2/dist", "megatron:tp2pp2"),
]


def files_of(folder: Path) -> dict[str, bytes]:
    """Every file below a folder but the manifest, which names paths and times."""
    found = (p for p in folder.rglob("*") if p.is_file() and not p.name.startswith("reshard"))
    return {str(p.relative_to(folder)): p.read_bytes() for p in found}


def state_in(path: Path) -> str:
    """Everything a torch file holds, tensors' bytes included. Pickles of equal objects may differ:
    they also say which equal strings are one object."""
    file = torchfile.load(path)
    refs = tensors_in(file.root)
    values = {r.key: np.ascontiguousarray(file.read(r)).tobytes() for r in refs}
    return json.dumps(to_json(file.root, values))


@pytest.mark.proves("megatron", "universal", "training state")
@pytest.mark.proves("megatron-legacy", "universal", "training state")
@pytest.mark.proves("universal", "megatron", "training state")
@pytest.mark.proves("universal", "megatron-legacy", "training state")
@pytest.mark.parametrize(("source", "target"), MEGATRON)
def test_megatron_by_the_store_equals_megatron_directly(
    unpacked: Unpack, tmp_path: Path, source: str, target: str
) -> None:
    """Tensors to the byte; args, param groups, random and extra states; what is said of them."""
    name, kind = source.split("/")
    given = unpacked(f"megatron/{name}") / kind
    store, via, direct = (tmp_path / n for n in ("store", "via", "direct"))
    kept = reshard.convert(given, store, CUT)
    assert kept["losses"] == []
    assert kept["verified"]["tensors"] == kept["tensors"]
    assert reshard.diff(given, store, extras=True)["differences"] == []
    assert reshard.fingerprint(store) == reshard.fingerprint(given)
    ours, theirs = reshard.convert(store, via, target), reshard.convert(given, direct, target)
    for said in ("losses", "fates", "recipe", "notes"):
        assert ours[said] == theirs[said]
    a, b = files_of(via), files_of(direct)
    assert a.keys() == b.keys()
    other = [name for name in a if a[name] != b[name]]
    assert {Path(n).name for n in other} <= {"common.pt", "model_optim_rng.pt"}
    for file in other:
        assert state_in(via / file) == state_in(direct / file)


@pytest.mark.proves("universal", "hf", "weights")
def test_a_store_becomes_hf_as_its_source_does(unpacked: Unpack, tmp_path: Path) -> None:
    given = unpacked("megatron/h-llama-tp2pp2") / "dist"
    reshard.convert(given, tmp_path / "store", "universal")
    reshard.convert(tmp_path / "store", tmp_path / "via", "hf", weights_only=True)
    reshard.convert(given, tmp_path / "direct", "hf", weights_only=True)
    assert files_of(tmp_path / "via") == files_of(tmp_path / "direct")


def test_names_of_a_dialect(unpacked: Unpack, tmp_path: Path) -> None:
    """`universal.hf` stores a Megatron model under Hugging Face's names, moments included."""
    given = unpacked("megatron/h-llama-tp2pp2") / "dist"
    reshard.convert(given, tmp_path / "store", "universal.hf")
    reshard.convert(given, tmp_path / "hf", "hf", weights_only=True)
    store, weights = reshard.open(tmp_path / "store"), reshard.open(tmp_path / "hf")
    assert {name for name, slot in store.logical if slot == "exp_avg"} == {
        name for name, _ in weights.logical
    }
    for name, _ in weights.logical:
        assert store[name][...].tobytes() == weights[name][...].tobytes()


@pytest.mark.proves("dcp", "universal", "training state")
@pytest.mark.proves("universal", "dcp", "training state")
def test_fsdp_by_the_store(unpacked: Unpack, tmp_path: Path) -> None:
    """Tensors, steps, groups and JSON extras are equal; what only DCP's writers use is a loss."""
    given = unpacked("dcp/fsdp2_w2_fp32") / "checkpoint"
    report = reshard.convert(given, tmp_path / "store", CUT)
    assert reshard.diff(given, tmp_path / "store", extras=True)["differences"] == []
    assert {x["code"] for x in report["losses"]} <= {"native-dropped"}
    reshard.convert(tmp_path / "store", tmp_path / "back", "dcp:dp3")
    assert reshard.diff(given, tmp_path / "back")["differences"] == []


@pytest.mark.proves("universal", "universal", "training state")
def test_a_store_of_a_store(unpacked: Unpack, tmp_path: Path) -> None:
    """Cut otherwise, it is the same checkpoint, native state included."""
    given = unpacked("megatron/h-moe-pp2ep2") / "dist"
    reshard.convert(given, tmp_path / "one", CUT)
    assert reshard.convert(tmp_path / "one", tmp_path / "two", "universal")["losses"] == []
    assert reshard.diff(given, tmp_path / "two", extras=True)["differences"] == []
    reshard.convert(tmp_path / "two", tmp_path / "via", "megatron:pp2ep2")
    reshard.convert(given, tmp_path / "direct", "megatron:pp2ep2")
    a, b = files_of(tmp_path / "via"), files_of(tmp_path / "direct")
    assert {n for n in a if a[n] != b[n]} <= {"iter_0000003/common.pt"}


def test_weights_only(unpacked: Unpack, tmp_path: Path) -> None:
    given = unpacked("megatron/a-tp4pp2") / "dist"
    reshard.convert(given, tmp_path / "store", "universal", weights_only=True)
    opened = reshard.open(tmp_path / "store").checkpoint
    assert opened.groups is None
    assert not opened.steps
    assert {t.slot for t in opened.layout.tensors} == {"param"}
    reshard.convert(tmp_path / "store", tmp_path / "via", "megatron:tp2")
    reshard.convert(given, tmp_path / "direct", "megatron:tp2", weights_only=True)
    assert reshard.diff(tmp_path / "via", tmp_path / "direct")["differences"] == []


# --- every dtype and shape -----------------------------------------------------------------------


def odd_tensors() -> dict[str, np.ndarray[Any, Any]]:
    """Distinct bits in many dtypes; scalars, empty ones, odd names."""
    made: dict[str, np.ndarray[Any, Any]] = {}
    rng = np.random.default_rng(7)
    for kind in (t for t in TABLE if t.safetensors and t.name[:6] not in ("comple", "float8")):
        raw = rng.integers(0, 2 if kind.name == "bool" else 256, 1200 * kind.itemsize, np.uint8)
        made[f"all.{kind.name}"] = raw.view(kind.numpy).reshape(30, 40)
    made["one"] = np.asarray(3.5, np.float32)
    made["none"] = np.zeros((0, 5), np.float32)
    made["../a name/with-ü~all"] = np.arange(3000, dtype=np.float32).reshape(3, 1000)
    made["a" * 300] = np.arange(2000, dtype=np.int64)
    made["__reserved"] = np.arange(2001, dtype=np.int64)
    made["minus zero"] = np.full(1500, -0.0, np.float32)
    return made


@pytest.fixture
def odd(tmp_path: Path) -> tuple[Path, dict[str, np.ndarray[Any, Any]]]:
    """A folder of safetensors, and what is in it."""
    folder, made = tmp_path / "source", odd_tensors()
    folder.mkdir()
    save_file(made, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder, made


@pytest.mark.proves("hf", "universal", "weights")
@pytest.mark.parametrize("to", ["universal", CUT, "universal:chunk=256,shard=1KiB,small=0"])
def test_every_dtype_to_the_bit(
    odd: tuple[Path, dict[str, np.ndarray[Any, Any]]], tmp_path: Path, to: str
) -> None:
    source, made = odd
    reshard.convert(source, tmp_path / "store", to)
    opened = reshard.open(tmp_path / "store")
    assert {name for name, _ in opened.logical} == made.keys()
    for name, values in made.items():
        found = opened[name][...]
        assert (found.dtype, found.shape) == (values.dtype, values.shape)
        assert found.tobytes() == values.tobytes()
    assert reshard.verify(tmp_path / "store")["status"] == "ok"


@given(st.text(max_size=300), st.text(max_size=300))
def test_node_names_are_safe_and_different(a: str, b: str) -> None:
    node = node_name(a)
    assert set(node) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.")
    assert 0 < len(node) <= 200
    assert not node.startswith(("__", "."))
    assert node != "zarr.json"
    assert (node == node_name(b)) == (a == b)


@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=3),
    st.integers(1, 8),
    st.integers(1, 4000),
    st.integers(1, 20000),
)
@settings(deadline=None)
def test_chunks_cover_an_array_once(
    shape: list[int], itemsize: int, chunk: int, shard: int
) -> None:
    kind = next(t for t in TABLE if t.itemsize == min(8, 1 << (itemsize - 1).bit_length()))
    inner, outer = zarr3.cut(shape, kind.itemsize, chunk, shard)
    array = zarr3.Array("x", tuple(shape), kind, inner, outer)
    boxes = [c.box for s in array.shards() for c in zarr3.chunks(array, s)]
    assert sum(b.numel for b in boxes) == prod(shape)
    assert uncovered(Box.whole(shape), boxes) == []
    if chunk >= kind.itemsize:
        assert prod(inner) * kind.itemsize <= chunk
    if shard >= prod(inner) * kind.itemsize:
        assert prod(outer) * kind.itemsize <= shard
    for d in zarr3.drafts(array):
        spans = sorted([(a.offset, a.offset + a.packed) for a in d.arrays])
        spans += [(o, o + len(raw)) for o, raw in d.literals]
        assert all(x[1] == y[0] for x, y in pairwise(spans))
        assert spans[-1][1] == d.size


# --- partial reads -------------------------------------------------------------------------------


def test_a_slice_reads_its_own_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.arange(4096 * 256, dtype=np.float32).reshape(4096, 256)
    source = tmp_path / "source"
    source.mkdir()
    save_file({"w": values}, source / "model.safetensors")
    (source / "config.json").write_text("{}")
    reshard.convert(source, tmp_path / "store", "universal:chunk=64KiB,shard=1MiB")
    opened, read = reshard.open(tmp_path / "store"), list[int]()
    pread = reshard.api.Files.pread

    def counted(self: Any, name: str, offset: int, out: memoryview) -> None:
        read.append(len(out))
        pread(self, name, offset, out)

    monkeypatch.setattr(reshard.api.Files, "pread", counted)
    assert np.array_equal(opened["w"][0:10], values[0:10])
    assert sum(read) == (64 << 10) + 4
    assert np.array_equal(opened["w"][1000:1300, 7:9], values[1000:1300, 7:9])
    assert opened["w"][-1, -1] == values[-1, -1]
    assert sum(read) < 1 << 20


# --- interrupted ---------------------------------------------------------------------------------

_KILLED = """
import os, signal, sys
import reshard.commit, reshard.engine
reshard.commit.SYNC_EVERY = 1
move, seen = reshard.engine.Mover.move, []
def dying(self, name, tensors):
    seen.append(name)
    if len(seen) > int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)
    return move(self, name, tensors)
reshard.engine.Mover.move = dying
import reshard
reshard.convert(sys.argv[2], sys.argv[3], sys.argv[4])
"""


def test_a_killed_write_resumes_and_ends_the_same(unpacked: Unpack, tmp_path: Path) -> None:
    source, out = unpacked("megatron/a-tp4pp2") / "dist", tmp_path / "out"
    for names in (5, 17):
        killed = [sys.executable, "-c", _KILLED, str(names), str(source), str(out), CUT]
        assert subprocess.run(killed, check=False, capture_output=True).returncode == -9
        assert not out.exists()
        staged = next(tmp_path.glob("out*staging*"))
        with pytest.raises(reshard.ReshardError):
            reshard.open(staged / "checkpoint")
    assert reshard.convert(source, out, CUT)["resumed"]
    reshard.convert(source, tmp_path / "whole", CUT)
    assert files_of(out) == files_of(tmp_path / "whole")


# --- damage --------------------------------------------------------------------------------------

MATRIX = "decoder.layers.0.mlp.linear_fc1.weight"


@pytest.fixture(scope="module")
def whole(unpacked: Unpack, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of a small Megatron run."""
    out = tmp_path_factory.mktemp("universal") / "store"
    reshard.convert(unpacked("megatron/a-tp4pp2") / "dist", out, CUT)
    return out


@pytest.fixture
def store(whole: Path, tmp_path: Path) -> Path:
    """A copy of it that may be spoilt."""
    shutil.copytree(whole, tmp_path / "store")
    return tmp_path / "store"


def flip(path: Path, at: int) -> None:
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def refused(store: Path, tmp_path: Path, *words: str) -> None:
    """The store is refused when it is converted and when it is verified, with these words."""
    (store / "reshard.json").unlink(missing_ok=True)  # its digests would find it first
    for do in (lambda: reshard.convert(store, tmp_path / "out", "megatron:tp2"),
               lambda: reshard.verify(store)):  # fmt: skip
        with pytest.raises(CorruptError) as error:
            do()
        for word in words:
            assert word in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("at", [0, 1500, 2047, 2050, 4200])
def test_a_flipped_bit_names_array_and_chunk(store: Path, tmp_path: Path, at: int) -> None:
    """In the data, in the checksum, in the second chunk."""
    flip(store / f"master/{MATRIX}/c.0.0", at)
    refused(store, tmp_path, f"master/{MATRIX}", f"chunk [{at // 2052}, 0]", "CRC-32C")


def test_a_flipped_bit_among_small_tensors(store: Path, tmp_path: Path) -> None:
    flip(store / "packed/master.float32/c.0", 9)
    refused(store, tmp_path, "packed/master.float32", "chunk [0]")


def test_a_flipped_bit_is_found_by_a_partial_read(store: Path) -> None:
    flip(store / f"master/{MATRIX}/c.0.0", 2000)
    with pytest.raises(CorruptError, match="CRC-32C"):
        reshard.open(store)[MATRIX, "master"][0:1]
    assert reshard.open(store)[MATRIX, "master"][-1:].size  # another chunk


def test_a_lost_shard(store: Path, tmp_path: Path) -> None:
    (store / f"master/{MATRIX}/c.1.0").unlink()
    refused(store, tmp_path, f"master/{MATRIX}", "shard [1, 0]", "lost")


@pytest.mark.parametrize("left", [0, 10, 100, -1])
def test_a_shard_cut_short(store: Path, tmp_path: Path, left: int) -> None:
    path = store / f"master/{MATRIX}/c.1.0"
    path.write_bytes(path.read_bytes()[:left])
    refused(store, tmp_path, f"master/{MATRIX}", "shard [1, 0]", "cut short")


def reindexed(path: Path, number: int, entry: tuple[int, int]) -> None:
    """Change a shard's index, its checksum made good."""
    data, n = path.read_bytes(), 4 * 16 + 4
    index = np.frombuffer(data[-n:-4], "<u8").reshape(-1, 2).copy()
    index[number] = entry
    raw = index.tobytes()
    path.write_bytes(data[:-n] + raw + zarr3.crc32c(raw).to_bytes(4, "little"))


@pytest.mark.parametrize(
    ("entry", "word"),
    [((2**64 - 1, 2**64 - 1), "lost"), ((0, 2048), "before the index"), ((9000, 2052), "before")],
)
def test_a_chunk_without_a_place(
    store: Path, tmp_path: Path, entry: tuple[int, int], word: str
) -> None:
    """An empty entry means zeros to other readers; here it is a lost chunk."""
    reindexed(store / f"master/{MATRIX}/c.0.0", 2, entry)
    refused(store, tmp_path, f"master/{MATRIX}", "chunk [2, 0]", word)


def test_another_chunk_in_its_place(store: Path, tmp_path: Path) -> None:
    """Checksums are right; the values are not what master and manifest say."""
    reindexed(store / f"master/{MATRIX}/c.0.0", 2, (0, 2052))
    with pytest.raises(reshard.ReshardError, match=r"digest|fingerprint|masters"):
        reshard.verify(store)


@pytest.mark.parametrize(
    "node", ["", "param", f"param/{MATRIX}", "packed/master.float32", "native"]
)
def test_a_lost_or_changed_document(store: Path, tmp_path: Path, node: str) -> None:
    path = store / node / "zarr.json"
    text = path.read_text()
    if node:
        path.unlink()
        refused(store, tmp_path, str(path), "lost")
    found = json.loads(text)
    found["attributes"]["reshard"]["slot" if "slot" in text else "naming"] = "changed"
    path.write_text(json.dumps(found))
    refused(store, tmp_path, str(path), "digest")


@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [
        ("shape", [8, 8], CorruptError),
        ("data_type", "uint16", FormatError),
        ("codecs", [{"name": "bytes", "configuration": {"endian": "little"}}], CorruptError),
        ("chunk_key_encoding", {"name": "v2"}, FormatError),
        ("fill_value", 1, FormatError),
    ],
)
def test_an_array_of_another_form(store: Path, key: str, value: Any, kind: type) -> None:
    path = store / f"master/{MATRIX}/zarr.json"
    found = json.loads(path.read_text())
    path.write_text(json.dumps({**found, key: value}))
    with pytest.raises(kind):
        reshard.open(store)


def test_json_that_another_writer_spelled(store: Path) -> None:
    """Order, spaces and added members are not reshard's business."""
    for path in store.rglob("zarr.json"):
        found = json.loads(path.read_text())
        found["attributes"]["mine"] = [1]
        path.write_text(json.dumps(dict(sorted(found.items())), indent=3))
    (store / "reshard.json").unlink()  # it knows each file's size and digest
    assert reshard.verify(store)["tensors"] > 0


def resealed(store: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the state kept for the source's writers, its digest made good."""
    from reshard.converters.universal.nodes import sealed

    path = store / "native/zarr.json"
    found = json.loads(path.read_text())
    body = {k: v for k, v in found["attributes"]["reshard"].items() if k != "digest"}
    change(body["state"])
    found["attributes"]["reshard"] = sealed(body)
    path.write_text(json.dumps(found))


def test_a_name_that_would_run_code_does_not_come_back(store: Path) -> None:
    evil = {"$record": ["os", "system"], "made": "reduce", "args": {"$tuple": ["true"]}}
    resealed(store, lambda state: state["args"].update(rank=evil))
    with pytest.raises(UnsafeError, match=r"os\.system"):
        reshard.open(store)


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.pop("args"),
        lambda s: s.update(version=9),
        lambda s: s["model"].update(layers="8"),
        lambda s: s["model"].update(odd=1),
        lambda s: s["topology"].update(tp=True),
        lambda s: s["pipeline"][0].append(3),
        lambda s: s.update(rng=[[1]]),
        lambda s: s.update(rng_grid={"$tuple": ["a"]}),
        lambda s: s["args"].update(rank={"$tensor": "float32", "shape": [9], "data": "AAAA"}),
        lambda s: s["args"].update(rank={"$odd": 1}),
        lambda s: s["optimizer"].update(step="3"),
    ],
)
def test_a_damaged_state_of_the_source(store: Path, change: Callable[[Any], None]) -> None:
    resealed(store, change)
    with pytest.raises(CorruptError):
        reshard.open(store)


# --- refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("to", "kind", "word"),
    [
        ("universal:tp2", UsageError, "degrees"),
        ("universal.nosuch", UsageError, "dialect"),
        ("universal:chunk=0", UsageError, "size"),
        ("universal:chunk=3", UsageError, "chunk=3: .* 256 bytes at least"),
        ("universal:chunk=1MiB,shard=8KiB", UsageError, "a shard of 8192 bytes holds no chunk of"),
        ("universal:shard=1MiB", UsageError, "give both, as in chunk=1MiB,shard=8MiB"),
        ("universal:sharding=1", UsageError, "not known"),
        ("universal:compress=zstd", UsageError, "not known"),
    ],
)
def test_what_a_store_does_not_have(
    unpacked: Unpack, tmp_path: Path, to: str, kind: type, word: str
) -> None:
    with pytest.raises(kind, match=word):
        reshard.convert(unpacked("megatron/a-tp1pp1") / "dist", tmp_path / "out", to)


def test_a_cut_into_too_many_files_is_refused(
    unpacked: Unpack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it is laid out: the files of a model of 2 TB in shards of 1 KiB fit no memory."""
    source = unpacked("megatron/a-tp1pp1") / "dist"
    module: Any = importlib.import_module("reshard.converters.universal.write")
    monkeypatch.setattr(module, "_MOST_SHARDS", 100)
    with pytest.raises(UsageError, match=r"shard=1024 bytes cuts .* into [0-9,]+ shards"):
        reshard.plan(source, "universal:chunk=1KiB,shard=1KiB")
    assert reshard.plan(source, "universal")["status"] == "ok"
    monkeypatch.setattr(module, "_MOST_CHUNKS", 100)
    with pytest.raises(UsageError, match=r"chunk=1024 bytes cuts .* chunks"):
        reshard.plan(source, "universal:chunk=1KiB")


def test_blocks_of_fp8_are_not_parted_from_their_scales(unpacked: Unpack, tmp_path: Path) -> None:
    """Stored raw, a later --dtype would take the bits for values."""
    given = unpacked("hf/deepseek_v3") / "fp8_mtp"
    with pytest.raises(FormatError, match="--dtype bf16"):
        reshard.convert(given, tmp_path / "store", "universal")
    reshard.convert(given, tmp_path / "store", "universal.hf", dtype="bf16")
    reshard.convert(given, tmp_path / "hf", "hf", dtype="bf16")
    store, plain = reshard.open(tmp_path / "store"), reshard.open(tmp_path / "hf")
    for name, _ in plain.logical:
        assert store[name][...].tobytes() == plain[name][...].tobytes()


def test_what_a_store_contradicts(whole: Path, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="tp=4"):
        reshard.convert(whole, tmp_path / "out", "megatron:tp2", given="universal:tp2")
    with pytest.raises(FormatError, match="--vocab-size"):
        reshard.convert(whole, tmp_path / "out", "megatron:tp2", vocab_size=7777)
    reshard.convert(whole, tmp_path / "out", "megatron:tp2", given="tp4pp2", vocab_size=121)


def test_a_store_of_a_later_version(store: Path) -> None:
    from reshard.converters.universal.nodes import sealed

    found = json.loads((store / "zarr.json").read_text())
    body = {k: v for k, v in found["attributes"]["reshard"].items() if k != "digest"}
    found["attributes"]["reshard"] = sealed({**body, "store": 2})
    (store / "zarr.json").write_text(json.dumps(found))
    with pytest.raises(FormatError, match="version 2"):
        reshard.open(store)


# --- compressed -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compressed(unpacked: Unpack, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("compressed") / "store"
    reshard.convert(unpacked("megatron/a-tp1pp1") / "dist", made, CUT, compress="zstd:9", workers=2)
    return made


def test_a_compressed_store_is_the_same_checkpoint(
    compressed: Path, unpacked: Unpack, tmp_path: Path
) -> None:
    """And smaller, and converts on to the same bytes."""
    given = unpacked("megatron/a-tp1pp1") / "dist"
    assert reshard.diff(given, compressed, extras=True)["differences"] == []
    assert reshard.verify(compressed)["findings"] == []
    reshard.convert(given, tmp_path / "plain", CUT)
    sizes = [sum(map(len, files_of(f).values())) for f in (compressed, tmp_path / "plain")]
    assert sizes[0] < sizes[1]
    for store in (compressed, tmp_path / "plain"):
        reshard.convert(store, tmp_path / f"by-{store.name}", "megatron:tp2")
    ours, theirs = (files_of(tmp_path / n) for n in ("by-store", "by-plain"))
    assert ours == theirs
    again = reshard.convert(given, compressed, CUT, compress="zstd:9")
    assert again["already"]


def test_a_part_of_a_compressed_store_is_read_by_its_chunks(
    compressed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = reshard.open(compressed)[MATRIX]
    whole, read = found[...], list[int]()
    real = Files.pread

    def counted(self: Files, name: str, offset: int, out: memoryview) -> None:
        read.append(len(out))
        real(self, name, offset, out)

    monkeypatch.setattr(Files, "pread", counted)
    part = found[3:5]
    assert part.tobytes() == whole[3:5].tobytes()
    assert 0 < sum(read) <= 2 * 2048
    assert sum(read) < whole.nbytes / 2


def test_a_damaged_chunk_of_a_compressed_store_is_an_error(
    compressed: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    shutil.copytree(compressed, store)
    shard = store / "param" / MATRIX / "c.0.0"
    raw = bytearray(shard.read_bytes())
    raw[9] ^= 1
    shard.write_bytes(raw)
    with pytest.raises(CorruptError, match=r"chunk \[0, 0\].*CRC-32C"):
        reshard.open(store)[MATRIX][...]


@pytest.mark.parametrize(
    ("to", "compress", "word"),
    [
        ("universal", "gzip", "write zstd"),
        ("universal", "zstd:0", "a level of 1 to 22"),
        ("megatron:tp1", "zstd", "only universal stores are compressed"),
    ],
)
def test_what_is_not_compressed(
    unpacked: Unpack, tmp_path: Path, to: str, compress: str, word: str
) -> None:
    with pytest.raises(UsageError, match=word):
        reshard.convert(
            unpacked("megatron/a-tp1pp1") / "dist", tmp_path / "out", to, compress=compress
        )


# --- memory --------------------------------------------------------------------------------------

#: VmHWM and not ru_maxrss, which a process has from the one that forked it.
_PEAK = """
import sys, reshard
reshard.convert(sys.argv[1], sys.argv[2], sys.argv[3], memory=int(sys.argv[4]))
print(next(x.split()[1] for x in open("/proc/self/status") if x.startswith("VmHWM")))
"""


def test_memory_stays_within_the_budget(tmp_path: Path) -> None:
    """512 MB of state into a store and out of it; peak RSS in MiB, the interpreter included."""
    source = tmp_path / "source"
    maker = [sys.executable, "-m", "benchmarks.make_megatron", "512MB", str(source)]
    subprocess.run(maker, cwd=ROOT, check=True, capture_output=True)
    for a, b, to in (("source", "store", "universal"), ("store", "back", "megatron:tp2pp2")):
        command = [sys.executable, "-c", _PEAK, str(tmp_path / a), str(tmp_path / b), to]
        done = subprocess.run([*command, str(64 << 20)], check=True, capture_output=True, text=True)
        assert int(done.stdout) / 1024 < 150
    shutil.rmtree(tmp_path)


def test_bf16_is_stored_as_uint16(whole: Path) -> None:
    found = json.loads((whole / f"param/{MATRIX}/zarr.json").read_text())
    assert (found["data_type"], found["attributes"]["dtype"]) == ("uint16", "bfloat16")
    assert reshard.open(whole)[MATRIX].dtype == ml_dtypes.bfloat16
    assert zarr3.data_type(named("float8_e4m3fn")) == "uint8"
