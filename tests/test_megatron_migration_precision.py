"""Masters stored as their low 16 bits (--use-precision-aware-optimizer): rebuilt, or refused.

Transformer Engine, which writes them, needs a GPU: the remainders here follow the rule of its
kernel and replace the masters in files that the frameworks wrote.
"""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import save

import reshard
from reshard.box import Box
from reshard.containers import dcp
from reshard.errors import CorruptError, FormatError
from support import mend_checksums
from test_megatron_dist import stacked, truth_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

Unpack = Callable[[str], Path]
Values = np.ndarray[Any, Any]
FR, DPR = "megatron/h-llama-tp2pp1dp2-fr", "megatron/h-llama-tp2pp1dp2-dpr"
ITERATION = "iter_0000003"


def remainders(masters: Values) -> Values:
    """What AdamFunctorMasterParamRemainder stores: the low half of the master's bits."""
    return (masters.view(np.uint32) & 0xFFFF).astype(np.uint16).view(np.int16)


def untied(masters: Values) -> Values:
    """No master half-way between two weights: torch rounds those to even, the kernel up."""
    bits = masters.view(np.uint32)
    odd = (bits >> 16) & 1
    tie = (bits & 0xFFFF) == 0x8000
    return np.where(tie, bits - 1 + 2 * odd, bits).astype(np.uint32).view(np.float32)


def in_place(folder: Path, change: Callable[[str, Values], Values]) -> None:
    """Rewrite the stored masters of a torch_dist folder, each chunk in its place."""
    metadata = dcp.read_metadata(folder)
    for key, entry in metadata.tensors.items():
        if not (key.startswith("optimizer.state.param.") or key.endswith(".param")):
            continue
        for chunk in entry.chunks:
            place = dcp.chunk_array(folder, key, chunk, entry.dtype)
            with (folder / place.file).open("r+b") as file:
                file.seek(place.offset)
                old = np.frombuffer(file.read(place.nbytes), np.float32)
                file.seek(place.offset)
                file.write(change(key, old).astype(np.float32).tobytes())
            mend_checksums(folder / place.file, chunk.place.offset, chunk.place.length)


def copied(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    for file in target.rglob("*"):
        file.chmod(0o755)
    return target


def upcast(source: Path, target: Path) -> Path:
    """A torch_dist run folder with its masters as whole numbers in fp32."""
    copied(source, target)
    in_place(target / ITERATION, lambda _, old: remainders(old))
    return target


class Planner(DefaultSavePlanner):
    """Writes objects that come as bytes as they are, as Megatron's planner does."""

    def transform_object(self, write_item: Any, object: Any) -> Any:
        return io.BytesIO(object) if isinstance(object, bytes) else object


def as_int16(source: Path, target: Path) -> Path:
    """The same with int16 arrays, written by torch's own writer."""
    folder = source / ITERATION
    metadata = dcp.read_metadata(folder)
    state: dict[str, Any] = {}
    for key, entry in metadata.tensors.items():
        whole = np.zeros(entry.shape, entry.dtype.numpy)
        for chunk in entry.chunks:
            place = dcp.chunk_array(folder, key, chunk, entry.dtype)
            raw = (folder / place.file).read_bytes()[place.offset : place.offset + place.nbytes]
            box = Box.at(chunk.offsets, chunk.sizes)
            at = tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))
            whole[at] = np.frombuffer(raw, entry.dtype.numpy).reshape(box.shape)
        if key.startswith("optimizer.state.param.") or key.endswith(".param"):
            whole = remainders(whole)
        kind = torch.bfloat16 if entry.dtype.name == "bfloat16" else None
        plain = whole.view(np.int16) if kind else whole
        state[key] = torch.from_numpy(plain).view(kind) if kind else torch.from_numpy(plain)
    for key, place in metadata.objects.items():
        if key.startswith("optimizer."):
            raw = (folder / place.file).read_bytes()[place.offset : place.offset + place.length]
            state[key] = raw
    made = target / ITERATION
    made.mkdir(parents=True)
    save(state, storage_writer=FileSystemWriter(made), planner=Planner(), no_dist=True)
    for name in ("metadata.json", "common.pt"):
        shutil.copy(folder / name, made / name)
    shutil.copy(source / "latest_checkpointed_iteration.txt", target)
    return target


