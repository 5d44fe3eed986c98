"""Megatron's flat optimizer buffers: laid out as megatron-core does, found in real files."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from reshard.converters.megatron import (
    module_order,
    names,
    old_args,
    optim_groups,
    stages,
    tp_rules,
)
from reshard.converters.megatron.buckets import (
    Buffer,
    bucket_key,
    bucket_size_of_args,
    buffer,
    cut,
    default_bucket_size,
    dense_group,
    expert_group,
    solve,
)
from reshard.converters.megatron.sizes import Sizes, sizes
from reshard.errors import FormatError
from reshard.format import OpenOptions
from reshard.topology import parse_target

# Importing megatron-core without Transformer Engine and Apex warns, and so does DCP without ranks.
pytestmark = pytest.mark.filterwarnings("ignore")

Unpacked = Callable[[str], Path]
SLOTS = ("param", "exp_avg", "exp_avg_sq")


# --- against the real class ----------------------------------------------------------------------


@dataclass
class Group:
    """As much of a process group as a buffer asks for."""

    ranks: int

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return 0


def real_buffer(
    params: Sequence[tuple[str, int]], dp: int, size: int | None, own: set[str], nccl: bool
) -> Any:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer
    from megatron.core.process_groups_config import ProcessGroupCollection

    groups = ProcessGroupCollection()
    groups.tp, groups.dp_cp = Group(1), Group(dp)
    tensors = []
    for name, numel in params:
        tensor = torch.nn.Parameter(torch.zeros(numel, dtype=torch.bfloat16))
        tensor.shared_embedding = name in own
        tensors.append(tensor)
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, pad_buckets_for_high_nccl_busbw=nccl
    )
    made = _ParamAndGradBuffer(
        config,
        torch.bfloat16,
        torch.float32,
        tensors,
        Group(dp),
        size,
        {t: n for t, (n, _) in zip(tensors, params, strict=True)},
        1.0,
        list(range(len(tensors))),
        False,
        groups,
    )
    return made, tensors


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer without CUDA or process groups: it allocates on the CPU and logs nothing."""
    from megatron.core.distributed import param_and_grad_buffer

    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(param_and_grad_buffer, "log_on_each_pipeline_stage", lambda *_, **__: None)


@pytest.mark.usefixtures("on_cpu")
def test_a_buffer_is_laid_out_as_megatron_core_lays_it_out():
    seed = random.randrange(10**9)
    chance = random.Random(seed)
    several = 0
    for _ in range(150):
        params = [
            (f"p{i}", chance.choice((1, 7, 40, 64, 128, 200, 513, 1000)))
            for i in range(chance.randrange(1, 14))
        ]
        own = {n for n, _ in params if chance.random() < 0.15}
        dp = chance.choice((1, 2, 3, 5, 8))
        size = chance.choice((None, 1, 100, 640, 1500))
        nccl = chance.random() < 0.1
        real, tensors = real_buffer(params, dp, size, own, nccl)
        mine = buffer(params, dp, size, own, nccl)
        case = (seed, params, own, dp, size, nccl)
        assert mine.numel_unpadded == real.numel_unpadded, case
        assert sum(mine.numels) == real.numel, case
        starts = [b[0] for b in real.bucket_indices]
        assert [b - a for a, b in real.bucket_indices] == list(mine.numels), case
        assert tuple(b.numel_unpadded for b in real.buckets) == mine.numels_unpadded, case
        assert [s.name for s in mine.slots] == [n for n, _ in reversed(params)]
        for tensor, (name, _) in zip(tensors, params, strict=True):
            first, last, bucket = real.param_index_map[tensor]
            slot = mine.slot(name)
            assert (slot.padded, slot.numel, slot.bucket) == (first, last - first, bucket), case
            assert slot.start == first - starts[bucket], case
            assert slot.flat == slot.start + sum(mine.numels_unpadded[:bucket]), case
        assert cut(params, mine.numels_unpadded, dp, own, nccl) == mine, case
        found = solve(
            {"module order": params},
            dp=dp,
            own_bucket=own,
            numels_unpadded=mine.numels_unpadded,
            numels=mine.numels,
        )
        assert found == mine, case
        several += len(mine.numels) > 1
    assert several > 40


