"""Qwen3-Next in Megatron: its gated delta nets, by megatron-core's own module."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import reshard
from families import plain
from peers import run_module
from reshard.dialect import expand
from reshard.errors import FormatError, LayoutError
from reshard.families import recognised
from reshard.format import open_checkpoint


def args_of(folder):
    """The args of a Megatron checkpoint, without their prefix."""
    return {k[5:]: v for k, v in open_checkpoint(folder).extras.items() if k.startswith("args.")}


@pytest.mark.parametrize("seed", [1, 2])
def test_megatron_core_computes_what_transformers_does(tmp_path, seed):
    """Random sizes, an irregular order of layers, tensors cut for tp2pp2 and loaded on one rank."""
    run_module("peers.hf_random", str(seed), str(tmp_path), "qwen3_next")
    model, out = tmp_path / "qwen3_next", tmp_path / "megatron"
    layers = json.loads((model / "config.json").read_text())["num_hidden_layers"]
    stages = "pp2" if layers % 2 == 0 else f"pp2,split={layers // 2 + 1}-{layers // 2}"
    reshard.convert(model, out, f"megatron:tp2{stages}", dtype="fp32")
    args = {k: v for k, v in args_of(out).items() if isinstance(v, int | float | str | list)}
    (tmp_path / "args.json").write_text(json.dumps(args))
    names = [str(model), str(out / "release"), str(tmp_path / "args.json"), str(tmp_path / "out")]
    run_module("peers.delta_net", *names)
    found = json.loads((tmp_path / "out").read_text())
    assert found["largest"] > 0.5
    # fp32 in another order of sums: 6 layers of decays in exponentials; any wrong order of heads,
    # sections or gates moves logits by their own size
    assert found["apart"] < 3e-4 * found["largest"], found


def test_a_regular_order_of_layers_is_one_number(unpacked, tmp_path):
    model = plain(unpacked, "qwen3_next")
    reshard.convert(model, tmp_path / "out", "megatron:tp2")
    assert args_of(tmp_path / "out")["linear_attention_freq"] == 4
    reshard.convert(tmp_path / "out", tmp_path / "back", "hf")  # its config made of args
    assert reshard.diff(tmp_path / "back", model)["compared"] > 0


def test_what_megatron_does_not_have_is_refused(unpacked, tmp_path):
    model = plain(unpacked, "qwen3_next")
    with pytest.raises(FormatError, match="gated delta nets under spec=transformer_engine only"):
        reshard.convert(model, tmp_path / "out", "megatron:tp2,spec=local")
    with pytest.raises(LayoutError, match=r"key heads.*tp=4"):
        reshard.convert(model, tmp_path / "out", "megatron:tp4")
    with pytest.raises(FormatError, match=r"gated_delta_net.*module order"):
        reshard.convert(model, tmp_path / "out", "megatron-legacy:tp2")


def test_the_mtp_layer_of_a_hub_folder_goes_both_ways(unpacked, tmp_path):
    """Its names follow Megatron-Bridge's Qwen3NextBridge; its values are random."""
    model = plain(unpacked, "qwen3_next")
    known = recognised(open_checkpoint(model))
    added = {
        name: np.random.default_rng(len(name)).standard_normal(s.shape).astype(np.float32)
        for name, s in expand(known.scope(), "hf").items()
        if name.startswith("mtp.")
    }
    bridge = {"mtp.fc.weight", "mtp.norm.weight", "mtp.pre_fc_norm_embedding.weight",
              "mtp.pre_fc_norm_hidden.weight", "mtp.layers.0.mlp.gate.weight",
              "mtp.layers.0.mlp.shared_expert_gate.weight", "mtp.layers.0.self_attn.q_proj.weight",
              "mtp.layers.0.mlp.experts.3.down_proj.weight"}  # fmt: skip
    assert bridge <= added.keys()
    assert not any("linear_attn" in name for name in added)
    reshard.convert(model, tmp_path / "wide", "hf", dtype="fp32")
    weights = tmp_path / "wide/model.safetensors"
    weights.chmod(0o644)
    save_file({**load_file(weights), **added}, weights)
    reshard.convert(tmp_path / "wide", tmp_path / "m", "megatron:tp2")
    names = {t.name for t in open_checkpoint(tmp_path / "m").layout.tensors}
    assert "mtp.layers.0.transformer_layer.self_attention.linear_qkv.weight" in names
    assert args_of(tmp_path / "m")["mtp_num_layers"] == 1
    reshard.convert(tmp_path / "m", tmp_path / "back", "hf", config=str(tmp_path / "wide"))
    found = load_file(tmp_path / "back/model.safetensors")
    assert added.keys() <= found.keys()
    assert all(found[name].tobytes() == value.tobytes() for name, value in added.items())
