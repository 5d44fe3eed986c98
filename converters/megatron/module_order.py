"""The order of a Megatron model's modules, parameters and buffers: that of its state_dict()."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from reshard.errors import FormatError, LayoutError

from .names import EXTRA_STATE, FUSED, INNER, fused_modules, is_buffer
from .sizes import LEGACY_GROUPED, SEQUENTIAL, TE, TE_GROUPED, Sizes, need
from .stages import Chunk


def legacy_entries(
    model: Sizes,
    chunk: Chunk,
    *,
    spec: str | None = None,
    ep: int = 1,
    ep_rank: int = 0,
    mtp_inner: str = INNER[0],
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


def extra_states(model: Sizes, chunk: Chunk, *, spec: str | None = None) -> list[str]:
    """The legacy names of a chunk's `_extra_state` objects, of which the order does not matter.

    A gated delta net too: its in_proj, out_norm and out_proj are Transformer Engine's, its conv1d
    is torch's. Raises FormatError for a module tree not known here.
    Source: ssm/gated_delta_net.py, experimental_attention_variant_module_specs.py @ core_v0.16.1.
    """
    replace(model, delta_layers=()).need_known()
    spec = spec or need(model.spec, "spec")
    if any(model.delta_layers) and spec != TE:
        raise FormatError(
            f"spec={spec}: Megatron-core has gated delta nets under spec={TE} only "
            "(experimental_attention_variant_module_specs.py)"
        )
    tree = _Tree(model, spec, 1, 0, INNER[0], spec == TE)
    return [legacy for legacy, canonical in tree.entries(chunk) if canonical is None]


def parameters(entries: Iterable[tuple[str, str | None]]) -> list[tuple[str, str]]:
    """(legacy name, canonical) of the parameters among entries: named_parameters() order."""
    return [(a, c) for a, c in entries if c is not None and not is_buffer(c)]


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
            delta = bool(model.delta_layers) and model.delta_layers[layer]
            yield from self.layer(
                f"decoder.layers.{local}.", f"decoder.layers.{layer}.", moe, delta=delta
            )
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
        yield from self.layer(at + self.mtp_inner, at + INNER[0], moe)
        yield from self.norm(f"{at}final_layernorm", f"{at}final_layernorm")

    def layer(
        self, at: str, to: str, moe: bool, *, delta: bool = False
    ) -> Iterator[tuple[str, str | None]]:
        """One transformer layer, its modules named `at`…, its tensors `to`…."""
        kind = "moe" if moe else "dense"
        fused = fused_modules(self.model) if self.spec == TE else frozenset()
        if delta:  # in_proj holds the norm before it
            for part in ("in_proj", "out_norm", "out_proj"):
                yield f"{at}self_attention.{part}.{EXTRA_STATE}", None
        else:
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
                norm = next((n for f, n in FUSED.items() if f".{linear}." in f), "")[:-1]
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


def _same(name: str) -> tuple[str, str]:
    return name, name
