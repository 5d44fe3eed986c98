"""The sizes and structure of a GPT model, from the `args` that Megatron saves with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import TypeVar

from reshard.errors import FormatError

_T = TypeVar("_T")

LOCAL, TE = "local", "transformer_engine"
SEQUENTIAL, TE_GROUPED, LEGACY_GROUPED = "sequential", "te_grouped", "legacy_grouped"

#: field of Sizes -> the argument that gives it, for messages
_ARGUMENT = {
    "layers": "num_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "query_groups": "num_query_groups",
    "head_dim": "kv_channels",
    "ffn": "ffn_hidden_size",
    "gated": "swiglu",
    "experts": "num_experts",
    "moe_ffn": "moe_ffn_hidden_size",
    "shared_ffn": "moe_shared_expert_intermediate_size",
    "q_rank": "q_lora_rank",
    "kv_rank": "kv_lora_rank",
    "qk_dim": "qk_head_dim",
    "qk_rope_dim": "qk_pos_emb_head_dim",
    "v_dim": "v_head_dim",
    "tied": "untie_embeddings_and_output_weights",
    "padded_vocab": "padded_vocab_size",
    "vocab_divisor": "make_vocab_size_divisible_by",
    "positions": "position_embedding_type",
    "max_positions": "max_position_embeddings",
    "spec": "transformer_impl",
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """What decides the names, shapes and order of a model's tensors.

    None: the args do not say; `need` turns that into an error that names the option. Features that
    a Megatron version did not have (its args lack the field) are off.
    Source: megatron/training/arguments.py and transformer_config.py @ core_v0.16.1; the args of
    every fixture in fixtures/megatron.
    """

    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    query_groups: int | None = None
    head_dim: int | None = None
    ffn: int | None = None
    gated: bool | None = None
    add_bias: bool | None = None
    qkv_bias: bool = False
    normalization: str | None = None
    qk_layernorm: bool = False
    sinks: bool = False  # softmax_type "learnable": core_attention.softmax_offset
    output_gate: bool = False  # attention_output_gate: linear_qkv holds q, gate, k, v per group
    experts: int | None = None  # None: a dense model
    moe_ffn: int | None = None
    moe_layers: tuple[bool, ...] = ()  # one per layer; all False for a dense model
    shared_ffn: int | None = None
    shared_gate: bool = False
    expert_bias: bool = False  # the fp32 buffer mlp.router.expert_bias
    experts_form: str = SEQUENTIAL  # module class of the experts, which legacy names show
    mla: bool = False
    q_rank: int | None = None  # None with mla: one linear_q_proj
    kv_rank: int | None = None
    qk_dim: int | None = None
    qk_rope_dim: int | None = None
    v_dim: int | None = None
    delta_layers: tuple[bool, ...] = ()  # one per layer: gated delta net in place of attention
    delta_heads: tuple[int, int] | None = None  # of its keys and values
    mtp_layers: int = 0
    tied: bool | None = None
    vocab: int | None = None  # the true one
    padded_vocab: int | None = None  # what the run that saved the args stored
    vocab_divisor: int | None = None
    positions: str | None = None
    max_positions: int | None = None
    spec: str | None = None  # LOCAL or TE, another spelling as it stands
    homogeneous: bool = True  # torch_dist stacks the layers
    unknown: tuple[str, ...] = ()  # args that change the module tree in ways not known here

    def need_known(self) -> Sizes:
        """These sizes, or a FormatError naming the features whose module order is not known."""
        found = self.unknown
        if any(self.delta_layers):
            found += ("args.experimental_attention_variant='gated_delta_net'",)
        if found:
            raise FormatError(
                f"the args ask for {', '.join(found)}: the module order of such a model "
                "is not known here. Use torch_dist without a bucketed optimizer, whose files name "
                "every tensor."
            )
        return self


def need(value: _T | None, field: str) -> _T:
    """`value`, or a FormatError naming the argument that would have given the field."""
    if value is None:
        name = _ARGUMENT.get(field, field)
        how = f"--from {name}=… (Megatron's --{name.replace('_', '-')})"
        raise FormatError(
            f"the checkpoint's args do not say {field}. Give "
            f"{'--vocab-size' if field == 'vocab' else how}."
        )
    return value


def sizes(args: Mapping[str, object]) -> Sizes:
    """The sizes that a checkpoint's args (the fields of its argparse.Namespace) describe.

    Raises FormatError for a field that holds something else than Megatron writes there.
    """
    layers = _int(args, "num_layers", "encoder_num_layers")
    heads = _int(args, "num_attention_heads")
    hidden = _int(args, "hidden_size")
    experts = _int(args, "num_experts") or _int(args, "num_moe_experts") or None
    groups = _int(args, "num_query_groups")
    if groups is None or args.get("group_query_attention") is False:
        groups = heads  # transformer_config.py: None means multi-head attention
    head_dim = _int(args, "kv_channels")
    if head_dim is None and hidden is not None and heads:
        head_dim = hidden // heads  # transformer_config.py __post_init__
    ffn = _int(args, "ffn_hidden_size")
    spec = _spec(args)
    mla = _flag(args, "multi_latent_attention")
    untied = _bool(args, "untie_embeddings_and_output_weights")
    return Sizes(
        layers=layers,
        hidden=hidden,
        heads=heads,
        query_groups=groups,
        head_dim=head_dim,
        ffn=ffn,
        gated=_gated(args),
        add_bias=_bool(args, "add_bias_linear"),
        qkv_bias=_flag(args, "add_qkv_bias"),
        normalization=_str(args, "normalization"),
        qk_layernorm=_flag(args, "qk_layernorm"),
        sinks=_str(args, "softmax_type") == "learnable",
        output_gate=_flag(args, "attention_output_gate"),
        experts=experts,
        moe_ffn=(_int(args, "moe_ffn_hidden_size") or ffn) if experts else None,
        moe_layers=_moe_layers(args, layers, experts),
        shared_ffn=_int(args, "moe_shared_expert_intermediate_size") if experts else None,
        shared_gate=_flag(args, "moe_shared_expert_gate", "moe_use_shared_expert_gate"),
        expert_bias=_flag(args, "moe_router_enable_expert_bias"),
        experts_form=_experts_form(args, spec),
        mla=mla,
        q_rank=_int(args, "q_lora_rank") if mla else None,
        kv_rank=_int(args, "kv_lora_rank") if mla else None,
        qk_dim=_int(args, "qk_head_dim") if mla else None,
        qk_rope_dim=_int(args, "qk_pos_emb_head_dim") if mla else None,
        v_dim=_int(args, "v_head_dim") if mla else None,
        delta_layers=_delta_layers(args, layers),
        delta_heads=_delta_heads(args),
        mtp_layers=_int(args, "mtp_num_layers") or 0,
        tied=None if untied is None else not untied,
        vocab=_vocab(args),
        padded_vocab=_int(args, "padded_vocab_size"),
        vocab_divisor=_int(args, "make_vocab_size_divisible_by"),
        positions=_str(args, "position_embedding_type"),
        max_positions=_int(args, "max_position_embeddings"),
        spec=spec,
        homogeneous=_homogeneous(args),
        unknown=_unknown(args),
    )


def padded_vocab(vocab: int, divisor: int, tp: int) -> int:
    """The vocabulary rows Megatron stores: up to a multiple of divisor * tp.

    Source: megatron/training/tokenizer/tokenizer.py _vocab_size_with_padding @ core_v0.16.1;
    fixtures a-tp4pp2 (512 rows), a-tp2pp2vpp2 (256), a-tp1pp1 (128), all of 121 tokens.
    """
    return ceil(vocab / (divisor * tp)) * divisor * tp


def padded_rows(model: Sizes, tp: int) -> int:
    """The rows of embedding and output layer at this tensor-parallel size."""
    vocab = need(model.vocab, "vocab")
    divisor = need(model.vocab_divisor, "vocab_divisor")
    if divisor < 1:
        raise FormatError(f"make_vocab_size_divisible_by is {divisor} in the checkpoint's args")
    return padded_vocab(vocab, divisor, tp)


def _int(args: Mapping[str, object], *keys: str) -> int | None:
    for key in keys:
        value = args.get(key)
        if isinstance(value, bool) or not isinstance(value, int | None):
            raise FormatError(f"args.{key} is {value!r}, not a whole number")
        if value is not None:
            return value
    return None


def _bool(args: Mapping[str, object], key: str) -> bool | None:
    value = args.get(key)
    if isinstance(value, bool | None):
        return value
    raise FormatError(f"args.{key} is {value!r}, neither True nor False")


def _flag(args: Mapping[str, object], *keys: str) -> bool:
    return any(_bool(args, key) for key in keys)


def _str(args: Mapping[str, object], key: str) -> str | None:
    value = args.get(key)
    return value if isinstance(value, str) else None


def _gated(args: Mapping[str, object]) -> bool | None:
    """Whether linear_fc1 holds a gate: args.swiglu or quick_geglu set gated_linear_unit.

    Source: arguments.py core_transformer_config_from_args @ core_v0.16.1.
    """
    if _flag(args, "swiglu", "quick_geglu", "gated_linear_unit"):
        return True
    return _bool(args, "swiglu")


def _spec(args: Mapping[str, object]) -> str | None:
    return _str(args, "transformer_impl")


def _experts_form(args: Mapping[str, object], spec: str | None) -> str:
    """moe_module_specs.py @ core_v0.16.1: grouped GEMM is TEGroupedMLP only under the TE spec."""
    if not _flag(args, "moe_grouped_gemm"):
        return SEQUENTIAL
    if spec == TE and not _flag(args, "moe_use_legacy_grouped_gemm"):
        return TE_GROUPED
    return LEGACY_GROUPED


def _pattern(args: Mapping[str, object], key: str) -> int | list[int] | None:
    """An int, or a list of ints, of an argument that Megatron also takes as "([0]*3+[1]*61)".

    The string form is evaluated by Megatron before the args are saved; a string is refused.
    """
    value = args.get(key)
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [int(_one(v, key)) for v in value]
    raise FormatError(f"args.{key} is {value!r}, neither a number nor a list")


def _one(value: object, key: str) -> int:
    if isinstance(value, int) and value in (0, 1):
        return value
    raise FormatError(f"args.{key} holds {value!r}; a layer pattern holds 0 and 1")


def _moe_layers(
    args: Mapping[str, object], layers: int | None, experts: int | None
) -> tuple[bool, ...]:
    """Which layers are MoE.

    Source: gpt_layer_specs.py get_gpt_decoder_layer_specs @ core_v0.16.1.
    """
    if layers is None or not experts:
        return (False,) * (layers or 0)
    pattern = _pattern(args, "moe_layer_freq")
    if pattern is None:
        return (True,) * layers  # before --moe-layer-freq every layer was MoE
    if isinstance(pattern, int):
        if pattern < 1:
            raise FormatError(f"args.moe_layer_freq is {pattern}; it must be at least 1")
        return tuple(i % pattern == 0 for i in range(layers))
    if len(pattern) != layers:
        raise FormatError(
            f"args.moe_layer_freq names {len(pattern)} layers; the model has {layers}"
        )
    return tuple(bool(x) for x in pattern)


_DELTA = "gated_delta_net"


def _delta_layers(args: Mapping[str, object], layers: int | None) -> tuple[bool, ...]:
    """Which layers are a gated delta net.

    Source: experimental_attention_variant_module_specs.py get_linear_attention_pattern
    @ core_v0.16.1.
    """
    pattern = _pattern(args, "linear_attention_freq")
    if args.get("experimental_attention_variant") != _DELTA or layers is None or pattern is None:
        return ()
    if isinstance(pattern, int):
        if pattern < 1:
            raise FormatError(f"args.linear_attention_freq is {pattern}; it must be at least 1")
        return tuple((i + 1) % pattern != 0 for i in range(layers))
    if len(pattern) != layers:
        raise FormatError(
            f"args.linear_attention_freq names {len(pattern)} layers; the model has {layers}"
        )
    return tuple(bool(x) for x in pattern)


def _delta_heads(args: Mapping[str, object]) -> tuple[int, int] | None:
    keys = _int(args, "linear_num_key_heads")
    values = _int(args, "linear_num_value_heads")
    return None if keys is None or values is None else (keys, values)


def _homogeneous(args: Mapping[str, object]) -> bool:
    """Whether torch_dist stacks the layers under one key.

    Source: transformer_block.py TransformerBlock.sharded_state_dict @ core_v0.16.1.
    """
    for key in ("moe_layer_freq", "linear_attention_freq"):
        pattern = _pattern(args, key)
        if isinstance(pattern, list) or (pattern or 0) > 1:
            return False
    return not (
        args.get("heterogeneous_layers_config_path")
        or args.get("heterogeneous_layers_config_encoded_json")
        or _flag(args, "heterogeneous_block_specs", "hetereogenous_dist_checkpoint")
        or _flag(args, "is_hybrid_model")
    )


def _unknown(args: Mapping[str, object]) -> tuple[str, ...]:
    """Set arguments that add, drop or reorder modules in ways that names.py does not list."""
    keys = (
        "spec",
        "experimental_attention_variant",
        "linear_attention_freq",
        "heterogeneous_layers_config_path",
        "heterogeneous_layers_config_encoded_json",
        "hybrid_override_pattern",
        "moe_latent_size",
        "use_kitchen",
        "is_hybrid_model",
        "use_legacy_models",
        "use_te_op_fuser",
    )
    known = {"experimental_attention_variant": _DELTA}
    if args.get("experimental_attention_variant") == _DELTA:
        known["linear_attention_freq"] = str(args.get("linear_attention_freq"))
    found = [
        f"args.{key}={args[key]!r}"
        for key in keys
        if args.get(key) and str(args[key]) != known.get(key)
    ]
    if _flag(args, "use_transformer_engine_op_fuser"):
        found.append("args.use_transformer_engine_op_fuser")
    return tuple(found)


def _vocab(args: Mapping[str, object]) -> int | None:
    """The true vocabulary; the NullTokenizer adds one token for the end of a document.

    Source: megatron/training/tokenizer NullTokenizer @ core_v0.16.1; fixture a-tp4pp2 (120 + 1).
    """
    vocab = _int(args, "vocab_size")
    if vocab is None:
        return None
    return vocab + (_str(args, "tokenizer_type") == "NullTokenizer")
