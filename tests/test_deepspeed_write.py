"""Written native checkpoints: equal to their source, and real DeepSpeed resumes from them.

One batch for the module: DeepSpeed is imported once, every case forks its ranks.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import reshard
from peers.deepspeed_cases import CAP, DeepSpeedCase, judge
from reshard.errors import FormatError, LayoutError, UsageError

Unpacked = Callable[[str], Path]

#: fixture, TARGET, ranks, what of the fixture's recipe the target changes
CONVERSIONS: list[tuple[str, str, int, dict[str, Any]]] = [
    ("z1_dp4_bf16", "zero1dp2", 2, {}),
    ("z1_dp4_bf16", "zero3dp2,sub_group_size=700", 2,
     {"stage": 3, "zero": {"sub_group_size": 700, "stage3_param_persistence_threshold": 0}}),
    ("z2_dp2_bf16", "zero2dp4", 4, {}),
    ("z3_dp4_bf16", "zero3dp2", 2, {}),
    ("z3_dp2_bf16_subgroups", "zero1dp1", 1, {"stage": 1, "zero": {}}),
    ("z2_dp2_bf16_frozen", "zero3dp2", 2, {"stage": 3}),
    ("z3_dp4_bf16_frozen", "zero2dp1", 1, {"stage": 2}),
    ("z2_dp2_bf16_tied", "zero3dp2", 2, {"stage": 3}),
    ("z2_dp2_bf16_roundrobin", "zero2dp4", 4, {}),
    ("z2_dp2_bf16_paramalign", "zero2dp1", 1, {}),
    ("z1_dp2_bf16_gradacc32", "zero1dp1", 1, {}),
    ("z1_dp2_fp16", "zero3dp1", 1, {"stage": 3}),
    ("z1_dp4_fp32", "zero1dp2", 2, {}),
    ("z2_dp2_bf16_muon", "zero2dp1", 1, {}),
    ("tp2_dp1_z1_bf16", "zero1dp1", 1, {"tp": 1}),
    ("tp2_dp2_z2_bf16", "zero1tp2dp1", 2, {"stage": 1}),
    ("pp2_dp1_z1_bf16", "zero1dp1", 1, {"pp": 1}),
    ("moe_ep2_dp2_z1_bf16", "zero1dp1", 1, {"ep_size": 1}),
]  # fmt: skip
#: Cases that first train afresh, to see how far rounding alone moves their topology.
FLOORS = {"z1_dp4_bf16 to zero1dp2", "z1_dp4_fp32 to zero1dp2", "z3_dp4_bf16 to zero3dp2"}
SPOILS = ("step", "decay", "moment", "lr")


def name_of(fixture: str, target: str) -> str:
    return f"{fixture} to {target}"


@pytest.fixture(scope="module")
def results(
    unpacked: Unpacked, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    root = tmp_path_factory.mktemp("deepspeed")
    cases = []
    for i, (fixture, target, world, changes) in enumerate(CONVERSIONS):
        folder = unpacked(f"deepspeed/{fixture}")
        reshard.convert(folder / "ckpt", root / str(i), f"deepspeed:{target}")
        name = name_of(fixture, target)
        cases.append(
            DeepSpeedCase(
                name=name,
                checkpoint=root / str(i),
                fixture=folder,
                world=world,
                changes=changes,
                floor=name in FLOORS,
            )
        )
    cases += [replace(cases[0], name=f"spoilt {s}", spoil=s, floor=False) for s in SPOILS]
    tp2 = unpacked("deepspeed/tp2_dp1_z1_bf16")
    tp1 = root / str([c[0] for c in CONVERSIONS].index("tp2_dp1_z1_bf16"))
    reshard.convert(tp1, root / "tp1-tp2", "deepspeed:zero1tp2dp1", like=str(tp2 / "ckpt"))
    cases.append(
        DeepSpeedCase(name="tp1 to tp2", checkpoint=root / "tp1-tp2", fixture=tp2, world=2)
    )
    config = write_config(root, kv_heads=2)
    reshard.convert(tp1, root / "rule", "deepspeed:zero1tp2dp1", config=str(config))
    cases.append(DeepSpeedCase(name="by rule", checkpoint=root / "rule", fixture=tp2, world=2))
    elastic = unpacked("deepspeed/z1_dp4_bf16_elastic")
    reshard.convert(elastic / "ckpt", root / "elastic", "deepspeed:zero1dp2")
    cases.append(
        DeepSpeedCase(
            name="elastic",
            checkpoint=root / "elastic",
            fixture=elastic,
            world=2,
            changes={"zero": {}},
            steps=1,
        )
    )
    like = str(unpacked("deepspeed/z1_dp4_bf16") / "ckpt")
    reshard.convert(elastic / "ckpt", root / "elastic3", "deepspeed:zero3dp2", like=like)
    cases.append(
        DeepSpeedCase(
            name="elastic, options of another",
            checkpoint=root / "elastic3",
            fixture=elastic,
            world=2,
            changes={"stage": 3, "zero": {}},
        )
    )
    tied = unpacked("deepspeed/pp2_dp2_z1_bf16_tied")
    reshard.convert(tied / "ckpt", root / "tied", "deepspeed:zero1dp1")
    ours = DeepSpeedCase(
        name="tied pipeline", checkpoint=root / "tied", fixture=tied, world=1, changes={"pp": 1}
    )
    real = unpacked("deepspeed/universal_pp2_dp2_z1_bf16_tied")
    cases += [ours, replace(ours, name="tied pipeline, real", checkpoint=real, universal=True)]
    return judge(cases, root / "judge")


@pytest.mark.parametrize(("fixture", "target"), [c[:2] for c in CONVERSIONS])
def test_deepspeed_resumes(
    results: dict[str, dict[str, Any]], unpacked: Unpacked, fixture: str, target: str
):
    result = results[name_of(fixture, target)]
    assert result["error"] is None
    assert result["different"] == []
    assert result["compared"] >= 43
    recipe = json.loads((unpacked(f"deepspeed/{fixture}") / "recipe.json").read_text())
    assert result["distance"] <= CAP[recipe["dtype"]]
    if "floor" in result:
        assert result["distance"] <= 2 * result["floor"]
    assert result["adam_steps"] == [5.0]
    decays = [o["weight_decay"] for o in result["options"]]
    assert decays == ([0.1, 0.1] if "muon" in fixture else [0.1, 0.0] * (len(decays) // 2))


@pytest.mark.parametrize("spoil", SPOILS)
def test_a_spoilt_state_is_noticed(results: dict[str, dict[str, Any]], spoil: str):
    result = results[f"spoilt {spoil}"]
    assert result["error"] is None
    assert result["distance"] > CAP["bf16"]
    assert result["distance"] > 2 * results["z1_dp4_bf16 to zero1dp2"]["floor"]


def write_config(folder: Path, kind: str = "llama", **more: object) -> Path:
    names = {"kv_heads": "num_key_value_heads", "tied": "tie_word_embeddings"}
    config = {"model_type": kind, **{names[k]: v for k, v in more.items()}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("how", ["tp1 to tp2", "by rule"])
def test_tensor_parallel_is_cut_again(results: dict[str, dict[str, Any]], how: str):
    """With --like, and without it by AutoTP's own rule for the model of a config."""
    result = results[how]
    assert result["error"] is None
    assert result["different"] == []
    assert result["distance"] <= CAP["bf16"]


