"""torch.distributed.checkpoint folders: torch's are read to the byte, ours are loaded by torch."""

from __future__ import annotations

import io
import json
import pickle
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.filesystem import (
    FileSystemReader,
    FileSystemWriter,
    SerializationFormat,
)
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.metadata import Metadata as TorchMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from filling import fill
from reshard.containers import dcp
from reshard.containers.dcp import Chunk, Metadata, MetadataDraft, ObjectItem, Place, TensorItem
from reshard.containers.inert import Global, Record, globals_in
from reshard.containers.slim import slimmed
from reshard.dtypes import named
from reshard.errors import CorruptError, FormatError, ReshardError, UnsafeError
from reshard.layout import StoredArray
from support import ROOT

Unpacked = Callable[[str], Path]

#: One process is what these tests mean.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

FOLDERS = [
    "dcp/fsdp2_w2_fp32",
    "dcp/fsdp2_w4_uneven",
    "dcp/tp_only_w2",
    "megatron/a-tp2pp4",
    "megatron/b-tp2pp2dp2-dpr",
    "megatron/g-v012-fsms-tp2pp2dp2",
    "megatron/g-v019-tp2pp2dp2",
    "megatron/c-pp2ep2",
]


def checkpoint(folder: Path) -> Path:
    """The one DCP folder below a fixture."""
    (found,) = folder.rglob(dcp.METADATA)
    return found.parent


def raw(tensor: torch.Tensor) -> bytes:
    """The tensor's elements, row-major."""
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


def blob(folder: Path, place: Place) -> bytes:
    """A blob's bytes."""
    data = (folder / place.file).read_bytes()
    return data[place.offset : place.offset + place.length]


def chunks(metadata: Metadata) -> list[tuple[str, Chunk, Any]]:
    """Every chunk of every tensor, as `Blobs.arrays` takes them."""
    return [(k, c, entry.dtype) for k, entry in metadata.tensors.items() for c in entry.chunks]


def state() -> dict[str, Any]:
    """A nested state with dots in its keys."""
    rng = np.random.default_rng(5)
    return {
        "model": {
            "a.weight": torch.from_numpy(rng.normal(size=(7, 5)).astype(np.float32)),
            "b": torch.from_numpy(rng.integers(0, 9999, (3, 2, 4)).astype(np.int16)).view(
                torch.bfloat16
            ),
        },
        "step": torch.tensor(12.0),
        "optim": {"lr": 0.125, "betas": (0.9, 0.95), "names": ["x", "y"]},
    }


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    folder = tmp_path / "saved"
    save(state(), storage_writer=FileSystemWriter(folder), no_dist=True)
    return folder


@pytest.mark.parametrize("name", FOLDERS)
def test_metadata_says_what_torch_reads(name: str, unpacked: Unpacked) -> None:
    folder = checkpoint(unpacked(name))
    ours = dcp.read_metadata(folder)
    if name == "megatron/g-v012-fsms-tp2pp2dp2":  # its metadata names Megatron's classes
        pytest.importorskip("megatron.core", exc_type=ImportError)
    theirs = load_metadata(folder)
    assert ours.version == theirs.version
    assert ours.planner_data == theirs.planner_data
    want_tensors = {
        k: e for k, e in theirs.state_dict_metadata.items() if isinstance(e, TensorStorageMetadata)
    }
    assert list(ours.tensors) == list(want_tensors)
    for key, entry in ours.tensors.items():
        want = want_tensors[key]
        assert entry.shape == tuple(want.size)
        assert f"torch.{entry.dtype.name}" == str(want.properties.dtype)
        kept = [c for c in want.chunks if 0 not in c.sizes]
        assert [(c.offsets, c.sizes) for c in entry.chunks] == [
            (tuple(c.offsets), tuple(c.sizes)) for c in kept
        ]
        for chunk in entry.chunks:
            info = theirs.storage_data[MetadataIndex(key, chunk.offsets)]
            assert chunk.place == (info.relative_path, info.offset, info.length, ())
    for key, place in ours.objects.items():
        assert isinstance(theirs.state_dict_metadata[key], BytesStorageMetadata)
        info = theirs.storage_data[MetadataIndex(key)]
        assert place == (info.relative_path, info.offset, info.length, ())


