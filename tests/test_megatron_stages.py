"""Megatron's pipeline stages: every layer where the real functions of megatron-core put it."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import pytest

from reshard.converters.megatron.stages import (
    Pipeline,
    own_stages,
    parse_layout,
    pipeline,
    pipeline_of_args,
)
from reshard.errors import FormatError, LayoutError

# Importing megatron-core without Transformer Engine and Apex warns about both.
pytestmark = pytest.mark.filterwarnings("ignore")


def real_layers(layers: int, pp: int, vpp: int, **options: Any) -> list[list[list[int]]] | None:
    """The layers that megatron-core builds per [stage][chunk]; None where it refuses."""
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    try:
        config = TransformerConfig(
            num_layers=layers,
            hidden_size=8,
            num_attention_heads=1,
            use_cpu_initialization=True,
            pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
            pipeline_dtype="unused",
            **options,
        )
        held = []
        for p in range(pp):
            row = []
            for v in range(vpp):
                stage = v if vpp > 1 else None
                first = get_transformer_layer_offset(config, stage, p)
                n = get_num_layers_to_build(config, stage, p)
                row.append(list(range(first, first + n)))
            held.append(row)
    except (ValueError, AssertionError, ZeroDivisionError):
        return None
    return held


def ours(*args: Any, **options: Any) -> Pipeline | None:
    try:
        return pipeline(*args, **options)
    except LayoutError:
        return None


def covers(held: list[list[list[int]]], layers: int) -> bool:
    return sorted(n for row in held for chunk in row for n in chunk) == list(range(layers))


@pytest.mark.parametrize("pp", [1, 2, 3, 4, 6])
def test_layers_lie_where_megatron_core_builds_them(pp: int):
    compared = 0
    for layers, vpp, embedding, loss in product(
        range(1, 25), (1, 2, 3, 4), (False, True), (False, True)
    ):
        if pp == 1 and vpp > 1:
            continue
        real = real_layers(
            layers,
            pp,
            vpp,
            account_for_embedding_in_pipeline_split=embedding,
            account_for_loss_in_pipeline_split=loss,
        )
        mine = ours(layers, pp, vpp, embedding_counts=embedding, loss_counts=loss)
        case = (layers, pp, vpp, embedding, loss)
        if real is None or not covers(real, layers):
            assert mine is None, case
        else:
            assert mine is not None, case
            assert [[list(c.layers) for c in row] for row in mine.chunks] == real, case
            compared += 1
    assert compared >= 24


@pytest.mark.parametrize("pp", [2, 3, 4, 5])
def test_uneven_first_and_last_stages_are_those_of_megatron_core(pp: int):
    compared = 0
    for layers, vpp, first, last in product(
        range(2, 21), (1, 2, 3), (None, 1, 2, 3, 4), (None, 1, 2, 4, 5)
    ):
        if first is None and last is None:
            continue
        real = real_layers(
            layers,
            pp,
            vpp,
            num_layers_in_first_pipeline_stage=first,
            num_layers_in_last_pipeline_stage=last,
        )
        mine = ours(layers, pp, vpp, first=first, last=last)
        case = (layers, pp, vpp, first, last)
        if pp == 2 and vpp > 1 and None not in (first, last):
            continue  # core_v0.16.1 divides by its number of middle stages, which is zero
        if real is None or not covers(real, layers):
            assert mine is None, case
        else:
            assert mine is not None, case
            assert [[list(c.layers) for c in row] for row in mine.chunks] == real, case
            compared += 1
    assert compared >= 30


LAYOUTS = [
    ("Et*3|(tt|)*3,m|L", 6, 1, None),
    ("Ettt|ttL", 2, 1, None),
    ("E|t|t|tL", 4, 1, None),
    ("E|tt|ttt|t|tt|L", 3, 1, None),
    ("Et|t|tt||tmm|L", 3, 1, None),
    ("Et|(tt|)*2,tL", 2, 1, None),
    ("E,t*5|(t|tt|)*2tmL", 2, 1, None),
]


@pytest.mark.parametrize(("text", "pp"), [(t, pp) for t, n, _, _ in LAYOUTS for pp in (1, 2, 3, n)])
def test_layout_strings_mean_what_megatron_core_makes_of_them(text: str, pp: int):
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.pipeline_parallel_layer_layout import (
        PipelineParallelLayerLayout,
    )

    parsed = PipelineParallelLayerLayout.parse_str_to_list(text)
    assert parse_layout(text) == [[kind.name for kind in stage] for stage in parsed]
    flat = [kind for stage in parsed for kind in stage]
    layers, mtp = flat.count(LayerType.decoder), flat.count(LayerType.mtp)
    try:
        real = PipelineParallelLayerLayout(text, pp)
        real.validate_layer_layout(layers, mtp)
    except AssertionError:
        assert ours(layers, pp, layout=text, mtp_layers=mtp) is None
        return
    mine = pipeline(layers, pp, layout=text, mtp_layers=mtp)
    assert (mine.pp, mine.vpp) == (pp, real.virtual_pipeline_model_parallel_size)
    at = 0
    for v in range(mine.vpp):
        for p in range(pp):
            kinds, chunk = real.layout[p][v], mine.chunks[p][v]
            n = kinds.count(LayerType.decoder)
            assert chunk.layers == tuple(range(at, at + n))
            assert len(chunk.mtp) == kinds.count(LayerType.mtp)
            assert chunk.embedding == (LayerType.embedding in kinds)
            assert chunk.head == (LayerType.loss in kinds)
            at += n
    listed = pipeline(layers, pp, layout=parsed, mtp_layers=mtp)
    assert listed == mine


def test_random_layout_strings_parse_as_in_megatron_core():
    from megatron.core.transformer.pipeline_parallel_layer_layout import (
        PipelineParallelLayerLayout,
    )

    seed = random.randrange(10**9)
    chance = random.Random(seed)
    for _ in range(2000):
        text = "".join(chance.choice("Ettm|L,(t|)*23") for _ in range(chance.randrange(14)))
        try:
            real = PipelineParallelLayerLayout.parse_str_to_list(text)
        except AssertionError:
            with pytest.raises(LayoutError):
                parse_layout(text)
            continue
        got = parse_layout(text)
        assert got == [[k.name for k in stage] for stage in real], (seed, text)


def test_a_layout_that_would_fill_the_memory_is_refused():
    with pytest.raises(LayoutError, match="more than"):
        parse_layout("(t)*999999999999L")


@pytest.mark.parametrize(
    ("layout", "layers", "pp", "mtp", "says"),
    [
        ("Ett|tL", 4, 2, 0, "names 3 decoder layers; the model has 4"),
        ("Ett|tt", 4, 2, 0, "ends with L"),
        ("Ett|t|tL", 4, 2, 0, "not a multiple of pp=2"),
        ("Ettm|ttL", 4, 2, 1, "decoder layers come before MTP"),
        ("Ett|ttL", 4, 2, 1, "names 0 mtp layers"),
        ("Etx|ttL", 4, 2, 0, "holds 'x'"),
    ],
)
def test_a_layout_that_misplaces_a_layer_is_refused(
    layout: str, layers: int, pp: int, mtp: int, says: str
):
    with pytest.raises(LayoutError, match=says):
        pipeline(layers, pp, layout=layout, mtp_layers=mtp)


def test_args_say_the_pipeline():
    base = {"num_layers": 12, "pipeline_model_parallel_size": 2}
    even = pipeline_of_args(base)
    assert even.stages == [[list(range(6))], [list(range(6, 12))]]
    assert [c.embedding for row in even.chunks for c in row] == [True, False]
    assert [(c.head, c.final_norm) for row in even.chunks for c in row] == [
        (False, False),
        (True, True),
    ]
    for more in (
        {"virtual_pipeline_model_parallel_size": 3},
        {"num_virtual_stages_per_pipeline_rank": 3},
        {"num_layers_per_virtual_pipeline_stage": 2},
    ):
        cut = pipeline_of_args(base | more)
        assert cut.stages == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10, 11]]]
        assert cut.where(9) == (0, 2)
    uneven = pipeline_of_args(base | {"decoder_first_pipeline_num_layers": 5, "mtp_num_layers": 1})
    assert [len(row[0].layers) for row in uneven.chunks] == [5, 7]
    assert uneven.chunks[1][0].mtp == (0,)
    drawn = pipeline_of_args(
        base | {"pipeline_model_parallel_layout": "Et*5|t*7|m|L", "mtp_num_layers": 1}
    )
    assert drawn.vpp == 2
    assert drawn.chunks[0][1].mtp == (0,)
    assert drawn.chunks[1][0].final_norm  # with MTP the norm follows the last decoder layer
    with pytest.raises(FormatError, match="--num-layers"):
        pipeline_of_args({"pipeline_model_parallel_size": 2})
    with pytest.raises(FormatError, match="not a whole number"):
        pipeline_of_args({"num_layers": "12"})


def test_stages_made_by_hand_are_checked():
    made = own_stages([[[0]], [[1, 2]], [[3]]], 4)
    assert [c.head for row in made.chunks for c in row] == [False, False, True]
    with pytest.raises(LayoutError, match=r"layers \[3\] of 4"):
        own_stages([[[0]], [[1, 2]]], 4)
    with pytest.raises(LayoutError, match="in the order"):
        own_stages([[[1, 0]], [[2, 3]]], 4)
