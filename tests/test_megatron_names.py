"""Megatron's spellings, module order, TP rules and param groups, against real files and models."""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from reshard.converters.megatron import module_order, names, optim_groups, tp_rules
from reshard.converters.megatron.sizes import (
    TE,
    TE_GROUPED,
    Sizes,
    need,
    padded_rows,
    padded_vocab,
    sizes,
)
from reshard.converters.megatron.stages import Chunk, Pipeline, pipeline, pipeline_of_args
from reshard.errors import FormatError, LayoutError

# Importing megatron-core without Transformer Engine and Apex warns, and so does DCP without ranks.
pytestmark = pytest.mark.filterwarnings("ignore")

Unpacked = Callable[[str], Path]

LEGACY = [
    "a-tp4pp2",
    "a-tp2pp4",
    "a-tp2pp2vpp2",
    "a-tp1pp1",
    "b-tp2pp2dp2",
    "b-tp1pp1dp1",
    "c-pp2ep2",
    "c-pp1ep4",
    "c-pp1ep1-weights",
    "d-tied-tp4pp2",
    "d-tied-tp1pp1",
    "f-dp3-buckets",
    "g-v012-fsms-tp2pp2dp2",
]
DIST = [
    *LEGACY,
    "h-llama-tp2pp2",
    "h-llama-uneven-pp2",
    "h-mla-tp2",
    "h-mtp-pp2",
    "h-moe-pp2ep2",
    "made-moe-ep2-fr",
    "made-llama-pp2vpp2-dpr",
]


