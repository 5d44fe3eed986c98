"""Every format into every format: one trained llama, bit-exact in every slot, or refused by name.

The first checkpoint is Megatron's own; the others were made of it. That each format's files are
what the framework writes and loads, other tests show; the matrix links to those where there are,
as they are collected first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import reshard
from reshard.errors import FormatError
from reshard.fingerprints import slot_digests
from reshard.format import formats, open_checkpoint
from reshard.namings import Choice
from reshard.readback import fingerprints
from reshard.renaming import canonical

Unpack = Callable[[str], Path]

_MEGATRON = "tp2pp2,vocab_divisor=8,spec=local"
TARGETS = {
    "dcp": "dcp:dp2",
    "deepspeed": "deepspeed:zero2dp2",
    "deepspeed-universal": "deepspeed-universal",
    "hf": "hf",
    "megatron": f"megatron:{_MEGATRON}",
    "megatron-legacy": f"megatron-legacy:{_MEGATRON}",
    "torch": "torch",
    "universal": "universal",
}
#: What no optimizer can come from or go into.
WEIGHTS = "hf"
REFUSED = {("hf", "deepspeed-universal"): "is made of optimizer states, and there are none"}
TRAINED = ("master", "exp_avg", "exp_avg_sq")


@pytest.fixture(scope="module")
def sources(unpacked: Unpack, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same state in every format."""
    folder = tmp_path_factory.mktemp("sources")
    first = unpacked("megatron/h-llama-tp2pp2") / "dist"
    made = {"hf": folder / "hf"}
    reshard.convert(first, made["hf"], "hf")
    for name, to in TARGETS.items():
        if name not in ("hf", "megatron"):
            made[name] = folder / name
            reshard.convert(first, made[name], to, config=str(made["hf"]))
    return made | {"megatron": first}


def digests(path: Path, config: Path) -> dict[str, str]:
    """One digest per slot under the family's names; a lone fp32 weight is its own master."""
    found = canonical(open_checkpoint(path), Choice(config=str(config)))
    sums = {t: s.hex for t, s in fingerprints(found, elements=1 << 18).items()}
    slots = dict(slot_digests(found.layout.tensors.values(), sums))
    kinds = {v.dtype.name for t, v in found.layout.tensors.items() if t.slot == "param"}
    if kinds == {"float32"}:
        weights = slots.pop("param")
        assert slots.setdefault("master", weights) == weights
    return slots


def _cells() -> Iterator[Any]:
    for source in TARGETS:
        for target in TARGETS:
            verdict = "weights" if WEIGHTS in (source, target) else "training state"
            verdict = "refused" if (source, target) in REFUSED else verdict
            mark = pytest.mark.proves(source, target, verdict)
            yield pytest.param(source, target, marks=mark, id=f"{source} to {target}")


@pytest.mark.parametrize(("source", "target"), list(_cells()))
def test_any_format_goes_into_any(
    sources: dict[str, Path], tmp_path: Path, source: str, target: str
):
    config = sources["hf"]
    why = REFUSED.get((source, target))
    if why is not None:
        with pytest.raises(FormatError, match=why):
            reshard.plan(sources[source], TARGETS[target], config=str(config))
        return
    report: Any = reshard.convert(
        sources[source], tmp_path / "out", TARGETS[target], config=str(config)
    )
    assert report["verified"]["tensors"] == report["verified"]["of"]
    true, made = digests(sources["megatron"], config), digests(tmp_path / "out", config)
    assert made.items() <= true.items()
    if WEIGHTS in (source, target):
        assert made.keys() & {"param", "master"}
        assert report["recipe"]["verdict"] == "weights only"
        return
    assert made.keys() >= set(TRAINED)
    check_progress(tmp_path / "out")


def check_progress(out: Path) -> None:
    """Steps and param groups are the run's."""
    opened = open_checkpoint(out)
    assert opened.iteration == 3
    assert set(opened.steps.values()) == {3.0}
    assert opened.groups is not None
    options = {
        (tuple(g.options["betas"]), g.options["eps"], g.options["weight_decay"], g.options["lr"])
        for g in opened.groups
        if g.members
    }
    rate = 0.003972653955421975
    assert options == {((0.9, 0.95), 1e-8, 0.1, rate), ((0.9, 0.95), 1e-8, 0.0, rate)}


@pytest.fixture(scope="module")
def kept(sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same state as a model folder with its optimizer beside it."""
    out: Path = tmp_path_factory.mktemp("kept") / "model"
    reshard.convert(sources["megatron"], out, "hf:optimizer=yes")
    return out


def _with_the_optimizer() -> Iterator[Any]:
    for other in TARGETS:
        for pair in dict.fromkeys(((other, "hf"), ("hf", other))):
            mark = pytest.mark.proves(*pair, "training state")
            yield pytest.param(*pair, marks=mark, id=" to ".join(pair))


@pytest.mark.parametrize(("source", "target"), list(_with_the_optimizer()))
def test_any_format_into_a_model_folder_with_its_optimizer_and_out_of_it(
    sources: dict[str, Path], kept: Path, tmp_path: Path, source: str, target: str
):
    config, out = sources["hf"], tmp_path / "out"
    start = kept if source == "hf" else sources[source]
    to = "hf:optimizer=yes" if target == "hf" else TARGETS[target]
    report: Any = reshard.convert(start, out, to, config=str(config))
    assert report["verified"]["tensors"] == report["verified"]["of"]
    true, made = digests(sources["megatron"], config), digests(out, config)
    assert made.items() <= true.items()
    assert made.keys() >= set(TRAINED)
    check_progress(out)


def test_the_product_is_of_every_format_there_is():
    """A new format has to take its place in the matrix."""
    assert {f.name for f in formats()[0] if type(f).__module__.startswith("reshard.")} == set(
        TARGETS
    )
