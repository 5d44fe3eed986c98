"""Real Megatron checkpoints of kinds that the other sets lack, and what a hurried user does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import reshard
from reshard.containers import torchfile
from reshard.converters.megatron import run, run_rng
from reshard.errors import (
    CorruptError,
    CoverageError,
    FormatError,
    LayoutError,
    ReshardError,
    TargetError,
    UsageError,
)
from reshard.topology import Topology

Unpack = Callable[[str], Path]
LLAMA, FP32 = "megatron/h-llama-tp2pp2", "megatron/made-fp32-tp2"
SGD, FROZEN = "megatron/made-fp32-sgd-tp2", "megatron/made-frozen-decoupled-tp2"
MOE_FP16 = "megatron/made-moe-fp16-dp2-dpr"
STEP0 = "megatron/made-llama-tp2dp2-step0-dpr"


def common_of(run: Path) -> dict[str, Any]:
    """What common.pt of a run folder's only iteration holds."""
    (path,) = run.glob("iter_*/common.pt")
    root = torchfile.load(path, "common.pt").root
    assert isinstance(root, dict)
    return root


def args_of(run: Path) -> dict[str, Any]:
    """The args in common.pt."""
    state = common_of(run)["args"].state
    assert isinstance(state, dict)
    return state


# --- fp32 runs -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "through",
    ["megatron:pp2", "megatron-legacy:tp2", "universal", "megatron:optim=fully_reshardable"],
)
def test_an_fp32_run_crosses_every_form(unpacked: Unpack, tmp_path: Path, through: str) -> None:
    """FP32Optimizer keeps no masters; its state in common.pt is that of Adam itself."""
    source = unpacked(FP32) / "dist"
    reshard.convert(source, tmp_path / "there", through)
    assert reshard.diff(source, tmp_path / "there")["differences"] == []
    reshard.convert(tmp_path / "there", tmp_path / "back", "megatron:tp1,optim=non_distributed")
    assert reshard.diff(source, tmp_path / "back")["differences"] == []
    assert common_of(tmp_path / "back")["optimizer"].keys() == {"state", "param_groups"}
    assert {slot for _, slot in reshard.open(tmp_path / "back").logical} == {
        "param", "exp_avg", "exp_avg_sq", "step"
    }  # fmt: skip


def test_a_distributed_optimizer_has_masters_of_fp32_weights(
    unpacked: Unpack, tmp_path: Path
) -> None:
    reshard.convert(unpacked(FP32) / "dist", tmp_path / "out", "optim=fully_reshardable")
    found = reshard.open(tmp_path / "out").logical
    masters = [name for name, slot in found if slot == "master"]
    assert len(masters) == sum(slot == "exp_avg" for _, slot in found)
    for name in masters:
        whole = (found[name, slot][...].tobytes() for slot in ("param", "master"))
        assert next(whole) == next(whole)


def test_narrowed_fp32_weights_leave_their_bits_in_masters(
    unpacked: Unpack, tmp_path: Path
) -> None:
    source = unpacked(FP32) / "dist"
    reshard.convert(source, tmp_path / "out", "tp1", dtype="bf16")
    before, after = reshard.open(source).logical, reshard.open(tmp_path / "out").logical
    name = "decoder.layers.1.mlp.linear_fc2.weight"
    assert after[name, "param"].dtype.name == "bfloat16"
    assert after[name, "master"][...].tobytes() == before[name, "param"][...].tobytes()


# --- optimizers and groups of other kinds ---------------------------------------------------------


def test_sgd_counts_no_steps(unpacked: Unpack, tmp_path: Path) -> None:
    source = unpacked(SGD) / "dist"
    reshard.convert(source, tmp_path / "legacy", "megatron-legacy:pp2")
    reshard.convert(tmp_path / "legacy", tmp_path / "back", "megatron:tp1")
    assert reshard.diff(source, tmp_path / "back")["differences"] == []
    optimizer = common_of(tmp_path / "back")["optimizer"]
    assert optimizer["state"] == {}
    assert all("step" not in group for group in optimizer["param_groups"])
    with pytest.raises(FormatError, match=r"is Adam's alone, .* keeps momentum_buffer"):
        reshard.convert(source, tmp_path / "no", "optim=fully_reshardable")


