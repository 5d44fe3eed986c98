"""The frameworks decide: transformers loads what we write, and megatron-core computes the same."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

import reshard
from families import WITH_TRUTH, WITHOUT_TRUTH, plain, whole
from peers import run_module
from reshard.converters.megatron import module_order, stages
from reshard.converters.megatron.sizes import SEQUENTIAL, sizes
from reshard.families import recognised
from reshard.format import open_checkpoint
from reshard.tensor import TensorId
from reshard.translate import translate

MADE = "starcoder2"  # by transformers while the test runs
#: Families whose megatron-core model is built here, of the local spec, in fp32 on the CPU.
#: (llama3: Megatron scales its rotary frequencies from 8192 positions, the fixture from 128.
#: deepseek_v2: Megatron ranks groups of experts by sums, and the plan says so.
#: mistral: its window of 8 tokens is a mask, which is not what is tested.)
IN_MEGATRON = ("llama2", "llama3_tied", "qwen2", "qwen2_tied", "qwen3", "qwen3_moe",
               "mixtral", "gpt2", "phi3", "glm4_moe", "deepseek_v3",
               MADE)  # fmt: skip


def megatron_tensors(folder, target):
    """Writes the model's tensors by module name of a one-rank GPTModel; gives its args."""
    checkpoint = open_checkpoint(folder)
    found = translate(checkpoint, recognised(checkpoint), "mcore").checkpoint
    args = {k[5:]: v for k, v in found.extras.items() if k.startswith("args.")}
    model = replace(sizes(args), experts_form=SEQUENTIAL)
    pipe = stages.pipeline(model.layers, 1, 1)
    tree = module_order.legacy_entries(model, pipe.chunks[0][0], spec="local")
    values = {
        legacy: whole(found, TensorId(name)).astype(np.float32)
        for legacy, name in tree
        if name is not None
    }
    np.savez(target, **values)
    return args, next(v for k, v in values.items() if "word_embeddings" in k).shape[0]


@pytest.fixture(scope="session")
def judged(unpacked, tmp_path_factory):
    """What transformers and megatron-core say of every family: exports by way of Megatron."""
    root = tmp_path_factory.mktemp("logits")
    cases = []
    run_module("peers.hf_make", str(root / "made"))
    for family in (*WITH_TRUTH, *WITHOUT_TRUTH, MADE):
        folder = root / "made" if family == MADE else plain(unpacked, family)
        out = root / family
        if family == "qwen3_next":
            reshard.convert(
                folder, out, "hf"
            )  # Megatron rounds its norms in bf16: test_delta_net.py
        else:
            spec = ",spec=local" if family in IN_MEGATRON else ""
            reshard.convert(folder, out / "m", f"megatron:tp2{spec}")
            reshard.convert(out / "m", out / "hf", "hf", config=str(folder))
            out = out / "hf"
        case = {
            "name": family,
            "folder": str(out),
            "expected": str(folder / "expected.safetensors"),
        }
        if family in IN_MEGATRON:
            args, rows = megatron_tensors(folder, root / f"{family}.npz")
            case |= {"megatron": str(root / f"{family}.npz"), "args": args, "rows": rows}
            case["dist"] = str(root / family / "m/release")
        cases.append(case)
    for archive, form in (("llama3", "v4_config"), ("llama3", "legacy_bin"),
                          ("llama3_tied", "with_lm_head"), ("qwen3_moe", "v5_fused")):  # fmt: skip
        source, out = unpacked(f"hf/{archive}") / form, root / form
        reshard.convert(source, out, "hf")
        expected = plain(unpacked, archive) / "expected.safetensors"
        cases.append({"name": form, "folder": str(out), "expected": str(expected)})
    (root / "cases.json").write_text(json.dumps(cases))
    run_module("peers.hf_logits", str(root / "cases.json"), str(root / "results.jsonl"))
    rows = [json.loads(line) for line in (root / "results.jsonl").read_text().splitlines()]
    return {row["name"]: row for row in rows}


@pytest.mark.parametrize(
    "name",
    [*WITH_TRUTH, *WITHOUT_TRUTH, MADE, "v4_config", "legacy_bin", "with_lm_head", "v5_fused"],
)
def test_transformers_loads_what_is_written_and_computes_the_same(judged, name):
    found = judged[name]
    assert "error" not in found, found["error"]
    assert found["missing_keys"] == found["unexpected_keys"] == []
    assert found["from_expected"] < 1e-4  # fp32 on another CPU's kernels; 0 where it was made


@pytest.mark.parametrize("name", IN_MEGATRON)
def test_megatron_core_loads_what_is_written_and_computes_what_transformers_does(judged, name):
    """A wrong order of heads, of gate and up, or of rotary rows moves logits by their own size."""
    found = judged[name]
    assert "error" not in found, found["error"]
    assert found["from_megatron"] < 1e-4 * found["largest"]  # sums in another order, fp32
