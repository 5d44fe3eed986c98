"""Has torch save states of many kinds as DCP, and load what was made of them.

    python -m peers.dcp_variants make FOLDER     # FOLDER/saved/NAME, FOLDER/truth/NAME.pt
    python -m peers.dcp_variants check FOLDER    # every FOLDER/made/NAME.*: FOLDER/wrong.json

The truth is the live state, whole, before it was saved.
"""

from __future__ import annotations

import datetime
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from peers.fork_ranks import fork_ranks

State = dict[str, Any]
Made = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Made] = {
    "sgd": lambda g: torch.optim.SGD(g, lr=1e-2, momentum=0.9),
    "sgd-plain": lambda g: torch.optim.SGD(g, lr=1e-2),
    "adagrad": lambda g: torch.optim.Adagrad(g, lr=1e-2),
    "amsgrad": lambda g: torch.optim.AdamW(g, lr=1e-2, amsgrad=True),
    "foreach": lambda g: torch.optim.AdamW(g, lr=1e-2, foreach=True),
    "plain": lambda g: torch.optim.AdamW(g, lr=1e-2, foreach=False),
    "fused": lambda g: torch.optim.AdamW(g, lr=1e-2, fused=True),
    "rmsprop": lambda g: torch.optim.RMSprop(g, lr=1e-2, momentum=0.5, centered=True),
    "adafactor": lambda g: torch.optim.Adafactor(g, lr=1e-2),
    "asgd": lambda g: torch.optim.ASGD(g, lr=1e-2),
    "tensor-rate": lambda g: torch.optim.AdamW(g, lr=torch.tensor(1e-2)),
}
_DTYPES = (
    "bool", "int8", "uint8", "int16", "int32", "int64", "float16", "bfloat16", "float64",
    "float8_e4m3fn", "float8_e5m2", "complex64", "uint16", "uint32", "uint64",
)  # fmt: skip


def network() -> nn.Sequential:
    """Layers of sizes that 2, 3 and 4 do not divide, and a buffer of integers."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Embedding(29, 12), nn.Linear(12, 22), nn.LayerNorm(22),
        nn.Linear(22, 12, bias=False), nn.Linear(12, 29),
    )  # fmt: skip


def trained(model: nn.Module, made: Made) -> torch.optim.Optimizer:
    """Three steps in two groups of other options."""
    wide = [p for p in model.parameters() if p.dim() > 1]
    flat = [p for p in model.parameters() if p.dim() < 2]
    optimizer = made([{"params": wide, "weight_decay": 0.1}, {"params": flat}])
    torch.manual_seed(4)
    for _ in range(3):
        optimizer.zero_grad()
        out = model(torch.randint(0, 29, (6,)))
        (out.full_tensor() if isinstance(out, DTensor) else out).pow(2).mean().backward()
        optimizer.step()
    return optimizer


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, *, flat: bool = False) -> State:
    """As get_state_dict gives it."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    weights, moments = get_state_dict(model, optimizer, options=options)
    return {"model": weights, "optim": moments}


