"""Model folders: read, written, refused; and converted to and from Megatron whole."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from click.testing import CliRunner

import reshard
from families import plain, whole
from reshard.cli import main
from reshard.errors import (
    CorruptError,
    CoverageError,
    FormatError,
    LossError,
    ReplicaError,
    UnsafeError,
    UsageError,
)
from reshard.format import open_checkpoint
from reshard.tensor import TensorId
from support import ROOT


def equal(left, right):
    """Whether two checkpoints hold the same tensors, bit for bit."""
    found = reshard.diff(left, right)
    return found["status"] == "equal" and found["compared"] > 0


def copied(folder, target):
    """A folder that a test may change."""
    shutil.copytree(folder, target)
    for file in target.rglob("*"):
        file.chmod(0o644)
    return target


def index_of(folder):
    """The index of a sharded folder, and where it is."""
    path = folder / "model.safetensors.index.json"
    return path, json.loads(path.read_text())


@pytest.mark.proves("hf", "hf", "weights")
@pytest.mark.parametrize(
    ("archive", "form", "twin"),
    [
        ("llama3", "legacy_bin", "plain"),
        ("llama3", "single_file", "plain"),
        ("llama3", "v4_config", "plain"),
        ("llama3_tied", "legacy_bin_alias", "plain"),
        ("llama3_tied", "with_lm_head", "plain"),
        ("qwen3_moe", "v5_fused", "plain"),
    ],
)
def test_every_form_of_a_model_is_written_as_the_hub_has_it(
    unpacked, tmp_path, archive, form, twin
):
    folder = unpacked(f"hf/{archive}")
    reshard.convert(folder / form, tmp_path / "out", "hf", strict=True)
    assert equal(tmp_path / "out", folder / twin)


@pytest.mark.proves("hf", "megatron", "weights")
@pytest.mark.proves("megatron", "hf", "weights")
@pytest.mark.parametrize("family", ["llama3", "qwen2_tied", "qwen2_moe", "gpt_oss", "gemma3_text"])
def test_to_megatron_and_back_is_the_same_folder(unpacked, tmp_path, family):
    folder = plain(unpacked, family)
    reshard.convert(folder, tmp_path / "megatron", "megatron:tp2pp2", strict=True)
    reshard.convert(tmp_path / "megatron", tmp_path / "back", "hf", config=str(folder))
    assert equal(tmp_path / "back", folder)
    assert equal(tmp_path / "megatron", folder)
    config = (tmp_path / "back/config.json").read_bytes()
    assert config == (folder / "config.json").read_bytes()


def test_experts_are_dealt_to_expert_ranks_and_back(unpacked, tmp_path):
    folder = plain(unpacked, "qwen3_moe")
    reshard.convert(folder, tmp_path / "megatron", "megatron:pp2ep4", strict=True)
    reshard.convert(tmp_path / "megatron", tmp_path / "back", "hf", config=str(folder))
    assert equal(tmp_path / "back", folder)


@pytest.mark.proves("hf", "megatron-legacy", "weights")
@pytest.mark.proves("megatron-legacy", "hf", "weights")
def test_to_legacy_megatron_and_back_is_the_same(unpacked, tmp_path):
    folder = plain(unpacked, "qwen3")
    reshard.convert(folder, tmp_path / "megatron", "megatron-legacy:tp2pp2")
    reshard.convert(tmp_path / "megatron", tmp_path / "back", "hf", config=str(folder))
    assert equal(tmp_path / "back", folder)


@pytest.mark.proves("hf", "dcp", "weights")
@pytest.mark.proves("dcp", "hf", "weights")
def test_through_dcp_and_back_is_the_same(unpacked, tmp_path):
    folder = plain(unpacked, "qwen3_moe")
    reshard.convert(folder, tmp_path / "dcp", "dcp:dp2")
    reshard.convert(tmp_path / "dcp", tmp_path / "back", "hf", config=str(folder))
    assert equal(tmp_path / "back", folder)


def test_the_config_made_from_megatrons_args_describes_the_same_model(unpacked, tmp_path):
    folder = plain(unpacked, "qwen3")
    reshard.convert(folder, tmp_path / "megatron", "megatron:tp2")
    report = reshard.convert(tmp_path / "megatron", tmp_path / "back", "hf")
    assert any("config.json is made" in note for note in report["notes"])
    made = json.loads((tmp_path / "back/config.json").read_text())
    theirs = json.loads((folder / "config.json").read_text())
    for key in ("hidden_size", "head_dim", "num_key_value_heads", "vocab_size", "rms_norm_eps",
                "model_type", "architectures", "tie_word_embeddings"):  # fmt: skip
        assert made[key] == theirs[key], key
    assert made["rope_theta"] == made["rope_parameters"]["rope_theta"]
    assert made["dtype"] == made["torch_dtype"] == "bfloat16"
    assert equal(tmp_path / "back", folder)


# --- what is written -----------------------------------------------------------------------------


def test_shards_stay_within_the_limit_and_the_index_names_what_they_hold(unpacked, tmp_path):
    folder = plain(unpacked, "llama3")
    reshard.convert(folder, tmp_path / "out", "hf", max_shard_size=50_000)
    _, index = index_of(tmp_path / "out")
    sizes: dict[str, int] = {}
    total = 0
    for name, file in index["weight_map"].items():
        with safetensors.safe_open(tmp_path / "out" / file, "np") as opened:
            assert name in opened.keys()  # noqa: SIM118  # safe_open is no mapping
            shape = opened.get_slice(name).get_shape()
        sizes[file] = sizes.get(file, 0) + 2 * int(np.prod(shape))
        total += 2 * int(np.prod(shape))
    assert max(sizes.values()) <= 50_000
    assert index["metadata"] == {"total_size": total, "total_parameters": total // 2}
    assert len(sizes) == len(list((tmp_path / "out").glob("*.safetensors")))


def test_balanced_shards_are_of_one_size(unpacked, tmp_path):
    folder = plain(unpacked, "llama3")
    reshard.convert(folder, tmp_path / "out", "hf:max_shard_size=120KB,balanced=1")
    sizes = [f.stat().st_size for f in (tmp_path / "out").glob("*.safetensors")]
    assert len(sizes) == 2
    assert max(sizes) < 1.3 * min(sizes)


def test_the_same_input_gives_the_same_bytes(unpacked, tmp_path):
    folder = plain(unpacked, "qwen2")
    for name in ("one", "two"):
        reshard.convert(folder, tmp_path / name, "hf", max_shard_size=64_000)
    files = sorted(p.name for p in (tmp_path / "one").iterdir() if "reshard" not in p.name)
    for name in files:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_files_obey_the_umask(unpacked, tmp_path):
    before = os.umask(0o027)
    try:
        reshard.convert(plain(unpacked, "llama3"), tmp_path / "out", "hf")
    finally:
        os.umask(before)
    for file in (tmp_path / "out").iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o640, file


def test_every_other_file_of_the_reference_is_copied_and_no_weights(unpacked, tmp_path):
    source = copied(plain(unpacked, "llama3"), tmp_path / "source")
    (source / "README.md").write_text("hello")
    (source / "modeling_own.py").write_text("pass")
    (source / "training_args.bin").write_bytes(b"\x80\x02.")
    (source / "stale.gguf").write_bytes(b"x")
    report = reshard.convert(source, tmp_path / "out", "hf")
    there = {p.name for p in (tmp_path / "out").iterdir()}
    assert {"README.md", "modeling_own.py", "tokenizer.json", "chat_template.jinja"} <= there
    assert not {"training_args.bin", "stale.gguf", "expected.safetensors"} & there
    fates = {f["path"]: f["kind"] for f in report["fates"]}
    assert fates["training_args.bin"] == "drop"
    assert ("opaque-dropped", "training_args.bin") in {
        (x["code"], x["what"]) for x in report["losses"]
    }


def test_a_tokenizer_of_another_folder_takes_the_place_of_the_references(unpacked, tmp_path):
    own = tmp_path / "tokenizer"
    own.mkdir()
    (own / "tokenizer.json").write_text('{"mine": 1}')
    (own / "config.json").write_text('{"not": "this"}')
    folder = plain(unpacked, "llama3")
    reshard.convert(folder, tmp_path / "out", "hf", tokenizer=str(own))
    assert (tmp_path / "out/tokenizer.json").read_text() == '{"mine": 1}'
    assert not (tmp_path / "out/tokenizer_config.json").exists()
    assert (tmp_path / "out/config.json").read_bytes() == (folder / "config.json").read_bytes()


def test_a_router_and_its_bias_stay_wide(unpacked, tmp_path):
    folder = plain(unpacked, "deepseek_v3")
    wide = tmp_path / "wide"
    reshard.convert(folder, wide, "hf", dtype="fp32")
    report = reshard.convert(wide, tmp_path / "out", "hf", dtype="bf16")
    kinds = {
        t.name: v.dtype.name for t, v in open_checkpoint(tmp_path / "out").layout.tensors.items()
    }
    kept = {n for n, k in kinds.items() if k == "float32"}
    assert kept == {n for n in kinds if ".mlp.gate." in n}
    assert set(report["dtypes"]) == {"bfloat16", "float32"}
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["dtype"] == "bfloat16"


def test_a_narrowing_that_nobody_asked_for_does_not_happen(unpacked, tmp_path):
    folder = plain(unpacked, "llama3")
    reshard.convert(folder, tmp_path / "wide", "hf", dtype="fp32")
    reshard.convert(tmp_path / "wide", tmp_path / "out", "hf", strict=True)
    assert {v.dtype.name for v in open_checkpoint(tmp_path / "out").layout.tensors.values()} == {
        "float32"
    }
    with pytest.raises(LossError, match="narrowed"):
        reshard.convert(tmp_path / "wide", tmp_path / "narrow", "hf", dtype="bf16", strict=True)


@pytest.mark.parametrize(("first", "second"), [("bf16", "fp16"), ("fp16", "bf16")])
def test_the_other_16_bits_are_a_loss(first, second, unpacked, tmp_path):
    reshard.convert(plain(unpacked, "llama3"), tmp_path / "in", "hf", dtype=first)
    report = reshard.convert(tmp_path / "in", tmp_path / "out", "hf", dtype=second)
    weights = len(open_checkpoint(tmp_path / "out").layout.tensors)
    assert [x["code"] for x in report["losses"]] == ["narrowed"] * weights
    with pytest.raises(LossError, match="narrowed"):
        reshard.convert(tmp_path / "in", tmp_path / "never", "hf", dtype=second, strict=True)


def test_what_float16_cannot_hold_of_bfloat16_is_refused(unpacked, tmp_path):
    folder = copied(plain(unpacked, "llama3"), tmp_path / "in")
    array = open_checkpoint(folder).layout.pieces(TensorId("model.norm.weight"))[0].array
    assert array.dtype.name == "bfloat16"
    with (folder / array.file).open("r+b") as file:
        file.seek(array.offset)
        file.write(np.array(1e30, array.dtype.numpy).tobytes())
    with pytest.raises(LossError, match=r"1 values .* lie beyond what float16 holds"):
        reshard.convert(folder, tmp_path / "out", "hf", dtype="fp16")
    assert not (tmp_path / "out").exists()


def test_another_16_bits_are_rounded_from_the_master(unpacked, tmp_path):
    source = unpacked("megatron/a-tp4pp2") / "dist"
    reshard.convert(source, tmp_path / "out", "hf", dtype="fp16")
    weights = open_checkpoint(tmp_path / "out")
    master = whole(open_checkpoint(source), TensorId("decoder.final_layernorm.weight", "master"))
    asked = whole(weights, TensorId("model.norm.weight"))
    assert asked.tobytes() == master.astype(np.float16).tobytes()


def test_weights_come_from_the_master_where_it_is_wider(unpacked, tmp_path):
    source = unpacked("megatron/a-tp4pp2") / "dist"
    reshard.convert(source, tmp_path / "out", "hf", dtype="fp32")
    weights = open_checkpoint(tmp_path / "out")
    megatron = open_checkpoint(source)
    master = whole(megatron, TensorId("decoder.final_layernorm.weight", "master"))
    assert whole(weights, TensorId("model.norm.weight")).tobytes() == master.tobytes()


def test_a_model_that_no_family_knows_goes_through_by_its_names(unpacked, tmp_path):
    source = copied(plain(unpacked, "llama3"), tmp_path / "source")
    config = json.loads((source / "config.json").read_text()) | {"model_type": "never_heard"}
    (source / "config.json").write_text(json.dumps(config))
    reshard.convert(source, tmp_path / "out", "hf", max_shard_size=40_000)
    assert equal(tmp_path / "out", source)
    with pytest.raises(CoverageError, match=r"never_heard.*--config.*--schema"):
        reshard.convert(source, tmp_path / "megatron", "megatron:tp2")
    reshard.convert(source, tmp_path / "megatron", "megatron:tp2", schema="llama")


# --- quantised models ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("archive", "form"), [("deepseek_v3", "fp8_mtp"), ("gpt_oss", "square_mxfp4")]
)
def test_quantised_tensors_pass_through_untouched(unpacked, tmp_path, archive, form):
    folder = unpacked(f"hf/{archive}") / form
    reshard.convert(folder, tmp_path / "out", "hf", strict=True)
    assert equal(tmp_path / "out", folder)
    assert (tmp_path / "out/config.json").read_bytes() == (folder / "config.json").read_bytes()
    with pytest.raises(LossError, match=r"quantised in blocks.*--dtype bf16"):
        reshard.convert(folder, tmp_path / "megatron", "megatron:tp2")


def test_mxfp4_is_read_as_transformers_reads_it(unpacked, tmp_path):
    folder = unpacked("hf/gpt_oss") / "square_mxfp4"
    reshard.convert(folder, tmp_path / "out", "hf", dtype="bf16")
    made = open_checkpoint(tmp_path / "out")
    with safetensors.safe_open(folder / "dequantised_expected.safetensors", "np") as expected:
        for name in expected.keys():  # noqa: SIM118  # safe_open is no mapping
            wanted = raw_bf16(folder / "dequantised_expected.safetensors", name)
            assert whole(made, TensorId(name)).tobytes() == wanted, name
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert "quantization_config" not in config


def raw_bf16(path, name):
    """The bytes of a tensor, which numpy has no type for."""
    raw = path.read_bytes()
    n = int.from_bytes(raw[:8], "little")
    a, b = json.loads(raw[8 : 8 + n])[name]["data_offsets"]
    return raw[8 + n + a : 8 + n + b]


def test_fp8_blocks_are_multiplied_by_their_scales(unpacked, tmp_path):
    folder = unpacked("hf/deepseek_v3") / "fp8_mtp"
    reshard.convert(folder, tmp_path / "out", "hf", dtype="fp32")
    raw, made = open_checkpoint(folder), open_checkpoint(tmp_path / "out")
    name = "model.layers.0.self_attn.kv_b_proj.weight"  # [128, 24] in blocks of 16 x 16
    values = whole(raw, TensorId(name)).astype(np.float32)
    scales = whole(raw, TensorId(name + "_scale_inv"))
    wanted = values * np.repeat(np.repeat(scales, 16, 0), 16, 1)[:128, :24]
    assert whole(made, TensorId(name)).tobytes() == wanted.astype(np.float32).tobytes()


def test_mtp_layers_go_to_megatron_and_back(unpacked, tmp_path):
    folder = unpacked("hf/deepseek_v3") / "fp8_mtp"
    reshard.convert(folder, tmp_path / "plain", "hf", dtype="bf16")
    reshard.convert(tmp_path / "plain", tmp_path / "megatron", "megatron:tp2", strict=True)
    names = {t.name for t in open_checkpoint(tmp_path / "megatron").layout.tensors}
    assert "mtp.layers.0.transformer_layer.mlp.experts.3.linear_fc1.weight" in names
    config = str(tmp_path / "plain")
    reshard.convert(tmp_path / "megatron", tmp_path / "back", "hf", config=config)
    assert equal(tmp_path / "back", tmp_path / "plain")


def test_an_fp8_weight_without_its_scales_is_refused(unpacked, tmp_path):
    folder = copied(unpacked("hf/deepseek_v3") / "fp8_mtp", tmp_path / "source")
    path, index = index_of(folder)
    name = "model.layers.0.mlp.down_proj.weight"
    for file in sorted(set(index["weight_map"].values())):
        rename(folder / file, f"{name}_scale_inv", f"{name}_scale_old")
    index["weight_map"] = {
        n.replace(f"{name}_scale_inv", f"{name}_scale_old"): f
        for n, f in index["weight_map"].items()
    }
    path.write_text(json.dumps(index))
    with pytest.raises(CorruptError, match="its values are unknown"):
        reshard.convert(folder, tmp_path / "out", "hf", dtype="bf16")


def rename(path, old, new):
    """Another name of the same length for a tensor of a safetensors file."""
    assert len(old) == len(new)
    path.write_bytes(path.read_bytes().replace(f'"{old}"'.encode(), f'"{new}"'.encode()))


# --- refusals ------------------------------------------------------------------------------------


def set_quantised(folder, method):
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"quantization_config": {"quant_method": method}}
    path.write_text(json.dumps(config))


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "compressed-tensors"])
def test_other_quantisations_are_refused_by_name(unpacked, tmp_path, method):
    folder = copied(plain(unpacked, "llama3"), tmp_path / "source")
    set_quantised(folder, method)
    with pytest.raises(FormatError, match=method):
        reshard.open(folder)


@pytest.mark.parametrize(
    ("suffix", "what"),
    [("self_attn.q_proj.qweight", "GPTQ"), ("mlp.up_proj.lora_A.weight", "LoRA"),
     ("mlp.down_proj.SCB", "bitsandbytes")],
)  # fmt: skip
def test_packed_tensors_are_refused_whatever_the_config_says(tmp_path, suffix, what):
    safetensors.numpy.save_file(
        {f"model.layers.0.{suffix}": np.zeros(4, np.int32)}, tmp_path / "model.safetensors"
    )
    with pytest.raises(FormatError, match=what):
        reshard.open(tmp_path)


def test_a_folder_of_an_adapter_is_refused_by_name(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    safetensors.numpy.save_file({"a": np.zeros(2)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(FormatError, match="LoRA adapter and no model"):
        reshard.open(tmp_path)


def change_index(folder, change):
    path, index = index_of(folder)
    change(index["weight_map"])
    path.write_text(json.dumps(index))


INDEXES = {
    "a ghost": (lambda m: m.update(ghost=next(iter(m.values()))), CorruptError, "ghost"),
    "a file that is not there": (
        lambda m: m.update(ghost="model-00009-of-00009.safetensors"), CorruptError, "not there"),
    "a file outside the folder": (
        lambda m: m.update({k: f"../{v}" for k, v in m.items()}), UnsafeError, "outside"),
    "an absolute file": (
        lambda m: m.update(ghost="/etc/passwd.safetensors"), UnsafeError, "outside the folder"),
    "a pickle": (lambda m: m.update(ghost="x.pkl"), CorruptError, "no .safetensors"),
    "a tensor left out": (
        lambda m: m.pop("model.norm.weight"), CorruptError, "does not name"),
    "a tensor in another file": (
        lambda m: m.update({"model.norm.weight": max(
            v for v in m.values() if v != m["model.norm.weight"])}), CorruptError, "it lies in"),
    "nothing": (lambda m: m.clear(), CorruptError, "no weight_map"),
}  # fmt: skip


@pytest.mark.parametrize("name", INDEXES)
def test_an_index_that_lies_is_refused(unpacked, tmp_path, name):
    change, error, message = INDEXES[name]
    folder = copied(plain(unpacked, "llama3"), tmp_path / "source")
    change_index(folder, change)
    with pytest.raises(error, match=message):
        reshard.open(folder)


def test_two_models_in_one_folder_are_refused(unpacked, tmp_path):
    folder = copied(plain(unpacked, "llama3"), tmp_path / "source")
    shutil.copy(unpacked("hf/llama3") / "single_file/model.safetensors", folder)
    with pytest.raises(FormatError, match="two models"):
        reshard.open(folder)


@pytest.mark.parametrize(
    "name",
    ["extra.safetensors", "original/consolidated.00.pth", "model-00009-of-00009.safetensors"],
)
def test_weights_that_the_index_does_not_name_are_said(unpacked, tmp_path, name):
    """Hub folders hold other forms of a model: they are passed over, as loaders do, not unsaid."""
    folder = copied(unpacked("hf/llama3") / "plain", tmp_path / "source")
    (folder / "expected.safetensors").unlink()  # of the fixture's own
    before = reshard.fingerprint(folder)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(b"what no loader looks at")
    (folder / "rng_state_0.pth").write_bytes(b"")
    (folder / "tokenizer.model").write_bytes(b"")
    said = f"{name} is there too and is not read: no part of the model by its index"
    assert reshard.open(folder).checkpoint.problems == (said,)
    assert said in reshard.plan(folder, "dcp:dp2")["notes"]
    assert [f["detail"] for f in reshard.verify(folder)["findings"]] == [said]
    assert reshard.fingerprint(folder) == before


def test_an_optimizer_beside_quantised_weights_is_refused(unpacked, tmp_path):
    folder = copied(unpacked("hf/deepseek_v3") / "fp8_mtp", tmp_path / "source")
    (folder / "optimizer").mkdir()
    (folder / "optimizer" / "optimizer.json").write_text("{}")
    for to in ("hf", "dcp:dp2"):
        with pytest.raises(FormatError, match="optimizer: an optimizer lies beside weights that"):
            reshard.plan(folder, to, dtype="bf16")
        assert reshard.plan(folder, to, dtype="bf16", weights_only=True)["tensors"]


def test_shards_without_an_index_are_refused(unpacked, tmp_path):
    folder = copied(plain(unpacked, "llama3"), tmp_path / "source")
    index_of(folder)[0].unlink()
    with pytest.raises(CorruptError, match=r"neither model\.safetensors\.index\.json"):
        reshard.open(folder)


def test_a_head_that_differs_from_the_tied_embedding_is_refused(unpacked, tmp_path):
    folder = copied(unpacked("hf/llama3_tied") / "with_lm_head", tmp_path / "source")
    path = folder / "model.safetensors"
    raw = bytearray(path.read_bytes())
    n = int.from_bytes(raw[:8], "little")
    at = json.loads(raw[8 : 8 + n])["lm_head.weight"]["data_offsets"][0]
    raw[8 + n + at] ^= 1
    path.write_bytes(raw)
    with pytest.raises(ReplicaError, match="embed_tokens"):
        reshard.convert(folder, tmp_path / "out", "hf")


def test_a_topology_of_a_model_folder_is_refused(unpacked, tmp_path):
    with pytest.raises(UsageError, match="no topology"):
        reshard.convert(plain(unpacked, "llama3"), tmp_path / "out", "hf:tp2")
    with pytest.raises(UsageError, match=r"hf\.fused"):
        reshard.convert(plain(unpacked, "llama3"), tmp_path / "out", "hf.other")


def test_families_that_megatron_cannot_be_are_refused_with_the_reason(unpacked, tmp_path):
    source = copied(plain(unpacked, "llama3"), tmp_path / "source")
    config = json.loads((source / "config.json").read_text()) | {"model_type": "granite"}
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(FormatError, match="Megatron-core has no multipliers"):
        reshard.convert(source, tmp_path / "out", "megatron:tp2")


# --- the command line ----------------------------------------------------------------------------


def test_an_export_is_one_json_object_that_a_pipeline_can_read(unpacked, tmp_path):
    folder = plain(unpacked, "qwen2")
    reshard.convert(folder, tmp_path / "megatron", "megatron:tp2pp2")
    ran = CliRunner().invoke(
        main,
        ["convert", str(tmp_path / "megatron"), str(tmp_path / "out"), "--to", "hf", "--config",
         str(folder), "--tokenizer", str(folder), "--dtype", "bf16", "--json"],
    )  # fmt: skip
    assert ran.exit_code == 0, ran.output
    report = json.loads(ran.stdout)
    assert report["status"] == "ok"
    for name, row in report["files"].items():
        assert (tmp_path / "out" / name).stat().st_size == row["bytes"]
        assert row["digest"].startswith("xxh3_128:")
    assert report["parameters"] == sum(report["dtypes"].values()) > 0
    assert report["losses"] == []
    assert report["peak_rss"] > 0
    assert report["seconds"] >= 0


def test_the_job_of_the_readme_runs(unpacked, tmp_path):
    """Line by line, on a training run; its JSON against the schema."""
    text = (ROOT / "README.md").read_text()
    job = text.partition("  script:\n")[2].partition("```")[0]
    lines = [line.strip()[2:] for line in job.splitlines() if "pip install" not in line]
    assert len(lines) == 2
    run, reference = unpacked("megatron/h-llama-tp2pp2") / "dist", tmp_path / "reference"
    reshard.convert(run, reference, "hf")
    (reference / "tokenizer.json").write_text("{}")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    variables = {**os.environ, "RUN": str(run), "REFERENCE": str(reference), "PATH": path}
    for line in lines:
        subprocess.run(["bash", "-ec", line], cwd=tmp_path, env=variables, check=True)
    report = json.loads((tmp_path / "export.json").read_text())
    schema = json.loads((ROOT / "schemas/convert.schema.json").read_text())
    jsonschema.validate(report, schema, cls=jsonschema.Draft202012Validator)
    said = {"files", "parameters", "dtypes", "losses", "seconds", "peak_rss", "fingerprints"}
    assert said <= report.keys() & schema["properties"].keys()
    assert {f for f in report["files"] if "reshard" not in f} == {
        "config.json", "model.safetensors", "tokenizer.json",
    }  # fmt: skip
    assert report["dtypes"] == {"bfloat16": report["parameters"]}
    dropped = {(x["code"], x["what"]) for x in report["losses"]}
    assert {("weights-only", slot) for slot in ("exp_avg", "exp_avg_sq", "master")} <= dropped


def test_families_are_listed_and_proven():
    listed = CliRunner().invoke(main, ["schemas", "--json"])
    names = [f["name"] for f in json.loads(listed.stdout)["families"]]
    assert {"llama", "deepseek", "gpt_oss", "qwen3_next"} <= set(names)
    proven = CliRunner().invoke(main, ["schemas", "check", "llama", "--json"])
    assert json.loads(proven.stdout)["status"] == "ok"
    broken = CliRunner().invoke(main, ["schemas", "check", "nothing.toml"])
    assert broken.exit_code == 2


def test_one_fingerprint_in_every_container(unpacked, tmp_path):
    folder = plain(unpacked, "qwen3_moe")
    reshard.convert(folder, tmp_path / "megatron", "megatron:tp2ep2")
    seen = set()
    for place in (folder, tmp_path / "megatron", unpacked("hf/qwen3_moe") / "v5_fused"):
        ran = CliRunner().invoke(main, ["fingerprint", "--canonical", "--json", str(place)])
        report = json.loads(ran.stdout)
        assert report["naming"] == "family qwen3_moe"
        seen.add(report["fingerprints"]["param"])
    assert len(seen) == 1
