"""Real DeepSpeed loads checkpoints, shows its state and trains on: one process for many cases.

`python -m peers.deepspeed_judge CASES RESULTS`: cases as JSON, one result a line.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from peers.fork_ranks import fork_job

os.environ.update(
    DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false",
    TRANSFORMERS_VERBOSITY="error",
)  # fmt: skip


def preimport() -> None:
    """Everything the ranks need, once."""
    import deepspeed
    import deepspeed.moe.layer
    import deepspeed.pipe
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401  # imported for the forks

    assert deepspeed.__version__
    torch.set_num_threads(1)


def state_of(engine: Any, recipe: dict[str, Any]) -> dict[str, Any]:
    """name/slot -> tensor of every parameter this rank sees, whole over data-parallel ranks."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    optimizer = engine.optimizer
    if recipe.get("stage") == 0 and recipe.get("kind", "llama") == "llama":
        return plain_state(engine)
    if hasattr(optimizer, "_hp_optimizer_states_linked"):
        optimizer._hp_optimizer_states_linked = False  # 0.19.8 links groups >= 1 too early
        optimizer._lazy_init_hp_params_optimizer_state()
    out: dict[str, Any] = {}
    flat = recipe.get("zero", {}).get("round_robin_gradients")
    if flat:
        out |= flat_state(engine)
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            out[f"{name}/frozen"] = whole(parameter)
        if flat or not parameter.requires_grad:
            continue
        out[f"{name}/fp32"] = safe_get_full_fp32_param(parameter)
        for key in recipe.get("state_keys", ["exp_avg", "exp_avg_sq"]):
            out[f"{name}/{key}"] = safe_get_full_optimizer_state(parameter, key)
    return {k: v.detach().clone() for k, v in out.items() if v is not None}


def plain_state(engine: Any) -> dict[str, Any]:
    """The same without ZeRO: torch's own optimizer, or one of the 16-bit wrappers."""
    import torch

    wrapper, out = engine.optimizer, {}
    inner = getattr(wrapper, "optimizer", wrapper)
    names = {id(p): n for n, p in engine.module.named_parameters()}
    if hasattr(wrapper, "fp32_groups_flat"):  # FP16_Optimizer
        for master, group in zip(wrapper.fp32_groups_flat, wrapper.fp16_groups, strict=True):
            slots = {"fp32": master, **inner.state[master]}
            flats = {s: v for s, v in slots.items() if torch.is_tensor(v) and v.ndim == 1}
            for slot, flat in flats.items():
                parts = flat.detach().split([p.numel() for p in group])
                for p, part in zip(group, parts, strict=True):
                    out[f"{names[id(p)]}/{slot}"] = part.view(p.shape).clone()
        return out
    if hasattr(wrapper, "fp32_groups"):  # FP16_UnfusedOptimizer
        pairs = [
            pair
            for rows in zip(wrapper.fp16_groups, wrapper.fp32_groups, strict=True)
            for pair in zip(*rows, strict=True)
        ]
    else:
        pairs = [(p, p) for group in inner.param_groups for p in group["params"]]
    for p, master in pairs:
        for slot, value in {"fp32": master, **inner.state[master]}.items():
            if torch.is_tensor(value) and value.shape == p.shape:
                out[f"{names[id(p)]}/{slot}"] = value.detach().clone()
    return out


def whole(parameter: Any) -> Any:
    """A parameter's values, gathered under ZeRO 3."""
    if not hasattr(parameter, "ds_id"):
        return parameter.detach().clone()
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().clone()


def flat_state(engine: Any) -> dict[str, Any]:
    """The same from the flat partitions: 0.19.8's fragments are wrong under round robin."""
    import torch
    import torch.distributed as dist

    optimizer, out = engine.optimizer, {}
    for i, parameters in enumerate(optimizer.round_robin_bit16_groups):
        mine = optimizer.single_partition_of_fp32_groups[i]
        held = optimizer.optimizer.state[mine]
        for slot, part in (
            ("fp32", mine.detach()), ("exp_avg", held["exp_avg"]),
            ("exp_avg_sq", held["exp_avg_sq"]),
        ):  # fmt: skip
            parts = [torch.zeros_like(part) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, part.contiguous())
            flat = torch.cat(parts)
            offsets = optimizer.round_robin_bit16_offsets[i]
            for parameter, at in zip(parameters, offsets, strict=True):
                name = optimizer.param_names[parameter]
                out[f"{name}/{slot}"] = flat[at : at + parameter.numel()].view(parameter.shape)
    return out


def truth_for(
    truth: dict[str, Any], name: str, shape: tuple[int, ...], rank: int, along: int
) -> Any:
    """What a tensor should be: the truth's own, or put together from what its ranks saw.

    Truths of tensor-parallel, pipeline and MoE runs are kept by rank. `along` ranks are neighbours
    on the tensor axis of a pipeline.
    """
    import torch

    if name in truth:
        return truth[name]
    own = truth.get(f"rank{rank}/{name}")
    if own is not None and tuple(own.shape) == shape and ".deepspeed_experts." not in name:
        return own
    ranks = sorted({int(k[4:].split("/")[0]) for k in truth if k.startswith("rank")})
    held = [truth[f"rank{r}/{name}"] for r in ranks if f"rank{r}/{name}" in truth]
    for r, part in zip([r for r in ranks if f"rank{r}/{name}" in truth], held, strict=True):
        if tuple(part.shape) == shape and r % along == rank % along:
            return part
    if "dense_h_to_4h.weight" in name and held:  # gate above up, on each rank
        halves = [torch.cat([p.chunk(2)[i] for p in held]) for i in range(2)]
        return torch.cat(halves)
    for axis in range(len(shape)):
        for n in range(2, len(held) + 1):
            others = {(*p.shape[:axis], *p.shape[axis + 1 :]) for p in held[:n]}
            if others == {(*shape[:axis], *shape[axis + 1 :])}:
                whole_ = torch.cat(held[:n], axis)
                if tuple(whole_.shape) == shape:
                    return whole_
    return None


