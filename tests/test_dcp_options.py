"""Options of parameter groups that are dicts or lists, from and to torch's own files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import reshard

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

CFG: dict[str, Any] = {
    "power": -0.8,
    "iters": {"inner": 5, "names": ["a", "b"]},
    "steps": [{"n": 1}],
}
NAMES = ["a.weight", "a.bias"]


def state_of(flat: bool) -> dict[str, Any]:
    """Model and optimizer after a step, with an option that is a dict."""
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 2)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model["a"](torch.ones(3)).sum().backward()
    optimizer.step()
    optimizer.param_groups[0]["cfg"] = CFG
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    optim = get_optimizer_state_dict(model, optimizer, options=options)
    return {"model": model.state_dict(), "optim": optim}


def loaded(folder: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    """What torch loads into a state of this form, all of it another's before."""
    blank = {
        "model": {k: torch.zeros_like(v) for k, v in wanted["model"].items()},
        "optim": blanked(wanted["optim"]),
    }
    dcp.load(blank, checkpoint_id=folder, no_dist=True)
    return blank


def blanked(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: blanked(v) for k, v in value.items()}
    if isinstance(value, list) and any(isinstance(v, dict) for v in value):
        return [blanked(v) for v in value]
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else None


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(v, b[k]) for k, v in a.items())
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(torch.equal(a, b)) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize("flat", [False, True])
def test_what_torch_saved_is_an_option_and_torch_loads_it_again(tmp_path: Path, flat: bool) -> None:
    """torch spreads a dict over keys; they are one option, and are spread alike again."""
    state = state_of(flat)
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    opened = reshard.open(tmp_path / "dcp")
    assert opened.groups is not None
    assert [g.options["cfg"] for g in opened.groups] == [CFG]
    assert not [path for path in opened.extras if "cfg" in path]
    reshard.convert(tmp_path / "dcp", tmp_path / "out", "dcp:dp2")
    assert same(loaded(tmp_path / "out", state), state)


def test_a_file_of_torch_becomes_a_folder_that_torch_loads(tmp_path: Path) -> None:
    state = state_of(False)
    torch.save(state, tmp_path / "model.pt")
    opened = reshard.open(tmp_path / "model.pt")
    assert opened.groups is not None
    assert opened.groups[0].options["cfg"] == CFG
    reshard.convert(tmp_path / "model.pt", tmp_path / "out", "dcp:dp2,optim=optim")
    assert same(loaded(tmp_path / "out", state), state)
    reshard.convert(tmp_path / "out", tmp_path / "back", "torch:optim=optim")
    (back,) = (tmp_path / "back").glob("*.pt")
    again = torch.load(back, weights_only=True)
    assert again["optim"]["param_groups"][0]["cfg"] == CFG
    assert reshard.diff(tmp_path / "model.pt", tmp_path / "out")["status"] == "equal"
