"""Checkpoints of forms that no fixture has, made here by real DeepSpeed: read, cut anew, resumed.

Two processes for the module: one trains and saves every run, one resumes every conversion.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import reshard
from peers.deepspeed_cases import CAP, DeepSpeedCase, judge, make
from peers.deepspeed_truth import compared, equal_bits, truth_of
from reshard.errors import CorruptError, FormatError, LayoutError

Unpacked = Callable[[str], Path]

TP: dict[str, Any] = {"tp": 2, "lm_head_bias": False, "state_keys": ["exp_avg", "exp_avg_sq"]}
MUON = {"type": "Muon", "params": {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1}}

#: name -> ranks and recipe of the run; TARGET, ranks and changes of each job that resumes
RUNS: dict[str, tuple[dict[str, Any], list[tuple[str, int, dict[str, Any]]]]] = {
    "amsgrad": (
        {"stage": 2, "torch_optimizer": ["AdamW", {"amsgrad": True}],
         "state_keys": ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]},
        [("zero3dp1", 1, {"stage": 3})],
    ),
    "nadam in sub-groups": (
        {"stage": 3, "dtype": "fp32", "torch_optimizer": ["NAdam", {}],
         "zero": {"sub_group_size": 900, "stage3_param_persistence_threshold": 0}},
        [("zero2dp1", 1, {"stage": 2, "zero": {}})],
    ),
    "sgd without state": (
        {"stage": 1, "torch_optimizer": ["SGD", {}], "state_keys": []},
        [("zero3dp1", 1, {"stage": 3})],
    ),
    "three groups, tied, frozen, round robin": (
        {"stage": 1, "three_groups": True, "freeze": ["layers.0.mlp"], "buffers": True,
         "zero": {"round_robin_gradients": True}, "model": {"tie_word_embeddings": True},
         "to_universal": True},
        [("zero3dp1", 1, {"stage": 3, "zero": {}})],
    ),
    "fewer elements than ranks, and none": (
        {"world": 4, "stage": 1, "odd": True, "tag": "best"}, [("zero2dp1", 1, {"stage": 2})],
    ),
    "FP16_Optimizer": (
        # a scale of 1: DeepSpeed 0.19.8 without ZeRO divides by one that it did not multiply with
        {"stage": 0, "dtype": "fp16", "torch_optimizer": ["FusedAdam", {}],
         "config": {"fp16": {"enabled": True, "loss_scale": 1}}},
        [("zero2dp1", 1, {"stage": 2})],
    ),
    "BF16_Optimizer of a tied pipeline without ZeRO": (
        {"stage": 0, "kind": "pipe", "pp": 2, "gas": 2, "tied": True},
        [("zero1pp2dp1", 2, {"stage": 1, "config": {"data_types": {"grad_accum_dtype": "fp32"}}})],
    ),
    "a pipeline with a tensor axis": (
        {"world": 4, "stage": 1, "dtype": "fp32", "kind": "pipe3d", "pp": 2, "mp": 2, "gas": 2,
         "config": {"pipeline": {"pipe_partitioned": False, "grad_partitioned": False}}},
        [("zero1tp1dp1", 1, {"pp": 1, "mp": 1}), ("zero1tp2dp1", 2, {"pp": 1}),
         ("zero1tp2pp2dp1", 4, {}), ("deepspeed-universal", 1, {"pp": 1, "mp": 1})],
    ),
    "heads that tp does not divide": (
        {"stage": 1, "model": {"hidden_size": 24, "num_attention_heads": 3,
                               "num_key_value_heads": 3}, **TP},
        [("zero2tp1dp1", 1, {"tp": 1, "stage": 2})],
    ),
    "torch autocast over fp32": (
        {"stage": 1, "dtype": "fp32",
         "config": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}},
        [("zero2dp1", 1, {"stage": 2})],
    ),
    "a rate in a tensor, under a tag of two folders": (
        {"stage": 2, "tensor_rate": True, "config": {"scheduler": {}}, "tag": "epoch1/step5"},
        [("zero3dp1", 1, {"stage": 3}), ("deepspeed-universal", 1, {"stage": 1})],
    ),
    "Muon under ZeRO 3": (
        {"stage": 3, "state_keys": [], "zero": {"reduce_scatter": False}, "optimizer": MUON},
        [("zero2dp1", 1, {"stage": 2, "zero": {}}), ("zero3dp1", 1, {})],
    ),
    "MoE": (
        {"stage": 2, "kind": "moe", "experts": 4, "ep_size": 2},
        [("deepspeed-universal", 1, {"ep_size": 1, "stage": 1})],
    ),
    "MoE in groups parted by size": (
        {"stage": 1, "kind": "moe", "experts": 4, "ep_size": 2, "max_group_size": 900},
        [("zero2dp2ep2", 2, {"stage": 2})],
    ),
}  # fmt: skip
#: Of forms that are refused.
REFUSED: dict[str, dict[str, Any]] = {
    "Adafactor": {
        "stage": 1, "state_keys": [],
        "torch_optimizer": ["Adafactor", {"relative_step": False, "scale_parameter": False}],
    },
}  # fmt: skip
JOBS = [(name, target) for name, (_, jobs) in RUNS.items() for target, _, _ in jobs]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of every run, as fixtures/deepspeed have one."""
    root = tmp_path_factory.mktemp("made")
    wanted = {name: recipe for name, (recipe, _) in RUNS.items()} | REFUSED
    recipes = [
        {"name": name, "world": 2, "dtype": "bf16", **recipe} for name, recipe in wanted.items()
    ]
    make(recipes, root)
    return root


