"""The names of Megatron's models from before megatron-core: nested dicts, other module names.

`model` is {"language_model": {"embedding": {"word_embeddings": {"weight": …}}, "encoder": {…}}, …};
`flat` joins the keys with dots, `current` gives the name that megatron-core's local spec has for
such a key.
Source: megatron/legacy/model/{gpt_model,language_model,transformer}.py @ core_v0.12.3 (encoder,
self_attention, input_norm), megatron/model/ @ v2.0, v1.0 (transformer, attention, input_layernorm);
fixture e-legacy-tp2pp2.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from reshard.errors import FormatError

_ROOTS = ("language_model", "word_embeddings_for_head")
_LAYER = re.compile(r"language_model\.(?:encoder|transformer)\.layers\.(\d+)\.(.+)")
_MODULES = {
    "input_norm": "input_layernorm",
    "input_layernorm": "input_layernorm",
    "post_attention_norm": "pre_mlp_layernorm",
    "post_attention_layernorm": "pre_mlp_layernorm",
    "self_attention.query_key_value": "self_attention.linear_qkv",
    "attention.query_key_value": "self_attention.linear_qkv",
    "self_attention.dense": "self_attention.linear_proj",
    "attention.dense": "self_attention.linear_proj",
    "self_attention.q_layernorm": "self_attention.q_layernorm",
    "self_attention.k_layernorm": "self_attention.k_layernorm",
    "mlp.dense_h_to_4h": "mlp.linear_fc1",
    "mlp.dense_4h_to_h": "mlp.linear_fc2",
}
_WHOLE = {
    "language_model.embedding.word_embeddings.weight": "embedding.word_embeddings.weight",
    "language_model.embedding.position_embeddings.weight": "embedding.position_embeddings.weight",
    "language_model.output_layer.weight": "output_layer.weight",
    "word_embeddings_for_head.weight": "output_layer.weight",
}
_NORM = re.compile(r"language_model\.(?:encoder|transformer)\.final_(?:norm|layernorm)\.(.+)")


def is_nested(model: Mapping[object, object]) -> bool:
    """Whether a model dict is of such a model."""
    return any(isinstance(model.get(root), Mapping) for root in _ROOTS)


def flat(model: Mapping[object, object]) -> dict[object, object]:
    """The model dict with the keys on the way to each tensor joined by dots, in order."""
    return dict(_flat(model, ""))


def _flat(model: Mapping[object, object], prefix: str) -> Iterator[tuple[object, object]]:
    for key, value in model.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def current(key: str) -> str:
    """The name that megatron-core has for a joined key of such a model; other keys as they are.

    Raises FormatError for a module of such a model that is not known here (BERT's heads, T5's
    cross attention, SwitchMLP's experts, Transformer Engine's whole layers).
    """
    if not key.startswith(tuple(f"{root}." for root in _ROOTS)):
        return key
    if key in _WHOLE:
        return _WHOLE[key]
    if m := _NORM.fullmatch(key):
        return f"decoder.final_layernorm.{m[1]}"
    if m := _LAYER.fullmatch(key):
        module, _, part = m[2].rpartition(".")
        if module in _MODULES:
            return f"decoder.layers.{m[1]}.{_MODULES[module]}.{part}"
        if part == "_extra_state":
            return f"decoder.layers.{m[1]}.{module}.{part}"
    if not is_old(key):
        return key
    raise FormatError(
        f"{key}: this module of a model from before megatron-core is not known; GPT models are "
        "read. Convert it in the Megatron that wrote it (--ckpt-convert-format)."
    )


def is_old(key: str) -> bool:
    """Whether only a model from before megatron-core has this key.

    A wrapper (VLM, NeMo) also says `language_model.`, before megatron-core's own names.
    """
    rest = key.removeprefix("language_model.")
    return not rest.startswith(("decoder.", "embedding.", "output_layer.", "mtp."))
