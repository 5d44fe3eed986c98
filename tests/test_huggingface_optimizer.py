"""The optimizer beside a model folder's weights: whole, ignored by loaders, and trained on from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import reshard
from families import whole
from peers import MegatronCase, run_module
from peers import judge as judge_megatron
from peers.parity import ParityCase, judge
from reshard.errors import CorruptError, LossError, UnsafeError, UsageError
from reshard.format import OpenOptions, open_checkpoint
from reshard.tensor import TensorId

RUN = "megatron/h-llama-tp2pp2"
STEPS, RATES = 4, (0.003,) * 40


@pytest.fixture(scope="module")
def kept(unpacked, tmp_path_factory) -> Path:
    """A Megatron run as a model folder with its optimizer, in several shards."""
    out: Path = tmp_path_factory.mktemp("kept") / "model"
    reshard.convert(unpacked(RUN) / "dist", out, "hf:optimizer=yes", max_shard_size=200_000)
    return out


def equal(left, right):
    found = reshard.diff(left, right)
    return found["status"] == "equal" and found["compared"] > 0


def test_the_folder_holds_every_slot_group_and_step(unpacked, kept):
    source, made = open_checkpoint(unpacked(RUN) / "dist"), open_checkpoint(kept)
    assert sorted({t.slot for t in made.layout.tensors}) == [
        "exp_avg", "exp_avg_sq", "master", "param",
    ]  # fmt: skip
    assert set(made.steps.values()) == set(source.steps.values()) == {3}
    assert made.iteration == source.iteration == 3
    assert [g.options for g in made.groups] == [
        {k: list(v) if isinstance(v, tuple) else v for k, v in g.options.items()}
        for g in source.groups
    ]
    shards = sorted(p.name for p in (kept / "optimizer").glob("*.safetensors"))
    assert len(shards) > 1
    assert sum(p.stat().st_size for p in kept.glob("model*.safetensors")) > 0
    assert sorted(p.suffix for p in kept.iterdir() if "optimizer" in p.name) == [""]


@pytest.mark.proves("hf", "megatron", "training state")
def test_there_and_back_is_the_run(unpacked, kept, tmp_path):
    target = "megatron:pp2,vocab_divisor=1,spec=local,optim=non_distributed"
    reshard.convert(kept, tmp_path / "back", target)
    source = unpacked(RUN) / "dist"
    found = reshard.diff(source, tmp_path / "back")
    assert found["compared"] == 4 * 27
    # the schedule's own rates are left to the job (--override-opt_param-scheduler)
    assert {d["what"].partition(": ")[2] for d in found["differences"]} <= {"max_lr", "min_lr"}
    case = MegatronCase(
        name="back", checkpoint=tmp_path / "back", pp=2, truth=unpacked(RUN),
        args=source, override_schedule=True, padded_vocab=109,
    )  # fmt: skip
    (judged,) = judge_megatron([case], tmp_path)
    assert judged["error"] is None, judged["error"]
    assert judged["different"] == []
    assert judged["adam_steps"] == [3]
    assert judged["ok"]


@pytest.mark.proves("hf", "dcp", "training state")
@pytest.mark.parametrize("target", ["dcp:dp2,names=hf", "deepspeed:zero2dp2,names=hf"])
def test_by_way_of_the_folder_or_not_is_the_same(unpacked, kept, tmp_path, target):
    reshard.convert(unpacked(RUN) / "dist", tmp_path / "direct", target)
    reshard.convert(kept, tmp_path / "by", target)
    assert equal(tmp_path / "direct", tmp_path / "by")
    one, other = (open_checkpoint(tmp_path / n) for n in ("direct", "by"))
    assert one.steps == other.steps
    assert one.groups == other.groups


@pytest.mark.proves("dcp", "hf", "training state")
def test_a_wide_weight_that_is_written_narrow_keeps_its_width_as_a_master(unpacked, tmp_path):
    folder = unpacked("dcp/fsdp2_w2_fp32")
    source = folder / "checkpoint"
    reshard.convert(source, tmp_path / "out", "hf:optimizer=yes", config=str(folder), dtype="bf16")
    made, run = open_checkpoint(tmp_path / "out"), open_checkpoint(source)
    name = next(t.name for t in made.layout.tensors if t.slot == "master")
    assert made.layout.tensors[TensorId(name)].dtype.name == "bfloat16"
    master = whole(made, TensorId(name, "master"))
    assert master.tobytes() == whole(run, TensorId(name)).tobytes()
    reshard.convert(source, tmp_path / "wide", "hf:optimizer=yes", config=str(folder))
    slots = {t.slot for t in open_checkpoint(tmp_path / "wide").layout.tensors}
    assert "master" not in slots  # the weight is as wide


def test_weights_alone_are_read_when_asked(kept):
    found = open_checkpoint(kept, OpenOptions(weights_only=True))
    assert {t.slot for t in found.layout.tensors} == {"param"}
    assert found.groups is None


def test_transformers_does_not_look_at_it(unpacked, kept, tmp_path):
    plain = tmp_path / "plain"
    reshard.convert(unpacked(RUN) / "dist", plain, "hf")
    cases = [{"name": n, "folder": str(f)} for n, f in (("kept", kept), ("plain", plain))]
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    run_module("peers.hf_logits", str(tmp_path / "cases.json"), str(tmp_path / "results"))
    rows = [json.loads(line) for line in (tmp_path / "results").read_text().splitlines()]
    assert all(r["missing_keys"] == r["unexpected_keys"] == [] for r in rows)
    assert rows[0]["largest"] == rows[1]["largest"]


# --- FSDP2 trains on -----------------------------------------------------------------------------


def spoil(model: Path, to: Path, change: str) -> Path:
    """The folder with one thing of its optimizer changed, as if it had come so; no manifest."""
    shutil.copytree(model, to)
    (to / "reshard.json").unlink()
    state = to / "optimizer/optimizer.json"
    if change == "moment":
        path = next(p for p in sorted((to / "optimizer").glob("*.safetensors")))
        held = load_file(path)
        key = next(k for k in held if k.startswith("exp_avg/") and "mlp.up_proj" in k)
        path.chmod(0o644)
        save_file({**held, key: -held[key]}, path)
        return to
    text: dict[str, Any] = json.loads(state.read_text())
    if change == "step":
        text["steps"] = {name: step + 5 for name, step in text["steps"].items()}
    else:
        for group in text["groups"]:
            group["options"]["betas"] = [0.5, 0.95]
    state.write_text(json.dumps(text))
    return to


CHANGES = ("moment", "step", "beta")


@pytest.fixture(scope="module")
def resumed(unpacked, kept, tmp_path_factory):
    """FSDP2's next steps from the run directly, by way of the folder, and from spoilt folders."""
    root = tmp_path_factory.mktemp("resumed")
    config = {
        k: v
        for k, v in json.loads((kept / "config.json").read_text()).items()
        if k not in ("architectures", "model_type", "torch_dtype", "dtype")
    }
    sources = {"direct": unpacked(RUN) / "dist", "kept": kept}
    sources |= {change: spoil(kept, root / f"spoilt-{change}", change) for change in CHANGES}
    cases = []
    for name, source in sources.items():
        reshard.convert(source, root / name, "dcp:dp2,names=hf")
        cases.append(
            ParityCase(name=name, framework="fsdp2", dtype="bf16", config=config, rates=RATES,
                       load=root / name, state=root / f"{name}.state", steps=STEPS)
        )  # fmt: skip
    return judge(cases, root / "judged")