@pytest.fixture(scope="module")
def results(made: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    root = tmp_path_factory.mktemp("resumed")
    cases = []
    for name, (_, jobs) in RUNS.items():
        for i, (target, world, changes) in enumerate(jobs):
            out = root / f"{name}-{i}"
            form = target if target.startswith("deepspeed") else f"deepspeed:{target}"
            reshard.convert(made / name / "ckpt", out, form)
            cases.append(
                DeepSpeedCase(
                    name=f"{name} to {target}",
                    checkpoint=out,
                    fixture=made / name,
                    world=world,
                    changes=changes,
                    universal=target.startswith("deepspeed"),
                    floor=True,
                )
            )
    return judge(cases, root / "judge")


@pytest.mark.parametrize("name", RUNS)
def test_every_tensor_is_the_live_runs(made: Path, name: str):
    opened = reshard.open(made / name / "ckpt")
    pairs = list(compared(opened, truth_of(made / name)))
    assert len(pairs) >= 40
    assert [what for what, a, b in pairs if not equal_bits(a, b)] == []
    assert set(opened.steps.values()) <= {5.0, 6.0}  # the 16-bit wrappers step once before
    assert reshard.verify(made / name / "ckpt")["status"] == "ok"


@pytest.mark.parametrize(("name", "target"), JOBS)
def test_deepspeed_resumes(results: dict[str, dict[str, Any]], name: str, target: str):
    result = results[f"{name} to {target}"]
    assert result["error"] is None
    assert result["different"] == []
    assert result["compared"] >= 40
    rounding = result["losses"][0] * 2**-23  # of a loss in fp32; a floor may come out as 0
    assert result["distance"] <= 2 * max(result["floor"], rounding)
    recipe = RUNS[name][0]
    narrow = "torch_autocast" in recipe.get("config", {})
    cap = CAP["bf16" if narrow else recipe.get("dtype", "bf16")]
    # rounding is relative, and the cap is for losses of the fixtures, which are about 4
    assert result["distance"] <= cap * max(1.0, result["losses"][0] / 4)


@pytest.mark.parametrize(
    ("name", "target", "error", "words"),
    [
        ("MoE in groups parted by size", "deepspeed:zero1dp1", LayoutError, "max_group_size"),
        ("MoE in groups parted by size", "deepspeed-universal", LayoutError, "max_group_size"),
        ("Muon under ZeRO 3", "deepspeed-universal", FormatError, "Muon keeps whole matrices"),
        ("MoE", "deepspeed:zero3dp2", FormatError, "MoE under ZeRO 3"),
        ("a pipeline with a tensor axis", "deepspeed:zero1tp4dp1", LayoutError, "beyond tp=2"),
        ("Adafactor", "deepspeed:zero2dp1", FormatError, "RMS is a number of each rank's own"),
    ],
)
def test_what_cannot_be_is_refused(
    made: Path, tmp_path: Path, name: str, target: str, error: type[Exception], words: str
):
    with pytest.raises(error, match=words):
        reshard.convert(made / name / "ckpt", tmp_path / "out", target)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "words"),
    [("layer_03-model_01", r"layer 3 are of .* ranks \[0\], and there are 2"),
     ("mp_rank_03", r"mp_rank_03_model_states\.pt: is missing")],
)  # fmt: skip
def test_a_file_of_a_tensor_axis_that_is_missing_is_told(
    made: Path, tmp_path: Path, name: str, words: str
):
    shutil.copytree(made / "a pipeline with a tensor axis" / "ckpt", tmp_path / "ckpt")
    (lost,) = (tmp_path / "ckpt").glob(f"global_step5/{name}*model_states.pt")
    lost.unlink()
    with pytest.raises(CorruptError, match=words):
        reshard.open(tmp_path / "ckpt")


