"""Reads the optimizer of a legacy rank file: state by pid, or the buffers of distrib_optim.pt."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path

from reshard.containers import torchfile
from reshard.containers.carried import Carried, carry
from reshard.containers.inert import Global, TensorRef
from reshard.containers.torchfile import TorchFile
from reshard.dtypes import FLOAT32, DType
from reshard.errors import CorruptError, FormatError
from reshard.tensor import MASTER, TensorId

from . import buckets, module_order, names, run
from .buckets import Buffer
from .carry import mapping, plain, sequence
from .legacy_held import Entry, Holdings, Param
from .legacy_ranks import RankFile
from .run import Optimizer, Options, Run
from .stages import Chunk

_Found = list[tuple[Entry, int]]
_GROUPED = "params"


@dataclass(frozen=True, slots=True)
class Member:
    """One optimizer of a rank: dense, or the experts'."""

    state: Mapping[object, object]  # its own state_dict
    inner: Mapping[object, object]  # the wrapped optimizer's: state, param_groups
    options: tuple[Options, ...]

    @property
    def where(self) -> str:
        """For messages."""
        return "the experts' optimizer" if any(o.expert for o in self.options) else "the optimizer"


@dataclass
class OptimizerReader:
    """Takes in the optimizer of one rank file after the other."""

    folder: Path
    native: Run
    holdings: Holdings
    weights_only: bool
    steps: dict[str, float] = field(default_factory=dict)  # by tensor
    _groups: list[Options] = field(default_factory=list)
    _scaler: Carried | None = None
    _in_groups: bool = False
    _distributed: bool = False
    _chained: bool = False
    _read: set[str] = field(default_factory=set)
    left: bool = False  # whether an optimizer is there that was not read

    def optimizer(self) -> Optimizer | None:
        """The optimizers of the run; the step is None if parameters disagree on it."""
        if not self._groups:
            return None
        groups = (
            *(g for g in self._groups if not g.expert),
            *(g for g in self._groups if g.expert),
        )
        counted = set(self.steps.values())
        step = counted.pop() if len(counted) == 1 else None
        return Optimizer(
            groups, step, self._in_groups, self._distributed, self._scaler, self._chained
        )

    def buffers(self, rank: RankFile) -> list[str]:
        """The distrib_optim.pt of a rank, if it was read."""
        return [rank.distributed] if rank.distributed in self._read else []

    def read(
        self, rank: RankFile, file: TorchFile, root: Mapping[object, object], params: list[Param]
    ) -> None:
        """Take in one rank file. Raises FormatError or CorruptError for what does not fit."""
        self.left |= self.weights_only and root.get("optimizer") is not None
        if self.weights_only or root.get("optimizer") is None:
            if (self.folder / rank.distributed).exists() and not self.weights_only:
                raise CorruptError(f"{file.path} has no optimizer, and {rank.distributed} is there")
            return
        members = [self._member(file, m) for m in _chain(root["optimizer"], file.path)]
        self._take_options(file, members)
        trained = [p for p in params if not names.is_buffer(p.name)]
        grouped = self._assigned(members, trained)
        if any("state" in m.inner for m in members):
            found: _Found = []
            for member, groups in zip(members, grouped, strict=True):
                found += self._by_pid(file, member, groups)
            self.holdings.add(rank, rank.model, found)
        else:
            self._flat(rank, members, grouped, trained)

    def _member(self, file: TorchFile, state: Mapping[object, object]) -> Member:
        inner = state if "param_groups" in state else state.get("optimizer")
        inner = mapping(inner, f"{file.path}: optimizer")
        if "param_groups" not in inner:
            raise FormatError(
                f"{file.path}: the optimizer holds {sorted(map(str, inner))}, a form that is not "
                "read. Convert with --weights-only."
            )
        groups = sequence(inner["param_groups"], f"{file.path}: param_groups")
        read = []
        for group in groups:
            values = mapping(group, f"{file.path}: a param group")
            read.append(
                Options({str(k): _number(file, v) for k, v in values.items() if k != _GROUPED})
            )
        return Member(state, inner, tuple(read))

    def _take_options(self, file: TorchFile, members: Sequence[Member]) -> None:
        """Join the rank's groups to those of the ranks before; the same group must be the same."""
        for member in members:
            for options in member.options:
                key = _identity(self.native, options)
                known = next((g for g in self._groups if _identity(self.native, g) == key), None)
                if known is None:
                    self._groups.append(options)
                elif plain(known.values) != plain(options.values):
                    odd = next(k for k, v in known.values.items() if options.values.get(k) != v)
                    raise CorruptError(
                        f"{file.path}: {odd} of a param group is {plain(options.values.get(odd))}, "
                        f"{plain(known.values[odd])} in another rank file. Two checkpoints are "
                        "mixed in this folder."
                    )
                self._in_groups |= run.STEP in options.values
            scaler = member.state.get("grad_scaler")
            if scaler is not None and self._scaler is None:
                self._scaler = carry(file, scaler, "scaler/")
        self._chained |= len(members) > 1

    def _assigned(
        self, members: Sequence[Member], trained: Sequence[Param]
    ) -> list[list[list[Param]]]:
        """Each member's groups with their parameters in pid order, by Megatron's rules."""
        flat = tuple(o for m in members for o in m.options)
        native = replace(self.native, optimizer=Optimizer(flat, None, False, False))
        held: list[list[Param]] = [[] for _ in flat]
        for param in trained:
            held[run.group_of(native, param.name, len(param.shape))].append(param)
        out, at = [], 0
        for member in members:
            out.append(held[at : at + len(member.options)])
            at += len(member.options)
        for group, options in zip(held, flat, strict=True):
            step = options.values.get(run.STEP)
            if isinstance(step, int | float):
                for spot in (s for p in group for s in p.spots):
                    self._step(spot.name, float(step), "a param group")
        return out

    def _step(self, name: str, step: float, where: object) -> None:
        if self.steps.setdefault(name, step) != step:
            raise CorruptError(
                f"{where}: {name} has step {step}, {self.steps[name]} in another rank file. The "
                "files are of different iterations."
            )

    # --- state by pid ---

    def _by_pid(self, file: TorchFile, member: Member, groups: list[list[Param]]) -> _Found:
        """Float16Optimizer's and FP32Optimizer's state: pids count over the groups in order."""
        where = f"{file.path}: {member.where}"
        recorded = [
            sequence(mapping(g, where).get(_GROUPED), f"{where}: params")
            for g in sequence(member.inner["param_groups"], where)
        ]
        states = mapping(member.inner["state"], f"{where}: state")
        masters = member.state.get("fp32_from_fp16_params", member.state.get("fp32_from_fp16"))
        lists = [list(sequence(m, where)) for m in sequence(masters or [()] * len(groups), where)]
        if len(lists) != len(groups):
            raise CorruptError(f"{where} has masters of {len(lists)} groups, not {len(groups)}")
        found: _Found = []
        steps: list[tuple[Param, TensorRef]] = []
        pid = 0
        for i, (group, pids) in enumerate(zip(groups, recorded, strict=True)):
            if list(pids) != list(range(pid, pid + len(group))):
                raise FormatError(
                    f"{where} records {len(pids)} parameters in group {i}, Megatron's grouping of "
                    f"this model makes {len(group)} (pids {pid} on). The run grouped parameters "
                    "its own way, or froze some; convert with --weights-only."
                )
            for param in group:
                found += self._states(file, param, states.get(pid), where, steps)
                pid += 1
            found += _masters(file, group, lists[i], masters is not None, where)
        unknown = set(states) - set(range(pid))
        if unknown:
            raise CorruptError(
                f"{where} has state of unknown parameters {sorted(unknown, key=str)}"
            )
        for param, step in _read_steps(file, steps):
            for spot in param.spots:
                self._step(spot.name, step, where)
        return found

    def _states(
        self,
        file: TorchFile,
        param: Param,
        state: object,
        where: str,
        steps: list[tuple[Param, TensorRef]],
    ) -> _Found:
        found: _Found = []
        for key, value in mapping(state if state is not None else {}, where).items():
            slot = str(key)
            if value is None:
                continue
            if slot == run.STEP and isinstance(value, int | float):
                for spot in param.spots:
                    self._step(spot.name, float(value), where)
            elif slot == run.STEP and isinstance(value, TensorRef) and prod(value.shape) == 1:
                steps.append((param, value))
            elif (
                isinstance(value, TensorRef)
                and value.shape == param.shape
                and value.dtype.floating
                and slot not in ("param", MASTER)
            ):
                found += _entries(file, param, value, slot)
            else:
                raise FormatError(
                    f"{where}: state {slot!r} of {param.key} is {plain(value)}, where a float "
                    f"tensor {list(param.shape)} is expected. Convert with --weights-only."
                )
        return found

    # --- distrib_optim.pt ---

    def _flat(
        self,
        rank: RankFile,
        members: Sequence[Member],
        grouped: Sequence[list[list[Param]]],
        trained: Sequence[Param],
    ) -> None:
        """The DistributedOptimizer's buffers, one file a rank."""
        path = self.folder / rank.distributed
        if not path.is_file():
            raise CorruptError(
                f"{path} is missing: {rank.model} was saved with a distributed optimizer, whose "
                "state lies there. Copy it again, or convert with --weights-only."
            )
        self._distributed = True
        self._read.add(rank.distributed)
        file = torchfile.load(path, rank.distributed)
        states = list(file.root) if isinstance(file.root, list) else [file.root]
        if len(states) != len(members):
            raise CorruptError(f"{path}: holds {len(states)} optimizers, not {len(members)}")
        found: _Found = []
        for state, groups in zip(states, grouped, strict=True):
            mine = {id(p) for group in groups for p in group}
            if state is not None:  # None: another rank file has it
                kept = [p for p in trained if id(p) in mine]
                numel = sum(prod(p.shape) for p in trained)
                found += self._buffers(rank, file, mapping(state, str(path)), kept, numel)
        self.holdings.add(rank, rank.distributed, found)

    def _buffers(
        self,
        rank: RankFile,
        file: TorchFile,
        state: Mapping[object, object],
        params: Sequence[Param],
        numel: int,
    ) -> _Found:
        """One member's buffers: one per model chunk and parameter dtype, counted over both.

        `numel`: the rank's parameters, of all members.
        """
        if state.get("buckets_coalesced") is not True:
            raise FormatError(
                f"{file.path}: an older form (buckets are not coalesced) is not read. Load and "
                "save it with a newer Megatron, or convert with --weights-only."
            )
        wanted = list(_by_buffer(params))
        if set(state) - {"buckets_coalesced"} != set(range(len(wanted))):
            raise CorruptError(
                f"{file.path}: holds the buffers {sorted(map(str, state))}; the model makes "
                f"{len(wanted)}"
            )
        found: _Found = []
        for i, (chunk, dtype, mine) in enumerate(wanted):
            by_dtype = mapping(state[i], f"{file.path}: buffer {i}")
            if len(by_dtype) != 1:
                raise FormatError(f"{file.path}: buffer {i} has {len(by_dtype)} dtypes, not one")
            ((kinds, content),) = by_dtype.items()
            if not _is_dtype(kinds, dtype):
                raise CorruptError(f"{file.path}: buffer {i} is of {plain(kinds)}, not {dtype}")
            held = mapping(content, f"{file.path}: buffer {i}")
            made = self._solved(rank, chunk, mine, held, numel, f"{file.path}: buffer {i}")
            found += _from_buffer(file, held, made, mine, i)
        return found

    def _solved(
        self,
        rank: RankFile,
        chunk: int,
        params: Sequence[Param],
        held: Mapping[object, object],
        numel: int,
        where: str,
    ) -> Buffer:
        """Where each parameter lies, by what its length tells of the bucket size."""
        length = held.get("numel_unpadded")
        if not isinstance(length, int):
            raise CorruptError(f"{where} does not say numel_unpadded")
        native = self.native
        assert native.pipeline is not None
        stage: Sequence[Chunk] = native.pipeline.chunks[rank.stage]
        own = module_order.shared_embedding(native.model, stage[chunk], native.topology.pp)
        dp = run.data_parallel(native.topology)
        size = buckets.bucket_size_of_args(native.args, rank.stage, chunk, dp, numel)
        try:
            return buckets.solve(
                {"the model's order": [(p.key, prod(p.shape)) for p in params]},
                dp=dp,
                own_bucket=[own] if own else [],
                numel_unpadded=length,
                bucket_sizes=[size],
            )
        except FormatError as error:
            raise FormatError(f"{where}: {error}") from None


