"""Makes a fixture with real megatron-core on a CPU: megatron_make FOLDER --preset llama --tp 2 …

Writes FOLDER/dist (torch_dist), FOLDER/truth.safetensors and FOLDER/truth.json: the whole state,
gathered from the run that wrote the checkpoint and not from its files, and how that run goes on.
The archives h-* and made-* of fixtures/megatron/ are of this kind.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
from pathlib import Path
from typing import Any

import megatron.core
import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)
from safetensors.torch import save_file

from peers import MegatronCase, megatron_cpu
from peers.fork_ranks import fork_ranks
from peers.megatron_model import Args, Job, build, join_ranks, padded_vocab
from peers.megatron_state import gather, model_state, request_metadata, unrounded
from peers.megatron_training import Curve, train

STEPS_AFTER = 4

#: Axes that differ pairwise, so that no permutation goes unseen: hidden 40, q 8*6 = 48, kv 2*6,
#: qkv 72, fc1 2*52 = 104, vocabulary 109 padded to 112 at tp 1 and 2.
LLAMA: dict[str, Any] = {
    "num_layers": 4,
    "encoder_num_layers": 4,
    "hidden_size": 40,
    "ffn_hidden_size": 52,
    "num_attention_heads": 8,
    "num_query_groups": 2,
    "group_query_attention": True,
    "kv_channels": 6,
    "swiglu": True,
    "normalization": "RMSNorm",
    "layernorm_epsilon": 1e-5,
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "untie_embeddings_and_output_weights": True,
    "position_embedding_type": "rope",
    "rotary_base": 10000,
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
    "max_position_embeddings": 32,
    "seq_length": 16,
    "qk_layernorm": False,
    "vocab_size": 109,
    "make_vocab_size_divisible_by": 8,
    "tokenizer_type": "HuggingFaceTokenizer",
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "init_method_std": 0.06,
    "attention_softmax_in_fp32": True,
    "apply_query_key_layer_scaling": False,
    "bf16": True,
    "fp16": False,
    "params_dtype": torch.bfloat16,
    "transformer_impl": "local",
    "num_experts": None,
    "moe_router_topk": 2,
    "moe_aux_loss_coeff": 0.0,
    "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "allgather",
    "multi_latent_attention": False,
    "mtp_num_layers": None,
    "mtp_loss_scaling_factor": 0.1,
    "sequence_parallel": False,
    "context_parallel_size": 1,
    "ckpt_format": "torch_dist",
    "use_dist_ckpt": True,
    "optimizer": "adam",
    "lr": 4e-3,
    "min_lr": 4e-4,
    "lr_decay_style": "cosine",
    "lr_warmup_iters": 2,
    "lr_decay_iters": 20,
    "train_iters": 20,
    "weight_decay": 0.1,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "adam_eps": 1e-8,
    "clip_grad": 1.0,
    "micro_batch_size": 1,
    "global_batch_size": 8,
}

PRESETS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mla": {
        "multi_latent_attention": True,
        "group_query_attention": False,
        "num_query_groups": None,
        "q_lora_rank": 20,
        "kv_lora_rank": 14,
        "qk_head_dim": 6,
        "qk_pos_emb_head_dim": 4,
        "v_head_dim": 7,
        "kv_channels": 7,
        "qk_layernorm": True,
    },
    "mtp": {"mtp_num_layers": 1},
    "fp32": {
        "num_layers": 2,
        "encoder_num_layers": 2,
        "bf16": False,
        "params_dtype": torch.float32,
    },
    "gpt": {
        "swiglu": False,
        "normalization": "LayerNorm",
        "add_bias_linear": True,
        "untie_embeddings_and_output_weights": False,
        "position_embedding_type": "learned_absolute",
        "group_query_attention": False,
        "num_query_groups": None,
    },
    "moe": {
        "num_experts": 4,
        "moe_ffn_hidden_size": 28,
        "moe_layer_freq": [0, 1, 1, 1],
        "moe_shared_expert_intermediate_size": 36,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "qk_layernorm": True,
        "moe_router_dtype": "fp32",
    },
    "sgd": {
        "num_layers": 2,
        "encoder_num_layers": 2,
        "bf16": False,
        "params_dtype": torch.float32,
        "optimizer": "sgd",
    },
    "frozen": {
        "num_layers": 2,
        "encoder_num_layers": 2,
        "decoupled_lr": 1e-3,
        "decoupled_min_lr": 1e-4,
        "frozen_parameters": ["mlp"],  # no argument of Megatron's: a run freezes in its own code
    },
    "moe-fp16": {
        "num_layers": 3,
        "encoder_num_layers": 3,
        "bf16": False,
        "fp16": True,
        "params_dtype": torch.float16,
        "initial_loss_scale": 128.0,
        "loss_scale_window": 2,
        "num_experts": 2,
        "moe_ffn_hidden_size": 28,
        "moe_layer_freq": 2,
        "qk_layernorm": True,
    },
}


def main() -> None:
    """Parse what to make, fork the ranks that make it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--preset", choices=PRESETS, default="llama")
    parser.add_argument(
        "--distributed", choices=["none", "fully_reshardable", "dp_reshardable"], default="none"
    )
    parser.add_argument("--fused", action="store_true", help="FusedAdam's state layout")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--steps", type=int, default=3)
    for degree in ("tp", "pp", "vpp", "ep"):
        parser.add_argument(f"--{degree}", type=int, default=1)
    for optional in ("etp", "dp", "first-stage", "last-stage", "bucket-size"):
        parser.add_argument(f"--{optional}", type=int)
    asked = parser.parse_args()
    case = MegatronCase(
        name=asked.folder.name,
        checkpoint=asked.folder / "dist",
        tp=asked.tp,
        pp=asked.pp,
        vpp=asked.vpp,
        ep=asked.ep,
        etp=asked.etp,
        dp=asked.dp,
        first_stage=asked.first_stage,
        last_stage=asked.last_stage,
        distributed=asked.distributed,
        bucket_size=asked.bucket_size,
        steps=asked.steps,
    )
    torch.set_num_threads(1)
    asked.folder.mkdir(parents=True)
    logs = asked.folder / "logs"
    error = fork_ranks(lambda rank: make_rank(case, asked, rank), case.world, logs, case.seconds)
    if error:
        raise SystemExit(error)
    for log in logs.iterdir():
        log.unlink()
    logs.rmdir()


