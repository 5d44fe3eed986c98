"""Model to model: the typed steps of a migration file, applied to a checkpoint before the plan."""

from __future__ import annotations

import fnmatch
import re
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from reshard.box import Box
from reshard.checkpoint import Checkpoint, Json, ParamGroup
from reshard.codec import constant
from reshard.dtypes import named
from reshard.errors import FormatError, LossError, UsageError
from reshard.format import Loss
from reshard.layout import Layout, Piece
from reshard.options import misfit
from reshard.tensor import MASTER, PARAM, STEP, LogicalTensor, TensorId


@dataclass(frozen=True, slots=True)
class Rename:
    """Names that a regular expression matches whole, in every slot. Loses nothing."""

    match: str
    to: str  # with \\1, \\g<name>


@dataclass(frozen=True, slots=True)
class Drop:
    """Tensors left behind: these slots of them, or all."""

    names: tuple[str, ...]  # globs
    slots: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Default:
    """Slots that tensors lack, zero and in fp32, with a param group and a step counter."""

    names: tuple[str, ...]
    slots: tuple[str, ...]
    group_of: str | None = None  # the tensor whose param group takes them in
    step: float = 0.0


@dataclass(frozen=True, slots=True)
class Reset:
    """Slots set to zero; `step` among them sets the counters."""

    names: tuple[str, ...]
    slots: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Resize:
    """Another number of rows: new ones are zero in every slot, the last ones are cut off."""

    names: tuple[str, ...]
    rows: int


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the param groups of these tensors; a group that holds others too is split."""

    names: tuple[str, ...]
    set: Mapping[str, Json]


Step = Rename | Drop | Default | Reset | Resize | Options
_KINDS: Mapping[str, type[Step]] = {
    "rename": Rename,
    "drop": Drop,
    "default": Default,
    "reset": Reset,
    "resize": Resize,
    "options": Options,
}
#: Config keys that say how many rows a vocabulary has.
_ROWS = ("config", "vocab_size"), ("args.vocab_size", None)


@dataclass(frozen=True)
class Migration:
    """The steps of a migration file, in order."""

    steps: tuple[Step, ...]
    shown: tuple[Mapping[str, Json], ...]  # as the file has them: for plan and manifest


@dataclass(frozen=True)
class Migrated:
    """A checkpoint after a migration, what that lost, and what a person should know."""

    checkpoint: Checkpoint
    losses: tuple[Loss, ...] = ()
    notes: tuple[str, ...] = ()
    steps: tuple[Mapping[str, Json], ...] = ()


# --- the file ------------------------------------------------------------------------------------


def read_migration(path: str | Path) -> Migration:
    """The migration in a TOML file: tables `[[step]]`, each with its `kind`.

    Raises UsageError for a file that cannot be read, FormatError naming the step and key that is
    not understood.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UsageError(f"--migrate {path}: {error}") from error
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise FormatError(f"{path}: not TOML: {error}") from error
    rows = table.get("step")
    if set(table) != {"step"} or not isinstance(rows, list) or not rows:
        raise FormatError(f"{path}: a migration file holds [[step]] tables and nothing else")
    return Migration(
        tuple(_step(row, f"{path}: step {i}") for i, row in enumerate(rows, 1)), tuple(rows)
    )


_LISTS, _TEXTS = ("names", "slots"), ("match", "to", "group_of")
_TAKES = {
    **dict.fromkeys(_LISTS, "a list of texts"),
    **dict.fromkeys(_TEXTS, "a text"),
    "rows": "a whole number above 0",
    "step": "a number from 0 on",
    "set": "a table, as in { weight_decay = 0.0 }",
}


def _step(row: Mapping[str, Any], where: str) -> Step:
    fields = dict(row)
    kind = fields.pop("kind", None)
    made = _KINDS.get(kind) if isinstance(kind, str) else None
    if made is None:
        raise FormatError(f"{where}: kind {kind!r}: choose one of {', '.join(_KINDS)}")
    for name, value in fields.items():
        _check(name, value, where)
        if name in _LISTS:
            fields[name] = tuple(value)
    try:
        return made(**fields)
    except TypeError as error:
        raise FormatError(f"{where} ({kind}): {error}".replace("__init__() ", "")) from error


