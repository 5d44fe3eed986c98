"""Reads one rank's optimizer file: ZeRO 1, 2, 3, BF16_Optimizer and the elastic layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

from reshard.containers.carried import Carried, carry
from reshard.containers.inert import Record, TensorRef
from reshard.containers.torchfile import TorchFile
from reshard.errors import CorruptError, FormatError
from reshard.layout import StoredArray
from reshard.tensor import MASTER, STEP

from .rank_file import load
from .values import mapping, number, plain, sequence, whole

#: Entries of optimizer_state_dict that hold neither tensors nor their order.
#: Source: runtime/zero/stage_1_and_2.py state_dict, stage3.py _rigid_state_dict @ 0.19.8.
SETTINGS = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad")
_KNOWN = {
    *SETTINGS,
    "base_optimizer_state",
    "base_optimizer_state_step",
    "single_partition_of_fp32_groups",
    "zero_stage",
    "group_paddings",
    "param_alignment_paddings",
    "partition_count",
    "ds_version",
    "param_slice_mappings",
    "universal_checkpoint_info",
    "optimizer_state_dict",
    "fp32_flat_groups",
    "ds_zero_partition_groups",
}


@dataclass(frozen=True, slots=True)
class GroupState:
    """One rank's part of one param group (of one sub-group under ZeRO 3).

    `tensors` are by slot: master and what the optimizer calls its states. `numbers` are its other
    states, the step among them; `step_tensor` whether the step is a tensor (torch) or a number.
    """

    tensors: Mapping[str, StoredArray]
    numbers: Mapping[str, float] = field(default_factory=dict)
    step_tensor: bool | None = None


@dataclass(frozen=True, slots=True)
class Slices:
    """`param_slice_mappings` of one group: name -> (start in the partition, elements)."""

    at: Mapping[str, tuple[int, int]]


@dataclass(frozen=True)
class RankState:
    """What one rank's optimizer file holds. `options` are the param groups without their params.

    `subgroups` lists the sub-groups of each param group (ZeRO 3; else one each).
    """

    file: str
    stage: int | None  # None: BF16_Optimizer, which does not say
    states: tuple[GroupState, ...]
    options: tuple[Mapping[str, object], ...] | None
    subgroups: tuple[tuple[int, ...], ...]
    counts: tuple[int, ...]  # partitions of each group
    paddings: tuple[int, ...] | None  # at the end of this rank's partitions
    aligned: tuple[tuple[int, ...], ...] | None  # after each parameter
    slices: tuple[Slices, ...]
    settings: Carried
    version: str
    elastic: bool
    unread: tuple[str, ...]
    partition_groups: object = None


def read_rank(folder: Path, name: str, *, slices: bool = False) -> RankState:
    """The optimizer file `name` of a tag folder, headers and small state only.

    `slices` keeps the table of parameter fragments. Raises FormatError for forms that are refused
    by name, CorruptError for a file that contradicts itself.
    """
    file = load(folder, name)
    where = str(folder / name)
    top = mapping(file.root, where)
    found = top.get("optimizer_state_dict")
    if found is None:
        raise FormatError(f"{where}: holds no optimizer state; load the checkpoint --weights-only")
    state = mapping(found, f"{where}: optimizer_state_dict")
    options: Options | None
    stage = None if state.get("zero_stage") is None else whole(state["zero_stage"], where)
    if stage is None and "fp32_flat_groups" in state:
        stage = 3
    if stage == 3:
        states, given, subgroups = _zero3(file, state, where)
        options, elastic = given, False
        n = whole(state.get("partition_count"), f"{where}: partition_count")
        counts = (n,) * len(states)
    else:
        states, options, elastic = _zero12(file, state, where)
        subgroups = tuple((i,) for i in range(len(states)))
        counts = _counts(state.get("partition_count"), len(states), where)
    return RankState(
        file=name,
        stage=stage,
        states=states,
        options=options,
        subgroups=subgroups,
        counts=counts,
        paddings=_integers(state.get("group_paddings"), where),
        aligned=_aligned(state.get("param_alignment_paddings"), where),
        slices=_slices(state.get("param_slice_mappings"), where) if slices else (),
        settings=carry(file, {k: state[k] for k in SETTINGS if k in state}, "settings/"),
        version=str(top.get("ds_version") or state.get("ds_version") or ""),
        elastic=elastic,
        unread=_unread(top, state),
        partition_groups=plain(state.get("ds_zero_partition_groups")),
    )


def _unread(top: Mapping[object, object], state: Mapping[object, object]) -> tuple[str, ...]:
    """The entries that no DeepSpeed writes: those of a client's own optimizer or engine."""
    out = [str(k) for k in top if k not in ("optimizer_state_dict", "ds_config", "ds_version")]
    out += [str(k) for k in state if k not in _KNOWN]
    for name in ("base_optimizer_state", "optimizer_state_dict"):
        inner = state.get(name)
        if isinstance(inner, Mapping):
            out += [f"{name}.{k}" for k in inner if k not in ("state", "param_groups")]
    return tuple(dict.fromkeys(out))