def load_metadata(folder: Path) -> TorchMetadata:
    """The metadata as torch unpickles it."""
    with warnings.catch_warnings(), (folder / dcp.METADATA).open("rb") as file:
        warnings.simplefilter("ignore")
        metadata = pickle.load(file)
    assert isinstance(metadata, TorchMetadata)
    return metadata


@pytest.mark.parametrize("name", FOLDERS)
def test_every_chunk_is_found_at_its_bytes(name: str, unpacked: Unpacked) -> None:
    folder = checkpoint(unpacked(name))
    metadata = dcp.read_metadata(folder)
    wanted = chunks(metadata)
    arrays = dcp.Blobs(folder).arrays(wanted)
    assert len(arrays) == len(wanted)
    files = {path.name: path.read_bytes() for path in folder.glob("*.distcp")}
    for (key, chunk, dtype), array in zip(wanted, arrays, strict=True):
        place = chunk.place
        data = files[place.file][place.offset : place.offset + place.length]
        tensor = torch.load(io.BytesIO(data), weights_only=True)
        assert (array.file, array.shape, array.dtype) == (place.file, tuple(tensor.shape), dtype)
        assert array.key == key
        assert files[array.file][array.offset : array.offset + array.nbytes] == raw(tensor)


def test_one_chunk_alone_is_found_at_the_same_place(saved: Path) -> None:
    wanted = chunks(dcp.read_metadata(saved))
    together = dcp.Blobs(saved).arrays(reversed(wanted))
    assert [dcp.chunk_array(saved, *item) for item in reversed(wanted)] == together


def test_big_blobs_are_read_at_their_edges_only(tmp_path: Path) -> None:
    big = torch.arange(100_000, dtype=torch.int64).reshape(50, 2000)
    two = {"a": big, "b": big + 7, "c": big.t().contiguous()}
    save(two, storage_writer=FileSystemWriter(tmp_path / "d"), no_dist=True)
    metadata = dcp.read_metadata(tmp_path / "d")
    arrays = dcp.Blobs(tmp_path / "d").arrays(chunks(metadata))
    for array in arrays:
        data = (tmp_path / "d" / array.file).read_bytes()
        assert data[array.offset : array.offset + array.nbytes] == raw(two[array.key])


def test_objects_are_read_inert(saved: Path) -> None:
    metadata = dcp.read_metadata(saved)
    got = {key: dcp.read_object(saved, place, key) for key, place in metadata.objects.items()}
    assert got == {
        "optim.lr": 0.125,
        "optim.betas": (0.9, 0.95),
        "optim.names": ["x", "y"],
    } or got == {"optim.lr": 0.125, "optim.betas": (0.9, 0.95), "optim.names": ("x", "y")}


@pytest.mark.parametrize("name", ["dcp/fsdp2_w2_fp32", "megatron/g-v012-fsms-tp2pp2dp2"])
def test_objects_of_the_frameworks_are_read(name: str, unpacked: Unpacked) -> None:
    folder = checkpoint(unpacked(name))
    objects = dcp.read_metadata(folder).objects
    assert objects
    for key, place in objects.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # as it may import Megatron first, which warns
            want = torch.load(io.BytesIO(blob(folder, place)), weights_only=False)
        got = dcp.read_object(folder, place, key)
        if isinstance(want, io.BytesIO):
            assert isinstance(got, Record)
            assert got.type == Global("_io", "BytesIO")
            assert isinstance(got.state, tuple)
            assert got.state[0] == want.getvalue()
        elif isinstance(want, int | float | str | bool | None):
            assert got == want


def test_compressed_blobs_are_found_inside_their_stream(tmp_path: Path) -> None:
    import zstandard

    folder = tmp_path / "z"
    writer = FileSystemWriter(folder, _extensions=[ZStandard()])
    save(state(), storage_writer=writer, no_dist=True)
    metadata = dcp.read_metadata(folder)
    want = {"model.a.weight": state()["model"]["a.weight"], "model.b": state()["model"]["b"]}
    for (key, chunk, _), array in zip(
        chunks(metadata), dcp.Blobs(folder).arrays(chunks(metadata)), strict=True
    ):
        assert (array.codec, array.packed) == ("zstd", chunk.place.length)
        assert array.offset == chunk.place.offset
        with zstandard.ZstdDecompressor().stream_reader(blob(folder, chunk.place)) as stream:
            data = stream.read()
        elements = data[array.inner : array.inner + array.nbytes]
        assert elements == raw(want.get(key, state()["step"]))
    assert dcp.read_object(folder, metadata.objects["optim.lr"]) == 0.125