def test_lengths_of_another_order_or_model_are_refused():
    params = [("a", 100), ("b", 70), ("c", 300)]
    made = buffer(params, 2, 200)
    assert made.numels_unpadded == (300, 228)
    other = [("b", 70), ("c", 300), ("a", 100)]
    with pytest.raises(FormatError, match="bucket 0 holds 300 elements"):
        solve({"other": other}, numels_unpadded=made.numels_unpadded)
    with pytest.raises(FormatError, match="2 buckets leave 1 parameters over"):
        cut([("z", 9), *params], made.numels_unpadded)
    with pytest.raises(FormatError, match=r"bucket size None: 548 elements, not 427"):
        solve({"local": [*params[:2], ("d", 300)]}, numel_unpadded=427)


def test_layouts_that_differ_and_both_fit_are_refused():
    one, other = [("a", 64), ("b", 64)], [("b", 64), ("a", 64)]
    with pytest.raises(FormatError, match="several layouts agree"):
        solve({"one": one, "other": other}, numel_unpadded=128)
    same = solve({"one": one}, numel_unpadded=128, bucket_sizes=(None, 64, 128))
    assert [s.flat for s in same.slots] == [0, 64]  # where a bucket ends changes nothing here


def test_the_bucket_size_follows_from_the_args():
    assert (
        bucket_size_of_args({"overlap_grad_reduce": False, "ddp_bucket_size": 5}, 0, 0, 2) is None
    )
    args = {"overlap_grad_reduce": True, "ddp_bucket_size": None, "ddp_num_buckets": None}
    assert bucket_size_of_args(args, 0, 0, 2) == 40_000_000 == default_bucket_size(40)
    assert bucket_size_of_args(args, 0, 0, 64) == 64_000_000
    assert bucket_size_of_args(args, 1, 0, 64) is None
    assert bucket_size_of_args(args, 0, 1, 64) is None
    assert bucket_size_of_args(args | {"ddp_num_buckets": 3}, 0, 0, 1, 100) == 33
    with pytest.raises(FormatError, match="ddp-num-buckets"):
        bucket_size_of_args(args | {"ddp_num_buckets": 3}, 0, 0, 1)


def test_bucket_keys_are_taken_apart_and_put_together():
    dtypes = "(torch.bfloat16, torch.float32)"
    head = "chained_1.optimizer.distributed.dp_group_idx_3.gbuf_idx_0"
    key = f"{head}.dtype_{dtypes}.bucket_idx_2.param"
    parts = bucket_key(key)
    assert parts is not None
    assert (parts.chained, parts.group, parts.gbuf, parts.bucket) == (1, 3, 0, 2)
    assert (parts.dtypes, parts.field, str(parts)) == (dtypes, "param", key)
    whole = bucket_key("optimizer.distributed.dp_group_idx_0.per_bucket_numel/shard_0_1")
    assert whole is not None
    assert (whole.chained, whole.gbuf, whole.field) == (None, None, "per_bucket_numel")
    assert bucket_key("optimizer.state.exp_avg.output_layer.weight") is None
    assert dense_group(1, 1, tp=2) == 3
    assert expert_group(0, 1, 1, etp=1, ep=2) == 3


# --- against real files --------------------------------------------------------------------------


def dist_folder(run: Path) -> Path:
    return run / "dist" / "iter_0000003"


def read_dist(folder: Path, wanted: Callable[[str], bool]) -> dict[str, Any]:
    reader = FileSystemReader(folder)
    state: dict[str, Any] = {}
    for key, meta in reader.read_metadata().state_dict_metadata.items():
        if wanted(key):
            is_tensor = isinstance(meta, TensorStorageMetadata)
            state[key] = torch.empty(meta.size, dtype=meta.properties.dtype) if is_tensor else ""
    load(state, storage_reader=FileSystemReader(folder))
    return state


def read_object(value: Any) -> Any:
    """A ShardedObject of Megatron: a stream that holds a torch.save of a list of one."""
    if hasattr(value, "seek"):
        value.seek(0)
        value = torch.load(value, weights_only=False)
    return value[0] if isinstance(value, list) and len(value) == 1 else value


@dataclass
class Case:
    """The sizes of one run and its whole tensors by canonical name."""

    model: Sizes
    pipeline: stages.Pipeline
    args: Mapping[str, Any]
    truth: dict[str, dict[str, torch.Tensor]]  # slot, canonical name

    def degree(self, name: str) -> int:
        return int(self.args.get(name) or 1)

    @property
    def tp(self) -> int:
        return self.degree("tensor_model_parallel_size")

    @property
    def ep(self) -> int:
        return self.degree("expert_model_parallel_size")

    @property
    def etp(self) -> int:
        return self.degree("expert_tensor_parallel_size")

    @property
    def dp(self) -> int:
        return self.degree("world_size") // self.tp // self.pipeline.pp

    def local(self, slot: str, canonical: str, tp_rank: int, etp_rank: int) -> torch.Tensor:
        """What a rank holds of a tensor, by the TP rule."""
        whole = self.truth[slot][canonical]
        rule = tp_rules.tp_rule(canonical, self.model)
        rank, degree = (etp_rank, self.etp) if rule.expert else (tp_rank, self.tp)
        if rule.axis is None or degree == 1:
            return whole
        halves = whole.chunk(2) if rule.gated else [whole]
        return torch.cat([h.chunk(degree, rule.axis)[rank] for h in halves])


