"""FSDP2, DeepSpeed ZeRO 1 to 3 and Megatron-core resume each other's runs: the real frameworks.

One tiny llama, the same first weights, batches, rates and options in all. Within one framework a
reload repeats every bit: its noise floor is zero, and what went through another framework's files
and back is held to that. Between frameworks the floor is the largest distance of any two of their
own runs from the same weights: they add the same numbers in another order. In fp32 that is a few
units in the last place of the loss (4e-7); in bf16, where each framework rounds activations and
gradients at other places, it is 1e-2, so counters and options are spoilt in fp32. In fp16 the runs
part by 3e-4 over four steps, and by a hundred times that once the gradients peak (step 11): there
the first four are held, and the loss scale over twenty.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

import reshard
from peers.parity import (
    BATCH,
    ParityCase,
    apart,
    first_weights,
    judge,
    live_state,
    states_apart,
)

Results = Mapping[str, dict[str, Any]]

SPOILS = ("step", "decay", "beta", "moment", "schedule")
SAVED_AT, STEPS, MORE = 3, 20, 4
PROBES = (1, STEPS)
_MEGATRON = "vocab_divisor=1,spec=local"
#: By name: the framework, how it runs, the TARGET of reshard. Megatron has an uneven pipeline in
#: fp32, and a distributed optimizer in bf16.
RUNS: dict[str, tuple[dict[str, Any], str]] = {
    "fsdp2": ({"framework": "fsdp2"}, "dcp:dp2"),
    "zero1": ({"framework": "deepspeed", "stage": 1}, "deepspeed:zero1dp2"),
    "zero2": ({"framework": "deepspeed", "stage": 2}, "deepspeed:zero2dp2"),
    "zero3": ({"framework": "deepspeed", "stage": 3}, "deepspeed:zero3dp2"),
    "megatron": (
        {"framework": "megatron", "pp": 2, "first_stage": 1},
        f"megatron:pp2,split=1-2,{_MEGATRON},optim=non_distributed",
    ),
    "fsdp2 bf16": ({"framework": "fsdp2", "dtype": "bf16"}, "dcp:dp2"),
    "zero2 bf16": (
        {"framework": "deepspeed", "stage": 2, "dtype": "bf16"},
        "deepspeed:zero2dp2",
    ),
    "megatron bf16": (
        {"framework": "megatron", "dtype": "bf16", "distributed": "fully_reshardable"},
        f"megatron:tp1pp1dp2,{_MEGATRON},optim=fully_reshardable",
    ),
}
RUNS |= {
    "zero2 fp16": (
        {"framework": "deepspeed", "stage": 2, "dtype": "fp16"},
        "deepspeed:zero2dp2",
    ),
    "megatron fp16": (
        {"framework": "megatron", "dtype": "fp16", "distributed": "fully_reshardable"},
        f"megatron:tp1pp1dp2,{_MEGATRON},optim=fully_reshardable",
    ),
}
#: Ways into Megatron that are proven in one direction, and back by reshard: the legacy container,
#: and fp16 under a constant loss scale. As RUNS; from which run; how close to which run of PAIRS.
MORE_WAYS: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "legacy": (
        {"framework": "megatron", "pp": 2, "first_stage": 1},
        f"megatron-legacy:pp2,split=1-2,{_MEGATRON}", "fsdp2", "fsdp2 to megatron",
    ),
    "legacy bf16": (
        {"framework": "megatron", "dtype": "bf16"},
        f"megatron-legacy:tp1pp1dp2,{_MEGATRON}", "zero2 bf16", "zero2 bf16 to megatron bf16",
    ),
    "fp16": (
        {"framework": "megatron", "dtype": "fp16", "distributed": "fully_reshardable"},
        f"megatron:tp1pp1dp2,{_MEGATRON}", "fsdp2 bf16", "fsdp2 bf16 to megatron bf16",
    ),
}  # fmt: skip
BY_DTYPE = {
    "fp32": tuple(name for name in RUNS if "16" not in name),
    "bf16": tuple(name for name in RUNS if "bf16" in name),
    "fp16": tuple(name for name in RUNS if "fp16" in name),
}
PAIRS = tuple(p for names in BY_DTYPE.values() for p in itertools.permutations(names, 2))
#: One way into each framework on which the state is spoilt.
SPOILT = (
    ("megatron", "fsdp2"),
    ("fsdp2", "zero1"),
    ("megatron", "zero2"),
    ("zero1", "zero3"),
    ("zero3", "megatron"),
)


@dataclass(frozen=True)
class Judged:
    """What the frameworks did, by name: "A", "A again", "A to B", "A by B", "A home from B"."""

    folder: Path
    results: Results

    def __getitem__(self, name: str) -> dict[str, Any]:
        found = self.results[name]
        assert found["error"] is None, found["error"]
        return found

    def state(self, name: str, after: int = 0) -> Any:
        """The live state of a case, in the hub's names."""
        return live_state(at(self.folder, f"{name}.state"), after)

    @cached_property
    def floors(self) -> dict[str, dict[str, float]]:
        """By dtype, then by quantity: how far two frameworks' own runs part at most."""
        out: dict[str, dict[str, float]] = {}
        for dtype, names in BY_DTYPE.items():
            pairs = list(itertools.combinations(names, 2))
            worst = {
                what: max(apart(self[a], self[b], what) for a, b in pairs)
                for what in ("losses", "norms")
            }
            for after in PROBES:
                for a, b in pairs:
                    gaps = states_apart(self.state(a, after), self.state(b, after))
                    for slot, gap in gaps.items():
                        key = f"{slot} after {after}"
                        worst[key] = max(worst.get(key, 0.0), gap)
            out[dtype] = worst
        return out

    def floor(self, name: str) -> dict[str, float]:
        return self.floors[dtype_of(name)]


