"""How tensor-parallel ranks share each of Megatron's tensors, by its canonical name."""

from __future__ import annotations

import re
from dataclasses import dataclass

from reshard.errors import LayoutError

from .sizes import TE, Sizes, need


@dataclass(frozen=True, slots=True)
class Rule:
    """How tensor-parallel ranks share a logical tensor."""

    axis: int | None  # the cut axis; None: every rank holds all of it
    gated: bool = False  # [gate; up] on axis 0: each half is cut, a rank holds [gate_r; up_r]
    expert: bool = False  # cut by expert-TP and dealt out by EP, not by TP
    vocab: bool = False  # axis 0 counts vocabulary rows, padded


_NORM = r"(?:[a-z_]*layernorm|final_norm|enorm|hnorm|post_layernorm)"
#: canonical name -> cut axis. Source: partition dims of the modules in tensor_parallel/layers.py,
#: attention.py, multi_latent_attention.py, mlp.py @ core_v0.16.1; every dist/torch fixture pair.
_RULES: tuple[tuple[re.Pattern[str], int | None], ...] = tuple(
    (re.compile(pattern), axis)
    for pattern, axis in (
        (rf"(?:.*\.)?{_NORM}\.(?:weight|bias)", None),
        (r"embedding\.(?:position|tokentype)_embeddings\.weight", None),
        (r"embedding\.word_embeddings\.weight|output_layer\.(?:weight|bias)", 0),
        (r".*_attention\.(?:linear_qkv|linear_q|linear_kv)\.(?:weight|bias)", 0),
        (r".*_attention\.(?:linear_q_proj|linear_q_up_proj|linear_kv_up_proj)\.weight", 0),
        (r".*_attention\.core_attention\.softmax_offset", 0),
        (r".*_attention\.linear_proj\.weight", 1),
        (r".*_attention\.linear_proj\.bias", None),
        (r".*\.mlp\.(?:shared_experts\.|experts\.\d+\.)?linear_fc1\.(?:weight|bias)", 0),
        (r".*\.mlp\.(?:shared_experts\.|experts\.\d+\.)?linear_fc2\.weight", 1),
        (r".*\.mlp\.(?:shared_experts\.|experts\.\d+\.)?linear_fc2\.bias", None),
        (r".*\.mlp\.router\.(?:weight|bias|expert_bias)", None),
        (r".*\.mlp\.shared_experts\.gate_weight", None),
        # gated delta net: torch_dist keeps the sections apart (gated_delta_net.py @ core_v0.16.1)
        (r".*\.self_attention\.in_proj\.weight\.(?:query|key|value|z|beta|alpha)", 0),
        (r".*\.self_attention\.conv1d\.weight\.(?:query|key|value)", 0),
        (r".*\.self_attention\.(?:A_log|dt_bias)", 0),
        (r".*\.self_attention\.out_proj\.weight", 1),
        (r".*\.self_attention\.(?:out_norm\.weight|in_proj\.layer_norm_weight)", None),
        (r"mtp\.layers\.\d+\.eh_proj\.weight", 0),
    )
)
_MLA_DOWN = re.compile(r".*_attention\.(?:linear_q_down_proj|linear_kv_down_proj)\.weight")


def tp_rule(name: str, model: Sizes, mla_down_cut: bool | None = None) -> Rule:
    """How TP (or expert-TP) cuts a canonical tensor.

    MLA's down projections are replicated under the Transformer Engine spec and cut on axis 0 under
    the local one (gpt_layer_specs.py @ core_v0.16.1; fixture h-mla-tp2); core_v0.12.3 cuts them
    under both, so a caller who sees shapes passes `mla_down_cut`.
    Raises LayoutError for a name without a rule (Mamba, gated delta net, latent MoE, …): a guess
    would shuffle its sections.
    """
    if _MLA_DOWN.fullmatch(name):
        cut = need(model.spec, "spec") != TE if mla_down_cut is None else mla_down_cut
        return Rule(0 if cut else None)
    for pattern, axis in _RULES:
        if pattern.fullmatch(name):
            return Rule(
                axis,
                gated=".linear_fc1." in name and need(model.gated, "gated"),
                expert=".mlp.experts." in name,
                vocab=axis == 0 and name.startswith(("embedding.", "output_layer.")),
            )
    raise LayoutError(
        f"{name}: how tensor parallelism cuts this tensor is not known, so it can only be kept at "
        "its own TP size. Convert to the same tp, or from a torch_dist checkpoint."
    )
