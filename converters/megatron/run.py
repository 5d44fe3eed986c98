"""What a Megatron checkpoint holds beside tensors: args, options, schedule, random states."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import lcm

from reshard.checkpoint import Json, ParamGroup
from reshard.containers.carried import Carried
from reshard.containers.inert import Global, Record, TensorRef, globals_in
from reshard.dtypes import named
from reshard.errors import CorruptError, FormatError, LayoutError, LossError
from reshard.format import Fate, Loss
from reshard.scaler import MEGATRON as GRAD_SCALER
from reshard.tensor import PARAM, LogicalTensor, TensorId
from reshard.topology import Topology

from . import names, optim_groups
from .carry import plain, scalar
from .sizes import Sizes, sizes
from .stages import Pipeline

#: Globals that Megatron's own loader needs in what we write; nothing else is ever written.
#: Source: the pickles of fixtures a-* to h-*, megatron.core @ core_v0.16.1.
ALLOWED = frozenset(
    {
        "argparse.Namespace",
        "megatron.core.enums.ModelType",
        "megatron.core.transformer.enums.AttnBackend",
        "megatron.core.transformer.enums.CudaGraphScope",
        "megatron.core.transformer.enums.InferenceCudaGraphScope",
        "signal.Signals",
        "numpy.core.multiarray._reconstruct",
        "numpy._core.multiarray._reconstruct",
        "numpy.ndarray",
        "numpy.dtype",
    }
)

#: Entries of the common dict that are kept as they are.
KEPT = (
    "checkpoint_version",
    "iteration",
    "opt_param_scheduler",
    "num_floating_point_operations_so_far",
)

#: Adam's options that a DistributedOptimizer's FusedAdam does not have, and torch's AdamW does.
STEP = "step"

#: Options that say how the run is cut, not how it trains: a group's experts have an optimizer of
#: their own only with EP > 1.
_OF_TOPOLOGY = ("is_expert_parallel", "pre_is_expert_parallel", STEP)


@dataclass(frozen=True, slots=True)
class Options:
    """One param group as recorded, without its list of params."""

    values: Mapping[str, object]

    def get(self, name: str) -> object:
        """An option, under its name or the older `pre_` spelling."""
        return self.values.get(name, self.values.get(f"pre_{name}"))

    @property
    def expert(self) -> bool:
        """Whether the group belongs to the optimizer of expert-parallel parameters."""
        return bool(self.get("is_expert_parallel"))

    @property
    def decays(self) -> bool:
        """Whether weight decay applies to the group."""
        return self.get("wd_mult") != 0.0


@dataclass(frozen=True)
class Optimizer:
    """The optimizers of a run: their groups, dense first, and how they count steps."""

    groups: tuple[Options, ...]
    step: float | None
    step_in_groups: bool  # FusedAdam: an int in each group; torch AdamW: a 0-d tensor
    distributed: bool  # DistributedOptimizer wrote it
    scaler: Carried | None = None
    chained: bool = False


@dataclass(frozen=True)
class Run:
    """Everything of a checkpoint that is not a tensor of the model or the optimizer."""

    args: Mapping[str, object]
    model: Sizes
    topology: Topology
    pipeline: Pipeline | None
    common: Mapping[str, object]
    optimizer: Optimizer | None
    spec: str | None
    style: names.Style | None = None  # torch_dist spelling, where the source shows it
    #: torch_dist key of every extra state -> None, or words on what it holds beyond nothing
    extra_states: Mapping[str, object] = field(default_factory=dict)
    rng: Mapping[tuple[int, ...], Carried] = field(default_factory=dict)  # by grid position
    rng_grid: tuple[int, ...] = ()  # (pp, tp) or (pp, tp, dp)
    mla_down: bool | None = None  # whether MLA's down projections are cut, where files show it
    legacy_extra: bool = False  # extra states are known from legacy names
    mtp_inner: str = "transformer_layer."
    unread: tuple[str, ...] = ()  # fields beside the known ones, dropped
    deduced: frozenset[str] = frozenset()  # args that the tensors told, not the args


def data_parallel(topology: Topology) -> int:
    """The data-parallel size, at least what expert parallelism needs to place every expert.

    Raises LayoutError if the given size cannot hold the expert ranks.
    """
    model = topology.tp * topology.cp
    experts = topology.expert_tp * topology.ep
    least = lcm(model, experts) // model
    dp = topology.dp or least
    if (model * dp) % experts:
        raise LayoutError(
            f"tp={topology.tp} x cp={topology.cp} x dp={dp} ranks per stage do not divide into "
            f"etp={topology.expert_tp} x ep={topology.ep}. Use a dp that is a multiple of {least}."
        )
    return dp


@dataclass(frozen=True, slots=True)
class Place:
    """A rank's coordinates on the dense and on the expert grid of one pipeline stage."""

    rank: int  # within the stage
    tp: int
    dp: int  # with context parallelism
    etp: int
    ep: int
    edp: int


