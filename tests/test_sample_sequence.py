"""The data that follows a resume: in order, the same on any number of ranks.

Megatron, Trainer and DeepSpeed count what the whole job has consumed; accelerate counts a
scheduler's steps once for each rank; torchtitan and StatefulDataLoaders keep opaque states.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate.scheduler
import pytest
import torch
from accelerate.data_loader import BatchSamplerShard, SkipBatchSampler
from accelerate.scheduler import AcceleratedScheduler

import reshard
from peers.parity import BATCH, rate
from reshard.containers import torchfile
from reshard.errors import LossError, UsageError
from reshard.format import open_checkpoint

Unpack = Callable[[str], Path]

RANKS = range(1, 9)
#: Divides over every number of ranks.
GLOBAL_BATCH = 840
NEXT = 3


def global_batches(first: int, count: int = NEXT) -> list[list[int]]:
    """The samples of the uninterrupted run's batches from batch number `first` on."""
    return [
        list(range(n * GLOBAL_BATCH, (n + 1) * GLOBAL_BATCH)) for n in range(first, first + count)
    ]


# --- Megatron: consumed samples -------------------------------------------------------------------


def megatron_sampler(consumed: int, micro: int, rank: int, ranks: int) -> Iterator[list[int]]:
    """Micro batches of a rank; MegatronPretrainingSampler, which `--dataloader-type single` takes.

    Source: megatron/training/datasets/data_samplers.py @ core_v0.16.1, whose package pip does not
    have: batches of micro x ranks in order, of which a rank has its slice.
    """
    batch: list[int] = []
    for sample in itertools.count(consumed):
        batch.append(sample)
        if len(batch) == micro * ranks:
            yield batch[rank * micro : (rank + 1) * micro]
            batch = []


@pytest.mark.parametrize("dp", RANKS)
def test_megatrons_next_global_batches_are_the_same(unpacked: Unpack, tmp_path: Path, dp: int):
    source = unpacked("megatron/h-llama-tp2pp2") / "dist"
    reshard.convert(source, tmp_path / "out", f"tp1pp1dp{dp}")
    opened = open_checkpoint(tmp_path / "out")
    consumed = opened.extras["args.consumed_train_samples"]
    assert opened.extras["args.data_parallel_size"] == dp
    assert consumed == 24 == opened.extras["opt_param_scheduler.num_steps"]
    micro = 1
    accumulation, rest = divmod(GLOBAL_BATCH, micro * dp)  # num_microbatches_calculator.py
    assert rest == 0
    feeds = [megatron_sampler(consumed, micro, rank, dp) for rank in range(dp)]
    for n in range(NEXT):
        step = [next(feed) for _ in range(accumulation) for feed in feeds]
        first = consumed + n * GLOBAL_BATCH
        assert list(itertools.chain(*step)) == list(range(first, first + GLOBAL_BATCH))


@pytest.mark.parametrize("dp", [1, 2, 4, 8])
def test_the_plan_says_how_the_global_batch_is_kept(unpacked: Unpack, dp: int):
    source = unpacked("megatron/h-llama-tp2pp2") / "dist"
    recipe: Any = reshard.plan(source, f"tp1pp1dp{dp}")["recipe"]
    assert recipe["global_batch"] == f"8 = micro 1 x dp {dp} x {8 // dp} accumulation"


# --- Trainer: trainer_state.json ------------------------------------------------------------------


def trainer_batches(step: int, share: int, ranks: int) -> list[list[int]]:
    """The next global batches of a Trainer that has taken `step`, by accelerate's own samplers."""
    order = range(GLOBAL_BATCH * (step + NEXT))
    sampler = torch.utils.data.BatchSampler(order, share, drop_last=False)
    feeds = [
        iter(SkipBatchSampler(BatchSamplerShard(sampler, ranks, rank), step))
        for rank in range(ranks)
    ]
    return [list(itertools.chain(*(next(feed) for feed in feeds))) for _ in range(NEXT)]


@pytest.mark.parametrize("dp", RANKS)
def test_trainers_next_global_batches_are_the_same(unpacked: Unpack, tmp_path: Path, dp: int):
    """The step counts global batches; the share of each rank is another."""
    source = unpacked("wrappers/trainer_fsdp2_dp2_bf16") / "ckpt" / "checkpoint-6"
    reshard.convert(source, tmp_path / "out", f"dcp:dp{dp}")
    before, after = (
        json.loads((folder / "trainer_state.json").read_text())
        for folder in (source, tmp_path / "out")
    )
    share = 8 // dp  # of 4 on each of 2 ranks; rounded down where the job has to choose
    assert after == {**before, "train_batch_size": share}
    assert trainer_batches(after["global_step"], GLOBAL_BATCH // dp, dp) == global_batches(6)
    schedule = open_checkpoint(tmp_path / "out").extras["scheduler.pt.last_epoch"]
    assert schedule == 6  # Trainer steps its scheduler itself, once a step


# --- accelerate: a prepared scheduler -------------------------------------------------------------


def prepared(source: Path, tmp_path: Path, ranks: int, steps: int = 4) -> Path:
    """An accelerate checkpoint of 2 ranks with the scheduler that accelerate itself has stepped."""
    out = tmp_path / "accelerate"
    reshard.convert(source, out, "dcp:dp2")
    made = scheduler()
    real = AcceleratedScheduler(made, [])
    for _ in range(steps):
        stepped(real, ranks)
    torch.save(real.state_dict(), out / "scheduler.bin")
    (out / "custom_checkpoint_0.pkl").unlink()  # the same schedule, which the fixture's job stepped
    return out


def scheduler() -> Any:
    """As a user makes it before accelerate prepares it."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0 / (1 + n))


def stepped(real: AcceleratedScheduler, ranks: int) -> None:
    """One training step's call, in a job of so many processes."""
    real.scheduler.optimizer.step()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            accelerate.scheduler, "AcceleratorState", lambda: SimpleNamespace(num_processes=ranks)
        )
        real.step()


