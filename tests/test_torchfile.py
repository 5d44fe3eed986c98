"""What torch.save writes we read, and what we draft torch.load takes: torch decides."""

from __future__ import annotations

import argparse
import io
import pickle
import random
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch.utils import serialization

from filling import fill
from reshard import dtypes
from reshard.containers import pickles, torchfile
from reshard.containers.torchfile import Global, Ordered, Record, TensorRef, new_tensor
from reshard.errors import CorruptError, FormatError, LayoutError, ReshardError, UnsafeError
from reshard.layout import StoredArray

Unpacked = Callable[[str], Path]


def raw(tensor: torch.Tensor) -> bytes:
    """The tensor's elements, row-major."""
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


def distinct(dtype: str, *shape: int) -> torch.Tensor:
    """A tensor of this torch dtype whose bytes differ from element to element."""
    element = dtypes.named(dtype)
    n = int(np.prod(shape)) * element.itemsize
    data = np.random.default_rng(n + 7).integers(0, 2 if dtype == "bool" else 251, n, np.uint8)
    kind = getattr(torch, dtype)
    return torch.from_numpy(data).view(kind).reshape(shape)


def typical() -> dict[str, Any]:
    """A state of many kinds of value."""
    base = distinct("float32", 24)
    return {
        "model": torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.LayerNorm(5)).state_dict(),
        "parameter": torch.nn.Parameter(distinct("float32", 7, 3)),
        "buffer": torch.nn.Parameter(distinct("float32", 2), requires_grad=False),
        "bf16": distinct("bfloat16", 3, 4),
        "fp8": distinct("float8_e4m3fn", 8),
        "view": base.view(4, 6)[1:, 2:],
        "base": base,
        "transposed": distinct("float16", 3, 5).t(),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(3.0),
        "five": distinct("int16", 2, 1, 3, 1, 2),
        "set": {1, 2},
        "frozen": frozenset({"a"}),
        "bytes": [b"\0\xff", b"", bytearray(b"\x01\x80")],
        "nested": (1, (2, 3), "x", [None, True, False], {}, (), []),
        "integers": [-1, 0, 255, 256, 65535, 65536, 2**31, -(2**31), 2**40, -(2**40), 2**100, -128,
                     -129, -(2**63)],
        "floats": [0.1, -0.0, float("inf"), 1e-300],
        "text": ["", "é\u20ac", "x" * 300, "two\nlines"],
        "complex": 1 + 2j,
        "dtype": torch.float32,
        "many": list(range(2500)),
    }  # fmt: skip


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "typical.pt"
    torch.save(typical(), path)
    return path


def copied(path: Path, folder: Path) -> Path:
    """Our draft of the file's object, filled from the file."""
    file = torchfile.load(path)
    assert isinstance(file.root, dict)
    draft, arrays = torchfile.draft("copy.pt", file.root, archive=path.stem)
    data = path.read_bytes()
    assert set(arrays) == set(file.storages)

    def bytes_of(array: StoredArray) -> bytes:
        at, nbytes = file.storages[array.key]
        return data[at : at + nbytes]

    return fill(draft, folder, bytes_of)


@pytest.mark.parametrize("dtype", [t.name for t in dtypes.TABLE])
@pytest.mark.parametrize("legacy", [False, True])
def test_every_dtype_is_read_where_torch_wrote_it(dtype: str, legacy: bool, tmp_path: Path) -> None:
    want = distinct(dtype, 3, 5)
    path = tmp_path / "t.pt"
    torch.save(
        {"a": want, "b": distinct(dtype, 2)}, path, _use_new_zipfile_serialization=not legacy
    )
    file = torchfile.load(path, "sub/t.pt")
    assert isinstance(file.root, dict)
    ref = file.root["a"]
    assert (ref.dtype.name, ref.shape, ref.kind) == (dtype, (3, 5), "Tensor")
    array = file.array(ref, "a", "rank 0")
    assert (array.file, array.shape, array.key, array.holder) == ("sub/t.pt", (3, 5), "a", "rank 0")
    assert path.read_bytes()[array.offset : array.offset + array.nbytes] == raw(want)
    assert file.read(ref).tobytes() == raw(want)


