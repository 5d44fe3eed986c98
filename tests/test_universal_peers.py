"""The universal store in the hands of zarr-python and tensorstore, and of nothing else."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorstore
import torch
import zarr
from safetensors.numpy import load_file, save_file

import reshard
from reshard.containers import zarr3

Unpack = Callable[[str], Path]
Array = np.ndarray[Any, Any]
CUT = "universal:chunk=2KiB,shard=8KiB,small=1KiB"


def by_zarr(store: Path, node: str) -> Array:
    """An array as zarr-python reads it."""
    found = zarr.open_group(str(store), mode="r")[node]
    assert isinstance(found, zarr.Array)
    return np.asarray(found[...])


def opened(store: Path, node: str, **options: Any) -> Any:
    """An array as tensorstore opens it."""
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{store}/{node}/"}}
    return tensorstore.open({**spec, **options}, read=True).result()


def by_tensorstore(store: Path, node: str) -> Array:
    return np.asarray(opened(store, node).read().result())


def strictly(store: Path, node: str) -> Array:
    """By tensorstore without its traps: a lost chunk is an error, zeros are written."""
    found = opened(store, node, fill_missing_data_reads=False, store_data_equal_to_fill_value=True)
    return np.asarray(found.read().result())


READERS = pytest.mark.parametrize("read", [by_zarr, by_tensorstore, strictly])


def tensors(
    store: Path, read: Callable[[Path, str], Array]
) -> Iterator[tuple[dict[str, Any], Array]]:
    """What is said of each tensor, and its bits, as docs/universal.md says to find them."""
    root = zarr.open_group(str(store), mode="r")
    for group in root.attrs["reshard"]["arrays"]:
        for node in root[group].attrs["reshard"]["arrays"]:
            attributes = root[f"{group}/{node}"].attrs
            kind = np.dtype(getattr(ml_dtypes, attributes["dtype"], attributes["dtype"]))
            values, row = read(store, f"{group}/{node}").view(kind), attributes["reshard"]
            for tensor in row.get("tensors", [row]):
                held = values
                if group == "packed":
                    shape = tensor.get("padded", tensor["shape"])
                    held = values[tensor["start"] :][: prod(shape)].reshape(shape)
                yield tensor, held[tuple(slice(n) for n in tensor["shape"])]


def truth_of(folder: Path) -> dict[str, Array]:
    """The tensors of the live run, gathered from it and not from a file, but for its steps."""
    found = load_file(folder / "truth.safetensors")
    return {k: v for k, v in found.items() if k.partition(".")[0] != "step"}


def stacked(key: str, truth: Collection[str]) -> tuple[str, tuple[int, ...]]:
    """The key under which a tensor is in the truth, and its place among layers and experts."""
    layer, expert = r"(decoder\.layers\.)(\d+)\.", r"(experts\.experts\.)(\d+)\."
    for stacks in ((), (layer,), (expert,), (layer, expert)):
        found, at = key, list[int]()
        for stack in stacks:
            m = re.search(stack, found)
            found, at = (found.replace(m[0], m[1]), [*at, int(m[2])]) if m else (found, at)
        if found in truth:
            return found, tuple(at)
    raise KeyError(key)


@READERS
@pytest.mark.parametrize("name", ["h-llama-tp2pp2", "h-moe-pp2ep2", "h-mla-tp2"])
def test_the_live_run_is_in_the_store(
    unpacked: Unpack, tmp_path: Path, name: str, read: Callable[[Path, str], Array]
) -> None:
    """Megatron's truth stacks layers and experts, as torch_dist does; the store does not."""
    fixture = unpacked(f"megatron/{name}")
    reshard.convert(fixture / "dist", tmp_path / "store", CUT)
    truth, seen = truth_of(fixture), dict[str, int]()
    for row, values in tensors(tmp_path / "store", read):
        slot = row["slot"].replace("param", "model")
        key, at = stacked(f"{slot}.{row.get('stored_name', row['name'])}", truth)
        expected = truth[key][at][tuple(slice(n) for n in values.shape)]
        assert (values.dtype, values.shape) == (expected.dtype, expected.shape)
        assert values.tobytes() == expected.tobytes()
        seen[key] = seen.get(key, 0) + values.size
    assert seen.keys() == truth.keys()


@READERS
@pytest.mark.parametrize("to", ["universal", CUT])
@pytest.mark.parametrize("compress", [None, "zstd", "zstd:19"])
def test_fsdp_truth_is_in_the_store(
    unpacked: Unpack,
    tmp_path: Path,
    read: Callable[[Path, str], Array],
    to: str,
    compress: str | None,
) -> None:
    fixture = unpacked("dcp/fsdp2_w2_fp32")
    reshard.convert(fixture / "checkpoint", tmp_path / "store", to, compress=compress)
    truth = truth_of(fixture)
    for row, values in tensors(tmp_path / "store", read):
        expected = truth.pop(f"{row['slot'].replace('param', 'model')}.{row['name']}")
        assert (values.dtype, values.shape) == (expected.dtype, expected.shape)
        assert values.tobytes() == expected.tobytes()
    assert not truth