def test_an_elastic_checkpoint_is_rescued(results: dict[str, dict[str, Any]]):
    """States only: it records no learning rate, so the first step takes the scheduler's first."""
    result = results["elastic"]
    assert result["error"] is None
    assert result["different"] == []
    assert result["adam_steps"] == [5.0]


def test_an_elastic_checkpoint_goes_on_with_the_options_of_another(
    results: dict[str, dict[str, Any]],
):
    """--like gives the rate, betas and decay that it does not record; ZeRO 3 needs them."""
    result = results["elastic, options of another"]
    assert result["error"] is None
    assert result["different"] == []
    assert result["distance"] <= CAP["bf16"]
    assert [o["weight_decay"] for o in result["options"]] == [0.1, 0.0]


def test_a_tied_pipeline_moves_as_the_real_tool_moves_it(results: dict[str, dict[str, Any]]):
    """Two stages add their gradients of the tied weight in bf16, one stage does not."""
    ours, real = results["tied pipeline"], results["tied pipeline, real"]
    assert ours["error"] is real["error"] is None
    assert ours["different"] == []
    assert ours["losses"] == real["losses"]


# --- without DeepSpeed ---------------------------------------------------------------------------

WAYS = [
    ("z0_dp2_fp32", "zero3dp5"), ("z0_dp2_bf16", "zero2dp3"), ("z0_dp2_fp16", "zero3dp2"),
    ("z3_dp2_bf16_fusedadam", "zero1dp3"), ("z2_dp2_bf16_cpuoffload", "zero3dp7"),
    ("z2_dp2_bf16_roundrobin", "zero2dp3"), ("z2_dp2_bf16_paramalign", "zero3dp3"),
    ("z2_dp2_bf16_muon", "zero1dp3"), ("z1_dp4_bf16_elastic", "zero2dp3"),
    ("moe_ep2_dp2_z0_fp32", "zero2dp4ep4"), ("moe_ep2_dp2_z1_bf16", "zero2dp4ep2"),
    ("pp2_dp2_z0_fp32", "zero1pp2dp3"), ("tp2_dp2_z2_bf16", "zero3tp2dp3"),
]  # fmt: skip