def _chain(optimizer: object, where: Path) -> list[Mapping[object, object]]:
    """The members: a list if there are several (ChainedOptimizer), else the only one."""
    listed = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    return [mapping(m, f"{where}: optimizer") for m in listed]


def _identity(native: Run, options: Options) -> tuple[object, ...]:
    """What tells groups apart. Source: optimizer.py param_group_identifier_keys @ core_v0.16.1."""
    keys = (k for k in run.IDENTITY if k != "is_decoupled_lr")
    return (*(plain(options.get(k)) for k in keys), run.decoupled(native, options))


def _number(file: TorchFile, value: object) -> object:
    """An option; a one-element tensor (capturable Adam's lr and step) becomes its number."""
    if isinstance(value, TensorRef) and prod(value.shape) == 1:
        return file.read(value).reshape(-1)[0].item()
    return value


def _entries(
    file: TorchFile, param: Param, ref: TensorRef, slot: str
) -> Iterator[tuple[Entry, int]]:
    """A slot's entries: it lies as its parameter does."""
    array = file.array(ref, f"{param.key} ({slot})")
    for spot in param.spots:
        entry = Entry(TensorId(spot.name, slot), spot, array.key, array.shape, array.dtype)
        yield entry, array.offset


def _masters(
    file: TorchFile, group: Sequence[Param], listed: Sequence[object], there: bool, where: str
) -> _Found:
    """fp32 copies of a group's half-precision parameters; its fp32 ones have none."""
    half = [p for p in group if p.dtype.itemsize < FLOAT32.itemsize] if there else []
    shapes = [r.shape if isinstance(r, TensorRef) else None for r in listed]
    if shapes != [p.shape for p in half]:
        raise CorruptError(
            f"{where} has {len(listed)} masters of a group of {len(half)} half-precision "
            "parameters, or of other shapes"
        )
    found: _Found = []
    for param, ref in zip(half, listed, strict=True):
        assert isinstance(ref, TensorRef)
        found += _entries(file, param, ref, MASTER)
    return found