def test_zstd_is_refused_by_name_without_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "z"
    writer = FileSystemWriter(folder, _extensions=[ZStandard()])
    save({"a": torch.zeros(3)}, storage_writer=writer, no_dist=True)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(FormatError, match="install the package zstandard"):
        dcp.Blobs(folder).arrays(chunks(dcp.read_metadata(folder)))


# ---------------------------------------------------------------------- writing


def rewritten(source: Path, folder: Path, rows: int, files: int) -> Metadata:
    """The checkpoint at `source` written by us in chunks of `rows` rows over `files` files."""
    reader = FileSystemReader(source)
    metadata = dcp.read_metadata(source)
    full = {k: torch.empty(e.shape, dtype=getattr(torch, e.dtype.name))
            for k, e in metadata.tensors.items()}  # fmt: skip
    load(full, storage_reader=reader, no_dist=True)
    items: list[list[TensorItem | ObjectItem]] = [[] for _ in range(files)]
    for key, place in metadata.objects.items():
        file = dcp.load_object(source, place, key)
        allow = {name.path for name in globals_in(file.root)}
        items[0].append(ObjectItem(key, file.root, allow, file.values()))
    for n, (key, entry) in enumerate(metadata.tensors.items()):
        for m, start in enumerate(range(0, entry.shape[0], rows) if entry.shape else [0]):
            offsets = (start, *[0] * (len(entry.shape) - 1)) if entry.shape else ()
            sizes = (min(rows, entry.shape[0] - start), *entry.shape[1:]) if entry.shape else ()
            items[(n + m) % files].append(TensorItem(key, offsets, sizes, entry.dtype))
    tensors: dict[str, list[Chunk]] = {key: [] for key in metadata.tensors}
    objects: dict[str, Place] = {}
    for n, part in enumerate(items):
        made = dcp.distcp_file(f"__{n}_0.distcp", part)
        where = {
            begin: item
            for item, begin in zip(part, made.begins, strict=True)
            if isinstance(item, TensorItem) and prod(item.sizes)
        }
        assert {a.offset: a.shape for a in made.draft.arrays} == {
            begin: item.sizes for begin, item in where.items()
        }

        def bytes_of(array: StoredArray, where: dict[int | None, TensorItem] = where) -> bytes:
            item = where[array.offset]
            box = tuple(slice(a, a + k) for a, k in zip(item.offsets, item.sizes, strict=True))
            return raw(full[item.key][box])

        fill(made.draft, folder, bytes_of)
        for item, place in zip(part, made.places, strict=True):
            if isinstance(item, TensorItem):
                tensors[item.key].append(Chunk(item.offsets, item.sizes, place))
            else:
                objects[item.key] = place
    entries = {k: replace(metadata.tensors[k], chunks=v) for k, v in tensors.items()}
    plan = metadata.planner_data
    assert plan is None or isinstance(plan, dict)
    draft = MetadataDraft(entries, objects, plan, save_id="an id")
    (folder / dcp.METADATA).write_bytes(draft.pickled())
    return Metadata(entries, objects, plan, "1.0.0")


@pytest.mark.parametrize("name", ["dcp/fsdp2_w4_uneven", "dcp/fsdp2_w2_fp32", "megatron/a-tp2pp4"])
def test_torch_loads_what_we_write(name: str, unpacked: Unpacked, tmp_path: Path) -> None:
    source, folder = checkpoint(unpacked(name)), tmp_path / "out"
    made = rewritten(source, folder, rows=37, files=3)
    again = dcp.read_metadata(folder)
    assert again == made
    want = {k: torch.empty(e.shape, dtype=getattr(torch, e.dtype.name))
            for k, e in made.tensors.items()}  # fmt: skip
    got = {key: torch.empty_like(tensor) for key, tensor in want.items()}
    load(want, storage_reader=FileSystemReader(source), no_dist=True)
    load(got, storage_reader=FileSystemReader(folder), no_dist=True)
    for key, tensor in want.items():
        assert raw(got[key]) == raw(tensor)
    objects: dict[str, Any] = dict.fromkeys(made.objects)
    if name.startswith("dcp/"):
        load(objects, storage_reader=FileSystemReader(folder), no_dist=True)
        for key, place in dcp.read_metadata(source).objects.items():
            assert objects[key] == torch.load(io.BytesIO(blob(source, place)), weights_only=False)