@dataclass
class Rank:
    """One rank's legacy file."""

    tp: int
    pp: int
    ep: int
    args: Mapping[str, Any]
    file: Mapping[str, Any]
    model: Sizes
    pipeline: Pipeline

    @property
    def ep_size(self) -> int:
        return int(self.args["expert_model_parallel_size"])

    @property
    def first_expert(self) -> int:
        return self.ep * ((self.model.experts or 0) // self.ep_size)

    def chunks(self) -> Iterator[tuple[Chunk, Mapping[str, Any]]]:
        for v, chunk in enumerate(self.pipeline.chunks[self.pp]):
            yield chunk, self.file["model" if self.pipeline.vpp == 1 else f"model{v}"]

    def entries(self, chunk: Chunk) -> list[tuple[str, str | None]]:
        return module_order.legacy_entries(self.model, chunk, ep=self.ep_size, ep_rank=self.ep)


def ranks(run: Path) -> Iterator[Rank]:
    for folder in sorted((run / "torch" / "iter_0000003").glob("mp_rank_*")):
        file = torch.load(folder / "model_optim_rng.pt", weights_only=False)
        args = vars(file["args"])
        numbers = [int(n) for n in re.findall(r"\d+", folder.name)]
        made = pipeline_of_args(args)
        tp = numbers.pop(0)
        pp = numbers.pop(0) if made.pp > 1 else 0
        ep = numbers.pop(0) if args["expert_model_parallel_size"] > 1 else 0
        yield Rank(tp, pp, ep, args, file, sizes(args), made)


def model_keys(run: Path) -> dict[str, Any]:
    """torch_dist keys of the model, tensors and extra states, with their metadata."""
    metadata = read_metadata(run / "dist" / "iter_0000003")
    return {
        k: v
        for k, v in metadata.items()
        if not k.startswith(("optimizer", "chained", "rng_state", "common_state", "rerun_state"))
    }


def read_metadata(folder: Path) -> dict[str, Any]:
    """state_dict_metadata, also where Megatron pickled classes of its own that are gone."""
    import pickle

    class Inert:
        def __init__(self, *_: object, **__: object) -> None: ...

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            return Inert if module.startswith("megatron.") else super().find_class(module, name)

    with (folder / ".metadata").open("rb") as f:
        found: dict[str, Any] = Unpickler(f).load().state_dict_metadata
    return found


def read_model(run: Path) -> dict[str, torch.Tensor]:
    """The model's tensors of a torch_dist checkpoint by canonical name."""
    folder = run / "dist" / "iter_0000003"
    state = {
        k: torch.empty(m.size, dtype=m.properties.dtype)
        for k, m in model_keys(run).items()
        if isinstance(m, TensorStorageMetadata)
    }
    load(state, storage_reader=FileSystemReader(folder))
    out: dict[str, torch.Tensor] = {}
    for key, tensor in state.items():
        name = names.from_dist(key)
        for index in indices(name, tensor.shape):
            out[name.canonical(index)] = tensor[index] if index else tensor
    return out


def indices(name: names.DistName, shape: Sequence[int]) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [()]
    for n in shape[: name.axes]:
        found = [(*i, j) for i in found for j in range(n)]
    return found


# --- module order --------------------------------------------------------------------------------


@pytest.mark.parametrize("fixture", LEGACY)
def test_entries_are_the_keys_of_every_legacy_model_dict_in_order(unpacked: Unpacked, fixture: str):
    seen = 0
    for rank in ranks(unpacked(f"megatron/{fixture}")):
        for chunk, stored in rank.chunks():
            entries = rank.entries(chunk)
            assert [name for name, _ in entries] == list(stored)
            for name, canonical in entries:
                assert (canonical is None) == (stored[name] is None)
                read = names.from_legacy(
                    name, chunk.layers, rank.first_expert, need(rank.model.tied, "tied")
                )
                assert read.canonical == canonical
                seen += 1
    assert seen > 40


@pytest.mark.parametrize("fixture", LEGACY)
def test_canonical_names_are_spelled_back_as_the_file_has_them(unpacked: Unpacked, fixture: str):
    for rank in ranks(unpacked(f"megatron/{fixture}")):
        for chunk, _ in rank.chunks():
            for name, canonical in rank.entries(chunk):
                if canonical is None or name == "output_layer.weight":
                    continue
                layer = int(m[1]) if (m := re.match(r"decoder\.layers\.(\d+)\.", canonical)) else 0
                expert = int(m[1]) if (m := re.search(r"\.experts\.(\d+)\.", canonical)) else 0
                spelled = names.to_legacy(
                    canonical,
                    chunk.layers.index(layer) if m or "decoder.layers" in canonical else 0,
                    expert - rank.first_expert,
                )
                assert spelled == name


@pytest.mark.parametrize("fixture", ["a-tp4pp2", "a-tp2pp2vpp2", "c-pp2ep2", "d-tied-tp4pp2"])
def test_rules_put_legacy_shards_together_to_the_torch_dist_tensor(
    unpacked: Unpacked, fixture: str
):
    run = unpacked(f"megatron/{fixture}")
    whole = read_model(run)
    shards: dict[str, dict[int, torch.Tensor]] = {}
    model = None
    for rank in ranks(run):
        model = rank.model
        for chunk, stored in rank.chunks():
            for name, canonical in rank.entries(chunk):
                if canonical is not None:
                    held = shards.setdefault(canonical, {})
                    assert torch.equal(held.setdefault(rank.tp, stored[name]), stored[name])
    assert model is not None
    assert shards.keys() == whole.keys()
    for canonical, by_rank in shards.items():
        rule = tp_rules.tp_rule(canonical, model)
        parts = [by_rank[r] for r in sorted(by_rank)]
        if rule.axis is None:
            made = parts[0]
            assert all(torch.equal(p, made) for p in parts)
        elif rule.gated:
            made = torch.cat([p.chunk(2)[half] for half in (0, 1) for p in parts])
        else:
            made = torch.cat(parts, rule.axis)
        assert torch.equal(made, whole[canonical]), canonical
        assert rule.expert == (".experts." in canonical and ".shared_experts." not in canonical)
        assert rule.vocab == canonical.endswith(("word_embeddings.weight", "output_layer.weight"))


# --- torch_dist keys -----------------------------------------------------------------------------


@pytest.mark.parametrize("fixture", [*DIST, "g-v019-tp2pp2dp2"])
def test_torch_dist_keys_are_spelled_back_in_their_own_style(unpacked: Unpacked, fixture: str):
    keys = model_keys(unpacked(f"megatron/{fixture}"))
    style = names.style_of_keys(keys)
    canonical = set()
    for key, meta in keys.items():
        name = names.from_dist(key)
        if not isinstance(meta, TensorStorageMetadata):
            assert name.extra_state
            assert name.canonical(name.index[: name.axes]).endswith("._extra_state")
            continue
        for index in indices(name, meta.size):
            logical = name.canonical(index)
            canonical.add(logical)
            assert names.to_dist(logical, style) == (key, index)
    tensors = [m for m in keys.values() if isinstance(m, TensorStorageMetadata)]
    assert len(canonical) >= len(tensors) > 5
    assert not any("layer_norm_" in name or "{" in name for name in canonical)


@pytest.mark.parametrize("fixture", DIST)
def test_the_style_of_a_run_follows_from_its_args(unpacked: Unpacked, fixture: str):
    run = unpacked(f"megatron/{fixture}")
    keys = model_keys(run)
    common = torch.load(run / "dist" / "iter_0000003" / "common.pt", weights_only=False)
    model = sizes(vars(common["args"]))
    style = names.style_of_sizes(model)
    for key, meta in keys.items():
        if isinstance(meta, TensorStorageMetadata):
            name = names.from_dist(key)
            for index in indices(name, meta.size):
                assert names.to_dist(name.canonical(index), style) == (key, index)


def test_keys_of_other_spellings_mean_the_same_tensors():
    def canonical(key: str, *index: int) -> str:
        return names.from_dist(key).canonical(index)

    experts = "decoder.layers.mlp.experts.experts.linear_fc2.weight"
    assert canonical(experts, 3, 5) == "decoder.layers.3.mlp.experts.5.linear_fc2.weight"
    assert canonical(
        "module.decoder.layers.3.mlp.experts.experts.linear_fc2.weight", 5
    ) == canonical(experts, 3, 5)
    assert canonical("decoder.layers.3.mlp.experts.experts.5.linear_fc2.weight") == canonical(
        experts, 3, 5
    )
    inner = "self_attention.linear_qkv.layer_norm_weight"
    for spelled in ("transformer_layer", "mtp_model_layer"):
        assert (
            canonical(f"mtp.layers.1.{spelled}.{inner}")
            == "mtp.layers.1.transformer_layer.input_layernorm.weight"
        )
    up = "decoder.layers.self_attention.linear_kv_up_proj.layer_norm_weight"
    assert canonical(up, 7) == "decoder.layers.7.self_attention.kv_layernorm.weight"
    assert canonical("decoder.layers.4.mixer.A_log") == "decoder.layers.4.mixer.A_log"
    assert canonical("decoder.layers.self_attention.thing", 4) == (
        "decoder.layers.4.self_attention.thing"
    )
    vision = "vision_model.decoder.layers.self_attention.linear_qkv.weight"
    assert canonical(vision) == vision  # not this decoder: one tensor as it stands
    state = names.from_dist(
        "decoder.layers.mlp.experts.experts.linear_fc1._extra_state/shard_1.2_4.8"
    )
    assert state.extra_state
    assert state.canonical(state.index) == "decoder.layers.1.mlp.experts.2.linear_fc1._extra_state"
    with pytest.raises(FormatError, match="2 leading axes, not 1"):
        canonical(experts, 3)


def test_a_checkpoint_that_spells_two_ways_is_refused():
    with pytest.raises(FormatError, match="stacked"):
        names.style_of_keys(["decoder.layers.a.weight", "decoder.layers.0.b.weight"])
    with pytest.raises(FormatError, match="dense input_layernorm"):
        names.style_of_keys(
            [
                "decoder.layers.0.input_layernorm.weight",
                "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight",
            ]
        )


def test_transformer_engine_spells_moe_layers_apart():
    """pre_mlp_layernorm: alone in a MoE layer, in linear_fc1 in a dense one."""
    model = sizes({**ARGS, **MOE, "transformer_impl": TE, "moe_layer_freq": [0, 1, 1]})
    style = names.style_of_sizes(model)
    dense = names.to_dist("decoder.layers.0.pre_mlp_layernorm.weight", style)
    moe = names.to_dist("decoder.layers.1.pre_mlp_layernorm.weight", style)
    assert dense == ("decoder.layers.0.mlp.linear_fc1.layer_norm_weight", ())
    assert moe == ("decoder.layers.1.pre_mlp_layernorm.weight", ())
    keys = [dense[0], moe[0], "decoder.layers.1.mlp.router.weight"]
    learned = names.style_of_keys(keys)
    for layer in (0, 1):
        name = f"decoder.layers.{layer}.pre_mlp_layernorm.weight"
        assert names.to_dist(name, learned) == names.to_dist(name, style)


# --- legacy names of other specs -----------------------------------------------------------------


def test_transformer_engine_entries_read_back_to_their_tensors():
    changes: list[dict[str, Any]] = [
        {},
        {"normalization": "LayerNorm", "add_bias_linear": True, "swiglu": False},
        {**MOE, "moe_layer_freq": [0, 1, 1], "moe_grouped_gemm": True, "qk_layernorm": True},
        {**MOE, "moe_layer_freq": [0, 1, 1], "add_bias_linear": True, "moe_grouped_gemm": True,
         "moe_shared_expert_intermediate_size": None},
        {**MLA, "q_lora_rank": 20},
        {**MLA, "q_lora_rank": None, "mtp_num_layers": 2, "softmax_type": "learnable"},
    ]  # fmt: skip
    for change in changes:
        model = sizes({**ARGS, "transformer_impl": TE, **change})
        chunk = pipeline(3, 1, mtp_layers=model.mtp_layers).chunks[0][0]
        ep = 2 if model.experts else 1
        entries = module_order.legacy_entries(model, chunk, ep=ep, ep_rank=ep - 1)
        local = module_order.legacy_entries(model, chunk, spec="local", ep=ep, ep_rank=ep - 1)
        assert {c for _, c in entries} == {c for _, c in local}
        first = (model.experts or 0) // ep * (ep - 1)
        fused = names.fused_modules(model)
        for name, canonical in entries:
            assert names.from_legacy(name, chunk.layers, first).canonical == canonical
            if canonical is None:
                continue
            at = re.match(r"(?:decoder|mtp)\.layers\.(\d+)\.", canonical)
            e = re.search(r"\.mlp\.experts\.(\d+)\.", canonical)
            layer = int(at[1]) if at else 0
            spelled = names.to_legacy(
                canonical,
                layer,
                int(e[1]) - first if e else 0,
                fused=fused,
                moe=model.moe_layers[-1 if canonical.startswith("mtp") else layer],
                experts_form=model.experts_form,
            )
            assert spelled == name


def test_grouped_experts_and_the_tied_copy_are_recognised():
    read = names.from_legacy("module.decoder.layers.0.mlp.experts.weight1", [4], 2)
    assert (read.kind, read.canonical) == (
        "grouped_fc1",
        "decoder.layers.4.mlp.experts.{expert}.linear_fc1.weight",
    )
    te = names.from_legacy("decoder.layers.1.mlp.experts.linear_fc2.bias3", [4, 5], 8)
    assert te.canonical == "decoder.layers.5.mlp.experts.11.linear_fc2.bias"
    copy = names.from_legacy("output_layer.weight", [4], tied=True)
    assert copy.canonical == "embedding.word_embeddings.weight"
    assert names.from_legacy("decoder.layers.0.mlp.linear_fc1._extra_state", [0]).canonical is None
    with pytest.raises(FormatError, match="this stage holds 2 layers"):
        names.from_legacy("decoder.layers.2.input_layernorm.weight", [4, 5])
    with pytest.raises(LayoutError, match="GroupedMLP"):
        names.to_legacy(
            "decoder.layers.0.mlp.experts.1.linear_fc1.weight", experts_form="legacy_grouped"
        )


@pytest.mark.parametrize(
    "name",
    [
        "decoder.layers.0.mixer.in_proj.weight",
        "decoder.layers.0.self_attention.in_proj.weight",
        "decoder.layers.0.mlp.fc1_latent_proj.weight",
        "vision_model.class_token",
    ],
)
def test_a_tensor_without_a_rule_is_refused(name: str):
    with pytest.raises(LayoutError, match="not known"):
        tp_rules.tp_rule(name, sizes(ARGS))


def test_mla_down_projections_follow_the_spec():
    name = "decoder.layers.0.self_attention.linear_kv_down_proj.weight"
    assert tp_rules.tp_rule(name, sizes({**ARGS, **MLA, "transformer_impl": "local"})).axis == 0
    te = sizes({**ARGS, **MLA, "transformer_impl": TE})
    assert tp_rules.tp_rule(name, te).axis is None
    assert tp_rules.tp_rule(name, te, mla_down_cut=True).axis == 0


# --- param groups --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fixture", "count"),
    [("a-tp4pp2", 204), ("a-tp2pp2vpp2", 102), ("c-pp2ep2", 100), ("c-pp1ep4", 176),
     ("d-tied-tp4pp2", 212), ("d-tied-tp1pp1", 52)],
)  # fmt: skip
def test_param_groups_number_the_masters_as_the_file_does(
    unpacked: Unpacked, fixture: str, count: int
):
    """The master of every pid rounds to the weight of the name that the numbering gives it."""
    found = 0
    run = list(ranks(unpacked(f"megatron/{fixture}")))

    def params(rank: Rank) -> dict[str, tuple[torch.Tensor, bool]]:
        held = {}
        for v, (chunk, stored) in enumerate(rank.chunks()):
            for name, canonical in module_order.parameters(rank.entries(chunk)):
                expert = optim_groups.is_expert_parallel(canonical, rank.ep_size)
                held[f"{v} {name}"] = (stored[name], expert)
        return held

    everywhere = {
        (group.expert, group.wd_mult)
        for rank in run
        for optimizer in optim_groups.param_groups(
            [(n, t.ndim, e) for n, (t, e) in params(rank).items()]
        )
        for group in optimizer
    }
    for rank in run:
        held = params(rank)
        made = optim_groups.param_groups([(n, t.ndim, e) for n, (t, e) in held.items()], everywhere)
        stored = rank.file["optimizer"]
        stored = stored if isinstance(stored, list) else [stored]
        assert len(made) == len(stored)
        for optimizer, file in zip(made, stored, strict=True):
            groups = file["optimizer"]["param_groups"]
            assert [(g.expert, g.wd_mult) for g in optimizer] == [
                (g["is_expert_parallel"], g["wd_mult"]) for g in groups
            ]
            pid = 0
            for group, written, masters in zip(
                optimizer, groups, file["fp32_from_fp16_params"], strict=True
            ):
                assert written["params"] == list(range(pid, pid + len(group.names)))
                pid += len(group.names)
                for name, master in zip(group.names, masters, strict=True):
                    weight = held[name][0]
                    assert torch.equal(master.to(weight.dtype), weight), name
                    found += 1
    assert found == count