@pytest.mark.parametrize("dp", RANKS)
def test_a_prepared_scheduler_counts_for_the_targets_ranks(
    unpacked: Unpack, tmp_path: Path, dp: int
):
    """Its count over the ranks is the step: the next rate is what a job of dp ranks computes."""
    source = prepared(unpacked("dcp/accelerate_fsdp2_w2_sharded") / "checkpoint", tmp_path, 2)
    reshard.convert(source, tmp_path / "out", f"dcp:dp{dp}")
    state = torchfile.load(tmp_path / "out" / "scheduler.bin", "scheduler.bin").root
    assert (state["last_epoch"], state["_step_count"]) == (4 * dp, 4 * dp + 1)
    other = AcceleratedScheduler(scheduler(), [])
    for _ in range(4):
        stepped(other, dp)
    assert other.state_dict()["last_epoch"] == state["last_epoch"]
    plan: Any = reshard.plan(source, f"dcp:dp{dp}")
    kinds = {f["path"]: f["kind"] for f in plan["fates"]}
    assert kinds["scheduler.bin"] == ("keep" if dp == 2 else "remap")


def test_a_prepared_scheduler_counts_steps_elsewhere_and_back(unpacked: Unpack, tmp_path: Path):
    source = prepared(unpacked("dcp/accelerate_fsdp2_w2_sharded") / "checkpoint", tmp_path, 2)
    reshard.convert(source, tmp_path / "plain", "dcp.plain:dp3")
    assert open_checkpoint(tmp_path / "plain").extras["lr_scheduler.last_epoch"] == 4
    reshard.convert(tmp_path / "plain", tmp_path / "back", "dcp.accelerate:dp5")
    assert open_checkpoint(tmp_path / "back").extras["scheduler.bin.last_epoch"] == 20


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_megatrons_schedule_goes_on_in_a_prepared_scheduler(
    unpacked: Unpack, tmp_path: Path, dp: int
):
    """Samples to steps to steps x ranks: accelerate's own scheduler gives Megatron's next rates."""
    reshard.convert(
        unpacked("megatron/h-llama-tp2pp2") / "dist", tmp_path / "out", f"dcp.accelerate:dp{dp}"
    )
    state = torch.load(tmp_path / "out" / "scheduler.bin", weights_only=False)
    state["lr_lambdas"] = [None]  # the job's own; it has one group here
    state["base_lrs"] = [1.0]
    weight = torch.nn.Parameter(torch.zeros(1))
    made = torch.optim.lr_scheduler.LambdaLR(
        torch.optim.SGD([weight], lr=1.0), lambda n: rate(BATCH * n // dp)
    )
    real = AcceleratedScheduler(made, [])
    real.load_state_dict(state)
    assert real.get_last_lr()[0] == pytest.approx(rate(3 * BATCH), rel=1e-12)
    stepped(real, dp)
    assert real.get_last_lr() == [rate(4 * BATCH)]


# --- opaque states --------------------------------------------------------------------------------


def with_loader(unpacked: Unpack, tmp_path: Path) -> Path:
    """An accelerate checkpoint with the state of a StatefulDataLoader."""
    out = tmp_path / "loader"
    reshard.convert(unpacked("dcp/accelerate_fsdp2_w2_sharded") / "checkpoint", out, "dcp:dp2")
    torch.save({"_snapshot": {"_main_snapshot": {"_num_yielded": 4}}}, out / "dl_state_dict.bin")
    return out


def loaders(folder: Path) -> Sequence[str]:
    return [p for p in open_checkpoint(folder).extras if "dl_state" in p]


def test_opaque_loader_states_go_to_the_same_ranks_only(unpacked: Unpack, tmp_path: Path):
    source = with_loader(unpacked, tmp_path)
    reshard.convert(source, tmp_path / "same", "dcp:dp2")
    assert loaders(tmp_path / "same") == loaders(source) != []
    with pytest.raises(LossError, match=r"opaque states of 2 ranks' .* --data-cursor reset"):
        reshard.convert(source, tmp_path / "other", "dcp:dp4")
    reshard.convert(source, tmp_path / "reset", "dcp:dp4", data_cursor="reset")
    assert loaders(tmp_path / "reset") == []
    kept: Any = reshard.convert(source, tmp_path / "kept", "dcp:dp4", data_cursor="keep-rank0")
    assert loaders(tmp_path / "kept") == loaders(source)
    assert "data-cursor" in {x["code"] for x in kept["losses"]}
    with pytest.raises(UsageError, match="choose one of reset, keep-rank0"):
        reshard.plan(source, "dcp:dp4", data_cursor="guess")


def test_torchtitans_states_go_to_ranks_of_the_same_number(unpacked: Unpack, tmp_path: Path):
    source = unpacked("dcp/torchtitan_w2") / "checkpoint" / "step-4"
    reshard.convert(source, tmp_path / "out", "dcp:dp2")
    before, after = (open_checkpoint(p).extras for p in (source, tmp_path / "out"))
    kept = {k: v for k, v in before.items() if k.startswith("dataloader.")}
    assert kept
    assert kept == {k: v for k, v in after.items() if k.startswith("dataloader.")}
