"""The whole tensors of a live Megatron run, gathered without its checkpoint files, and compared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import apply_factories
from megatron.core.dist_checkpointing.optimizer import (
    get_param_id_to_sharded_param_map,
    make_sharded_optimizer_tensor,
)

from peers.megatron_model import Job, bare, members

Tensors = dict[str, torch.Tensor]

#: torch_dist key prefixes of optimizer tensors, in all of Megatron's model-space formats.
SLOT_OF_PREFIX = {
    "optimizer.state.fp32_param.": "master.",
    "optimizer.state.param.": "master.",
    "optimizer.state.exp_avg_sq.": "exp_avg_sq.",
    "optimizer.state.exp_avg.": "exp_avg.",
}
VOCABULARY = ("word_embeddings.weight", "output_layer.weight")


def slot_key(key: str) -> str:
    """A torch_dist key as slot and weight: optimizer.state.exp_avg.X -> exp_avg.X, X -> model.X."""
    for prefix, slot in SLOT_OF_PREFIX.items():
        if key.startswith(prefix):
            return slot + key.removeprefix(prefix)
    return "model." + key


@dataclass(frozen=True, slots=True)
class Shard:
    """A box of a whole tensor, and which of its elements this rank holds."""

    key: str
    shape: tuple[int, ...]  # of the whole tensor
    offset: tuple[int, ...]
    data: torch.Tensor
    held: torch.Tensor  # bool, shaped as data


@dataclass(frozen=True, slots=True)
class OwnedParam:
    """What this rank's optimizer holds of a parameter: elements [start, stop) of its flat shard."""

    param: torch.Tensor
    slots: Mapping[str, torch.Tensor]
    start: int
    stop: int