@pytest.mark.parametrize("legacy", [False, True])
def test_plain_values_come_out_as_themselves(legacy: bool, tmp_path: Path) -> None:
    path = tmp_path / "t.pt"
    state = typical()
    torch.save(state, path, _use_new_zipfile_serialization=not legacy)
    root = torchfile.load(path).root
    assert isinstance(root, dict)
    assert list(root) == list(state)
    for key in (
        "set",
        "frozen",
        "bytes",
        "nested",
        "integers",
        "floats",
        "text",
        "complex",
        "many",
    ):
        assert root[key] == state[key]
        assert type(root[key]) is type(state[key])
    assert root["dtype"] == Global("torch", "float32")
    assert repr(root["dtype"]) == "Global('torch', 'float32')"


@pytest.mark.parametrize("protocol", range(6))
def test_plain_values_of_every_protocol(protocol: int) -> None:
    state = {k: v for k, v in typical().items() if not isinstance(v, torch.Tensor | OrderedDict)}
    del state["dtype"]
    assert pickles.loads(pickle.dumps(state, protocol), "here") == state


def test_state_dict_keeps_its_metadata(saved: Path) -> None:
    root = torchfile.load(saved).root
    assert isinstance(root, dict)
    model = root["model"]
    assert isinstance(model, Ordered)
    assert list(model) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert isinstance(model.state, dict)
    assert model.state["_metadata"][""] == {"version": 1}


def test_views_share_a_storage_and_parameters_are_known(saved: Path) -> None:
    file = torchfile.load(saved)
    root = file.root
    assert isinstance(root, dict)
    view, base = root["view"], root["base"]
    assert view.key == base.key
    assert (view.offset, view.shape, view.stride) == (8, (3, 4), (6, 1))
    assert not view.contiguous
    with pytest.raises(LayoutError, match="not contiguous"):
        file.array(view, "view")
    array, first, strides = file.strided(view, "view")
    assert (array.shape, first, strides) == ((24,), 8, (6, 1))
    state = typical()
    assert file.read(view).tobytes() == raw(state["view"])
    assert file.read(root["transposed"]).tobytes() == raw(state["transposed"])
    assert file.read(root["bf16"]).dtype == ml_dtypes.bfloat16
    assert (root["parameter"].kind, root["parameter"].requires_grad) == ("Parameter", True)
    assert (root["buffer"].kind, root["buffer"].requires_grad) == ("Parameter", False)
    assert file.array(root["empty"], "empty").numel == 0
    assert file.array(root["scalar"], "scalar").shape == ()


def test_our_pickle_is_torchs_byte_for_byte(saved: Path) -> None:
    sizes: dict[str, int] = {}
    ours = torchfile.dumps(torchfile.load(saved).root, (), sizes)
    with zipfile.ZipFile(saved) as archive:
        assert ours == archive.read("typical/data.pkl")
        assert {k: archive.getinfo(f"typical/data/{k}").file_size for k in sizes} == sizes


def test_our_file_is_torchs_but_for_the_serialization_id(saved: Path, tmp_path: Path) -> None:
    ours, theirs = copied(saved, tmp_path).read_bytes(), saved.read_bytes()
    assert len(ours) == len(theirs)
    with zipfile.ZipFile(saved) as archive:
        info = archive.infolist()[-1]
    assert info.filename.endswith(".data/serialization_id")
    # the id, its two CRCs
    assert sum(a != b for a, b in zip(ours, theirs, strict=True)) <= 40 + 4 + 4
    assert ours[: info.header_offset] == theirs[: info.header_offset]


