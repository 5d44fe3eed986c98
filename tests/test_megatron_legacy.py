"""Megatron's legacy `torch` checkpoints, read as torch.load does and written as Megatron does."""

from __future__ import annotations

import argparse
import pickle
import shutil
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import reshard
from reshard.checkpoint import Checkpoint
from reshard.converters.megatron.legacy_ranks import rank_files
from reshard.converters.megatron.run import Run
from reshard.errors import CorruptError, CoverageError, FormatError, LayoutError, ReshardError
from reshard.format import OpenOptions, open_checkpoint
from reshard.topology import Topology, parse_target

Unpacked = Callable[[str], Path]
ITER = "iter_0000003"


# --- torch.load without Megatron -----------------------------------------------------------------


class Stub:
    """Stands for a Megatron enum in args."""

    def __init__(self, *args: object) -> None:
        self.args = args

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stub) and self.args == other.args

    __hash__ = None  # type: ignore[assignment]  # compared, never kept in a set


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return Stub if module.startswith("megatron.") else super().find_class(module, name)


def load(path: Path) -> Any:
    """What torch.load gives; Megatron's classes are not imported."""
    module = SimpleNamespace(Unpickler=_Unpickler, __name__="stubs")
    return torch.load(path, weights_only=False, pickle_module=module)


def files(folder: Path) -> dict[str, Path]:
    return {str(p.relative_to(folder)): p for p in folder.rglob("*.pt")}


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def differences(a: Any, b: Any, where: str, *, order: bool, rows: int | None) -> Iterator[str]:
    """Where two loaded files differ in keys, types or bits.

    `order`: whether the order of keys counts. `rows`: vocabulary rows that are compared.
    """
    if type(a) is not type(b):
        yield f"{where}: {type(a)} and {type(b)}"
    elif isinstance(a, dict):
        if (list(a) if order else set(a)) != (list(b) if order else set(b)):
            yield f"{where}: keys {list(a)[:9]} and {list(b)[:9]}"
        for k in a.keys() & b.keys():
            if k not in ("rng_state", "args"):
                yield from differences(a[k], b[k], f"{where}/{k}", order=order, rows=rows)
    elif isinstance(a, list | tuple):
        if len(a) != len(b):
            yield f"{where}: {len(a)} and {len(b)} items"
        for i, (x, y) in enumerate(zip(a, b, strict=False)):
            yield from differences(x, y, f"{where}/{i}", order=order, rows=rows)
    elif isinstance(a, torch.Tensor):
        if (a.dtype, a.shape, a.requires_grad) != (b.dtype, b.shape, b.requires_grad):
            yield f"{where}: {a.dtype} {a.shape} and {b.dtype} {b.shape}"
        elif bits(a[:rows] if a.ndim == 2 else a) != bits(b[:rows] if a.ndim == 2 else b):
            yield f"{where}: bits"
    elif a != b:
        yield f"{where}: {a} and {b}"


def assert_same_files(ours: Path, theirs: Path, *, order: bool = True) -> None:
    mine, wanted = files(ours), files(theirs)
    assert mine.keys() == wanted.keys()
    for name, path in mine.items():
        a, b = load(path), load(wanted[name])
        # the first save of a run has step first, as torch's AdamW made it; a re-save has it last
        found = list(differences(a, b, name, order=order, rows=None))
        assert found == []


# --- reading -------------------------------------------------------------------------------------