def dtype_of(name: str) -> str:
    return name.split()[-1] if name.endswith("16") else "fp32"


def at(folder: Path, name: str) -> Path:
    return folder / name.replace(" ", "-")


def carried(folder: Path, source: str, made: str, target: str) -> Path:
    """A checkpoint as the target framework takes it, by reshard alone."""
    to = RUNS[target][1] if target in RUNS else MORE_WAYS[target][1]
    dtype = dtype_of(target) if target.endswith("16") and "fsdp2" not in target else None
    out = at(folder, made)
    reshard.convert(at(folder, source), out, to, config=str(folder / "hub"), dtype=dtype)
    return out


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Judged:
    folder = tmp_path_factory.mktemp("parity")
    hub = folder / "hub"
    first_weights(hub)
    for dtype in BY_DTYPE:
        reshard.convert(hub, folder / f"first-{dtype}", f"megatron:{_MEGATRON}", dtype=dtype)

    def case(name: str, of: str, **fields: Any) -> ParityCase:
        stem = at(folder, f"{name}.state")
        return ParityCase(name=name, state=stem, **{**RUNS[of][0], **fields})

    def start(name: str) -> Path:
        if "megatron" in name:
            return folder / f"first-{dtype_of(name)}"
        return hub / "model.safetensors"

    found = judge(
        [
            case(
                n, n, weights=start(n), before=SAVED_AT, save=at(folder, n), steps=STEPS + MORE,
                probes=PROBES,
            )
            for n in RUNS
        ],
        folder / "own",
    )  # fmt: skip
    assert [r["error"] for r in found.values()] == [None] * len(found)
    cases = [case(f"{n} again", n, load=at(folder, n), steps=STEPS, probes=PROBES) for n in RUNS]
    for a, b in PAIRS:
        there = carried(folder, a, f"{a} to {b}", b)
        home = carried(folder, f"{a} to {b}", f"{a} by {b}", a)
        cases.append(
            case(
                f"{a} to {b}", b, load=there, steps=STEPS, probes=PROBES,
                back=at(folder, f"{a} in {b}"),
            )
        )  # fmt: skip
        cases.append(case(f"{a} by {b}", a, load=home, steps=MORE, probes=(1,)))
    for a, b in SPOILT:
        for spoil in SPOILS:
            load = at(folder, f"{a} to {b}")
            cases.append(case(f"{a} to {b}, spoilt {spoil}", b, load=load, steps=MORE, spoil=spoil))
    for way, (fields, _, a, _) in MORE_WAYS.items():
        load = carried(folder, a, f"{a} to {way}", way)
        stem = at(folder, f"{a} to {way}.state")
        cases.append(ParityCase(name=f"{a} to {way}", state=stem, load=load, steps=STEPS, **fields))
        home = carried(folder, f"{a} to {way}", f"{a} by {way}", a)
        cases.append(case(f"{a} by {way}", a, load=home, steps=MORE, probes=(1,)))
    found |= judge(cases, folder / "resumed")
    cases = []
    for a, b in PAIRS:
        if found[f"{a} to {b}"]["error"] is None:
            name = f"{a} home from {b}"
            load = carried(folder, f"{a} in {b}", name, a)
            cases.append(case(name, a, load=load, steps=MORE))
    found |= judge(cases, folder / "home")
    return Judged(folder, found)