@pytest.mark.parametrize("to", ["dcp:dp2", "deepspeed:zero1dp1"])
def test_a_rate_in_a_tensor_is_a_number(made: Path, tmp_path: Path, to: str):
    source = made / "a rate in a tensor, under a tag of two folders" / "ckpt"
    reshard.convert(source, tmp_path / "out", to)
    for folder in (source, tmp_path / "out"):
        groups = reshard.open(folder).groups or ()
        assert [g.options["lr"] for g in groups] == [float(np.float32(0.01))] * 2


def test_autotps_rule_cuts_between_heads(made: Path, tmp_path: Path):
    """Three key-value heads on two ranks: two and one, as AutoTP itself cut them."""
    source = made / "heads that tp does not divide" / "ckpt"
    config = {"model_type": "llama", "num_key_value_heads": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    reshard.convert(source, tmp_path / "one", "deepspeed:zero3tp1dp3")
    reshard.convert(
        tmp_path / "one", tmp_path / "two", "deepspeed:zero1tp2dp1", config=str(tmp_path)
    )
    native: list[Any] = [
        reshard.open(p).checkpoint.native  # type: ignore[attr-defined]  # DeepSpeed's own
        for p in (source, tmp_path / "two")
    ]
    assert native[0].affine == native[1].affine
    found = reshard.diff(source, tmp_path / "two")["differences"]
    assert {d["kind"] for d in found} <= {"only-right"}  # ZeRO 3 kept no 16-bit weights


def test_what_the_real_tool_does_to_a_round_robin_run_is_told(made: Path, tmp_path: Path):
    """Its masters and moments are others'; the weights beside them are right."""
    universal = made / "three groups, tied, frozen, round robin" / "universal"
    with pytest.raises(CorruptError, match="round_robin_gradients, whose order ds_to_universal"):
        reshard.convert(universal, tmp_path / "out", "torch")
    reshard.convert(universal, tmp_path / "weights", "torch", weights_only=True)
    native = reshard.open(universal.parent / "ckpt")
    for (name, slot), value in reshard.open(tmp_path / "weights").tensors.items():
        assert value[...].tobytes() == native[name, slot][...].tobytes()


def test_muon_takes_another_jobs_order_with_like(made: Path, unpacked: Unpacked, tmp_path: Path):
    source, like = unpacked("deepspeed/z2_dp2_bf16_muon") / "ckpt", made / "Muon under ZeRO 3"
    with pytest.raises(FormatError, match=r"zero\.Init"):
        reshard.convert(source, tmp_path / "out", "deepspeed:zero3dp2")
    reshard.convert(source, tmp_path / "out", like=str(like / "ckpt"))
    found = reshard.diff(source, tmp_path / "out")["differences"]
    assert {d["kind"] for d in found} <= {"only-left"}  # ZeRO 3 keeps no 16-bit weights
