"""One model in the names of several frameworks, with its optimizer where both sides have one."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

import reshard
from families import plain, whole
from reshard.checkpoint import ParamGroup
from reshard.errors import CoverageError, LossError, UsageError
from reshard.families import recognised
from reshard.format import open_checkpoint
from reshard.tensor import TensorId
from reshard.translate import translate


def equal(left, right):
    """Whether two checkpoints hold the same tensors, bit for bit."""
    found = reshard.diff(left, right)
    return found["status"] == "equal" and found["compared"] > 0


@pytest.fixture
def titan_config(tmp_path):
    """The config of the model in fixture torchtitan_w2, which its README gives in words."""
    folder = tmp_path / "config"
    folder.mkdir()
    config = {
        "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 32, "vocab_size": 256,
        "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.proves("dcp", "hf", "weights")
def test_a_torchtitan_run_is_exported_as_torchtitan_exports_it(unpacked, tmp_path, titan_config):
    run = unpacked("dcp/torchtitan_w2") / "checkpoint"
    reshard.convert(run / "step-1004", tmp_path / "out", "hf", config=titan_config)
    assert equal(tmp_path / "out", run / "step-2004")


def test_a_hub_model_starts_torchtitan(unpacked, tmp_path, titan_config):
    run = unpacked("dcp/torchtitan_w2") / "checkpoint"
    reshard.convert(run / "step-2004", tmp_path / "out", "dcp.torchtitan", config=titan_config)
    assert equal(tmp_path / "out", run / "step-1004")


def by_hand(fused, groups, q_per_group, head_dim):
    """q, k and v of a linear_qkv, taken apart as Megatron's attention.py does."""
    cut = fused.reshape(groups, q_per_group + 2, head_dim, -1)
    return (
        cut[:, :q_per_group].reshape(-1, fused.shape[-1]),
        cut[:, q_per_group].reshape(-1, fused.shape[-1]),
        cut[:, q_per_group + 1].reshape(-1, fused.shape[-1]),
    )