def places(topology: Topology) -> list[Place]:
    """The ranks of one pipeline stage in order.

    Source: megatron/core/parallel_state.py RankGenerator, order tp-cp-ep-dp-pp @ core_v0.16.1.
    """
    dp = data_parallel(topology)
    tp, etp, ep = topology.tp, topology.expert_tp, topology.ep
    return [
        Place(r, r % tp, r // tp, r % etp, (r // etp) % ep, r // (etp * ep))
        for r in range(tp * topology.cp * dp)
    ]


def writers(topology: Topology) -> dict[tuple[int, int], Place]:
    """(tp, ep) of every legacy file of a stage, and the rank that writes it.

    Written by each rank with dp_rank 0 or expert_dp_rank 0; not always the tp x ep product.
    Source: megatron/training/checkpointing.py save_checkpoint @ core_v0.16.1; fixture c-pp1ep4.
    """
    out: dict[tuple[int, int], Place] = {}
    for place in places(topology):
        if place.dp == 0 or place.edp == 0:
            out.setdefault((place.tp, place.ep), place)
    return out


# --- param groups --------------------------------------------------------------------------------


def param_groups(
    run: Run, tensors: Mapping[TensorId, LogicalTensor]
) -> tuple[tuple[ParamGroup, ...], dict[str, float]]:
    """The groups with the tensors each holds, by Megatron's rules; and every tensor's step.

    Raises FormatError if two recorded groups claim one tensor.
    """
    optimizer = run.optimizer
    if optimizer is None:
        return (), {}
    held: dict[str, int] = {}
    for tensor, logical in tensors.items():
        if tensor.slot not in (PARAM, STEP):
            held.setdefault(tensor.name, len(logical.shape))
    members: list[list[str]] = [[] for _ in optimizer.groups]
    for name, ndim in held.items():
        members[group_of(run, name, ndim)].append(name)
    groups = tuple(
        ParamGroup({k: plain(v) for k, v in g.values.items() if k not in _OF_TOPOLOGY}, tuple(m))
        for g, m in zip(optimizer.groups, members, strict=True)
    )
    steps = {} if optimizer.step is None else dict.fromkeys(held, optimizer.step)
    return groups, steps


def group_of(run: Run, name: str, ndim: int, ep: int | None = None) -> int:
    """Which recorded group holds a parameter."""
    assert run.optimizer is not None
    expert = optim_groups.is_expert_parallel(name, run.topology.ep if ep is None else ep)
    decays = optim_groups.decays(name, ndim) or (
        bool(run.args.get("apply_wd_to_qk_layernorm"))
        and name.rpartition(".")[0].endswith(("q_layernorm", "k_layernorm"))
    )
    fits = [
        i for i, g in enumerate(run.optimizer.groups) if g.expert == expert and g.decays == decays
    ]
    if len(fits) > 1:
        edge = name in optim_groups.EDGES
        by_rate = [i for i in fits if decoupled(run, run.optimizer.groups[i]) == edge]
        fits = by_rate or fits
    if len(fits) != 1:
        keys = ("wd_mult", "lr_mult", "max_lr", "min_lr", "is_expert_parallel")
        shown = [{k: plain(g.get(k)) for k in keys} for g in run.optimizer.groups]
        raise FormatError(
            f"{name}: {len(fits)} of the recorded param groups fit it (is_expert_parallel={expert}"
            f", decays={decays}): {shown}. The run used its own grouping, which the checkpoint "
            "does not describe; convert with --weights-only."
        )
    return fits[0]


def decoupled(run: Run, group: Options) -> bool:
    """Whether a group has the rate of --decoupled-lr.

    core_v0.16.1 records is_decoupled_lr as false in every group, and the rate alone tells.
    Source: optimizer/__init__.py get_standard_config_overrides, _get_param_groups @ core_v0.16.1.
    """
    if group.get("is_decoupled_lr"):
        return True
    rate = run.args.get("decoupled_lr")
    usual = group.get("default_config") is True
    return rate is not None and not usual and plain(group.get("max_lr")) == plain(rate)


#: What Megatron's loader tells groups apart by. Source: optimizer.py @ core_v0.16.1.
IDENTITY = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")


def alike_notes(groups: Sequence[Options]) -> Iterator[str]:
    """A note where Megatron's own loader cannot tell two groups apart."""
    keys = [tuple(plain(g.get(k)) for k in IDENTITY) for g in groups]
    if len(set(keys)) < len(keys):
        yield (
            "--decoupled-lr: megatron-core 0.16.1 records its group and another under one identity "
            "and loads neither its own checkpoint of such a run nor this one with its optimizer"
        )


def regrouped(run: Run, ep: int) -> tuple[tuple[Options, ...], list[Loss]]:
    """The groups as a run with this expert-parallel size has them.

    With EP > 1 experts have an optimizer of their own, with EP = 1 they are in the dense one's
    groups (fixtures c-pp2ep2, made-moe-pp2ep1-dpr). Raises LossError if an expert group's options
    differ from those of the dense group that takes its place.
    """
    assert run.optimizer is not None
    groups, losses = run.optimizer.groups, list[Loss]()
    has_experts = run.model.experts is not None
    if not has_experts or (run.topology.ep > 1) == (ep > 1):
        return groups, losses
    if ep == 1:
        kept = tuple(g for g in groups if not g.expert)
        for g in groups:
            if not g.expert:
                continue
            twin = [k for k in kept if k.decays == g.decays and not decoupled(run, k)]
            if len(twin) != 1 or not _same_options(twin[0], g):
                raise LossError(
                    "the expert param group has other options than the dense one that takes its "
                    f"place at ep=1: {plain(g.values)}"
                )
        return kept, losses
    twin = [g for g in groups if g.decays and not decoupled(run, g)]
    made = [Options({**g.values, "is_expert_parallel": True}) for g in twin[:1]]
    if run.args.get("add_bias_linear") is not False:
        bias = [g for g in groups if not g.decays]
        made += [Options({**g.values, "is_expert_parallel": True}) for g in bias[:1]]
    return (*groups, *made), losses


def _same_options(a: Options, b: Options) -> bool:
    ignored = {"is_expert_parallel", "params", STEP}
    keys = (a.values.keys() | b.values.keys()) - ignored
    return all(plain(a.values.get(k)) == plain(b.values.get(k)) for k in keys)


# --- args ----------------------------------------------------------------------------------------


def target_args(
    run: Run, topology: Topology, changes: Mapping[str, object]
) -> tuple[Record, list[Fate], list[Loss]]:
    """The args for a target: each field kept, rewritten, or dropped for an unknown class."""
    dp = data_parallel(topology)
    rewritten: dict[str, object] = {
        "tensor_model_parallel_size": topology.tp,
        "pipeline_model_parallel_size": topology.pp,
        "transformer_pipeline_model_parallel_size": topology.pp,
        "virtual_pipeline_model_parallel_size": topology.vpp if topology.vpp > 1 else None,
        "num_layers_per_virtual_pipeline_stage": None,
        "num_virtual_stages_per_pipeline_rank": topology.vpp if topology.vpp > 1 else None,
        "expert_model_parallel_size": topology.ep,
        "expert_tensor_parallel_size": topology.expert_tp,
        "context_parallel_size": topology.cp,
        "data_parallel_size": dp,
        "world_size": topology.tp * topology.pp * topology.cp * dp,
        "rank": 0,
        "local_rank": 0,
        **changes,
    }
    if topology.tp == 1:
        rewritten["sequence_parallel"] = False
    elif run.model.experts:  # Megatron trains MoE with TP only so: moe_layer.py @ core_v0.16.1
        rewritten["sequence_parallel"] = True
    values: dict[str, object] = {}
    fates: list[Fate] = []
    losses: list[Loss] = []
    vocab, counted = run.model.vocab, sizes(run.args).vocab
    if vocab is not None and counted is not None and vocab != counted:
        added = counted - int(str(run.args["vocab_size"]))  # the NullTokenizer's token
        rewritten["vocab_size"] = vocab - added
    for name, value in run.args.items():
        if name in rewritten:
            kind = "keep" if plain(value) == plain(rewritten[name]) else "remap"
            detail = "" if kind == "keep" else f"{plain(value)} -> {plain(rewritten[name])}"
            fates.append(Fate(f"args.{name}", kind, detail))
            values[name] = rewritten[name]
            continue
        unknown = unknown_globals(value)
        if unknown:
            fates.append(Fate(f"args.{name}", "drop", f"names {', '.join(unknown)}"))
            losses.append(Loss("arg-dropped", f"args.{name}", f"names {', '.join(unknown)}"))
        elif name in run.deduced:
            fates.append(Fate(f"args.{name}", "derive", "told by the stored tensors"))
            values[name] = value
        else:
            fates.append(Fate(f"args.{name}", "keep"))
            values[name] = value
    for name, value in rewritten.items():
        if name not in values:
            values[name] = value
            fates.append(Fate(f"args.{name}", "derive", "of the target's topology"))
    record = Record(Global("argparse", "Namespace"))
    record.state = values
    return record, fates, losses


TORCH_DTYPES = frozenset(
    f"torch.{n}" for n in ("float32", "float16", "bfloat16", "float64", "uint8", "int8", "int16")
) | {"torch.float8_e4m3fn", "torch.float8_e5m2", "torch.int32", "torch.int64"}


def unknown_globals(value: object) -> list[str]:
    """Names in a value that may not be written: not on the list, nor a torch dtype."""
    return sorted({g.path for g in globals_in(value)} - ALLOWED - TORCH_DTYPES)


# --- what is printed -----------------------------------------------------------------------------


def rows_left(run: Run) -> str | None:
    """The rows that the args count as true and --vocab-size does not, in words; None for none."""
    vocab, counted = run.model.vocab, sizes(run.args).vocab
    if vocab is None or counted is None or vocab >= counted:
        return None
    return f"rows {vocab} to {counted - 1} count as true in the args; left out, as asked"


def extras(run: Run) -> dict[str, Json]:
    """Everything that is no tensor, by dotted path."""
    out: dict[str, Json] = {}
    for name, value in run.common.items():
        shown = plain(value)
        if isinstance(shown, Mapping):
            out.update({f"{name}.{k}": v for k, v in shown.items()})
        else:
            out[name] = shown
    for name, value in run.args.items():
        out[f"args.{name}"] = plain(value)
    if "args.moe_layer_freq" in out and not all(run.model.moe_layers):
        # a number or a list in Megatron; families read the list
        out["args.moe_layer_freq"] = [int(x) for x in run.model.moe_layers]
    scaler = run.optimizer.scaler if run.optimizer is not None else None
    if scaler is not None and isinstance(scaler.obj, Mapping):
        for name, value in scaler.obj.items():
            number = scalar(scaler, value)
            out[f"{GRAD_SCALER}.{name}"] = plain(value) if number is None else number
    if run.rng:
        out["rng_state"] = f"{len(run.rng)} ranks, grid {list(run.rng_grid)}"
    return out


def recipe(
    run: Run,
    topology: Topology,
    groups: Sequence[Options],
    pipeline_flags: Mapping[str, object],
    rows: int | None,
    rows_before: int | None,
    *,
    weights_only: bool,
    rng_kept: bool,
    distributed: str | None,
) -> dict[str, Json]:
    """What the job that resumes needs to be told, and how exact its resume is."""
    dp = data_parallel(topology)
    flags: list[str] = [
        f"--tensor-model-parallel-size {topology.tp}",
        f"--pipeline-model-parallel-size {topology.pp}",
    ]
    if topology.vpp > 1:
        flags.append(f"--num-virtual-stages-per-pipeline-rank {topology.vpp}")
    if run.model.experts:
        flags.append(f"--expert-model-parallel-size {topology.ep}")
        flags.append(f"--expert-tensor-parallel-size {topology.expert_tp}")
    if run.model.experts and topology.tp > 1:
        flags.append("--sequence-parallel")
    if topology.cp > 1:
        flags.append(f"--context-parallel-size {topology.cp}")
    flags += [f"--{k.replace('_', '-')} {v}" for k, v in pipeline_flags.items() if v is not None]
    if distributed == "fully_reshardable":
        flags += ["--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable"]
    out: dict[str, Json] = {
        "flags": list(flags),
        "world_size": topology.tp * topology.pp * topology.cp * dp,
    }
    batch, micro = run.args.get("global_batch_size"), run.args.get("micro_batch_size")
    if isinstance(batch, int) and isinstance(micro, int) and micro > 0:
        if batch % (micro * dp):
            out["global_batch"] = f"{batch} is not a multiple of micro batch {micro} x dp {dp}"
        else:
            out["global_batch"] = (
                f"{batch} = micro {micro} x dp {dp} x {batch // (micro * dp)} accumulation"
            )
    resized = rows is not None and rows_before is not None and rows != rows_before
    if resized and rows_before is not None:
        if rows_before % topology.tp == 0:
            out["vocab"] = (
                f"--make-vocab-size-divisible-by {rows_before // topology.tp} keeps the source's "
                f"{rows_before} padded rows (this target has {rows}), and with them the loss"
            )
        else:
            out["vocab"] = (
                f"the source's {rows_before} padded rows do not divide by tp {topology.tp}"
            )
    if not weights_only and groups:
        out["next_step"] = [
            {"lr": plain(g.get("lr")), "weight_decay": plain(g.get("weight_decay")),
             "wd_mult": plain(g.get("wd_mult"))}
            for g in groups
        ]  # fmt: skip
    if weights_only:
        out["verdict"] = "weights only"
    elif resized:
        out["verdict"] = "changes trajectory"
    elif rng_kept and str(topology) == str(run.topology):
        out["verdict"] = "exact"
    else:
        out["verdict"] = "same sample sequence"
    return out


def step_tensor(step: float, key: str) -> Carried:
    """torch AdamW's step counter: a 0-d fp32 tensor."""
    return Carried(TensorRef(key, named("float32"), 0, (), (), 4), {key: struct.pack("<f", step)})


def whole_step(step: float | None) -> int:
    """A step as FusedAdam keeps it. Raises CorruptError for none or a fraction."""
    if step is None or step != int(step):
        raise CorruptError(f"the optimizer's step counter is {step}, not a whole number")
    return int(step)


def common_step(steps: Iterable[float | None]) -> float | None:
    """The one step of an optimizer. Raises LossError if its parameters disagree."""
    found = {s for s in steps if s is not None}
    if len(found) > 1:
        raise LossError(
            f"the optimizer's parameters have different step counters {sorted(found)[:4]}; this "
            "form keeps one common step. Write megatron-legacy with a non-distributed optimizer, "
            "or convert with --weights-only."
        )
    return found.pop() if found else None
