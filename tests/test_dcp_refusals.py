"""Checkpoints that are damaged or cannot be told are refused, with tensor, box and file named.

torch itself loads the first of these without a word: it leaves old values where chunks are missing.
"""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import reshard
from reshard.containers import dcp
from reshard.containers.dcp import Chunk, Metadata, MetadataDraft, TensorEntry
from reshard.errors import CorruptError, CoverageError, FormatError, ReplicaError, ReshardError

Unpacked = Callable[[str], Path]
KEY = "model.model.embed_tokens.weight"


@pytest.fixture
def copy(unpacked: Unpacked, tmp_path: Path) -> Path:
    folder = tmp_path / "copy"
    shutil.copytree(unpacked("dcp/fsdp2_w2_fp32") / "checkpoint", folder)
    for file in folder.iterdir():
        file.chmod(0o644)
    return folder


def rewrite(folder: Path, change: Callable[[list[Chunk]], list[Chunk]]) -> None:
    """Write `.metadata` again with other chunks of one tensor."""
    held = dcp.read_metadata(folder)
    entry = held.tensors[KEY]
    spoilt = TensorEntry(entry.shape, entry.dtype, change(list(entry.chunks)))
    write_metadata(folder, held, {**held.tensors, KEY: spoilt})


def write_metadata(folder: Path, held: Metadata, tensors: dict[str, TensorEntry]) -> None:
    paths = held.planner_data
    assert isinstance(paths, dict)
    raw = MetadataDraft(tensors, held.objects, paths).pickled()
    (folder / dcp.METADATA).write_bytes(raw)


def test_the_rewriting_itself_changes_nothing(copy: Path, unpacked: Unpacked):
    rewrite(copy, lambda chunks: chunks)
    report = reshard.diff(copy, unpacked("dcp/fsdp2_w2_fp32") / "checkpoint", extras=True)
    assert report["status"] == "equal"


def test_a_missing_chunk_is_named_with_its_box(copy: Path, tmp_path: Path):
    rewrite(copy, lambda chunks: chunks[:1])
    for act in (reshard.verify, reshard.fingerprint, lambda p: reshard.plan(p, "dcp:dp3")):
        with pytest.raises(CoverageError) as caught:
            act(copy)
        message = str(caught.value)
        assert "model.embed_tokens.weight" in message
        assert "[128:256, 0:32]" in message
        assert "__0_0.distcp" in message
    with pytest.raises(CoverageError):
        reshard.convert(copy, tmp_path / "out", "dcp:dp3")
    assert not (tmp_path / "out").exists()


def test_overlapping_chunks_are_named_with_their_files(copy: Path):
    rewrite(copy, lambda chunks: [chunks[0], replace(chunks[1], offsets=(100, 0))])
    with pytest.raises(CorruptError, match=rf"{KEY}: chunk \[100:228, 0:32\] in __1_0.distcp"):
        reshard.open(copy)


def test_a_chunk_out_of_bounds_is_refused(copy: Path):
    rewrite(copy, lambda chunks: [chunks[0], replace(chunks[1], offsets=(200, 0))])
    with pytest.raises(CorruptError, match=rf"{KEY}: chunk at \[200, 0\] of \[128, 32\] lies outs"):
        reshard.open(copy)


def test_a_chunk_shorter_than_its_length_is_refused(copy: Path):
    def short(chunks: list[Chunk]) -> list[Chunk]:
        place = chunks[1].place
        return [chunks[0], replace(chunks[1], place=place._replace(length=place.length - 700))]

    rewrite(copy, short)
    with pytest.raises(CorruptError, match=KEY):
        reshard.verify(copy)


def test_a_file_that_is_cut_short_is_named(copy: Path):
    path = copy / "__1_0.distcp"
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(CorruptError, match=r"__1_0\.distcp: has \d+ bytes"):
        reshard.open(copy)


def test_a_missing_file_is_named(copy: Path):
    (copy / "__1_0.distcp").unlink()
    with pytest.raises(CorruptError, match=r"__1_0\.distcp that .metadata names is missing"):
        reshard.open(copy)


def test_a_file_of_another_save_is_not_taken(copy: Path, unpacked: Unpacked):
    shutil.copy(unpacked("dcp/tp_only_w2") / "checkpoint" / "__1_0.distcp", copy / "__1_0.distcp")
    with pytest.raises(ReshardError):
        reshard.verify(copy)


def test_a_save_without_metadata_is_incomplete(copy: Path):
    (copy / dcp.METADATA).unlink()
    with pytest.raises(CorruptError, match=r"an incomplete save: .distcp files but no .metadata"):
        reshard.open(copy)


def test_code_in_the_metadata_is_not_run(copy: Path, tmp_path: Path):
    proof = tmp_path / "proof"

    class Code:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (proof,))

    (copy / dcp.METADATA).write_bytes(pickle.dumps(Code()))
    with pytest.raises(ReshardError):
        reshard.open(copy)
    assert not proof.exists()


def test_ranks_that_are_missing_or_of_another_world_are_named(unpacked: Unpacked, tmp_path: Path):
    copy = tmp_path / "ranks"
    shutil.copytree(unpacked("dcp/verl_fsdp2_w4") / "checkpoint", copy)
    shutil.copy(copy / "model_world_size_4_rank_0.pt", copy / "model_world_size_8_rank_0.pt")
    with pytest.raises(CorruptError, match=r"world sizes \[4, 8\] lie together"):
        reshard.open(copy)
    (copy / "model_world_size_8_rank_0.pt").unlink()
    (copy / "optim_world_size_4_rank_2.pt").unlink()
    with pytest.raises(CorruptError, match=r"optim files, those of ranks \[2\] are missing"):
        reshard.open(copy)


def test_ranks_of_two_runs_do_not_mix(unpacked: Unpacked, tmp_path: Path):
    """Rank 1 holds rank 2's shard: two ranks hold one box, nobody holds another."""
    copy = tmp_path / "ranks"
    shutil.copytree(unpacked("dcp/verl_fsdp2_w4") / "checkpoint", copy)
    lone = copy / "model_world_size_4_rank_1.pt"
    lone.unlink()
    shutil.copy(copy / "model_world_size_4_rank_2.pt", lone)
    with pytest.raises(CorruptError, match=r"rank_1.pt: was saved as .*rank_2.pt"):
        reshard.verify(copy)
    lone.chmod(0o644)  # and where the file itself says that it is rank 1's
    lone.write_bytes(lone.read_bytes().replace(b"size_4_rank_2/", b"size_4_rank_1/"))
    with pytest.raises((CoverageError, ReplicaError, FormatError)):
        reshard.verify(copy)


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ("no model", CorruptError, r"optimizer_0 is there, and pytorch_model_fsdp_0 is missing"),
        ("two models", FormatError, r"several models or optimizers \(pytorch_model_fsdp_1"),
    ],
)
def test_half_of_accelerates_stores_and_a_second_model_are_refused(
    unpacked: Unpacked, tmp_path: Path, change: str, error: type[Exception], said: str
):
    source = unpacked("dcp/accelerate_fsdp2_w2_sharded") / "checkpoint"
    shutil.copytree(source, tmp_path / "copy")
    model = tmp_path / "copy/pytorch_model_fsdp_0"
    if change == "no model":
        shutil.rmtree(model)
    else:
        shutil.copytree(model, model.with_name("pytorch_model_fsdp_1"))
    with pytest.raises(error, match=said):
        reshard.open(tmp_path / "copy")