@pytest.mark.proves("megatron", "dcp", "training state")
def test_moments_follow_the_weights_from_megatron_to_fsdp(unpacked, tmp_path):
    source = unpacked("megatron/h-llama-tp2pp2") / "dist"
    reshard.convert(source, tmp_path / "dcp", "dcp:dp2,names=hf")
    mine, theirs = open_checkpoint(source), open_checkpoint(tmp_path / "dcp")
    args = {k[5:]: v for k, v in mine.extras.items() if k.startswith("args.")}
    groups, heads, head_dim = (
        args[k] for k in ("num_query_groups", "num_attention_heads", "kv_channels")
    )
    for slot in ("exp_avg", "exp_avg_sq"):
        fused = whole(mine, TensorId("decoder.layers.2.self_attention.linear_qkv.weight", slot))
        parts = by_hand(fused, groups, heads // groups, head_dim)
        for part, name in zip(parts, ("q_proj", "k_proj", "v_proj"), strict=True):
            tensor = TensorId(f"model.layers.2.self_attn.{name}.weight", slot)
            assert np.array_equal(whole(theirs, tensor), part), (slot, name)
    decays = {m for g in theirs.groups for m in g.members if g.options["weight_decay"]}
    assert "model.layers.0.mlp.up_proj.weight" in decays
    assert "model.layers.0.input_layernorm.weight" not in decays
    assert set(theirs.steps.values()) == set(mine.steps.values())


def test_a_master_becomes_the_weight_that_torch_keeps(unpacked, tmp_path):
    source = unpacked("megatron/h-llama-tp2pp2") / "dist"
    reshard.convert(source, tmp_path / "dcp", "dcp:dp2,names=hf")
    master = whole(open_checkpoint(source), TensorId("decoder.final_layernorm.weight", "master"))
    weight = whole(open_checkpoint(tmp_path / "dcp"), TensorId("model.norm.weight"))
    assert weight.tobytes() == master.tobytes()


@pytest.mark.proves("dcp", "megatron", "weights")
@pytest.mark.parametrize("name", ["fsdp2_w2_moe", "fsdp2_w2_bf16_tied"])
def test_an_fsdp_run_goes_to_megatron_and_to_the_hub(unpacked, tmp_path, name):
    folder = unpacked(f"dcp/{name}")
    source, config = folder / "checkpoint", str(folder)
    options = {"config": config, "weights_only": True}
    reshard.convert(source, tmp_path / "megatron", "megatron:tp2", **options)
    reshard.convert(tmp_path / "megatron", tmp_path / "a", "hf", config=config)
    reshard.convert(source, tmp_path / "b", "hf", config=config)
    assert equal(tmp_path / "a", tmp_path / "b")


def test_an_optimizer_that_no_megatron_job_has_is_refused(unpacked, tmp_path):
    """Its norms have a learning rate of their own."""
    folder = unpacked("dcp/fsdp2_w2_bf16_tied")
    with pytest.raises(LossError, match=r"lr 0\.00.* and 0\.00.* --weights-only"):
        reshard.convert(folder / "checkpoint", tmp_path / "out", "megatron:tp2", config=str(folder))


def test_a_reference_of_another_naming_says_whose_names_are_wanted(unpacked, tmp_path):
    """--like a DCP checkpoint of transformers 5 in memory: experts in one tensor."""
    folder = unpacked("hf/qwen3_moe")
    reshard.convert(folder / "v5_fused", tmp_path / "like", "dcp:dp2", schema="none")
    reshard.convert(folder / "plain", tmp_path / "megatron", "megatron:tp2")
    reshard.convert(tmp_path / "megatron", tmp_path / "out", like=str(tmp_path / "like"))
    assert equal(tmp_path / "out", folder / "v5_fused")


def test_names_that_nobody_has_are_refused(unpacked, tmp_path):
    source = unpacked("hf/llama3") / "plain"
    with pytest.raises(UsageError, match="names=klingon"):
        reshard.convert(source, tmp_path / "out", "dcp:names=klingon")
    with pytest.raises(UsageError, match="written with mcore names"):
        reshard.convert(source, tmp_path / "out", "megatron:tp2,names=hf")


def test_a_run_whose_arguments_no_family_has_is_refused(unpacked, tmp_path):
    source = unpacked("megatron/h-mla-tp2") / "dist"
    with pytest.raises(CoverageError, match=r"arguments describe no known family.*--config"):
        reshard.convert(source, tmp_path / "out", "hf")


@pytest.mark.parametrize("family", ["gemma", "gemma2", "gemma3_text", "minimax_m2", "olmoe"])
def test_families_that_arguments_do_not_decide_ask_for_the_config(unpacked, tmp_path, family):
    """Megatron's arguments know neither Gemma's scaled embeddings nor norms of a full width."""
    source = plain(unpacked, family)
    reshard.convert(source, tmp_path / "megatron", "megatron:tp1")
    with pytest.raises(CoverageError, match=r"--config DIR.*--schema NAME"):
        reshard.convert(tmp_path / "megatron", tmp_path / "out", "hf")
    reshard.convert(tmp_path / "megatron", tmp_path / "out", "hf", config=str(source))
    assert reshard.diff(source, tmp_path / "out")["differences"] == []


def test_tensors_that_a_family_lacks_are_named(unpacked, tmp_path):
    source = unpacked("megatron/h-mtp-pp2") / "dist"
    with pytest.raises(CoverageError, match=r"has mtp\.layers\.0\.eh_proj\.weight"):
        reshard.convert(source, tmp_path / "out", "hf")


def test_parameters_of_one_tensor_in_two_groups_are_refused(unpacked):

    checkpoint = open_checkpoint(unpacked("hf/llama3") / "plain")
    names = [t.name for t in checkpoint.layout.tensors]
    q = "model.layers.0.self_attn.q_proj.weight"
    groups = (
        ParamGroup({"lr": 1.0}, tuple(n for n in names if n != q)),
        ParamGroup({"lr": 2.0}, (q,)),
    )
    with pytest.raises(LossError, match=r"linear_qkv.*different param groups"):
        translate(replace(checkpoint, groups=groups), recognised(checkpoint), "mcore")
    steps = {n: 3.0 for n in names} | {q: 4.0}
    with pytest.raises(LossError, match=r"linear_qkv.*step counters are \[3\.0, 4\.0\]"):
        translate(replace(checkpoint, steps=steps), recognised(checkpoint), "mcore")


def test_a_token_that_the_tokenizer_adds_is_kept(unpacked, tmp_path):
    """NullTokenizer counts one more than args.vocab_size; the row is not padding."""
    source = unpacked("megatron/a-tp4pp2") / "dist"
    reshard.convert(source, tmp_path / "out", "hf")
    rows = open_checkpoint(source).layout.tensors[TensorId("embedding.word_embeddings.weight")]
    made = open_checkpoint(tmp_path / "out").layout.tensors[TensorId("model.embed_tokens.weight")]
    assert made.shape == rows.shape == (121, rows.shape[1])
    assert json.loads((tmp_path / "out/config.json").read_text())["vocab_size"] == 121


def test_a_config_with_fewer_tokens_than_the_run_is_refused(unpacked, tmp_path):
    source = unpacked("megatron/a-tp4pp2") / "dist"
    reshard.convert(source, tmp_path / "out", "hf")
    path = tmp_path / "out/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": 120}))
    options = {"config": str(tmp_path / "out")}
    with pytest.raises(CoverageError, match=r"shape \[121, .*\[120, "):
        reshard.convert(source, tmp_path / "less", "hf", **options)
    reshard.convert(source, tmp_path / "less", "hf", vocab_size=120, **options)
