"""Has torch write small checkpoints of forms that no fixture has.

    python -m peers.dcp_make forms|ranks|orders FOLDER

forms: one process, one model under every writer option. ranks: per-rank pickles of a model that
FSDP2 and TP cut along the same axis, uneven (strided shards); `alone`: a DCP that each rank saved
for itself.
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
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint import _version
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from peers.fork_ranks import fork_ranks

State = dict[str, Any]


class Hidden:
    """A class that a reader must neither import nor write again."""

    def __init__(self, note: str) -> None:
        self.note = note


def network() -> nn.Module:
    """Three layers of sizes that 2 and 4 do not divide."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(13, 23), nn.Linear(23, 7, bias=False), nn.Linear(7, 11))


def train(model: nn.Module) -> torch.optim.Optimizer:
    """Two steps of AdamW in two groups."""
    wide = [p for p in model.parameters() if p.dim() > 1]
    flat = [p for p in model.parameters() if p.dim() == 1]
    made = torch.optim.AdamW(
        [{"params": wide, "weight_decay": 0.1}, {"params": flat, "weight_decay": 0.0}], lr=1e-2
    )
    torch.manual_seed(6)
    for _ in range(2):
        made.zero_grad()
        out = model(torch.randn(4, 13))
        (out.full_tensor() if isinstance(out, DTensor) else out).pow(2).mean().backward()
        made.step()
    return made


def whole(value: torch.Tensor) -> torch.Tensor:
    """All of a tensor."""
    found = value.full_tensor() if isinstance(value, DTensor) else value
    return found.detach().clone().contiguous()