def _format(name: str) -> str:
    return {"fsdp2": "dcp", "megatron": "megatron"}.get(name.split()[0], "deepspeed")


def _pairs() -> Iterator[Any]:
    for a, b in PAIRS:
        mark = pytest.mark.proves(_format(a), _format(b), "training state")
        yield pytest.param(a, b, marks=mark, id=f"{a} to {b}")


CROSSED = list(_pairs())
HELD = [pair for pair in CROSSED if dtype_of(str(pair.values[0])) != "fp16"]


@pytest.mark.parametrize("name", RUNS)
def test_a_native_reload_repeats_every_bit(judged: Judged, name: str):
    """The noise floor within a framework: zero."""
    again, own = judged[f"{name} again"], judged[name]
    for what in ("losses", "norms", "lrs"):
        assert again[what] == own[what][:STEPS]
    for after in (0, *PROBES):
        gaps = states_apart(judged.state(f"{name} again", after), judged.state(name, after))
        assert set(gaps.values()) == {0.0}


@pytest.mark.parametrize(("a", "b"), CROSSED)
def test_every_slot_is_loaded_to_the_bit(judged: Judged, a: str, b: str):
    result = judged[f"{a} to {b}"]
    saved, loaded = judged.state(a), judged.state(f"{a} to {b}")
    assert {k.partition(".")[0] for k in saved} == {"master", "exp_avg", "exp_avg_sq"}
    assert len(saved) == 90
    assert saved.keys() == loaded.keys()
    different = [
        k for k in saved
        if (saved[k].dtype, saved[k].tobytes()) != (loaded[k].dtype, loaded[k].tobytes())
    ]  # fmt: skip
    assert different == []
    assert result["first"] == SAVED_AT
    assert result["steps"] == [SAVED_AT]
    assert result["options"] == [[0.1, 0.9, 0.95, 1e-8], [0.0, 0.9, 0.95, 1e-8]]


@pytest.mark.parametrize(("a", "b"), HELD)
def test_the_next_twenty_steps_stay_within_twice_the_noise_floor(judged: Judged, a: str, b: str):
    """Losses, gradient norms, rates; weights and moments after 1 and 20: as in the run that saved,
    and as in the target framework's own."""
    result, floor = judged[f"{a} to {b}"], judged.floor(a)
    assert len(result["losses"]) == STEPS
    for name in (a, b):
        own = judged[name]
        assert result["lrs"] == pytest.approx(own["lrs"][:STEPS], rel=1e-12)
        for what in ("losses", "norms"):
            assert apart(result, own, what) <= 2 * floor[what]
        for after in PROBES:
            gaps = states_apart(judged.state(f"{a} to {b}", after), judged.state(name, after))
            for slot, gap in gaps.items():
                assert gap <= 2 * floor[f"{slot} after {after}"], slot


def test_the_noise_floor_is_rounding(judged: Judged):
    """fp32: a few units in the last place of a loss near 4; bf16: of activations near 1."""
    assert 0 < judged.floors["fp32"]["losses"] < 2e-6
    assert 0 < judged.floors["fp32"]["norms"] < 2e-6
    assert 0 < judged.floors["bf16"]["losses"] < 5e-2


