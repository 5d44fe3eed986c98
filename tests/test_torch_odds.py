"""Checkpoints of torch, accelerate and Trainer in forms that are easy to get wrong."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import reshard
from peers import run_module
from reshard.errors import FormatError


@pytest.fixture(scope="module")
def odds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("odds")
    run_module("peers.torch_odds", str(folder))
    return folder


def differing(path: Path, truth: Path, given: str | None = None) -> list[str]:
    """Which values of the live state the checkpoint does not have to the bit."""
    wanted, wrong = torch.load(truth), []
    opened = reshard.open(path, given)
    aliases = opened.extras.get("ties", {})
    for key, value in wanted.items():
        slot, _, name = key.partition(".")
        if slot == "step":
            same = opened.steps.get(name) == float(value)
        elif value.dim():
            here = (aliases.get(name, name), slot)
            found = np.ascontiguousarray(opened[here][...]) if here in known(opened) else None
            same = found is not None and found.tobytes() == value.contiguous().numpy().tobytes()
        else:
            continue
        if not same:
            wrong.append(key)
    return wrong


def known(opened: reshard.api.Opened) -> set[tuple[str, str]]:
    return {(t.name, t.slot) for t in opened.checkpoint.layout.tensors}


@pytest.mark.parametrize("name", ["parts", "accelerate-bin", "adafactor"])
def test_an_optimizer_of_numbers_in_a_file_of_its_own_is_read(odds: Path, tmp_path: Path, name):
    tied = ["param.lm_head.weight"] if name == "adafactor" else []  # left out by safetensors
    assert differing(odds / name, odds / f"{name}.truth.pt") == tied
    reshard.convert(odds / name, tmp_path / "made", "dcp:dp2")
    assert differing(tmp_path / "made", odds / f"{name}.truth.pt") == []


def test_accelerates_safetensors_need_the_models_config(odds: Path, tmp_path: Path):
    with pytest.raises(FormatError, match=r"torch:reference=DIR"):
        reshard.open(odds / "accelerate")
    given = f"torch:reference={odds / 'config'}"
    assert differing(odds / "accelerate", odds / "accelerate.truth.pt", given) == [
        "param.lm_head.weight"
    ]
    shutil.copytree(odds / "accelerate", tmp_path / "with")
    shutil.copy(odds / "config/config.json", tmp_path / "with")
    reshard.convert(tmp_path / "with", tmp_path / "made", "dcp:dp2")
    assert differing(tmp_path / "made", odds / "accelerate.truth.pt") == []


def test_an_optimizer_without_state_keeps_its_groups(odds: Path, tmp_path: Path):
    reshard.convert(odds / "stateless", tmp_path / "made", "torch")
    groups = reshard.open(tmp_path / "made").groups
    assert groups is not None
    assert [g.members[:2] for g in groups] == [("0.weight", "1.weight")]


@pytest.mark.parametrize("name", ["nadam", "radam", "adamax"])
def test_adams_cousins_keep_their_own_options(odds: Path, tmp_path: Path, name: str):
    reshard.convert(odds / name, tmp_path / "made", "dcp:dp2")
    options = [
        [set(g.options) for g in reshard.open(p).groups or ()]
        for p in (odds / name, tmp_path / "made")
    ]
    assert options[0] == options[1]


def test_state_beside_a_model_without_an_optimizer_is_kept(odds: Path, tmp_path: Path):
    made = reshard.convert(odds / "untrained", tmp_path / "made", "dcp:dp2")
    assert made["losses"] == []
    kept = reshard.open(tmp_path / "made").extras
    assert (kept["epoch"], kept["words"]) == (3, ["a", "b"])
    assert kept["rng"] == reshard.open(odds / "untrained").extras["rng"]


@pytest.mark.parametrize("name", ["sparse", "csr", "jagged", "meta", "conjugated"])
def test_a_tensor_that_is_no_plain_one_is_refused_by_name(odds: Path, name: str):
    with pytest.raises(FormatError, match=r"model\.odd: a tensor of a kind that is not read"):
        reshard.open(odds / f"{name}.pt")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("module.pt", r"a whole module was pickled \(torch\.nn\.modules\.container\.Sequential\)"),
        ("tensor.pt", "holds one value, and no state dict"),
        ("whole", r"only objects \(model, optim\).*flatten_state_dict=False"),
        ("pair", "two models that name their parameters alike"),
        ("two", "several optimizers that number their parameters are not read. Save them with"),
        ("conjugated-store", r"model\.odd: a tensor of a kind that is not read"),
    ],
)
def test_what_is_no_state_dict_is_refused_by_what_it_is(odds: Path, name: str, said: str):
    with pytest.raises(FormatError, match=said):
        reshard.plan(odds / name, "dcp:dp2")


def test_run_folders_of_files_and_of_exports_take_an_iteration(odds: Path):
    assert reshard.open(odds / "lightning-run").extras["global_step"] == 10
    assert reshard.open(odds / "lightning-run", iteration=9).extras["global_step"] == 9
    with pytest.raises(FormatError, match=r"--iteration N"):
        reshard.open(odds / "exports")
    assert reshard.open(odds / "exports", iteration=3).checkpoint.path.name == "checkpoint-3"


def test_torch_loads_a_tied_model_of_the_hub_by_both_names(odds: Path):
    for to in ("dcp", "torch"):
        made = reshard.convert(odds / "tied", odds / f"tied-{to}", to)
        assert made["losses"] == []
    run_module("peers.torch_odds", "check", str(odds))


def test_a_tied_model_of_no_family_is_told_that_a_name_may_be_missing(odds: Path, tmp_path: Path):
    shutil.copytree(odds / "tied", tmp_path / "model")
    config = tmp_path / "model/config.json"
    config.write_text(config.read_text().replace('"model_type": "llama"', '"model_type": "opt"'))
    notes = reshard.plan(tmp_path / "model", "dcp:dp2")["notes"]
    assert isinstance(notes, list)
    assert [n for n in notes if "'opt', which is in no family" in str(n)]