@pytest.mark.parametrize(
    "how", [{"weights_only": True}, {"weights_only": False}, {"weights_only": True, "mmap": True}]
)
def test_torch_loads_our_draft(how: Any, saved: Path, tmp_path: Path) -> None:
    torch.serialization.add_safe_globals([frozenset, bytes])
    path = copied(saved, tmp_path)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        assert all(info.compress_type == zipfile.ZIP_STORED for info in archive.infolist())
    want, got = typical(), torch.load(path, **how)
    assert list(got) == list(want)
    for key, value in want.items():
        if isinstance(value, torch.Tensor):
            assert type(got[key]) is type(value)
            assert (got[key].dtype, got[key].stride()) == (value.dtype, value.stride())
            assert got[key].requires_grad == value.requires_grad
            assert raw(got[key]) == raw(value)
        elif key == "model":
            assert type(got[key]) is OrderedDict
            assert got[key]._metadata == value._metadata
            assert list(got[key]) == list(value)
        else:
            assert got[key] == value
            assert type(got[key]) is type(value)
    assert got["view"].untyped_storage().data_ptr() == got["base"].untyped_storage().data_ptr()


def test_data_is_aligned_and_new_tensors_have_their_shape(tmp_path: Path) -> None:
    bf16 = dtypes.BFLOAT16
    obj = {
        "w": new_tensor((3, 5), bf16, "0"),
        "tied": new_tensor((3, 5), bf16, "0"),
        "p": new_tensor((7,), dtypes.FLOAT32, "1", kind="Parameter", requires_grad=True),
        "step": new_tensor((), dtypes.FLOAT32, "2"),
    }
    step = np.float32(12).tobytes()
    draft, arrays = torchfile.draft("m.pt", obj, values={"2": step})
    assert [(a.shape, a.dtype.name, a.offset % 64) for a in draft.arrays] == [
        ((3, 5), "bfloat16", 0),
        ((7,), "float32", 0),
    ]
    assert set(arrays) == {"0", "1"}
    want = {"0": distinct("bfloat16", 3, 5), "1": distinct("float32", 7)}
    path = fill(draft, tmp_path, lambda array: raw(want[array.key]))
    got = torch.load(path, weights_only=True)
    assert raw(got["w"]) == raw(got["tied"]) == raw(want["0"])
    assert got["w"].data_ptr() == got["tied"].data_ptr()
    assert type(got["p"]) is torch.nn.Parameter
    assert raw(got["p"]) == raw(want["1"])
    assert got["step"].item() == 12


def test_drafts_of_more_than_4_gib_use_zip64(tmp_path: Path) -> None:
    big = 1_100_000_000  # float32: 4.4 GB, of which nothing is written
    obj = {
        "big": new_tensor((big,), dtypes.FLOAT32, "0"),
        "far": new_tensor((3,), dtypes.FLOAT32, "1"),
    }
    draft, arrays = torchfile.draft("big.pt", obj)
    path = tmp_path / "big.pt"
    with path.open("wb") as out:
        out.truncate(draft.size)
        for at, literal in draft.literals:
            out.seek(at)
            out.write(literal)
        out.seek(arrays["1"].offset)
        out.write(np.arange(3, dtype=np.float32).tobytes())
    assert arrays["1"].offset > 1 << 32
    with zipfile.ZipFile(path) as archive:
        assert archive.getinfo("archive/data/0").file_size == big * 4
    for calculate in (False, True):
        serialization.config.load.calculate_storage_offsets = calculate
        try:
            got = torch.load(path, weights_only=True, mmap=True)
        finally:
            serialization.config.load.calculate_storage_offsets = False
        assert got["far"].tolist() == [0, 1, 2]
        assert got["big"].shape == (big,)
    file = torchfile.load(path)
    assert isinstance(file.root, dict)
    assert file.array(file.root["far"], "far").offset == arrays["1"].offset


class Custom:
    """A class of this test, as a client state may hold."""

    def __init__(self) -> None:
        self.inner = {"a": (1, 2)}


