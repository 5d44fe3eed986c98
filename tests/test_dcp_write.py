"""DCP and plain state dicts as targets: the same state under every key layout and cut."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import reshard
from dcp_truth import differences, read_truth
from peers.dcp_cases import run_writer
from reshard.containers import dcp
from reshard.errors import LossError, UsageError

Unpacked = Callable[[str], Path]


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_writer("forms", tmp_path_factory.mktemp("forms"))


def converted(source: Path, target: Path, to: str, **options: object) -> Path:
    """The checkpoint that a conversion wrote."""
    report = reshard.convert(source, target, to, **options)
    assert report["status"] == "ok"
    return Path(str(report["path"]))


def assert_equal(left: Path, right: Path, *, extras: bool = False) -> None:
    report = reshard.diff(left, right, extras=extras)
    assert report["differences"] == []


@pytest.mark.parametrize(
    ("fixture", "inner", "to"),
    [
        ("dcp/fsdp2_w2_fp32", "checkpoint", "dcp:dp5"),
        ("dcp/fsdp2_w4_uneven", "checkpoint", "dcp:dp3"),
        ("dcp/fsdp2_w4_uneven", "checkpoint", "dcp:chunk=1KiB"),
        ("dcp/fsdp2_w2_uneven_flat", "checkpoint", "dp1"),
        ("dcp/fsdp2_tp_2x2", "checkpoint", "dcp:dp2"),
        ("dcp/accelerate_fsdp2_w2_sharded", "checkpoint", "dp4"),
        ("dcp/torchtitan_w2", "checkpoint/step-4", "dcp"),
        ("dcp/ddp_w2_torchsave", "checkpoint", "dcp"),
        ("wrappers/lightning_fsdp2_dp2_fp32", "ckpt/epoch=1-step=6.ckpt", "dp3"),
        ("wrappers/trainer_fsdp2_dp2_bf16", "ckpt/checkpoint-6", "dp1"),
    ],
)
def test_a_reshard_within_a_kind_loses_nothing(
    unpacked: Unpacked, tmp_path: Path, fixture: str, inner: str, to: str
):
    source = unpacked(fixture) / inner
    report = reshard.plan(source, to)
    assert report["losses"] == []
    made = converted(source, tmp_path / "out", to)
    found = reshard.diff(source, made, extras=True)["differences"]
    # Trainer's share of a global batch on each rank: tests/test_sample_sequence.py
    assert [d for d in found if d["what"] != "trainer_state.json.train_batch_size"] == []


@pytest.mark.parametrize("to", ["dcp.accelerate:dp2", "dcp.torchtitan", "dcp:flat=yes", "torch"])
def test_every_key_layout_holds_the_same_state(unpacked: Unpacked, tmp_path: Path, to: str):
    source = unpacked("dcp/fsdp2_w4_uneven") / "checkpoint"
    made = converted(source, tmp_path / "there", to)
    assert_equal(source, made)
    back = converted(made, tmp_path / "back", "dcp.plain:dp4")
    assert_equal(source, back)
    keys = dcp.read_metadata(back)
    assert keys.tensors.keys() >= {
        "model.model.norm.weight",
        "optim.state.model.norm.weight.exp_avg",
        "optim.state.model.norm.weight.step",
    }
    assert "lr_scheduler.last_epoch" in keys.objects


@pytest.mark.parametrize(
    ("fixture", "inner"),
    [
        ("dcp/verl_fsdp2_w4", "checkpoint"),
        ("wrappers/lightning_single_fp32", "ckpt/epoch=1-step=6.ckpt"),
        ("wrappers/trainer_fsdp2_dp2_bf16_full", "ckpt/checkpoint-6"),
    ],
)
@pytest.mark.proves("torch", "torch", "training state")
@pytest.mark.parametrize("to", ["dcp:dp3", "torch", "dcp.accelerate:dp2"])
def test_files_of_trainers_become_any_kind_with_their_scheduler(
    unpacked: Unpacked, tmp_path: Path, fixture: str, inner: str, to: str
):
    source = unpacked(fixture) / inner
    made = converted(source, tmp_path / "out", to)
    assert_equal(source, made)
    kept = reshard.open(made).extras
    epoch = kept.get("lr_scheduler.last_epoch", kept.get("scheduler.bin.last_epoch"))
    ranks = 2 if "accelerate" in to else 1  # accelerate counts once for each
    assert epoch == ranks * reshard.open(source).checkpoint.iteration
    fates = reshard.plan(source, to)["fates"]
    assert isinstance(fates, list)
    named = {str(f["path"]).split(".")[0] for f in fates if isinstance(f, dict)}
    heads = {path.split(".")[0] for path in reshard.open(source).extras}
    assert all(any(head in name or name in head for name in named) for head in heads)


def test_rows_are_cut_as_torch_chunk_cuts_them(unpacked: Unpacked, tmp_path: Path):
    """6 rows for 4 ranks: 2, 2, 2 and none; 503 rows: 126, 126, 126, 125."""
    source = unpacked("dcp/fsdp2_w4_uneven") / "checkpoint"
    made = dcp.read_metadata(converted(source, tmp_path / "out", "dcp:dp4"))
    ours = {k: [c.sizes for c in e.chunks] for k, e in made.tensors.items()}
    theirs = {
        k: [c.sizes for c in sorted(e.chunks, key=lambda c: c.offsets)]
        for k, e in dcp.read_metadata(source).tensors.items()
    }
    assert ours == theirs
    assert ours["model.model.layers.0.self_attn.k_proj.weight"] == [(2, 30)] * 3


def test_planner_data_gives_the_nesting_that_torch_gave(unpacked: Unpacked, tmp_path: Path):
    source = unpacked("dcp/fsdp2_w2_fp32") / "checkpoint"
    made = converted(source, tmp_path / "out", "dcp:dp3")
    assert dcp.read_metadata(made).planner_data == dcp.read_metadata(source).planner_data


def test_options_that_older_torch_lacks_are_filled_and_declared(forms: Path, tmp_path: Path):
    source = forms / "old-options"
    made = reshard.open(converted(source, tmp_path / "out", "dcp")).checkpoint
    assert made.groups is not None
    assert all(g.options["decoupled_weight_decay"] is False for g in made.groups)
    fates = reshard.plan(source, "dcp")["fates"]
    assert isinstance(fates, list)
    filled = {f["path"] for f in fates if isinstance(f, dict) and f["kind"] == "derive"}
    assert filled == {"param_groups.decoupled_weight_decay", "param_groups.fused"}


def test_hidden_classes_are_shown_and_never_written_again(forms: Path, tmp_path: Path):
    source = forms / "hidden"
    shown = reshard.open(source).extras
    assert "peers.dcp_make.Hidden" in str(shown["hidden"]) or "__main__.Hidden" in str(
        shown["hidden"]
    )
    made = converted(source, tmp_path / "out", "dcp:dp2")
    for file in made.iterdir():
        assert b"Hidden" not in file.read_bytes() or file.name.startswith("reshard")
    kept = reshard.open(made).extras
    assert "hidden" not in kept
    assert kept["plain.epoch"] == 3
    assert kept["rng"] == shown["rng"]
    losses = reshard.plan(source, "dcp")["losses"]
    assert isinstance(losses, list)
    assert [(x["code"], x["what"]) for x in losses if isinstance(x, dict)] == [
        ("extra-dropped", "hidden")
    ]
    with pytest.raises(LossError, match="hidden"):
        reshard.convert(source, tmp_path / "strict", "dcp", strict=True)


def test_weights_alone_leave_the_rest_behind(unpacked: Unpacked, tmp_path: Path):
    source = unpacked("dcp/fsdp2_w2_fp32") / "checkpoint"
    made = converted(source, tmp_path / "out", "dcp:dp2", weights_only=True, dtype="bf16")
    held = dcp.read_metadata(made)
    assert len(held.tensors) == 21
    assert held.objects == {}
    assert {e.dtype.name for e in held.tensors.values()} == {"bfloat16"}


def test_like_takes_keys_and_groups_of_the_reference(unpacked: Unpacked, tmp_path: Path):
    source = unpacked("dcp/fsdp2_w4_uneven") / "checkpoint"
    like = unpacked("dcp/fsdp2_w2_uneven_flat") / "checkpoint"
    made = converted(source, tmp_path / "out", None, like=str(like))
    ours, theirs = dcp.read_metadata(made), dcp.read_metadata(like)
    assert ours.tensors.keys() == theirs.tensors.keys() | {"rng.rank2", "rng.rank3"}
    assert ours.objects.keys() == theirs.objects.keys()
    assert_equal(source, made)


def test_per_rank_data_loaders_are_not_dealt_out_in_silence(unpacked: Unpacked, tmp_path: Path):
    source = unpacked("dcp/torchtitan_w2") / "checkpoint" / "step-4"
    with pytest.raises(LossError, match="opaque states of 2 ranks' data loaders"):
        reshard.plan(source, "dcp:dp4")
    reset = reshard.open(converted(source, tmp_path / "a", "dcp:dp4", data_cursor="reset")).extras
    assert not [path for path in reset if path.startswith("dataloader")]
    first = reshard.open(
        converted(source, tmp_path / "b", "dcp:dp4", data_cursor="keep-rank0")
    ).extras
    assert [p for p in first if p.startswith("dataloader.dp_rank_")] == [
        f"dataloader.dp_rank_{r}" for r in range(4)
    ]


def test_a_model_that_no_family_knows_converts_within_its_names(forms: Path, tmp_path: Path):
    made = converted(forms / "nested", tmp_path / "out", "dcp:dp3")
    assert_equal(forms / "nested", made, extras=True)
    assert "app.ema.0.weight" in dcp.read_metadata(made).tensors


def test_an_option_or_variant_that_is_not_known_is_named(unpacked: Unpacked):
    source = unpacked("dcp/fsdp2_w2_fp32") / "checkpoint"
    for to, said in (
        ("dcp.fsdp9", "dcp.fsdp9 is not known"),
        ("dcp:chunk=1kb", "write a size as 256MiB"),
        ("dcp:zero=3", "option 'zero' is not known"),
        ("dcp:vpp2", "has no degree vpp"),
        ("torch:dp2", "has no degrees"),
    ):
        with pytest.raises(UsageError, match=said):
            reshard.plan(source, to)


def test_a_plain_state_dict_is_read_from_the_file_or_its_folder(unpacked: Unpacked, tmp_path: Path):
    source = unpacked("dcp/fsdp2_w2_bf16_tied") / "checkpoint"
    made = converted(source, tmp_path / "out", "torch:file=state.pt")
    assert_equal(source, made, extras=True)
    alone = tmp_path / "alone.pt"
    shutil.copy(made / "state.pt", alone)
    assert_equal(source, alone, extras=True)


def test_a_scheduler_that_accelerate_prepared_counts_for_the_new_ranks(
    unpacked: Unpacked, forms: Path, tmp_path: Path
):
    """It steps once for each rank: 8 after 4 steps of 2 ranks, 20 after 4 steps of 5."""
    source = tmp_path / "source"
    shutil.copytree(unpacked("dcp/accelerate_fsdp2_w2_sharded") / "checkpoint", source)
    shutil.copy(forms / "scheduler.bin", source / "scheduler.bin")
    same = reshard.open(converted(source, tmp_path / "same", "dcp:dp2")).extras
    assert same["scheduler.bin.last_epoch"] == 8
    other = reshard.open(converted(source, tmp_path / "other", "dcp:dp5")).extras
    assert other["scheduler.bin.last_epoch"] == 20
    assert other["scheduler.bin._step_count"] == 21
    assert other["custom_checkpoint_0.pkl.last_epoch"] == 4


@pytest.mark.proves("deepspeed", "dcp", "training state")
@pytest.mark.proves("deepspeed", "torch", "training state")
def test_masters_of_another_framework_become_the_weights_and_ties_get_both_names(
    unpacked: Unpacked, tmp_path: Path
):
    """What DeepSpeed saved in bf16 with fp32 masters, for FSDP: one copy, in full width."""
    folder = unpacked("deepspeed/z2_dp2_bf16_tied")
    truth = read_truth(folder)
    for to in ("dcp:dp3", "torch"):
        made = converted(folder / "ckpt", tmp_path / to.replace(":", "-"), to)
        opened = reshard.open(made)
        assert differences(opened, truth) == []
        head, embedding = opened["lm_head.weight"], opened["model.embed_tokens.weight"]
        assert (head[...] == embedding[...]).all()
        assert opened.checkpoint.groups is not None
        assert [g.options["weight_decay"] for g in opened.checkpoint.groups] == [0.1, 0.0]
        assert set(opened.steps.values()) == {5.0}
    report = reshard.plan(folder / "ckpt", "dcp:dp3")
    assert isinstance(report["losses"], list)
    assert {x["code"] for x in report["losses"] if isinstance(x, dict)} == {"extra-dropped"}


@pytest.mark.proves("dcp", "deepspeed", "training state")
@pytest.mark.parametrize("to", ["deepspeed:zero2dp2", "deepspeed:zero3dp3"])
def test_fsdp_to_deepspeed_and_back_is_the_identity(unpacked: Unpacked, tmp_path: Path, to: str):
    source = unpacked("dcp/fsdp2_w4_uneven") / "checkpoint"
    there = converted(source, tmp_path / "there", to)
    back = converted(there, tmp_path / "back", "dcp:dp2")
    assert_equal(source, back)


@pytest.mark.parametrize("to", ["deepspeed:zero2dp2", "deepspeed:zero3dp2", "torch", "universal"])
def test_tied_weights_stay_one_on_every_way(unpacked: Unpacked, tmp_path: Path, to: str):
    """A DCP keeps lm_head beside the embedding, and moments of the embedding alone."""
    source = unpacked("dcp/fsdp2_w2_bf16_tied") / "checkpoint"
    ties = {"lm_head.weight": "model.embed_tokens.weight"}
    opened = reshard.open(source)
    assert opened.extras["ties"] == ties
    assert ("lm_head.weight", "param") not in opened.tensors
    assert (
        opened["lm_head.weight"][...].tobytes()
        == opened["model.embed_tokens.weight"][...].tobytes()
    )
    there = converted(source, tmp_path / "there", to)
    assert reshard.open(there).extras["ties"] == ties
    back = converted(there, tmp_path / "back", "dcp:dp3", dtype="bf16")
    assert_equal(source, back)
    assert reshard.open(back).extras["ties"] == ties
    held = dcp.read_metadata(back).tensors
    assert [c.place for c in held["model.lm_head.weight"].chunks] == [
        c.place for c in held["model.model.embed_tokens.weight"].chunks
    ]
    assert (
        "model.lm_head.weight"
        in dcp.read_metadata(
            converted(back, tmp_path / "weights", "dcp", weights_only=True)
        ).tensors
    )


def test_a_copy_that_is_no_tie_stays_a_tensor_of_its_own(unpacked: Unpacked, tmp_path: Path):
    """--from says so, or config.json, or one element that differs."""
    source = tmp_path / "source"
    shutil.copytree(unpacked("dcp/fsdp2_w2_bf16_tied") / "checkpoint", source)
    assert "lm_head.weight" not in reshard.open(source, "dcp:ties=no").extras
    assert "ties" not in reshard.open(source, "dcp:ties=no").extras
    (source / "config.json").write_text('{"tie_word_embeddings": false}')
    assert "ties" not in reshard.open(source).extras
    (source / "config.json").unlink()
    piece = reshard.open(source, "dcp:ties=no")["lm_head.weight"].pieces[-1].array
    (source / piece.file).chmod(0o644)
    with (source / piece.file).open("r+b") as file:
        file.seek(piece.offset)
        file.write(b"\x00\x40")
    opened = reshard.open(source)
    assert "ties" not in opened.extras
    assert ("lm_head.weight", "param") in opened.tensors
    with pytest.raises(UsageError, match="ties=maybe"):
        reshard.open(source, "dcp:ties=maybe")


@pytest.mark.parametrize(
    ("fixture", "inner", "to"),
    [
        ("dcp/accelerate_fsdp2_w2_sharded", "checkpoint", None),
        ("dcp/torchtitan_w2", "checkpoint/step-4", None),
        ("dcp/fsdp2_w2_bf16_tied", "checkpoint", "dcp:dp3"),
        ("wrappers/trainer_single_fp32", "ckpt/checkpoint-6", "dcp.accelerate:dp2"),
        ("dcp/verl_fsdp2_w4", "checkpoint", "dcp:dp3"),
    ],
)
@pytest.mark.proves("dcp", "universal", "training state")
@pytest.mark.proves("universal", "dcp", "training state")
def test_through_the_universal_store_every_byte_is_the_same(
    unpacked: Unpacked, tmp_path: Path, fixture: str, inner: str, to: str | None
):
    """Key layout, groups, scheduler, random states and side files: the store keeps them all."""
    source = unpacked(fixture) / inner
    straight = converted(source, tmp_path / "straight", to or "dcp")
    store = tmp_path / "store"
    report = reshard.plan(source, "universal")  # training_args.bin is left behind on every way
    assert [x for x in report["losses"] if x["code"] != "opaque-dropped"] == []
    converted(source, store, "universal")
    round_ = converted(store, tmp_path / "round", to or "dcp")
    names = {str(p.relative_to(straight)) for p in straight.rglob("*") if p.is_file()}
    names = {n for n in names if not n.startswith("reshard")}
    assert len(names) > 1
    for name in names:
        assert (straight / name).read_bytes() == (round_ / name).read_bytes(), name


def test_classes_that_name_code_are_losses_of_the_store_too(forms: Path, tmp_path: Path):
    losses = reshard.plan(forms / "hidden", "universal")["losses"]
    assert isinstance(losses, list)
    assert [(x["code"], x["what"]) for x in losses if isinstance(x, dict)] == [
        ("extra-dropped", "hidden")
    ]
    store = converted(forms / "hidden", tmp_path / "store", "universal")
    for file in store.rglob("zarr.json"):
        assert b"dcp_make" not in file.read_bytes() or b'"hidden": "' in file.read_bytes()
    made = reshard.open(converted(store, tmp_path / "out", "dcp"))
    assert made.extras["plain.epoch"] == 3
    assert "hidden" not in made.extras


@pytest.mark.proves("dcp", "deepspeed", "training state")
def test_torchtitans_fused_moments_are_cut_by_the_family_and_fused_again(
    unpacked: Unpacked, tmp_path: Path
):
    """The state dict has wq, wk and wv, the optimizer wqkv by kv head, rotary rows in pairs."""
    source = unpacked("dcp/torchtitan_w2") / "checkpoint/step-4"
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 256,'
        '"num_key_value_heads": 2, "intermediate_size": 64, "num_hidden_layers": 2}'
    )
    hub = converted(source, tmp_path / "hub", "deepspeed:zero2dp2,names=hf", config=str(tmp_path))
    opened = reshard.open(hub)
    assert opened["model.layers.1.self_attn.k_proj.weight", "exp_avg_sq"].shape == (16, 32)
    back = converted(hub, tmp_path / "back", "dcp.torchtitan:dp2", config=str(tmp_path))
    assert_equal(source, back)
    theirs, ours = dcp.read_metadata(source).tensors, dcp.read_metadata(back).tensors
    assert {k for k in theirs if not k.startswith("dataloader")} == ours.keys()


def test_what_is_left_out_is_in_no_param_group(unpacked: Unpacked, tmp_path: Path):
    source = unpacked("dcp/fsdp2_w2_fp32") / "checkpoint"
    reshard.convert(source, tmp_path / "out", "torch", include="model.layers.0.*")
    found = reshard.open(tmp_path / "out")
    assert found.groups is not None
    members = {m for g in found.groups for m in g.members}
    assert members == {name for name, _ in found.logical}
    before = reshard.open(source).groups
    assert before is not None
    assert [g.options for g in found.groups] == [g.options for g in before]
    with pytest.raises(UsageError, match="integers and slices"):
        found.logical[min(members), "param"][True]