def alone() -> Iterator[tuple[str, State]]:
    """States of one process."""
    for name, made in OPTIMIZERS.items():
        for flat in (False, True):
            model = network()
            state = state_of(model, trained(model, made), flat=flat)
            yield f"{name}-flat" if flat else name, state
    model = network()
    optimizer = trained(model, OPTIMIZERS["foreach"])
    state = state_of(model, optimizer)
    yield "raw", {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    numbers = torch.arange(12).reshape(3, 4)
    yield "dtypes", {**state, "t": {d: numbers.to(getattr(torch, d)) for d in _DTYPES}}
    yield "empty", {**state, "e": {"x": torch.empty(0), "y": torch.empty(3, 0, 2)}}
    base = torch.randn(10, 8)
    views = {"t": base.t(), "rows": base[3:5], "columns": base[:, 2:4], "every": base[::2]}
    yield "views", {**state, "v": {**views, "wide": torch.randn(1, 4).expand(5, 4)}}
    objects = {"none": None, "bytes": b"a", "pair": (1, 2.5), "inf": float("inf"), "big": 2**80}
    yield "objects", {**state, "o": {**objects, "set": {1, 2}, "deep": {"a": {"b": [1, 2]}}}}
    yield "lists", {**state, "l": [torch.ones(3), {"x": torch.full((2,), 7.0)}]}
    yield "random", {**state, "rng": torch.get_rng_state(), "epoch": 3}
    yield "dots", {"model": {**state["model"], "a.b": torch.ones(2)}, "optim": state["optim"]}
    frozen = network()
    for parameter in frozen[0].parameters():
        parameter.requires_grad = False
    rest = [p for p in frozen.parameters() if p.requires_grad]
    some = trained(frozen, lambda _: torch.optim.AdamW(rest, lr=1e-2))
    yield "frozen", state_of(frozen, some)


def meshed(
    shape: tuple[int, ...], names: tuple[str, ...], how: str = "foreach", **kwargs: Any
) -> Callable[[], State]:
    """A state under FSDP2, HSDP and TP: axes of the mesh by name."""

    def make() -> State:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        model = network()
        if "tp" in names:
            gathered = ColwiseParallel(output_layouts=Replicate())
            plan: dict[str, Any] = {
                "1": gathered,
                "2": SequenceParallel(sequence_dim=0),
                "3": gathered,
            }
            if not kwargs.get("sequence"):
                model[2] = nn.Identity()
                plan = {"1": ColwiseParallel(), "3": RowwiseParallel()}
            parallelize_module(model, mesh["tp"], {**plan, "4": gathered})
        axes = tuple(n for n in names if n != "tp")
        if axes:
            part = mesh[axes if len(axes) > 1 else axes[0]]
            place = kwargs.get("place")
            more = {"shard_placement_fn": place} if place else {}
            for layer in (model[1], model[3], model[4], model):
                fully_shard(layer, mesh=part, **more)
        return state_of(model, trained(model, OPTIMIZERS[how]), flat=kwargs.get("flat", False))

    return make


def columns(parameter: torch.Tensor) -> Shard:
    """FSDP2 along the second axis, where it divides."""
    return Shard(1 if parameter.dim() > 1 and parameter.shape[1] % 2 == 0 else 0)


def experts() -> State:
    """Expert parallel along the first axis, FSDP along another, and twice along one."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "fsdp"))
    torch.manual_seed(1)
    cuts = {
        "experts.w": ((6, 5, 8), (Shard(0), Shard(1))),
        "router.w": ((7, 4), (Replicate(), Shard(0))),
        "c": ((10, 6), (Shard(1), Shard(0))),
        "twice": ((11, 3), (Shard(0), Shard(0))),
    }
    whole = {name: torch.randn(shape) for name, (shape, _) in cuts.items()}

    def shard(change: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, DTensor]:
        return {n: distribute_tensor(change(t), mesh, cuts[n][1]) for n, t in whole.items()}

    first, second = shard(lambda t: t + 1), shard(torch.abs)
    state = {
        n: {"exp_avg": first[n], "exp_avg_sq": second[n], "step": torch.tensor(3.0)} for n in whole
    }
    group = {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1, "params": list(whole)}
    return {"model": shard(torch.clone), "optim": {"state": state, "param_groups": [group]}}


RANKS: dict[str, tuple[int, Callable[[], State]]] = {
    "fsdp-3": (3, meshed((3,), ("fsdp",))),
    "fsdp-flat": (2, meshed((2,), ("fsdp",), flat=True)),
    "fsdp-amsgrad": (4, meshed((4,), ("fsdp",), "amsgrad")),
    "fsdp-adagrad": (3, meshed((3,), ("fsdp",), "adagrad")),
    "fsdp-columns": (2, meshed((2,), ("fsdp",), place=columns)),
    "hsdp": (4, meshed((2, 2), ("ddp", "fsdp"))),
    "fsdp-tp": (4, meshed((2, 2), ("fsdp", "tp"))),
    "fsdp-tp-sequence": (4, meshed((2, 2), ("fsdp", "tp"), sequence=True)),
    "tp-3": (3, meshed((3,), ("tp",), "plain", sequence=True)),
    "hsdp-tp": (8, meshed((2, 2, 2), ("ddp", "fsdp", "tp"))),
    "experts": (4, experts),
}


def whole(value: Any) -> Any:
    """The same with every tensor whole."""
    if isinstance(value, DTensor):
        return value.full_tensor().detach().clone()
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {k: whole(v) for k, v in value.items()}
    return [whole(v) for v in value] if isinstance(value, list) else value


def make(folder: Path) -> None:
    """Save every state; those of ranks also as torch.save files of each rank."""
    (folder / "truth").mkdir(parents=True)
    for name, state in alone():
        dcp.save(state, checkpoint_id=folder / "saved" / name)
        torch.save(whole(state), folder / "truth" / f"{name}.pt")
    for name, (world, made) in RANKS.items():
        with tempfile.TemporaryDirectory() as scratch:
            error = fork_ranks(
                lambda rank, n=name, w=world, m=made, s=scratch: _rank(folder, n, rank, w, m, s),
                world, Path(scratch) / "logs", 90,
            )  # fmt: skip
        if error is not None:
            raise RuntimeError(f"{name}: {error}")


def _rank(folder: Path, name: str, rank: int, world: int, made: Any, scratch: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{scratch}/meet", rank=rank, world_size=world,
        timeout=datetime.timedelta(seconds=60),
    )  # fmt: skip
    state = made()
    dcp.save(state, checkpoint_id=folder / "saved" / name)
    pickles = folder / "saved" / f"{name}-pickles"
    pickles.mkdir(exist_ok=True)
    for part in ("model", "optim"):
        torch.save(state[part], pickles / f"{part}_world_size_{world}_rank_{rank}.pt")
    found = whole(state)
    if rank == 0:
        for suffix in ("", "-pickles"):
            torch.save(found, folder / "truth" / f"{name}{suffix}.pt")
    dist.barrier()
    dist.destroy_process_group()


def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """What DCP keeps apart: empty dicts it leaves out."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, (*path, str(key)))
    elif isinstance(value, list) and any(isinstance(v, dict | torch.Tensor) for v in value):
        for i, inner in enumerate(value):
            yield from leaves(inner, (*path, str(i)))
    else:
        yield ".".join(path), value


def same(one: Any, other: Any) -> bool:
    """Equal to the bit, dtype and shape included."""
    if not isinstance(one, torch.Tensor):
        return type(one) is type(other) and repr(one) == repr(other)
    if not isinstance(other, torch.Tensor) or (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    bits = [t.contiguous().flatten().view(torch.uint8) for t in (one, other)]
    return torch.equal(*bits)


def check(folder: Path) -> None:
    """Load every conversion with torch's own loader, into what its metadata says."""
    wrong: dict[str, list[str]] = {}
    for path in sorted((folder / "made").iterdir()):
        truth = torch.load(folder / "truth" / f"{path.stem}.pt", weights_only=False)
        held = dict(leaves(_load_state_dict_from_keys(None, checkpoint_id=path)))
        wrong[path.name] = [k for k, v in leaves(truth) if k not in held or not same(v, held[k])]
    (folder / "wrong.json").write_text(json.dumps(wrong))


if __name__ == "__main__":
    {"make": make, "check": check}[sys.argv[1]](Path(sys.argv[2]))