def test_unknown_classes_become_records(tmp_path: Path) -> None:
    path = tmp_path / "t.pt"
    state = {
        "args": argparse.Namespace(lr=0.1, dtype=torch.bfloat16),
        "custom": Custom(),
        "path": Path("a/b"),
        "array": np.arange(6).reshape(2, 3),
        "size": torch.Size([3, 4]),
        "device": torch.device("cpu"),
    }
    torch.save(state, path)
    root = torchfile.load(path).root
    assert isinstance(root, dict)
    args, custom, array = root["args"], root["custom"], root["array"]
    assert isinstance(args, Record)
    assert args.type == Global("argparse", "Namespace")
    assert args.fields == {"lr": 0.1, "dtype": Global("torch", "bfloat16")}
    assert args.get("lr") == 0.1
    assert args.get("missing", 3) == 3
    assert custom.type.path == f"{__name__}.Custom"
    assert custom.fields == {"inner": {"a": (1, 2)}}
    assert array.type.name == "_reconstruct"
    assert array.state[1] == (2, 3)
    assert root["size"] == (3, 4)
    assert root["device"].args == ("cpu",)
    names = {name.path for name in torchfile.globals_in(root)}
    assert {"argparse.Namespace", "torch.bfloat16", f"{__name__}.Custom", "numpy.dtype"} <= names


def test_nested_classes_and_enum_members_keep_their_dotted_name() -> None:
    data = pickle.dumps(OuterClass.Inner(), 2)
    record = pickles.loads(data, "here")
    assert isinstance(record, Record)
    assert record.type == Global(__name__, "OuterClass.Inner")
    again = pickle.loads(torchfile.dumps(record, {record.type.path}, {}))
    assert isinstance(again, OuterClass.Inner)


class OuterClass:
    class Inner:
        pass


def test_records_are_written_as_they_came_if_allowed(tmp_path: Path) -> None:
    state = {"args": argparse.Namespace(lr=0.1, names=["a"]), "array": np.arange(6).reshape(2, 3)}
    buffer = io.BytesIO()
    torch.save(state, buffer)
    path = tmp_path / "t.pt"
    path.write_bytes(buffer.getvalue())
    root: Any = torchfile.load(path).root
    with pytest.raises(UnsafeError, match=r"args.*argparse\.Namespace"):
        torchfile.draft("t.pt", root)
    allow = {name.path for name in torchfile.globals_in(root)}
    draft, _ = torchfile.draft("again.pt", root, allow=allow)
    got = torch.load(fill(draft, tmp_path, lambda array: b""), weights_only=False)
    assert got["args"] == state["args"]
    assert got["array"].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_cycles_are_read_and_written() -> None:
    loop: list[Any] = []
    loop.append((loop, {"again": loop}))
    read = pickles.loads(pickle.dumps(loop, 2), "here")
    assert isinstance(read, list)
    assert read[0][0] is read
    assert torchfile.globals_in(read) == set()
    again = pickle.loads(torchfile.dumps(read, (), {}))
    assert again[0][0] is again
    assert again[0][1]["again"] is again


def test_live_objects_and_bad_names_are_never_written() -> None:
    for value in (object(), Path("x"), print, int, np.float32(1)):
        with pytest.raises(UnsafeError, match="cannot be written"):
            torchfile.dumps({"a": value}, (), {})
    for name in ("system\nos", "a b", ""):
        with pytest.raises(UnsafeError, match="not a name"):
            torchfile.dumps(Global("os", name), {f"os.{name}"}, {})
    with pytest.raises(UnsafeError, match=r"a\[1\]: the name os\.system"):
        torchfile.dumps({"a": [1, Global("os", "system")]}, (), {})
    with pytest.raises(UnsafeError, match=r"os\.system"):
        torchfile.dumps({Record(Global("os", "system")): 1}, (), {})


def test_deep_values_are_refused_not_crashed_on() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(CorruptError, match="too deeply"):
        torchfile.dumps(deep, (), {})
    assert torchfile.globals_in(deep) == set()


def test_storages_must_agree() -> None:
    two = [new_tensor((3,), dtypes.FLOAT32, "0"), new_tensor((4,), dtypes.FLOAT32, "0")]
    with pytest.raises(CorruptError, match="storage 0"):
        torchfile.draft("t.pt", two)
    with pytest.raises(LayoutError, match="storage 0"):
        torchfile.draft("t.pt", two[0], values={"0": b"x"})


