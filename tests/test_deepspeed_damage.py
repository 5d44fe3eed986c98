"""Files that are missing, left over or of another save: an error that names them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import reshard
from reshard.errors import CorruptError, FormatError, LayoutError, UnsafeError

Unpacked = Callable[[str], Path]
MODEL = "mp_rank_00_model_states.pt"
OPTIM = "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"


@pytest.fixture
def copied(unpacked: Unpacked, tmp_path: Path) -> Callable[[str], Path]:
    """Gives a run folder of a fixture that may be changed."""

    def copy(name: str) -> Path:
        target = tmp_path / name
        shutil.copytree(unpacked(f"deepspeed/{name}") / "ckpt", target)
        for path in target.rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
        return target

    return copy


def refused(run: Path, error: type[Exception], *words: str) -> None:
    with pytest.raises(error) as caught:
        reshard.open(run)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("rank", [0, 2, 3])
def test_a_missing_optimizer_file_is_named(copied: Callable[[str], Path], rank: int):
    run = copied("z1_dp4_bf16")
    (run / "global_step5" / OPTIM.format(rank)).unlink()
    refused(run, CorruptError, OPTIM.format(rank), "is missing", "dp_world_size 4")


def test_no_optimizer_file_at_all_is_named(copied: Callable[[str], Path]):
    run = copied("z1_dp4_bf16")
    for rank in range(4):
        (run / "global_step5" / OPTIM.format(rank)).unlink()
    refused(run, CorruptError, "no optimizer file", "--weights-only")


def test_a_file_of_a_rank_too_many_is_named(copied: Callable[[str], Path]):
    run = copied("z1_dp4_bf16")
    tag = run / "global_step5"
    shutil.copy(tag / OPTIM.format(1), tag / OPTIM.format(4))
    refused(run, CorruptError, OPTIM.format(4), "left from another save")


def test_missing_model_states_are_named(copied: Callable[[str], Path]):
    run = copied("z1_dp4_bf16")
    (run / "global_step5" / MODEL).unlink()
    refused(run, CorruptError, "mp_rank_00_model_states.pt")


@pytest.mark.parametrize("rank", [0, 3])
def test_a_missing_model_file_of_zero_3_is_named(copied: Callable[[str], Path], rank: int):
    run = copied("z3_dp4_bf16")
    name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
    (run / "global_step5" / name).unlink()
    refused(run, CorruptError, name, "is missing")


def test_a_missing_stage_is_named(copied: Callable[[str], Path]):
    run = copied("pp2_dp1_z1_bf16")
    (run / "global_step5" / "mp_rank_01_model_states.pt").unlink()
    refused(run, CorruptError, "mp_rank_01_model_states.pt", "mp_world_size 2")


def test_a_missing_layer_is_named(copied: Callable[[str], Path]):
    run = copied("pp2_dp1_z1_bf16")
    (run / "global_step5" / "layer_03-model_states.pt").unlink()
    refused(run, CorruptError, "layer_03-model_states.pt")


def test_a_missing_expert_is_named(copied: Callable[[str], Path]):
    run = copied("moe_ep2_dp2_z1_bf16")
    (run / "global_step5" / "layer_1_expert_2_mp_rank_00_model_states.pt").unlink()
    refused(run, CorruptError, "expert")


def test_a_file_of_another_world_size_is_named(copied: Callable[[str], Path], unpacked: Unpacked):
    run = copied("z2_dp2_bf16")
    other = unpacked("deepspeed/z1_dp4_bf16") / "ckpt" / "global_step5"
    shutil.copy(other / OPTIM.format(1), run / "global_step5" / OPTIM.format(1))
    refused(run, CorruptError, OPTIM.format(1), "different saves")


def test_a_file_of_another_step_is_named(
    copied: Callable[[str], Path], unpacked: Unpacked, tmp_path: Path
):
    """Every other record agrees: only the optimizer's counter tells."""
    run = copied("z2_dp2_bf16")
    tag = run / "global_step5"
    name = OPTIM.format(1)
    data = bytearray((tag / name).read_bytes())
    five = b"\x00\x00\xa0\x40"  # 5.0
    at = data.index(five)
    data[at : at + 4] = b"\x00\x00\xc0\x40"  # 6.0
    (tag / name).write_bytes(data)
    refused(run, CorruptError, name, "different saves", "6.0")


def test_two_saves_in_one_folder_are_told(copied: Callable[[str], Path], unpacked: Unpacked):
    run = copied("z2_dp2_bf16")
    other = unpacked("deepspeed/z3_dp2_bf16") / "ckpt" / "global_step5"
    for file in other.glob("zero_pp_rank_*_model_states.pt"):
        shutil.copy(file, run / "global_step5")
    refused(run, CorruptError, "two saves in one folder")


def test_optimizer_files_of_two_precisions_are_told(copied: Callable[[str], Path]):
    run = copied("z2_dp2_bf16")
    tag = run / "global_step5"
    shutil.copy(tag / OPTIM.format(0), tag / OPTIM.format(0).removeprefix("bf16_"))
    refused(run, CorruptError, "left from another save")


def test_ranks_beyond_nine_are_in_order_of_number(unpacked: Unpacked, tmp_path: Path):
    """Lexical order would put rank 10 before rank 2."""
    source = unpacked("deepspeed/z1_dp4_bf16") / "ckpt"
    for stage in (1, 3):
        reshard.convert(source, tmp_path / str(stage), f"deepspeed:zero{stage}dp12")
        kinds = {d["kind"] for d in reshard.diff(source, tmp_path / str(stage))["differences"]}
        assert kinds <= {"only-left"}
        tag = tmp_path / str(stage) / "global_step5"
        assert (tag / OPTIM.format(11)).exists()


