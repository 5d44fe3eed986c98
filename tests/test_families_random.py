"""Families on models of random configurations that no fixture has: there and back, bit for bit."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

import reshard
from families import whole
from peers import run_module
from peers.hf_random import FAMILIES
from reshard.errors import FormatError
from reshard.format import open_checkpoint

#: Another one is tried by setting it; a failure names the seed in its parameters.
SEEDS = [int(s) for s in os.environ.get("RESHARD_SEEDS", "1 4").split()]
#: What Megatron-core has no layer for.
NOT_IN_MEGATRON = ("falcon", "glm4", "gpt_neox", "granite", "olmo2")
CASES = [pytest.param(s, f, id=f"{f}-seed{s}") for s in SEEDS for f in FAMILIES]


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """A folder per seed with every family's model."""
    root = tmp_path_factory.mktemp("random")
    for seed in SEEDS:
        run_module("peers.hf_random", str(seed), str(root / str(seed)))
    return root


def bits(folder: Path) -> dict:
    """Every tensor of a checkpoint: shape, dtype and bytes."""
    found = open_checkpoint(folder)
    return {
        t.name: (v.shape, v.dtype.name, whole(found, t).tobytes())
        for t, v in found.layout.tensors.items()
    }


def megatron_target(config: dict) -> str:
    """tp2pp2 where heads and groups divide; uneven stages where layers do not."""
    layers = config.get("num_hidden_layers") or config["n_layer"]
    heads = config.get("num_attention_heads") or config["n_head"]
    groups = config.get("num_key_value_heads") or heads
    stages = "pp2" if layers % 2 == 0 else f"pp2,split={layers // 2 + 1}-{layers // 2}"
    return f"megatron:tp{2 if groups % 2 == 0 else 1}{stages}"


def spelled(folder: Path, version: int, to: Path) -> Path:
    """A copy of the model folder with the config of transformers 4 or 5."""
    shutil.copytree(folder, to)
    if version == 4:
        shutil.copy(folder / "v4.json", to / "config.json")
    return to


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize(("seed", "family"), CASES)
def test_to_megatron_and_back_is_the_identity(models, tmp_path, seed, family, version):
    folder = spelled(models / str(seed) / family, version, tmp_path / "model")
    target = megatron_target(json.loads((folder / "config.json").read_text()))
    if family in NOT_IN_MEGATRON:
        with pytest.raises(FormatError, match="Megatron-core has no"):
            reshard.convert(folder, tmp_path / "m", target)
        return
    reshard.convert(folder, tmp_path / "m", target)
    reshard.convert(tmp_path / "m", tmp_path / "back", "hf", config=str(folder))
    found, wanted = bits(tmp_path / "back"), bits(folder)
    if family == "qwen3_next" and any(d == "bfloat16" for _, d, _ in wanted.values()):
        # Megatron stores these norms as weight - 1: a sum rounded to bf16, and declared
        found, wanted = (
            {n: v for n, v in held.items() if not n.endswith("linear_attn.norm.weight")}
            for held in (found, wanted)
        )
    assert found == wanted


@pytest.fixture(scope="session")
def exported(models):
    """The folder of every model that went by way of DCP, experts in one tensor, and back."""
    for folder in sorted(models.glob("*/*")):
        out = folder.parent.parent / "exported" / folder.parent.name / folder.name
        reshard.convert(folder, out / "dcp", "dcp:dp2,names=hf_fused")
        reshard.convert(out / "dcp", out / "5", "hf", config=str(folder))
        spelled(out / "5", 4, out / "4")
    return models / "exported"


@pytest.mark.parametrize(("seed", "family"), CASES)
def test_to_dcp_and_back_is_the_identity(models, exported, seed, family):
    assert bits(exported / str(seed) / family / "5") == bits(models / str(seed) / family)