@pytest.mark.parametrize(("fixture", "target"), WAYS)
def test_there_and_back_is_the_identity(
    unpacked: Unpacked, tmp_path: Path, fixture: str, target: str
):
    source = unpacked(f"deepspeed/{fixture}") / "ckpt"
    reshard.convert(source, tmp_path / "there", f"deepspeed:{target}")
    found = reshard.diff(source, tmp_path / "there")
    # ZeRO 3 keeps no 16-bit weights; the expert groups are named by their degree
    assert all(
        d["kind"] in ("only-left", "only-right") or d["detail"].startswith("ep_size")
        for d in found["differences"]
    )
    reshard.convert(tmp_path / "there", tmp_path / "back", "deepspeed:zero1dp2")
    again = reshard.diff(source, tmp_path / "back")["differences"]
    kinds = {d["kind"] for d in again}
    assert kinds <= ({"only-right"} if fixture.startswith("z3") else {"option"})


def test_dropped_weights_of_zero_3_are_no_loss(unpacked: Unpacked, tmp_path: Path):
    source = unpacked("deepspeed/z1_dp4_bf16") / "ckpt"
    report = reshard.convert(source, tmp_path / "out", "deepspeed:zero3dp8", strict=True)
    assert report["losses"] == []
    assert (tmp_path / "out" / "latest").read_text() == "global_step5"
    assert len(list((tmp_path / "out" / "global_step5").glob("*.pt"))) == 16


def test_equal_ranks_keep_everything(unpacked: Unpacked, tmp_path: Path):
    source = unpacked("deepspeed/z2_dp2_bf16") / "ckpt"
    report = reshard.convert(source, tmp_path / "out", "deepspeed:zero2dp2", strict=True)
    assert reshard.diff(source, tmp_path / "out", extras=True)["status"] == "equal"
    assert report["recipe"]["verdict"] == "exact"