def test_latest_that_names_nothing_is_told(copied: Callable[[str], Path]):
    run = copied("z2_dp2_bf16")
    (run / "latest").write_text("global_step9")
    refused(run, CorruptError, "global_step9", "no such folder", "global_step5")


@pytest.mark.parametrize("tag", ["../z2_dp2_bf16/global_step5", "/tmp", "..", "a/../.."])
def test_latest_that_points_outside_is_told(copied: Callable[[str], Path], tag: str):
    run = copied("z2_dp2_bf16")
    (run / "latest").write_text(tag)
    refused(run, UnsafeError, "latest")


def test_a_tag_that_is_a_link_outside_is_told(copied: Callable[[str], Path], tmp_path: Path):
    run = copied("z2_dp2_bf16")
    shutil.move(run / "global_step5", tmp_path / "elsewhere")
    (run / "global_step5").symlink_to(tmp_path / "elsewhere")
    refused(run, UnsafeError, "link")


def test_an_iteration_is_found_without_a_tracker(copied: Callable[[str], Path]):
    run = copied("z2_dp2_bf16")
    (run / "latest").unlink()
    assert reshard.open(run, iteration=5).checkpoint.iteration == 5
    with pytest.raises(FormatError):
        reshard.open(run, iteration=6)


def test_nvme_offload_is_refused_by_name(copied: Callable[[str], Path]):
    run = copied("z3_dp2_bf16")
    (run / "global_step5" / "offloaded_tensors").mkdir()
    refused(run, FormatError, "NVMe")


def test_what_from_says_is_checked(unpacked: Unpacked):
    run = unpacked("deepspeed/z1_dp4_bf16") / "ckpt"
    assert reshard.open(run, "deepspeed:zero1dp4").checkpoint.iteration == 5
    with pytest.raises(FormatError, match="dp=8"):
        reshard.open(run, "deepspeed:dp8")


def test_a_file_cut_short_is_named(copied: Callable[[str], Path]):
    run = copied("z2_dp2_bf16")
    path = run / "global_step5" / OPTIM.format(1)
    path.write_bytes(path.read_bytes()[:-4000])
    refused(run, CorruptError, OPTIM.format(1))


@pytest.mark.parametrize("to", ["torch", "universal", "deepspeed:zero3dp2", "deepspeed:zero1dp3"])
def test_a_rank_under_the_name_of_another_is_told(
    copied: Callable[[str], Path], tmp_path: Path, to: str
):
    """Also where the target stores no 16-bit weight: the master is compared with the source's."""
    run = copied("z2_dp2_bf16")
    tag = run / "global_step5"
    shutil.copy(tag / OPTIM.format(0), tag / OPTIM.format(1))
    with pytest.raises(CorruptError, match=r"rank_1_.* was saved as bf16_zero_pp_rank_0_"):
        reshard.convert(run, tmp_path / "out", to)
    stems = [OPTIM.format(i).replace(".pt", "/").encode() for i in range(2)]
    file = tag / OPTIM.format(1)  # where the file itself says that it is rank 1's
    file.write_bytes(file.read_bytes().replace(*stems))
    with pytest.raises(CorruptError, match="not those of the stored weight"):
        reshard.convert(run, tmp_path / "out", to)
    assert not (tmp_path / "out").exists()
    reshard.convert(run, tmp_path / "out", to="torch", weights_only=True)


@pytest.mark.parametrize("to", ["deepspeed:zero1dp3", "universal", "torch"])
def test_what_is_not_read_of_a_file_is_a_loss(
    copied: Callable[[str], Path], tmp_path: Path, to: str
):
    """An optimizer of the client's own, and an entry that names a class: never dropped unsaid."""
    torch = pytest.importorskip("torch")
    run = copied("z2_dp2_bf16")
    for path in (run / "global_step5").glob("*.pt"):
        held = torch.load(path, weights_only=False)
        if path.name == MODEL:
            held["mine"] = {"scale": np.float32(2)}
        else:
            held["top"] = held["optimizer_state_dict"]["inner"] = 7
            held["optimizer_state_dict"]["base_optimizer_state"]["wrapped"] = {"k": 5}
        torch.save(held, path)
    report = reshard.convert(run, tmp_path / "out", to)
    lost = {x["what"] for x in report["losses"] if x["code"] == "extra-dropped"}
    assert lost >= {
        "client.mine", "optimizer.top", "optimizer.inner",
        "optimizer.base_optimizer_state.wrapped",
    }  # fmt: skip


def test_like_a_pipeline_of_other_names(unpacked: Unpacked):
    """Of weights alone, which have no param groups to compare."""
    like = unpacked("deepspeed/pp2_dp1_z1_bf16") / "ckpt"
    with pytest.raises(LayoutError, match=r"--like holds 0\.word_embeddings\.weight"):
        reshard.plan(unpacked("dcp/torchtitan_w2") / "checkpoint/step-2004", like=like)


def test_like_a_run_that_ties_what_the_source_holds_apart(unpacked: Unpacked):
    like = unpacked("deepspeed/z2_dp2_bf16_tied") / "ckpt"
    with pytest.raises(LayoutError, match=r"--like ties lm_head\.weight"):
        reshard.plan(unpacked("deepspeed/z2_dp2_bf16") / "ckpt", like=like)
