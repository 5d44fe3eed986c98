"""Every kind of PyTorch checkpoint is read as its run left it: tensors, steps, groups, extras."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

import reshard
from dcp_truth import differences, read_truth
from peers.dcp_cases import run_writer

Unpacked = Callable[[str], Path]


@dataclass(frozen=True)
class Source:
    """A fixture, the checkpoint in it, and what it should show."""

    fixture: str
    inner: str = "checkpoint"
    format: str = "dcp"
    groups: tuple[int, ...] = (16, 5)
    step: int = 4
    ranks: int | None = 2
    decay: tuple[float, ...] = (0.1, 0.0)


SOURCES = (
    Source("dcp/fsdp2_w2_fp32"),
    Source("dcp/fsdp2_w4_uneven", ranks=4),
    Source("dcp/fsdp2_w2_uneven_flat"),
    Source("dcp/fsdp2_w2_bf16_tied", groups=(15, 5)),
    Source("dcp/fsdp2_w2_moe", groups=(16, 9)),
    Source("dcp/fsdp2_tp_2x2", ranks=4),
    Source("dcp/tp_only_w2"),
    Source("dcp/hsdp_2x2", ranks=4),
    Source("dcp/fsdp2_w2_zstd"),
    Source("dcp/fsdp1_w2_getsd"),
    Source("dcp/fsdp1_w2_full_orig", format="torch", ranks=None),
    Source("dcp/fsdp1_w2_sharded_flat", groups=(21,), decay=(0.1,)),
    Source("dcp/fsdp1_w2_sharded_flat", "pickles", "torch", groups=(21,), decay=(0.1,)),
    Source("dcp/lightning_fabric_w2"),
    Source("dcp/fsdp1_w2_sharded_orig"),
    Source("dcp/fsdp1_w2_sharded_orig", "pickles", "torch"),
    Source("dcp/ddp_w2_torchsave", format="torch", ranks=None),
    Source("dcp/verl_fsdp2_w4", format="torch", ranks=4),
    Source("dcp/accelerate_fsdp2_w2_sharded"),
    Source("wrappers/trainer_fsdp2_dp2_bf16", "ckpt/checkpoint-6", groups=(16, 13), step=6),
    Source(
        "wrappers/lightning_fsdp2_dp2_fp32",
        "ckpt/epoch=1-step=6.ckpt",
        groups=(16, 13),
        step=6,
    ),
    *(
        Source(
            f"wrappers/trainer_{ranks}_fp32",
            "ckpt/checkpoint-6",
            "torch",
            groups=(16, 13),
            step=6,
            ranks=None,
        )
        for ranks in ("single", "ddp_dp2")
    ),
    Source(
        "wrappers/lightning_single_fp32",
        "ckpt/epoch=1-step=6.ckpt",
        "torch",
        groups=(16, 13),
        step=6,
        ranks=None,
    ),
    Source(
        "wrappers/trainer_fsdp2_dp2_bf16_full",
        "ckpt/checkpoint-6",
        "torch",
        groups=(16, 13),
        step=6,
        ranks=None,
    ),
)


@pytest.mark.parametrize("source", SOURCES, ids=lambda s: f"{s.fixture}-{s.inner}")
def test_every_tensor_equals_the_truth_of_its_run(unpacked: Unpacked, source: Source):
    folder = unpacked(source.fixture)
    opened = reshard.open(folder / source.inner)
    found = opened.checkpoint
    assert differences(opened, read_truth(folder)) == []
    assert found.format == source.format
    assert found.topology.dp == source.ranks
    assert found.iteration == source.step
    assert set(found.steps.values()) == {float(source.step)}
    assert found.groups is not None
    assert tuple(len(g.members) for g in found.groups) == source.groups
    assert tuple(g.options["weight_decay"] for g in found.groups) == source.decay
    assert {m for g in found.groups for m in g.members} == set(found.steps)
    assert found.layout.naming == "torch"
    assert found.problems == ()


@pytest.mark.parametrize("source", SOURCES, ids=lambda s: f"{s.fixture}-{s.inner}")
def test_verify_finds_every_source_whole(unpacked: Unpacked, source: Source):
    folder = unpacked(source.fixture) / source.inner
    report = reshard.verify(folder)
    assert report["status"] == "ok"
    assert report["tensors"] == len(reshard.open(folder).checkpoint.layout.tensors)


@pytest.mark.parametrize(
    ("fixture", "inner", "format"),
    [
        ("dcp_safetensors_w4", "checkpoint", "dcp"),
        ("fsdp2_w2_hf_consolidated", "checkpoint", "hf"),
        ("fsdp2_w2_hf_consolidated", "checkpoint/sharded", "dcp"),
    ],
)
def test_safetensors_of_torch_equal_the_truth(
    unpacked: Unpacked, fixture: str, inner: str, format: str
):
    folder = unpacked(f"dcp/{fixture}")
    opened = reshard.open(folder / inner)
    truth = {k: v for k, v in read_truth(folder).items() if k[1] == "param"}
    assert len(truth) == 21
    assert differences(opened, truth) == []
    assert opened.checkpoint.format == format


def test_a_store_and_the_pickles_of_one_state_have_one_fingerprint(unpacked: Unpacked):
    folder = unpacked("dcp/fsdp1_w2_sharded_orig")
    stored = reshard.fingerprint(folder / "checkpoint")
    assert stored == reshard.fingerprint(folder / "pickles")


@pytest.mark.parametrize(("kind", "groups"), [("flat", [21]), ("orig", [16, 5])])
def test_flat_parameters_take_their_shapes_from_a_reference(
    unpacked: Unpacked, kind: str, groups: list[int]
):
    """Names and shapes are nowhere in FSDP1's LOCAL_STATE_DICT; any checkpoint of the model has
    them."""
    folder = unpacked(f"dcp/fsdp1_w2_local_{kind}")
    reference = unpacked("dcp/fsdp1_w2_sharded_orig") / "checkpoint"
    opened = reshard.open(folder / "checkpoint", f"torch:reference={reference}")
    assert differences(opened, read_truth(folder)) == []
    assert opened.checkpoint.groups is not None
    assert [len(g.members) for g in opened.checkpoint.groups] == groups
    with pytest.raises(reshard.ReshardError, match="--from torch:reference=DIR"):
        reshard.open(folder / "checkpoint")


@pytest.mark.parametrize("kind", ["flat", "orig"])
def test_flat_parameters_take_their_shapes_from_a_config(
    unpacked: Unpacked, tmp_path: Path, kind: str
):
    """A config.json alone: the family knows the shapes, transformers the order of modules."""
    folder = unpacked(f"dcp/fsdp1_w2_local_{kind}")
    shutil.copy(folder / "config.json", tmp_path)
    opened = reshard.open(folder / "checkpoint", f"torch:reference={tmp_path}")
    assert differences(opened, read_truth(folder)) == []
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text('{"model_type": "dbrx"}')
    with pytest.raises(reshard.ReshardError, match="model_type 'dbrx' is in no family"):
        reshard.open(folder / "checkpoint", f"torch:reference={tmp_path}")


def test_flat_parameters_of_another_model_are_refused(unpacked: Unpacked):
    folder = unpacked("dcp/fsdp1_w2_local_flat")
    other = unpacked("dcp/fsdp2_w2_fp32") / "checkpoint"
    with pytest.raises(reshard.ReshardError, match="the reference's 3 parameters there have 16416"):
        reshard.open(folder / "checkpoint", f"torch:reference={other}")


def test_torchtitan_keeps_its_own_names_and_its_fused_moments(unpacked: Unpacked):
    """The weights are wq, wk and wv, the optimizer's state is wqkv: grouped by kv head."""
    folder = unpacked("dcp/torchtitan_w2")
    opened = reshard.open(folder / "checkpoint", iteration=4)
    truth = read_truth(folder)
    fused = [n for n, slot in truth if slot == "param" and "wqkv" in n]
    assert len(fused) == 2
    for name in fused:
        lead = name.removesuffix("wqkv.weight")
        q, k, v = (opened[f"{lead}w{x}.weight"][...] for x in "qkv")
        heads = [w.reshape(2, -1, 8, 32) for w in (q, k, v)]  # [kv, heads each, head_dim, dim]
        expected = truth.pop((name, "param")).reshape(2, 4, 8, 32)
        assert all(
            (expected[:, a:b] == part).all()
            for part, a, b in zip(heads, (0, 2, 3), (2, 3, 4), strict=True)
        )
    assert differences(opened, truth) == []
    assert "torchtitan" in opened.checkpoint.version
    assert opened.extras["train_state.step"] == 4