def test_our_metadata_unpickles_to_torchs_classes_and_values(saved: Path, tmp_path: Path) -> None:
    ours = dcp.read_metadata(saved)
    plan = ours.planner_data
    assert isinstance(plan, dict)
    theirs = load_metadata(saved)
    assert theirs.storage_meta is not None
    draft = MetadataDraft(ours.tensors, ours.objects, plan, theirs.storage_meta.save_id)
    (tmp_path / dcp.METADATA).write_bytes(draft.pickled())
    again = load_metadata(tmp_path)
    theirs.storage_meta.checkpoint_id = None
    assert again == theirs
    assert type(again.storage_meta) is type(theirs.storage_meta)
    assert set(map(type, again.storage_data)) == {MetadataIndex}
    hints = {(i.fqn, i.offset): i.index for i in theirs.storage_data}
    assert {(i.fqn, i.offset): i.index for i in again.storage_data} == hints
    chunk = next(e for e in again.state_dict_metadata.values() if hasattr(e, "chunks")).chunks[0]
    assert type(chunk) is ChunkStorageMetadata
    assert type(chunk.offsets) is type(chunk.sizes) is torch.Size


def test_older_module_names_and_missing_attributes_are_read(saved: Path) -> None:
    ours = dcp.read_metadata(saved)
    plan = ours.planner_data
    assert isinstance(plan, dict)
    data = MetadataDraft(ours.tensors, ours.objects, plan).pickled()
    module = b"torch.distributed.checkpoint.metadata\n"
    assert module in data
    for old in (b"torch.distributed._shard.checkpoint.metadata\n", b"megatron.core.x\n"):
        (saved / dcp.METADATA).write_bytes(
            data.replace(module, old).replace(b"storage_meta", b"another_attr")
        )
        again = dcp.read_metadata(saved)
        assert (again.tensors, again.objects) == (ours.tensors, ours.objects)
        assert set(again.other) == {"another_attr"}


def test_our_blob_is_torchs_but_for_the_serialization_id(tmp_path: Path) -> None:
    tensor = torch.arange(15, dtype=torch.float32).reshape(3, 5)
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    item = TensorItem("w", (0, 0), (3, 5), named("float32"))
    made = dcp.distcp_file("x.distcp", [ObjectItem("o", 1.5), item])
    path = fill(made.draft, tmp_path, lambda array: raw(tensor))
    place = made.places[1]
    assert place.offset == made.places[0].length
    ours = path.read_bytes()[place.offset : place.offset + place.length]
    theirs = buffer.getvalue()
    assert len(ours) == len(theirs)
    assert sum(a != b for a, b in zip(ours, theirs, strict=True)) <= 40 + 4 + 4


# ---------------------------------------------------------------------- refusals


def edited(folder: Path, edit: Callable[[Any], None]) -> None:
    """Lets a test change what `.metadata` says, with torch's own classes."""
    metadata = load_metadata(folder)
    edit(metadata)
    (folder / dcp.METADATA).write_bytes(pickle.dumps(metadata, 4))


def spoiled(folder: Path, edit: Callable[[Any], None]) -> ReshardError:
    """How the folder is refused after the edit, opening every chunk."""
    edited(folder, edit)
    with pytest.raises(ReshardError) as info:
        dcp.Blobs(folder).arrays(chunks(dcp.read_metadata(folder)))
    return info.value


def index(metadata: Any, key: str) -> Any:
    """The storage index of a key's only entry."""
    (found,) = (i for i in metadata.storage_data if i.fqn == key)
    return found


KEY = "model.a.weight"


