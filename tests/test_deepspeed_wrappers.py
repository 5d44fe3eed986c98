"""Folders that Trainer, accelerate and Lightning put around a tag: one checkpoint in and out."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import reshard
from peers.deepspeed_truth import compared, equal_bits, truth_of
from reshard.errors import CorruptError

Unpacked = Callable[[str], Path]
TRAINER = ["trainer_ds_z2_dp2_bf16", "trainer_ds_z3_dp2_bf16", "trainer_ds_z2_dp2_bf16_dsoptim"]
EVERY = [
    *TRAINER, "accelerate_ds_z2_dp2_bf16", "lightning_ds_z2_dp2_bf16", "lightning_ds_z3_dp2_bf16",
]  # fmt: skip


@pytest.fixture
def saved(unpacked: Unpacked) -> Callable[[str], Path]:
    """Gives the folder that the wrapper wrote."""

    def folder(name: str) -> Path:
        (found,) = (unpacked(f"wrappers/{name}") / "ckpt").iterdir()
        return found

    return folder


@pytest.mark.parametrize("name", EVERY)
def test_every_tensor_and_step_is_the_live_runs(
    unpacked: Unpacked, saved: Callable[[str], Path], name: str
):
    opened = reshard.open(saved(name))
    fixture = unpacked(f"wrappers/{name}")
    wrong = [w for w, a, b in compared(opened, truth_of(fixture)) if not equal_bits(a, b)]
    assert wrong == []
    assert set(opened.steps.values()) == {6.0}
    assert opened.checkpoint.iteration == 6
    assert reshard.verify(saved(name))["status"] == "ok"


@pytest.mark.parametrize("name", EVERY)
def test_a_run_folder_leads_to_its_newest_checkpoint(
    unpacked: Unpacked, saved: Callable[[str], Path], tmp_path: Path, name: str
):
    run, newest = tmp_path / "run", saved(name)
    shutil.copytree(unpacked(f"wrappers/{name}") / "ckpt", run)
    older = newest.name.replace("6", "4")
    shutil.copytree(newest, run / older)
    assert newest.name in reshard.open(run).checkpoint.path.parts
    assert older in reshard.open(run, iteration=4).checkpoint.path.parts
    (run / newest.name / "latest").write_text("nowhere")
    with pytest.raises(CorruptError, match="nowhere"):
        reshard.open(run)


def test_what_lies_beside_the_tag_is_found(saved: Callable[[str], Path]):
    opened = reshard.open(saved("trainer_ds_z2_dp2_bf16"))
    extras = opened.extras
    assert extras["wrapper"] == "transformers' Trainer"
    assert extras["scheduler.last_epoch"] == 6
    assert extras["trainer_state.global_step"] == 6
    assert extras["rng_ranks"] == [0, 1]
    assert opened.checkpoint.opaque == ("training_args.bin",)
    accelerate = reshard.open(saved("accelerate_ds_z2_dp2_bf16")).extras
    assert accelerate["scheduler.last_epoch"] == 12
    lightning = reshard.open(saved("lightning_ds_z2_dp2_bf16")).extras
    assert lightning["client.pytorch-lightning_version"] == "2.6.6"
    assert lightning["client.global_step"] == 6


@pytest.mark.parametrize("name", TRAINER)
@pytest.mark.parametrize("target", ["zero1dp1", "zero2dp4", "zero3dp3"])
def test_a_trainer_folder_in_is_a_trainer_folder_out(
    saved: Callable[[str], Path], tmp_path: Path, name: str, target: str
):
    source, out = saved(name), tmp_path / "checkpoint-6"
    report: dict[str, Any] = reshard.convert(source, out, f"deepspeed:{target}")
    world = int(target[-1])
    assert (out / "latest").read_text() == "global_step6"
    assert (out / "global_step6").is_dir()
    kept = ["trainer_state.json", "config.json", "generation_config.json"]
    assert all((out / n).read_bytes() == (source / n).read_bytes() for n in kept)
    ranks = [f"rng_state_{r}.pth" for r in range(world)] if world > 1 else ["rng_state.pth"]
    assert sorted(p.name for p in out.glob("rng_state*")) == sorted(ranks)
    assert [x["what"] for x in report["losses"] if x["code"] == "opaque-dropped"] == [
        "training_args.bin"
    ]
    assert reshard.diff(source, out)["status"] == "equal"
    assert reshard.verify(out)["status"] == "ok"
    before, after = (read_scheduler(p) for p in (source, out))
    assert before == after


def read_scheduler(folder: Path) -> object:
    extras = reshard.open(folder).extras
    return {k: v for k, v in extras.items() if k.startswith("scheduler.")}


def test_the_bf16_copy_of_the_weights_goes_along(saved: Callable[[str], Path], tmp_path: Path):
    from safetensors import safe_open

    source, out = saved("trainer_ds_z3_dp2_bf16"), tmp_path / "out"
    reshard.convert(source, out, "deepspeed:zero3dp4")
    found = [safe_open(p / "model.safetensors", framework="pt") for p in (source, out)]
    assert sorted(found[0].keys()) == sorted(found[1].keys())
    for name in found[0].keys():  # noqa: SIM118  # safe_open is no mapping
        assert found[0].get_tensor(name).equal(found[1].get_tensor(name))


def test_random_states_are_kept_or_made_for_each_rank(saved: Callable[[str], Path], tmp_path: Path):
    import torch

    source, out = saved("trainer_ds_z2_dp2_bf16"), tmp_path / "out"
    reshard.convert(source, out, "deepspeed:zero2dp4")
    names = [f"rng_state_{r}.pth" for r in range(4)]
    allowed = [
        np._core.multiarray._reconstruct, np.ndarray, np.dtype, type(np.dtype(np.uint32)),
    ]  # fmt: skip
    with torch.serialization.safe_globals(allowed):  # as Trainer loads them
        states = [torch.load(out / n, weights_only=True) for n in names]
        first = torch.load(source / names[0], weights_only=True)
    assert torch.equal(states[0]["cpu"], first["cpu"])
    assert states[0]["python"] == first["python"]
    assert len({s["cpu"].numpy().tobytes() for s in states}) >= 3
    for state in states:
        torch.Generator().set_state(state["cpu"])
        np.random.RandomState().set_state(state["numpy"])
    assert states[2]["python"] != states[3]["python"]
    assert not torch.equal(states[2]["cpu"], states[3]["cpu"])


def test_accelerates_scheduler_counts_processes(saved: Callable[[str], Path], tmp_path: Path):
    source, out = saved("accelerate_ds_z2_dp2_bf16"), tmp_path / "step_6"
    reshard.convert(source, out, "deepspeed:zero2dp1")
    assert (out / "latest").read_text() == "pytorch_model"
    extras = reshard.open(out).extras
    assert extras["scheduler.last_epoch"] == 6
    assert extras["scheduler._step_count"] == 7
    assert [p.name for p in out.glob("random_states_*")] == ["random_states_0.pkl"]
    assert reshard.diff(source, out)["status"] == "equal"


def test_a_lightning_folder_keeps_its_shape(saved: Callable[[str], Path], tmp_path: Path):
    source, out = saved("lightning_ds_z3_dp2_bf16"), tmp_path / "x.ckpt"
    reshard.convert(source, out, "deepspeed:zero2dp3")
    assert (out / "latest").read_text() == "checkpoint"
    assert (out / "checkpoint" / "mp_rank_00_model_states.pt").exists()
    left = {k: v for k, v in reshard.open(source).extras.items() if k.startswith("client.")}
    right = {k: v for k, v in reshard.open(out).extras.items() if k.startswith("client.")}
    assert json.dumps(left) == json.dumps(right)


def test_a_stale_copy_of_the_weights_is_told(saved: Callable[[str], Path], tmp_path: Path):
    run = tmp_path / "checkpoint-6"
    shutil.copytree(saved("trainer_ds_z2_dp2_bf16"), run)
    path = run / "model.safetensors"
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(data)
    with pytest.raises(reshard.errors.ReplicaError, match=r"model\.safetensors|hold"):
        reshard.verify(run)


def test_a_trainer_folder_whose_tag_is_gone_is_told(saved: Callable[[str], Path], tmp_path: Path):
    run = tmp_path / "checkpoint-6"
    shutil.copytree(saved("trainer_ds_z2_dp2_bf16"), run)
    shutil.move(run / "global_step6", run / "elsewhere")
    with pytest.raises(CorruptError, match="global_step6"):
        reshard.open(run, "deepspeed")
