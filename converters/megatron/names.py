"""How Megatron spells each tensor: torch_dist keys and legacy module names.

The canonical name is per layer and per expert, with global indices, and free of the layer spec:
norms stand alone (`decoder.layers.3.input_layernorm.weight`), an expert is
`decoder.layers.3.mlp.experts.5.linear_fc1.weight`, the inner layer of an MTP layer is
`mtp.layers.0.transformer_layer.…`. Anything else keeps Megatron's own spelling.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from reshard.errors import FormatError, LayoutError

from . import nested_names
from .sizes import LEGACY_GROUPED, SEQUENTIAL, TE, TE_GROUPED, Sizes, need

EXTRA_STATE = "_extra_state"

#: A norm that Transformer Engine computes inside the linear after it: fused spelling -> canonical.
#: torch_dist uses these spellings for the local spec too (sharded_state_dict_keys_map).
#: Source: gpt_layer_specs.py @ core_v0.16.1; fixtures a-tp4pp2 (local), c-pp2ep2 (MoE).
FUSED = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
    "self_attention.linear_q_up_proj.layer_norm_": "self_attention.q_layernorm.",
    "self_attention.linear_kv_up_proj.layer_norm_": "self_attention.kv_layernorm.",
}
_SPLIT = {alone: fused for fused, alone in FUSED.items()}

_WRAPPERS = re.compile(r"(?:(?:module|model|language_model)\.)*")
_LAYERED = re.compile(r"(decoder|mtp)\.layers\.(?:(\d+)\.)?(?!\d+\.)(.+)")
_SHARD = re.compile(r"(.+)/shard_([\d.]+)_[\d.]+")
_STACKED_EXPERT = re.compile(r"mlp\.experts\.experts\.(?:(\d+)\.)?(.+)")
_CANONICAL = re.compile(r"(decoder|mtp)\.layers\.(\d+)\.(.+)")
_CANONICAL_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(.+)")
INNER = ("transformer_layer.", "mtp_model_layer.")


# --- torch_dist keys -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DistName:
    """A torch_dist key of the model, taken apart.

    The stored tensor has one leading axis for `layer_axis` (stacked layers), then one for
    `expert_axis`, before the axes of the logical tensor. An `_extra_state` object has no axes but
    the same `index` in its /shard_ suffix.
    """

    key: str  # as stored, without a /shard_ suffix
    template: str  # canonical, with {layer} and {expert} where an axis stands for them
    layer_axis: bool = False
    expert_axis: bool = False
    index: tuple[int, ...] = ()  # of an _extra_state object: which layer, which expert

    @property
    def axes(self) -> int:
        """Leading axes that the logical tensor does not have."""
        return self.layer_axis + self.expert_axis

    @property
    def extra_state(self) -> bool:
        """Whether this is an object of Transformer Engine, not a tensor."""
        return self.template.endswith(EXTRA_STATE)

    def canonical(self, index: Sequence[int] = ()) -> str:
        """The logical tensor at this index of the leading axes."""
        if len(index) != self.axes:
            raise FormatError(f"{self.key}: {self.axes} leading axes, not {len(index)}")
        at = list(index)
        name = self.template
        if self.layer_axis:
            name = name.replace("{layer}", str(at.pop(0)), 1)
        if self.expert_axis:
            name = name.replace("{expert}", str(at.pop(0)), 1)
        return name


def from_dist(key: str) -> DistName:
    """The parts of a model key (without `optimizer.state.exp_avg.` and the like).

    Unknown parameters are taken as they stand: per layer below `decoder.layers`, whole elsewhere.
    """
    index: tuple[int, ...] = ()
    if m := _SHARD.fullmatch(key):
        key, index = m[1], tuple(int(n) for n in m[2].split("."))
    bare = _unwrapped(key)
    m = _LAYERED.fullmatch(bare)
    if m is None:
        return DistName(key, bare, index=index)
    block, layer, sub = m.groups()
    layer_axis = layer is None
    inner, sub = _outer(sub) if block == "mtp" else ("", sub)
    sub = _alone(sub)
    expert_axis = False
    if e := _STACKED_EXPERT.fullmatch(sub):
        expert_axis = e[1] is None
        sub = f"mlp.experts.{e[1] or '{expert}'}.{e[2]}"
    template = f"{block}.layers.{layer or '{layer}'}.{inner}{sub}"
    return DistName(key, template, layer_axis, expert_axis, index)


@dataclass(frozen=True, slots=True)
class Style:
    """How one torch_dist checkpoint spells what the canonical names leave open."""

    stacked: bool = True  # one key for all layers
    #: norms spelled inside a linear, as "dense input_layernorm" or "moe pre_mlp_layernorm"
    fused: frozenset[str] = frozenset()
    moe_layers: frozenset[int] = frozenset()
    all_moe: bool = False  # every layer is MoE (known only so for stacked layers)
    mtp_moe: bool = False  # the inner layers of MTP are
    mtp_inner: str = "transformer_layer."
    prefix: str = ""  # of a wrapper, as `module.`
    expert_keys: bool = False  # singleton_local_shards: one key per expert

    def kind(self, block: str, layer: int) -> str:
        """ "moe" or "dense"."""
        moe = self.mtp_moe if block == "mtp" else self.all_moe or layer in self.moe_layers
        return "moe" if moe else "dense"


def style_of_keys(keys: Iterable[str]) -> Style:
    """The style that the model keys of a checkpoint show.

    Raises FormatError if they contradict themselves: some layers stacked and some not.
    """
    stacked: set[bool] = set()
    spelled: set[tuple[str, str, bool]] = set()  # (block and layer, norm, fused)
    moe: set[str] = set()
    inner, prefix, expert_keys = INNER[0], "", False
    for key in keys:
        key = key.partition("/shard_")[0]
        bare = _unwrapped(key)
        m = _LAYERED.fullmatch(bare)
        if m is None:
            continue
        prefix = key[: len(key) - len(bare)]
        block, layer, sub = m.groups()
        if block == "decoder":
            stacked.add(layer is None)
        else:
            inner = next((i for i in INNER if sub.startswith(i)), inner)
            sub = _outer(sub)[1]
        where = block if block == "mtp" else f"decoder {layer or '*'}"
        if sub.startswith(("mlp.router.", "mlp.experts.")):
            moe.add(where)
            expert_keys |= bool(re.match(r"mlp\.experts\.experts\.\d+\.", sub))
        for fused, alone in FUSED.items():
            if sub.startswith((fused, alone)):
                spelled.add((where, alone, sub.startswith(fused)))
    if len(stacked) > 1:
        raise FormatError("some decoder layers are stacked under one key and some are not")
    names: dict[str, set[bool]] = {}
    for where, norm, fused_here in spelled:
        kind = "moe" if where in moe else "dense"
        names.setdefault(f"{kind} {norm[:-1]}", set()).add(fused_here)
    mixed = sorted(name for name, seen in names.items() if len(seen) > 1)
    if mixed:
        raise FormatError(f"the norms are spelled in two ways: {', '.join(mixed)}")
    return Style(
        stacked=stacked != {False},
        fused=frozenset(name for name, seen in names.items() if True in seen),
        moe_layers=frozenset(int(w[8:]) for w in moe if w.startswith("decoder ") and w[8:] != "*"),
        all_moe="decoder *" in moe,
        mtp_moe="mtp" in moe,
        mtp_inner=inner,
        prefix=prefix,
        expert_keys=expert_keys,
    )


def style_of_sizes(model: Sizes, spec: str | None = None) -> Style:
    """The style in which Megatron itself saves a model of these sizes.

    The local spec maps norms to the fused spelling, for MoE layers too, except with MLA; the
    Transformer Engine spec fuses what it computes fused. GPT keeps `transformer_layer` on disk also
    where the module is called mtp_model_layer (multi_token_prediction.py @ core_v0.19.0).
    Source: gpt_layer_specs.py, transformer_block.py @ core_v0.16.1; fixtures c-pp2ep2, h-mla-tp2.
    """
    spec = spec or need(model.spec, "spec")
    if spec == TE:
        fused = fused_modules(model)
    elif model.mla:
        fused = frozenset()
    else:
        norms = ("input_layernorm", "pre_mlp_layernorm")
        fused = frozenset(f"{kind} {norm}" for kind in ("dense", "moe") for norm in norms)
    moe = frozenset(i for i, is_moe in enumerate(model.moe_layers) if is_moe)
    return Style(
        stacked=model.homogeneous,
        fused=fused,
        moe_layers=moe,
        all_moe=bool(moe) and len(moe) == len(model.moe_layers),
        mtp_moe=bool(model.moe_layers) and model.moe_layers[-1],
    )


def to_dist(name: str, style: Style) -> tuple[str, tuple[int, ...]]:
    """(key, index of the leading axes) under which a checkpoint of this style stores a tensor."""
    m = _CANONICAL.fullmatch(name)
    if m is None:
        return style.prefix + name, ()
    block, layer, sub = m[1], int(m[2]), m[3]
    inner, sub = _outer(sub) if block == "mtp" else ("", sub)
    sub = _inside(sub, style.fused, style.kind(block, layer))
    index: tuple[int, ...] = ()
    if e := _CANONICAL_EXPERT.fullmatch(sub):
        if style.expert_keys:
            sub = f"mlp.experts.experts.{e[1]}.{e[2]}"
        else:
            index = (int(e[1]),)
            sub = f"mlp.experts.experts.{e[2]}"
    if block == "decoder" and style.stacked:
        return f"{style.prefix}decoder.layers.{sub}", (layer, *index)
    inner = style.mtp_inner if inner else ""
    return f"{style.prefix}{block}.layers.{layer}.{inner}{sub}", index


# --- legacy names --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LegacyName:
    """What a key of a legacy `model` dict is.

    `kind`: "tensor"; "extra_state" (no tensor of the model, `canonical` None); "grouped_fc1" or
    "grouped_fc2": the legacy GroupedMLP, all local experts in one tensor, [hidden, experts * ffn]
    and [experts * ffn, hidden], each viewed per expert, so neither is a concatenation of the other
    forms; `canonical` then has {expert} open.
    """

    canonical: str | None
    kind: str = "tensor"


def from_legacy(
    name: str,
    layers: Sequence[int],
    first_expert: int = 0,
    tied: bool = False,
    first_mtp: int = 0,
) -> LegacyName:
    """What a name of one model chunk means, whatever the layer spec.

    `layers`: the chunk's global decoder layers (Chunk.layers). `first_expert`: the first expert of
    this rank. `tied`: `output_layer.weight` is the last stage's copy of the embedding.
    Raises FormatError for a local layer that the stage does not have.
    """
    name = _unwrapped(nested_names.current(name))
    if name.rpartition(".")[2] == EXTRA_STATE:
        return LegacyName(None, "extra_state")
    if tied and name == "output_layer.weight":
        return LegacyName("embedding.word_embeddings.weight")
    m = _CANONICAL.fullmatch(name)
    if m is None:
        return LegacyName(name)
    block, local, sub = m[1], int(m[2]), m[3]
    inner = ""
    if block == "mtp":
        layer = first_mtp + local
        inner, sub = _outer(sub)
    elif local < len(layers):
        layer = layers[local]
    else:
        raise FormatError(
            f"{name}: this stage holds {len(layers)} layers (global {list(layers)}). The split "
            "into pipeline stages is not the one of the run that saved it."
        )
    sub, kind = _local_expert(_alone(sub), first_expert)
    return LegacyName(f"{block}.layers.{layer}.{inner}{sub}", kind)


def _local_expert(sub: str, first: int) -> tuple[str, str]:
    """Legacy spellings of experts: SequentialMLP, TEGroupedMLP, GroupedMLP."""
    if m := re.fullmatch(r"mlp\.experts\.local_experts\.(\d+)\.(.+)", sub):
        return f"mlp.experts.{first + int(m[1])}.{m[2]}", "tensor"
    if m := re.fullmatch(r"mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d+)", sub):
        return f"mlp.experts.{first + int(m[3])}.{m[1]}.{m[2]}", "tensor"
    if m := re.fullmatch(r"mlp\.experts\.weight([12])", sub):
        return f"mlp.experts.{{expert}}.linear_fc{m[1]}.weight", f"grouped_fc{m[1]}"
    return sub, "tensor"


def to_legacy(
    name: str,
    local_layer: int = 0,
    local_expert: int = 0,
    *,
    fused: Collection[str] = (),
    moe: bool = False,
    experts_form: str = SEQUENTIAL,
    mtp_inner: str = INNER[0],
) -> str:
    """The name a canonical tensor has in a model chunk.

    `fused`: what the spec fuses (`fused_modules` for Transformer Engine, nothing for local).
    `moe`: whether its layer is MoE. `mtp_inner`: "mtp_model_layer." from core_v0.17.0 on.
    A GroupedMLP tensor holds several experts and has no name here: LayoutError.
    """
    m = _CANONICAL.fullmatch(name)
    if m is None:
        return name
    inner, sub = _outer(m[3]) if m[1] == "mtp" else ("", m[3])
    sub = _inside(sub, fused, "moe" if moe else "dense")
    if e := _CANONICAL_EXPERT.fullmatch(sub):
        if experts_form == LEGACY_GROUPED:
            raise LayoutError(
                f"{name}: the legacy GroupedMLP keeps all experts in one tensor. Write with "
                "--experts sequential or te_grouped (--moe-use-legacy-grouped-gemm off)."
            )
        sub = f"mlp.experts.local_experts.{local_expert}.{e[2]}"
        if experts_form == TE_GROUPED:
            sub = f"mlp.experts.{e[2]}{local_expert}"
    return f"{m[1]}.layers.{local_layer}.{mtp_inner if inner else ''}{sub}"


# --- what a name says ---------------------------------------------------------------------------


def is_buffer(name: str) -> bool:
    """Whether a tensor is a module buffer, which no optimizer holds."""
    return name.endswith(".mlp.router.expert_bias")


def fused_modules(model: Sizes) -> frozenset[str]:
    """The norms that the Transformer Engine spec keeps inside a linear module.

    Source: gpt_layer_specs.py get_gpt_layer_with_transformer_engine_spec @ core_v0.16.1.
    """
    fused = {"dense pre_mlp_layernorm"}
    if not model.mla:
        fused |= {"dense input_layernorm", "moe input_layernorm"}
    elif model.qk_layernorm:
        latents = ("self_attention.kv_layernorm", "self_attention.q_layernorm")
        fused |= {f"{kind} {norm}" for kind in ("dense", "moe") for norm in latents}
    return frozenset(fused)


# --- spelling ------------------------------------------------------------------------------------


def _unwrapped(name: str) -> str:
    m = _WRAPPERS.match(name)
    return name[m.end() :] if m else name


def _outer(sub: str) -> tuple[str, str]:
    """Takes the inner-layer prefix off a name below mtp.layers.N; the prefix comes canonical."""
    for inner in INNER:
        if sub.startswith(inner):
            return INNER[0], sub[len(inner) :]
    return "", sub


def _alone(sub: str) -> str:
    """A norm spelled inside a linear, spelled alone."""
    return _respelled(sub, FUSED)


def _inside(sub: str, fused: Collection[str], kind: str) -> str:
    """A norm spelled alone, spelled inside its linear if `fused` says so for this kind of layer."""
    norm = sub.rpartition(".")[0]
    return _respelled(sub, _SPLIT) if f"{kind} {norm}" in fused else sub


def _respelled(sub: str, table: Mapping[str, str]) -> str:
    for old, new in table.items():
        if sub.startswith(old):
            return new + sub[len(old) :]
    return sub