def test_folders_without_metadata_are_told_apart(saved: Path, tmp_path: Path) -> None:
    (saved / dcp.METADATA).rename(saved / ".metadata.tmp")
    with pytest.raises(CorruptError, match="incomplete save"):
        dcp.read_metadata(saved)
    with pytest.raises(FormatError, match="no such folder"):
        dcp.read_metadata(tmp_path / "none")
    with pytest.raises(FormatError, match="not a torch"):
        dcp.read_metadata(tmp_path)


def test_a_missing_or_short_file_is_named_with_its_size(saved: Path) -> None:
    path = next(saved.glob("*.distcp"))
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(size - 1)
    with pytest.raises(CorruptError, match=rf"{path.name}: has {size - 1} bytes"):
        dcp.read_metadata(saved)
    path.unlink()
    with pytest.raises(CorruptError, match=f"{path.name} that .metadata names is missing"):
        dcp.read_metadata(saved)


@pytest.mark.parametrize("name", ["../x.distcp", "/etc/passwd", "a/../../x", "a\\b", "", "x\0y"])
def test_paths_that_leave_the_folder_are_unsafe(name: str, saved: Path) -> None:
    (saved.parent / "x.distcp").write_bytes(b"0" * 10_000_000)

    def edit(metadata: Any) -> None:
        metadata.storage_data[index(metadata, KEY)].relative_path = name

    assert isinstance(spoiled(saved, edit), UnsafeError)


def test_links_out_of_the_folder_are_unsafe(saved: Path) -> None:
    path = next(saved.glob("*.distcp"))
    shutil.move(path, saved.parent / "elsewhere")
    path.symlink_to(saved.parent / "elsewhere")
    with pytest.raises(UnsafeError, match="is a link"):
        dcp.read_metadata(saved)


def test_links_inside_the_folder_are_followed(saved: Path) -> None:
    path = next(saved.glob("*.distcp"))
    path.rename(saved / "blobs")
    path.symlink_to("blobs")
    assert len(dcp.Blobs(saved).arrays(chunks(dcp.read_metadata(saved)))) == 3


def test_entries_that_do_not_match_are_refused(saved: Path) -> None:
    original = (saved / dcp.METADATA).read_bytes()

    def lost(metadata: Any) -> None:
        del metadata.storage_data[index(metadata, KEY)]

    def extra(metadata: Any) -> None:
        info = metadata.storage_data[index(metadata, KEY)]
        metadata.storage_data[MetadataIndex(KEY, (3, 0))] = info

    def unlisted(metadata: Any) -> None:
        del metadata.state_dict_metadata[KEY]

    def outside(metadata: Any) -> None:
        metadata.state_dict_metadata[KEY].size = torch.Size([6, 5])

    def negative(metadata: Any) -> None:
        metadata.storage_data[index(metadata, KEY)].offset = -1

    def beyond(metadata: Any) -> None:
        metadata.storage_data[index(metadata, KEY)].length = 1 << 40

    def wrong_dtype(metadata: Any) -> None:
        metadata.state_dict_metadata[KEY].properties.dtype = torch.float16

    def wrong_shape(metadata: Any) -> None:
        metadata.state_dict_metadata[KEY].size = torch.Size([5, 7])
        metadata.state_dict_metadata[KEY].chunks[0].sizes = torch.Size([5, 7])

    def short(metadata: Any) -> None:
        metadata.storage_data[index(metadata, KEY)].length -= 1

    def shifted(metadata: Any) -> None:
        metadata.storage_data[index(metadata, KEY)].offset += 1
        metadata.storage_data[index(metadata, KEY)].length -= 1

    def swapped(metadata: Any) -> None:
        data = metadata.storage_data
        a, b = index(metadata, KEY), index(metadata, "model.b")
        data[a], data[b] = data[b], data[a]

    def an_object(metadata: Any) -> None:
        data = metadata.storage_data
        data[index(metadata, KEY)] = data[index(metadata, "optim.lr")]

    for edit, words in {
        lost: "no storage entry", extra: "belongs to no chunk", unlisted: "belongs to no chunk",
        outside: "outside shape", negative: "a storage entry is", beyond: "has .* bytes",
        wrong_dtype: "says float16", wrong_shape: r"says float32 \[5, 7\]", short: "zip archive",
        shifted: "zip directory is not where|end record", swapped: "says",
        an_object: "not a tensor",
    }.items():  # fmt: skip
        (saved / dcp.METADATA).write_bytes(original)
        error = spoiled(saved, edit)
        assert isinstance(error, CorruptError), edit.__name__
        assert re.search(words, str(error)), edit.__name__