def truth(model: nn.Module, made: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Weights, moments and counters by name."""
    out = {}
    for name, parameter in model.named_parameters():
        out[f"model.{name}"] = whole(parameter)
        for slot, value in made.state[parameter].items():
            out[f"{slot}.{name}"] = whole(value)
    return out


def state_of(model: nn.Module, made: torch.optim.Optimizer) -> State:
    """A state dict as get_state_dict gives it."""
    names = [name for name, _ in model.named_parameters()]
    held = made.state_dict()
    by_number = dict(
        zip((i for g in held["param_groups"] for i in g["params"]), _by_group(model), strict=True)
    )
    assert set(by_number.values()) == set(names)
    state = {by_number[i]: value for i, value in held["state"].items()}
    groups = [{**g, "params": [by_number[i] for i in g["params"]]} for g in held["param_groups"]]
    return {"model": model.state_dict(), "optim": {"state": state, "param_groups": groups}}


def _by_group(model: nn.Module) -> list[str]:
    named = list(model.named_parameters())
    return [n for n, p in named if p.dim() > 1] + [n for n, p in named if p.dim() == 1]


def make_forms(folder: Path) -> None:
    """The same state under every option of the writer."""
    model = network()
    made = train(model)
    save_file(truth(model, made), folder / "truth.safetensors")
    state = state_of(model, made)
    forms: dict[str, dict[str, Any]] = {
        "plain": {},
        "one-file-per-item": {"single_file_per_rank": False},
        "threads": {"thread_count": 3},
        "zstd": {"_extensions": [ZStandard()]},
    }
    for name, options in forms.items():
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder / name, **options))
    safe = dcp.FileSystemWriter(
        folder / "safetensors", serialization_format=SerializationFormat.SAFETENSORS
    )
    dcp.save({"model": state["model"]}, storage_writer=safe)
    wrapped = {f"module._orig_mod.{k}": v for k, v in state["model"].items()}
    dcp.save({"model": wrapped, "optim": state["optim"]}, checkpoint_id=folder / "wrapped")
    app = {"app": {**state, "ema": {k: v + 1 for k, v in state["model"].items()}}}
    dcp.save(app, checkpoint_id=folder / "nested")
    more = {
        **state,
        "hidden": Hidden("never write this again"),
        "rng": torch.get_rng_state(),
        "plain": {"epoch": 3, "words": ["a", "b"]},
    }
    dcp.save(more, checkpoint_id=folder / "hidden")
    aged = {
        "state": state["optim"]["state"],
        "param_groups": [_old(group) for group in state["optim"]["param_groups"]],
    }
    dcp.save({"model": state["model"], "optim": aged}, checkpoint_id=folder / "old-options")

    names = [name for g in state["optim"]["param_groups"] for name in g["params"]]
    number = {name: i for i, name in enumerate(names)}
    keyed = {
        "state": {number[k]: v for k, v in state["optim"]["state"].items()},
        "param_groups": made.state_dict()["param_groups"],
    }
    dcp.save({"model": state["model"], "optimizer": keyed}, checkpoint_id=folder / "numbered")
    _version._derived_version = "2_3"  # torch < 2.4 kept dicts without tensors as one object
    dcp.save(more_of(state), checkpoint_id=folder / "torch-2.3")
    _version._derived_version = None
    prepared = {"base_lrs": [1e-2, 5e-3], "last_epoch": 8, "_step_count": 9, "_last_lr": [0.1]}
    torch.save(prepared, folder / "scheduler.bin")


def more_of(state: State) -> State:
    """The state beside a scheduler's."""
    return {**state, "lr_scheduler": {"base_lrs": [1e-2, 1e-2], "last_epoch": 2}}


def _old(group: State) -> State:
    """Options as torch 2.4's AdamW had them."""
    return {k: v for k, v in group.items() if k not in ("decoupled_weight_decay", "fused")}


def make_ranks(folder: Path) -> None:
    """Pickles of each of four ranks: FSDP2 of 2 over TP of 2."""

    def rank_main(rank: int) -> None:
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{scratch}/meet",
            rank=rank,
            world_size=4,
            timeout=datetime.timedelta(seconds=60),
        )
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
        model = network()
        plan = {
            "0": ColwiseParallel(output_layouts=Replicate()),
            "1": RowwiseParallel(input_layouts=Replicate()),
        }
        parallelize_module(model, mesh["tp"], plan)
        fully_shard(model, mesh=mesh["fsdp"])
        made = train(model)
        found = truth(model, made)
        torch.save(model.state_dict(), folder / f"model_world_size_4_rank_{rank}.pt")
        torch.save(made.state_dict(), folder / f"optim_world_size_4_rank_{rank}.pt")
        weights, moments = get_state_dict(model, made)
        state = {"model": weights, "optim": moments, "rank": rank, "epoch": 3}
        dcp.save(state, checkpoint_id=folder / "alone", use_collectives=False)
        if rank == 0:
            save_file(found, folder / "truth.safetensors")
        dist.destroy_process_group()

    with tempfile.TemporaryDirectory() as scratch:
        error = fork_ranks(rank_main, 4, Path(scratch) / "logs", 90)
    if error is not None:
        raise RuntimeError(error)


#: Switches of a config that add or take away parameters.
_SWITCHES = ("bias", "norm", "tie", "embed", "parallel", "proj", "new_decoder", "qkv")


def make_orders(folder: Path) -> None:
    """The parameters of transformers' models, in the order in which an optimizer numbers them.

    For every model type of schemas/dialects/hf.toml: as its config is, and with each switch turned.
    """
    from transformers import AutoConfig

    from reshard.namings import dialects

    found: dict[str, list[list[str]]] = {}
    for kind in dialects()["hf"].orders:
        orders = [_order(kind, {})]
        for name, value in AutoConfig.for_model(kind).to_dict().items():
            if isinstance(value, bool) and any(word in name for word in _SWITCHES):
                try:
                    turned = _order(kind, {name: not value})
                except Exception:  # no such model: its config contradicts itself
                    continue
                if turned not in orders:
                    orders.append(turned)
        found[kind] = orders
    (folder / "orders.json").write_text(json.dumps(found))


def _order(kind: str, fields: dict[str, bool]) -> list[str]:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind)
    config.num_hidden_layers = 2
    if kind == "nemotron":  # says no number of key-value heads of its own
        config.num_key_value_heads = config.num_attention_heads
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:2]
    for name, value in fields.items():
        setattr(config, name, value)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return [name for name, _ in model.named_parameters()]


if __name__ == "__main__":
    job, where = sys.argv[1], Path(sys.argv[2])
    {"forms": make_forms, "ranks": make_ranks, "orders": make_orders}[job](where)