def test_a_rank_without_such_parameters_has_an_empty_group():
    made = optim_groups.param_groups(
        [("a.weight", 2, False)], {(False, 0.0), (False, 1.0), (True, 1.0)}
    )
    assert [[g.names for g in o] for o in made] == [[("a.weight",), ()], [()]]


# --- against real models -------------------------------------------------------------------------

ARGS: dict[str, Any] = {
    "num_layers": 3,
    "hidden_size": 40,
    "ffn_hidden_size": 52,
    "num_attention_heads": 8,
    "num_query_groups": 2,
    "group_query_attention": True,
    "kv_channels": 6,
    "swiglu": True,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "qk_layernorm": False,
    "untie_embeddings_and_output_weights": True,
    "position_embedding_type": "rope",
    "transformer_impl": "local",
    "vocab_size": 109,
    "make_vocab_size_divisible_by": 8,
}
MOE = {
    "num_experts": 4,
    "moe_ffn_hidden_size": 28,
    "moe_layer_freq": 1,
    "moe_shared_expert_intermediate_size": 36,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}
MLA = {
    "multi_latent_attention": True,
    "q_lora_rank": 20,
    "kv_lora_rank": 14,
    "qk_head_dim": 6,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 7,
    "qk_layernorm": True,
}
GPT = {
    "swiglu": False,
    "normalization": "LayerNorm",
    "add_bias_linear": True,
    "untie_embeddings_and_output_weights": False,
    "position_embedding_type": "learned_absolute",
}
BUILDS: list[tuple[dict[str, Any], bool, bool]] = [
    # args, has the embedding, has the head
    ({}, True, True),
    ({}, False, False),
    (GPT, True, True),
    (GPT, True, False),
    (GPT, False, True),
    ({"add_qkv_bias": True, "qk_layernorm": True}, False, True),
    ({"normalization": "LayerNorm", "qk_layernorm": True, "softmax_type": "learnable"}, True, True),
    (MOE, True, True),
    ({**MOE, "moe_layer_freq": [0, 1, 0], "moe_shared_expert_gate": True}, True, True),
    ({**MOE, "moe_layer_freq": 2, "moe_router_enable_expert_bias": False}, True, True),
    (
        {**MOE, **GPT, "moe_shared_expert_intermediate_size": None,
         "moe_router_enable_expert_bias": False},
        True,
        True,
    ),
    (MLA, True, True),
    ({**MLA, "q_lora_rank": None, "qk_layernorm": False}, True, True),
    ({**MLA, **MOE, "moe_layer_freq": [0, 0, 1]}, True, True),
    ({"mtp_num_layers": 2}, True, True),
    ({**MOE, "mtp_num_layers": 1}, False, True),
]  # fmt: skip