@pytest.mark.parametrize("legacy", [False, True])
def test_a_file_cut_anywhere_is_refused(legacy: bool, tmp_path: Path) -> None:
    path = tmp_path / "t.pt"
    torch.save({"a": distinct("float32", 40)}, path, _use_new_zipfile_serialization=not legacy)
    data = path.read_bytes()
    for n in range(0, len(data), 7):
        path.write_bytes(data[:n])
        with pytest.raises(CorruptError, match=r"t\.pt"):
            torchfile.load(path)
    path.write_bytes(data + b"\0")
    with pytest.raises(CorruptError):
        torchfile.load(path)


def test_a_damaged_file_loads_or_is_refused_but_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "t.pt"
    torch.save({"a": distinct("float32", 4), "b": [1, "x", (2.5, None)]}, path)
    data = path.read_bytes()
    for seed in range(400):
        rng = random.Random(seed)
        bad = bytearray(data)
        for _ in range(rng.choice((1, 3))):
            bad[rng.randrange(len(bad))] = rng.randrange(256)
        path.write_bytes(bad)
        error = refused(path)
        assert error is None or str(path) in str(error), f"seed {seed}"


def refused(path: Path) -> ReshardError | None:
    """How the file is refused, or None if it loads."""
    try:
        torchfile.load(path)
    except (CorruptError, FormatError) as error:
        return error
    return None


def test_forms_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "t.pt"
    old = bytearray(512)
    old[257:262] = b"ustar"
    for content, kind, words in (
        (bytes(old), FormatError, "tar archive"),
        (b"\x28\xb5\x2f\xfd" + b"\0" * 20, FormatError, "zstd"),
        (b"hello, world", CorruptError, "no file of torch.save"),
        (pickle.dumps({"a": 1}), CorruptError, "no file of torch.save"),
        (b"", CorruptError, "empty"),
    ):
        path.write_bytes(content)
        with pytest.raises(kind, match=words):
            torchfile.load(path)
    with pytest.raises(CorruptError, match="cannot be opened"):
        torchfile.load(tmp_path / "none.pt")


def test_a_blob_inside_a_file_is_read_at_its_place(tmp_path: Path) -> None:
    want = distinct("int64", 3, 2)
    buffer = io.BytesIO()
    torch.save(want, buffer)
    path = tmp_path / "x.distcp"
    path.write_bytes(b"j" * 77 + buffer.getvalue() + b"more")
    file = torchfile.load(path, "x.distcp", 77, len(buffer.getvalue()))
    assert isinstance(file.root, TensorRef)
    array = file.array(file.root, "w")
    assert path.read_bytes()[array.offset : array.offset + array.nbytes] == raw(want)
    with pytest.raises(CorruptError, match="has only"):
        torchfile.load(path, "x.distcp", 77, 5000)


@pytest.mark.parametrize(
    "name", ["megatron/a-tp2pp4", "megatron/b-tp2pp2dp2", "megatron/e-legacy-v0-tp2pp2"]
)
def test_megatron_files_are_read_whole(name: str, unpacked: Unpacked) -> None:
    files = sorted(unpacked(name).rglob("*.pt"))
    assert files
    for path in files:
        file = torchfile.load(path)
        data = path.read_bytes()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # loading imports Megatron, which warns
            want = flat_tensors(torch.load(path, weights_only=False))
        got = flat_refs(file.root)
        assert len(want) == len(got)
        for tensor, ref in zip(want, got, strict=True):
            array = file.array(ref, "x")
            assert data[array.offset : array.offset + array.nbytes] == raw(tensor)


def flat_tensors(obj: object) -> list[torch.Tensor]:
    """All tensors in dicts, lists and tuples, in order."""
    if isinstance(obj, torch.Tensor):
        return [obj]
    if isinstance(obj, dict):
        obj = list(obj.values())
    return [t for part in obj for t in flat_tensors(part)] if isinstance(obj, list | tuple) else []


def flat_refs(obj: object) -> list[TensorRef]:
    """The same for what we read."""
    if isinstance(obj, TensorRef):
        return [obj]
    if isinstance(obj, dict):
        obj = list(obj.values())
    return [t for part in obj for t in flat_refs(part)] if isinstance(obj, list | tuple) else []
