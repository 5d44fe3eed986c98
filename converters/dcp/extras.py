"""What becomes of schedulers, counters, random states and unknown values."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from reshard.checkpoint import Checkpoint, consumed_samples, is_samples
from reshard.containers import torchfile
from reshard.containers.carried import Carried
from reshard.errors import LossError
from reshard.format import Fate, Loss
from reshard.layout import Draft

from .goal import Goal
from .leaves import ObjectLeaf, dotted
from .state import State
from .values import ALLOWED, Path, own_values, plain, strangers

_DATA = "dataloader"
_RANK = "dp_rank_"


@dataclass
class Kept:
    """What is written beside tensors and groups, and the fate of each field."""

    entries: list[tuple[Path, Carried]] = field(default_factory=list)  # in the store
    files: dict[str, Carried] = field(default_factory=dict)  # beside it
    fates: list[Fate] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)

    def drop(self, path: str, why: str) -> None:
        """A field that the target will not have."""
        self.fates.append(Fate(path, "drop", why))
        self.losses.append(Loss("extra-dropped", path, why))


def keep_extras(source: Checkpoint, aim: Goal) -> Kept:
    """Sort the source's extras for a target."""
    kept = Kept()
    if aim.weights_only:
        if source.extras:
            kept.fates.append(Fate("extras", "drop", "weights only"))
        return kept
    native = source.native
    extras = native.extras if isinstance(native, State) else _neutral(source, kept)
    extras = _data_loaders(extras, aim, kept)
    schedule = schedule_of(extras)
    for extra in extras:
        path = extra.file or dotted(extra.path)
        foreign = strangers(extra.value.obj)
        if foreign:
            kept.drop(path, f"names {', '.join(foreign[:3])}: code is never written again")
        elif aim.same_kind or _has_place(extra, aim, schedule):
            _keep(kept, extra)
            _rescale(source, aim, kept, extra)
        elif schedule is None or extra not in schedule.leaves:
            kept.drop(path, f"no place for it in a checkpoint of kind {aim.dialect.kind}")
    if not aim.same_kind:
        _move(source, aim, schedule, kept)
    return kept


def _has_place(extra: ObjectLeaf, aim: Goal, schedule: Schedule | None) -> bool:
    """Whether a value of another kind of checkpoint is kept under its own path."""
    if extra.file or (schedule is not None and extra in schedule.leaves):
        return False
    if aim.dialect.kind == "torchtitan":
        return extra.path[0] == "train_state"
    return aim.dialect.kind == "plain"


_TRAINING, _SAMPLES = "train_state", "consumed_train_samples"


def _neutral(source: Checkpoint, kept: Kept) -> tuple[ObjectLeaf, ...]:
    """Of another framework's extras those that mean the same here: a scheduler's, train_state."""
    ends = [path[: -len("last_epoch")] for path in source.extras if path.endswith(".last_epoch")]
    out: list[ObjectLeaf] = []
    left: dict[str, None] = {}
    for path, value in source.extras.items():
        parts = path.split(".")
        lead = next((e for e in ends if path.startswith(e)), None)
        if lead is not None:
            where: Path = ("lr_scheduler", path[len(lead) :])
            out.append(ObjectLeaf(where, Carried(value)))
        elif parts[0] == _TRAINING and type(value) in (int, float, bool):
            out.append(ObjectLeaf(tuple(parts), Carried(value)))
        elif path == "ties":
            kept.fates.append(Fate(path, "keep", "both names are written"))
        else:
            left.setdefault(path)
    if not ends:
        out += _counted(source, kept, left)
    samples = consumed_samples(source)
    if samples is not None and not any(e.path == (_TRAINING, _SAMPLES) for e in out):
        out.append(ObjectLeaf((_TRAINING, _SAMPLES), Carried(samples)))
        kept.fates += [
            Fate(path, "remap", f"{_TRAINING}.{_SAMPLES}") for path in left if is_samples(path)
        ]
    if source.iteration is not None and "iteration" in left:
        del left["iteration"]  # what _move says of it
    left = {path: None for path in left if samples is None or not is_samples(path)}
    for name in left:
        kept.drop(name, f"of {source.format}; torch has no place for it")
    return tuple(out)


