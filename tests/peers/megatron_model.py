"""A model, optimizer and schedule of megatron-core, from a checkpoint's args, at a topology."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import (
    MLATransformerConfig,
    TransformerConfig,
)

from peers import MegatronCase

Args = argparse.Namespace


@dataclasses.dataclass(slots=True)
class Job:
    """What one rank of a training job holds."""

    args: Args
    config: TransformerConfig
    chunks: list[Any]  # DistributedDataParallel, one per virtual stage
    optimizer: Any
    schedule: OptimizerParamScheduler
    distributed: str  # how the optimizer is sharded: "none" or a distrib_optim_sharding_type


def join_ranks(case: MegatronCase, rank: int, rendezvous: Path) -> None:
    """Process groups of this rank's job; `rendezvous` is a file that only this job uses."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=case.world,
        timeout=datetime.timedelta(seconds=case.seconds),
    )
    parallel_state.initialize_model_parallel(
        case.tp,
        case.pp,
        case.vpp if case.vpp > 1 else None,
        expert_model_parallel_size=case.ep,
        expert_tensor_parallel_size=case.etp,
        create_gloo_process_groups=True,
    )


def uses_mla(args: Args) -> bool:
    return bool(getattr(args, "multi_latent_attention", False))


def real_vocab(args: Args) -> int:
    """Rows of the vocabulary that tokens can name. Megatron's NullTokenizer adds one."""
    null_tokenizer = getattr(args, "tokenizer_type", None) == "NullTokenizer"
    return args.vocab_size + int(null_tokenizer)


def padded_vocab(args: Args, case: MegatronCase) -> int:
    """megatron.training's rule, tokenizer.py @ core_v0.16.1, unless the case fixes the size."""
    multiple = args.make_vocab_size_divisible_by * case.tp
    return case.padded_vocab or math.ceil(real_vocab(args) / multiple) * multiple


class MLADotProductAttention(DotProductAttention):
    """Takes what MLASelfAttention passes, as Transformer Engine's class does; has no parameters."""

    def __init__(
        self,
        *args: Any,
        k_channels: int | None = None,  # unused: MLASelfAttention passes the scale itself
        v_channels: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if v_channels:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition


def precision(args: Args) -> torch.dtype:
    """What the run computes in."""
    return torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32


def transformer_config(args: Args, case: MegatronCase) -> TransformerConfig:
    """As megatron.training.arguments.core_transformer_config_from_args, every fusion off."""
    kind = MLATransformerConfig if uses_mla(args) else TransformerConfig
    fields = {
        field.name: getattr(args, field.name)
        for field in dataclasses.fields(kind)
        if field.init and hasattr(args, field.name)
    }
    for name in (
        "async_tensor_model_parallel_allreduce",
        "enable_cuda_graph",
        "external_cuda_graph",
        "tp_comm_overlap",
    ):
        fields.pop(name, None)
    if not args.num_experts:  # arguments.py validate_args @ core_v0.16.1; v0.12.3 kept the default
        fields["moe_ffn_hidden_size"] = None
    dtype = precision(args)
    interleaved = case.vpp > 1
    fields |= {
        "tensor_model_parallel_size": case.tp,
        "pipeline_model_parallel_size": case.pp,
        "virtual_pipeline_model_parallel_size": case.vpp if interleaved else None,
        "expert_model_parallel_size": case.ep,
        "expert_tensor_parallel_size": case.etp,
        "context_parallel_size": 1,
        "sequence_parallel": bool(getattr(args, "sequence_parallel", False)) and case.tp > 1,
        "num_layers_in_first_pipeline_stage": case.first_stage,
        "num_layers_in_last_pipeline_stage": case.last_stage,
        "pipeline_model_parallel_layout": None,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "gated_linear_unit": args.swiglu,
        "activation_func": F.silu if args.swiglu else F.gelu,
        "num_moe_experts": args.num_experts,
        "num_query_groups": args.num_query_groups
        if args.group_query_attention
        else args.num_attention_heads,
        "layernorm_zero_centered_gamma": bool(getattr(args, "apply_layernorm_1p", False)),
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        # two directions between the same two ranks would mix in one batch (arguments.py forbids it)
        "batch_p2p_comm": not interleaved,
        "overlap_p2p_comm": interleaved,
        # gloo sends from the tensor itself: freed before an overlapped send ends, it sends rubbish
        "deallocate_pipeline_outputs": not interleaved,
        "use_cpu_initialization": True,
        "variable_seq_lengths": False,
        "timers": None,
        "cuda_graph_impl": "none",
        "moe_grouped_gemm": False,
        "apply_rope_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
    }
    if uses_mla(args):
        fields["rope_type"] = getattr(args, "rope_type", None) or "rope"
    return kind(**fields)


def layer_spec(args: Args, config: TransformerConfig, stage: int | None) -> Any:
    """The local spec (no Transformer Engine) of one virtual stage."""
    if args.num_experts:
        spec = get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization=args.normalization, vp_stage=stage
        )
    else:
        spec = get_gpt_layer_local_spec(
            qk_layernorm=config.qk_layernorm,
            normalization=args.normalization,
            multi_latent_attention=uses_mla(args),
        )
    if uses_mla(args):
        for layer in getattr(spec, "layer_specs", None) or [spec]:
            attention = layer.submodules.self_attention.submodules
            attention.core_attention = MLADotProductAttention
    return spec


