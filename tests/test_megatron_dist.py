"""torch_dist between topologies: what we write equals what Megatron itself re-saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import reshard
from reshard.errors import CorruptError, LayoutError

Unpack = Callable[[str], Path]

#: Runs of which Megatron itself re-saved one state under several topologies.
SETS = {
    "a": {
        "a-tp4pp2": "tp4pp2",
        "a-tp2pp4": "tp2pp4",
        "a-tp2pp2vpp2": "tp2pp2vpp2",
        "a-tp1pp1": "tp1pp1",
    },
    "b": {"b-tp2pp2dp2": "tp2pp2dp2", "b-tp1pp1dp1": "tp1pp1dp1", "b-tp2pp2dp2-dpr": "tp2pp2dp2"},
    "c": {"c-pp2ep2": "pp2ep2", "c-pp1ep4": "ep4"},
    "d": {"d-tied-tp4pp2": "tp4pp2", "d-tied-tp1pp1": "tp1pp1"},
    "g": {"b-tp2pp2dp2": "tp2pp2dp2", "g-v019-tp2pp2dp2": "tp2pp2dp2"},
}
PAIRS = [
    (source, target, SETS[s][target])
    for s in "abcd"
    for source in SETS[s]
    for target in SETS[s]
    if source != target
]


@pytest.mark.parametrize(("source", "target", "topology"), PAIRS)
def test_converted_equals_megatrons_own_resave(
    unpacked: Unpack, tmp_path: Path, source: str, target: str, topology: str
) -> None:
    """Weights, masters, moments, steps and param groups, over the true vocabulary."""
    theirs = unpacked(f"megatron/{target}") / "dist"
    report = reshard.convert(unpacked(f"megatron/{source}") / "dist", tmp_path / "out", topology)
    assert report["verified"]["tensors"] == report["verified"]["of"] == report["tensors"]
    found = reshard.diff(tmp_path / "out", theirs)
    assert found["differences"] == []
    assert found["compared"] == report["tensors"]
    assert reshard.fingerprint(tmp_path / "out") == reshard.fingerprint(theirs)


BOTH = [(s, t, top) for s, t, top in PAIRS if s[0] in "acd"]


@pytest.mark.parametrize(("source", "target", "topology"), BOTH)
@pytest.mark.parametrize("way", ["torch to megatron", "dist to megatron-legacy"])
def test_between_the_containers(
    unpacked: Unpack, tmp_path: Path, source: str, target: str, topology: str, way: str
) -> None:
    """From either container to the other, at Megatron's own other topology."""
    kind, _, form = way.partition(" to ")
    theirs = unpacked(f"megatron/{target}") / ("dist" if kind == "torch" else "torch")
    given = unpacked(f"megatron/{source}") / kind
    report = reshard.convert(given, tmp_path / "out", f"{form}:{topology}")
    assert report["verified"]["tensors"] == report["tensors"]
    assert reshard.diff(tmp_path / "out", theirs)["differences"] == []


@pytest.mark.parametrize("name", sorted({n for s in SETS.values() for n in s}))
def test_one_state_has_one_fingerprint(unpacked: Unpack, name: str) -> None:
    """At every topology, in every optimizer form, in both containers."""
    first = next(iter(next(s for s in SETS.values() if name in s)))
    folder = unpacked(f"megatron/{name}")
    base = reshard.fingerprint(unpacked(f"megatron/{first}") / "dist")
    assert reshard.fingerprint(folder / "dist") == base
    if (folder / "torch").exists():
        assert reshard.fingerprint(folder / "torch") == base


TRUTHS = [
    "h-llama-tp2pp2",
    "h-llama-tp2pp1dp2-fr",
    "h-llama-tp2pp1dp2-dpr",
    "h-llama-uneven-pp2",
    "h-mla-tp2",
    "h-mtp-pp2",
    "h-moe-pp2ep2",
    "made-moe-pp2ep2-dpr",
    "made-moe-pp2ep1-dpr",
    "made-moe-ep2-fr",
    "made-gpt-tied-pp2dp2-dpr",
    "made-gpt-tied-pp2-buckets-dpr",
    "made-llama-pp2vpp2-dpr",
    "made-fp32-tp2",
    "made-fp32-sgd-tp2",
    "made-frozen-decoupled-tp2",
    "made-moe-fp16-dp2-dpr",
    "made-llama-tp2dp2-step0-dpr",
]


def truth_of(folder: Path) -> dict[tuple[str, str], np.ndarray[Any, Any]]:
    """Whole torch_dist tensors of the live run, by (torch_dist key, slot)."""
    out = {}
    for key, values in load_file(folder / "truth.safetensors").items():
        if key != "step":
            slot, _, name = key.partition(".")
            out[name, "param" if slot == "model" else slot] = values
    return out


@pytest.mark.parametrize("name", TRUTHS)
def test_read_equals_the_live_run(unpacked: Unpack, name: str) -> None:
    """Every tensor of every slot, bit for bit; the truth was gathered from the live run."""
    folder = unpacked(f"megatron/{name}")
    opened = reshard.open(folder / "dist")
    truth = truth_of(folder)
    left = dict(truth)
    for (own, slot), logical in opened.tensors.items():
        if slot == "step":
            assert logical[...] == 3
            continue
        key, index = stacked(own, truth, slot)
        whole = truth[key, slot]
        left.pop((key, slot), None)
        expected = whole[index][tuple(slice(0, n) for n in logical.shape)]
        got = opened[own, slot][...]
        assert got.dtype.itemsize == expected.dtype.itemsize
        assert got.tobytes() == np.ascontiguousarray(expected).tobytes(), (own, slot)
    assert not left
    none = "sgd" in name or "step0" in name
    assert set(opened.steps.values()) == (set() if none else {3.0})