def test_a_blob_that_differs_from_one_like_it_is_parsed_again(saved: Path, tmp_path: Path) -> None:
    two = {"a": torch.arange(6.0), "b": torch.arange(6.0) + 9}
    folder = tmp_path / "two"
    save(two, storage_writer=FileSystemWriter(folder), no_dist=True)
    metadata = dcp.read_metadata(folder)
    place = metadata.tensors["b"].chunks[0].place
    path = folder / place.file
    data = bytearray(path.read_bytes())
    at = data.index(b"FloatStorage", place.offset)
    data[at : at + 12] = b"IntStorage\n_"[:12]
    path.write_bytes(data)
    with pytest.raises(CorruptError):
        dcp.Blobs(folder).arrays(chunks(metadata))


def test_blobs_of_safetensors_are_refused_by_name(tmp_path: Path) -> None:
    writer = FileSystemWriter(tmp_path / "s", serialization_format=SerializationFormat.SAFETENSORS)
    save({"a": torch.arange(6.0)}, storage_writer=writer, no_dist=True)
    metadata = dcp.read_metadata(tmp_path / "s")
    with pytest.raises(FormatError, match="safetensors"):
        dcp.Blobs(tmp_path / "s").arrays(chunks(metadata))


def test_a_strided_chunk_is_refused_by_name(tmp_path: Path) -> None:
    turned = torch.arange(6.0).reshape(2, 3).t()
    save({"a": turned}, storage_writer=FileSystemWriter(tmp_path / "t"), no_dist=True)
    with pytest.raises(FormatError, match="row-major"):
        dcp.Blobs(tmp_path / "t").arrays(chunks(dcp.read_metadata(tmp_path / "t")))


# ---------------------------------------------------------------------- long pickles


def test_a_slimmed_pickle_loads_to_the_same_and_keeps_what_is_shared() -> None:
    """Memo indexes in one byte and in four, frames, long strings, an object shared many times."""
    shared = ["shared", (1, 2)]
    rows = [{"key": f"name {i}", "at": (i, i * 7), "same": shared} for i in range(70_000)]
    value = {"rows": rows, "long": "x" * 1000, "bytes": b"\x94h\x00j\x95" * 300, "last": rows[5]}
    data = pickle.dumps(value, 4)
    made = slimmed(data)
    assert len(made) < 0.95 * len(data)
    again = pickle.loads(made)
    assert again == value
    assert again["last"] is again["rows"][5]
    assert len({id(row["same"]) for row in again["rows"]}) == 1


def test_a_pickle_that_numbers_its_memo_otherwise_stays_as_it_is() -> None:
    for protocol in (0, 1, 2):
        data = pickle.dumps({"a": [1, "b"], "c": ("b",)}, protocol)
        assert slimmed(data) == data


def test_memory_of_many_chunks_stays_in_proportion(tmp_path: Path) -> None:
    """A million chunks of 100,000 tensors in 2048 files took 745 MiB; here a tenth of them.

    `python -m benchmarks.dcp_metadata FOLDER` measures it.
    """
    folder = tmp_path / "many"
    command = [sys.executable, "-m", "benchmarks.dcp_metadata", str(folder)]
    command += ["--tensors", "10000", "--chunks", "10", "--ranks", "128"]
    out = subprocess.run(command, check=True, capture_output=True, cwd=ROOT).stdout
    found = json.loads(out)
    assert found["chunks"] == 100_000
    assert found["peak_mib"] < 160


def test_a_key_that_is_no_utf_8_is_written_as_pickle_writes_it() -> None:
    """A lone surrogate is a text of Python's, and of pickle's (found by benchmarks/fuzz.py)."""
    entry = dcp.TensorEntry((4,), named("float32"), [dcp.Chunk((0,), (4,), dcp.Place("x", 0, 16))])
    assert (
        "\ud800".encode("utf-8", "surrogatepass")
        in dcp.MetadataDraft({"\ud800": entry}, {}).pickled()
    )