Options = tuple[Mapping[str, object], ...]


def _zero12(
    file: TorchFile, state: Mapping[object, object], where: str
) -> tuple[tuple[GroupState, ...], Options | None, bool]:
    flat = sequence(state.get("single_partition_of_fp32_groups"), f"{where}: fp32 groups")
    base = state.get("base_optimizer_state")
    elastic = isinstance(base, list)
    options: Options | None = None
    if elastic:
        rows: list[object] = list(sequence(base, where))
    else:
        inner = mapping(base, f"{where}: base_optimizer_state")
        if "state" not in inner:  # some optimizers wrap another
            raise FormatError(
                f"{where}: base_optimizer_state has no 'state' (its keys: "
                f"{', '.join(map(str, inner))[:200]}): an optimizer that is not read"
            )
        options = param_groups(file, inner.get("param_groups"), where)
        held = mapping(inner["state"], f"{where}: state")
        rows = [held.get(i) for i in range(len(flat))]
        _all_known(held, len(flat), where)
    if len(rows) != len(flat):
        raise CorruptError(f"{where}: {len(flat)} fp32 partitions and {len(rows)} states")
    step = number(file, state.get("base_optimizer_state_step"))
    states = tuple(
        group_state(file, master, row, f"{where}: group {i}", step)
        for i, (master, row) in enumerate(zip(flat, rows, strict=True))
    )
    return states, options, elastic


def _all_known(held: Mapping[object, object], n: int, where: str) -> None:
    strange = [k for k in held if not isinstance(k, int) or not 0 <= k < n]
    if strange:
        raise CorruptError(f"{where}: optimizer state for group {strange[0]!r}, of {n} groups")


def _zero3(
    file: TorchFile, state: Mapping[object, object], where: str
) -> tuple[tuple[GroupState, ...], Options, tuple[tuple[int, ...], ...]]:
    flat = sequence(state.get("fp32_flat_groups"), f"{where}: fp32_flat_groups")
    inner = mapping(state.get("optimizer_state_dict"), f"{where}: optimizer_state_dict")
    held = mapping(inner.get("state"), f"{where}: state")
    _all_known(held, len(flat), where)
    options = param_groups(file, inner.get("param_groups"), where)
    if any(not isinstance(ref, TensorRef) or prod(ref.shape) == 0 for ref in flat) and any(
        isinstance(ref, TensorRef) and prod(ref.shape) for ref in _tensors(held)
    ):
        raise FormatError(f"{where}: fp32 partitions are empty: {_NVME}")
    states = tuple(
        group_state(file, master, held.get(i), f"{where}: sub-group {i}")
        for i, master in enumerate(flat)
    )
    listed = sequence(inner.get("param_groups"), where)
    subgroups = tuple(
        tuple(whole(i, where) for i in sequence(mapping(g, where).get("params"), where))
        for g in listed
    )
    seen = [i for group in subgroups for i in group]
    if sorted(seen) != list(range(len(flat))):
        raise CorruptError(f"{where}: {len(flat)} sub-groups, the param groups name {seen}")
    return states, options, subgroups


_NVME = (
    "the optimizer was offloaded to NVMe, and its state lies in raw swap files, which are not "
    "read. Save a universal checkpoint, or save once with offload_optimizer device cpu."
)


def _tensors(held: Mapping[object, object]) -> list[object]:
    return [v for row in held.values() if isinstance(row, Mapping) for v in row.values()]


def group_state(
    file: TorchFile, master: object, row: object, where: str, step: float | None = None
) -> GroupState:
    """The arrays and numbers of one group. Raises FormatError for states of an unknown form."""
    tensors: dict[str, StoredArray] = {}
    numbers: dict[str, float] = {}
    tensor_step: bool | None = None
    if isinstance(master, TensorRef):
        tensors[MASTER] = file.array(master, where, file.name)
    for key, value in mapping(row, where).items() if row is not None else ():
        name = str(key)
        found = number(file, value)
        if isinstance(value, TensorRef) and (name != STEP and value.shape != ()):
            tensors[name] = file.array(value, f"{where}: {name}", file.name)
        elif found is not None:
            numbers[name] = found
            if name == STEP:
                tensor_step = isinstance(value, TensorRef)
        elif value is not None and not isinstance(value, (bool, str)):
            raise FormatError(
                f"{where}: optimizer state {name!r} is {plain(value)!r:.60}, which is not read"
            )
    if step is not None and STEP not in numbers:
        numbers[STEP] = step
        tensor_step = False
    return GroupState(tensors, numbers, tensor_step)


