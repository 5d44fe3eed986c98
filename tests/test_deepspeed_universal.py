"""Universal checkpoints: read as the real tool writes them, written as DeepSpeed loads them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import reshard
from peers.deepspeed_cases import CAP, DeepSpeedCase, judge
from reshard.errors import CorruptError, FormatError, UsageError

Unpacked = Callable[[str], Path]
REAL = [
    "z2_dp2_bf16_frozen", "z3_dp2_bf16_subgroups", "tp2_dp1_z1_bf16", "pp2_dp2_z1_bf16_tied",
]  # fmt: skip
#: fixture, ranks, what the job that loads the universal checkpoint changes, whether losses can be
#: right: under ZeRO 3 DeepSpeed 0.19.8 spreads group 0's options and counts steps by sub-group
LOADS: list[tuple[str, int, dict[str, Any], bool]] = [
    ("z1_dp4_bf16", 2, {}, True),
    ("z3_dp2_bf16_subgroups", 1, {"stage": 2, "zero": {}}, True),
    ("z1_dp4_fp32", 2, {"stage": 2}, True),
    ("z2_dp2_bf16_roundrobin", 1, {"zero": {}}, True),
    ("tp2_dp1_z1_bf16", 2, {}, True),
    ("pp2_dp1_z1_bf16", 1, {"pp": 1}, True),
    ("z2_dp2_bf16", 2, {"stage": 3}, False),
]


@pytest.mark.parametrize("name", REAL)
def test_the_real_tools_output_equals_its_source(unpacked: Unpacked, name: str):
    real = unpacked(f"deepspeed/universal_{name}")
    found = reshard.diff(real, unpacked(f"deepspeed/{name}") / "ckpt")
    # a pipeline's weights stay in layer files, which the tool leaves out
    left = {d["kind"] for d in found["differences"]}
    assert left <= ({"only-right"} if name.startswith("pp") else set())
    assert found["compared"] > 80
    assert reshard.verify(real)["status"] == "ok"


@pytest.mark.parametrize("name", REAL)
def test_ours_equals_the_real_tools(unpacked: Unpacked, tmp_path: Path, name: str):
    reshard.convert(unpacked(f"deepspeed/{name}") / "ckpt", tmp_path / "out", "deepspeed-universal")
    assert (tmp_path / "out" / "latest_universal").read_text() == "global_step5_universal"
    found = reshard.diff(unpacked(f"deepspeed/universal_{name}"), tmp_path / "out")
    assert {d["kind"] for d in found["differences"]} <= (
        {"only-right"} if name.startswith("pp") else set()
    )
    files = {p.name for p in (tmp_path / "out").rglob("zero/*/*.pt")}
    assert files == {"fp32.pt", "exp_avg.pt", "exp_avg_sq.pt", "step.pt"}


@pytest.mark.parametrize("name", ["z1_dp4_bf16_elastic", "z0_dp2_fp16", "z3_dp4_bf16_frozen"])
def test_native_to_universal_to_native_is_the_identity(
    unpacked: Unpacked, tmp_path: Path, name: str
):
    source = unpacked(f"deepspeed/{name}") / "ckpt"
    reshard.convert(source, tmp_path / "there", "deepspeed-universal")
    assert reshard.diff(source, tmp_path / "there")["status"] == "equal"
    reshard.convert(tmp_path / "there", tmp_path / "back", "deepspeed:zero2dp3")
    kinds = {d["kind"] for d in reshard.diff(source, tmp_path / "back")["differences"]}
    assert kinds <= {"only-right"}  # 16-bit weights that ZeRO 3 did not store


@pytest.fixture(scope="module")
def results(
    unpacked: Unpacked, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    root = tmp_path_factory.mktemp("universal")
    cases = []
    for fixture, world, changes, _ in LOADS:
        folder = unpacked(f"deepspeed/{fixture}")
        reshard.convert(folder / "ckpt", root / fixture, "deepspeed-universal")
        cases.append(
            DeepSpeedCase(
                name=fixture,
                checkpoint=root / fixture,
                fixture=folder,
                world=world,
                changes=changes,
                universal=True,
            )
        )
    return judge(cases, root / "judge")


@pytest.mark.parametrize(("fixture", "right"), [(c[0], c[3]) for c in LOADS])
def test_deepspeed_resumes(results: dict[str, dict[str, Any]], fixture: str, right: bool):
    result = results[fixture]
    assert result["error"] is None
    assert result["different"] == []
    assert result["adam_steps"] == [5.0]
    if right:
        assert result["distance"] <= CAP["fp32" if "fp32" in fixture else "bf16"]


def test_deepspeeds_own_errors_are_noted(unpacked: Unpacked):
    report = reshard.plan(
        unpacked("deepspeed/z2_dp2_bf16_roundrobin") / "ckpt", "deepspeed-universal"
    )
    assert any("round_robin_gradients" in str(n) for n in report["notes"])  # type: ignore[union-attr]  # a list of strings
    assert any("options of the first" in str(n) for n in report["notes"])  # type: ignore[union-attr]  # a list of strings


@pytest.mark.parametrize(
    ("fixture", "target", "error", "words"),
    [
        ("z2_dp2_bf16_muon", "deepspeed-universal", FormatError, "Muon"),
        ("z1_dp4_bf16", "deepspeed-universal:tp2", UsageError, "no degree tp"),
    ],
)
def test_what_cannot_be_is_refused(
    unpacked: Unpacked, fixture: str, target: str, error: type[Exception], words: str
):
    with pytest.raises(error, match=words):
        reshard.plan(unpacked(f"deepspeed/{fixture}") / "ckpt", target)


@pytest.mark.parametrize(
    ("gone", "words"),
    [
        ("zero/optimizer_state.pt", "optimizer_state.pt"),
        ("zero/lm_head.weight", "lm_head.weight"),
        ("zero/lm_head.weight/fp32.pt", "fp32.pt"),
    ],
)
def test_a_missing_file_is_named(unpacked: Unpacked, tmp_path: Path, gone: str, words: str):
    run = tmp_path / "run"
    shutil.copytree(unpacked("deepspeed/universal_z2_dp2_bf16_frozen"), run)
    path = run / "global_step5_universal" / gone
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(CorruptError, match=words.replace(".", r"\.")):
        reshard.open(run)