@pytest.fixture(scope="session")
def judged(models, exported):
    """What transformers says of every export, by the config of either version."""
    cases = [
        {
            "name": f"{seed}-{family}-{version}",
            "folder": str(exported / str(seed) / family / str(version)),
            "expected": str(models / str(seed) / family / "expected.safetensors"),
        }
        for seed in SEEDS
        for family in FAMILIES
        for version in (4, 5)
    ]
    root = exported
    (root / "cases.json").write_text(json.dumps(cases))
    run_module("peers.hf_logits", str(root / "cases.json"), str(root / "results.jsonl"))
    rows = [json.loads(line) for line in (root / "results.jsonl").read_text().splitlines()]
    return {row["name"]: row for row in rows}


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize(("seed", "family"), CASES)
def test_transformers_loads_the_export_and_computes_the_same(judged, seed, family, version):
    found = judged[f"{seed}-{family}-{version}"]
    assert "error" not in found, found["error"]
    assert found["missing_keys"] == found["unexpected_keys"] == []
    assert found["from_expected"] == 0.0  # the same process, kernels and dtype


TORCHTITAN = ("llama", "qwen3", "qwen3_moe", "deepseek_v3")


@pytest.mark.parametrize(("seed", "family"), [c for c in CASES if c.values[1] in TORCHTITAN])
def test_to_torchtitan_and_back_is_the_identity(models, tmp_path, seed, family):
    folder = models / str(seed) / family
    config = json.loads((folder / "config.json").read_text())
    if config["tie_word_embeddings"] or config.get("mlp_bias"):
        with pytest.raises(FormatError, match="torchtitan"):
            reshard.convert(folder, tmp_path / "d", "dcp.torchtitan:dp2")
        return
    reshard.convert(folder, tmp_path / "d", "dcp.torchtitan:dp2")
    reshard.convert(tmp_path / "d", tmp_path / "back", "hf", config=str(folder))
    assert bits(tmp_path / "back") == bits(folder)


#: Families that Megatron's arguments tell: a config can be made of them where there is none.
TOLD = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral", "glm4_moe", "deepseek_v3",
        "deepseek_v2", "nemotron", "gpt2", "phi3", "gpt_oss")  # fmt: skip


@pytest.fixture(scope="session")
def told(models, tmp_path_factory):
    """Exports without a reference, with either version's keys alone; and what was said before."""
    root = tmp_path_factory.mktemp("told")
    cases, notes = [], {}
    for seed in SEEDS:
        for family in TOLD:
            folder, name = models / str(seed) / family, f"{seed}-{family}"
            config = json.loads((folder / "config.json").read_text())
            made = reshard.convert(folder, root / f"{name}-m", megatron_target(config))
            notes[name] = [n for n in made["notes"] if "logits are others" in n]
            reshard.convert(root / f"{name}-m", root / f"{name}-5", "hf")
            shutil.copytree(root / f"{name}-5", root / f"{name}-4")
            for version, others in ((5, V4_KEYS), (4, V5_KEYS)):
                path = root / f"{name}-{version}" / "config.json"
                text = json.loads(path.read_text())
                path.write_text(json.dumps({k: v for k, v in text.items() if k not in others}))
                expected = str(folder / "expected.safetensors")
                cases.append(
                    {"name": f"{name}-{version}", "folder": str(path.parent), "expected": expected}
                )
    (root / "cases.json").write_text(json.dumps(cases))
    run_module("peers.hf_logits", str(root / "cases.json"), str(root / "results.jsonl"))
    rows = [json.loads(line) for line in (root / "results.jsonl").read_text().splitlines()]
    return {row["name"]: (row, notes[row["name"][:-2]]) for row in rows}


V4_KEYS = ("rope_theta", "rope_scaling", "torch_dtype")
V5_KEYS = ("rope_parameters", "dtype")


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize(("seed", "family"), [c for c in CASES if c.values[1] in TOLD])
def test_a_config_made_of_megatrons_args_is_the_models(told, seed, family, version):
    """Or what args do not carry was told on the way there: windows, other scalings of positions."""
    found, notes = told[f"{seed}-{family}-{version}"]
    assert "error" not in found, found["error"]
    assert found["missing_keys"] == found["unexpected_keys"] == []
    # Phi-3 comes back as a Llama, whose q, k and v are multiplied one by one
    assert notes or found["from_expected"] <= (1e-4 if family == "phi3" else 0.0)
