"""Megatron-core's runs resumed by FSDP2 and DeepSpeed, and theirs by Megatron-core: all real.

One llama (fixture h-llama-tp2pp2), the same batches, and Megatron's schedule as a table of rates.
What parts fresh runs of two frameworks from the same weights is rounding: that is the noise floor.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

import reshard
from peers import MegatronCase
from peers import judge as judge_megatron
from peers.parity import ParityCase, apart, judge
from reshard.format import open_checkpoint

Array = NDArray[Any]
Results = dict[str, dict[str, Any]]

BATCH, SAVED_AT, STEPS = 8, 3, 4
TORCH: dict[str, dict[str, Any]] = {
    "fsdp2": {"framework": "fsdp2", "dtype": "bf16"},
    "zero2": {"framework": "deepspeed", "dtype": "bf16", "stage": 2},
}
#: TARGET and --dtype on the way from Megatron, and on the way to it.
FROM = {"fsdp2": "dcp:dp2,names=hf", "zero2": "deepspeed:zero2dp2,names=hf"}
TO = {
    "fsdp2": ("megatron:pp2,vocab_divisor=1,spec=local,optim=non_distributed", "bf16"),
    "zero2": ("megatron:pp2dp2,vocab_divisor=1,spec=local", None),
}


def rate(samples: int) -> float:
    """Megatron's schedule of the fixture. Source: its opt_param_scheduler."""
    if samples <= 16:
        return 0.004 * samples / 16
    done = min(1.0, (samples - 16) / (160 - 16))
    return 0.0004 + 0.5 * (math.cos(math.pi * done) + 1.0) * (0.004 - 0.0004)


RATES = tuple(rate(BATCH * n) for n in range(40))
SPOILS = ("step", "decay", "beta", "moment", "schedule")


@dataclass(frozen=True)
class Judged:
    """Runs of all three frameworks, by name."""

    folder: Path
    megatron: Results
    torch: Results

    def floor(self, name: str, what: str = "losses") -> float:
        """How far the first steps of two frameworks part, from the same weights.

        A fresh optimizer in both, and as many steps as a resumed run does.
        """
        own = self.torch[f"{name} own"]
        curve = [*own["before"][what], *own[what]][:STEPS]
        return apart(named(self.megatron["fresh"]), {what: curve}, what)

    def late_floor(self, name: str, what: str = "losses") -> float:
        """The same over the steps that follow those before the save: rounding has added up."""
        fresh = {k: v[SAVED_AT:] for k, v in named(self.megatron["fresh"]).items()}
        return apart(fresh, self.torch[f"{name} own"], what)


def named(result: Mapping[str, Any]) -> dict[str, Any]:
    """A result of Megatron's judge in the words of the other's."""
    return {"losses": result["losses"], "norms": result["grad_norms"]}