def build_all(builds: list[tuple[dict[str, Any], bool, bool]]) -> list[dict[str, Any]]:
    """state_dict keys, named_parameters, sharded keys and param groups of real GPTModel chunks.

    Runs in a process of its own: it joins a process group and patches what asks for CUDA.
    """
    import dataclasses
    import warnings

    warnings.simplefilter("ignore")
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment]
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_layer_specs,
        get_gpt_layer_local_spec,
        get_gpt_mtp_block_spec,
    )
    from megatron.core.optimizer import OptimizerConfig, _get_param_groups
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import (
        MLATransformerConfig,
        TransformerConfig,
    )

    moe_utils.te_general_gemm = None
    multi_latent_attention.HAVE_TE = False
    parallel_state.initialize_model_parallel()

    class MLAAttention(DotProductAttention):
        def __init__(self, *a: Any, k_channels: Any = None, v_channels: Any = None, **k: Any):
            super().__init__(*a, **k)

    out = []
    for change, pre, post in builds:
        args = {**ARGS, **change}
        mla = bool(args.get("multi_latent_attention"))
        kind = MLATransformerConfig if mla else TransformerConfig
        fields = {f.name for f in dataclasses.fields(kind) if f.init}
        config = kind(
            **{k: v for k, v in args.items() if k in fields},
            gated_linear_unit=args["swiglu"],
            num_moe_experts=args.get("num_experts"),
            use_cpu_initialization=True,
            params_dtype=torch.bfloat16,
            **({"rope_type": "rope"} if mla else {}),
        )
        if args.get("num_experts"):
            from megatron.core.models.gpt.gpt_layer_specs import LNImpl

            layers = get_gpt_decoder_layer_specs(config, False, args["normalization"])
            spec: Any = TransformerBlockSubmodules(layer_specs=layers, layer_norm=LNImpl)
        else:
            spec = get_gpt_layer_local_spec(
                qk_layernorm=config.qk_layernorm,
                multi_latent_attention=mla,
                normalization=args["normalization"],
            )
        if mla:
            for one in getattr(spec, "layer_specs", [spec]):
                one.submodules.self_attention.submodules.core_attention = MLAAttention
        mtp = None
        if args.get("mtp_num_layers"):
            mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
        model = GPTModel(
            config,
            spec,
            vocab_size=112,
            max_sequence_length=32,
            pre_process=pre,
            post_process=post,
            share_embeddings_and_output_weights=not args["untie_embeddings_and_output_weights"],
            position_embedding_type=args["position_embedding_type"],
            mtp_block_spec=mtp,
        )
        named = dict(model.named_parameters())
        groups = _get_param_groups([model], OptimizerConfig(lr=0.1, min_lr=0.0), None)
        name_of = {id(p): n for n, p in named.items()}
        sharded = model.sharded_state_dict(metadata={})
        out.append(
            {
                "state": [(k, v is None) for k, v in model.state_dict().items()],
                "named": list(named),
                "ndim": {n: p.dim() for n, p in named.items()},
                "dist": {k: getattr(v, "key", None) for k, v in sharded.items()},
                "groups": [
                    (g["is_expert_parallel"], g["wd_mult"], [name_of[id(p)] for p in g["params"]])
                    for g in groups
                ],
            }
        )
    torch.distributed.destroy_process_group()
    return out