@READERS
def test_every_dtype(tmp_path: Path, read: Callable[[Path, str], Array]) -> None:
    """bf16 and float8 as unsigned integers; -0.0, NaN payloads and zeros as they are."""
    kinds = ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float16", "float32", "float64"]
    kinds += ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
    rng = np.random.default_rng(3)
    made: dict[str, Array] = {"bool": rng.integers(0, 2, (50, 50)).astype(bool)}
    for kind in kinds:
        dtype = np.dtype(getattr(ml_dtypes, kind, kind))
        raw = rng.integers(0, 256, 2500 * dtype.itemsize, np.uint8)
        made[kind] = raw.view(dtype).reshape(50, 50)
    made["zeros"] = np.zeros((40, 100), np.float32)
    made["minus"] = np.full((40, 100), -0.0, np.float32)
    state = {name: as_torch(values) for name, values in made.items()}
    torch.save({"model": state}, tmp_path / "state.pt")
    reshard.convert(tmp_path / "state.pt", tmp_path / "store", CUT)
    found = {row["name"]: values for row, values in tensors(tmp_path / "store", read)}
    assert found.keys() == made.keys()
    for name, values in made.items():
        assert found[name].dtype == values.dtype
        assert found[name].tobytes() == values.tobytes()


def as_torch(values: Array) -> torch.Tensor:
    """The same bits as a tensor."""
    raw = torch.from_numpy(np.ascontiguousarray(values).view(np.uint8).copy())
    return raw.view(getattr(torch, values.dtype.name))


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store with one matrix of ones, 16 chunks in 4 shards."""
    source = tmp_path / "source"
    source.mkdir()
    save_file({"w": np.ones((64, 128), np.float32)}, source / "model.safetensors")
    (source / "config.json").write_text("{}")
    reshard.convert(source, tmp_path / "store", CUT)
    return tmp_path / "store"


def test_a_flipped_bit_is_seen_by_both(store: Path) -> None:
    path = store / "param/w/c.0.0"
    data = bytearray(path.read_bytes())
    data[3000] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="checksum"):
        by_zarr(store, "param/w")
    with pytest.raises(ValueError, match="Digest mismatch"):
        by_tensorstore(store, "param/w")


def test_a_lost_shard_is_zeros_to_others_and_an_error_here(store: Path) -> None:
    """The trap this reader does not have: zarr's fill value stands for what is lost."""
    (store / "param/w/c.1.0").unlink()
    for read in (by_zarr, by_tensorstore):
        assert np.count_nonzero(read(store, "param/w")) == 48 * 128
    with pytest.raises(ValueError, match="missing"):
        strictly(store, "param/w")
    with pytest.raises(reshard.ReshardError, match=r"shard \[1, 0\] is lost"):
        reshard.open(store)


def test_what_tensorstore_writes_into_a_store_is_read(store: Path) -> None:
    """Its shards have the same form, their chunks in any order; ours says what it finds."""
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{store}/param/w/"},
        "store_data_equal_to_fill_value": True,
    }
    values = np.arange(64 * 128, dtype=np.float32).reshape(64, 128)
    tensorstore.open(spec, write=True).result().write(values).result()
    assert reshard.open(store)["w"][...].tobytes() == values.tobytes()
    zarr.open_group(str(store), mode="r+")["param/w"][10:20] = 7
    values[10:20] = 7
    assert reshard.open(store)["w"][...].tobytes() == values.tobytes()
    with pytest.raises(reshard.ReshardError, match=r"digest|fingerprint|bytes"):
        reshard.verify(store)


def test_zarr_python_lists_the_store(store: Path) -> None:
    """It warns of the manifest beside the groups, which is no zarr node; groups list cleanly."""
    root = zarr.open_group(str(store), mode="r")
    assert list(root["param"].array_keys()) == ["w"]
    assert root["param/w"].shape == (64, 128)
    assert root.attrs["reshard"]["arrays"] == ["param"]


def test_a_shard_cut_short_is_seen_by_all(store: Path) -> None:
    path = store / "param/w/c.1.0"
    path.write_bytes(path.read_bytes()[:-1])
    for read in (by_zarr, by_tensorstore):
        with pytest.raises(ValueError, match=r"checksum|[Dd]igest|DATA_LOSS"):
            read(store, "param/w")
    with pytest.raises(reshard.ReshardError, match="cut short"):
        reshard.open(store)["w"][...]


def test_an_empty_index_entry_is_zeros_to_others(store: Path) -> None:
    path = store / "param/w/c.1.0"
    data = bytearray(path.read_bytes())
    index = bytes([255] * 16) + bytes(data[-52:-4])
    data[-68:] = index + zarr3.crc32c(index).to_bytes(4, "little")
    path.write_bytes(data)
    for read in (by_zarr, by_tensorstore):
        assert np.count_nonzero(read(store, "param/w")) == 60 * 128
    with pytest.raises(ValueError, match="missing"):
        strictly(store, "param/w")
    with pytest.raises(reshard.ReshardError, match=r"chunk \[4, 0\] is lost"):
        reshard.open(store)["w"][...]
