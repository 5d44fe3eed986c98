"""Trainer, accelerate and Lightning themselves resume from the folders that are written.

One batch for the module: the frameworks are imported once, every case forks its ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import reshard
from peers.deepspeed_cases import CAP
from peers.wrapper_cases import WrapperCase, judge

Unpacked = Callable[[str], Path]

#: fixture (of ZeRO 2 or 3 on two ranks), TARGET, ranks, what the job's recipe changes
RESUMES: list[tuple[str, str, int, dict[str, Any]]] = [
    ("trainer_ds_z2_dp2_bf16", "zero3dp1", 1, {"stage": 3}),
    ("trainer_ds_z3_dp2_bf16", "zero2dp4", 4, {"stage": 2, "zero": {}, "gas": 2}),
    ("trainer_ds_z2_dp2_bf16_dsoptim", "zero1dp1", 1, {"stage": 1}),
    ("accelerate_ds_z2_dp2_bf16", "zero3dp1", 1, {"stage": 3}),
    ("accelerate_ds_z2_dp2_bf16", "zero1dp4", 4, {"stage": 1}),
    ("lightning_ds_z3_dp2_bf16", "zero2dp1", 1, {"stage": 2}),
    ("lightning_ds_z2_dp2_bf16", "zero3dp4", 4, {"stage": 3}),
]
SPOILS = ("step", "decay", "moment")
SPOILT = ("trainer_ds_z2_dp2_bf16", "accelerate_ds_z2_dp2_bf16")


def name_of(fixture: str, target: str) -> str:
    return f"{fixture} to {target}"


@pytest.fixture(scope="module")
def results(
    unpacked: Unpacked, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    root = tmp_path_factory.mktemp("wrappers")
    cases: list[WrapperCase] = []
    for i, (fixture, target, world, changes) in enumerate(RESUMES):
        folder = unpacked(f"wrappers/{fixture}")
        (source,) = (folder / "ckpt").iterdir()
        out = root / str(i) / source.name
        out.parent.mkdir()
        reshard.convert(source, out, f"deepspeed:{target}")
        name = name_of(fixture, target)
        case = WrapperCase(name=name, fixture=folder, checkpoint=out, world=world, changes=changes)
        cases += [case, replace(case, name=f"afresh {name}", checkpoint=None)]
        if target == "zero3dp1":
            cases += [replace(case, name=f"{fixture} {s} spoilt", spoil=s) for s in SPOILS]
    return judge(cases, root / "judge")


@pytest.mark.parametrize(("fixture", "target"), [c[:2] for c in RESUMES])
def test_the_wrapper_resumes(results: dict[str, dict[str, Any]], fixture: str, target: str):
    result, afresh = (results[f"{x}{name_of(fixture, target)}"] for x in ("", "afresh "))
    assert result["error"] is None
    assert afresh["error"] is None
    assert result["different"] == []
    assert result["compared"] == 3 * 29
    assert result["adam_steps"] == [6.0]
    assert result["distance"] <= CAP["bf16"]
    assert result["distance"] <= 2 * afresh["distance"]
    assert result["rates"] == afresh["rates"]
    assert result["rates"][-1] == pytest.approx(result["wanted_rate"], rel=1e-12)


@pytest.mark.parametrize("spoil", SPOILS)
@pytest.mark.parametrize("fixture", SPOILT)
def test_a_spoilt_state_is_noticed(results: dict[str, dict[str, Any]], fixture: str, spoil: str):
    result = results[f"{fixture} {spoil} spoilt"]
    floor = results[f"afresh {name_of(fixture, 'zero3dp1')}"]["distance"]
    assert result["error"] is None
    assert result["distance"] > 2 * floor
    assert result["distance"] > CAP["bf16"]