def _counted(source: Checkpoint, kept: Kept, left: dict[str, None]) -> list[ObjectLeaf]:
    """The state of a LambdaLR that has counted the source's steps; its lambda is the job's own.

    Other frameworks keep a counter and compute rates from their config. DeepSpeed's
    `last_batch_iteration` starts at -1, torch's `last_epoch` at 0.
    Source: torch 2.13 lr_scheduler.py; deepspeed 0.19.8 lr_schedules.py; fixture fsdp2_w2_fp32.
    """
    if source.iteration is None or not source.groups:
        return []
    epoch = source.iteration
    own = source.extras.get("lr_scheduler")
    counter = own.get("last_batch_iteration") if isinstance(own, Mapping) else None
    if isinstance(counter, int):
        epoch = counter + 1
        left.pop("lr_scheduler", None)
    options = [g.options for g in source.groups]
    rates = [o.get("lr") for o in options]
    bases = [o.get("initial_lr", o.get("max_lr", o.get("lr"))) for o in options]
    state: dict[str, object] = {
        "base_lrs": bases,
        "last_epoch": epoch,
        "_step_count": epoch + 1,
        "_is_initial": False,
        "_get_lr_called_within_step": False,
        "_last_lr": rates,
        "lr_lambdas": [None] * len(options),
    }
    kept.fates.append(
        Fate("lr_scheduler", "remap", f"a LambdaLR's state at {epoch} steps; the job's own lambda")
    )
    return [ObjectLeaf(("lr_scheduler", k), Carried(v)) for k, v in state.items()]


def _keep(kept: Kept, extra: ObjectLeaf) -> None:
    if extra.file:
        kept.files[extra.file] = extra.value
    else:
        kept.entries.append((extra.path, extra.value))
    kept.fates.append(Fate(extra.file or dotted(extra.path), "keep"))


_PREPARED = "scheduler.bin"


def _rescale(source: Checkpoint, aim: Goal, kept: Kept, extra: ObjectLeaf) -> None:
    """A scheduler that accelerate prepared steps once for each rank: count for the target's ranks.

    Source: accelerate 1.15.0 scheduler.py, AcceleratedScheduler.step; a resume in another world
    has a wrong rate otherwise.
    """
    state, ranks = extra.value.obj, source.topology.dp
    steps = set(source.steps.values())
    if extra.file != _PREPARED or not isinstance(state, dict) or not ranks or len(steps) != 1:
        return
    step = int(next(iter(steps)))
    if ranks in (1, aim.ranks) or state.get("last_epoch") != step * ranks:
        return
    moved = {**state, "last_epoch": step * aim.ranks}
    if "_step_count" in moved:
        moved["_step_count"] = step * aim.ranks + 1
    kept.files[_PREPARED] = Carried(moved, extra.value.values)
    kept.fates[-1] = Fate(_PREPARED, "remap", f"{aim.ranks} scheduler steps to a step, not {ranks}")


@dataclass(frozen=True, slots=True)
class Schedule:
    """An LR scheduler's state, by field, and the leaves it came from."""

    fields: Mapping[str, Carried]
    leaves: tuple[ObjectLeaf, ...]

    @property
    def base_lrs(self) -> list[float] | None:
        """The rates before scheduling, by group."""
        found = self.fields.get("base_lrs", Carried(None)).obj
        if isinstance(found, list) and all(isinstance(x, int | float) for x in found):
            return [float(x) for x in found]
        return None


def schedule_of(extras: Sequence[ObjectLeaf]) -> Schedule | None:
    """The scheduler's state, known by its `last_epoch`; None if there is none, or several."""
    found: list[Schedule] = []
    for extra in extras:
        if extra.path[-1] == "last_epoch" and len(extra.path) > 1:
            lead = extra.path[:-1]
            inside = [e for e in extras if e.path[: len(lead)] == lead]
            fields = {dotted(e.path[len(lead) :]): e.value for e in inside}
            found.append(Schedule(fields, tuple(inside)))
        elif isinstance(extra.value.obj, Mapping):
            for state in _schedules(extra.value.obj):
                fields = {str(k): Carried(v, extra.value.values) for k, v in state.items()}
                whole = (extra,) if state is extra.value.obj else ()
                found.append(Schedule(fields, whole))
    shown = {repr(sorted((k, plain(v)) for k, v in s.fields.items())) for s in found}
    return found[0] if len(shown) == 1 else None