@pytest.mark.parametrize(
    ("fixture", "target", "error", "words"),
    [
        ("z1_dp4_bf16", "zero0dp2", FormatError, "ZeRO 0 is not written"),
        ("z1_dp4_bf16", "zero1tp2", LayoutError, "--like"),
        ("z1_dp4_bf16", "zero1pp2", LayoutError, "no PipelineModule"),
        ("z1_dp4_bf16", "zero1dp4ep2", LayoutError, "no experts"),
        ("z1_dp4_bf16", "zero3dp2,sub_group_size=many", UsageError, "sub_group_size"),
        ("z1_dp4_bf16", "zero3dp2,flavour=2", UsageError, "flavour"),
        ("z1_dp4_bf16", "zero1vpp2", UsageError, "vpp"),
        ("z1_dp4_bf16_elastic", "zero3dp2", FormatError, "--like"),
        ("z2_dp2_bf16_muon", "zero3dp2", FormatError, "Muon"),
        ("pp2_dp1_z1_bf16", "zero1pp3", LayoutError, "split="),
        ("pp2_dp1_z1_bf16", "zero3dp2", LayoutError, "ZeRO 1"),
        ("moe_ep2_dp2_z1_bf16", "zero1dp3ep3", LayoutError, "do not divide"),
        ("moe_ep2_dp2_z1_bf16", "zero1dp3ep2", LayoutError, "multiple of ep"),
        ("tp2_dp1_z1_bf16", "zero1tp5", LayoutError, "not divisible"),
    ],
)
def test_what_cannot_be_is_refused(
    unpacked: Unpacked,
    tmp_path: Path,
    fixture: str,
    target: str,
    error: type[Exception],
    words: str,
):
    source = unpacked(f"deepspeed/{fixture}") / "ckpt"
    with pytest.raises(error, match=words):
        reshard.convert(source, tmp_path / "out", f"deepspeed:{target}")
    assert not (tmp_path / "out").exists()


def native(path: Path) -> Any:
    return reshard.open(path).checkpoint.native  # type: ignore[attr-defined]  # DeepSpeed's own


def test_autotps_rule_cuts_as_autotp_did(unpacked: Unpacked, tmp_path: Path):
    source = unpacked("deepspeed/tp2_dp2_z2_bf16") / "ckpt"
    reshard.convert(source, tmp_path / "one", "deepspeed:zero3tp1dp3")
    config = write_config(tmp_path, kv_heads=2)
    reshard.convert(tmp_path / "one", tmp_path / "two", "deepspeed:zero2tp2dp2", config=str(config))
    before, after = native(source), native(tmp_path / "two")
    assert before.affine == after.affine
    assert before.vocabulary == after.vocabulary
    assert {d["kind"] for d in reshard.diff(source, tmp_path / "two")["differences"]} <= {
        "only-right"
    }


@pytest.mark.parametrize(
    ("source", "config", "target", "words"),
    [
        ("z1_dp4_bf16", None, "zero1tp2dp1", "--config DIR"),
        ("z1_dp4_bf16", {"kind": "gpt2"}, "zero1tp2dp1", "'gpt2' are not known"),
        ("z1_dp4_bf16", {"kv_heads": 2, "tied": True}, "zero1tp2dp1", "tied head"),
        ("z1_dp4_bf16", {"kind": "gemma2", "kv_heads": 2}, "zero1tp2dp1", "tied head"),
        ("z1_dp4_bf16", {"kv_heads": 2}, "zero1tp4dp1", "fewer than tp=4"),
        ("z1_dp4_bf16", {}, "zero1tp2dp1", "how many key-value heads"),
        ("tp2_dp1_z1_bf16", None, "zero1tp4dp1", "how many key-value heads"),
        ("tp2_dp1_z1_bf16", {"kv_heads": 2}, "zero1tp4dp1", "fewer than tp=4"),
    ],
)
def test_cuts_that_are_not_known_are_refused(
    unpacked: Unpacked,
    tmp_path: Path,
    source: str,
    config: dict[str, Any] | None,
    target: str,
    words: str,
):
    given = None if config is None else str(write_config(tmp_path, **config))
    with pytest.raises(LayoutError, match=words):
        reshard.convert(
            unpacked(f"deepspeed/{source}") / "ckpt",
            tmp_path / "out",
            f"deepspeed:{target}",
            config=given,
        )