def _read_steps(
    file: TorchFile, steps: Sequence[tuple[Param, TensorRef]]
) -> Iterator[tuple[Param, float]]:
    """The values of 0-d step tensors, read with one open of the file."""
    if not steps:
        return
    fd = os.open(file.path, os.O_RDONLY)
    try:
        for param, ref in steps:
            if ref.dtype != FLOAT32:
                yield param, float(file.read(ref).reshape(-1)[0])
                continue
            raw = os.pread(fd, 4, file.array(ref, run.STEP).offset)
            yield param, float(struct.unpack("<f", raw)[0])
    finally:
        os.close(fd)


def _by_buffer(params: Sequence[Param]) -> Iterator[tuple[int, DType, list[Param]]]:
    """(chunk, parameter dtype, parameters in module order) of every buffer, in their order."""
    held: dict[tuple[int, DType], list[Param]] = {}
    for param in params:
        held.setdefault((param.chunk, param.dtype), []).append(param)
    for (chunk, dtype), mine in held.items():
        yield chunk, dtype, mine


def _is_dtype(kinds: object, dtype: DType) -> bool:
    first = kinds[0] if isinstance(kinds, tuple) and kinds else None
    return isinstance(first, Global) and first.path == f"torch.{dtype.name}"


def _from_buffer(
    file: TorchFile,
    held: Mapping[object, object],
    made: Buffer,
    params: Sequence[Param],
    i: int,
) -> _Found:
    """The entries of every parameter in a buffer's param (the master), exp_avg, exp_avg_sq."""
    found: _Found = []
    starts = {slot.name: slot.flat for slot in made.slots}
    for key, ref in held.items():
        if key == "numel_unpadded":
            continue
        if not isinstance(ref, TensorRef) or ref.shape != (made.numel_unpadded,):
            raise CorruptError(f"{file.path}: {key} of buffer {i} is {plain(ref)}")
        name = MASTER if key == "param" else str(key)
        array = file.array(ref, f"{key} of buffer {i}")
        for param in params:
            for spot in param.spots:
                tensor = TensorId(spot.name, name)
                entry = Entry(tensor, spot, array.key, array.shape, array.dtype, starts[param.key])
                found.append((entry, array.offset))
    return found
