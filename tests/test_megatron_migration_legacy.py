"""Legacy checkpoints from before megatron-core: nested names, older orders of fused QKV rows."""

from __future__ import annotations

import shutil
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import reshard
from peers import MegatronCase, judge
from reshard.containers import torchfile
from reshard.containers.inert import TensorRef
from reshard.errors import FormatError

Unpack = Callable[[str], Path]
Values = np.ndarray[Any, Any]

V3, V0 = "megatron/e-legacy-tp2pp2", "megatron/e-legacy-v0-tp2pp2"
HEADS, DIM = 4, 8  # of one rank
SLOTS = ("param", "master", "exp_avg", "exp_avg_sq")


def test_version_0_is_version_3_in_every_slot(unpacked: Unpack) -> None:
    """A re-layout of the weights alone leaves the three other slots different."""
    old, new = unpacked(V0) / "torch", unpacked(V3) / "torch"
    found = reshard.diff(old, new)
    assert (found["differences"], found["compared"]) == ([], 208)
    assert reshard.fingerprint(old) == reshard.fingerprint(new)
    opened = reshard.open(old)
    for layer in range(4):
        for part in ("weight", "bias"):
            name = f"decoder.layers.{layer}.self_attention.linear_qkv.{part}"
            for slot in SLOTS:
                assert opened[name, slot][...].tobytes() == (
                    reshard.open(new)[name, slot][...].tobytes()
                )


def test_the_stored_rows_of_version_0_differ_in_every_slot(unpacked: Unpack) -> None:
    """Were one slot alike in both fixtures, the test above could not see it left as it is."""
    for old, new in zip(rank_files(unpacked(V0)), rank_files(unpacked(V3)), strict=True):
        seen = 0
        for (a, mine), (b, theirs) in zip(fused(old), fused(new), strict=True):
            assert a == b
            assert mine.tobytes() != theirs.tobytes(), a
            assert mine.tobytes() == reordered(theirs, 0).tobytes(), a
            seen += 1
        assert seen == 2 * 2 * 4


def rank_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("torch/iter_*/mp_rank_*/model_optim_rng.pt"))


def refs_of(file: torchfile.TorchFile) -> Iterator[tuple[str, TensorRef]]:
    """Every fused QKV weight and bias of a rank file, and its optimizer's copies."""
    root: Any = file.root
    for key, ref in root["model"]["language_model"]["encoder"].items():
        if "query_key_value" in key and isinstance(ref, TensorRef):
            yield key, ref
    optimizer = root["optimizer"]
    for i, group in enumerate(optimizer["fp32_from_fp16_params"]):
        for j, ref in enumerate(group):
            if ref.shape[0] == 3 * HEADS * DIM:
                yield f"master {i} {j}", ref
    for pid, state in optimizer["optimizer"]["state"].items():
        for slot in ("exp_avg", "exp_avg_sq"):
            if state[slot].shape and state[slot].shape[0] == 3 * HEADS * DIM:
                yield f"{slot} {pid}", state[slot]


def fused(path: Path) -> Iterator[tuple[str, Values]]:
    file = torchfile.load(path)
    for name, ref in refs_of(file):
        yield name, np.asarray(file.read(ref))


def reordered(rows: Values, version: int) -> Values:
    """Rows of today's order (head, part, dim) in that of an older version.

    The inverse of fix_query_key_value_ordering, megatron/training/checkpointing.py @ core_v0.16.1.
    """
    counted = rows.reshape(HEADS, 3, DIM, -1)
    axes = {0: (1, 0, 2, 3), 1: (0, 2, 1, 3), 2: (0, 1, 2, 3)}[version]
    return np.ascontiguousarray(counted.transpose(axes)).reshape(rows.shape)


def as_version(source: Path, target: Path, version: int) -> Path:
    """A copy of a version 3 run whose fused rows lie as in `version`, which it says."""
    shutil.copytree(source / "torch", target)
    for path in target.rglob("model_optim_rng.pt"):
        path.chmod(0o644)
        file = torchfile.load(path)
        with path.open("r+b") as out:
            for key, ref in refs_of(file):
                array = file.array(ref, key)
                out.seek(array.offset)
                out.write(reordered(np.asarray(file.read(ref)), version).tobytes())
        with zipfile.ZipFile(path) as archive:
            bodies = []
            for info in archive.infolist():
                with archive.open(info) as member:
                    member._expected_crc = None  # type: ignore[attr-defined]  # rows were moved
                    bodies.append((info.filename, member.read()))
        with zipfile.ZipFile(path, "w") as archive:
            for name, body in bodies:
                if name.endswith("/data.pkl"):
                    body = saying(body, version)
                archive.writestr(name, body)
    return target


def saying(pickled: bytes, version: int) -> bytes:
    """The pickle with another checkpoint_version."""
    at = pickled.index(b"checkpoint_version")
    old, new = (b"G" + struct.pack(">d", v) for v in (3.0, float(version)))
    at = pickled.index(old, at)
    return pickled[:at] + new + pickled[at + len(old) :]