def test_a_save_before_the_first_step_says_how_its_job_is_laid_out(
    unpacked: Unpack, tmp_path: Path
) -> None:
    """It has no moments; megatron-core 0.16.1 cannot save it as fully_reshardable (KeyError)."""
    first, source = unpacked(STEP0) / "dist", unpacked(LLAMA) / "dist"
    report = reshard.convert(source, tmp_path / "out", like=first)
    assert report["target"]["topology"] == "tp2pp1dp2"
    assert reshard.diff(source, tmp_path / "out")["differences"] == []
    with pytest.raises(FormatError, match="masters and no moments"):
        reshard.convert(first, tmp_path / "no", "tp1")
    reshard.convert(first, tmp_path / "flat", "tp1,optim=non_distributed")
    assert reshard.diff(first, tmp_path / "flat")["differences"] == []


def test_the_edges_have_the_group_of_the_decoupled_rate(unpacked: Unpack, tmp_path: Path) -> None:
    """Megatron 0.16.1 calls no group decoupled, and tells two of these apart by nothing."""
    source = unpacked(FROZEN) / "dist"
    report = reshard.convert(source, tmp_path / "out", "megatron:pp2")
    assert reshard.diff(source, tmp_path / "out")["differences"] == []
    assert any("loads neither its own checkpoint" in note for note in report["notes"])
    for folder in (source, tmp_path / "out"):
        rates = {g.options["max_lr"]: g.members for g in reshard.open(folder).groups or ()}
        assert set(rates[1e-3]) == {"embedding.word_embeddings.weight", "output_layer.weight"}


def test_frozen_weights_have_no_place_in_a_legacy_file(unpacked: Unpack, tmp_path: Path) -> None:
    """Its optimizer numbers what is trained, and would be read as that of other weights."""
    source = unpacked(FROZEN) / "dist"
    with pytest.raises(FormatError, match=r"mlp\.linear_fc1.* the run froze them"):
        reshard.convert(source, tmp_path / "no", "megatron-legacy:tp1")
    reshard.convert(source, tmp_path / "weights", "megatron-legacy:tp1", weights_only=True)


def test_an_fp16_run_keeps_its_loss_scale(unpacked: Unpack, tmp_path: Path) -> None:
    """A dp_reshardable optimizer has it beside its groups; it is no loss under --strict."""
    source = unpacked(MOE_FP16) / "dist"
    reshard.convert(source, tmp_path / "out", "megatron:tp1dp2", strict=True)
    reshard.convert(tmp_path / "out", tmp_path / "again", "megatron:tp1dp2", strict=True)
    for folder in (source, tmp_path / "out", tmp_path / "again"):
        extras = reshard.open(folder).extras
        scaler = [extras[f"optimizer.grad_scaler.{k}"] for k in ("scale", "growth_tracker")]
        assert scaler == [256.0, 1.0]


def test_a_family_reads_a_moe_layer_frequency_that_is_a_number(
    unpacked: Unpack, tmp_path: Path
) -> None:
    source = unpacked(MOE_FP16) / "dist"
    assert args_of(source)["moe_layer_freq"] == 2
    reshard.convert(source, tmp_path / "out", "hf")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["mlp_only_layers"] == [1]


# --- random states -------------------------------------------------------------------------------


def test_random_states_of_every_data_parallel_rank(unpacked: Unpack, tmp_path: Path) -> None:
    """With --data-parallel-random-init a position has a list of them, which Megatron indexes."""
    source = reshard.open(unpacked(LLAMA) / "dist").checkpoint.native
    assert isinstance(source, run.Run)
    own = replace(source, args={**source.args, "data_parallel_random_init": True})
    for degrees, count in ((Topology(tp=2, pp=2, dp=1), 1), (Topology(tp=2, pp=2, dp=3), 3)):
        grid = run_rng.rng_grid(degrees)
        states, (fate,), _ = run_rng.rng_states(own, degrees, grid)
        assert fate.kind == ("keep" if count == 1 else "derive")
        for state in states.values():
            assert isinstance(state.obj, list)
            assert len(state.obj) == count
            assert len({repr(s["random_rng_state"]) for s in state.obj}) == count
        plain, (kept,), _ = run_rng.rng_states(source, degrees, grid)
        assert kept.kind == "keep"
        assert plain == source.rng