def model_chunk(args: Args, case: MegatronCase, config: TransformerConfig, stage: int) -> Any:
    """The GPTModel of one virtual stage, in the dtype of the run."""
    vp_stage = stage if case.vpp > 1 else None
    if case.vpp > 1:
        parallel_state.set_virtual_pipeline_model_parallel_rank(stage)
    spec = layer_spec(args, config, vp_stage)
    mtp = None
    if getattr(args, "mtp_num_layers", None):
        mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False, vp_stage=vp_stage)
    model = GPTModel(
        config,
        spec,
        vocab_size=padded_vocab(args, case),
        max_sequence_length=args.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(False, vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(False, vp_stage),
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        mtp_block_spec=mtp,
        vp_stage=vp_stage,
    )
    model.model_type = None
    for name, param in model.named_parameters():
        param.requires_grad_(not any(n in name for n in getattr(args, "frozen_parameters", ())))
    if precision(args) != torch.float32:
        model = Float16Module(config, model)
        for module in model.modules():
            if hasattr(module, "_maintain_float32_expert_bias"):
                module._maintain_float32_expert_bias()
    for param in model.parameters():
        if not hasattr(param, "tensor_model_parallel"):
            param.tensor_model_parallel = False
            param.partition_dim, param.partition_stride = -1, 1
    return model


def build(args: Args, case: MegatronCase, distributed: str) -> Job:
    """Model, optimizer and schedule of this rank, with random weights."""
    config = transformer_config(args, case)
    chunks = [model_chunk(args, case, config, stage) for stage in range(case.vpp)]
    data_parallel = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=case.bucket_size is not None,
        bucket_size=case.bucket_size,
        use_distributed_optimizer=distributed != "none",
        check_for_nan_in_grad=True,
    )
    chunks = [DistributedDataParallel(config, data_parallel, chunk) for chunk in chunks]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer=getattr(args, "optimizer", "adam"),
            lr=args.lr,
            decoupled_lr=getattr(args, "decoupled_lr", None),
            decoupled_min_lr=getattr(args, "decoupled_min_lr", None),
            min_lr=args.min_lr,
            weight_decay=args.weight_decay,
            adam_beta1=args.adam_beta1,
            adam_beta2=args.adam_beta2,
            adam_eps=args.adam_eps,
            clip_grad=args.clip_grad,
            bf16=args.bf16,
            fp16=args.fp16,
            initial_loss_scale=getattr(args, "initial_loss_scale", 2.0**32),
            min_loss_scale=1.0,
            loss_scale_window=getattr(args, "loss_scale_window", 1000),
            hysteresis=getattr(args, "hysteresis", 2),
            params_dtype=config.params_dtype,
            use_distributed_optimizer=distributed != "none",
        ),
        chunks,
    )
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    if case.bucket_size is not None:
        no_sync = [chunk.no_sync for chunk in chunks]
        config.no_sync_func = no_sync if len(chunks) > 1 else no_sync[0]
    made = schedule_of(args, optimizer, override=case.override_schedule)
    return Job(args, config, chunks, optimizer, made, distributed)


def schedule_of(args: Args, optimizer: Any, *, override: bool = False) -> OptimizerParamScheduler:
    """megatron.training.get_optimizer_param_scheduler; counts are in samples, not in steps."""
    batch = args.global_batch_size
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=(args.lr_warmup_iters or 0) * batch,
        lr_decay_steps=(args.lr_decay_iters or args.train_iters) * batch,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.weight_decay,
        end_wd=args.weight_decay,
        wd_incr_steps=args.train_iters * batch,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=not override,
        override_opt_param_scheduler=override,
    )


def bare(module: Any) -> Any:
    """The GPTModel inside DistributedDataParallel and Float16Module."""
    while hasattr(module, "module"):
        module = module.module
    return module


def members(optimizer: Any) -> list[Any]:
    """The optimizers of a chain (dense, experts) that hold parameters on this rank."""
    chain = getattr(optimizer, "chained_optimizers", [optimizer])
    return [one for one in chain if not one.is_stub_optimizer]
