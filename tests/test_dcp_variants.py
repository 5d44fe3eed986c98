"""States of every optimizer, dtype, shape and mesh that torch saves come back to the bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import reshard
from peers import run_module


@pytest.fixture(scope="module")
def variants(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("variants")
    run_module("peers.dcp_variants", "make", str(folder))
    return folder


@pytest.fixture(scope="module")
def wrong(variants: Path) -> dict[str, list[str]]:
    """By conversion, what real torch does not find in it as it was saved."""
    for source in sorted((variants / "saved").iterdir()):
        given = "numbered=yes," if source.name == "raw" else ""
        for i, to in enumerate((f"dcp:{given}dp3", f"dcp:{given}chunk=1KiB")):
            if source.name.endswith("-flat-pickles"):
                to += ",flat=yes"
            reshard.convert(source, variants / "made" / f"{source.name}.{i}", to)
    run_module("peers.dcp_variants", "check", str(variants))
    found: dict[str, list[str]] = json.loads((variants / "wrong.json").read_text())
    return found


def test_real_torch_loads_every_value_as_it_was_saved(wrong: dict[str, list[str]]):
    assert len(wrong) == 2 * 53
    assert {name: keys for name, keys in wrong.items() if keys} == {}


def test_every_variant_is_whole_and_survives_the_other_containers(variants: Path, tmp_path: Path):
    for source in sorted((variants / "saved").iterdir()):
        assert reshard.verify(source)["status"] == "ok", source.name
        for to in ("torch", "universal"):
            made = tmp_path / f"{source.name}.{to}"
            reshard.convert(source, made, to)
            assert reshard.diff(source, made)["differences"] == [], (source.name, to)


def test_a_raw_optimizer_keeps_its_numbers_unless_asked(variants: Path, tmp_path: Path):
    source = variants / "saved/raw"
    kept, named = tmp_path / "kept", tmp_path / "named"
    reshard.convert(source, kept, "dcp:dp2")
    reshard.convert(source, named, "dcp:numbered=no,dp2")
    assert b"optimizer.state.3.exp_avg" in (kept / ".metadata").read_bytes()
    assert b"optimizer.state.1.weight.exp_avg" in (named / ".metadata").read_bytes()
    assert reshard.diff(kept, named)["differences"] == []


def test_a_rate_that_is_a_tensor_is_an_option(variants: Path):
    groups = reshard.open(variants / "saved/tensor-rate").groups
    assert groups is not None
    assert [g.options["lr"] for g in groups] == pytest.approx([1e-2, 1e-2])