def _check(name: str, value: object, where: str) -> None:
    """Raises FormatError for a value of another type than the key has."""
    if name in _LISTS:
        fits = isinstance(value, list) and bool(value) and all(isinstance(x, str) for x in value)
    elif name in _TEXTS:
        fits = isinstance(value, str)
    elif name == "rows":
        fits = type(value) is int and value > 0
    elif name == "step":
        fits = type(value) in (int, float) and 0 <= value < 2**53  # type: ignore[operator]  # so
    else:
        fits = name != "set" or (isinstance(value, dict) and bool(value))
    if not fits:
        raise FormatError(
            f"{where}: {name} = {value!r:.100} is not what {name} takes: {_TAKES[name]}"
        )
    for option, given in value.items() if isinstance(value, dict) and name == "set" else ():
        _check_option(option, given, None, where)


def _check_option(option: str, given: object, held: Json, where: str) -> None:
    """Raises FormatError for an option of a param group of another type than it has."""
    wanted = misfit(option, given, held)
    if wanted is not None:
        now = "" if held is None else f"; it is {held!r:.60} now"
        raise FormatError(f"{where}: set.{option} = {given!r:.100}: give {wanted}{now}")


# --- applying it ---------------------------------------------------------------------------------


def migrate(checkpoint: Checkpoint, migration: Migration) -> Migrated:
    """The checkpoint with every step applied, in the source's own names.

    What only its own converter's writers use (`native`) is left behind: a migrated checkpoint is
    written from its neutral fields. Raises UsageError for a step that touches nothing, LossError
    for one that would lose what it does not name.
    """
    found = Migrated(replace(checkpoint, native=None, quantised=None))
    for step in migration.steps:
        after = _apply(found.checkpoint, step)
        found = Migrated(
            after.checkpoint, (*found.losses, *after.losses), (*found.notes, *after.notes)
        )
    return replace(found, steps=migration.shown)


def _apply(checkpoint: Checkpoint, step: Step) -> Migrated:
    match step:
        case Rename():
            return _rename(checkpoint, step)
        case Drop():
            return _drop(checkpoint, step)
        case Default():
            return _default(checkpoint, step)
        case Reset():
            return _reset(checkpoint, step)
        case Resize():
            return _resize(checkpoint, step)
        case Options():
            return _options(checkpoint, step)


def _named(checkpoint: Checkpoint, globs: Sequence[str]) -> list[str]:
    """The tensors that globs name, in order. Raises UsageError for a glob that names none."""
    names = list(dict.fromkeys(t.name for t in checkpoint.layout.tensors))
    for glob in globs:
        if not fnmatch.filter(names, glob):
            raise UsageError(f"the migration names {glob!r}, and {checkpoint.path} has no such")
    return [n for n in names if any(fnmatch.fnmatchcase(n, g) for g in globs)]


def _with(
    checkpoint: Checkpoint,
    tensors: Mapping[TensorId, LogicalTensor],
    pieces_of: Callable[[TensorId], Sequence[Piece]] | None = None,
) -> Checkpoint:
    layout = checkpoint.layout
    made = Layout(tensors, pieces_of or layout.pieces_of, layout.naming)
    return replace(checkpoint, layout=made)


def _rename(checkpoint: Checkpoint, step: Rename) -> Migrated:
    try:
        pattern = re.compile(step.match)
        new = {
            t.name: m.expand(step.to)
            for t in checkpoint.layout.tensors
            if (m := pattern.fullmatch(t.name))
        }
    except (re.error, IndexError) as error:
        raise FormatError(f"rename {step.match!r} to {step.to!r}: {error}") from error
    if not new:
        raise UsageError(f"rename {step.match!r}: {checkpoint.path} has no such tensor")
    old: dict[TensorId, TensorId] = {}
    for tensor in checkpoint.layout.tensors:
        named_ = TensorId(new.get(tensor.name, tensor.name), tensor.slot)
        if named_ in old:
            raise LossError(f"rename: {old[named_]} and {tensor} would both be {named_}")
        old[named_] = tensor
    tensors = {n: replace(checkpoint.layout.tensors[t], id=n) for n, t in old.items()}
    pieces = checkpoint.layout.pieces_of
    groups = checkpoint.groups
    if groups is not None:
        groups = tuple(
            ParamGroup(g.options, tuple(new.get(m, m) for m in g.members)) for g in groups
        )
    made = replace(
        _with(checkpoint, tensors, lambda t: pieces(old[t])),
        groups=groups,
        steps={new.get(n, n): s for n, s in checkpoint.steps.items()},
        extras=_ties_renamed(checkpoint.extras, new),
    )
    return Migrated(made, notes=(f"migration: {len(new)} tensors renamed",))


