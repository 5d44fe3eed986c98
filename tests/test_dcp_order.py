"""Numbers to names, wrappers to canonical names, placements to boxes: nothing is guessed."""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import reshard
from peers.dcp_cases import run_writer
from reshard.containers.inert import Global, Record, new_tensor
from reshard.dtypes import FLOAT32
from reshard.errors import CorruptError, FormatError
from reshard.namings import dialects, module_order


def part(name: str) -> ModuleType:
    """A module of the converter, by the name under which the wheel holds it."""
    return importlib.import_module(f"reshard.converters.dcp.{name}")


MODEL = [
    ("embed.weight", (11, 4)),
    ("0.q.weight", (6, 4)),
    ("0.q.bias", (6,)),
    ("0.norm.weight", (4,)),
    ("head.weight", (11, 4)),
]


def numbered(groups: list[list[str]]) -> tuple[list[list[int]], dict[int, tuple[int, ...]]]:
    """Groups as torch numbers them, and the shapes of their state."""
    shapes = dict(MODEL)
    names = [name for group in groups for name in group]
    number = {name: i for i, name in enumerate(names)}
    return [[number[n] for n in g] for g in groups], {number[n]: shapes[n] for n in names}


@pytest.mark.parametrize(
    "groups",
    [
        [["embed.weight", "0.q.weight", "0.q.bias", "0.norm.weight", "head.weight"]],
        [["embed.weight", "0.q.weight", "head.weight"], ["0.q.bias", "0.norm.weight"]],
        [["0.q.bias", "0.norm.weight"], ["embed.weight", "0.q.weight", "head.weight"]],
        [["embed.weight", "0.q.weight"], ["0.q.bias"], ["0.norm.weight", "head.weight"]],
    ],
)
def test_numbers_go_by_group_and_by_the_order_of_the_model(groups: list[list[str]]):
    members, shapes = numbered(groups)
    found, _ = part("order").names_by_number(MODEL, members, shapes, "here")
    assert [[found[i] for i in g] for g in members] == groups


def test_an_order_that_shapes_alone_do_not_tell_is_taken_by_rule_and_said():
    """Two matrices of one shape, one of them decayed: only a rule says which."""
    model = [("a.weight", (4,)), ("norm.weight", (4,)), ("b.bias", (4,)), ("w", (4, 4))]
    shapes = {0: (4,), 1: (4, 4), 2: (4,), 3: (4,)}
    found, note = part("order").names_by_number(model, [[0, 1], [2, 3]], shapes, "here")
    assert found == {0: "a.weight", 1: "w", 2: "norm.weight", 3: "b.bias"}
    assert "biases and norms are a group of their own" in note


def test_an_optimizer_of_another_model_is_refused():
    with pytest.raises(FormatError, match="5 numbered parameters in 1 groups fit no order"):
        part("order").names_by_number(MODEL, [[0, 1, 2, 3, 4]], {0: (12, 4)}, "here")


def test_wrappers_are_stripped_by_whole_components():
    spelling = part("names").spelling
    wrapped = ["module._orig_mod.a._fsdp_wrapped_module.w", "module.submodule.w"]
    found = spelling(wrapped)
    assert [found.canonical(n) for n in wrapped] == ["a.w", "submodule.w"]
    owned = ["module.w", "head.w"]  # a model with a part called module
    assert [spelling(owned).canonical(n) for n in owned] == owned


# ---------------------------------------------------------------------- placements


def record(name: str, **fields: object) -> Record:
    return Record(Global("torch.distributed.tensor", name), state=fields)


