"""Models of random small configurations, made by transformers: every family, no fixture's sizes.

    python -m peers.hf_random SEED FOLDER [NAME…]

FOLDER/NAME holds config.json as transformers 5 writes it, the weights, and tokens with logits in
expected.safetensors; FOLDER/NAME/v4.json is the same config in the keys of transformers 4.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Config = dict[str, Any]
Pick = random.Random


def base(pick: Pick) -> Config:
    """What all have: sizes that are pairwise different, heads in groups, an odd vocabulary."""
    groups = pick.choice([1, 2, 4])
    heads = groups * pick.choice([1, 2, 3])
    heads = heads if heads % 2 == 0 else 2 * heads
    return {
        "vocab_size": pick.choice([131, 257, 301]),
        "hidden_size": heads * pick.choice([8, 12]),
        "intermediate_size": pick.choice([20, 36, 44]),
        "num_hidden_layers": pick.choice([2, 3, 5]),
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "max_position_embeddings": pick.choice([64, 192]),
        "tie_word_embeddings": pick.random() < 0.5,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip


def with_head_dim(pick: Pick) -> Config:
    """Heads that are not hidden_size / heads wide."""
    return {**base(pick), "head_dim": pick.choice([6, 10, 16])}


def rope(pick: Pick, *, scaled: bool = True) -> Config:
    """Rotary positions: any base, scaled or not."""
    theta = pick.choice([5000.0, 10000.0, 500000.0])
    kind: Config = {"rope_type": "default", "rope_theta": theta}
    if scaled and pick.random() < 0.5:
        kind = pick.choice([
            {"rope_type": "linear", "factor": 2.0},
            {"rope_type": "dynamic", "factor": 3.0},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
             "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
        ]) | {"rope_theta": theta}  # fmt: skip
    return {"rope_parameters": kind}


def window(pick: Pick, layers: int, name: str = "sliding_attention") -> Config:
    """A pattern of layers that look back a few tokens only."""
    kinds = [pick.choice([name, "full_attention"]) for _ in range(layers)]
    return {"layer_types": kinds, "sliding_window": pick.choice([4, 7])}


def experts(pick: Pick, key: str = "num_experts") -> Config:
    """How many experts there are, how wide, and how many are asked."""
    return {
        key: pick.choice([4, 6]),
        "num_experts_per_tok": pick.choice([1, 2, 3]),
        "moe_intermediate_size": pick.choice([8, 12]),  # grouped_mm wants 16 bytes
    }


def llama(pick: Pick) -> Config:
    bias = pick.random() < 0.5
    return {**with_head_dim(pick), **rope(pick), "attention_bias": bias, "mlp_bias": bias}


def mistral(pick: Pick) -> Config:
    return {**with_head_dim(pick), **rope(pick), "sliding_window": pick.choice([None, 5])}


def qwen2(pick: Pick) -> Config:
    out = {**base(pick), **rope(pick)}
    return {**out, "use_sliding_window": True, **window(pick, out["num_hidden_layers"])}


def qwen3(pick: Pick) -> Config:
    return {**with_head_dim(pick), **rope(pick)}


def qwen3_moe(pick: Pick) -> Config:
    out = {**with_head_dim(pick), **rope(pick), **experts(pick)}
    dense = pick.choice([[], [0], [1]])
    return {**out, "mlp_only_layers": dense, "norm_topk_prob": True}


def qwen2_moe(pick: Pick) -> Config:
    out = {**base(pick), **rope(pick), **experts(pick), "shared_expert_intermediate_size": 10}
    return {**out, "decoder_sparse_step": pick.choice([1, 2]), "qkv_bias": pick.random() < 0.5}


def qwen3_next(pick: Pick) -> Config:
    out = {**with_head_dim(pick), **rope(pick, scaled=False), **experts(pick)}
    out["head_dim"] = 16
    layers = out["num_hidden_layers"]
    kinds = [pick.choice(["linear_attention", "full_attention"]) for _ in range(layers)]
    kinds[0] = "linear_attention"
    keys = pick.choice([2, 4])
    return {
        **out, "layer_types": kinds, "shared_expert_intermediate_size": 10,
        "linear_num_key_heads": keys, "linear_num_value_heads": keys * pick.choice([1, 2, 3]),
        "linear_key_head_dim": pick.choice([4, 8]), "linear_value_head_dim": pick.choice([6, 8]),
        "linear_conv_kernel_dim": pick.choice([2, 4]),
    }  # fmt: skip


def mixtral(pick: Pick) -> Config:
    out = {**with_head_dim(pick), **rope(pick)}
    return {**out, "num_local_experts": pick.choice([4, 6]), "num_experts_per_tok": 2}


def olmoe(pick: Pick) -> Config:
    out = {**base(pick), **rope(pick)}
    return {**out, "num_experts": pick.choice([4, 6]), "num_experts_per_tok": 2}


def shared(pick: Pick) -> Config:
    """Leading dense layers, shared experts, experts in groups."""
    return {
        **experts(pick, "n_routed_experts"), "n_shared_experts": pick.choice([1, 2]),
        "first_k_dense_replace": pick.choice([0, 1, 2]), "n_group": 1, "topk_group": 1,
        "num_nextn_predict_layers": 0,
    }  # fmt: skip


def glm4_moe(pick: Pick) -> Config:
    out = {**with_head_dim(pick), **rope(pick, scaled=False), **shared(pick)}
    out["rope_parameters"]["partial_rotary_factor"] = 0.5
    out["head_dim"] = 16
    return {**out, "use_qk_norm": pick.random() < 0.5, "attention_bias": pick.random() < 0.5}


def deepseek_v3(pick: Pick) -> Config:
    out = {**base(pick), **rope(pick, scaled=False), **shared(pick)}
    return {
        **out, "num_key_value_heads": out["num_attention_heads"],
        "q_lora_rank": pick.choice([None, 18]), "kv_lora_rank": pick.choice([14, 22]),
        "qk_nope_head_dim": pick.choice([6, 10]), "qk_rope_head_dim": pick.choice([4, 8]),
        "v_head_dim": pick.choice([8, 12]),
    }  # fmt: skip


def deepseek_v2(pick: Pick) -> Config:
    out = {**deepseek_v3(pick), "topk_method": "greedy"}
    return {**out, "moe_layer_freq": 1}


def gemma(pick: Pick) -> Config:
    return {**with_head_dim(pick), **rope(pick, scaled=False), "tie_word_embeddings": True}


def gemma2(pick: Pick) -> Config:
    out = gemma(pick)
    return {**out, **window(pick, out["num_hidden_layers"]), "query_pre_attn_scalar": 9}


def gemma3_text(pick: Pick) -> Config:
    out = gemma2(pick)
    out["rope_parameters"] = {
        "full_attention": {"rope_type": "default", "rope_theta": 50000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    return out


def gpt_oss(pick: Pick) -> Config:
    out = {**with_head_dim(pick), **rope(pick, scaled=False)}
    out |= window(pick, out["num_hidden_layers"])
    return {**out, "num_local_experts": pick.choice([4, 6]), "num_experts_per_tok": 2}


def minimax_m2(pick: Pick) -> Config:
    out = {**with_head_dim(pick), **rope(pick, scaled=False)}
    return {**out, "num_local_experts": pick.choice([4, 6]), "num_experts_per_tok": 2}


def nemotron(pick: Pick) -> Config:
    bias = pick.random() < 0.5
    out = {**base(pick), **rope(pick, scaled=False), "attention_bias": bias, "mlp_bias": bias}
    out["rope_parameters"]["partial_rotary_factor"] = 0.5
    return {**out, "head_dim": 16}


def gpt2(pick: Pick) -> Config:
    out = base(pick)
    return {
        "vocab_size": out["vocab_size"], "n_embd": out["hidden_size"], "n_layer": 3,
        "n_head": out["num_attention_heads"], "n_positions": 40,
        "n_inner": pick.choice([None, 36]), "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip


def phi3(pick: Pick) -> Config:
    return {**base(pick), **rope(pick, scaled=False)}


def starcoder2(pick: Pick) -> Config:
    return {**base(pick), **rope(pick, scaled=False), "use_bias": pick.random() < 0.5}


def gpt_neox(pick: Pick) -> Config:
    out = {**base(pick), **rope(pick, scaled=False), "use_parallel_residual": True}
    del out["num_key_value_heads"]
    return {**out, "attention_bias": pick.random() < 0.5}


def falcon(pick: Pick) -> Config:
    out = {**base(pick), **rope(pick, scaled=False), "bias": pick.random() < 0.5}
    new = pick.random() < 0.5
    out |= {"new_decoder_architecture": new, "multi_query": not new, "parallel_attn": True}
    out["num_kv_heads"] = out.pop("num_key_value_heads") if new else out["num_attention_heads"]
    out.pop("num_key_value_heads", None)
    return out


def glm4(pick: Pick) -> Config:
    out = {**with_head_dim(pick), **rope(pick, scaled=False), "head_dim": 16}
    out["rope_parameters"]["partial_rotary_factor"] = 0.5
    return {**out, "attention_bias": pick.random() < 0.5}


def granite(pick: Pick) -> Config:
    out = {**base(pick), **rope(pick, scaled=False), "attention_bias": pick.random() < 0.5}
    return {**out, "attention_multiplier": 0.1, "logits_scaling": 3.0}


def olmo2(pick: Pick) -> Config:
    return {**base(pick), **rope(pick, scaled=False)}


FAMILIES: dict[str, Callable[[Pick], Config]] = {
    f.__name__: f
    for f in (
        llama, mistral, qwen2, qwen3, qwen3_moe, qwen2_moe, qwen3_next, mixtral, olmoe, glm4_moe,
        deepseek_v3, deepseek_v2, gemma, gemma2, gemma3_text, gpt_oss, minimax_m2, nemotron, gpt2,
        phi3, starcoder2, gpt_neox, falcon, glm4, granite, olmo2,
    )
}  # fmt: skip


def version_4(config: Config) -> Config:
    """The config in the keys of transformers 4."""
    out = {k: v for k, v in config.items() if k not in ("dtype", "rope_parameters")}
    out["torch_dtype"] = config["dtype"]
    rope_of = config.get("rope_parameters") or {}
    if "rope_theta" in rope_of:
        out["rope_theta"] = rope_of["rope_theta"]
        factor = rope_of.get("partial_rotary_factor")
        out |= {} if factor is None else {"partial_rotary_factor": factor}
        if out["model_type"] == "gpt_neox":
            out |= {"rotary_emb_base": rope_of["rope_theta"], "rotary_pct": factor or 1.0}
        rest = {k: v for k, v in rope_of.items() if k not in ("rope_theta",)}
        plain = rope_of["rope_type"] == "default" and out["model_type"] != "gpt_oss"
        out["rope_scaling"] = None if plain else rest  # GPT-OSS is scaled unless told otherwise
    elif rope_of:  # gemma3: one base per kind of layer
        out["rope_theta"] = rope_of["full_attention"]["rope_theta"]
        out["rope_local_base_freq"] = rope_of["sliding_attention"]["rope_theta"]
    if out["model_type"] == "qwen3_moe":
        out.setdefault("num_experts", out.pop("num_local_experts", None))
    return out


def make(name: str, seed: int, folder: Path) -> None:
    """Write one family's model."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    pick = random.Random(f"{name} {seed}")
    config = AutoConfig.for_model(name, **FAMILIES[name](pick))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for value in (*model.parameters(), *model.buffers()):
            if value.is_floating_point() and value.numel() and value.ndim < 5:
                noise = torch.randn_like(value)
                if value.ndim == 1:
                    value.add_(noise * 0.05)
                elif isinstance(value, torch.nn.Parameter):
                    value.copy_(noise * 0.2)
    bf16 = pick.random() < 0.7
    model = model.to(torch.bfloat16) if bf16 else model
    model.save_pretrained(folder)
    again = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokens = torch.arange(24).reshape(2, 12) * 7 % 101 + 3
    with torch.no_grad():
        logits = again(input_ids=tokens, use_cache=False).logits.float()
    save_file({"input_ids": tokens, "logits": logits}, folder / "expected.safetensors")
    text = json.loads((folder / "config.json").read_text())
    (folder / "v4.json").write_text(json.dumps(version_4(text), indent=2))


if __name__ == "__main__":
    for wanted in sys.argv[3:] or FAMILIES:
        make(wanted, int(sys.argv[1]), Path(sys.argv[2]) / wanted)
