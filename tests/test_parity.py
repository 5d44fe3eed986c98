"""FSDP2 and DeepSpeed resume each other's runs: real frameworks, every slot, the next steps.

One tiny llama, the same batches, rates and options in both. What parts two fresh runs of the two
frameworks is rounding: that is the noise floor, and a resumed run is held to twice of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

import reshard
from peers.parity import ParityCase, apart, judge

SPOILS = ("step", "decay", "beta", "moment", "schedule")
STEPS, SAVED_AT = 20, 3
#: By name: framework, dtype, ZeRO stage.
RUNS: dict[str, dict[str, Any]] = {
    "fsdp2 fp32": {"framework": "fsdp2", "dtype": "fp32"},
    "zero3 fp32": {"framework": "deepspeed", "dtype": "fp32", "stage": 3},
    "fsdp2 bf16": {"framework": "fsdp2", "dtype": "bf16"},
    "zero1 bf16": {"framework": "deepspeed", "dtype": "bf16", "stage": 1},
}
#: (from, to, TARGET, --dtype): bf16 computes in bf16 over fp32 masters, which FSDP2 stores alone.
PAIRS = (
    ("fsdp2 fp32", "zero3 fp32", "deepspeed:zero3dp2", None),
    ("zero3 fp32", "fsdp2 fp32", "dcp:dp2", None),
    ("fsdp2 bf16", "zero1 bf16", "deepspeed:zero1dp2", "bf16"),
    ("zero1 bf16", "fsdp2 bf16", "dcp:dp2", None),
)
THERE, BACK = ("fsdp2 fp32", "zero3 fp32"), ("zero3 fp32", "fsdp2 fp32")


@dataclass(frozen=True)
class Judged:
    """What the frameworks did: their own runs, and those of each other that they resumed."""

    folder: Path
    own: dict[str, dict[str, Any]]
    resumed: dict[str, dict[str, Any]]
    again: dict[str, Any]

    def floor(self, source: str, target: str, what: str) -> float:
        return apart(self.own[source], self.own[target], what)


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Judged:
    folder = tmp_path_factory.mktemp("parity")

    def at(name: str) -> Path:
        return folder / name.replace(" ", "-")

    own = judge(
        [
            ParityCase(
                name=name,
                before=SAVED_AT,
                save=at(name),
                state=at(f"{name}.state"),
                steps=24,
                **fields,
            )
            for name, fields in RUNS.items()
        ],
        folder / "own",
    )
    assert [r["error"] for r in own.values()] == [None] * len(own)
    cases = []
    for source, target, to, dtype in PAIRS:
        name = f"{source} to {target}"
        reshard.convert(at(source), at(name), to, dtype=dtype)
        case: dict[str, Any] = {"load": at(name), **RUNS[target]}
        back = at("back") if (source, target) == THERE else None
        cases.append(
            ParityCase(name=name, state=at(f"{name}.state"), steps=STEPS, back=back, **case)
        )
        if (source, target) in (THERE, BACK):
            spoils = SPOILS if (source, target) == THERE else ("step", "decay")
            cases += [ParityCase(name=f"{name}, spoilt {s}", spoil=s, **case) for s in spoils]
    resumed = judge(cases, folder / "resumed")
    again = {"error": resumed[f"{THERE[0]} to {THERE[1]}"]["error"]}
    if again["error"] is None:
        reshard.convert(at("back"), at("home"), "dcp:dp2")
        last = ParityCase(name="home", load=at("home"), steps=1, **RUNS[THERE[0]])
        again = judge([last], folder / "again")["home"]
    return Judged(folder, own, resumed, again)


def _pairs() -> Iterator[Any]:
    for source, target, _, _ in PAIRS:
        one, other = (("dcp" if "fsdp" in x else "deepspeed") for x in (source, target))
        mark = pytest.mark.proves(one, other, "training state")
        yield pytest.param(source, target, marks=mark, id=f"{source} to {target}")


CROSSED = list(_pairs())


@pytest.mark.parametrize(("source", "target"), CROSSED)
def test_every_slot_is_loaded_to_the_bit(judged: Judged, source: str, target: str):
    name = f"{source} to {target}"
    result = judged.resumed[name]
    assert result["error"] is None
    saved, loaded = (
        load_file(judged.folder / f"{n}.state".replace(" ", "-")) for n in (source, name)
    )
    assert {k.partition(".")[0] for k in saved} == {"master", "exp_avg", "exp_avg_sq"}
    assert len(saved) == 90
    assert saved.keys() == loaded.keys()
    assert [k for k in saved if saved[k].tobytes() != loaded[k].tobytes()] == []
    assert result["first"] == result["steps"][0] == SAVED_AT
    assert result["options"] == [[0.1, 0.9, 0.95, 1e-8], [0.0, 0.9, 0.95, 1e-8]]


@pytest.mark.parametrize(("source", "target"), CROSSED)
def test_the_next_twenty_steps_stay_within_twice_the_noise_floor(
    judged: Judged, source: str, target: str
):
    """Held to the run that saved, and to the target framework's own."""
    result = judged.resumed[f"{source} to {target}"]
    assert len(result["losses"]) == STEPS
    assert result["lrs"] == judged.own[source]["lrs"][:STEPS]
    for what in ("losses", "norms"):
        floor = judged.floor(source, target, what)
        assert 0 < floor < (2e-5 if "fp32" in source else 5e-2)
        assert apart(result, judged.own[source], what) <= 2 * floor
        assert apart(result, judged.own[target], what) <= 2 * floor


@pytest.mark.parametrize("spoil", SPOILS)
def test_a_spoilt_state_rises_above_the_floor(judged: Judged, spoil: str):
    source, target = THERE
    result = judged.resumed[f"{source} to {target}, spoilt {spoil}"]
    assert result["error"] is None
    assert apart(result, judged.own[source]) > 2 * judged.floor(source, target, "losses")


@pytest.mark.parametrize("spoil", ["step", "decay"])
def test_a_spoilt_state_rises_above_the_floor_on_the_way_back(judged: Judged, spoil: str):
    source, target = BACK
    result = judged.resumed[f"{source} to {target}, spoilt {spoil}"]
    assert result["error"] is None
    assert apart(result, judged.own[source]) > 2 * judged.floor(source, target, "losses")


def test_back_home_after_twenty_steps_elsewhere_the_run_goes_on(judged: Judged):
    source, target = THERE
    assert judged.again["error"] is None
    assert judged.again["first"] == SAVED_AT + STEPS
    expected = judged.own[source]["losses"][STEPS]
    floor = judged.floor(source, target, "losses")
    assert abs(judged.again["losses"][0] - expected) <= 2 * floor