def arguments(case: MegatronCase, asked: argparse.Namespace) -> Args:
    """The part of megatron.training's args that sizes, optimizer and schedule depend on."""
    args = argparse.Namespace(**LLAMA | PRESETS[asked.preset], seed=asked.seed)
    args.tensor_model_parallel_size = case.tp
    args.pipeline_model_parallel_size = case.pp
    args.virtual_pipeline_model_parallel_size = case.vpp if case.vpp > 1 else None
    args.expert_model_parallel_size = case.ep
    args.expert_tensor_parallel_size = case.etp or case.tp
    args.decoder_first_pipeline_num_layers = case.first_stage
    args.decoder_last_pipeline_num_layers = case.last_stage
    args.data_parallel_size, args.world_size = case.data_parallel, case.world
    args.use_distributed_optimizer = case.distributed != "none"
    args.padded_vocab_size = padded_vocab(args, case)
    args.iteration, args.consumed_train_samples = asked.steps, asked.steps * args.global_batch_size
    args.consumed_valid_samples = args.skipped_train_samples = 0
    return args


def make_rank(case: MegatronCase, asked: argparse.Namespace, rank: int) -> None:
    """One rank: train, save, train on; rank 0 writes the truth."""
    fused = asked.fused or case.distributed != "none"
    join_ranks(case, rank, asked.folder / "logs" / "rendezvous")
    megatron_cpu.patch(fused_adam=fused)
    args = arguments(case, asked)
    random.seed(asked.seed + 100 * parallel_state.get_pipeline_model_parallel_rank())
    np.random.seed(asked.seed)
    torch.manual_seed(asked.seed)
    job = build(args, case, asked.distributed)
    disturb_vectors(job, asked.seed)
    before = train(job, 0, asked.steps, lambda _: None)
    truth = gather(job, weights_only=False)
    save(job, case, asked.steps)
    after = train(job, asked.steps, STEPS_AFTER, lambda _: None)
    if rank == 0:
        write_truth(asked, case, truth, before, after, fused)
    dist.barrier()
    dist.destroy_process_group()