def expert_truth(truth: dict[str, Any], name: str, case: dict[str, Any], rank: int) -> Any:
    """The truth of an expert: saved by rank under local numbers, asked for under others."""
    head, _, tail = name.partition(".deepspeed_experts.")
    local, _, rest = tail.partition(".")
    before, after = case["truth_ep"], case["recipe"]["ep_size"]
    experts = case["recipe"]["experts"]
    number = (rank % after) * (experts // after) + int(local)
    each = experts // before
    return truth.get(f"rank{number // each}/{head}.deepspeed_experts.{number % each}.{rest}")


def spoil(engine: Any, what: str) -> None:
    """Change one thing of the loaded state, to see that the losses notice."""
    import torch

    optimizer = engine.optimizer.optimizer
    if what == "decay":
        for group in optimizer.param_groups:
            group["weight_decay"] = optimizer.param_groups[0]["weight_decay"]
        return
    if what == "lr":
        engine.lr_scheduler.last_batch_iteration += 3
        return
    for state in optimizer.state.values():
        if what == "step" and torch.is_tensor(state.get("step")):
            state["step"] += 1
        if what == "moment" and "exp_avg" in state:
            state["exp_avg"].zero_()


def run_rank(case: dict[str, Any], rank: int, out: Path) -> None:
    """One rank of a case; rank 0 writes the result."""
    import torch.distributed as dist
    from safetensors.torch import load_file

    from peers.deepspeed_training import engine_of, train_step

    recipe = case["recipe"]
    recipe["universal"] = case["universal"]
    engine = engine_of(recipe)
    floor: list[float] = []
    if case["floor"]:
        floor = [train_step(engine, recipe, step) for step in range(9)][5:]
    path, client = engine.load_checkpoint(case["checkpoint"], tag=case["tag"])
    assert path is not None, "load_checkpoint found nothing"
    found = state_of(engine, recipe)
    truth = load_file(Path(case["truth"]) / "truth.safetensors") if case["truth"] else {}
    different, compared = [], 0
    for name, value in found.items() if truth else ():
        if ".deepspeed_experts." in name:
            wanted = expert_truth(truth, name, case, rank)
        else:
            shape = tuple(value.shape)
            wanted = truth_for(truth, name, shape, rank, case["recipe"].get("mp", 1))
        compared += 1
        if wanted is None or not same_bits(wanted, value):
            different.append(f"rank {rank}: {name}" + (" has no truth" if wanted is None else ""))
    missing = [n for n in truth if "/" in n and not n.startswith("rank") and n not in found]
    different += [f"not in the engine: {n}" for n in missing]
    steps = sorted(
        {float(s["step"]) for s in engine.optimizer.optimizer.state.values() if "step" in s}
    ) if hasattr(engine.optimizer, "optimizer") else []  # fmt: skip
    options = [
        {k: g.get(k) for k in ("weight_decay", "betas", "eps")}
        for g in engine.optimizer.param_groups
    ]
    if case["spoil"]:
        spoil(engine, case["spoil"])
    start = engine.global_steps
    losses = [train_step(engine, recipe, start + i) for i in range(case["steps"])]
    every: list[Any] = [None] * case["world"]
    dist.all_gather_object(every, (different, compared))
    if rank == 0:
        result = {
            "name": case["name"], "error": None,
            "different": [d for row, _ in every for d in row][:20],
            "compared": sum(n for _, n in every), "adam_steps": steps, "options": options,
            "global_steps": start, "losses": losses, "fresh": floor,
            "client": sorted(map(str, client or ())),
        }  # fmt: skip
        out.write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def same_bits(a: Any, b: Any) -> bool:
    """Whether two tensors are equal in dtype, shape and every bit."""
    import torch

    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    raw = {4: torch.int32, 2: torch.int16, 8: torch.int64, 1: torch.uint8}[a.element_size()]
    return bool(torch.equal(a.contiguous().view(raw), b.contiguous().view(raw)))


def judged(case: dict[str, Any], logs: Path) -> dict[str, Any]:
    """The result of one case; its failure is part of it."""
    out = logs / "result.json"
    logs.mkdir(parents=True, exist_ok=True)
    error = fork_job(lambda rank: run_rank(case, rank, out), case["world"], logs, case["seconds"])
    if error is not None or not out.exists():
        return {"name": case["name"], "error": error or "no result"}
    result: dict[str, Any] = json.loads(out.read_text())
    truth = Path(case["truth"]) / "truth.json" if case["truth"] else None
    if truth is not None and truth.exists():
        wanted = json.loads(truth.read_text())["post_losses"][: case["steps"]]
        pairs = zip(result["losses"], wanted, strict=True)
        result["distance"] = max(abs(a - b) for a, b in pairs)
        if result["fresh"]:
            fresh = zip(result["fresh"], wanted, strict=False)
            result["floor"] = max(abs(a - b) for a, b in fresh)
    return result


def main() -> None:
    """Judge every case of a file."""
    wanted, found = Path(sys.argv[1]), Path(sys.argv[2])
    preimport()
    with found.open("w") as out:
        for i, case in enumerate(json.loads(wanted.read_text())):
            result = judged(case, found.parent / f"case-{i}")
            out.write(json.dumps(result) + "\n")
            out.flush()


if __name__ == "__main__":
    main()