def _schedules(obj: Mapping[object, object]) -> list[Mapping[object, object]]:
    """The scheduler states in a file: itself, one of its values (Fabric), or a list (Lightning)."""
    if "last_epoch" in obj:
        return [obj]
    out: list[Mapping[object, object]] = []
    for value in obj.values():
        parts = value if isinstance(value, list) else [value]
        out += [p for p in parts if isinstance(p, Mapping) and "last_epoch" in p]
    return out


def _move(source: Checkpoint, aim: Goal, schedule: Schedule | None, kept: Kept) -> None:
    """The scheduler and the step, where the target's kind keeps them."""
    kind = aim.dialect.kind
    if schedule is not None:
        names = ", ".join(leaf.file or dotted(leaf.path) for leaf in schedule.leaves) or "scheduler"
        if kind == "accelerate":
            state: dict[str, object] = {k: v.obj for k, v in schedule.fields.items()}
            kept.files[_PREPARED] = Carried(state)
            kept.fates.append(Fate(names, "remap", _PREPARED))
        else:
            for name, value in schedule.fields.items():
                if kind != "torchtitan" or name == "last_epoch":
                    kept.entries.append((("lr_scheduler", name), value))
            kept.fates.append(Fate(names, "remap", "lr_scheduler"))
    if source.iteration is None or kind not in ("plain", "torchtitan"):
        return
    present = {path for path, _ in kept.entries}
    if ("train_state", "step") not in present:
        kept.entries.append((("train_state", "step"), Carried(source.iteration)))
        kept.fates.append(Fate("iteration", "keep", "train_state.step"))
    if kind == "torchtitan" and ("train_state", "ntokens_seen") not in present:
        kept.entries.append((("train_state", "ntokens_seen"), Carried(0)))
        kept.fates.append(Fate("train_state.ntokens_seen", "derive", "not in the source; 0"))


# ---------------------------------------------------------------------- per-rank data loaders


def _data_loaders(extras: Sequence[ObjectLeaf], aim: Goal, kept: Kept) -> tuple[ObjectLeaf, ...]:
    """The extras with data-loader states for the target's ranks.

    torchtitan keeps one opaque state per data-parallel rank (components/dataloader.py), and ranks
    that find none lose data silently (torchtitan#811). Raises LossError when their number changes
    and nobody said what to do.
    """
    mine = [e for e in extras if _data_rank(e) is not None]
    if not mine or not aim.dp_given or len(mine) == aim.ranks:
        return tuple(extras)
    rest = [e for e in extras if e not in mine and e.path != (_DATA, "world_size")]
    if aim.data is None:
        raise LossError(
            f"{dotted(mine[0].path)} and {len(mine) - 1} more are opaque states of {len(mine)} "
            f"ranks' data loaders; the target has {aim.ranks} ranks. Say data=reset to start the "
            "data anew, or data=rank0 to give every rank the first one's state."
        )
    if aim.data == "reset":
        kept.drop(f"{_DATA}.{_RANK}*", "data loaders start anew, as asked")
        return tuple(rest)
    first = next((e for e in mine if _data_rank(e) == 0), mine[0])
    kept.losses.append(
        Loss("data-cursor", f"{_DATA}.{_RANK}*", "every rank has rank 0's state, as asked")
    )
    made = [replace(first, path=(_DATA, f"{_RANK}{r}")) for r in range(aim.ranks)]
    size = [e for e in extras if e.path == (_DATA, "world_size")]
    return (*rest, *made, *(replace(e, value=Carried(aim.ranks)) for e in size))


def _data_rank(extra: ObjectLeaf) -> int | None:
    match extra.path:
        case ("dataloader", str() as name) if (
            name.startswith(_RANK) and name[len(_RANK) :].isdigit()
        ):
            return int(name[len(_RANK) :])
    return None


def side_drafts(kept: Kept) -> list[Draft]:
    """The files beside the stores."""
    out: list[Draft] = []
    for name, value in kept.files.items():
        if name.endswith(".json"):
            raw = json.dumps(value.obj, indent=2).encode()
            out.append(Draft(name, len(raw), [(0, raw)]))
        else:
            draft, _ = torchfile.draft(
                name,
                value.obj,
                allow=ALLOWED,
                archive=name.partition(".")[0],
                values=own_values(value),
            )
            out.append(draft)
    return out
