"""A small pipeline with a tensor axis, in the names and cuts of Megatron-DeepSpeed's GPTModelPipe.

The layers are ours; pipeline, grid, engine and files are DeepSpeed's. What Megatron-DeepSpeed's
client puts beside them, its table of cuts, is INFO.
Source: Megatron-DeepSpeed 4efb479 megatron/model/gpt_model.py, megatron/checkpointing.py.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from peers.deepspeed_training import VOCABULARY, Recipe, pipe_loss, seed_all

HIDDEN, INNER, ROWS = 22, 34, VOCABULARY + 1  # rows of the padded vocabulary
INFO = {
    "universal_checkpoint_version": 0.2,
    "vocabulary_parameter_patterns": [r"\d+.word_embeddings.weight"],
    "pipeline_replicated_parameter_patterns": [],
    "tp_replicated_parameter_patterns": [
        r"\d+.input_layernorm.weight", r"\d+.input_layernorm.bias", r"\d+.weight", r"\d+.bias",
        r"\d+.mlp.dense_4h_to_h.bias", r"\d+.lm_head.weight",
    ],
    "parameter_with_row_parallelism_patterns": [r"\d+.mlp.dense_4h_to_h.weight"],
    "parameter_with_2_sub_params_cat_dim_0": [r"\d+.mlp.dense_h_to_4h.weight"],
    "original_vocab_size": VOCABULARY,
    "padded_vocab_size": ROWS,
}  # fmt: skip
GROUP: list[Any] = [None]  # of the ranks that share a stage's layers


class Copied(torch.autograd.Function):
    """The same values on every tensor-parallel rank; gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        grad = grad.contiguous()
        dist.all_reduce(grad, group=GROUP[0])
        return grad


class Summed(torch.autograd.Function):
    """The sum over tensor-parallel ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous().clone()
        dist.all_reduce(x, group=GROUP[0])
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def weight(seed: int, rows: int, columns: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator) / columns**0.5


class Plain(torch.nn.Module):
    """A module with a weight, and perhaps a bias, of given values."""

    def __init__(self, values: torch.Tensor, bias: int = 0) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(values.contiguous().clone())
        if bias:
            self.bias = torch.nn.Parameter(torch.zeros(bias))


class Embedding(torch.nn.Module):
    def __init__(self, seed: int, tp: int, rank: int) -> None:
        super().__init__()
        rows = ROWS // tp
        self.first, self.rows = rank * rows, rows
        self.word_embeddings = Plain(weight(seed, ROWS, HIDDEN)[self.first : self.first + rows])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        local = ids - self.first
        away = (local < 0) | (local >= self.rows)
        found = self.word_embeddings.weight[local.masked_fill(away, 0)]
        return Summed.apply(found.masked_fill(away.unsqueeze(-1), 0.0))  # type: ignore[no-any-return]  # torch's


class Layer(torch.nn.Module):
    def __init__(self, seed: int, tp: int, rank: int) -> None:
        super().__init__()
        self.input_layernorm = torch.nn.LayerNorm(HIDDEN)
        gate, up = (part.chunk(tp)[rank] for part in weight(seed, 2 * INNER, HIDDEN).chunk(2))
        down = weight(seed + 1, HIDDEN, INNER).chunk(tp, 1)[rank]
        self.mlp = torch.nn.Module()
        self.mlp.dense_h_to_4h = Plain(torch.cat([gate, up]))
        self.mlp.dense_4h_to_h = Plain(down, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.input_layernorm(x)
        y = Copied.apply(y + torch.cumsum(y, dim=1) / 10.0)
        gate, up = torch.nn.functional.linear(y, self.mlp.dense_h_to_4h.weight).chunk(2, -1)
        inner = torch.nn.functional.silu(gate) * up
        y = Summed.apply(torch.nn.functional.linear(inner, self.mlp.dense_4h_to_h.weight))
        return x + y + self.mlp.dense_4h_to_h.bias  # type: ignore[no-any-return]  # torch's


class Head(torch.nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.lm_head = Plain(weight(seed, VOCABULARY, HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.lm_head.weight)


def pipe3d(recipe: Recipe) -> torch.nn.Module:
    from deepspeed.pipe import LayerSpec, PipelineModule
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    world, seed = int(os.environ["WORLD_SIZE"]), recipe.get("seed", 11)
    pp, tp = recipe["pp"], recipe["mp"]
    topology = PipeModelDataParallelTopology(num_pp=pp, num_mp=tp, num_dp=world // pp // tp)
    rank = topology.get_coord(rank=int(os.environ["RANK"])).model
    seed_all(seed)
    layers = [LayerSpec(Embedding, seed, tp, rank)]
    layers += [LayerSpec(Layer, 10 * seed + i, tp, rank) for i in range(4)]
    layers += [LayerSpec(torch.nn.LayerNorm, HIDDEN), LayerSpec(Head, seed + 1)]
    made = PipelineModule(
        layers=layers, topology=topology, loss_fn=pipe_loss, partition_method="uniform",
        base_seed=seed, seed_layers=True,
    )  # fmt: skip
    GROUP[0] = made._grid.get_slice_parallel_group()
    for name, parameter in made.named_parameters():  # or its part is not in the gradient's norm
        cut = ("word_embeddings.weight", "dense_h_to_4h.weight", "dense_4h_to_h.weight")
        parameter.tensor_model_parallel = name.endswith(cut)
    return made