def stacked(own: str, truth: dict[tuple[str, str], Any], slot: str) -> tuple[str, tuple[int, ...]]:
    """The truth's key for a per-layer, per-expert name, and the index in its leading axes."""
    index: list[int] = []
    parts = own.split(".")
    for prefix in ("layers", "experts"):
        joined = ".".join(parts)
        if (joined, slot) in truth:
            break
        at = len(parts) - 1 - parts[::-1].index(prefix)
        index.append(int(parts.pop(at + 1)))
    joined = ".".join(parts)
    if (joined, slot) not in truth and len(index) == 2:  # per-layer keys, stacked experts
        parts = own.split(".")
        at = len(parts) - 1 - parts[::-1].index("experts")
        index = [int(parts.pop(at + 1))]
        joined = ".".join(parts)
    return joined, tuple(index)


@pytest.mark.parametrize(
    ("name", "there"),
    [
        ("a-tp4pp2", "tp1pp4"),
        ("c-pp2ep2", "ep1pp1"),
        ("c-pp1ep4", "tp2ep2etp1"),
        ("d-tied-tp1pp1", "tp2pp2vpp2"),
        ("h-moe-pp2ep2", "tp2ep4etp1"),
        ("h-mla-tp2", "pp4"),
        ("h-mtp-pp2", "tp2"),
        ("h-llama-uneven-pp2", "tp2pp2,split=3-1"),
        ("h-llama-uneven-pp2", "pp2,first=1"),
        ("h-llama-tp2pp2", "pp2vpp2,layout=Et|t|t|tL"),
        ("h-mtp-pp2", "tp2pp2,layout=Ett|tt,m,L"),
        ("made-moe-pp2ep2-dpr", "ep1"),
        ("made-moe-pp2ep1-dpr", "ep4pp2"),
        ("g-v019-tp2pp2dp2", "tp4pp2dp1"),
    ],
)
def test_there_and_back_is_the_identity(
    unpacked: Unpack, tmp_path: Path, name: str, there: str
) -> None:
    source = unpacked(f"megatron/{name}") / "dist"
    back = str(reshard.open(source).checkpoint.topology)
    reshard.convert(source, tmp_path / "there", there)
    reshard.convert(tmp_path / "there", tmp_path / "back", back)
    assert reshard.diff(source, tmp_path / "back")["differences"] == []
    assert reshard.diff(source, tmp_path / "there")["differences"] == []


def test_like_writes_what_the_reference_has(unpacked: Unpack, tmp_path: Path) -> None:
    """Step 0 of the job that resumes will do: topology, spelling and optimizer form are taken."""
    like = unpacked("megatron/b-tp1pp1dp1") / "dist"
    source = unpacked("megatron/b-tp2pp2dp2-dpr") / "dist"
    reshard.convert(source, tmp_path / "out", like=str(like))
    assert reshard.diff(tmp_path / "out", like)["differences"] == []
    mine, theirs = (reshard.open(p).checkpoint for p in (tmp_path / "out", like))
    assert mine.topology == theirs.topology
    assert mine.extras["args.padded_vocab_size"] == theirs.extras["args.padded_vocab_size"]


def test_corrupt_masters_are_named_not_carried(unpacked: Unpack, tmp_path: Path) -> None:
    """Megatron PR #5077: weights are right, masters are shifted or zero."""
    source = unpacked("megatron/f-dp3-buckets") / "dist"
    with pytest.raises(CorruptError, match="#5077"):
        reshard.convert(source, tmp_path / "out", "tp1")
    with pytest.raises(CorruptError, match="#5077"):  # its one weight is the master
        reshard.convert(source, tmp_path / "out", "dcp:dp2")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(CorruptError, match="#5077"):
        reshard.verify(source)
    report = reshard.convert(source, tmp_path / "weights", "tp1", weights_only=True)
    assert report["recipe"]["verdict"] == "weights only"


@pytest.mark.parametrize(
    ("name", "to", "message"),
    [
        ("a-tp4pp2", "tp3", r"attention heads.*8 elements.*tp=3.*Use tp in \{1, 2, 4, 8\}"),
        ("a-tp4pp2", "tp16", "attention heads"),
        ("a-tp4pp2", "pp3", "8 layers"),
        ("a-tp4pp2", "pp2,split=3-4", "7 layers"),
        ("a-tp4pp2", "pp2,split=8", "1 stages"),
        ("c-pp2ep2", "ep3", r"experts.*ep=3.*Use ep in \{1, 2, 4\}"),
        ("a-tp4pp2", "ep2", "no experts"),
        ("h-mla-tp2", "tp4", "latent"),
        ("a-tp4pp2", "pp2,layout=Etttt|tttL", "layers"),
    ],
)
def test_cuts_that_do_not_fit_name_axis_and_degrees(
    unpacked: Unpack, tmp_path: Path, name: str, to: str, message: str
) -> None:
    with pytest.raises(LayoutError, match=message):
        reshard.convert(unpacked(f"megatron/{name}") / "dist", tmp_path / "out", to)
    assert list(tmp_path.iterdir()) == []
