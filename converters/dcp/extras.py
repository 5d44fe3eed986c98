"""What becomes of schedulers, counters, random states and unknown values."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from reshard.checkpoint import TIES, Checkpoint, consumed_samples, is_samples
from reshard.containers import torchfile
from reshard.containers.carried import Carried
from reshard.errors import LossError
from reshard.format import Fate, Loss
from reshard.layout import Draft
from reshard.scaler import loss_scale

from .goal import Goal
from .leaves import ObjectLeaf, dotted
from .state import State
from .values import ALLOWED, Path, own_values, plain, strangers

_DATA = "dataloader"
_RANK = "dp_rank_"
_LOADER = re.compile(r"dl_state_dict(_\d+)?\.bin")


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
    """Sort the source's extras for a target; another framework's weights alone have none."""
    kept = Kept()
    native = source.native
    if TIES in source.extras:
        kept.fates.append(Fate(TIES, "keep", "both names are written"))
    if aim.asked_weights or (aim.weights_only and not isinstance(native, State)):
        return kept
    extras = native.extras if isinstance(native, State) else _neutral(source, aim, kept)
    extras = _data_loaders(extras, source, aim, kept)
    schedule = schedule_of(extras)
    for extra in extras:
        path = extra.file or dotted(extra.path)
        foreign = strangers(extra.value.obj)
        if foreign:
            kept.drop(path, f"names {', '.join(foreign[:3])}: code is never written again")
        elif aim.same_kind or _has_place(extra, aim, schedule):
            _keep(kept, extra)
            _rescale(source, aim, kept, extra)
            _rebatch(source, aim, kept, extra)
        elif schedule is None or extra not in schedule.leaves:
            kept.drop(path, f"no place for it in a checkpoint of kind {aim.dialect.kind}")
    if not aim.same_kind:
        _move(source, aim, schedule, kept)
    return kept


def _has_place(extra: ObjectLeaf, aim: Goal, schedule: Schedule | None) -> bool:
    """Whether a value of another kind of checkpoint is kept under its own path."""
    if extra.file or (schedule is not None and extra in schedule.leaves):
        return False
    if extra.path[0] == _SCALER:
        return True
    if aim.dialect.kind == "torchtitan":
        return extra.path[0] == "train_state"
    return aim.dialect.kind == "plain"


_TRAINING, _SAMPLES = "train_state", "consumed_train_samples"


def _neutral(source: Checkpoint, aim: Goal, kept: Kept) -> tuple[ObjectLeaf, ...]:
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
        elif path != TIES:
            left.setdefault(path)
    if not ends:
        out += _counted(source, kept, left)
    out += _scaler(source, aim, kept, left)
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


_SCALER = "scaler"


def _scaler(source: Checkpoint, aim: Goal, kept: Kept, left: dict[str, None]) -> list[ObjectLeaf]:
    """The state of a GradScaler that goes on from another framework's loss scale."""
    scale = loss_scale(source.extras)
    if scale is None:
        return []
    beside = aim.dialect.kind == "accelerate"
    for path in scale.fields:
        left.pop(path, None)
        place = f"{_SCALER}.pt" if beside else _SCALER
        kept.fates.append(Fate(path, "remap", f"{place}: torch's GradScaler has no hysteresis"))
    if beside:
        kept.files[f"{_SCALER}.pt"] = Carried(dict(scale.for_torch()))
        return []
    return [ObjectLeaf((_SCALER, k), Carried(v)) for k, v in scale.for_torch().items()]


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
    state, ranks, step = extra.value.obj, source.topology.dp, _common_step(source)
    if extra.file != _PREPARED or not isinstance(state, dict) or not ranks or step is None:
        return
    if ranks == aim.ranks or state.get("last_epoch") != step * ranks:
        return
    moved = {**state, **_counts(state, step * aim.ranks)}
    kept.files[_PREPARED] = Carried(moved, extra.value.values)
    kept.fates[-1] = Fate(_PREPARED, "remap", f"{aim.ranks} scheduler steps to a step, not {ranks}")


_TRAINER, _PER_DEVICE = "trainer_state.json", "train_batch_size"