def args_of(run: Path, form: str) -> Mapping[str, Any]:
    """The args of a run, with a topology that the file may not say."""
    if form == "dist":
        return vars(torch.load(dist_folder(run) / "common.pt", weights_only=False)["args"])
    first = sorted((run / "torch" / "iter_0000003").glob("mp_rank_*"))[0]
    return vars(torch.load(first / "model_optim_rng.pt", weights_only=False)["args"])


def by_canonical(stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors under torch_dist keys, one per layer and expert."""
    out: dict[str, torch.Tensor] = {}

    def put(name: names.DistName, tensor: torch.Tensor, index: tuple[int, ...]) -> None:
        if len(index) == name.axes:
            out[name.canonical(index)] = tensor
        else:
            for i, part in enumerate(tensor):
                put(name, part, (*index, i))

    for key, tensor in stored.items():
        put(names.from_dist(key), tensor, ())
    return out


def case_of(run: Path, args: Mapping[str, Any], stored: Mapping[str, torch.Tensor]) -> Case:
    """`stored`: "model.", "param.", "exp_avg.", "exp_avg_sq." + torch_dist key."""
    truth = {}
    for slot in ("model", *SLOTS):
        prefix = f"{slot}."
        truth[slot] = by_canonical(
            {k[len(prefix) :]: v for k, v in stored.items() if k.startswith(prefix)}
        )
    assert len(truth["param"]) == len(truth["exp_avg"]) > 0
    return Case(sizes(args), stages.pipeline_of_args(args), args, truth)


def truth_case(run: Path) -> Case:
    """A run with its truth beside it."""
    stored = {
        k.replace("master.", "param.", 1): v
        for k, v in load_file(run / "truth.safetensors").items()
        if k != "step"
    }
    return case_of(run, args_of(run, "dist"), stored)


def model_space_case(run: Path, args: Mapping[str, Any]) -> Case:
    """A run whose fully_reshardable checkpoint is the truth."""
    state = read_dist(
        dist_folder(run),
        lambda k: (
            not k.startswith(("rng_state", "optimizer.state.step")) and "_extra_state" not in k
        ),
    )
    stored = {}
    for key, value in state.items():
        slot, dot, rest = key.removeprefix("optimizer.state.").partition(".")
        inside = key.startswith("optimizer.state.") and dot
        stored[f"{slot}.{rest}" if inside else f"model.{key}"] = value
    return case_of(run, args, stored)


def chunk_params(
    case: Case, pp: int, v: int, ep_rank: int, expert: bool, tp: int = 0, etp: int = 0
) -> list[tuple[str, str, int]]:
    """(legacy name, canonical, numel) of the parameters of one buffer in module order."""
    entries = module_order.legacy_entries(
        case.model, case.pipeline.chunks[pp][v], ep=case.ep, ep_rank=ep_rank
    )
    return [
        (name, canonical, case.local("model", canonical, tp, etp).numel())
        for name, canonical in module_order.parameters(entries)
        if optim_groups.is_expert_parallel(canonical, case.ep) is expert
    ]


def check_places(
    case: Case,
    made: Buffer,
    params: Sequence[tuple[str, str, int]],
    read: Callable[[str, int, int, int, int], torch.Tensor],
    tp: int,
    etp: int,
) -> int:
    """Compares every parameter's elements with the truth; returns how many arrays were equal."""
    canonical = {name: c for name, c, _ in params}
    assert [s.name for s in made.slots] == [name for name, _, _ in reversed(params)]
    equal = 0
    for slot in made.slots:
        name = canonical[slot.name]
        for field in SLOTS:
            want = case.local(field, name, tp, etp)
            got = read(field, slot.bucket, slot.start, slot.flat, slot.numel).reshape(want.shape)
            assert torch.equal(got, want), (name, field)
            equal += 1
            if field == "param":
                weight = case.local("model", name, tp, etp)
                assert torch.equal(got.to(weight.dtype), weight), name
    return equal


def groups(case: Case, expert: bool) -> Iterator[tuple[int, int, int, int]]:
    """(dp_group_idx, tp or etp rank, ep rank, pp rank)."""
    for pp in range(case.pipeline.pp):
        if not expert:
            for tp in range(case.tp):
                yield dense_group(tp, pp, case.tp), tp, 0, pp
            continue
        for ep in range(case.ep):
            for etp in range(case.etp):
                yield expert_group(etp, ep, pp, case.etp, case.ep), etp, ep, pp


def check_dp_reshardable(case: Case, folder: Path) -> tuple[int, int]:
    """Finds every parameter in every bucket; (equal arrays, buckets)."""
    state = read_dist(folder, lambda k: bucket_key(k) is not None)
    tensors: dict[tuple[Any, ...], torch.Tensor] = {}
    lengths: dict[tuple[Any, ...], Any] = {}
    for key, value in state.items():
        parts = bucket_key(key)
        assert parts is not None
        optimizer = parts.chained or 0
        if parts.gbuf is not None:
            tensors[optimizer, parts.group, parts.gbuf, parts.bucket, parts.field] = value
        elif parts.field.startswith("per_bucket"):
            lengths[optimizer, parts.group, parts.field] = read_object(value)
    experts = case.ep > 1
    assert {k[0] for k in tensors} == ({0, 1} if experts else {0})
    equal, seen = 0, set()
    for expert in (False, True) if experts else (False,):
        for g, rank, ep, pp in groups(case, expert):
            unpadded = lengths[int(expert), g, "per_bucket_numel_unpadded"]
            padded = lengths[int(expert), g, "per_bucket_numel"]
            gbuf = 0
            for v, chunk in enumerate(case.pipeline.chunks[pp]):
                params = chunk_params(case, pp, v, ep, expert, rank, rank)
                if not params:
                    continue
                ((_, recorded),) = unpadded[gbuf].items()
                ((_, recorded_padded),) = padded[gbuf].items()
                own = module_order.shared_embedding(case.model, chunk, case.pipeline.pp)
                edp = case.degree("world_size") // case.pipeline.pp // case.ep // case.etp
                made = solve(
                    {"module order": [(n, k) for n, _, k in params]},
                    dp=edp if expert else case.dp,
                    own_bucket={own} if own else (),
                    numels_unpadded=recorded,
                    numels=recorded_padded,
                )

                def read(
                    field: str,
                    b: int,
                    start: int,
                    _: int,
                    n: int,
                    at: tuple[int, int, int] = (int(expert), g, gbuf),
                ) -> torch.Tensor:
                    seen.add((*at, b, field))
                    return tensors[(*at, b, field)][start : start + n]

                equal += check_places(case, made, params, read, rank, rank)
                gbuf += 1
            assert len(unpadded) == gbuf
    assert seen == tensors.keys()
    return equal, len(tensors) // len(SLOTS)


@pytest.mark.parametrize(
    ("fixture", "arrays", "buckets"),
    [
        ("h-llama-tp2pp1dp2-dpr", 162, 2),
        ("made-gpt-tied-pp2dp2-dpr", 159, 4),
        ("made-gpt-tied-pp2-buckets-dpr", 159, 7),
        ("made-llama-pp2vpp2-dpr", 81, 4),
        ("made-moe-pp2ep1-dpr", 186, 2),
        ("made-moe-pp2ep2-dpr", 186, 6),
    ],
)
def test_dp_reshardable_buckets_hold_the_state_of_the_live_run(
    unpacked: Unpacked, fixture: str, arrays: int, buckets: int
):
    run = unpacked(f"megatron/{fixture}")
    equal = check_dp_reshardable(truth_case(run), dist_folder(run))
    assert equal == (arrays, buckets)


def test_dp_reshardable_buckets_of_set_b_hold_the_model_space_state(unpacked: Unpacked):
    args = args_of(unpacked("megatron/b-tp2pp2dp2-dpr"), "dist")
    case = model_space_case(unpacked("megatron/b-tp2pp2dp2"), args)
    folder = dist_folder(unpacked("megatron/b-tp2pp2dp2-dpr"))
    assert check_dp_reshardable(case, folder) == (306, 4)


def check_distrib_optim(case: Case, run: Path) -> int:
    """Finds every parameter in every distrib_optim.pt; returns how many arrays were equal."""
    equal = 0
    for pp in range(case.pipeline.pp):
        for tp in range(case.tp):
            rank = f"mp_rank_{tp:02d}" + (f"_{pp:03d}" if case.pipeline.pp > 1 else "")
            folder = run / "torch" / "iter_0000003" / rank
            file = torch.load(folder / "distrib_optim.pt", weights_only=False)
            assert file["buckets_coalesced"] is True
            for v, chunk in enumerate(case.pipeline.chunks[pp]):
                ((_, stored),) = file[v].items()
                params = chunk_params(case, pp, v, 0, False, tp)
                own = module_order.shared_embedding(case.model, chunk, case.pipeline.pp)
                size = bucket_size_of_args(case.args, pp, v, case.dp)
                made = solve(
                    {"module order": [(n, k) for n, _, k in params]},
                    dp=case.dp,
                    own_bucket={own} if own else (),
                    numel_unpadded=stored["numel_unpadded"],
                    bucket_sizes=(size,),
                )

                def read(
                    field: str, _: int, __: int, flat: int, n: int, stored: Any = stored
                ) -> torch.Tensor:
                    part: torch.Tensor = stored[field][flat : flat + n]
                    return part

                equal += check_places(case, made, params, read, tp, tp)
    return equal


def test_distrib_optim_of_set_b_holds_the_model_space_state(unpacked: Unpacked):
    run = unpacked("megatron/b-tp2pp2dp2")
    case = model_space_case(run, args_of(run, "torch"))
    assert check_distrib_optim(case, run) == 306


def test_distrib_optim_of_many_buckets_rounds_to_the_weights(unpacked: Unpacked):
    """f-dp3-buckets: Megatron's own model-space copy is corrupt, the buffer is right."""
    run = unpacked("megatron/f-dp3-buckets")
    args = args_of(run, "torch")
    corrupt = model_space_case(run, args)
    folder = run / "torch" / "iter_0000003" / "mp_rank_00"
    file = torch.load(folder / "distrib_optim.pt", weights_only=False)
    ((_, stored),) = file[0].items()
    params = chunk_params(corrupt, 0, 0, 0, False)
    made = solve(
        {"module order": [(n, k) for n, _, k in params]},
        dp=3,
        numel_unpadded=stored["numel_unpadded"],
        bucket_sizes=(bucket_size_of_args(args, 0, 0, 3),),
    )
    assert len(made.numels) == 17
    weights = torch.load(folder / "model_optim_rng.pt", weights_only=False)["model"]
    wrong_in_model_space = 0
    for slot in made.slots:
        master = stored["param"][slot.flat : slot.flat + slot.numel]
        weight = weights[slot.name]
        assert torch.equal(master.reshape(weight.shape).to(weight.dtype), weight), slot.name
        canonical = {n: c for n, c, _ in params}[slot.name]
        for field in SLOTS:
            theirs = corrupt.truth[field][canonical].reshape(-1)
            ours = stored[field][slot.flat : slot.flat + slot.numel]
            wrong_in_model_space += not torch.equal(theirs, ours)
    assert wrong_in_model_space == 144
    one_bucket = solve({"module order": [(n, k) for n, _, k in params]}, numel_unpadded=107584)
    assert [s.flat for s in one_bucket.slots] == [s.flat for s in made.slots]


@pytest.mark.parametrize("lengths", [{"numel_unpadded": 803}, {"numels_unpadded": [300, 503]}])
def test_a_buffer_that_lacks_parameters_tells_of_frozen_ones(lengths: dict[str, Any]) -> None:
    """As a run with frozen MLPs records it; no bucket size would help."""
    params = [(f"p{i}", 100 + i) for i in range(9)]
    with pytest.raises(FormatError, match=r"no layout .* holds fewer .* froze some") as error:
        solve({"module order": params}, **lengths)
    assert "ddp_bucket_size" not in str(error.value)


def test_a_bucket_size_that_nothing_says_is_asked_for_by_name():
    """Lengths that are no multiples of 64 move with the buckets."""
    params = [(f"p{i}", 100 + i) for i in range(9)]
    stored = buffer(params, 1, 250)
    assert len(stored.numels) > 1
    recorded = stored.numel_unpadded
    with pytest.raises(FormatError, match=r"no layout agrees.*--from ddp_bucket_size=ELEMENTS"):
        solve({"module order": params}, numel_unpadded=recorded, bucket_sizes=[None])
    said = OpenOptions(parse_target("ddp-bucket-size=250"))
    args = old_args.given({"num_layers": 2}, said)
    size = bucket_size_of_args(args, 0, 0, 1)
    assert solve({"module order": params}, numel_unpadded=recorded, bucket_sizes=[size]) == stored
    with pytest.raises(FormatError, match=r"the checkpoint's args say ddp_bucket_size=300"):
        old_args.given({"ddp_bucket_size": 300}, said)
