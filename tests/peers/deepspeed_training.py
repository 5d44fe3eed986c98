"""The models and runs of fixtures/deepspeed, rebuilt from a recipe under real DeepSpeed.

Taken over from the scripts that wrote the fixtures: every number here is theirs.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

VOCABULARY, SEQUENCE, BATCH = 67, 12, 8
Recipe = dict[str, Any]


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def batch_of(step: int) -> torch.Tensor:
    """The whole global batch of one optimizer step."""
    generator = torch.Generator().manual_seed(987 + step)
    x = torch.randint(0, VOCABULARY, (BATCH, 1), generator=generator)
    columns = [x]
    for _ in range(SEQUENCE - 1):
        x = (3 * x + 7) % VOCABULARY
        columns.append(x)
    return torch.cat(columns, dim=1)


# --- models --------------------------------------------------------------------------------------


def llama(recipe: Recipe) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 22, "intermediate_size": 37,
        "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 6,
        "max_position_embeddings": 32, "attention_bias": True, "mlp_bias": False,
        "tie_word_embeddings": False, "use_cache": False, "attn_implementation": "eager",
    } | recipe.get("model", {})  # fmt: skip
    seed_all(recipe.get("seed", 11))
    model = LlamaForCausalLM(LlamaConfig(**sizes))
    if recipe.get("lm_head_bias", recipe.get("tp", 1) == 1):
        model.lm_head.bias = torch.nn.Parameter(torch.zeros(VOCABULARY))
    if recipe.get("buffers"):
        model.model.register_buffer("probe_float", torch.linspace(-1, 1, 5))
        model.model.register_buffer("probe_int", torch.arange(7))
        model.model.register_buffer("probe_nonpersistent", torch.ones(3), persistent=False)
    if recipe.get("odd"):  # fewer elements than ranks, none at all, and never in a loss
        model.model.tiny = torch.nn.Parameter(torch.ones(1))
        model.model.empty = torch.nn.Parameter(torch.zeros(0))
    for pattern in recipe.get("freeze", []):
        for name, parameter in model.named_parameters():
            if pattern in name:
                parameter.requires_grad_(False)
    return model


class MoEBlock(torch.nn.Module):
    def __init__(self, hidden: int, experts: int, ep: int) -> None:
        super().__init__()
        from deepspeed.moe.layer import MoE

        expert = torch.nn.Sequential(
            torch.nn.Linear(hidden, 19), torch.nn.ReLU(), torch.nn.Linear(19, hidden)
        )
        self.norm = torch.nn.LayerNorm(hidden)
        self.moe = MoE(
            hidden_size=hidden, expert=expert, num_experts=experts, ep_size=ep, k=1,
            capacity_factor=8.0, eval_capacity_factor=8.0, min_capacity=4, use_residual=False,
            noisy_gate_policy=None, drop_tokens=False, use_rts=False,
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, aux, _ = self.moe(self.norm(x))
        return x + y, aux


class MoEModel(torch.nn.Module):
    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        hidden = 20
        self.embed = torch.nn.Embedding(VOCABULARY, hidden)
        self.blocks = torch.nn.ModuleList(
            MoEBlock(hidden, recipe["experts"], recipe["ep_size"])
            for _ in range(recipe.get("moe_layers", 2))
        )
        self.dense = torch.nn.Linear(hidden, hidden)
        self.head = torch.nn.Linear(hidden, VOCABULARY, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        extra: Any = 0.0
        for block in self.blocks:
            x, aux = block(x)
            extra = extra + aux
        x = x + torch.tanh(self.dense(x))
        logits = self.head(x).float()
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1)
        )
        return loss + 0.01 * extra.float()


class Embed(torch.nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.word_embeddings = torch.nn.Embedding(VOCABULARY, hidden)

    @property
    def weight(self) -> torch.Tensor:
        return self.word_embeddings.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.word_embeddings(ids)


class Block(torch.nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(hidden)
        self.up = torch.nn.Linear(hidden, inner)
        self.down = torch.nn.Linear(inner, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        y = y + torch.cumsum(y, dim=1) / 10.0
        return x + self.down(torch.nn.functional.gelu(self.up(y)))


class Head(torch.nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.proj = torch.nn.Linear(hidden, VOCABULARY, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(x)


def tied_head(module: Embed, x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(x, module.word_embeddings.weight)


def pipe_loss(out: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(
        out.float()[:, :-1].reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1)
    )


def pipe(recipe: Recipe) -> torch.nn.Module:
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
    from deepspeed.runtime.pipe.topology import PipeDataParallelTopology

    hidden, inner, blocks = 22, 33, recipe.get("pipe_layers", 4)
    seed_all(recipe.get("seed", 11))
    tied = recipe.get("tied")
    layers: list[Any] = [
        TiedLayerSpec("embed", Embed, hidden) if tied else LayerSpec(Embed, hidden)
    ]
    layers += [LayerSpec(Block, hidden, inner) for _ in range(blocks)]
    layers += [LayerSpec(torch.nn.LayerNorm, hidden)]
    last = TiedLayerSpec("embed", Embed, hidden, forward_fn=tied_head)
    layers += [last if tied else LayerSpec(Head, hidden)]
    world = int(os.environ["WORLD_SIZE"])
    topology = PipeDataParallelTopology(num_pp=recipe["pp"], num_dp=world // recipe["pp"])
    return PipelineModule(
        layers=layers, topology=topology, loss_fn=pipe_loss, partition_method="uniform",
        base_seed=recipe.get("seed", 11), seed_layers=True,
    )  # fmt: skip


def megatron_pipe(recipe: Recipe) -> torch.nn.Module:
    """A pipeline with a tensor axis, `mp` ranks along it."""
    from peers.deepspeed_3d import pipe3d

    return pipe3d(recipe)


# --- the run -------------------------------------------------------------------------------------


def param_groups(model: torch.nn.Module, recipe: Recipe) -> list[dict[str, Any]]:
    decay, free = [], []
    for parameter in model.parameters():
        if parameter.requires_grad:
            (free if parameter.ndim < 2 else decay).append(parameter)
    if recipe.get("one_group"):
        return [{"params": decay + free, "weight_decay": 0.05}]
    if recipe.get("odd"):
        odd = [p for p in free if p.numel() < 2]
        free = [p for p in free if p.numel() > 1]
        return [
            {"params": decay, "weight_decay": 0.1},
            {"params": odd, "weight_decay": 0.3},
            {"params": free, "weight_decay": 0.0},
        ]
    if recipe.get("three_groups"):
        embed, rest = decay[:1], decay[1:]
        return [
            {"params": rest, "weight_decay": 0.1},
            {"params": free, "weight_decay": 0.0},
            {"params": embed, "weight_decay": 0.02},
        ]
    return [
        {"params": decay, "weight_decay": 0.1},
        {"params": free, "weight_decay": 0.0},
    ]


def config_of(recipe: Recipe, world: int) -> dict[str, Any]:
    dp = world // (recipe.get("pp", 1) * recipe.get("tp", 1) * recipe.get("mp", 1))
    gas = recipe.get("gas", 1)
    config: dict[str, Any] = {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": BATCH // dp // gas,
        "gradient_accumulation_steps": gas,
        "steps_per_print": 10**9,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": recipe["stage"], **recipe.get("zero", {})},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "warmup_min_lr": 0.0, "warmup_max_lr": 0.01, "warmup_num_steps": 4,
                "total_num_steps": 40,
            },
        },
    }  # fmt: skip
    kind = recipe.get("dtype", "bf16")
    if kind == "bf16":
        config["bf16"] = {"enabled": True}
    elif kind == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 3}
    if recipe.get("tp", 1) > 1:
        config["tensor_parallel"] = {"autotp_size": recipe["tp"], **recipe.get("tp_extra", {})}
        del config["train_batch_size"]
    if recipe.get("optimizer"):
        config["optimizer"] = recipe["optimizer"]
    config |= recipe.get("config", {})
    if recipe.get("universal"):
        config["checkpoint"] = {**config.get("checkpoint", {}), "load_universal": True}
    return config


def engine_of(recipe: Recipe) -> Any:
    """Model and engine of a recipe in this rank."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # gloo needs no op build
    if recipe.get("dtype") == "fp16":  # the CPU accelerator refuses what torch can do
        from deepspeed.accelerator import get_accelerator

        get_accelerator().is_fp16_supported = lambda: True
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    kind = recipe.get("kind", "llama")
    if kind == "moe":
        seed_all(recipe.get("seed", 11))
        model: torch.nn.Module = MoEModel(recipe)
    else:
        model = {"llama": llama, "pipe": pipe, "pipe3d": megatron_pipe}[kind](recipe)
    config = config_of(recipe, int(os.environ["WORLD_SIZE"]))
    if recipe.get("optimizer"):
        if recipe["optimizer"]["type"] == "Muon":  # hidden matrices; others are Adam's
            for name, parameter in model.named_parameters():
                hidden = "embed" not in name and "lm_head" not in name
                parameter.use_muon = parameter.ndim == 2 and hidden
        parameters = [p for p in model.parameters() if p.requires_grad]
        return deepspeed.initialize(model=model, config=config, model_parameters=parameters)[0]
    groups = param_groups(model, recipe)
    if kind == "moe":
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

        for i, group in enumerate(groups):
            group["name"] = f"dense_{i}"
        groups = split_params_into_different_moe_groups_for_optimizer(
            groups, max_group_size=recipe.get("max_group_size", 178_956_971)
        )
    optimizer = optimizer_of(recipe, groups)
    return deepspeed.initialize(model=model, config=config, optimizer=optimizer)[0]