# --- pipelines -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fixture", "to", "layout"),
    [
        (LLAMA, "pp2,split=0-4", "E|ttttL"),
        (LLAMA, "pp2vpp2,split=1-2-0-1", "Et|tt||tL"),
        ("megatron/h-mtp-pp2", "pp4,split=2-1-0-1", "Ett|t||tmL"),
    ],
)
def test_a_split_that_only_a_layout_can_say(
    unpacked: Unpack, tmp_path: Path, fixture: str, to: str, layout: str
) -> None:
    """Megatron refuses a first or last stage of 0 layers as a number, and wants MTP placed."""
    source = unpacked(fixture) / "dist"
    for form in ("megatron", "megatron-legacy"):  # legacy is read back by what its args say
        reshard.convert(source, tmp_path / form, f"{form}:{to}")
        assert reshard.diff(source, tmp_path / form)["differences"] == []
    args = args_of(tmp_path / "megatron")
    assert args["pipeline_model_parallel_layout"] == layout
    assert args["decoder_first_pipeline_num_layers"] is None
    assert args["decoder_last_pipeline_num_layers"] is None


# --- references ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("like", "what"),
    [
        ("h-mtp-pp2", r"mtp\.layers\.0\.eh_proj.weight.*written as none"),
        ("a-tp1pp1", r"written as .*, the reference"),
        ("made-fp32-tp2", r"written as bfloat16 .* has float32"),
    ],
)
def test_a_reference_of_another_model_is_refused(
    unpacked: Unpack, tmp_path: Path, like: str, what: str
) -> None:
    with pytest.raises(CoverageError, match=what):
        reshard.convert(
            unpacked(LLAMA) / "dist", tmp_path / "out", like=unpacked(f"megatron/{like}") / "dist"
        )
    assert not (tmp_path / "out").exists()


def test_a_reference_gives_what_the_target_leaves_open(unpacked: Unpack, tmp_path: Path) -> None:
    """Its expert-TP follows its TP in a dense model, and is not the target's."""
    source = unpacked(LLAMA) / "dist"
    like = unpacked("megatron/h-llama-tp2pp1dp2-fr") / "dist"
    reshard.convert(source, tmp_path / "out", "tp1pp4", like=like)
    assert args_of(tmp_path / "out")["expert_tensor_parallel_size"] == 1
    with pytest.raises(LayoutError, match="ep=1, etp=2"):
        reshard.convert(source, tmp_path / "no", "etp2")


# --- the vocabulary ------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [0, -5])
def test_a_vocabulary_of_nothing_is_refused(unpacked: Unpack, tmp_path: Path, rows: int) -> None:
    with pytest.raises(UsageError, match="at least 1"):
        reshard.convert(unpacked(LLAMA) / "dist", tmp_path / "out", "tp1", vocab_size=rows)


@pytest.mark.parametrize("to", ["hf", "universal", "dcp:dp2", "deepspeed:zero1dp2"])
def test_a_smaller_vocabulary_is_a_loss_into_every_format(unpacked: Unpack, to: str) -> None:
    for rows, lost in ((50, 1), (109, 0)):
        report = reshard.plan(unpacked(LLAMA) / "dist", to, vocab_size=rows)
        assert [x["code"] for x in report["losses"]].count("rows-dropped") == lost


@pytest.mark.parametrize("form", ["megatron", "megatron-legacy"])
def test_a_smaller_vocabulary_is_a_loss_and_stands_in_the_args(
    unpacked: Unpack, tmp_path: Path, form: str
) -> None:
    """The args of the source count 109; what is written must open by its own args."""
    source = unpacked(LLAMA) / "dist"
    report = reshard.convert(source, tmp_path / "out", f"{form}:tp1", vocab_size=50)
    assert [x["code"] for x in report["losses"]].count("rows-dropped") == 1
    found = reshard.open(tmp_path / "out").logical["embedding.word_embeddings.weight", "param"]
    assert found.shape == (50, 40)


