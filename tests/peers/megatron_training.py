"""Optimizer steps of real megatron-core on data that is the same at every topology."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from peers.megatron_model import Job, members, real_vocab


@dataclass(slots=True)
class Curve:
    """What training shows, one value a step. Losses and norms are known to rank 0 only."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    lrs: list[list[float]] = field(default_factory=list)  # the distinct ones of the groups


def samples(step: int, vocab: int, length: int, count: int) -> torch.Tensor:
    """[count, length + 1] tokens of a step; three batches in turn.

    The batches that the truth.json of set h of the fixtures was trained on.
    """
    generator = torch.Generator().manual_seed(9000 + step % 3)
    return torch.randint(0, vocab, (count, length + 1), generator=generator)


def train(
    job: Job, first: int, steps: int, after_step: Callable[[int], None], micro_batch: int = 1
) -> Curve:
    """`steps` optimizer steps from step number `first`; `after_step(n)` follows the n-th."""
    curve = Curve()
    for number in range(1, steps + 1):
        loss, norm = one_step(job, first + number - 1, micro_batch)
        if dist.get_rank() == 0:
            curve.losses.append(loss)
            curve.grad_norms.append(norm)
        curve.lrs.append(
            sorted({g["lr"] for o in members(job.optimizer) for g in o.param_groups if g["params"]})
        )
        after_step(number)
    return curve


def one_step(job: Job, step: int, micro_batch: int = 1) -> tuple[float, float]:
    """(mean loss over the global batch on rank 0 and nan elsewhere, gradient norm)."""
    batch, args = job.args.global_batch_size, job.args
    rank = parallel_state.get_data_parallel_rank()
    ranks = parallel_state.get_data_parallel_world_size()
    if batch % (ranks * micro_batch):
        raise ValueError(f"{ranks} ranks of {micro_batch} do not divide the global batch {batch}")
    for chunk in job.chunks:
        chunk.train()
        chunk.zero_grad_buffer()
    job.optimizer.zero_grad()
    tokens = samples(step, real_vocab(args), args.seq_length, batch)
    own = range(rank, batch, ranks)
    mine = [
        (n := list(own[i : i + micro_batch]), tokens[n]) for i in range(0, len(own), micro_batch)
    ]
    feeds = [iter(mine) for _ in job.chunks]
    single = len(job.chunks) == 1
    shown = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=feeds[0] if single else feeds,
        model=job.chunks[0] if single else job.chunks,
        num_microbatches=len(mine),
        seq_length=args.seq_length,
        micro_batch_size=micro_batch,
        forward_only=False,
    )
    updated, norm, _ = job.optimizer.step()
    if not updated:
        raise ArithmeticError(f"step {step}: inf or nan in the gradients, the update was skipped")
    job.schedule.step(increment=batch)
    return mean_loss(shown or [], batch), float(norm)


def forward_step(feed: Iterator[tuple[list[int], torch.Tensor]], model: Any) -> tuple[Any, Any]:
    """One micro-batch through one model chunk, as Megatron's schedules want it."""
    numbers, tokens = next(feed)
    count, length = len(numbers), tokens.shape[1] - 1
    output = model(
        tokens[:, :-1],
        torch.arange(length).expand(count, length),
        torch.triu(torch.ones(1, 1, length, length), 1).bool(),
        labels=tokens[:, 1:],
        loss_mask=torch.ones(count, length),
    )

    def loss_of(token_losses: torch.Tensor) -> tuple[torch.Tensor, dict[int, float]]:
        losses = token_losses.float().mean(dim=1)
        return losses.mean(), dict(zip(numbers, losses.tolist(), strict=True))

    return output, loss_of


def mean_loss(shown: list[dict[int, float]], batch: int) -> float:
    """Summed in the order of the samples, so that no topology changes the rounding. Collective."""
    everyone: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object([pair for part in shown for pair in part.items()], everyone, dst=0)
    if everyone is None:
        return float("nan")
    losses = dict(pair for part in everyone for pair in part)
    if len(losses) != batch:
        raise ValueError(f"{len(losses)} losses for a batch of {batch}")
    return sum(losses[number] for number in range(batch)) / batch