def param_groups(file: TorchFile, found: object, where: str) -> Options:
    """The options of every param group, without its list of params.

    A rate that is a tensor of one element, as compiled and capturable optimizers have it, is the
    number in it. Raises FormatError for a larger one.
    """
    return tuple(
        {
            str(k): _option(file, v, f"{where}: option {k!r} of a param group")
            for k, v in mapping(g, f"{where}: a param group").items()
            if k != "params"
        }
        for g in sequence(found, f"{where}: param_groups")
    )


def _option(file: TorchFile, value: object, where: str) -> object:
    if not isinstance(value, TensorRef):
        return value
    found = number(file, value)
    if found is None:
        raise FormatError(f"{where} is a {plain(value)}, which is not read; use --weights-only")
    return found


def _counts(found: object, n: int, where: str) -> tuple[int, ...]:
    """Partitions of each group: a list, or (old releases) one number for all."""
    if isinstance(found, (list, tuple)):
        counts = tuple(whole(c, f"{where}: partition_count") for c in found)
        if len(counts) != n:
            raise CorruptError(f"{where}: {n} groups and {len(counts)} partition counts")
        return counts
    return (whole(found, f"{where}: partition_count"),) * n


def _integers(found: object, where: str) -> tuple[int, ...] | None:
    if found is None:
        return None
    return tuple(whole(n, where) for n in sequence(found, where))


def _aligned(found: object, where: str) -> tuple[tuple[int, ...], ...] | None:
    if found is None:
        return None
    return tuple(
        tuple(whole(n, where) for n in sequence(row, where)) for row in sequence(found, where)
    )


def _slices(found: object, where: str) -> tuple[Slices, ...]:
    if found is None:
        return ()
    out = []
    for row in sequence(found, where):
        at: dict[str, tuple[int, int]] = {}
        for name, value in mapping(row, where).items():
            if isinstance(value, Record):
                start, numel = value.get("start"), value.get("numel")
                at[str(name)] = (whole(start, where), whole(numel, where))
        out.append(Slices(at))
    return tuple(out)


def check_alike(first: RankState, other: RankState) -> None:
    """Raises CorruptError, naming both files, if two ranks' files are not of one save."""
    pairs: Sequence[tuple[str, object, object]] = (
        ("DeepSpeed version", first.version, other.version),
        ("ZeRO stage", first.stage, other.stage),
        ("number of param groups", len(first.states), len(other.states)),
        ("partition counts", first.counts, other.counts),
        ("param groups", plain(first.options), plain(other.options)),
        ("sub-groups", first.subgroups, other.subgroups),
    )
    for what, a, b in pairs:
        if a != b:
            raise CorruptError(_foreign(other.file, first.file, what, b, a))
    for i, (a_, b_) in enumerate(zip(first.states, other.states, strict=True)):
        own = sorted(k for k, n in a_.numbers.items() if b_.numbers.get(k) != n)
        if own and STEP not in own and a_.numbers.keys() == b_.numbers.keys():
            raise FormatError(
                f"{other.file}: the optimizer's {', '.join(own)} is a number of each rank's own "
                f"partition ({b_.numbers[own[0]]:.6g}, in {first.file} {a_.numbers[own[0]]:.6g}), "
                "which no other cut has. Convert with --weights-only."
            )
        if a_.numbers != b_.numbers:
            what = f"optimizer counters of group {i}"
            raise CorruptError(
                _foreign(other.file, first.file, what, dict(b_.numbers), dict(a_.numbers))
            )
        if a_.tensors.keys() != b_.tensors.keys():
            what = f"optimizer states of group {i}"
            raise CorruptError(
                _foreign(other.file, first.file, what, sorted(b_.tensors), sorted(a_.tensors))
            )


def _foreign(file: str, first: str, what: str, mine: object, others: object) -> str:
    return (
        f"{file}: {what} {mine!r:.80}, in {first} {others!r:.80}: the files are of different "
        "saves. Copy the checkpoint again, or remove files left by an older run."
    )
