"""Optimizer state across frameworks by reshard alone: chains, there and back, refusals by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import reshard
from reshard.checkpoint import Checkpoint, ParamGroup
from reshard.crossing import cross
from reshard.differences import differences
from reshard.dtypes import named
from reshard.errors import FormatError, LossError, ReshardError, UsageError
from reshard.fingerprints import slot_digests
from reshard.format import WriteOptions, find, open_checkpoint
from reshard.namings import Choice
from reshard.readback import fingerprints
from reshard.renaming import canonical
from reshard.tensor import LogicalTensor, TensorId
from reshard.topology import parse_target

Unpack = Callable[[str], Path]
ELEMENTS = 1 << 18


@pytest.fixture(scope="module")
def hub(unpacked: Unpack, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the config.json of the fixture's model."""
    out = tmp_path_factory.mktemp("hub") / "hub"
    reshard.convert(llama(unpacked), out, "hf")
    return out


def llama(unpacked: Unpack) -> Path:
    return unpacked("megatron/h-llama-tp2pp2") / "dist"


def digests(path: Path, hub: Path) -> dict[str, str]:
    """One digest per slot under the family's names; torch's one weight is its master."""
    found = canonical(open_checkpoint(path), Choice(config=str(hub)))
    sums = {t: s.hex for t, s in fingerprints(found, elements=ELEMENTS).items()}
    slots = slot_digests(found.layout.tensors.values(), sums)
    if "master" not in slots:
        slots["master"] = slots["param"]
    return {slot: slots[slot] for slot in ("master", "exp_avg", "exp_avg_sq")}


def different(a: Path, b: Path, hub: Path) -> list[Any]:
    choice = Choice(config=str(hub))
    return differences(open_checkpoint(a), open_checkpoint(b), elements=ELEMENTS, choice=choice)[0]


#: Group options that no other framework has, and that Megatron takes of its job where a group
#: lacks them. Source: optimizer_param_scheduler.py get_lr @ core_v0.16.1.
MEGATRONS = {"max_lr", "min_lr"}


def unmade(found: list[Any]) -> tuple[list[Any], set[str]]:
    """What differs, without the options that only the left side has; and the names of those."""
    only = {d.what.rpartition(": ")[2] for d in found if d.detail.startswith("only left: ")}
    return [d for d in found if not d.detail.startswith("only left: ")], only


CHAIN = (
    ("dcp:dp3,names=hf", {}),
    ("deepspeed:zero3dp2,names=hf", {"dtype": "bf16"}),
    ("megatron:tp2pp2,vocab_divisor=8,spec=local,optim=non_distributed", {}),
)


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2)])
def test_a_chain_of_three_frameworks_ends_where_it_began(
    unpacked: Unpack, hub: Path, tmp_path: Path, order: tuple[int, ...]
):
    """Megatron -> FSDP -> DeepSpeed -> Megatron: the same fingerprint per slot at every stop."""
    source = at = llama(unpacked)
    expected = digests(source, hub)
    for i in order:
        to, options = CHAIN[i]
        if i == 2 and order[1] == 0:
            options = {"dtype": "bf16"}
        made = tmp_path / str(i)
        reshard.convert(at, made, to, config=str(hub), **options)
        assert digests(made, hub) == expected, to
        assert unmade(different(source, made, hub)) == ([], MEGATRONS if i == 2 else set()), to
        at = made
    held, ours = open_checkpoint(source).layout.tensors, open_checkpoint(at).layout.tensors
    assert held.keys() == ours.keys()
    assert {t: v.dtype for t, v in held.items()} == {t: v.dtype for t, v in ours.items()}
    assert open_checkpoint(at).iteration == 3
    assert open_checkpoint(at).extras["args.consumed_train_samples"] == 24


@pytest.mark.parametrize(
    ("name", "there"),
    [
        ("deepspeed/z3_dp4_bf16", "dcp:dp3"),
        ("deepspeed/z2_dp4_fp32", "dcp:dp2"),
        ("dcp/fsdp2_w2_fp32", "deepspeed:zero3dp4"),
        ("dcp/fsdp2_w4_uneven", "deepspeed:zero1dp3"),
    ],
)
def test_there_and_back_is_the_identity_in_every_slot(
    unpacked: Unpack, tmp_path: Path, name: str, there: str
):
    source = next(p for p in (unpacked(name) / "checkpoint", unpacked(name) / "ckpt") if p.exists())
    back = name.partition("/")[0]
    dtype = {"dtype": "bf16"} if "bf16" in name else {}
    reshard.convert(source, tmp_path / "there", there)
    assert reshard.diff(source, tmp_path / "there")["differences"] == []
    reshard.convert(tmp_path / "there", tmp_path / "back", back, **dtype)
    assert reshard.diff(source, tmp_path / "back")["differences"] == []