def dtensor(
    shape: tuple[int, ...],
    local: tuple[int, ...],
    mesh: tuple[int, ...],
    at: tuple[int, ...],
    placements: tuple[Record, ...],
) -> Record:
    """A DTensor as torch pickles it."""
    drawn = new_tensor(mesh, FLOAT32, "mesh")
    spec = record(
        "DTensorSpec",
        mesh=record("DeviceMesh", mesh=drawn, _coordinate_on_dim=list(at)),
        placements=placements,
        tensor_meta=Record(Global("torch", "TensorMeta"), (shape, (), None)),
    )
    state = (None, {"_local_tensor": new_tensor(local, FLOAT32, "0"), "_spec": spec})
    kind = Global("torch.distributed.tensor", "DTensor")
    rebuild = Global("torch._tensor", "_rebuild_from_type_v2")
    return Record(rebuild, (None, kind, (), state), made="reduce")


REPLICATE = record("Replicate")


def shard(dim: int) -> Record:
    return record("Shard", dim=dim)


def strided(dim: int, split: int) -> Record:
    return record("_StridedShard", dim=dim, split_factor=split)


@pytest.mark.parametrize(
    ("at", "box"),
    [((0, 0), "[0:6]"), ((0, 1), "[12:18]"), ((1, 0), "[6:12]"), ((1, 1), "[18:23]")],
)
def test_a_strided_shard_is_cut_after_tensor_parallelism(at: tuple[int, int], box: str):
    """23 rows: TP takes 12 and 11, FSDP halves each; joining by mesh axis would be wrong."""
    rows = 5 if at == (1, 1) else 6
    value = dtensor((23,), (rows,), (2, 2), at, (strided(0, 2), shard(0)))
    found = part("shards").sharded(value, "w")
    assert [str(b) for b, _ in found.parts] == [box]


def test_replicas_and_two_axes_are_cut_where_they_say():
    value = dtensor((7, 9), (4, 5), (3, 2, 2), (2, 0, 0), (REPLICATE, shard(0), shard(1)))
    found = part("shards").sharded(value, "w")
    assert [str(b) for b, _ in found.parts] == ["[0:4, 0:5]"]


def test_a_rank_beyond_the_rows_holds_nothing():
    value = dtensor((6, 3), (0, 3), (4,), (3,), (shard(0),))
    assert part("shards").sharded(value, "w").parts == ()


def test_a_shard_of_another_shape_than_its_placement_is_refused():
    value = dtensor((6, 3), (3, 3), (4,), (1,), (shard(0),))
    with pytest.raises(CorruptError, match=r"has shape \[3, 3\]; \[2:4, 0:3\] of \[6, 3\]"):
        part("shards").sharded(value, "w")


def test_partial_sums_are_refused_by_name():
    value = dtensor((6,), (6,), (2,), (0,), (record("Partial"),))
    with pytest.raises(FormatError, match="the placement Partial is not read"):
        part("shards").sharded(value, "w")


# ---------------------------------------------------------------------- transformers' order


def test_transformers_makes_its_modules_in_the_order_that_is_assumed(
    tmp_path_factory: pytest.TempPathFactory,
):
    folder = run_writer("orders", tmp_path_factory.mktemp("orders"))
    orders = json.loads(Path(folder / "orders.json").read_text())
    assert orders.keys() == dialects()["hf"].orders.keys()
    for kind, variants in orders.items():
        for names in variants:
            assert module_order(sorted(names), "hf", kind) == names, kind
    assert module_order(["model.layers.0.self_attn.qkv_gate.weight"], "hf", "phi3") is None
    assert module_order(["model.norm.weight"], "hf", "mixtral") is None


def test_a_trainer_whose_order_of_parameters_is_unknown_is_refused_by_name(
    unpacked: Callable[[str], Path], tmp_path: Path
):
    folder = tmp_path / "run"
    shutil.copytree(unpacked("wrappers/trainer_single_fp32") / "ckpt/checkpoint-6", folder)
    config = json.loads((folder / "config.json").read_text())
    for kind, said in (
        ("mixtral", "of model_type 'mixtral' is not known"),
        ("bloom", "'down_proj' stands among its siblings"),
    ):
        (folder / "config.json").unlink()
        (folder / "config.json").write_text(json.dumps({**config, "model_type": kind}))
        with pytest.raises(FormatError, match=said):
            reshard.open(folder)