def test_fsdp2_trains_on_as_from_the_run_itself(resumed):
    """The direct conversion is held against Megatron's own steps by the tests of parity."""
    direct, kept = resumed["direct"], resumed["kept"]
    assert direct["error"] is None
    assert kept["error"] is None
    assert kept["losses"] == direct["losses"]
    assert kept["norms"] == direct["norms"]
    assert len(kept["losses"]) == STEPS


@pytest.mark.parametrize("change", CHANGES)
def test_a_spoilt_folder_trains_on_otherwise(resumed, change):
    assert resumed[change]["error"] is None
    assert resumed[change]["losses"] != resumed["direct"]["losses"]


# --- refused -------------------------------------------------------------------------------------


def test_a_source_without_an_optimizer_is_refused(kept, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(kept, bare, ignore=shutil.ignore_patterns("optimizer"))
    with pytest.raises(LossError, match="holds no optimizer"):
        reshard.convert(bare, tmp_path / "out", "hf:optimizer=yes")
    with pytest.raises(UsageError, match="contradict"):
        reshard.convert(kept, tmp_path / "out", "hf:optimizer=yes", weights_only=True)
    with pytest.raises(UsageError, match="optimizer=maybe"):
        reshard.convert(kept, tmp_path / "out", "hf:optimizer=maybe")


def changed(kept: Path, to: Path, **fields: object) -> Path:
    shutil.copytree(kept, to)
    path = to / "optimizer/optimizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return to


def test_an_optimizer_that_is_not_these_weights_is_refused(kept, tmp_path):
    escaped = changed(kept, tmp_path / "escaped", files=["../model.safetensors"])
    with pytest.raises(UnsafeError, match="no file of an optimizer"):
        open_checkpoint(escaped)
    ghost = changed(kept, tmp_path / "ghost", files=["optimizer-00009-of-00009.safetensors"])
    with pytest.raises(CorruptError, match="optimizer-00009"):
        open_checkpoint(ghost)
    steps = changed(kept, tmp_path / "steps", steps={"model.nothing": 3})
    with pytest.raises(CorruptError, match=r"step counter of model\.nothing"):
        open_checkpoint(steps)
    other = changed(kept, tmp_path / "other", files=["optimizer.safetensors"])
    save_file({"exp_avg/model.norm.weight": np.zeros(3)}, other / "optimizer/optimizer.safetensors")
    with pytest.raises(CorruptError, match=r"model\.norm\.weight .*shape \[3\]"):
        open_checkpoint(other)


def test_an_optimizer_without_its_list_is_refused(kept, tmp_path):
    shutil.copytree(kept, tmp_path / "in")
    (tmp_path / "in/optimizer/optimizer.json").unlink()
    with pytest.raises(CorruptError, match=r"optimizer\.json: is missing"):
        reshard.plan(tmp_path / "in", "universal")
    reshard.plan(tmp_path / "in", "universal", weights_only=True)