@pytest.mark.parametrize("version", [1, 2])
def test_versions_1_and_2_are_version_3(unpacked: Unpack, tmp_path: Path, version: int) -> None:
    """No public tag writes them: derived from version 3 by the inverse of Megatron's own rule."""
    made = as_version(unpacked(V3), tmp_path / "made", version)
    assert reshard.diff(made, unpacked(V3) / "torch")["differences"] == []
    assert reshard.verify(made)["findings"] == []


def test_an_unknown_version_is_refused(unpacked: Unpack, tmp_path: Path) -> None:
    made = as_version(unpacked(V3), tmp_path / "made", 2)
    for path in made.rglob("model_optim_rng.pt"):
        body = path.read_bytes()
        path.write_bytes(body.replace(struct.pack(">d", 2.0), struct.pack(">d", 4.0)))
    with pytest.raises(FormatError, match=r"checkpoint_version 4\.0 is not known"):
        reshard.open(made)


#: nested name -> megatron-core's, of the layers; axis of tensor parallelism
RENAMED = {
    "input_norm.weight": ("input_layernorm.weight", None),
    "input_norm.bias": ("input_layernorm.bias", None),
    "self_attention.query_key_value.weight": ("self_attention.linear_qkv.weight", 0),
    "self_attention.query_key_value.bias": ("self_attention.linear_qkv.bias", 0),
    "self_attention.dense.weight": ("self_attention.linear_proj.weight", 1),
    "self_attention.dense.bias": ("self_attention.linear_proj.bias", None),
    "post_attention_norm.weight": ("pre_mlp_layernorm.weight", None),
    "post_attention_norm.bias": ("pre_mlp_layernorm.bias", None),
    "mlp.dense_h_to_4h.weight": ("mlp.linear_fc1.weight", 0),
    "mlp.dense_h_to_4h.bias": ("mlp.linear_fc1.bias", 0),
    "mlp.dense_4h_to_h.weight": ("mlp.linear_fc2.weight", 1),
    "mlp.dense_4h_to_h.bias": ("mlp.linear_fc2.bias", None),
}


def test_nested_names_are_megatron_cores(unpacked: Unpack) -> None:
    opened = reshard.open(unpacked(V3) / "torch")
    files = [torchfile.load(p) for p in rank_files(unpacked(V3))]
    roots: list[Any] = [f.root for f in files]

    def whole(stage: int, axis: int | None, *path: str) -> Values:
        parts = []
        for tp in range(2):
            held = roots[2 * tp + stage]["model"]
            for key in path:
                held = held[key]
            parts.append(np.asarray(files[2 * tp + stage].read(held)))
        return parts[0] if axis is None else np.concatenate(parts, axis)

    expected = {
        "embedding.position_embeddings.weight": whole(
            0, None, "language_model", "embedding", "position_embeddings", "weight"
        ),
        "embedding.word_embeddings.weight": whole(1, 0, "word_embeddings_for_head", "weight")[:121],
        "decoder.final_layernorm.bias": whole(
            1, None, "language_model", "encoder", "final_norm.bias"
        ),
        "decoder.final_layernorm.weight": whole(
            1, None, "language_model", "encoder", "final_norm.weight"
        ),
    }
    for layer in range(4):
        for old, (new, axis) in RENAMED.items():
            path = f"layers.{layer % 2}.{old}"
            expected[f"decoder.layers.{layer}.{new}"] = whole(
                layer // 2, axis, "language_model", "encoder", path
            )
    weights = {name for name, slot in opened.logical if slot == "param"}
    assert weights == expected.keys()
    for name, values in expected.items():
        assert opened[name][...].tobytes() == np.ascontiguousarray(values).tobytes(), name
    own = "language_model.encoder.layers.3.self_attention.query_key_value.weight"
    assert opened[own][...].tobytes() == (
        expected["decoder.layers.3.self_attention.linear_qkv.weight"].tobytes()
    )


def test_todays_megatron_loads_them(unpacked: Unpack, tmp_path: Path) -> None:
    """megatron-core 0.16.1, optimizer included, whichever version the rows came from."""
    cases = []
    for name, truth in ((V3, V0), (V0, V3)):
        for to, degrees in (("tp1pp1", {}), ("tp2pp4", {"tp": 2, "pp": 4})):
            out = tmp_path / f"{Path(name).name}-{to}"
            reshard.convert(unpacked(name) / "torch", out, f"megatron:{to}")
            other = tmp_path / f"{Path(truth).name}-{to}"
            cases.append(
                MegatronCase(name=out.name, checkpoint=out, truth=other, steps=1, **degrees)
            )
    for result in judge(cases, tmp_path / "judge"):
        assert result["error"] is None, result
        assert result["different"] == result["unrounded"] == [], result
        assert result["slots"] == ["exp_avg", "exp_avg_sq", "master", "model"]
        assert result["adam_steps"] == [3]
        assert result["ok"], result


def test_it_goes_on_as_a_legacy_checkpoint_of_megatron_core(
    unpacked: Unpack, tmp_path: Path
) -> None:
    reshard.convert(unpacked(V0) / "torch", tmp_path / "out", "megatron-legacy:tp4pp1")
    assert reshard.diff(unpacked(V3) / "torch", tmp_path / "out")["differences"] == []
    made = reshard.open(tmp_path / "out")
    assert made.extras["checkpoint_version"] == 3.0
    assert made.extras["args.use_legacy_models"] is False
