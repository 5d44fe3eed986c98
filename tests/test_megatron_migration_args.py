"""Args of old Megatron lack fields: what the tensors do not tell is asked for by option name."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

import reshard
from reshard.errors import FormatError, LayoutError, UsageError
from test_megatron_legacy import rewritten

Unpack = Callable[[str], Path]
V3, V0 = "megatron/e-legacy-tp2pp2", "megatron/e-legacy-v0-tp2pp2"

#: Of megatron/arguments.py @ v2.0, what sizes depend on.
V2_0 = (
    "num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings",
    "make_vocab_size_divisible_by", "padded_vocab_size", "tensor_model_parallel_size",
    "pipeline_model_parallel_size", "world_size", "seed", "fp16", "params_dtype",
    "micro_batch_size", "global_batch_size", "iteration", "consumed_train_samples",
)  # fmt: skip
#: What is written of a model and the args had no word for.
DEDUCED = {
    "add_bias_linear": True,
    "normalization": "LayerNorm",
    "swiglu": False,
    "position_embedding_type": "learned_absolute",
    "untie_embeddings_and_output_weights": False,
}


def with_args(source: Path, out: Path, kept: Iterable[str], **more: Any) -> Path:
    """A copy of a legacy run whose args hold only these fields."""
    wanted = tuple(kept)

    def strip(_: str, root: dict[str, Any]) -> None:
        if "args" in root:
            fields = {k: v for k, v in vars(root["args"]).items() if k in wanted}
            root["args"] = argparse.Namespace(**fields, **more)

    return rewritten(source, out, strip)


@pytest.fixture
def v2(unpacked: Unpack, tmp_path: Path) -> Path:
    return with_args(unpacked(V0) / "torch", tmp_path / "v2", V2_0)


def test_names_and_shapes_tell_what_v2_0_did_not_say(unpacked: Unpack, v2: Path) -> None:
    opened = reshard.open(v2, vocab_size=121)
    assert reshard.fingerprint(v2, vocab_size=121) == reshard.fingerprint(unpacked(V3) / "torch")
    assert {k: opened.extras[f"args.{k}"] for k in DEDUCED} == DEDUCED


def test_todays_megatron_loads_it(unpacked: Unpack, v2: Path, tmp_path: Path) -> None:
    """What was deduced is written into the args, and marked so; the judge builds from those."""
    to = "megatron:tp1pp1"
    report = reshard.convert(v2, tmp_path / "out", to, vocab_size=121)
    marked = {f["path"].removeprefix("args."): f["kind"] for f in report["fates"]}
    assert {marked[k] for k in DEDUCED} == {"derive"}
    reshard.convert(unpacked(V3) / "torch", tmp_path / "whole", to)
    assert reshard.diff(tmp_path / "out", tmp_path / "whole")["differences"] == []


def test_heads_of_another_width_than_the_rows_have_are_refused(
    unpacked: Unpack, tmp_path: Path
) -> None:
    """hidden / heads is 4 here and the heads are 8 wide: the wrong order would look fine."""
    made = with_args(unpacked(V0) / "torch", tmp_path / "wrong", V2_0, kv_channels=4)
    with pytest.raises(LayoutError, match=r"192 rows are 16 heads of 3 x 4.*8 heads"):
        reshard.open(made)


def test_without_a_vocabulary_the_rows_stand_as_they_are(v2: Path) -> None:
    assert reshard.open(v2)["embedding.word_embeddings.weight"].shape == (128, 32)


def test_version_1_0_has_no_pipeline(unpacked: Unpack, tmp_path: Path) -> None:
    """model_parallel_size, no pipeline size: folders without a stage number tell there is none."""
    reshard.convert(unpacked(V3) / "torch", tmp_path / "flat", "megatron-legacy:tp2pp1")
    fields = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")
    made = with_args(tmp_path / "flat", tmp_path / "v1", fields, model_parallel_size=2)
    opened = reshard.open(made, vocab_size=121)
    assert str(opened.checkpoint.topology) == "tp2pp1"
    assert reshard.fingerprint(made, vocab_size=121) == reshard.fingerprint(unpacked(V3) / "torch")


def test_what_nothing_tells_is_asked_for_by_name(unpacked: Unpack, tmp_path: Path) -> None:
    made = with_args(unpacked(V0) / "torch", tmp_path / "bare", ())
    given, asked = "", ("tp", "pp", "num_layers", "num_attention_heads")
    answers = {"tp": "tp2", "pp": "pp2", "num_layers": "num_layers=4"}
    answers["num_attention_heads"] = "num-attention-heads=8"
    for name in asked:
        with pytest.raises(FormatError, match=f"--from {name}") as caught:
            reshard.fingerprint(made, given=given or None, vocab_size=121)
        assert "do not say" in str(caught.value)
        joint = "" if name == "pp" or not given else ","
        given = f"{given}{joint}{answers[name]}"
    whole = reshard.fingerprint(unpacked(V3) / "torch")
    assert reshard.fingerprint(made, given=given, vocab_size=121) == whole


def test_from_may_not_contradict_the_args(unpacked: Unpack) -> None:
    with pytest.raises(FormatError, match=r"--from says num_layers=5.*args say num_layers=4"):
        reshard.open(unpacked(V3) / "torch", "tp2,num_layers=5")
    with pytest.raises(FormatError, match="tp=4"):
        reshard.open(unpacked(V3) / "torch", "tp4")


@pytest.mark.parametrize("item", ["layers=4", "num_layers=four", "swiglu=maybe"])
def test_an_answer_that_is_none_is_a_usage_error(unpacked: Unpack, item: str) -> None:
    with pytest.raises(UsageError, match=item.partition("=")[2]):
        reshard.open(unpacked(V3) / "torch", f"tp2,{item}")


def test_torch_dist_is_asked_the_same_way(unpacked: Unpack) -> None:
    source = unpacked("megatron/a-tp4pp2") / "dist"
    with pytest.raises(FormatError, match=r"--from says num_layers=7"):
        reshard.open(source, "num_layers=7")
    assert reshard.open(source, "num_layers=8,seed=4321").extras["args.num_layers"] == 8
