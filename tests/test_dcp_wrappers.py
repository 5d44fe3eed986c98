"""accelerate and transformers' Trainer resume what we write into the folders that they know."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

import reshard
from peers.fsdp_wrappers import WrapperCase, judge

WRAPPERS = ("accelerate", "trainer")
SPOILS = ("moment", "step")


@dataclass(frozen=True)
class Judged:
    """What the wrappers did: their own runs, native reloads, and resumes of converted folders."""

    folder: Path
    results: dict[str, dict[str, Any]]

    def state(self, name: str) -> dict[str, Any]:
        return dict(load_file(self.folder / f"{name}.state"))


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Judged:
    folder = tmp_path_factory.mktemp("wrappers")

    def case(name: str, **fields: Any) -> WrapperCase:
        return WrapperCase(name=name, state=folder / f"{name}.state", **fields)

    own = judge([case(w, wrapper=w, save=folder / w) for w in WRAPPERS], folder / "own")
    assert [r["error"] for r in own.values()] == [None, None]
    saved = {"accelerate": folder / "accelerate", "trainer": folder / "trainer/checkpoint-3"}
    reshard.convert(saved["accelerate"], folder / "plain", "dcp.plain:dp5")
    reshard.convert(folder / "plain", folder / "through", "dcp.accelerate:dp2")
    reshard.convert(saved["trainer"], folder / "recut", "dcp:dp3")
    made = {"accelerate": folder / "through", "trainer": folder / "recut"}
    cases = []
    for wrapper in WRAPPERS:
        cases.append(case(f"{wrapper}-native", wrapper=wrapper, load=saved[wrapper]))
        cases.append(case(f"{wrapper}-made", wrapper=wrapper, load=made[wrapper]))
        cases += [
            case(f"{wrapper}-{s}", wrapper=wrapper, load=made[wrapper], spoil=s) for s in SPOILS
        ]
    return Judged(folder, own | judge(cases, folder / "resumed"))


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.proves("dcp", "dcp", "training state")
def test_the_wrapper_loads_every_slot_to_the_bit(judged: Judged, wrapper: str):
    assert judged.results[f"{wrapper}-made"]["error"] is None
    saved, loaded = judged.state(wrapper), judged.state(f"{wrapper}-made")
    assert {k.partition(".")[0] for k in saved} == {"param", "exp_avg", "exp_avg_sq", "step"}
    assert saved.keys() == loaded.keys()
    assert [k for k in saved if saved[k].tobytes() != loaded[k].tobytes()] == []


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_the_next_losses_are_those_of_the_wrappers_own_reload(judged: Judged, wrapper: str):
    """Bit for bit: a reload of its own folder at this world does not part from the run at all."""
    run, native = judged.results[wrapper], judged.results[f"{wrapper}-native"]
    assert native["error"] is None
    assert native["losses"] == run["losses"]
    assert len(set(run["losses"])) == 4
    assert judged.results[f"{wrapper}-made"]["losses"] == native["losses"]


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("spoil", SPOILS)
def test_a_spoilt_state_shows(judged: Judged, wrapper: str, spoil: str):
    spoilt = judged.results[f"{wrapper}-{spoil}"]
    assert spoilt["error"] is None
    assert spoilt["losses"] != judged.results[wrapper]["losses"]
