"""What a migration file changes on the way is what the framework then trains on, and shows.

An FSDP2 run resumed by ZeRO 1: as it was it goes on within rounding; with a counter, a decay, a
beta or a moment changed by one step of a migration file it does not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import reshard
from peers.parity import ParityCase, apart, first_weights, judge, live_state, states_apart

#: By what it changes: a migration file.
MIGRATIONS = {
    "step": 'kind = "reset"\nnames = ["*"]\nslots = ["step"]',
    "moment": 'kind = "reset"\nnames = ["model.layers.1.mlp.*"]\nslots = ["exp_avg"]',
    "beta": 'kind = "options"\nnames = ["*"]\nset = { betas = [0.8, 0.95] }',
    "decay": 'kind = "options"\nnames = ["*proj.weight", "*embed*", "lm_head*"]\n'
    "set = { weight_decay = 0.2 }",
    "name": 'kind = "rename"\nmatch = "model\\\\.norm\\\\.weight"\nto = "model.norm.weight"',
}
#: Losses of two frameworks in fp32: a few units in the last place (tests/test_parity.py).
ROUNDING = 2e-6


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("migrated")
    first_weights(folder / "hub")
    weights = folder / "hub" / "model.safetensors"
    found = judge(
        [
            ParityCase(
                name="own", framework="fsdp2", weights=weights, before=3, save=folder / "own",
                state=folder / "own.state", steps=4,
            )
        ],
        folder / "first",
    )  # fmt: skip
    assert found["own"]["error"] is None, found["own"]["error"]
    cases = []
    for name, text in MIGRATIONS.items():
        file = folder / f"{name}.toml"
        file.write_text(f"[[step]]\n{text}\n")
        reshard.convert(folder / "own", folder / name, "deepspeed:zero1dp2", migrate=str(file))
        cases.append(
            ParityCase(
                name=name, framework="deepspeed", stage=1, load=folder / name,
                state=folder / f"{name}.state", steps=4,
            )
        )  # fmt: skip
    return folder, found | judge(cases, folder / "then")


@pytest.mark.parametrize("name", MIGRATIONS)
def test_what_was_changed_shows_in_the_next_steps(
    judged: tuple[Path, dict[str, dict[str, Any]]], name: str
):
    _, found = judged
    assert found[name]["error"] is None, found[name]["error"]
    moved = apart(found[name], found["own"])
    assert (moved > ROUNDING) == (name != "name")


def test_only_what_was_named_is_changed(judged: tuple[Path, dict[str, dict[str, Any]]]):
    """As the live engine has it after the load."""
    folder, found = judged
    before, options = live_state(folder / "own.state", 0), found["own"]["options"]
    for name in MIGRATIONS:
        after = live_state(folder / f"{name}.state", 0)
        changed = {k for k in before if before[k].tobytes() != after[k].tobytes()}
        layer = {k for k in before if k.startswith("exp_avg.model.layers.1.mlp.")}
        assert changed == (layer if name == "moment" else set())
        assert found[name]["steps"] == ([0.0] if name == "step" else [3.0])
    assert all((live_state(folder / "moment.state", 0)[k] == 0).all() for k in layer)
    assert found["beta"]["options"] == [[o[0], 0.8, *o[2:]] for o in options]
    assert found["decay"]["options"] == [[0.2, *options[0][1:]], options[1]]
    assert found["name"]["options"] == found["step"]["options"] == options
    gaps = states_apart(before, live_state(folder / "name.state", 0))
    assert set(gaps.values()) == {0.0}