def joined(folder: Path, tp: int, pp: int, layers: int, vpp: int = 1) -> dict[str, torch.Tensor]:
    """Weights and optimizer state joined by hand, with nothing of reshard's: dense models."""
    parts: dict[str, list[torch.Tensor]] = {}
    for t in range(tp):
        for p in range(pp):
            name = f"mp_rank_{t:02d}" + (f"_{p:03d}" if pp > 1 else "")
            root = load(folder / name / "model_optim_rng.pt")
            held = []
            for v in range(vpp):
                for key, value in root["model" if vpp == 1 else f"model{v}"].items():
                    if value is None:
                        continue
                    first = v * (layers // vpp) + p * (layers // pp // vpp)
                    bits_of = key.split(".")
                    if bits_of[0] == "decoder" and bits_of[1] == "layers":
                        bits_of[2] = str(first + int(bits_of[2]))
                    held.append((".".join(bits_of), value))
            wide = [n for n, x in held if x.ndim > 1 and not n.endswith(".bias")]
            narrow = [n for n, x in held if n not in wide]
            for n, value in held:
                parts.setdefault(n, []).append(value)
            optimizer = root["optimizer"]
            for group, members in enumerate((wide, narrow)):
                for i, n in enumerate(members):
                    state = optimizer["optimizer"]["state"][i + group * len(wide)]
                    parts.setdefault(f"{n} exp_avg", []).append(state["exp_avg"])
                    parts.setdefault(f"{n} exp_avg_sq", []).append(state["exp_avg_sq"])
                    master = optimizer["fp32_from_fp16_params"][group][i]
                    parts.setdefault(f"{n} master", []).append(master)
    return {name: _join(name.split(" ")[0], found) for name, found in parts.items()}


def _join(name: str, found: list[torch.Tensor]) -> torch.Tensor:
    if name.endswith("linear_fc1.weight") and found[0].shape[0] == 128 // len(found):  # gated
        halves = [x.chunk(2) for x in found]
        return torch.cat([h[0] for h in halves] + [h[1] for h in halves])
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return torch.cat(found, 1)
    cut = ("linear_qkv.", "linear_fc1.", "word_embeddings.", "output_layer.")
    return torch.cat(found) if any(part in name for part in cut) else found[0]


@pytest.mark.parametrize(
    ("name", "tp", "pp", "vpp", "layers", "tied"),
    [
        ("a-tp4pp2", 4, 2, 1, 8, False),
        ("a-tp2pp2vpp2", 2, 2, 2, 8, False),
        ("a-tp1pp1", 1, 1, 1, 8, False),
        ("d-tied-tp4pp2", 4, 2, 1, 4, True),
    ],
)
def test_every_value_is_what_torch_load_gives(
    unpacked: Unpacked, name: str, tp: int, pp: int, vpp: int, layers: int, tied: bool
) -> None:
    folder = unpacked(f"megatron/{name}") / "torch"
    expected = joined(folder / ITER, tp, pp, layers, vpp)
    ckpt = reshard.open(folder)
    if tied:
        for slot in ("", " exp_avg", " exp_avg_sq", " master"):
            copy = expected.pop(f"output_layer.weight{slot}", None)
            first = expected[f"embedding.word_embeddings.weight{slot}"]
            assert copy is None or torch.equal(copy, first)
    assert sum(slot != "step" for _, slot in ckpt.tensors) == len(expected)
    for key, value in expected.items():
        tensor, _, slot = key.partition(" ")
        got = ckpt[tensor, slot or "param"][...]
        assert bits(value[: got.shape[0]]) == np.ascontiguousarray(got).tobytes(), key
        assert str(got.dtype) == str(value.dtype).removeprefix("torch.")


def test_experts_are_counted_globally(unpacked: Unpacked) -> None:
    folder = unpacked("megatron/c-pp2ep2") / "torch"
    ckpt = reshard.open(folder)
    for stage, local, layer in ((0, 1, 1), (1, 0, 2), (1, 1, 3)):
        for ep in (0, 1):
            root = load(folder / ITER / f"mp_rank_00_{stage:03d}_{ep:03d}" / "model_optim_rng.pt")
            for e in (0, 1):
                for linear in ("linear_fc1", "linear_fc2"):
                    stem = f"decoder.layers.{local}.mlp.experts.local_experts.{e}."
                    value = root["model"][f"{stem}{linear}.weight"]
                    own = f"decoder.layers.{layer}.mlp.experts.local_experts.{2 * ep + e}."
                    got = ckpt[f"{own}{linear}.weight"][...]
                    assert bits(value) == got.tobytes()


def test_topology_groups_and_steps_are_read(unpacked: Unpacked) -> None:
    ckpt = opened(unpacked("megatron/c-pp2ep2") / "torch")
    assert ckpt.topology == Topology(tp=1, pp=2, ep=2, etp=1, dp=2)
    assert ckpt.groups is not None
    assert [len(g.members) for g in ckpt.groups] == [21, 17, 24]
    assert isinstance(ckpt.native, Run)
    assert ckpt.native.optimizer is not None
    assert [g.expert for g in ckpt.native.optimizer.groups] == [False, False, True]
    assert set(ckpt.steps.values()) == {3.0}
    assert len(ckpt.steps) == 62
    assert ckpt.iteration == 3


@pytest.mark.parametrize(
    "name",
    [
        "a-tp4pp2",
        "a-tp2pp2vpp2",
        "c-pp2ep2",
        "c-pp1ep4",
        "d-tied-tp4pp2",
        "b-tp2pp2dp2",
        "b-tp1pp1dp1",
        "g-v019-tp2pp2dp2",
    ],
)
def test_torch_equals_its_torch_dist_twin(unpacked: Unpacked, name: str) -> None:
    folder = unpacked(f"megatron/{name}")
    assert reshard.diff(folder / "torch", folder / "dist")["status"] == "equal"


def test_distributed_state_is_equal_at_other_degrees(unpacked: Unpacked) -> None:
    left = unpacked("megatron/b-tp2pp2dp2") / "torch"
    right = unpacked("megatron/b-tp1pp1dp1") / "torch"
    assert reshard.diff(left, right)["status"] == "equal"


@pytest.mark.parametrize("name", ["b-tp2pp2dp2", "f-dp3-buckets", "g-v012-fsms-tp2pp2dp2"])
def test_masters_of_buffers_round_to_their_weights(unpacked: Unpacked, name: str) -> None:
    """A buffer read at a wrong place gives masters of other weights."""
    ckpt = reshard.open(unpacked(f"megatron/{name}") / "torch")
    masters = [n for n, slot in ckpt.tensors if slot == "master"]
    assert len(masters) == 51
    for tensor in masters:
        weight = ckpt[tensor][...]
        assert ckpt[tensor, "master"][...].astype(weight.dtype).tobytes() == weight.tobytes()


# --- writing -------------------------------------------------------------------------------------

SETS = {
    "a": ("a-tp4pp2", "a-tp2pp4", "a-tp2pp2vpp2", "a-tp1pp1"),
    "c": ("c-pp2ep2", "c-pp1ep4"),
    "d": ("d-tied-tp4pp2", "d-tied-tp1pp1"),
}
FIRST_SAVES = ("a-tp4pp2", "c-pp2ep2", "d-tied-tp4pp2")
PAIRS = [(a, b) for names in SETS.values() for a in names for b in names]


@pytest.mark.proves("megatron-legacy", "megatron-legacy", "training state")
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_written_files_are_those_of_megatron(
    unpacked: Unpacked, tmp_path: Path, source: str, target: str
) -> None:
    """Keys, order, types and bits; random states and args aside. Megatron re-saved the targets."""
    given = unpacked(f"megatron/{source}") / "torch"
    wanted = unpacked(f"megatron/{target}") / "torch"
    reshard.convert(given, tmp_path / "out", to=f"megatron-legacy:{target.rpartition('-')[2]}")
    grown = rows_of(wanted) > rows_of(given)
    if not grown:
        assert_same_files(tmp_path / "out", wanted, order=target not in FIRST_SAVES)
        return
    # Megatron's own padding rows are not zero; those that the source does not hold are ours to fill
    assert reshard.diff(tmp_path / "out", wanted)["status"] == "equal"
    for name, path in files(tmp_path / "out").items():
        a, b = load(path), load(wanted / name)
        for key, value in a.items():
            if key.startswith("model"):
                assert {k: x if x is None else (x.shape, x.dtype) for k, x in value.items()} == {
                    k: x if x is None else (x.shape, x.dtype) for k, x in b[key].items()
                }


def rows_of(folder: Path) -> int:
    """Padded vocabulary rows."""
    return opened(folder).layout.tensors[reshard_id("embedding.word_embeddings.weight")].extent[0]


def reshard_id(name: str) -> Any:
    from reshard.tensor import TensorId

    return TensorId(name)


def opened(path: Path, given: str = "") -> Checkpoint:
    options = OpenOptions(parse_target(given)) if given else OpenOptions()
    return open_checkpoint(path, options)


def test_same_topology_keeps_the_random_states(unpacked: Unpacked, tmp_path: Path) -> None:
    for name, to in (("a-tp2pp4", "tp2pp4"), ("c-pp1ep4", "pp1ep4")):
        given = unpacked(f"megatron/{name}") / "torch"
        report = reshard.convert(given, tmp_path / name, to=f"megatron-legacy:{to}")
        assert report["losses"] == []
        for file, path in files(tmp_path / name).items():
            ours, theirs = load(path)["rng_state"][0], load(given / file)["rng_state"][0]
            assert ours["random_rng_state"] == theirs["random_rng_state"]
            assert np.array_equal(ours["np_rng_state"][1], theirs["np_rng_state"][1])
            assert bits(ours["torch_rng_state"]) == bits(theirs["torch_rng_state"])
            for stream, state in theirs["rng_tracker_states"].items():
                assert bits(ours["rng_tracker_states"][stream]) == bits(state)


def test_args_are_rewritten_and_the_others_kept(unpacked: Unpacked, tmp_path: Path) -> None:
    given = unpacked("megatron/a-tp4pp2") / "torch"
    reshard.convert(given, tmp_path, to="megatron-legacy:tp2pp4")
    ours = vars(load(tmp_path / ITER / "mp_rank_01_003/model_optim_rng.pt")["args"])
    truth = unpacked("megatron/a-tp2pp4") / "torch" / ITER
    theirs = vars(load(truth / "mp_rank_01_003/model_optim_rng.pt")["args"])
    differ = {k for k in ours.keys() & theirs.keys() if ours[k] != theirs[k]}
    paths = {"load", "save", "no_load_rng", "num_floating_point_operations_so_far", "local_rank"}
    assert differ <= paths | {
        "num_virtual_stages_per_pipeline_rank",
        "ckpt_format",
        "use_dist_ckpt",
    }
    assert (ours["rank"], ours["padded_vocab_size"]) == (7, 256)


def test_a_distributed_optimizer_becomes_state_per_parameter(
    unpacked: Unpacked, tmp_path: Path
) -> None:
    given = unpacked("megatron/b-tp2pp2dp2") / "torch"
    report = reshard.convert(given, tmp_path, to="megatron-legacy:tp2pp2")
    assert report["losses"] == []
    assert any("per parameter" in note for note in report["notes"])
    assert reshard.diff(tmp_path, unpacked("megatron/b-tp1pp1dp1") / "dist")["status"] == "equal"
    root = load(tmp_path / ITER / "mp_rank_00_001/model_optim_rng.pt")
    assert root["args"].use_distributed_optimizer is False
    assert list(root["optimizer"]) == ["optimizer", "fp32_from_fp16_params"]
    inner = root["optimizer"]["optimizer"]
    assert list(inner["state"][0]) == ["exp_avg", "exp_avg_sq"]
    assert [g["step"] for g in inner["param_groups"]] == [3, 3]
    assert [len(g["params"]) for g in inner["param_groups"]] == [17, 9]


@pytest.mark.parametrize(
    ("source", "to"),
    [
        ("h-mla-tp2/dist", "tp2"),
        ("h-mtp-pp2/dist", "pp2"),
        ("h-moe-pp2ep2/dist", "pp1ep4"),
        ("h-moe-pp2ep2/dist", "pp1ep1"),
        ("h-llama-uneven-pp2/dist", "tp2pp2,split=3-1"),
        ("c-pp2ep2/torch", "tp2ep2etp1"),
        ("c-pp2ep2/torch", "tp2ep2,spec=transformer_engine"),
    ],
)
def test_written_and_read_again_it_is_equal(
    unpacked: Unpacked, tmp_path: Path, source: str, to: str
) -> None:
    name, _, kind = source.partition("/")
    given = unpacked(f"megatron/{name}") / kind
    reshard.convert(given, tmp_path, to=f"megatron-legacy:{to}")
    assert reshard.diff(given, tmp_path)["status"] == "equal"


def test_weights_alone_leave_no_optimizer(unpacked: Unpacked, tmp_path: Path) -> None:
    given = unpacked("megatron/c-pp2ep2") / "torch"
    reshard.convert(given, tmp_path, to="megatron-legacy:pp1ep1", weights_only=True)
    truth = load(
        unpacked("megatron/c-pp1ep1-weights") / "torch" / ITER / "mp_rank_00/model_optim_rng.pt"
    )
    ours = load(tmp_path / ITER / "mp_rank_00/model_optim_rng.pt")
    assert list(differences(ours, truth, "file", order=True, rows=None)) == []


def test_like_takes_topology_from_a_reference(unpacked: Unpacked, tmp_path: Path) -> None:
    given = unpacked("megatron/a-tp4pp2") / "torch"
    like = unpacked("megatron/a-tp2pp2vpp2") / "torch"
    reshard.convert(given, tmp_path, like=str(like))
    assert_same_files(tmp_path, like)


# --- experts in one tensor -----------------------------------------------------------------------


def rewritten(source: Path, out: Path, change: Callable[[str, dict[str, Any]], None]) -> Path:
    """A copy of a checkpoint with every file changed and saved by torch."""
    shutil.copytree(source, out)
    for name, path in files(source).items():
        root = load(path)
        if isinstance(root.get("args"), argparse.Namespace):
            for field, value in list(vars(root["args"]).items()):
                if isinstance(value, Stub):
                    delattr(root["args"], field)
        change(name, root)
        target = out / name
        target.chmod(0o644)
        torch.save(root, target)
    return out


def _grouped(root: dict[str, Any]) -> None:
    """Weights of SequentialMLP as GroupedMLP keeps them (experts.py @ core_v0.16.1)."""
    for key in ("optimizer", "opt_param_scheduler"):
        root.pop(key, None)
    out: dict[str, Any] = OrderedDict()
    held: dict[str, list[torch.Tensor]] = {}
    for key, value in root["model"].items():
        stem, _, rest = key.partition("local_experts.")
        if not rest:
            out[key] = value
        elif value is not None:
            held.setdefault(f"{stem}weight{rest.split('.')[1][-1]}", []).append(value)
    for key, found in held.items():
        view = torch.stack([w.t() for w in found])  # [experts, in, out]: x @ view[e]
        flat = view.reshape(view.shape[1], -1) if key.endswith("1") else view.flatten(0, 1)
        out[key] = flat.contiguous()
    root["model"] = out
    root["args"].moe_grouped_gemm = True
    root["args"].moe_use_legacy_grouped_gemm = True


def test_grouped_mlp_holds_the_same_experts(unpacked: Unpacked, tmp_path: Path) -> None:
    source = unpacked("megatron/c-pp2ep2") / "torch"
    grouped = rewritten(source, tmp_path / "grouped", lambda _, root: _grouped(root))
    plain, other = reshard.open(source), reshard.open(grouped)
    names = [n for n, slot in plain.logical if slot == "param"]
    assert sorted(names) == sorted(n for n, _ in other.logical)
    assert reshard.fingerprint(source)["param"] == reshard.fingerprint(grouped)["param"]
    reshard.convert(grouped, tmp_path / "again", to="megatron-legacy:pp2ep2")
    for name, path in files(tmp_path / "again").items():
        ours, theirs = load(path)["model"], load(grouped / name)["model"]
        assert ours.keys() == theirs.keys()
        assert all(x is None or bits(x) == bits(theirs[k]) for k, x in ours.items())


# --- refusals ------------------------------------------------------------------------------------


def copied(source: Path, out: Path) -> Path:
    shutil.copytree(source, out)
    for path in out.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return out


def refused(kind: type[ReshardError], path: Path, given: str = "") -> str:
    with pytest.raises(kind) as caught:
        opened(path, given)
    return str(caught.value)


def test_a_missing_rank_file_is_named(unpacked: Unpacked, tmp_path: Path) -> None:
    ckpt = copied(unpacked("megatron/a-tp4pp2") / "torch", tmp_path / "c")
    (ckpt / ITER / "mp_rank_02_001" / "model_optim_rng.pt").unlink()
    assert "mp_rank_02_001/model_optim_rng.pt is missing" in refused(CorruptError, ckpt)


def test_a_rank_file_too_many_is_named(unpacked: Unpacked, tmp_path: Path) -> None:
    ckpt = copied(unpacked("megatron/a-tp4pp2") / "torch", tmp_path / "c")
    shutil.copytree(ckpt / ITER / "mp_rank_00_000", ckpt / ITER / "mp_rank_04_000")
    assert "mp_rank_04_000" in refused(CorruptError, ckpt)


def test_two_topologies_mixed_are_refused(unpacked: Unpacked, tmp_path: Path) -> None:
    ckpt = copied(unpacked("megatron/a-tp4pp2") / "torch", tmp_path / "c")
    other = unpacked("megatron/a-tp2pp4") / "torch" / ITER / "mp_rank_01_001"
    shutil.copy(other / "model_optim_rng.pt", ckpt / ITER / "mp_rank_02_001")
    assert "mp_rank_02_001" in refused(CorruptError, ckpt)


def test_two_iterations_mixed_are_refused(unpacked: Unpacked, tmp_path: Path) -> None:
    def later(name: str, root: dict[str, Any]) -> None:
        if "mp_rank_01_002" in name:
            root["iteration"] = 4

    ckpt = rewritten(unpacked("megatron/a-tp2pp4") / "torch", tmp_path / "c", later)
    message = refused(CorruptError, ckpt)
    assert "mp_rank_01_002" in message
    assert "iteration is 4" in message


def test_from_must_agree_with_args(unpacked: Unpacked) -> None:
    ckpt = unpacked("megatron/a-tp4pp2") / "torch"
    assert "tp=2" in refused(FormatError, ckpt, "tp2")
    assert opened(ckpt, "tp4pp2").topology.tp == 4


def test_a_degree_that_nothing_says_is_asked_for(unpacked: Unpacked, tmp_path: Path) -> None:
    def forgotten(_: str, root: dict[str, Any]) -> None:
        del root["args"].pipeline_model_parallel_size

    ckpt = rewritten(unpacked("megatron/a-tp2pp4") / "torch", tmp_path / "c", forgotten)
    assert "--from ppN" in refused(FormatError, ckpt)
    assert opened(ckpt, "pp4").topology.pp == 4


def test_missing_buffers_are_named(unpacked: Unpacked, tmp_path: Path) -> None:
    ckpt = copied(unpacked("megatron/b-tp2pp2dp2") / "torch", tmp_path / "c")
    (ckpt / ITER / "mp_rank_01_000" / "distrib_optim.pt").unlink()
    assert "mp_rank_01_000/distrib_optim.pt is missing" in refused(CorruptError, ckpt)


def test_a_buffer_of_another_length_is_refused(unpacked: Unpacked, tmp_path: Path) -> None:
    def shorter(name: str, root: Any) -> None:
        if name.endswith("mp_rank_01_000/distrib_optim.pt"):
            for content in root[0].values():
                content["numel_unpadded"] -= 64
                for slot in ("param", "exp_avg", "exp_avg_sq"):
                    content[slot] = content[slot][64:].clone()

    ckpt = rewritten(unpacked("megatron/b-tp2pp2dp2") / "torch", tmp_path / "c", shorter)
    assert "no layout agrees" in refused(FormatError, ckpt)


def test_a_grouping_of_its_own_is_refused(unpacked: Unpacked, tmp_path: Path) -> None:
    def moved(_: str, root: dict[str, Any]) -> None:
        first, second = root["optimizer"]["optimizer"]["param_groups"]
        second["params"].insert(0, first["params"].pop())

    ckpt = rewritten(unpacked("megatron/a-tp1pp1") / "torch", tmp_path / "c", moved)
    assert "its own way" in refused(FormatError, ckpt)


def test_a_state_of_another_shape_is_refused(unpacked: Unpacked, tmp_path: Path) -> None:
    def narrow(_: str, root: dict[str, Any]) -> None:
        state = root["optimizer"]["optimizer"]["state"][3]
        state["exp_avg"] = state["exp_avg"].to(torch.uint8)

    ckpt = rewritten(unpacked("megatron/a-tp1pp1") / "torch", tmp_path / "c", narrow)
    assert "exp_avg" in refused(FormatError, ckpt)


def test_unequal_steps_are_kept_per_parameter(unpacked: Unpacked, tmp_path: Path) -> None:
    def later(_: str, root: dict[str, Any]) -> None:
        root["optimizer"]["optimizer"]["state"][0]["step"] += 4

    ckpt = rewritten(unpacked("megatron/a-tp1pp1") / "torch", tmp_path / "c", later)
    assert set(opened(ckpt).steps.values()) == {3.0, 7.0}
    reshard.convert(ckpt, tmp_path / "out", to="megatron-legacy:tp2pp2")
    root = load(tmp_path / "out" / ITER / "mp_rank_01_000" / "model_optim_rng.pt")
    assert [s["step"].item() for s in root["optimizer"]["optimizer"]["state"].values()][:2] == [
        7,
        3,
    ]


def test_an_old_version_with_query_groups_is_refused(unpacked: Unpacked, tmp_path: Path) -> None:
    def older(_: str, root: dict[str, Any]) -> None:
        root["checkpoint_version"] = 1.0

    ckpt = rewritten(unpacked("megatron/a-tp1pp1") / "torch", tmp_path / "c", older)
    message = refused(FormatError, ckpt)
    assert "checkpoint_version 1.0 with 4 query groups" in message


def test_distributed_buffers_are_not_written(unpacked: Unpacked, tmp_path: Path) -> None:
    source = unpacked("megatron/b-tp1pp1dp1") / "torch"
    with pytest.raises(FormatError, match=r"distrib_optim\.pt is not written"):
        reshard.convert(source, tmp_path, to="megatron-legacy:tp2,optim=distrib_optim")


def test_like_of_another_model_is_refused(unpacked: Unpacked, tmp_path: Path) -> None:
    source = unpacked("megatron/a-tp1pp1") / "torch"
    like = unpacked("megatron/d-tied-tp1pp1") / "torch"
    with pytest.raises((CoverageError, LayoutError)):
        reshard.convert(source, tmp_path, like=str(like))


def test_a_release_has_no_iteration(unpacked: Unpacked, tmp_path: Path) -> None:
    ckpt = copied(unpacked("megatron/c-pp1ep1-weights") / "torch", tmp_path / "c")
    (ckpt / ITER).rename(ckpt / "release")
    (ckpt / "latest_checkpointed_iteration.txt").write_text("release")
    assert opened(ckpt).iteration is None
    reshard.convert(ckpt, tmp_path / "out", to="megatron-legacy:ep2")
    assert (tmp_path / "out" / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert (tmp_path / "out/release/mp_rank_00_001/model_optim_rng.pt").is_file()


def test_files_of_experts_need_not_be_the_product() -> None:
    """TP2 EP2 ETP1 on 4 GPUs writes two files (formats/megatron.md §1.1, run by Megatron)."""
    found = [f.folder for f in rank_files(Topology(tp=2, ep=2, etp=1, dp=1))]
    assert found == ["mp_rank_00_000", "mp_rank_01_001"]
    assert [f.folder for f in rank_files(Topology(pp=2))] == ["mp_rank_00_000", "mp_rank_00_001"]
    assert [f.folder for f in rank_files(Topology(ep=2))] == ["mp_rank_00_000", "mp_rank_00_001"]