# --- hands in a hurry ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"to": ""}, "--to is empty"),
        ({"like": ""}, "--like is empty"),
        ({"to": "tp1", "given": ""}, "--from is empty"),
        ({"to": "tp1", "dtype": "int8"}, "floating-point"),
        ({"to": "tp1", "dtype": "complex64"}, "floating-point"),
    ],
)
def test_options_that_say_nothing_are_refused(
    unpacked: Unpack, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        reshard.convert(unpacked(LLAMA) / "dist", tmp_path / "out", **options)


def test_the_interface_takes_paths_and_a_lone_pattern(unpacked: Unpack, tmp_path: Path) -> None:
    source = unpacked(LLAMA) / "dist"
    reshard.convert(source, tmp_path / "like", "tp1", like=source)  # a Path
    pattern = "decoder.layers.0.*"
    report = reshard.convert(source, tmp_path / "some", "tp1", include=pattern)
    assert report == {**report, "tensors": 24}
    names = {name for name, _ in reshard.open(tmp_path / "some").logical}
    assert all(name.startswith("decoder.layers.0.") for name in names)


def test_here_and_above_are_targets(
    unpacked: Unpack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = unpacked(LLAMA) / "dist"
    below = tmp_path / "run" / "below"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    reshard.convert(source, ".", "tp1")
    reshard.convert(source, "..", "pp2")
    for where in (".", ".."):
        assert reshard.diff(source, where)["differences"] == []
    assert [p.name for p in tmp_path.iterdir()] == ["run"]
    with pytest.raises(UsageError, match="path of the checkpoint is empty"):
        reshard.open("")


def test_a_target_inside_a_finished_checkpoint_is_refused(unpacked: Unpack, tmp_path: Path) -> None:
    source = unpacked(LLAMA) / "dist"
    reshard.convert(source, tmp_path / "out", "tp1")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(TargetError, match="is a checkpoint itself"):
        reshard.convert(source, tmp_path / "out" / "iter_0000003", "tp1")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("damage", ["gone", "cut short"])
def test_a_finished_target_that_has_lost_a_file_is_not_called_finished(
    unpacked: Unpack, tmp_path: Path, damage: str
) -> None:
    source, out = unpacked(LLAMA) / "dist", tmp_path / "out"
    reshard.convert(source, out, "tp1")
    file = out / "iter_0000003" / "__0_0.distcp"
    whole = file.read_bytes()
    file.unlink()
    if damage == "cut short":
        file.write_bytes(whole[:-1])
    with pytest.raises(TargetError, match=r"__0_0\.distcp has .* since.*--overwrite"):
        reshard.convert(source, out, "tp1")
    reshard.convert(source, out, "tp1", overwrite=True)
    assert file.read_bytes() == whole


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("metadata.json", r"common\.pt is Megatron's, and metadata\.json"),
        (".metadata", r"no \.metadata"),
        ("common.pt", r"neither common\.pt"),
    ],
)
def test_a_half_copied_checkpoint_says_what_is_missing(
    unpacked: Unpack, tmp_path: Path, missing: str, message: str
) -> None:
    """Without metadata.json it must not pass for a bare DCP folder, whose optimizer has no name."""
    source = tmp_path / "source"
    shutil.copytree(unpacked(LLAMA) / "dist", source, copy_function=shutil.copyfile)
    (source / "iter_0000003" / missing).unlink()
    for use in (reshard.open, lambda s: reshard.convert(s, tmp_path / "out", "tp1")):
        with pytest.raises(CorruptError, match=message):
            use(source)
    if missing == "metadata.json":
        assert reshard.open(source, "dcp").steps == {}
    with pytest.raises(ReshardError):
        reshard.open(source / "iter_0000003" / missing)