def _ties_renamed(extras: Mapping[str, Json], new: Mapping[str, str]) -> dict[str, Json]:
    ties = extras.get("ties")
    if not isinstance(ties, Mapping):
        return dict(extras)
    told = {new.get(a, a): new.get(str(n), str(n)) for a, n in ties.items()}
    return {**extras, "ties": told}


def _drop(checkpoint: Checkpoint, step: Drop) -> Migrated:
    names = set(_named(checkpoint, step.names))
    gone = [
        t
        for t in checkpoint.layout.tensors
        if t.name in names and (not step.slots or t.slot in step.slots)
    ]
    if not gone:
        raise UsageError(f"drop: none of {len(names)} tensors has slots {', '.join(step.slots)}")
    left = {t: v for t, v in checkpoint.layout.tensors.items() if t not in set(gone)}
    stateful = {t.name for t in left if t.slot not in (PARAM, MASTER)}
    groups = checkpoint.groups
    if groups is not None:
        groups = tuple(
            ParamGroup(g.options, tuple(m for m in g.members if m not in names or m in stateful))
            for g in groups
        )
    made = replace(
        _with(checkpoint, left),
        groups=groups,
        steps={n: s for n, s in checkpoint.steps.items() if n not in names or n in stateful},
    )
    return Migrated(made, tuple(Loss("migrated", str(t), "dropped, as asked") for t in gone))


def _default(checkpoint: Checkpoint, step: Default) -> Migrated:
    tensors = dict(checkpoint.layout.tensors)
    new: dict[TensorId, LogicalTensor] = {}
    names = _named(checkpoint, step.names)
    for name in names:
        like = tensors.get(TensorId(name)) or tensors.get(TensorId(name, MASTER))
        for slot in step.slots:
            tensor = TensorId(name, slot)
            if tensor in tensors or like is None or slot in (PARAM, MASTER, STEP):
                raise LossError(
                    f"{tensor}: default makes a state that a weight lacks; "
                    + ("it is there: reset it" if tensor in tensors else "this is none")
                )
            new[tensor] = replace(like, id=tensor, dtype=named("float32"))
    pieces = checkpoint.layout.pieces_of

    def pieces_of(tensor: TensorId) -> Sequence[Piece]:
        made = new.get(tensor)
        if made is None:
            return pieces(tensor)
        return [constant(Box.whole(made.space), 0.0, made.dtype)]

    made = replace(
        _with(checkpoint, {**tensors, **new}, pieces_of),
        groups=_joined(checkpoint, names, step.group_of),
        steps={**checkpoint.steps, **dict.fromkeys(names, step.step)},
    )
    return Migrated(made, tuple(Loss("migrated", str(t), "zero, as asked") for t in new))


def _joined(
    checkpoint: Checkpoint, names: Sequence[str], like: str | None
) -> tuple[ParamGroup, ...] | None:
    """The groups, with the names that none has in that of `like`."""
    groups = checkpoint.groups
    homeless = [n for n in names if not any(n in g.members for g in groups or ())]
    if groups is None or not homeless:
        return groups
    if like is None or not any(like in g.members for g in groups):
        raise UsageError(
            f"default: {homeless[0]} is in no param group: give group_of = the name of a tensor "
            "whose group takes it in"
        )
    return tuple(
        ParamGroup(g.options, (*g.members, *homeless)) if like in g.members else g for g in groups
    )