def test_a_moment_that_was_changed_is_a_difference(unpacked: Unpack, hub: Path, tmp_path: Path):
    """What the chain's comparison would see: one option, one counter, one moment."""
    made = tmp_path / "dcp"
    reshard.convert(llama(unpacked), made, CHAIN[0][0])
    source, other = open_checkpoint(llama(unpacked)), open_checkpoint(made)
    choice = Choice(config=str(hub))
    groups = other.groups
    assert groups is not None
    options = {**groups[0].options, "betas": [0.8, 0.95]}
    spoilt = replace(other, groups=(replace(groups[0], options=options), *groups[1:]))
    found = differences(source, spoilt, elements=ELEMENTS, choice=choice)[0]
    assert {d.kind for d in found} == {"option"}
    steps = {n: s + 1 for n, s in other.steps.items()}
    found = differences(source, replace(other, steps=steps), elements=ELEMENTS, choice=choice)[0]
    assert {d.kind for d in found} == {"step"}
    assert len(found) == 27


# ---------------------------------------------------------------------- refused by name


def declared(
    source: Checkpoint, hub: Path, to: str = "megatron:tp2", dtype: str | None = "bf16"
) -> Any:
    target = parse_target(to)
    crossed = cross(source, "mcore", Choice(config=str(hub)))
    options = WriteOptions(dtype=dtype)
    return find("megatron").declare(crossed.checkpoint, target, options)