def _rebatch(source: Checkpoint, aim: Goal, kept: Kept, extra: ObjectLeaf) -> None:
    """Trainer's progress counts global batches: another number of ranks has another share of each.

    Trainer up to 4.50, and later with auto_find_batch_size, trains on with the batch per device
    that its state names. A share that is no whole number is rounded down, and the job's own counts:
    Trainer warns where the two differ, and fails where there is none.
    Source: transformers trainer.py, train and _init_training_state @ v5.24.
    """
    state, ranks = extra.value.obj, source.topology.dp
    if extra.file != _TRAINER or not isinstance(state, dict) or not ranks or ranks == aim.ranks:
        return
    share = state.get(_PER_DEVICE)
    if not isinstance(share, int):
        return
    new, left = divmod(share * ranks, aim.ranks)
    kept.files[_TRAINER] = Carried({**state, _PER_DEVICE: max(1, new)}, extra.value.values)
    told = "for the job to say" if left else new
    detail = f"{share} on each of {ranks} ranks is {told} on {aim.ranks}"
    kept.fates.append(Fate(f"{_TRAINER}.{_PER_DEVICE}", "remap", detail))


def _common_step(source: Checkpoint) -> int | None:
    """The step that every parameter has counted."""
    steps = set(source.steps.values())
    return int(steps.pop()) if len(steps) == 1 else None


def _counts(state: Mapping[str, object], count: int) -> dict[str, object]:
    """The counters of a scheduler that has taken `count` steps."""
    return {k: v for k, v in (("last_epoch", count), ("_step_count", count + 1)) if k in state}


def _counted_by(
    schedule: Schedule, source: Checkpoint, per_step: int
) -> tuple[Mapping[str, Carried], str]:
    """The scheduler's fields, counting `per_step` for a step of the optimizer; and what is said.

    Left alone where it does not count as its kind of checkpoint does.
    """
    prepared = any(leaf.file == _PREPARED for leaf in schedule.leaves)
    step, before = _common_step(source), (source.topology.dp or 1) if prepared else 1
    count = schedule.fields.get("last_epoch", Carried(None)).obj
    if step is None or count != step * before or before == per_step:
        return schedule.fields, ""
    made = {k: Carried(v) for k, v in _counts(schedule.fields, step * per_step).items()}
    return {**schedule.fields, **made}, f": {per_step} scheduler steps to a step, not {before}"


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
        place = _PREPARED if kind == "accelerate" else "lr_scheduler"
        per_step = aim.ranks if kind == "accelerate" else 1
        fields, detail = _counted_by(schedule, source, per_step)
        if kind == "accelerate":
            kept.files[_PREPARED] = Carried({k: v.obj for k, v in fields.items()})
        else:
            for name, value in fields.items():
                if kind != "torchtitan" or name == "last_epoch":
                    kept.entries.append((("lr_scheduler", name), value))
        kept.fates += [
            Fate(leaf.file or dotted(leaf.path), "remap", f"{place}{detail}")
            for leaf in schedule.leaves
        ]
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


def _data_loaders(
    extras: Sequence[ObjectLeaf], source: Checkpoint, aim: Goal, kept: Kept
) -> tuple[ObjectLeaf, ...]:
    """The extras with data-loader states for the target's ranks.

    torchtitan keeps one opaque state per data-parallel rank (components/dataloader.py), and ranks
    that find none lose data silently (torchtitan#811); accelerate keeps the main process's, which
    all take up (`dl_state_dict.bin` of a StatefulDataLoader). Raises LossError when their number
    changes and nobody said what to do.
    """
    blobs = [e for e in extras if _data_rank(e) is not None]
    shared = [e for e in extras if e.file and _LOADER.fullmatch(e.file)]
    before = len(blobs) or source.topology.dp
    if not (blobs or shared) or not aim.dp_given or before == aim.ranks:
        return tuple(extras)
    name = f"{_DATA}.{_RANK}*" if blobs else str(shared[0].file)
    if aim.data is None:
        raise LossError(
            f"{name}: opaque states of {before} ranks' data loaders; the target has {aim.ranks} "
            "ranks. Say --data-cursor reset to start the data anew, or --data-cursor keep-rank0 "
            "to give every rank rank 0's state."
        )
    mine = [*blobs, *shared]
    rest = [e for e in extras if e not in mine and e.path != (_DATA, "world_size")]
    if aim.data == "reset":
        for one in mine:
            kept.drop(one.file or dotted(one.path), "data loaders start anew, as asked")
        return tuple(rest)
    kept.losses.append(Loss("data-cursor", name, "every rank has rank 0's state, as asked"))
    kept.fates += [
        Fate(dotted(e.path), "drop", "every rank has rank 0's state, as asked")
        for e in blobs
        if _data_rank(e) != 0 and (_data_rank(e) or 0) >= aim.ranks
    ]
    first = [e for e in blobs if _data_rank(e) == 0] or blobs[:1]
    made = [replace(e, path=(_DATA, f"{_RANK}{r}")) for e in first for r in range(aim.ranks)]
    size = [e for e in extras if e.path == (_DATA, "world_size")]
    return (*rest, *shared, *made, *(replace(e, value=Carried(aim.ranks)) for e in size))


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