def disturb_vectors(job: Job, seed: int) -> None:
    """Norms that are all one and biases that are all zero would hide a permutation."""
    for chunk in job.chunks:
        for param in chunk.parameters():
            if param.dim() == 1:
                generator = torch.Generator().manual_seed(seed + param.numel())
                noise = 0.1 * torch.randn(param.shape, generator=generator)
                param.data.add_(noise.to(param.dtype))
    job.optimizer.reload_model_params()


def save(job: Job, case: MegatronCase, steps: int) -> None:
    """As megatron.training.save_checkpoint; CUDA's RNG states are zeros."""
    metadata = request_metadata(job.distributed)
    state: dict[str, Any] = {
        "args": job.args,
        "checkpoint_version": 3.0,
        "iteration": steps,
        **model_state(job, metadata),
        "opt_param_scheduler": job.schedule.state_dict(),
        "num_floating_point_operations_so_far": 0,
        "rng_state": rng_state(case),
    }
    state["optimizer"] = job.optimizer.sharded_state_dict(
        state, is_loading=False, metadata=metadata
    )
    folder = case.checkpoint / f"iter_{steps:07d}"
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    dist_checkpointing.save(
        state,
        str(folder),
        FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy("torch_dist"), group),
        content_metadata={name: x for name, x in metadata.items() if name != "dp_cp_group"},
    )
    if dist.get_rank() == 0:
        (case.checkpoint / "latest_checkpointed_iteration.txt").write_text(str(steps))


def rng_state(case: MegatronCase) -> ShardedObject:
    """Of shape (pp, tp), with experts (pp, tp, dp): checkpointing.py @ core_v0.16.1."""
    zeros = torch.zeros(16, dtype=torch.uint8)
    trackers = ("model-parallel-rng", "expert-parallel-rng", "data-parallel-rng")
    states = {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": zeros,
        "rng_tracker_states": dict.fromkeys(trackers, zeros),
    }
    shape: tuple[int, ...] = (case.pp, case.tp)
    offset: tuple[int, ...] = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
    )
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    if case.ep > 1:
        shape, offset, replica = (*shape, case.data_parallel), (*offset, replica), 0
    return ShardedObject("rng_state", [states], shape, offset, replica_id=replica)


def write_truth(
    asked: argparse.Namespace,
    case: MegatronCase,
    truth: dict[str, torch.Tensor],
    before: Curve,
    after: Curve,
    fused: bool,
) -> None:
    """truth.safetensors and truth.json."""
    if wrong := unrounded(truth):
        raise ValueError(f"master does not round to the weight: {wrong[:4]}")
    tensors = {key: tensor.contiguous() for key, tensor in truth.items()}
    save_file(tensors | {"step": torch.tensor(asked.steps)}, asked.folder / "truth.safetensors")
    facts = {
        "preset": asked.preset,
        **{name: getattr(case, name) for name in ("tp", "pp", "vpp", "ep", "world")},
        "dp": case.data_parallel,
        "dist_opt": asked.distributed,
        "bucket_size": asked.bucket_size,
        "adam": "fused-like" if fused else "torch",
        "seed": asked.seed,
        "first_stage": case.first_stage,
        "last_stage": case.last_stage,
        "losses_before": before.losses,
        "losses": after.losses,
        "grad_norms": after.grad_norms,
        "versions": {
            "megatron.core": megatron.core.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }
    (asked.folder / "truth.json").write_text(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
