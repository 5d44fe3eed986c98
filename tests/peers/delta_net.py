"""megatron-core's GatedDeltaNet as a judge of Qwen3-Next, on a CPU and without Transformer Engine.

    python -m peers.delta_net FOLDER CHECKPOINT ARGS RESULT

FOLDER is the model as transformers loads it, CHECKPOINT what was made of it for Megatron. Layers
are those of the local spec with GatedDeltaNet in the place of attention; its rule is Megatron's own
reference (deterministic mode). Norms are torch's: what Megatron stores as weight - 1 is added up
after loading. RESULT is JSON: the largest difference of logits, and the largest logit.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from peers.hf_logits import config_of, of_transformers, one_rank

NORMS = ("layernorm.weight", "out_norm.weight")


def l2norm(x: torch.Tensor) -> torch.Tensor:
    """As flash-linear-attention's l2norm: x / sqrt(sum x^2 + 1e-6) over the last axis."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def block_spec(config: Any, delta: list[int]) -> Any:
    """The local spec's layers, those of `delta` with a GatedDeltaNet."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    made = []
    for is_delta, layer in zip(delta, spec.layer_specs, strict=True):
        parts, inside = layer.submodules, "linear_qkv"
        if is_delta:
            inside = "in_proj"
            parts = type(parts)(**vars(parts))
            parts.self_attention = ModuleSpec(
                module=GatedDeltaNet,
                submodules=GatedDeltaNetSubmodules(
                    in_proj=ColumnParallelLinear,
                    out_norm=WrappedTorchNorm,
                    out_proj=RowParallelLinear,
                ),
            )
        else:
            parts = type(parts)(**vars(parts))
        parts.sharded_state_dict_keys_map = {
            "input_layernorm.": f"self_attention.{inside}.layer_norm_"
        }
        made.append(type(layer)(module=layer.module, params=layer.params, submodules=parts))
    spec.layer_specs = made
    return spec


def model_of(args: dict[str, Any], rows: int) -> Any:
    """A GPTModel of these args with random weights, in fp32."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.ssm import gated_delta_net

    gated_delta_net.HAVE_FLA = True
    gated_delta_net.l2norm = l2norm  # type: ignore[attr-defined]  # absent without its library
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    config = config_of(args)
    freq = args["linear_attention_freq"]
    delta = freq if isinstance(freq, list) else [
        int((i + 1) % freq != 0) for i in range(args["num_layers"])
    ]  # fmt: skip
    config.linear_attention_freq = delta  # one key per layer
    config.attention_output_gate = True
    config.perform_initialization = False
    config.deterministic_mode = True
    for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim"):
        setattr(config, f"linear_{name}", args[f"linear_{name}"])
    config.linear_conv_kernel_dim = args["linear_conv_kernel_dim"]
    config.moe_shared_expert_intermediate_size = args["moe_shared_expert_intermediate_size"]
    config.moe_shared_expert_gate = True
    return GPTModel(
        config=config,
        transformer_layer_spec=block_spec(config, delta),
        vocab_size=rows,
        max_sequence_length=256,
        share_embeddings_and_output_weights=not args["untie_embeddings_and_output_weights"],
        position_embedding_type="rope",
        rotary_base=args["rotary_base"],
        rotary_percent=args["rotary_percent"],
        parallel_output=False,
    ).float()


def logits_of(args: dict[str, Any], checkpoint: str, tokens: torch.Tensor) -> torch.Tensor:
    """What Megatron computes from the checkpoint."""
    from megatron.core import dist_checkpointing

    model = model_of(args, args["padded_vocab_size"])
    with torch.no_grad():
        for value in model.parameters():
            value.normal_()
    wanted = {k: v for k, v in model.sharded_state_dict().items() if "_extra_state" not in k}
    model.load_state_dict(dist_checkpointing.load(wanted, checkpoint), strict=False)
    n = tokens.shape[1]
    mask = torch.ones(1, 1, n, n).triu(1).bool()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.endswith(NORMS):
                value.add_(1.0)
        logits: torch.Tensor = model.eval()(tokens, torch.arange(n).expand_as(tokens), mask)
    return logits.float()


def main(folder: Path, checkpoint: Path, args: Path, result: Path) -> None:
    """Compare."""
    one_rank()
    tokens = load_file(folder / "expected.safetensors")["input_ids"]
    theirs, _ = of_transformers(folder, tokens)
    found = logits_of(json.loads(args.read_text()), str(checkpoint), tokens)
    apart = (found[..., : theirs.shape[-1]] - theirs).abs().max().item()
    result.write_text(json.dumps({"apart": apart, "largest": theirs.abs().max().item()}))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