@pytest.fixture(scope="module")
def built() -> list[dict[str, Any]]:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(build_all, BUILDS).result()


@pytest.mark.parametrize("case", range(len(BUILDS)))
def test_a_real_model_has_these_entries_keys_and_groups(built: list[dict[str, Any]], case: int):
    change, pre, post = BUILDS[case]
    real = built[case]
    model = sizes({**ARGS, **change})
    mtp = tuple(range(model.mtp_layers))
    chunk = Chunk((0, 1, 2), mtp, pre, post, final_norm=post or bool(mtp))
    entries = module_order.legacy_entries(model, chunk)
    assert [(name, c is None) for name, c in entries] == real["state"]
    params = module_order.parameters(entries)
    assert [name for name, _ in params] == real["named"]
    style = names.style_of_sizes(model)
    for name, canonical in entries:
        key = real["dist"].get(name)
        if canonical is not None and key is not None:
            assert names.to_dist(canonical, style)[0] == key
            parsed = names.from_dist(key)
            assert parsed.axes == (len(names.to_dist(canonical, style)[1]))
    assert sum(c is not None and n in real["dist"] for n, c in entries) >= len(params) - 1
    groups = optim_groups.param_groups([(n, real["ndim"][n], optim_groups.is_expert_parallel(c, 1))
                                 for n, c in params])  # fmt: skip
    assert len(groups) == 1  # experts have no optimizer of their own while EP is 1
    assert [(g.expert, g.wd_mult, list(g.names)) for g in groups[0]] == real["groups"]


