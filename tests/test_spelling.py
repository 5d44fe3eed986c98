"""Names that are nobody's, or another's, are not written to a model folder as if the hub's."""

from __future__ import annotations

import json
import shutil

import ml_dtypes  # noqa: F401  # numpy reads bfloat16 arrays by it
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import reshard
from families import plain, whole
from reshard.errors import CoverageError
from reshard.families import recognised
from reshard.format import open_checkpoint
from reshard.namings import dialects
from reshard.schema import families
from reshard.spelling import spellings
from reshard.tensor import TensorId
from reshard.translate import translate


def named(folder, *names):
    """A folder of tensors of these names, and no config."""
    folder.mkdir()
    save_file({n: np.arange(6.0).reshape(2, 3) for n in names}, folder / "model.safetensors")
    return folder


def test_torchtitans_names_are_translated_by_a_config_and_refused_without(unpacked, tmp_path):
    run = unpacked("dcp/torchtitan_w2")
    source = next(p.parent for p in sorted(run.rglob(".metadata")))
    with pytest.raises(CoverageError, match=r"those of torchtitan \(families: .*llama.*--config"):
        reshard.convert(source, tmp_path / "out", "hf")
    with pytest.raises(CoverageError, match="those of torchtitan"):
        reshard.convert(source, tmp_path / "out", "dcp:names=hf")
    assert not (tmp_path / "out").exists()


def test_metas_names_are_translated_by_a_config_and_refused_without(unpacked, tmp_path):
    """Rows of q and k stand in pairs: converted by hand as transformers' script does."""
    model = plain(unpacked, "llama3")
    config = json.loads((model / "config.json").read_text())
    shards = [load_file(p) for p in model.glob("model*.safetensors")]
    tensors = {name: value for shard in shards for name, value in shard.items()}
    parts = {
        "self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk",
        "self_attn.v_proj": "attention.wv", "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2", "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm", "model.embed_tokens": "tok_embeddings",
        "lm_head": "output", "model.layers.": "layers.", "model.norm": "norm",
    }  # fmt: skip
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    meta = {}
    for name, value in tensors.items():
        spelled = name
        for old, new in parts.items():
            spelled = spelled.replace(old, new)
        for one, n in heads.items():
            if f"self_attn.{one}_proj" in name:
                rows, columns = value.shape
                halves = value.reshape(n, 2, rows // n // 2, columns)
                value = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows, columns)
        meta[spelled] = value
    (tmp_path / "meta").mkdir()
    save_file(meta, tmp_path / "meta/model.safetensors")
    with pytest.raises(CoverageError, match=r"attention\.w.*Meta's Llama.*--config"):
        reshard.convert(tmp_path / "meta", tmp_path / "out", "hf")
    reshard.convert(tmp_path / "meta", tmp_path / "out", "hf", config=str(model))
    found = load_file(tmp_path / "out/model.safetensors")
    assert found.keys() == tensors.keys()
    assert all(found[n].tobytes() == v.tobytes() for n, v in tensors.items())


@pytest.mark.parametrize(
    "name",
    [
        "_fsdp_wrapped_module.model.layers.0._fsdp_wrapped_module.mlp.up_proj.weight",
        "_orig_mod.model.norm.weight",
        "model.layers.0._flat_param",
        "module.model.norm.weight",
    ],
)
def test_a_wrappers_names_are_refused(unpacked, tmp_path, name):
    source = named(tmp_path / "source", "model.norm.weight", name)
    with pytest.raises(CoverageError, match="is a wrapper's name"):
        reshard.convert(source, tmp_path / "out", "hf")
    shutil.copy(plain(unpacked, "llama3") / "config.json", source)
    config = json.loads((source / "config.json").read_text()) | {"model_type": "never_heard"}
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(CoverageError, match="is a wrapper's name"):
        reshard.convert(source, tmp_path / "out", "hf")


def test_names_of_no_family_need_a_config_or_a_word(tmp_path):
    source = named(tmp_path / "source", "tower.7.gizmo.weight", "tower.7.widget")
    with pytest.raises(CoverageError, match=r"tower\.7\.gizmo.*--config.*--schema none"):
        reshard.convert(source, tmp_path / "out", "hf")
    reshard.convert(source, tmp_path / "out", "hf", schema="none")
    assert load_file(tmp_path / "out/model.safetensors").keys() == {
        "tower.7.gizmo.weight", "tower.7.widget",
    }  # fmt: skip


@pytest.mark.parametrize("name", sorted(families()))
def test_the_hubs_names_are_known_without_a_config(name):
    from reshard.dialect import expand
    from reshard.schema import Scope

    for example in families()[name].examples:
        made = expand(Scope(families()[name], example), "hf")
        assert any(s.dialect.name == "hf" for s in spellings(made, "torch"))


def test_torchtitan_stacks_the_experts_that_the_hub_has_one_by_one(unpacked):
    checkpoint = open_checkpoint(plain(unpacked, "qwen3_moe"))
    found = translate(checkpoint, recognised(checkpoint), "torchtitan").checkpoint
    parts = {"w1_EFD": "gate_proj", "w3_EFD": "up_proj", "w2_EDF": "down_proj"}
    for ours, theirs in parts.items():
        name = f"layers.1.moe.routed_experts.inner_experts.{ours}"
        held = [
            whole(checkpoint, TensorId(f"model.layers.1.mlp.experts.{e}.{theirs}.weight"))
            for e in range(4)
        ]
        assert whole(found, TensorId(name)).tobytes() == np.stack(held).tobytes()
    q = whole(found, TensorId("layers.1.attention.qkv_linear.wq.weight"))
    theirs = whole(checkpoint, TensorId("model.layers.1.self_attn.q_proj.weight"))
    assert q.tobytes() == theirs.tobytes()  # Qwen3's rows are in halves on both sides


def test_the_dialects_that_loaders_hold_us_to_are_the_hubs():
    assert [n for n, d in dialects().items() if d.checked] == ["hf", "hf_bare", "hf_fused"]