@pytest.mark.parametrize("name", [FR, DPR])
@pytest.mark.parametrize("stored", [upcast, as_int16])
def test_masters_are_rebuilt(
    unpacked: Unpack, tmp_path: Path, name: str, stored: Callable[[Path, Path], Path]
) -> None:
    """Equal to the live run's masters, in any target, and fingerprinted as those."""
    whole = copied(unpacked(name) / "dist", tmp_path / "whole")
    in_place(whole / ITERATION, lambda _, old: untied(old))
    made = stored(whole, tmp_path / "made")
    truth = truth_of(unpacked(name))
    opened = reshard.open(made)
    seen = 0
    for (own, slot), logical in opened.tensors.items():
        if slot == "step":
            continue
        key, index = stacked(own, truth, slot)
        expected = truth[key, slot][index][tuple(slice(0, n) for n in logical.shape)]
        if slot == "master":
            seen += 1
            expected = untied(np.ascontiguousarray(expected))
        assert opened[own, slot][...].tobytes() == np.ascontiguousarray(expected).tobytes()
    assert seen > 20
    assert reshard.fingerprint(made) == reshard.fingerprint(whole)
    checked = reshard.verify(made)
    assert checked["status"] == "ok"
    assert "store_param_remainders" in str(checked["findings"])
    report = reshard.convert(made, tmp_path / "out", "tp1pp4")
    assert report["verified"]["tensors"] == report["verified"]["of"]
    assert reshard.diff(whole, tmp_path / "out")["differences"] == []


def test_legacy_buffers_are_rebuilt(unpacked: Unpack, tmp_path: Path) -> None:
    source = unpacked("megatron/b-tp2pp2dp2") / "torch"
    whole, made = (copied(source, tmp_path / name) for name in ("whole", "made"))
    for run, change in ((whole, untied), (made, lambda m: remainders(untied(m)))):
        for file in run.rglob("distrib_optim.pt"):
            state = torch.load(file, weights_only=False)
            for buffer in (v for k, v in state.items() if isinstance(k, int)):
                for held in buffer.values():
                    kept = change(held["param"].numpy()).astype(np.float32)
                    held["param"] = torch.from_numpy(kept)
            torch.save(state, file)
    assert reshard.fingerprint(made) == reshard.fingerprint(whole)


def test_the_kernels_rule() -> None:
    """A negative remainder: the weight was rounded up. Over all of fp32's sixteen low bits."""
    rng = np.random.default_rng(7)
    masters = rng.normal(0, 0.02, 1 << 16).astype(np.float32)
    bits = (masters.view(np.uint32) & 0xFFFF0000) | np.arange(1 << 16, dtype=np.uint32)
    masters = bits.view(np.float32)
    low = bits.astype(np.uint16).view(np.int16)
    weights = ((bits >> 16) + (low < 0)).astype(np.uint16)
    from reshard.converters.megatron.precision_aware import masters as rebuilt

    for stored in (low, low.astype(np.float32)):
        assert rebuilt(weights, stored).tobytes() == masters.tobytes()


def test_some_of_each_kind_is_refused(unpacked: Unpack, tmp_path: Path) -> None:
    made = copied(unpacked(FR) / "dist", tmp_path / "made")
    in_place(made / ITERATION, lambda key, old: remainders(old) if "linear" in key else old)
    with pytest.raises(FormatError, match=r"remainders of masters.*whole masters"):
        reshard.open(made)


def test_zeros_are_corruption_not_remainders(unpacked: Unpack, tmp_path: Path) -> None:
    made = copied(unpacked(FR) / "dist", tmp_path / "made")
    in_place(made / ITERATION, lambda _, old: np.zeros_like(old))
    with pytest.raises(CorruptError, match="do not round"):
        reshard.verify(made)


def test_zeros_where_args_say_remainders_are_refused(unpacked: Unpack, tmp_path: Path) -> None:
    made = copied(unpacked(FR) / "dist", tmp_path / "made")
    in_place(made / ITERATION, lambda _, old: np.zeros_like(old))
    common = torch.load(made / ITERATION / "common.pt", weights_only=False)
    common["args"].use_precision_aware_optimizer = True
    torch.save(common, made / ITERATION / "common.pt")
    with pytest.raises(FormatError, match="use_precision_aware_optimizer"):
        reshard.open(made)


def test_whole_masters_stay_what_they_are(unpacked: Unpack, tmp_path: Path) -> None:
    """The flag alone proves nothing: --use-precision-aware-optimizer can keep whole masters."""
    made = copied(unpacked(FR) / "dist", tmp_path / "made")
    common = torch.load(made / ITERATION / "common.pt", weights_only=False)
    common["args"].use_precision_aware_optimizer = True
    torch.save(common, made / ITERATION / "common.pt")
    assert reshard.fingerprint(made) == reshard.fingerprint(unpacked(FR) / "dist")