def optimizer_of(recipe: Recipe, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """The job's own optimizer: AdamW as the fixtures have it, or any of torch's by its name."""
    if "torch_optimizer" not in recipe:
        rate = torch.tensor(0.01) if recipe.get("tensor_rate") else 0.01
        return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), eps=1e-8)
    name, options = recipe["torch_optimizer"]
    if name == "Adafactor":  # transformers', which the Trainer takes; it has an RMS in its state
        from transformers.optimization import Adafactor

        own: torch.optim.Optimizer = Adafactor(groups, lr=0.01, **options)
        return own
    fused = name == "FusedAdam"
    kind = torch.optim.AdamW if fused else getattr(torch.optim, name)
    made: torch.optim.Optimizer = kind(groups, lr=0.01, **options)
    if fused:  # DeepSpeed asks for its class alone; its kernels would be compiled for minutes
        from deepspeed.ops.adam import FusedAdam

        made.__class__ = type("FusedAdam", (torch.optim.AdamW, FusedAdam), {})
    return made


def coordinates(engine: Any, recipe: Recipe) -> tuple[int, int]:
    """(rank, size) of the data-parallel group."""
    from deepspeed.utils import groups

    if recipe.get("kind", "").startswith("pipe"):
        return engine.grid.data_parallel_id, engine.grid.data_parallel_size
    if recipe.get("tp", 1) > 1:
        return groups._get_data_parallel_rank(), groups._get_data_parallel_world_size()
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def train_step(engine: Any, recipe: Recipe, step: int) -> float:
    """One optimizer step on the batch of `step`; the mean loss over all ranks."""
    rank, size = coordinates(engine, recipe)
    mine = batch_of(step)[rank * (BATCH // size) : (rank + 1) * (BATCH // size)]
    parts = mine.chunk(recipe.get("gas", 1))
    if recipe.get("kind", "").startswith("pipe"):
        batches: Iterator[Any] = iter([(m, m) for m in parts])
        return float(engine.train_batch(data_iter=batches))
    total = 0.0
    for part in parts:
        out = engine(input_ids=part, labels=part)
        loss = out if torch.is_tensor(out) else out.loss
        engine.backward(loss)
        engine.step()
        total += float(loss.detach().float()) / len(parts)
    mean = torch.tensor([total], dtype=torch.float64)
    torch.distributed.all_reduce(mean)
    return float(mean / torch.distributed.get_world_size())