def test_the_models_that_autotp_cuts_so_are_transformers_own():
    """Every model in the table has the tensor-parallel plan that the rule stands for."""
    import transformers

    from reshard.converters.deepspeed.autotp import DENSE, rule_axis

    configs = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    heads = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
    for kind in sorted(DENSE):
        plan = {**configs[kind].base_model_tp_plan, **heads[configs[kind]]._tp_plan}
        axes = {"colwise": 0, "colwise_gather_output": 0, "rowwise": 1}
        for pattern, style in plan.items():
            name = f"{pattern.replace('*', '3')}.weight"
            assert rule_axis(name) == axes.get(style), (kind, name, style)
        assert len(plan) >= 7, kind
        for name in ("embed_tokens", "layers.3.input_layernorm", "norm"):
            assert rule_axis(f"model.{name}.weight") is None


def test_like_gives_structure_and_the_source_values(unpacked: Unpacked, tmp_path: Path):
    """A ZeRO-3 source in the sub-groups and stage of another job."""
    source = unpacked("deepspeed/z1_dp4_bf16") / "ckpt"
    like = unpacked("deepspeed/z3_dp2_bf16_subgroups") / "ckpt"
    reshard.convert(source, tmp_path / "out", like=str(like))
    checkpoint = reshard.open(tmp_path / "out").checkpoint
    assert str(checkpoint.topology) == "zero3tp1pp1dp2"
    wrong = [
        d for d in reshard.diff(source, tmp_path / "out")["differences"] if d["kind"] != "only-left"
    ]
    assert wrong == []


def test_a_pipeline_is_split_as_asked(unpacked: Unpacked, tmp_path: Path):
    source = unpacked("deepspeed/pp2_dp1_z1_bf16") / "ckpt"
    reshard.convert(source, tmp_path / "out", "deepspeed:zero1pp3,split=2-3-2")
    assert reshard.diff(source, tmp_path / "out")["status"] == "equal"
    held = reshard.open(tmp_path / "out").checkpoint.native.pipeline.stages  # type: ignore[attr-defined]  # DeepSpeed's own
    assert [sorted({n.split(".")[0] for n in s}) for s in held] == [
        ["0", "1"],
        ["2", "3", "4"],
        ["5", "6"],
    ]


def test_the_real_tools_read_what_is_written(unpacked: Unpacked, tmp_path: Path):
    """Optimizer files name only DeepSpeed's own classes, and shapes are torch.Size."""
    import pickletools
    import zipfile

    source = unpacked("deepspeed/z1_dp2_fp16") / "ckpt"
    reshard.convert(source, tmp_path / "out", "deepspeed:zero3dp2")
    names = set()
    for file in (tmp_path / "out" / "global_step5").glob("*.pt"):
        with zipfile.ZipFile(file) as archive:
            data = archive.read(next(n for n in archive.namelist() if n.endswith("/data.pkl")))
        names |= {arg for op, arg, _ in pickletools.genops(data) if op.name == "GLOBAL"}
    ours = {n for n in names if n.startswith("deepspeed")}
    assert ours == {
        "deepspeed.runtime.fp16.loss_scaler DynamicLossScaler",
        "deepspeed.runtime.zero.config ZeroStageEnum",
    }
    assert "torch Size" in names
    shutil.rmtree(tmp_path / "out")


def test_a_tie_is_left_out_with_the_weight_it_is_of(unpacked: Unpacked, tmp_path: Path):
    """As a run saves it that leaves out its frozen weights, the embedding among them."""
    source = unpacked("deepspeed/z2_dp2_bf16_tied") / "ckpt"
    for stage in (1, 3):
        reshard.convert(
            source, tmp_path / f"{stage}", f"deepspeed:zero{stage}dp1",
            exclude="model.embed_tokens.weight",
        )  # fmt: skip
        names = {name for name, _ in reshard.open(tmp_path / f"{stage}").tensors}
        assert "model.norm.weight" in names
        assert not names & {"model.embed_tokens.weight", "lm_head.weight"}