def test_a_run_folder_gives_its_latest_step_or_the_one_asked_for(unpacked: Unpacked):
    run = unpacked("dcp/torchtitan_w2") / "checkpoint"
    assert reshard.open(run).checkpoint.path.name == "step-1004"
    assert reshard.open(run, iteration=4).checkpoint.path.name == "step-4"
    with pytest.raises(reshard.ReshardError, match=r"no iteration 7; there: \[4, 1004"):
        reshard.open(run, iteration=7)


def test_hugging_face_shards_are_put_together(unpacked: Unpacked):
    folder = unpacked("dcp/hf_sharded_w4_uneven")
    opened = reshard.open(folder / "checkpoint")
    truth = {k: v for k, v in read_truth(folder).items() if k[1] == "param"}
    assert len(truth) == 21
    assert differences(opened, truth) == []
    assert "a shard lost at the end would not show" in opened.checkpoint.problems[0]


def test_a_lost_last_hugging_face_shard_shows_in_the_vocabulary(unpacked: Unpacked, tmp_path: Path):
    copy = tmp_path / "copy"
    shutil.copytree(unpacked("dcp/hf_sharded_w4_uneven") / "checkpoint", copy)
    (copy / "shard-00004-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(reshard.ReshardError, match="378 rows in its shards"):
        reshard.open(copy)


def test_a_lost_last_hugging_face_shard_shows_in_the_index(unpacked: Unpacked, tmp_path: Path):
    """Consolidation leaves it beside `sharded`: total_size of what the ranks had."""
    copy = tmp_path / "copy"
    shutil.copytree(unpacked("dcp/fsdp2_w2_hf_consolidated") / "checkpoint", copy)
    assert reshard.open(copy / "sharded").checkpoint.problems == ()
    for path in (copy / "sharded").glob("shard-00002-*"):
        path.unlink()
    with pytest.raises(reshard.ReshardError, match=r"bytes are there by .*the last ranks' shards"):
        reshard.open(copy / "sharded")


# ---------------------------------------------------------------------- forms written for the test


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_writer("forms", tmp_path_factory.mktemp("forms"))


FORMS = ("plain", "one-file-per-item", "threads", "zstd", "wrapped", "nested", "hidden")
OLDER = ("old-options", "torch-2.3", "numbered")


@pytest.mark.parametrize("form", [*FORMS, *OLDER])
def test_every_writer_option_of_torch_is_read(forms: Path, form: str):
    opened = reshard.open(forms / form)
    assert differences(opened, read_truth(forms)) == []
    assert opened.checkpoint.groups is not None
    assert [len(g.members) for g in opened.checkpoint.groups] == [3, 2]


def test_safetensors_files_are_read_by_their_own_headers(forms: Path):
    """torch 2.13 cannot load its own SerializationFormat.SAFETENSORS: every offset is 0."""
    truth = {k: v for k, v in read_truth(forms).items() if k[1] == "param"}
    assert differences(reshard.open(forms / "safetensors"), truth) == []


def test_wrappers_are_stripped_and_the_stored_name_still_finds_the_tensor(forms: Path):
    opened = reshard.open(forms / "wrapped")
    assert {n for n, _ in opened.logical} == {
        "0.weight",
        "0.bias",
        "1.weight",
        "2.weight",
        "2.bias",
    }
    stored = opened["module._orig_mod.0.weight"]
    assert (stored[...] == opened["0.weight"][...]).all()


def test_a_second_copy_of_the_model_keeps_its_own_place(forms: Path):
    opened = reshard.open(forms / "nested")
    assert (opened["app.ema.0.weight"][...] == opened["0.weight"][...] + 1).all()
    assert len(opened.checkpoint.layout.tensors) == 20


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_writer("ranks", tmp_path_factory.mktemp("ranks"))


def test_shards_that_fsdp_cuts_after_tensor_parallelism_are_put_in_their_place(ranks: Path):
    """23 rows, cut for TP first, then for FSDP: joining by mesh axis gives another order."""
    opened = reshard.open(ranks)
    assert differences(opened, read_truth(ranks)) == []
    assert opened.checkpoint.topology.dp == 4


def test_ranks_that_saved_without_collectives_are_put_together(ranks: Path, tmp_path: Path):
    """`__N.metadata` of every rank, none for all; what ranks hold whole is compared."""
    opened = reshard.open(ranks / "alone")
    assert differences(opened, read_truth(ranks)) == []
    assert opened.checkpoint.topology.dp == 4
    assert opened.extras["epoch"] == 3
    assert [opened.extras[f"rank.rank{r}"] for r in range(4)] == [0, 1, 2, 3]
    assert reshard.verify(ranks / "alone")["status"] == "ok"
    made = tmp_path / "made"
    reshard.convert(ranks / "alone", made, "dcp:dp3")
    assert differences(reshard.open(made), read_truth(ranks)) == []
    copy = tmp_path / "copy"
    shutil.copytree(ranks / "alone", copy)
    (copy / "__2.metadata").unlink()
    with pytest.raises(reshard.ReshardError, match=r"metadata of ranks \[2\] is missing"):
        reshard.open(copy)
    shutil.copy(ranks / "alone/__2.metadata", copy)
    (copy / "__3.metadata").unlink()
    with pytest.raises(reshard.ReshardError, match=r"0\.weight"):
        reshard.verify(copy)