@pytest.fixture(scope="module")
def judged(unpacked: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Judged:
    folder = tmp_path_factory.mktemp("parity")
    fixture = unpacked("megatron/h-llama-tp2pp2")
    source = fixture / "dist"
    hub = folder / "hub"
    reshard.convert(source, hub, "hf")
    config = {
        k: v
        for k, v in json.loads((hub / "config.json").read_text()).items()
        if k not in ("architectures", "model_type", "torch_dtype", "dtype")
    }
    weights = hub / "model.safetensors"
    cases = []
    for name, fields in TORCH.items():
        here: dict[str, Any] = {"config": config, "rates": RATES, **fields}
        cases.append(
            ParityCase(
                name=f"{name} own", weights=weights, first_batch=SAVED_AT, before=SAVED_AT,
                save=folder / f"{name}-own", state=folder / f"{name}-own.state", steps=STEPS,
                **here,
            )
        )  # fmt: skip
        reshard.convert(source, folder / f"{name}-resumed", FROM[name])
        resumed = {"load": folder / f"{name}-resumed", "steps": STEPS, **here}
        cases.append(
            ParityCase(name=f"{name} resumed", state=folder / f"{name}-resumed.state", **resumed)
        )
        spoils = SPOILS if name == "fsdp2" else ()
        cases += [ParityCase(name=f"{name} spoilt {s}", spoil=s, **resumed) for s in spoils]
    torch = judge(cases, folder / "torch")
    rows = config["vocab_size"]
    theirs = [
        # the true rows alone: those of padding would count in the softmax
        MegatronCase(
            name="own", checkpoint=source, truth=fixture, padded_vocab=rows, steps=STEPS
        ),
        MegatronCase(
            name="fresh", checkpoint=source, truth=fixture, padded_vocab=rows,
            steps=SAVED_AT + STEPS, weights_only=True,
        ),
    ]  # fmt: skip
    for name, (to, dtype) in TO.items():
        saved, made = folder / f"{name}-own", folder / f"{name}-megatron"
        if torch[f"{name} own"]["error"] is not None:
            continue
        reshard.convert(saved, made, to, config=str(hub), dtype=dtype)
        case = MegatronCase(
            name=f"{name} to megatron", checkpoint=made, pp=2, dp=2 if "dp2" in to else None,
            padded_vocab=rows, args=source, override_schedule=True, steps=STEPS,
        )  # fmt: skip
        theirs += [case, replace(case, name=f"{name} to megatron, spoilt", spoil="moment")]
    megatron = {r["name"]: r for r in judge_megatron(theirs, folder / "megatron")}
    return Judged(folder, megatron, torch)


def split(name: str, value: Array) -> Iterator[tuple[str, Array]]:
    """A tensor of Megatron as transformers names and cuts it; written out by hand, as a check.

    QKV: for each of the 2 query groups 4 heads of q, one of k, one of v, of 6 rows each.
    """
    if name == "embedding.word_embeddings.weight":
        yield "model.embed_tokens.weight", value[:109]
    elif name == "output_layer.weight":
        yield "lm_head.weight", value[:109]
    elif name == "decoder.final_layernorm.weight":
        yield "model.norm.weight", value
    else:
        _, _, layer, rest = name.split(".", 3)
        lead = f"model.layers.{layer}."
        if rest == "self_attention.linear_qkv.weight":
            groups = value.reshape(2, 6, 6, -1)
            for part, at in (("q", groups[:, :4]), ("k", groups[:, 4]), ("v", groups[:, 5])):
                yield f"{lead}self_attn.{part}_proj.weight", at.reshape(-1, value.shape[1])
        elif rest == "mlp.linear_fc1.weight":
            yield f"{lead}mlp.gate_proj.weight", value[:52]
            yield f"{lead}mlp.up_proj.weight", value[52:]
        else:
            theirs = {
                "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
                "mlp.linear_fc2.weight": "mlp.down_proj.weight",
                "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
                "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
                "input_layernorm.weight": "input_layernorm.weight",
                "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
            }
            yield lead + theirs[rest], value


def in_torch_names(folder: Path) -> dict[str, Array]:
    """slot.name -> tensor of a Megatron checkpoint, by `split`."""
    checkpoint = reshard.open(folder)
    return {
        f"{slot}.{name}": part
        for stored, slot in checkpoint.tensors
        if slot not in ("param", "step")
        for name, part in split(stored, checkpoint[stored, slot][...])
    }


def unequal(a: Mapping[str, Array], b: Mapping[str, Array]) -> list[str]:
    assert a.keys() == b.keys()
    return [k for k in a if a[k].dtype != b[k].dtype or a[k].tobytes() != b[k].tobytes()]


TARGETS = [
    pytest.param(name, marks=pytest.mark.proves("megatron", to, "training state"), id=name)
    for name, to in (("fsdp2", "dcp"), ("zero2", "deepspeed"))
]
SOURCES = [
    pytest.param(name, marks=pytest.mark.proves(source, "megatron", "training state"), id=name)
    for name, source in (("fsdp2", "dcp"), ("zero2", "deepspeed"))
]


@pytest.mark.parametrize("name", TARGETS)
def test_torch_frameworks_load_every_slot_of_a_megatron_run(
    judged: Judged, unpacked: Callable[[str], Path], name: str
):
    result = judged.torch[f"{name} resumed"]
    assert result["error"] is None
    expected = in_torch_names(unpacked("megatron/h-llama-tp2pp2") / "dist")
    assert len(expected) == 39 * 3
    assert unequal(expected, load_file(judged.folder / f"{name}-resumed.state")) == []
    assert result["first"] == result["steps"][0] == SAVED_AT
    assert result["options"] == [[0.1, 0.9, 0.95, 1e-8], [0.0, 0.9, 0.95, 1e-8]]


@pytest.mark.parametrize("name", TARGETS)
def test_their_next_steps_are_those_of_megatron(judged: Judged, name: str):
    result, own = judged.torch[f"{name} resumed"], judged.megatron["own"]
    assert own["error"] is None
    assert len(result["losses"]) == STEPS
    for what in ("losses", "norms"):
        floor = judged.floor(name, what)
        assert 0 < floor < 3e-2
        assert apart(result, named(own), what) <= 2 * floor
    assert result["lrs"][1:] == pytest.approx([lr for (lr,) in own["lrs"][:-1]], rel=1e-12)


@pytest.mark.parametrize("spoil", SPOILS)
def test_a_spoilt_state_rises_above_the_floor(judged: Judged, spoil: str):
    result = judged.torch[f"fsdp2 spoilt {spoil}"]
    assert result["error"] is None
    assert apart(result, named(judged.megatron["own"])) > 2 * judged.floor("fsdp2")


@pytest.mark.parametrize("name", SOURCES)
def test_megatron_loads_every_slot_of_a_torch_run(judged: Judged, name: str):
    result = judged.megatron[f"{name} to megatron"]
    assert result["error"] is None
    assert result["different"] == []
    assert result["slots"] == ["exp_avg", "exp_avg_sq", "master", "model"]
    assert result["unrounded"] == []
    assert result["adam_steps"] == [SAVED_AT]
    assert result["schedule"]["num_steps"] == SAVED_AT * BATCH
    assert sorted(g["weight_decay"] for g in result["groups"]) == [0.0, 0.1]
    assert {tuple(g["betas"]) for g in result["groups"]} == {(0.9, 0.95)}
    saved = load_file(judged.folder / f"{name}-own.state")
    assert unequal(in_torch_names(judged.folder / f"{name}-megatron"), saved) == []


@pytest.mark.parametrize("name", SOURCES)
def test_the_next_steps_of_megatron_are_theirs(judged: Judged, name: str):
    result, own = judged.megatron[f"{name} to megatron"], judged.torch[f"{name} own"]
    assert own["error"] is None
    for what in ("losses", "norms"):
        assert apart(named(result), own, what) <= 2 * judged.late_floor(name, what)
    assert [lr for (lr,) in result["lrs"][:-1]] == pytest.approx(own["lrs"][1:], rel=1e-12)


@pytest.mark.parametrize("name", SOURCES)
def test_a_negated_moment_rises_above_the_floor_of_megatron(judged: Judged, name: str):
    result, own = judged.megatron[f"{name} to megatron, spoilt"], judged.torch[f"{name} own"]
    assert result["error"] is None
    assert apart(named(result), own) > 2 * judged.late_floor(name)


def test_the_table_of_rates_is_megatrons(unpacked: Callable[[str], Path]):
    groups = open_checkpoint(unpacked("megatron/h-llama-tp2pp2") / "dist").groups
    assert groups is not None
    assert RATES[SAVED_AT] == pytest.approx(groups[0].options["lr"], rel=1e-12)
