"""Real torch loads what we write, at every mesh, and trains on as from its own checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import reshard
from peers.dcp_cases import DcpCase, judge

Results = dict[str, dict[str, Any]]
SPOILS = ("step", "decay", "beta", "moment")
MESHES = (("fsdp2", 2), ("fsdp2", 3), ("fsdp2", 4), ("tp", 4), ("hsdp", 4))


@pytest.fixture(scope="module")
def results(unpacked: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("judged")
    even, uneven = unpacked("dcp/fsdp2_w2_fp32"), unpacked("dcp/fsdp2_w4_uneven")
    fabric, verl = unpacked("dcp/accelerate_fsdp2_w2_sharded"), unpacked("dcp/verl_fsdp2_w4")
    ddp, moe = unpacked("dcp/ddp_w2_torchsave"), unpacked("dcp/fsdp2_w2_moe")
    cases: list[DcpCase] = []

    def add(name: str, source: Path, to: str, **fields: Any) -> None:
        made = folder / name.replace(" ", "-")
        reshard.convert(source / "checkpoint", made, to)
        inner = made / "step-4" if (made / "step-4").exists() else made
        cases.append(DcpCase(name=name, fixture=source, checkpoint=inner, **fields))

    for mode, world in MESHES:
        add(
            f"{mode} {world}",
            even,
            "dcp:dp3",
            mode=mode,
            world=world,
            native=even / "checkpoint",
        )
    add("uneven chunks", uneven, "dcp:chunk=1KiB", world=3, native=uneven / "checkpoint")
    add("experts", moe, "dcp:dp4", world=2, native=moe / "checkpoint")
    add("torchtitan keys", even, "dcp.torchtitan:dp2", keys="torchtitan", flatten=True)
    add(
        "accelerate folders",
        fabric,
        "dcp:dp3",
        keys="accelerate",
        schedule="custom_checkpoint_0.pkl",
    )
    add("to accelerate", even, "dcp.accelerate", keys="accelerate", schedule="scheduler.bin")
    add("flat keys", even, "dcp:flat=yes", flatten=True)
    add("ranks' files", verl, "dcp:dp2")
    add("numbered optimizer", ddp, "dcp", mode="single", world=1)
    add("plain state dict", even, "torch", mode="single", world=1, keys="torch")
    cases += [
        DcpCase(name=f"spoilt {s}", fixture=even, checkpoint=even / "checkpoint", spoil=s)
        for s in SPOILS
    ]
    return judge(cases, folder / "judge")


NAMES = (
    *(f"{mode} {world}" for mode, world in MESHES),
    "uneven chunks",
    "experts",
    "torchtitan keys",
    "accelerate folders",
    "to accelerate",
    "flat keys",
    "ranks' files",
    "numbered optimizer",
    "plain state dict",
)


def distance(left: list[float], right: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(left, right, strict=True))


@pytest.mark.proves("dcp", "dcp", "training state")
@pytest.mark.proves("torch", "dcp", "training state")
@pytest.mark.proves("dcp", "torch", "training state")
@pytest.mark.parametrize("name", NAMES)
def test_torch_loads_every_tensor_to_the_bit(results: Results, name: str):
    result = results[name]
    assert result["error"] is None
    assert result["tensors"] >= 80
    assert result["different"] == []


@pytest.mark.parametrize("name", NAMES)
def test_the_next_losses_are_those_of_the_run_that_saved(results: Results, name: str):
    """2e-4: other meshes sum in another order; the fixtures' own reloads part by up to 5e-7, more
    on another CPU than theirs."""
    assert distance(results[name]["losses"], results[name]["recorded"]) < 2e-4


@pytest.mark.parametrize("name", [n for n in NAMES if n.startswith(("fsdp2", "tp", "hsdp", "un"))])
def test_the_next_losses_stay_within_twice_the_noise_of_a_native_reload(
    results: Results, name: str
):
    result = results[name]
    floor = distance(result["native"], result["recorded"])
    assert distance(result["losses"], result["native"]) <= 2 * floor


@pytest.mark.parametrize("spoil", SPOILS)
def test_the_judge_notices_a_spoilt_state(results: Results, spoil: str):
    result = results[f"spoilt {spoil}"]
    assert result["error"] is None
    assert distance(result["losses"], result["recorded"]) > 2e-4