@pytest.fixture(scope="module")
def torch_run(unpacked: Unpack, hub: Path, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    made = tmp_path_factory.mktemp("torch") / "dcp"
    reshard.convert(llama(unpacked), made, "dcp:dp2,names=hf")
    return open_checkpoint(made)


def with_options(source: Checkpoint, group: int, **options: Any) -> Checkpoint:
    assert source.groups is not None
    groups = list(source.groups)
    groups[group] = replace(groups[group], options={**groups[group].options, **options})
    return replace(source, groups=tuple(groups))


def test_what_is_refused_is_written_without_the_change(torch_run: Checkpoint, hub: Path):
    found = declared(torch_run, hub)
    recipe: Mapping[str, Any] = found.recipe
    assert recipe["also"] == ["--override-opt_param-scheduler", "--no-load-rng"]
    assert [g["weight_decay"] for g in recipe["next_step"]] == [0.1, 0.0]
    assert {g["lr"] for g in recipe["next_step"]} == {0.003972653955421975}
    assert recipe["verdict"] == "changes trajectory"  # the padded vocabulary is another
    fates = {f.path: f.kind for f in found.fates}
    assert fates["train_state.consumed_train_samples"] == "remap"
    assert {p for p in torch_run.extras if p not in fates} == set()


@pytest.mark.parametrize(
    ("group", "options", "message"),
    [
        (1, {"weight_decay": 0.01}, r"layernorm.weight: weight decay 0.01 in the source, and Me"),
        (1, {"lr": 0.5}, r"embedding.* and .*norm.weight: lr 0.0039.* and 0.5 in the source"),
        (0, {"betas": [0.5, 0.6]}, r"betas \[0.5, 0.6\] and \[0.9, 0.95\]"),
        (0, {"amsgrad": True}, r"amsgrad is on in the source, and Megatron has none"),
        (0, {"lr_mult": 0.1}, r"a learning rate of its own"),
        (0, {"weight_decay": None}, r"says no weight_decay"),
    ],
)
def test_groups_that_no_megatron_job_has_are_refused(
    torch_run: Checkpoint, hub: Path, group: int, options: dict[str, Any], message: str
):
    with pytest.raises(LossError, match=message):
        declared(with_options(torch_run, group, **options), hub)


def test_two_decays_of_matrices_are_refused(torch_run: Checkpoint, hub: Path):
    assert torch_run.groups is not None
    one, two = torch_run.groups
    head = ("lm_head.weight",)
    rest = tuple(n for n in one.members if n not in head)
    more = ParamGroup({**one.options, "weight_decay": 0.2}, head)
    groups = (ParamGroup(one.options, rest), more, two)
    with pytest.raises(LossError, match=r"several: .* 0\.1, output_layer.weight 0\.2"):
        declared(replace(torch_run, groups=groups), hub)


def test_unequal_steps_are_refused(torch_run: Checkpoint, hub: Path):
    steps = {**torch_run.steps, "lm_head.weight": 4.0}
    with pytest.raises(LossError, match=r"different step counters \[3\.0, 4\.0\]"):
        declared(replace(torch_run, steps=steps), hub)


def without(source: Checkpoint, *left_out: TensorId) -> Checkpoint:
    tensors: dict[TensorId, LogicalTensor] = {
        t: v for t, v in source.layout.tensors.items() if t not in left_out
    }
    return replace(source, layout=replace(source.layout, tensors=tensors))


def test_a_weight_without_moments_is_refused(torch_run: Checkpoint, hub: Path):
    frozen = without(torch_run, TensorId("lm_head.weight", "exp_avg"))
    with pytest.raises(LossError, match=r"output_layer.weight: the source has no exp_avg for it"):
        declared(frozen, hub)


def test_consumed_samples_that_nothing_says_are_asked_for(
    unpacked: Unpack, torch_run: Checkpoint, hub: Path, tmp_path: Path
):
    extras = {k: v for k, v in torch_run.extras.items() if not k.endswith("samples")}
    silent = replace(torch_run, extras=extras)
    with pytest.raises(FormatError, match=r"Give samples=N in --to: iterations \(3\) x global"):
        declared(silent, hub)
    found = declared(silent, hub, "megatron:tp2,samples=24")
    assert "at 24 samples" in found.recipe["schedule"]
    with pytest.raises(UsageError, match="samples=few"):
        declared(silent, hub, "megatron:tp2,samples=few")
    with pytest.raises(UsageError, match="says how many it has consumed"):
        reshard.convert(llama(unpacked), tmp_path / "out", "megatron:tp2,samples=24")


@pytest.mark.parametrize("to", ["megatron:tp2", "megatron-legacy:tp2"])
@pytest.mark.parametrize(
    ("dtype", "precision"),
    [(None, (False, False)), ("bf16", (True, False)), ("fp16", (False, True))],
)
def test_the_weights_dtype_is_what_the_run_computes_in(
    torch_run: Checkpoint,
    hub: Path,
    tmp_path: Path,
    to: str,
    dtype: str | None,
    precision: tuple[bool, bool],
):
    """Every bit of the source's one copy is kept: in masters, or as an fp32 run's weights."""
    report: Any = reshard.convert(
        torch_run.path, tmp_path / "out", to, config=str(hub), dtype=dtype
    )
    assert any("needs --dtype bf16" in note for note in report["notes"]) == (dtype is None)
    made = open_checkpoint(tmp_path / "out")
    assert (made.extras["args.bf16"], made.extras["args.fp16"]) == precision
    assert digests(tmp_path / "out", hub) == digests(torch_run.path, hub)
    assert reshard.diff(torch_run.path, tmp_path / "out", config=str(hub))["differences"] == []


def test_weights_of_two_dtypes_are_no_megatron_run(torch_run: Checkpoint, hub: Path):
    head = TensorId("lm_head.weight")
    tensors = dict(torch_run.layout.tensors)
    tensors[head] = replace(tensors[head], dtype=named("bfloat16"))
    mixed = replace(torch_run, layout=replace(torch_run.layout, tensors=tensors))
    with pytest.raises(
        LossError, match=r"several dtypes \(.*float32, output_layer.weight bfloat16"
    ):
        declared(mixed, hub, dtype=None)


def test_a_model_whose_module_order_is_unknown_needs_a_reference_for_zero(
    unpacked: Unpack, tmp_path: Path
):
    """ZeRO's flat partitions follow the job's order of parameters, which names do not tell."""
    source = unpacked("megatron/h-moe-pp2ep2") / "dist"
    with pytest.raises(ReshardError):
        reshard.convert(source, tmp_path / "out", "deepspeed:zero2dp2,names=hf")
    made = replace(open_checkpoint(llama(unpacked)), ordered=False)
    crossed = cross(made, "hf", Choice())
    with pytest.raises(FormatError, match=r"is not known, and ZeRO's flat partitions follow it"):
        find("deepspeed").declare(
            replace(crossed.checkpoint, ordered=False), parse_target("deepspeed:zero2"),
            WriteOptions(),
        )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "to"),
    [
        ("megatron/h-llama-tp2pp2", "dcp:dp2"),
        ("megatron/h-llama-tp2pp2", "deepspeed:zero3dp2"),
        ("deepspeed/z3_dp2_bf16", "dcp:dp2"),
        ("dcp/fsdp2_w2_fp32", "deepspeed:zero3dp2"),
    ],
)
def test_every_field_of_the_source_has_a_fate_by_its_full_path(
    unpacked: Unpack, name: str, to: str
):
    folder = unpacked(name)
    source = next(
        p for p in (folder / "dist", folder / "checkpoint", folder / "ckpt") if p.exists()
    )
    report: Any = reshard.plan(source, to)
    told = {f["path"] for f in report["fates"]}
    extras = open_checkpoint(source).extras
    assert len(extras) > 10
    assert [path for path in extras if path not in told] == []


def test_the_usual_names_are_written_where_none_are_asked_for(unpacked: Unpack, tmp_path: Path):
    reshard.convert(llama(unpacked), tmp_path / "plain", "deepspeed:zero2dp2")
    reshard.convert(llama(unpacked), tmp_path / "named", "deepspeed:zero2dp2,names=hf")
    assert reshard.diff(tmp_path / "plain", tmp_path / "named")["differences"] == []


@pytest.mark.proves("deepspeed", "universal", "training state")
@pytest.mark.proves("universal", "megatron", "training state")
def test_through_the_universal_store_is_as_straight(unpacked: Unpack, hub: Path, tmp_path: Path):
    """DeepSpeed -> universal -> Megatron, of a run that was Megatron's."""
    source = llama(unpacked)
    steps = (
        ("deepspeed:zero1dp3", {}),
        ("universal", {}),
        ("megatron:tp2pp2,vocab_divisor=8,spec=local,optim=non_distributed", {}),
    )
    at = source
    for i, (to, options) in enumerate(steps):
        reshard.convert(at, tmp_path / str(i), to, config=str(hub), **options)
        at = tmp_path / str(i)
        assert digests(at, hub) == digests(source, hub)
    assert unmade(different(source, at, hub)) == ([], MEGATRONS)
