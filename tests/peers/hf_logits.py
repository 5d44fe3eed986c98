"""transformers and megatron-core as judges of a model: what each computes from the same tokens.

    python -m peers.hf_logits CASES RESULTS

A case is {"name", "folder", "expected"?, "megatron"?}: a model folder that transformers loads in
fp32, the file with the tokens and, where they are known, the logits; and the tensors of a one-rank
Megatron model as an .npz by module name, with its args. A result holds the largest difference.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  # numpy reads bfloat16 arrays by it
import numpy as np
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.api import CheckpointException  # no Exception
from transformers import AutoModelForCausalLM

torch.set_num_threads(1)
TOKENS = torch.arange(24).reshape(2, 12) * 7 % 29


def of_transformers(folder: Path, tokens: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    """Logits of the model in a folder, and what it said on loading."""
    model, said = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=tokens, use_cache=False).logits.float()
    left = {k: sorted(map(str, said[k])) for k in ("missing_keys", "unexpected_keys")}
    return logits, left


def config_of(args: dict[str, Any]) -> Any:
    """megatron-core's config for a model with these args, local spec, fp32."""
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    gelu_tanh = lambda x: torch.nn.functional.gelu(x, approximate="tanh")  # noqa: E731
    activation = torch.nn.functional.silu if args.get("swiglu") else gelu_tanh
    moe: dict[str, Any] = {}
    if args.get("num_experts"):
        moe = {
            "num_moe_experts": args["num_experts"],
            "moe_ffn_hidden_size": args["moe_ffn_hidden_size"],
            "moe_router_topk": args["moe_router_topk"],
            "moe_layer_freq": args.get("moe_layer_freq", 1),
            "moe_router_load_balancing_type": "none",
            "moe_router_pre_softmax": args.get("moe_router_pre_softmax", False),
            "moe_token_dispatcher_type": "allgather",  # alltoall makes a CUDA stream
            "add_bias_linear": False,
            "moe_router_score_function": args.get("moe_router_score_function") or "softmax",
            "moe_router_enable_expert_bias": bool(args.get("moe_router_enable_expert_bias")),
            "moe_router_topk_scaling_factor": args.get("moe_router_topk_scaling_factor"),
            "moe_router_num_groups": args.get("moe_router_num_groups"),
            "moe_router_group_topk": args.get("moe_router_group_topk"),
            "moe_shared_expert_intermediate_size": args.get("moe_shared_expert_intermediate_size"),
        }
    kind, latent = TransformerConfig, {}
    if args.get("multi_latent_attention"):
        kind = MLATransformerConfig
        names = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim",
                 "rope_type", "rotary_base", "multi_latent_attention", "rotary_scaling_factor",
                 "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale",
                 "mscale_all_dim")  # fmt: skip
        latent = {name: args[name] for name in names if args.get(name) is not None}
        latent["q_lora_rank"] = args.get("q_lora_rank")
    return kind(
        **{
            "num_layers": args["num_layers"],
            "hidden_size": args["hidden_size"],
            "ffn_hidden_size": args["ffn_hidden_size"],
            "num_attention_heads": args["num_attention_heads"],
            "num_query_groups": args.get("num_query_groups") or args["num_attention_heads"],
            "kv_channels": args.get("kv_channels"),
            "add_bias_linear": args["add_bias_linear"],
            "add_qkv_bias": args["add_qkv_bias"],
            "gated_linear_unit": bool(args.get("swiglu")),
            "activation_func": activation,
            "normalization": args["normalization"],
            "layernorm_epsilon": args["norm_epsilon"],
            "qk_layernorm": bool(args.get("qk_layernorm")),
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "use_cpu_initialization": True,
            "masked_softmax_fusion": False,
            "bias_activation_fusion": False,
            "apply_rope_fusion": False,
            "persist_layer_norm": False,
            **moe,
            **latent,
        }
    )


def load_dist(model: Any, folder: str, wanted: dict[str, torch.Tensor]) -> None:
    """Load a torch_dist checkpoint as Megatron does, over random weights; it must give `wanted`."""
    from megatron.core import dist_checkpointing

    for value in model.parameters():
        value.data.normal_()
    loaded = dist_checkpointing.load(model.sharded_state_dict(), folder)
    model.load_state_dict(loaded, strict=False)
    for name, value in model.state_dict().items():
        if name in wanted and not torch.equal(value[: len(wanted[name])], wanted[name]):
            raise ValueError(f"{name} is not what was written")


def of_megatron(case: dict[str, Any], tokens: torch.Tensor) -> torch.Tensor:
    """Logits of a GPTModel of megatron-core that holds these tensors, on one rank."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    args = case["args"]
    config = config_of(args)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    if args.get("multi_latent_attention"):
        from peers.megatron_model import MLADotProductAttention

        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = MLADotProductAttention
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=case["rows"],
        max_sequence_length=args.get("max_position_embeddings") or 256,
        share_embeddings_and_output_weights=not args["untie_embeddings_and_output_weights"],
        position_embedding_type=args["position_embedding_type"],
        rotary_base=args.get("rotary_base") or 10000,
        rotary_percent=args.get("rotary_percent") or 1.0,
        parallel_output=False,
    ).float()
    held = np.load(case["megatron"])
    state = model.state_dict()
    named = {k: v for k, v in state.items() if not k.endswith("_extra_state") and v is not None}
    if set(named) != set(held.files):
        raise ValueError(f"names differ: {sorted(set(named) ^ set(held.files))[:6]}")
    for name, value in named.items():
        value.copy_(torch.from_numpy(held[name]).reshape(value.shape))
    if case.get("dist"):
        load_dist(model, case["dist"], {k: v.clone() for k, v in named.items()})
    n = tokens.shape[1]
    mask = torch.ones(1, 1, n, n).triu(1).bool()
    positions = torch.arange(n).expand_as(tokens)
    model.eval()
    with torch.no_grad():
        logits: torch.Tensor = model(tokens, positions, mask)
    return logits.float()


def judge(case: dict[str, Any]) -> dict[str, Any]:
    """The differences of one case."""
    folder = Path(case["folder"])
    expected = load_file(case["expected"]) if case.get("expected") else {}
    tokens = expected.get("input_ids", TOKENS)
    logits, said = of_transformers(folder, tokens)
    out: dict[str, Any] = {"name": case["name"], **said, "largest": logits.abs().max().item()}
    if "logits" in expected:
        out["from_expected"] = (logits - expected["logits"]).abs().max().item()
    if case.get("megatron"):
        found = of_megatron(case, tokens)[..., : logits.shape[-1]]
        out["from_megatron"] = (logits - found).abs().max().item()
    return out


def one_rank() -> None:
    """Process groups of a job of one rank."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    from peers import megatron_cpu

    os.environ.setdefault("MASTER_ADDR", "localhost")
    dist.init_process_group("gloo", init_method="tcp://localhost:0", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    megatron_cpu.patch(fused_adam=False)


def main(wanted: Path, results: Path) -> None:
    """Judge every case; an error is a result."""
    cases = json.loads(wanted.read_text())
    if any(c.get("megatron") for c in cases):
        one_rank()
    with results.open("w") as out:
        for case in cases:
            try:
                found = judge(case)
            except (Exception, CheckpointException) as error:  # the test that asked shows it
                found = {"name": case["name"], "error": f"{type(error).__name__}: {error}"}
            out.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