@pytest.mark.parametrize(("a", "b"), CROSSED)
def test_there_and_back_the_run_goes_on_bit_for_bit(judged: Judged, a: str, b: str):
    """Into the other framework's files and back by reshard alone: as a native reload."""
    result, native = judged[f"{a} by {b}"], judged[f"{a} again"]
    for what in ("losses", "norms", "lrs"):
        assert result[what] == native[what][:MORE]
    for after in (0, 1):
        gaps = states_apart(judged.state(f"{a} by {b}", after), judged.state(f"{a} again", after))
        assert set(gaps.values()) == {0.0}


@pytest.mark.parametrize(("a", "b"), HELD)
def test_home_after_twenty_steps_elsewhere_the_run_goes_on(judged: Judged, a: str, b: str):
    result, own = judged[f"{a} home from {b}"], judged[a]
    assert result["first"] == SAVED_AT + STEPS
    rest = {what: own[what][STEPS:] for what in ("losses", "norms", "lrs")}
    assert result["lrs"] == pytest.approx(rest["lrs"], rel=1e-12)
    for what in ("losses", "norms"):
        assert apart(result, rest, what) <= 2 * judged.floor(a)[what]


@pytest.mark.proves("dcp", "megatron-legacy", "training state")
@pytest.mark.proves("deepspeed", "megatron-legacy", "training state")
@pytest.mark.proves("megatron-legacy", "dcp", "training state")
@pytest.mark.proves("megatron-legacy", "deepspeed", "training state")
@pytest.mark.parametrize("way", MORE_WAYS)
def test_legacy_files_and_fp16_runs_are_resumed_too(judged: Judged, way: str):
    _, _, a, near = MORE_WAYS[way]
    result, other = judged[f"{a} to {way}"], judged[near]
    gaps = states_apart(judged.state(f"{a} to {way}"), judged.state(a))
    assert set(gaps.values()) == {0.0}
    assert (result["steps"], result["options"]) == (other["steps"], other["options"])
    for what in ("losses", "norms"):
        floor = 0.0 if way == "legacy" else 2 * judged.floor(a)[what]
        assert apart(result, other, what) <= floor
    assert judged[f"{a} by {way}"]["losses"] == judged[f"{a} again"]["losses"][:MORE]


@pytest.mark.parametrize("spoil", SPOILS)
@pytest.mark.parametrize(("a", "b"), SPOILT)
def test_a_spoilt_state_rises_above_the_floor(judged: Judged, a: str, b: str, spoil: str):
    """One step, half a decay, a hundredth of a beta, a moment's sign, one step of the schedule."""
    result = judged[f"{a} to {b}, spoilt {spoil}"]
    floor = judged.floor(a)
    above = [w for w in ("losses", "norms") if apart(result, judged[a], w) > 2 * floor[w]]
    assert above


@pytest.mark.parametrize(("a", "b"), list(itertools.permutations(BY_DTYPE["fp16"], 2)))
def test_the_loss_scale_grows_at_the_same_steps(judged: Judged, a: str, b: str):
    """From where the run left off, to the step: twice in the twenty that follow."""
    early = {n: {w: judged[n][w][:MORE] for w in ("losses", "norms")} for n in (a, b)}
    for what in ("losses", "norms"):
        floor = apart(early[a], early[b], what)
        assert 0 < floor < 2e-3
        # ZeRO adds gradients in fp16: one unit in the last place of a norm near 1 is 2 ** -10, and
        # four steps may happen to show less
        assert apart(judged[f"{a} to {b}"], early[a], what) <= max(2 * floor, 2**-10)
    scales = judged[a]["scales"]
    assert sorted(set(scales[:STEPS])) == [512.0, 1024.0, 2048.0]
    assert judged[f"{a} to {b}"]["scales"] == scales[:STEPS]
    assert judged[f"{a} home from {b}"]["scales"] == scales[STEPS:]
    assert judged[f"{a} by {b}"]["scales"] == scales[:MORE]


def test_a_run_says_how_many_samples_it_has_seen(judged: Judged):
    """In each framework's own words, after 3 steps and after 23, of which 20 elsewhere."""
    for name in PAIRS:
        a, b = name
        for made, steps in ((f"{a} by {b}", SAVED_AT), (f"{a} home from {b}", SAVED_AT + STEPS)):
            opened = reshard.open(at(judged.folder, made)).checkpoint
            assert opened.iteration == steps
            assert reshard.checkpoint.consumed_samples(opened) == steps * BATCH
