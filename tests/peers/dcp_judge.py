"""Loads DCP checkpoints into real models under FSDP2, HSDP and TP, and trains on.

    python -m peers.dcp_judge CASES.json RESULTS.jsonl

One process imports torch and transformers and forks the ranks of each case.
"""

from __future__ import annotations

import datetime
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from transformers import AutoConfig, AutoModelForCausalLM

from peers.fork_ranks import fork_ranks

_BATCH, _SEQ = 8, 16
Case = dict[str, Any]


def build(case: Case, seed: int) -> nn.Module:
    """The fixture's model with other weights than the saved ones."""
    torch.manual_seed(seed)
    config = AutoConfig.from_pretrained(case["fixture"])
    config.use_cache = False
    said = json.loads((Path(case["fixture"]) / "losses.json").read_text()).get("dtype", "fp32")
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[said]
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(dtype)


def parallelize(model: nn.Module, case: Case) -> tuple[int, int, Any]:
    """Shard the model in place; this rank's data-parallel rank, size and group."""
    mode, world = case["mode"], case["world"]
    if mode == "single":
        return 0, 1, None
    if mode == "tp":
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("fsdp", "tp"))
        parallelize_module(model, mesh["tp"], tensor_plan(model))
        shard(model, mesh["fsdp"])
        return mesh["fsdp"].get_local_rank(), world // 2, mesh["fsdp"].get_group()
    if mode == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("ddp", "fsdp"))
    else:
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    shard(model, mesh)
    return dist.get_rank(), world, None


def shard(model: nn.Module, mesh: Any) -> None:
    """FSDP2, layer by layer."""
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def tensor_plan(model: nn.Module) -> dict[str, Any]:
    """Which modules are cut by column and which by row."""
    plan: dict[str, Any] = {}
    for i in range(len(model.model.layers)):
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
            plan[f"model.layers.{i}.{name}"] = ColwiseParallel()
        for name in ("mlp.gate_proj", "mlp.up_proj"):
            plan[f"model.layers.{i}.{name}"] = ColwiseParallel()
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            plan[f"model.layers.{i}.{name}"] = RowwiseParallel()
    plan["model.embed_tokens"] = RowwiseParallel(input_layouts=Replicate())
    plan["lm_head"] = ColwiseParallel(output_layouts=Replicate())
    return plan