# --- sizes ---------------------------------------------------------------------------------------


def test_the_sizes_of_a_fixture_are_those_of_its_readme(unpacked: Unpacked):
    (rank,) = ranks(unpacked("megatron/a-tp1pp1"))
    model = rank.model
    assert (model.layers, model.hidden, model.heads, model.head_dim) == (8, 32, 8, 8)
    assert (model.query_groups, model.ffn, model.gated, model.tied) == (4, 64, True, False)
    assert (model.vocab, model.padded_vocab, model.normalization) == (121, 128, "RMSNorm")
    assert [padded_rows(model, tp) for tp in (1, 2, 4)] == [128, 256, 512]
    assert model.experts is None
    assert model.moe_layers == (False,) * 8
    moe = next(ranks(unpacked("megatron/c-pp1ep4"))).model
    assert (moe.experts, moe.moe_layers) == (4, (False, True, True, True))
    assert (moe.shared_ffn, moe.expert_bias, moe.homogeneous) == (32, True, False)


def test_a_missing_argument_is_named_and_never_guessed():
    model = sizes({"num_layers": 2, "hidden_size": 8})
    chunk = pipeline(2, 1).chunks[0][0]
    with pytest.raises(FormatError, match="--transformer-impl"):
        module_order.legacy_entries(model, chunk)
    with pytest.raises(FormatError, match="--untie-embeddings-and-output-weights"):
        module_order.legacy_entries(model, chunk, spec="local")
    with pytest.raises(FormatError, match="--vocab-size"):
        padded_rows(model, 2)
    with pytest.raises(FormatError, match="--swiglu"):
        tp_rules.tp_rule("decoder.layers.0.mlp.linear_fc1.weight", model)
    with pytest.raises(FormatError, match="names 2 layers; the model has 3"):
        sizes({**ARGS, **MOE, "moe_layer_freq": [0, 1]})
    with pytest.raises(FormatError, match=r"args\.hidden_size is 'x'"):
        sizes({"hidden_size": "x"})
    with pytest.raises(FormatError, match="moe_latent_size"):
        module_order.legacy_entries(sizes({**ARGS, "moe_latent_size": 16}), chunk)


def test_sizes_follow_megatron_where_an_argument_may_be_left_out():
    model = sizes({"hidden_size": 64, "num_attention_heads": 4, "num_layers": 6})
    assert (model.query_groups, model.head_dim) == (4, 16)
    assert sizes({**ARGS, "group_query_attention": False}).query_groups == 8
    assert sizes({**ARGS, **MOE, "moe_layer_freq": 2}).moe_layers == (True, False, True)
    assert not sizes({**ARGS, "moe_layer_freq": 2}).homogeneous
    grouped = {**ARGS, **MOE, "moe_grouped_gemm": True}
    assert sizes({**grouped, "transformer_impl": TE}).experts_form == TE_GROUPED
    assert sizes(grouped).experts_form == "legacy_grouped"
    assert sizes({**ARGS, "tokenizer_type": "NullTokenizer"}).vocab == 110
    assert padded_vocab(128, 128, 1) == 128