def _reset(checkpoint: Checkpoint, step: Reset) -> Migrated:
    names = set(_named(checkpoint, step.names))
    tensors = checkpoint.layout.tensors
    zero = {t for t in tensors if t.name in names and t.slot in step.slots}
    if PARAM in step.slots or MASTER in step.slots:
        raise LossError("reset: weights are not reset; drop them")
    if not zero and STEP not in step.slots:
        raise UsageError(f"reset: none of {len(names)} tensors has slots {', '.join(step.slots)}")
    pieces = checkpoint.layout.pieces_of

    def pieces_of(tensor: TensorId) -> Sequence[Piece]:
        if tensor not in zero:
            return pieces(tensor)
        held = tensors[tensor]
        return [constant(Box.whole(held.space), 0.0, held.dtype)]

    steps = dict(checkpoint.steps)
    losses = [Loss("migrated", str(t), "set to zero, as asked") for t in sorted(zero)]
    if STEP in step.slots:
        steps |= {n: 0.0 for n in steps if n in names}
        losses.append(Loss("migrated", "steps", f"{len(names)} counters set to zero, as asked"))
    return Migrated(replace(_with(checkpoint, tensors, pieces_of), steps=steps), tuple(losses))


def _resize(checkpoint: Checkpoint, step: Resize) -> Migrated:
    names = set(_named(checkpoint, step.names))
    tensors = dict(checkpoint.layout.tensors)
    old: dict[TensorId, LogicalTensor] = {}
    losses: list[Loss] = []
    for tensor, held in checkpoint.layout.tensors.items():
        if tensor.name not in names:
            continue
        if not held.shape or held.factors is not None:
            raise LossError(f"{tensor}: shape {list(held.shape)} has no rows to resize")
        old[tensor] = held
        tensors[tensor] = replace(held, shape=(step.rows, *held.shape[1:]), padded=None)
        if step.rows < held.shape[0]:
            cut = held.shape[0] - step.rows
            losses.append(Loss("migrated", str(tensor), f"the last {cut} rows cut off, as asked"))
    pieces = checkpoint.layout.pieces_of

    def pieces_of(tensor: TensorId) -> Sequence[Piece]:
        was = old.get(tensor)
        return pieces(tensor) if was is None else _rows(pieces(tensor), was, step.rows)

    counts = sorted({v.shape[0] for v in old.values()})
    made = replace(
        _with(checkpoint, tensors, pieces_of), extras=_sized(checkpoint.extras, counts, step.rows)
    )
    note = (
        f"migration: {len(names)} tensors of {', '.join(map(str, counts))} rows have {step.rows}; "
        "new rows are zero in every slot, so the job initialises their weights itself"
    )
    return Migrated(made, tuple(losses), (note,))


def _rows(pieces: Sequence[Piece], was: LogicalTensor, rows: int) -> list[Piece]:
    """Pieces of the rows that stay, and zeros for those that are new."""
    stay = Box((0,) * len(was.shape), (min(rows, was.shape[0]), *was.shape[1:]))
    out = []
    for piece in pieces:
        box = piece.box & stay
        if box is not None:
            out.append(replace(piece, box=box, base=piece.base_of(box)))
    if rows > was.shape[0]:
        new = Box((was.shape[0], *stay.start[1:]), (rows, *was.shape[1:]))
        out.append(constant(new, 0.0, was.dtype))
    return out


def _sized(extras: Mapping[str, Json], counts: Collection[int], rows: int) -> dict[str, Json]:
    """The extras with the size of the vocabulary that they tell, where it was that of the rows."""
    out = dict(extras)
    for path, key in _ROWS:
        value = out.get(path)
        if key is None and value in counts:
            out[path] = rows
        elif isinstance(value, Mapping) and key is not None and value.get(key) in counts:
            out[path] = {**value, key: rows}
    out.pop("args.padded_vocab_size", None)
    return out


def _options(checkpoint: Checkpoint, step: Options) -> Migrated:
    names = set(_named(checkpoint, step.names))
    groups: list[ParamGroup] = []
    losses: list[Loss] = []
    for group in checkpoint.groups or ():
        inside = tuple(m for m in group.members if m in names)
        rest = tuple(m for m in group.members if m not in names)
        if rest or not group.members:
            groups.append(ParamGroup(group.options, rest))
        if inside:
            for k, v in step.set.items():
                _check_option(k, v, group.options.get(k), "options")
            groups.append(ParamGroup({**group.options, **step.set}, inside))
            losses += [
                Loss("migrated", f"param_groups.{k}", f"{group.options.get(k)} -> {v}, as asked")
                for k, v in step.set.items()
            ]
    if not losses:
        raise UsageError(f"options: none of {len(names)} tensors is in a param group")
    return Migrated(replace(checkpoint, groups=tuple(groups)), tuple(losses))
