"""--dtype into Megatron: args say the precision that is written, and Megatron trains in it."""

from __future__ import annotations

import pytest

import reshard
from families import plain
from peers import MegatronCase, judge
from reshard.format import open_checkpoint

SAID = {
    "fp32": {"bf16": False, "fp16": False, "params_dtype": "torch.float32"},
    "fp16": {"bf16": False, "fp16": True, "params_dtype": "torch.float16"},
    "bf16": {"bf16": True, "fp16": False, "params_dtype": "torch.bfloat16"},
}
RUN = "megatron/h-llama-tp2pp2"


def said(folder):
    """The precision in a checkpoint's args."""
    extras = open_checkpoint(folder).extras
    return {k: extras[f"args.{k}"] for k in SAID["fp32"]}


@pytest.mark.parametrize("dtype", SAID)
@pytest.mark.parametrize("target", ["megatron:tp2", "megatron-legacy:tp2"])
def test_args_say_the_precision_that_is_asked_for(unpacked, tmp_path, target, dtype):
    model, source = plain(unpacked, "llama3"), unpacked(RUN) / "dist"
    reshard.convert(model, tmp_path / "model", target, dtype=dtype)
    reshard.convert(source, tmp_path / "run", target, dtype=dtype, weights_only=True)
    assert said(tmp_path / "model") == said(tmp_path / "run") == SAID[dtype]


def test_args_say_the_precision_of_a_models_own_weights(unpacked, tmp_path):
    reshard.convert(plain(unpacked, "llama3"), tmp_path / "out", "megatron:tp2")
    assert said(tmp_path / "out") == SAID["bf16"]


@pytest.fixture(scope="module")
def trained(unpacked, tmp_path_factory):
    """What Megatron says of a bf16 run that goes on in fp32, in both optimizer forms."""
    root = tmp_path_factory.mktemp("fp32")
    cases = []
    for form in ("non_distributed", "fully_reshardable"):
        reshard.convert(unpacked(RUN) / "dist", root / form, f"megatron:tp2,optim={form}",
                        dtype="fp32")  # fmt: skip
        cases.append(MegatronCase(name=form, checkpoint=root / form, tp=2))
    return {row["name"]: row for row in judge(cases, root / "judged")}


@pytest.mark.parametrize("form", ["non_distributed", "fully_reshardable"])
def test_megatron_goes_on_in_fp32_from_a_run_in_bf16(trained, form):
    found = trained[form]
    assert found["error"] is None, found["error"]
    assert found["ok"], found["different"]