def optimizer(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    """AdamW in two groups, as the fixtures' runs had it, with rates that only a load corrects."""
    plain, norms = [], []
    for name, parameter in model.named_parameters():
        (norms if "norm" in name or name.endswith("bias") else plain).append(parameter)
    made = torch.optim.AdamW(
        [{"params": plain, "weight_decay": 0.3, "lr": 1.0}, {"params": norms, "lr": 2.0}],
        betas=(0.1, 0.2),
        foreach=False,
    )
    rates = torch.optim.lr_scheduler.LambdaLR(made, lambda s: min(1.0, (s + 1) / 6) * 0.99**s)
    return made, rates


def load(model: nn.Module, made: Any, rates: Any, case: Case) -> None:
    """Fill the live state from the checkpoint, by torch's own loader."""
    folder, keys = Path(case["checkpoint"]), case["keys"]
    if keys == "torch":
        state = torch.load(next(folder.glob("*.pt")), weights_only=True)
        model.load_state_dict(state["model"])
        made.load_state_dict(state["optimizer"])
        if case["schedule"]:
            rates.load_state_dict(state["lr_scheduler"])
        return
    options = StateDictOptions(flatten_optimizer_state_dict=case["flatten"])
    weights, moments = get_state_dict(model, made, options=options)
    schedule = rates.state_dict() if case["schedule"] else {}
    if keys == "accelerate":
        dcp.load({"model": weights}, checkpoint_id=folder / "pytorch_model_fsdp_0")
        dcp.load({"optimizer": moments}, checkpoint_id=folder / "optimizer_0")
        if case["schedule"]:
            schedule = torch.load(folder / case["schedule"], weights_only=True)
        if case["schedule"] == "scheduler.bin":  # as accelerate prepares it: a count for each rank
            schedule["last_epoch"] //= case["world"]
    elif keys == "torchtitan" or case["schedule"] == "last_epoch":
        epoch = {"last_epoch": schedule.pop("last_epoch")} if schedule else {}
        state = {**weights, "optimizer": moments}
        if keys == "plain":
            state = {"model": weights, "optim": moments}
        state |= {"lr_scheduler": epoch} if epoch else {}
        dcp.load(state, checkpoint_id=folder)
        # torchtitan keeps no rates: its config knows them
        schedule = {**schedule, **state.get("lr_scheduler", {}), "base_lrs": [1e-2, 5e-3]}
    else:
        wanted = {"model": weights, "optim": moments}
        if schedule:
            wanted["lr_scheduler"] = schedule
        dcp.load(wanted, checkpoint_id=folder)
    set_state_dict(model, made, model_state_dict=weights, optim_state_dict=moments, options=options)
    if case["rates"]:
        rates.lr_lambdas = [lambda s: case["rates"][s]] * 2
        schedule["lr_lambdas"] = [None, None]
    if case["schedule"]:
        rates.load_state_dict(schedule)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor, wherever it lies."""
    gathered = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return gathered.detach().clone().contiguous()


def live(model: nn.Module, made: Any) -> dict[str, torch.Tensor]:
    """Weights, moments and counters by name, from the parameters themselves."""
    out = {}
    for name, parameter in model.named_parameters():
        out[f"model.{name}"] = whole(parameter)
        for slot in ("exp_avg", "exp_avg_sq", "step"):
            value = made.state.get(parameter, {}).get(slot)
            if value is not None:
                out[f"{slot}.{name}"] = whole(torch.as_tensor(value))
    return out


def spoil(made: Any, how: str) -> None:
    """Make the loaded state wrong in one way."""
    group = made.param_groups[0]
    for parameter in group["params"]:
        if how == "step":
            made.state[parameter]["step"] += 1
        elif how == "moment":
            made.state[parameter]["exp_avg"].mul_(1.01)
    if how == "decay":
        group["weight_decay"] = 0.9
    elif how == "beta":
        group["betas"] = (0.5, 0.95)


def train(model: nn.Module, made: Any, rates: Any, case: Case, place: Any) -> list[float]:
    """The losses of the steps that the fixture's own run did after saving."""
    rank, size, group = place
    vocabulary = model.config.vocab_size
    losses = []
    for step in range(4, 4 + case["steps"]):
        seed = torch.Generator().manual_seed(777 + step % 3)
        tokens = torch.randint(0, vocabulary, (_BATCH, _SEQ + 1), generator=seed)
        if _BATCH % size == 0:  # else every rank sees the whole batch: the same mean gradient
            tokens = tokens[rank * (_BATCH // size) : (rank + 1) * (_BATCH // size)]
        made.zero_grad(set_to_none=True)
        logits = model(input_ids=tokens[:, :-1]).logits
        if isinstance(logits, DTensor):
            logits = logits.full_tensor()
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        made.step()
        rates.step()
        mean = loss.detach().clone().float()
        if size > 1:
            dist.all_reduce(mean, group=group)
            mean /= size
        losses.append(mean.item())
    return losses


def resume(case: Case) -> dict[str, Any]:
    """Load, compare, train on: what one checkpoint gives at one mesh."""
    model = build(case, seed=99)
    place = parallelize(model, case)
    made, rates = optimizer(model)
    load(model, made, rates, case)
    truth = load_file(Path(case["fixture"]) / "truth.safetensors")
    held = live(model, made)
    different = [
        name
        for name, value in truth.items()
        if name not in held or held[name].dtype != value.dtype or not torch.equal(held[name], value)
    ]
    if case["spoil"]:
        spoil(made, case["spoil"])
    return {
        "tensors": len(truth),
        "different": different,
        "losses": train(model, made, rates, case, place),
    }


def run_case(case: Case, folder: Path) -> dict[str, Any]:
    """One case on its own ranks."""
    answer = folder / "answer.json"

    def rank_main(rank: int) -> None:
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder / 'meet'}",
            rank=rank,
            world_size=case["world"],
            timeout=datetime.timedelta(seconds=case["seconds"]),
        )
        found = resume(case)
        if case["native"]:
            native = {
                **case,
                "checkpoint": case["native"],
                "keys": case["native_keys"],
                "flatten": case["native_flatten"],
                "spoil": None,
            }
            if native["keys"] == "plain" and case["schedule"]:
                native["schedule"] = "lr_scheduler"
            found["native"] = resume(native)["losses"]
        if rank == 0:
            answer.write_text(json.dumps(found))
        dist.destroy_process_group()

    error = fork_ranks(rank_main, case["world"], folder / "logs", case["seconds"])
    found = json.loads(answer.read_text()) if error is None else {}
    recorded = json.loads((Path(case["fixture"]) / "losses.json").read_text())["after"]
    return {"name": case["name"], "error": error, "recorded": recorded, **found}


def main(wanted: str, results: str) -> None:
    """Judge every case of a file."""
    with Path(results).open("w") as out, tempfile.TemporaryDirectory() as scratch:
        for i, case in enumerate(json.loads(Path(wanted).read_text())):
            folder = Path(scratch) / str(i)
            folder.mkdir()
            out.write(json.dumps(run_case(case, folder)) + "\n")
            out.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
