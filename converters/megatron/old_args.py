"""What old args leave out: told by --from, or by the tensors themselves; nothing is guessed.

v2.0 had no --swiglu, --disable-bias-linear, --normalization, --position-embedding-type and no
untied embeddings: names and shapes of what is stored say each of these.
Source: megatron/arguments.py @ v2.0, v1.0.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from reshard.errors import FormatError, UsageError
from reshard.format import OpenOptions

Shapes = Mapping[str, tuple[int, ...]]


def _number(text: str) -> int:
    if not re.fullmatch(r"\d{1,18}", text):
        raise UsageError(f"{text!r} is not a whole number")
    return int(text)


def _truth(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise UsageError(f"{text!r} is neither true nor false")
    return text.lower() == "true"


#: The args that may be given as --from NAME=VALUE, dashes as Megatron's options have them or not.
GIVEN: Mapping[str, Callable[[str], object]] = {
    **dict.fromkeys(
        (
            "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads",
            "num_query_groups", "kv_channels", "max_position_embeddings",
            "make_vocab_size_divisible_by", "num_experts", "moe_ffn_hidden_size",
            "moe_shared_expert_intermediate_size", "q_lora_rank", "kv_lora_rank", "qk_head_dim",
            "qk_pos_emb_head_dim", "v_head_dim", "mtp_num_layers", "seed", "padded_vocab_size",
            "ddp_bucket_size",
        ),
        _number,
    ),
    **dict.fromkeys(
        (
            "swiglu", "add_bias_linear", "untie_embeddings_and_output_weights",
            "multi_latent_attention", "qk_layernorm", "overlap_grad_reduce",
        ),
        _truth,
    ),
    **dict.fromkeys(("normalization", "position_embedding_type", "transformer_impl"), str),
}  # fmt: skip


def given(args: Mapping[str, object], options: OpenOptions) -> dict[str, object]:
    """The args, with what --from and --vocab-size say where they say nothing.

    Raises UsageError for an option that is no arg, FormatError for one that the args contradict.
    """
    out = dict(args)
    for key, text in options.given.options.items():
        name = key.replace("-", "_")
        if name not in GIVEN:
            raise UsageError(
                f"--from {key}={text}: no argument of Megatron that a checkpoint's layout depends "
                f"on. Known: {', '.join(sorted(GIVEN))}"
            )
        value = GIVEN[name](text)
        if out.get(name) not in (None, value):
            raise FormatError(
                f"--from says {name}={text}, the checkpoint's args say {name}={out[name]}"
            )
        out[name] = value
    if out.get("ddp_bucket_size") and out.get("overlap_grad_reduce") is None:
        out["overlap_grad_reduce"] = True  # buckets are cut only then
    if options.vocab_size is not None and out.get("vocab_size") is None:
        # Megatron's NullTokenizer counts one more (sizes._vocab)
        null = out.get("tokenizer_type") == "NullTokenizer"
        out["vocab_size"] = options.vocab_size - int(null)
    return out


def told(
    args: Mapping[str, object], shapes: Shapes, head: Shapes, tp: int | None
) -> dict[str, object]:
    """The args that the stored tensors tell and the args do not hold.

    `shapes`: of the first stage's tensors on one rank, by megatron-core's names; `head`: of the
    last stage's; old names there are still `word_embeddings_for_head.weight`.
    """
    found: dict[str, object] = {}
    layer = {
        name.split(".", 3)[3]: shape
        for name, shape in shapes.items()
        if re.match(r"decoder\.layers\.0\.", name)
    }
    if layer:
        found["add_bias_linear"] = "self_attention.linear_proj.bias" in layer
        found["normalization"] = "LayerNorm" if _has_norm_bias(layer) else "RMSNorm"
    found |= _head_dim(args, layer, tp)
    up, down = layer.get("mlp.linear_fc1.weight"), layer.get("mlp.linear_fc2.weight")
    if up is not None and down is not None and up[0] in (down[1], 2 * down[1]):
        found["swiglu"] = up[0] == 2 * down[1]
    if "embedding.word_embeddings.weight" in shapes:
        learned = "embedding.position_embeddings.weight" in shapes
        found["hidden_size"] = shapes["embedding.word_embeddings.weight"][1]
        if learned:
            found["position_embedding_type"] = "learned_absolute"
            found["max_position_embeddings"] = shapes["embedding.position_embeddings.weight"][0]
    if "word_embeddings_for_head.weight" in head:
        found["untie_embeddings_and_output_weights"] = False
    elif "language_model.output_layer.weight" in head:
        found["untie_embeddings_and_output_weights"] = True
    elif "embedding.word_embeddings.weight" in head:  # one stage: a head of its own or none
        found["untie_embeddings_and_output_weights"] = "output_layer.weight" in head
    return {k: v for k, v in found.items() if args.get(k) is None}


def _has_norm_bias(layer: Shapes) -> bool:
    return any(name.endswith(("layernorm.bias", "layer_norm_bias")) for name in layer)


def _head_dim(args: Mapping[str, object], layer: Shapes, tp: int | None) -> dict[str, object]:
    """kv_channels, by the rows of a rank's fused QKV."""
    heads, rows = args.get("num_attention_heads"), layer.get("self_attention.linear_qkv.weight")
    groups = args.get("num_query_groups") if args.get("group_query_attention") else heads
    if not isinstance(heads, int) or not isinstance(groups, int) or rows is None or tp is None:
        return {}
    head_dim, over = divmod(rows[0] * tp, heads + 2 * groups)
    return {} if over or not head_dim else {"kv_channels": head_dim}
