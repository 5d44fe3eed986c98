"""How Megatron spells each tensor: torch_dist keys, legacy module names, and the order of modules.

The canonical name is per layer and per expert, with global indices, and free of the layer spec:
norms stand alone (`decoder.layers.3.input_layernorm.weight`), an expert is
`decoder.layers.3.mlp.experts.5.linear_fc1.weight`, the inner layer of an MTP layer is
`mtp.layers.0.transformer_layer.…`. Anything else keeps Megatron's own spelling.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from reshard.errors import FormatError, LayoutError

from . import nested_names
from .sizes import LEGACY_GROUPED, SEQUENTIAL, TE, TE_GROUPED, Sizes, need
from .stages import Chunk

EXTRA_STATE = "_extra_state"

#: A norm that Transformer Engine computes inside the linear after it: fused spelling -> canonical.
#: torch_dist uses these spellings for the local spec too (sharded_state_dict_keys_map).
#: Source: gpt_layer_specs.py @ core_v0.16.1; fixtures a-tp4pp2 (local), c-pp2ep2 (MoE).
_FUSED = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
    "self_attention.linear_q_up_proj.layer_norm_": "self_attention.q_layernorm.",
    "self_attention.linear_kv_up_proj.layer_norm_": "self_attention.kv_layernorm.",
}
_SPLIT = {alone: fused for fused, alone in _FUSED.items()}

_WRAPPERS = re.compile(r"(?:(?:module|model|language_model)\.)*")
_LAYERED = re.compile(r"(decoder|mtp)\.layers\.(?:(\d+)\.)?(?!\d+\.)(.+)")
_SHARD = re.compile(r"(.+)/shard_([\d.]+)_[\d.]+")
_STACKED_EXPERT = re.compile(r"mlp\.experts\.experts\.(?:(\d+)\.)?(.+)")
_CANONICAL = re.compile(r"(decoder|mtp)\.layers\.(\d+)\.(.+)")
_CANONICAL_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(.+)")
_INNER = ("transformer_layer.", "mtp_model_layer.")


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
    inner, prefix, expert_keys = _INNER[0], "", False
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
            inner = next((i for i in _INNER if sub.startswith(i)), inner)
            sub = _outer(sub)[1]
        where = block if block == "mtp" else f"decoder {layer or '*'}"
        if sub.startswith(("mlp.router.", "mlp.experts.")):
            moe.add(where)
            expert_keys |= bool(re.match(r"mlp\.experts\.experts\.\d+\.", sub))
        for fused, alone in _FUSED.items():
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
    mtp_inner: str = _INNER[0],
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


# --- tensor parallelism --------------------------------------------------------------------------


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


# --- module order --------------------------------------------------------------------------------


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


def legacy_entries(
    model: Sizes,
    chunk: Chunk,
    *,
    spec: str | None = None,
    ep: int = 1,
    ep_rank: int = 0,
    mtp_inner: str = _INNER[0],
    norm_extra_state: bool = True,
) -> list[tuple[str, str | None]]:
    """The keys of a legacy `model` dict in order, each with its canonical name or None.

    None: an `_extra_state`. The order is that of state_dict(): a module's parameters, its buffers,
    its extra state, then its children. named_parameters() has the same order (see `parameters`).
    `norm_extra_state`: norms have one under Transformer Engine >= 2.0, none before. A legacy
    GroupedMLP entry has {expert} open in its canonical name.
    Raises FormatError for sizes that the args do not say or a module tree not known here.
    Source: GPTModel and its modules @ core_v0.16.1, built on CPU for the local spec; fixtures a, b,
    c, d. Transformer Engine spec: extensions/transformer_engine.py @ core_v0.16.1 and
    TransformerEngine v2.5 module/{layernorm_linear,grouped_linear}.py, read, never run.
    """
    model.need_known()
    spec = spec or need(model.spec, "spec")
    tree = _Tree(model, spec, ep, ep_rank, mtp_inner, spec == TE and norm_extra_state)
    return list(tree.entries(chunk))


def parameters(entries: Iterable[tuple[str, str | None]]) -> list[tuple[str, str]]:
    """(legacy name, canonical) of the parameters among entries: named_parameters() order."""
    return [(a, c) for a, c in entries if c is not None and not is_buffer(c)]


def is_buffer(name: str) -> bool:
    """Whether a tensor is a module buffer, which no optimizer holds."""
    return name.endswith(".mlp.router.expert_bias")


def shared_embedding(model: Sizes, chunk: Chunk, pp: int) -> str | None:
    """The legacy name of the chunk's parameter that gets a bucket of its own, if any.

    With pp > 1: the embedding of the first stage, and its copy on the last (tied) or MTP stage.
    Source: language_module.py setup_embeddings_and_output_layer, gpt_model.py
    shared_embedding_or_output_weight @ core_v0.16.1; fixture made-gpt-tied-pp2dp2-dpr.
    """
    tied = need(model.tied, "tied")
    if pp == 1 or not (tied or model.mtp_layers):
        return None
    if chunk.embedding or chunk.mtp:
        return None if chunk.embedding and chunk.head else "embedding.word_embeddings.weight"
    return "output_layer.weight" if chunk.head and tied else None


@dataclass(frozen=True, slots=True)
class _Tree:
    """The module tree of a GPTModel chunk, walked in state_dict order."""

    model: Sizes
    spec: str
    ep: int
    ep_rank: int
    mtp_inner: str
    norm_extra: bool

    def entries(self, chunk: Chunk) -> Iterator[tuple[str, str | None]]:
        model = self.model
        tied = need(model.tied, "tied")
        if chunk.embedding or chunk.mtp:
            yield _same("embedding.word_embeddings.weight")
            if need(model.positions, "positions") == "learned_absolute":
                yield _same("embedding.position_embeddings.weight")
        for local, layer in enumerate(chunk.layers):
            if layer >= len(model.moe_layers):
                raise FormatError(f"the model has {len(model.moe_layers)} layers, not {layer + 1}")
            moe = model.moe_layers[layer]
            yield from self.layer(f"decoder.layers.{local}.", f"decoder.layers.{layer}.", moe)
        if chunk.final_norm:
            yield from self.norm("decoder.final_layernorm", "decoder.final_layernorm")
        for layer in chunk.mtp:
            yield from self.mtp_layer(layer)
        if chunk.head:
            if tied and chunk.mtp and not chunk.embedding:
                raise FormatError(
                    "tied embeddings with MTP on another stage than the first leave an unused "
                    "output_layer.weight, whose contents nothing tells. Use torch_dist."
                )
            if not (tied and chunk.embedding):
                name = "embedding.word_embeddings.weight" if tied else "output_layer.weight"
                yield "output_layer.weight", name
            yield f"output_layer.{EXTRA_STATE}", None

    def mtp_layer(self, layer: int) -> Iterator[tuple[str, str | None]]:
        at = f"mtp.layers.{layer}."
        yield from self.norm(f"{at}enorm", f"{at}enorm")
        yield from self.norm(f"{at}hnorm", f"{at}hnorm")
        yield from self.linear(f"{at}eh_proj", f"{at}eh_proj", bias=False)
        moe = bool(self.model.moe_layers) and self.model.moe_layers[-1]
        yield from self.layer(at + self.mtp_inner, at + _INNER[0], moe)
        yield from self.norm(f"{at}final_layernorm", f"{at}final_layernorm")

    def layer(self, at: str, to: str, moe: bool) -> Iterator[tuple[str, str | None]]:
        """One transformer layer, its modules named `at`…, its tensors `to`…."""
        kind = "moe" if moe else "dense"
        fused = fused_modules(self.model) if self.spec == TE else frozenset()
        if f"{kind} input_layernorm" not in fused:
            yield from self.norm(f"{at}input_layernorm", f"{to}input_layernorm")
        yield from self.attention(f"{at}self_attention.", f"{to}self_attention.", kind, fused)
        mlp = None
        if f"{kind} pre_mlp_layernorm" in fused:
            mlp = f"{to}pre_mlp_layernorm"
        else:
            yield from self.norm(f"{at}pre_mlp_layernorm", f"{to}pre_mlp_layernorm")
        if moe:
            yield from self.moe(f"{at}mlp.", f"{to}mlp.")
        else:
            yield from self.mlp(f"{at}mlp.", f"{to}mlp.", self.add_bias, mlp)

    @property
    def add_bias(self) -> bool:
        return need(self.model.add_bias, "add_bias")

    def attention(
        self, at: str, to: str, kind: str, fused: Collection[str]
    ) -> Iterator[tuple[str, str | None]]:
        """linear_proj comes before linear_qkv: Attention.__init__ builds it first."""
        model = self.model
        if model.sinks:
            yield f"{at}core_attention.softmax_offset", f"{to}core_attention.softmax_offset"
        if self.spec == TE:
            yield f"{at}core_attention.{EXTRA_STATE}", None
        yield from self.linear(f"{at}linear_proj", f"{to}linear_proj", self.add_bias)
        norms = ["q_layernorm", "k_layernorm"]
        if model.mla:
            linears = ["linear_q_down_proj", "linear_q_up_proj"]
            norms = ["q_layernorm", "kv_layernorm"]
            if model.q_rank is None:
                linears, norms = ["linear_q_proj"], norms[1:]
            for linear in [*linears, "linear_kv_down_proj", "linear_kv_up_proj"]:
                norm = next((n for f, n in _FUSED.items() if f".{linear}." in f), "")[:-1]
                inside = f"{kind} {norm}" in fused
                alone = to + norm.removeprefix("self_attention.") if inside else None
                yield from self.linear(at + linear, to + linear, bias=False, norm=alone)
        else:
            norm_of = to.removesuffix("self_attention.") + "input_layernorm"
            yield from self.linear(
                f"{at}linear_qkv",
                f"{to}linear_qkv",
                self.add_bias or model.qkv_bias,
                norm=norm_of if f"{kind} input_layernorm" in fused else None,
            )
        if model.qk_layernorm:
            for norm in norms:
                if f"{kind} self_attention.{norm}" not in fused:
                    yield from self.norm(at + norm, to + norm)

    def mlp(
        self, at: str, to: str, bias: bool, norm: str | None = None
    ) -> Iterator[tuple[str, str | None]]:
        yield from self.linear(f"{at}linear_fc1", f"{to}linear_fc1", bias, norm)
        yield from self.linear(f"{at}linear_fc2", f"{to}linear_fc2", bias)

    def moe(self, at: str, to: str) -> Iterator[tuple[str, str | None]]:
        model = self.model
        yield f"{at}router.weight", f"{to}router.weight"
        if self.add_bias:
            yield f"{at}router.bias", f"{to}router.bias"
        if model.expert_bias:
            yield f"{at}router.expert_bias", f"{to}router.expert_bias"
        experts = need(model.experts, "experts")
        if experts % self.ep:
            raise LayoutError(f"{experts} experts do not divide into ep={self.ep}")
        local = experts // self.ep
        numbers = [self.ep_rank * local + i for i in range(local)]
        yield from _EXPERTS[model.experts_form](self, f"{at}experts.", f"{to}experts.", numbers)
        if model.shared_ffn is not None:
            shared = f"{at}shared_experts."
            if model.shared_gate:
                yield f"{shared}gate_weight", f"{to}shared_experts.gate_weight"
            yield from self.mlp(shared, f"{to}shared_experts.", bias=False)

    def sequential(
        self, at: str, to: str, experts: Sequence[int]
    ) -> Iterator[tuple[str, str | None]]:
        for i, e in enumerate(experts):
            yield from self.mlp(f"{at}local_experts.{i}.", f"{to}{e}.", self.add_bias)

    def te_grouped(
        self, at: str, to: str, experts: Sequence[int]
    ) -> Iterator[tuple[str, str | None]]:
        for linear in ("linear_fc1", "linear_fc2"):
            for i, e in enumerate(experts):
                for part in ("weight", "bias") if self.add_bias else ("weight",):
                    yield f"{at}{linear}.{part}{i}", f"{to}{e}.{linear}.{part}"
            yield f"{at}{linear}.{EXTRA_STATE}", None

    def legacy_grouped(
        self, at: str, to: str, experts: Sequence[int]
    ) -> Iterator[tuple[str, str | None]]:
        yield f"{at}weight1", f"{to}{{expert}}.linear_fc1.weight"
        yield f"{at}weight2", f"{to}{{expert}}.linear_fc2.weight"

    def norm(self, at: str, to: str) -> Iterator[tuple[str, str | None]]:
        for part in self.norm_parts:
            yield f"{at}.{part}", f"{to}.{part}"
        if self.norm_extra:
            yield f"{at}.{EXTRA_STATE}", None

    @property
    def norm_parts(self) -> tuple[str, ...]:
        layer_norm = need(self.model.normalization, "normalization") == "LayerNorm"
        return ("weight", "bias") if layer_norm else ("weight",)

    def linear(
        self, at: str, to: str, bias: bool, norm: str | None = None
    ) -> Iterator[tuple[str, str | None]]:
        """A linear module; `norm`: the canonical norm it holds inside."""
        if norm is not None:
            for part in self.norm_parts:
                yield f"{at}.layer_norm_{part}", f"{norm}.{part}"
        yield f"{at}.weight", f"{to}.weight"
        if bias:
            yield f"{at}.bias", f"{to}.bias"
        yield f"{at}.{EXTRA_STATE}", None


_EXPERTS = {
    SEQUENTIAL: _Tree.sequential,
    TE_GROUPED: _Tree.te_grouped,
    LEGACY_GROUPED: _Tree.legacy_grouped,
}


# --- optimizer param groups ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Group:
    """One param group: names in pid order."""

    expert: bool  # is_expert_parallel
    wd_mult: float  # 1.0, or 0.0 for biases and 1-D tensors
    names: tuple[str, ...]


def is_expert_parallel(canonical: str, ep: int) -> bool:
    """Whether a parameter belongs to the expert optimizer: experts do, but only if EP > 1.

    Source: layers.py, experts.py (`allreduce` false needs expert_model_parallel_size > 1)
    @ core_v0.16.1; fixture made-moe-pp2ep1-dpr has one optimizer.
    """
    return ep > 1 and ".mlp.experts." in canonical


def decays(name: str, ndim: int) -> bool:
    """Whether weight decay applies: not to biases nor to any 1-D tensor.

    Source: optimizer/__init__.py get_standard_config_overrides @ core_v0.16.1, _get_param_groups
    @ core_v0.12.3. A run with --apply-wd-to-qk-layernorm decays q/k norms: read its own groups.
    """
    return ndim != 1 and not name.endswith(".bias")


def param_groups(
    params: Sequence[tuple[str, int, bool]],
    everywhere: Collection[tuple[bool, float]] | None = None,
) -> list[list[Group]]:
    """The optimizers of a rank, each a list of groups: dense first, then experts if any.

    `params`: (legacy name, ndim, is_expert_parallel) in named_parameters() order, chunk 0 first.
    `everywhere`: the (expert, wd_mult) pairs that occur on any rank; a rank without such parameters
    has the group empty. A pid counts over an optimizer's groups in order (group-major).
    Source: optimizer/__init__.py _get_param_groups, get_megatron_optimizer @ core_v0.16.1: decayed
    group first; fixtures a-tp4pp2, c-pp2ep2, d-tied-tp4pp2. core_v0.12.3 orders groups by first
    appearance: read the recorded order instead. Not for --decoupled-lr, nor
    --overlap-param-gather-with-optimizer-step (an optimizer of its own for the first chunk).
    """
    held: dict[tuple[bool, float], list[str]] = {key: [] for key in everywhere or ()}
    for name, ndim, expert in params:
        held.setdefault((expert, 1.0 if decays(name, ndim) else 0.0), []).append(name)
    optimizers: list[list[Group]] = []
    for expert in (False, True):
        keys = sorted((k for k in held if k[0] is expert), key=lambda k: -k[1])
        if keys or not expert:
            optimizers.append([Group(expert, wd, tuple(held[expert, wd])) for _, wd in keys])
    return optimizers


# --- spelling ------------------------------------------------------------------------------------


def _same(name: str) -> tuple[str, str]:
    return name, name


def _unwrapped(name: str) -> str:
    m = _WRAPPERS.match(name)
    return name[m.end() :] if m else name


def _outer(sub: str) -> tuple[str, str]:
    """Takes the inner-layer prefix off a name below mtp.layers.N; the prefix comes canonical."""
    for inner in _INNER:
        if sub.startswith(inner):
            return _INNER[0], sub[len(inner) :]
    return "", sub


def _alone(sub: str) -> str:
    """A norm spelled inside a linear, spelled alone."""
    return _respelled(sub, _FUSED)


def _inside(sub: str, fused: Collection[str], kind: str) -> str:
    """A norm spelled alone, spelled inside its linear if `fused` says so for this kind of layer."""
    norm = sub.rpartition(".")[0]
    return _respelled(sub, _SPLIT) if f"{kind} {norm}" in fused else sub


def _respelled(sub: str, table: Mapping[str, str]) -> str:
    for old, new in table.items():
        if sub.startswith(old):
            return new + sub[len(old) :]
    return sub