def model_state(job: Job, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """As megatron.training.generate_state_dict: `model`, or `model0` … with virtual stages."""
    names = ["model"] if len(job.chunks) == 1 else [f"model{i}" for i in range(len(job.chunks))]
    return {
        name: bare(chunk).sharded_state_dict(metadata=metadata)
        for name, chunk in zip(names, job.chunks, strict=True)
    }


def request_metadata(distributed: str, content: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What Megatron is told about the form of a checkpoint; `content` is what the file says."""
    metadata = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    metadata |= content or {}
    metadata.pop("distrib_optim_sharding_type", None)
    if distributed != "none":
        metadata["distrib_optim_sharding_type"] = distributed
    if distributed == "fully_reshardable":
        metadata.setdefault("distrib_optim_fully_reshardable_mem_efficient", False)
    metadata["dp_cp_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return metadata


def owned_params(optimizer: Any) -> Iterator[OwnedParam]:
    """Every parameter with the master and moments that one optimizer holds on this rank."""
    if hasattr(optimizer, "gbuf_ranges"):  # DistributedOptimizer
        for param in optimizer.model_param_group_index_map:
            part = optimizer._get_model_param_range_map(param)["param"]
            state = dict(optimizer._get_main_param_and_optimizer_states(param))
            state["master"] = state.pop("param")
            yield OwnedParam(param, tensors_of(state), part.start, part.end)
        return
    if not hasattr(optimizer, "float16_groups"):  # FP32Optimizer: weights are their own masters
        for param in optimizer.get_parameters():
            yield OwnedParam(param, tensors_of(optimizer.optimizer.state[param]), 0, param.numel())
        return
    pairs = [
        pair
        for group in zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True)
        for pair in zip(*group, strict=True)
    ]
    pairs += [(param, param) for group in optimizer.fp32_from_fp32_groups for param in group]
    for param, main in pairs:
        state = {"master": main} | dict(optimizer.optimizer.state[main])
        yield OwnedParam(param, tensors_of(state), 0, param.numel())


def tensors_of(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The per-element slots of an optimizer's state; step counters are compared apart."""
    return {
        slot: value.detach()
        for slot, value in state.items()
        if isinstance(value, torch.Tensor) and slot != "step"
    }


def optimizer_shards(job: Job, model: dict[str, Any]) -> Iterator[Shard]:
    """Masters and moments, cut along the model's own shards.

    Not by the optimizer's sharded_state_dict: that of `fully_reshardable` is wrong with more than
    one padded bucket, up to core_v0.19.0 (Megatron-LM PR 5077; fixture f-dp3-buckets).
    """
    for optimizer in members(job.optimizer):
        owned = list(owned_params(optimizer))
        sharded = get_param_id_to_sharded_param_map(model, [part.param for part in owned])
        for number, part in enumerate(owned):
            held = torch.zeros(part.param.shape, dtype=torch.bool)
            held.view(-1)[part.start : part.stop] = True
            for slot, values in part.slots.items():
                whole = torch.zeros(part.param.shape, dtype=values.dtype)
                whole.view(-1)[part.start : part.stop] = values.reshape(-1)
                both = {
                    name: make_sharded_optimizer_tensor(sharded[number], tensor, slot)
                    for name, tensor in (("whole", whole), ("held", held))
                }
                apply_factories(both)  # cuts a fused gate and up projection into its halves
                pieces = (list(nested_values({0: both[name]})) for name in ("whole", "held"))
                for values_piece, held_piece in zip(*pieces, strict=True):
                    yield shard(values_piece.key, values_piece, held_piece.data)


def shard(key: str, piece: ShardedTensor, held: torch.Tensor) -> Shard:
    """A ShardedTensor as a box with all axes of the whole tensor (a stacked layer lacks one)."""
    shape, offset = tuple(piece.global_shape), tuple(piece.global_offset)
    local = (1,) * (len(shape) - piece.data.dim()) + tuple(piece.data.shape)
    data = piece.data.detach().contiguous().reshape(local)
    return Shard(key, shape, offset, data, held.reshape(local))


def model_shards(model: dict[str, Any]) -> Iterator[Shard]:
    """Weights and persistent buffers."""
    apply_factories(model)
    for piece in nested_values(model):
        if isinstance(piece, ShardedTensor) and piece.data is not None:
            yield shard(f"model.{piece.key}", piece, torch.ones(piece.data.shape, dtype=torch.bool))


def gather(job: Job, *, weights_only: bool) -> Tensors:
    """{slot key: whole tensor} on rank 0, nothing on other ranks. Collective."""
    model = model_state(job, request_metadata("none"))
    mine = [] if weights_only else list(optimizer_shards(job, model))
    mine += model_shards(model)
    everyone = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(mine, everyone, dst=0)
    return assemble(piece for rank in everyone or [] for piece in rank or [])


def assemble(shards: Iterable[Shard]) -> Tensors:
    """Whole tensors of shards; raises ValueError where replicas differ or elements are missing."""
    whole: Tensors = {}
    filled: Tensors = {}
    for piece in shards:
        if piece.key not in whole:
            whole[piece.key] = torch.zeros(piece.shape, dtype=piece.data.dtype)
            filled[piece.key] = torch.zeros(piece.shape, dtype=torch.bool)
        box = tuple(
            slice(start, start + size)
            for start, size in zip(piece.offset, piece.data.shape, strict=True)
        )
        target, seen = whole[piece.key][box], filled[piece.key][box]
        again = seen & piece.held
        if not same_bits(target[again], piece.data[again]):
            raise ValueError(f"replicas of {piece.key} differ")
        target[piece.held] = piece.data[piece.held]
        seen |= piece.held
    holes = [key for key, mask in filled.items() if not mask.all()]
    if holes:
        raise ValueError(f"no rank holds all of {holes[:4]}")
    return whole


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Equal shape, dtype and bits: 0.0 is not -0.0, and a NaN is itself."""
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (x, y)))


def differences(live: Tensors, truth: Tensors, real_vocab: int) -> list[str]:
    """What is not the same, bit for bit, of the slots that the truth has.

    Where the numbers of vocabulary rows differ, the rows beyond the shorter are padding.
    """
    slots = {key.split(".")[0] for key in truth}
    live = {key: tensor for key, tensor in live.items() if key.split(".")[0] in slots}
    found = [f"{key}: only in the live run" for key in sorted(live.keys() - truth.keys())]
    found += [f"{key}: only in the truth" for key in sorted(truth.keys() - live.keys())]
    for key in sorted(live.keys() & truth.keys()):
        x, y = live[key], truth[key]
        rows = min(x.shape[0], y.shape[0]) if key.endswith(VOCABULARY) else 0
        if rows and x.shape[0] != y.shape[0]:
            if rows < real_vocab:
                found.append(f"{key}: {rows} rows for a vocabulary of {real_vocab}")
            x, y = x[:real_vocab], y[:real_vocab]
        if not same_bits(x, y):
            found.append(f"{key}: {what_differs(x, y)}")
    return found


def unrounded(live: Tensors) -> list[str]:
    """Weights that are not their master rounded to the weight's dtype, as training leaves them."""
    return [
        key.removeprefix("model.")
        for key, weight in live.items()
        if key.startswith("model.")
        and (master := live.get("master." + key.removeprefix("model."))) is not None
        and not same_bits(master.to(weight.dtype), weight)
    ]


def what_differs(x: torch.Tensor, y: torch.Tensor) -> str:
    if x.shape != y.shape or x.dtype != y.dtype:
        return f"{tuple(x.shape)} {x.dtype} for {tuple(y.shape)} {y.dtype}"
    unequal = int((x != y).sum())
    return f"{unequal} of {x.numel()} elements, by up to {largest_difference(x, y):.3g}"


def largest_difference(x: torch.Tensor, y: torch.Tensor) -> float:
    return (x.double() - y.double()).abs().max().item() if x.numel() else 0.0


def largest_differences(a: Tensors, b: Tensors) -> dict[str, float]:
    """{slot: largest difference of any element} of two runs of one state.

    Vocabulary rows that only one of them has are padding and left out.
    """
    if a.keys() != b.keys():
        raise ValueError(f"not the same tensors: {sorted(a.keys() ^ b.keys())[:4]}")
    worst: dict[str, float] = {}
    for key, x in a.items():
        y = b[key]
        if key.endswith(VOCABULARY):
            rows = min(len(x), len(y))
            x, y = x[:rows], y[:rows]
        slot = key.split(".")[0]
        worst[slot] = max(worst.get(slot, 0.0), largest_difference(x, y))
    return worst


def adam_steps(job: Job) -> list[int]:
    """Every step count that Adam will use: of groups (FusedAdam) or of parameters. Collective."""
    found = set()
    for one in members(job.optimizer):
        groups = one.optimizer.param_groups
        found |= {int(group["step"]) for group in groups if "step" in group and group["params"]}
        found |= {int(state["step"]) for state in one.optimizer.state.values() if "step" in state}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    return sorted(set().union(*everyone))


def group_options(job: Job) -> list[dict[str, Any]]:
    """The options of every group of parameters on any rank, without repeats. Collective."""
    mine = [
        {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in group.items()
            if isinstance(value, int | float | str | tuple | None) and name != "params"
        }
        for one in members(job.optimizer)
        for group in one.optimizer.param_groups
        if group["params"]
    ]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return distinct([group for rank in everyone for group in rank])


def distinct(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each group once, in the order of their text."""
    by_text = {repr(sorted(group.items())): group for group in groups}
    return [by_text[text] for text in sorted(by_text)]
