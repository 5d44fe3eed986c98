"""What a user asks, and the plan that it comes to."""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

from reshard import digests
from reshard.checkpoint import Checkpoint, Json
from reshard.crossing import cross, dialect_of, unnamed, with_second_names
from reshard.dtypes import named
from reshard.errors import FormatError, LossError, UsageError
from reshard.format import (
    CURSORS,
    Declaration,
    Fate,
    Format,
    Loss,
    OpenOptions,
    WriteOptions,
    find,
    kin,
    open_checkpoint,
    refuse_idle,
)
from reshard.join import Plan, loss_lines, told_in_full
from reshard.join import plan as join_plan
from reshard.layout import Draft
from reshard.namings import Choice
from reshard.tensor import PARAM, TensorId
from reshard.topology import Target, parse_target

_LARGEST_OPAQUE = 64 << 20  # bytes: literals are held in memory


@dataclass(frozen=True)
class Options:
    """Everything a user may say of a conversion, as on the command line."""

    to: str | None = None
    given: str | None = None  # --from
    like: str | None = None
    iteration: int | None = None
    weights_only: bool = False
    dtype: str | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    vocab_size: int | None = None
    strict: bool = False
    memory: int = 1 << 30
    block: int = 1 << 20
    workers: int = 1
    device: str = "cpu"
    verify: bool = True
    first_replica: bool = False
    set_latest: bool = False
    overwrite: bool = False
    schema: str | None = None
    config: str | None = None
    tokenizer: str | None = None
    max_shard_size: int | None = None
    migrate: str | None = None
    data_cursor: str | None = None
    digest: str = digests.USUAL  # of files
    compress: str | None = None
    keep_opaque: bool = False

    def shown(self) -> dict[str, Json]:
        """What the manifest records."""
        kept = (
            "to", "given", "like", "weights_only", "dtype", "vocab_size", "first_replica", "schema",
            "config", "tokenizer", "max_shard_size", "data_cursor",
            "compress", "keep_opaque",
        )  # fmt: skip
        shown: dict[str, Json] = {k: getattr(self, k) for k in kept if getattr(self, k)}
        for k in ("include", "exclude"):
            if getattr(self, k):
                shown[k] = list(getattr(self, k))
        return shown


def source_options(options: Options) -> OpenOptions:
    """What `--from`, `--iteration`, `--vocab-size` say about the source."""
    given = parse_target(options.given) if options.given else Target(None, None)
    return OpenOptions(given, options.iteration, options.vocab_size, options.weights_only)


def select(checkpoint: Checkpoint, options: Options) -> Checkpoint:
    """The checkpoint without the slots and names that the options leave out."""

    def kept(tensor: TensorId) -> bool:
        if options.weights_only and tensor.slot != PARAM:
            return False
        if options.include and not any(
            fnmatch.fnmatchcase(tensor.name, g) for g in options.include
        ):
            return False
        return not any(fnmatch.fnmatchcase(tensor.name, g) for g in options.exclude)

    if options.weights_only and not any(t.slot == PARAM for t in checkpoint.layout.tensors):
        raise LossError(f"{checkpoint.path}: holds no weights, only {_slots(checkpoint)}")
    tensors = checkpoint.layout.tensors
    if options.weights_only or options.include or options.exclude:
        tensors = {t: v for t, v in tensors.items() if kept(t)}
    if not tensors:
        raise UsageError("--include and --exclude leave no tensor")
    if len(tensors) == len(checkpoint.layout.tensors):
        return checkpoint
    names = {t.name for t in tensors}
    groups = checkpoint.groups
    if groups is not None:  # a group of what is left out would ask a job for it
        groups = tuple(
            replace(g, members=tuple(m for m in g.members if m in names)) for g in groups
        )
    layout = replace(checkpoint.layout, tensors=tensors)
    return replace(checkpoint, layout=layout, groups=groups)


def _unmatched(checkpoint: Checkpoint, options: Options) -> list[str]:
    """What is said of patterns that match no tensor: they may be of another model, or mistyped."""
    asked = [("--include", g) for g in options.include]
    asked += [("--exclude", g) for g in options.exclude]
    names = {t.name for t in checkpoint.layout.tensors} if asked else set()
    return [f"{flag} {g} matches no tensor" for flag, g in asked if not fnmatch.filter(names, g)]


def _slots(checkpoint: Checkpoint) -> str:
    return ", ".join(sorted({t.slot for t in checkpoint.layout.tensors}))


def level_of(compress: str | None, form: Format) -> int | None:
    """The level that `--compress zstd[:LEVEL]` asks for. Raises UsageError for anything else."""
    if compress is None:
        return None
    found = re.fullmatch(r"zstd(?::(\d{1,2}))?", compress)
    level = int(found[1] or 3) if found else 0
    if not 1 <= level <= 22:
        raise UsageError(
            f"--compress {compress}: write zstd, or zstd:LEVEL with a level of 1 to 22"
        )
    if not getattr(form, "compresses", False):
        raise UsageError(
            f"--compress: the files of {form.name} are what its framework reads; only universal "
            "stores are compressed"
        )
    return level


def _refuse_idle(options: Options, whole: Checkpoint, form: Format) -> None:
    """Raises FormatError for an option that neither source nor target acts on."""
    if options.vocab_size is not None:
        refuse_idle("vocab_size", whole.format, form.name)
    for option in ("max_shard_size", "tokenizer", "data_cursor"):
        if getattr(options, option) is not None:
            refuse_idle(option, form.name)


def make_plan(source: str | Path, options: Options) -> Plan:
    """Open the source, declare the target, join them. Reads headers only."""
    for flag, said in (("--to", options.to), ("--like", options.like), ("--from", options.given)):
        if said == "":
            raise UsageError(f"{flag} is empty")
    if options.digest not in digests.KINDS:
        raise UsageError(f"digest {options.digest!r}: choose one of {', '.join(digests.KINDS)}")
    if options.to is None and options.like is None:
        raise UsageError("say what to write: --to TARGET or --like DIR")
    try:
        kind = named(options.dtype) if options.dtype is not None else None
    except FormatError as error:
        raise UsageError(f"--dtype: {error}") from None
    if kind is not None and (not kind.floating or kind.name.startswith("complex")):
        raise UsageError(f"--dtype {kind}: weights are real floating-point numbers; give bf16")
    if options.data_cursor not in (None, *CURSORS):
        raise UsageError(f"--data-cursor {options.data_cursor}: choose one of {', '.join(CURSORS)}")
    whole = open_checkpoint(source, source_options(options))
    like = open_checkpoint(options.like, OpenOptions()) if options.like else None
    target = parse_target(options.to) if options.to else Target(None, None)
    name = target.format or (like.format if like else whole.format)
    form = find(name)
    if not form.writes:
        raise FormatError(f"format {name!r} is read, not written. See `reshard formats`.")
    _refuse_idle(options, whole, form)
    if like is not None and not kin(form, like):
        raise UsageError(
            f"--like {options.like} is a checkpoint of {like.format}, which says nothing of how "
            f"one of {name} is laid out. Give one that the job which resumes has saved."
        )
    # a reference of another naming says whose names are wanted
    spoken = whole.layout.naming if like is None else None
    dialect, target = dialect_of(form, target, spoken), unnamed(target)
    write = WriteOptions(
        options.weights_only, options.dtype, options.vocab_size, like, dict(target.options),
        options.config, options.tokenizer, options.max_shard_size,
        level_of(options.compress, form), options.data_cursor,
    )  # fmt: skip
    # a format of weights alone picks the best copy of each itself
    asked = replace(options, weights_only=False) if getattr(form, "weights", False) else options
    moved = None
    if options.migrate is not None:
        from reshard.migrate import migrate, read_migration

        moved = migrate(whole, read_migration(options.migrate))
        whole = moved.checkpoint
    checkpoint = select(whole, asked)
    choice = Choice(options.schema, options.config, options.dtype)
    crossed = with_second_names(cross(checkpoint, dialect, choice, like), form)
    declaration = form.declare(crossed.checkpoint, target, write)
    if options.set_latest and not declaration.trackers:
        raise FormatError(
            f"--set-latest does nothing for {name}: it has no tracker of the newest. Leave it away."
        )
    declaration = with_opaque(whole, declaration, keep=options.keep_opaque)
    fates, untold = told_in_full(whole, declaration)
    declaration = replace(declaration, fates=fates)
    planned = join_plan(crossed.checkpoint, declaration, narrow=options.dtype is not None)
    losses = [*crossed.losses, *planned.losses, *untold]
    notes = [*crossed.notes, *planned.notes]
    if moved is not None:
        losses, notes = [*moved.losses, *losses], [*moved.notes, *notes]
        planned = replace(planned, migration=moved.steps)
    notes = [*whole.problems, *_unmatched(whole, options), *notes]
    left = sum(t.slot != PARAM for t in whole.layout.tensors)
    told = any(loss.code == "weights-only" for loss in losses)  # by a format of weights alone
    if options.weights_only and not told and (left or whole.optimizer_left):
        what = f"{left} optimizer tensors" if left else "the optimizer is"
        losses.append(Loss("weights-only", "optimizer", f"{what} left behind, as asked"))
    if whole.rows_left is not None:
        losses.append(Loss("rows-dropped", "vocabulary", whole.rows_left))
    if options.include or options.exclude:
        n = len(whole.layout.tensors) - len(checkpoint.layout.tensors)
        losses.append(Loss("excluded", "tensors", f"{n} tensors left out, as asked"))
    planned = replace(planned, losses=tuple(losses), notes=tuple(notes))
    if options.strict and planned.losses:
        raise LossError(
            "--strict forbids every loss, and this conversion has: "
            + "; ".join(loss_lines(planned.losses))
        )
    return planned


def with_opaque(source: Checkpoint, target: Declaration, *, keep: bool) -> Declaration:
    """The target with the source's opaque pickles as they are, if asked for; else their losses.

    Nothing of them is read or run here; a framework that loads one runs what it says.
    """
    drafts, fates, losses = list(target.drafts), list(target.fates), list(target.losses)
    taken = {draft.name for draft in drafts}
    for name in source.opaque:
        path = source.path / name
        why = "a pickle of a trainer's own classes; --keep-opaque copies it as it is"
        if keep and path.stat().st_size > _LARGEST_OPAQUE:
            why = f"{path.stat().st_size} bytes, too large to copy"
        elif keep and name in taken:
            why = "the target has a file of this name"
        elif keep:
            raw = path.read_bytes()
            drafts.append(Draft(name, len(raw), [(0, raw)] if raw else []))
            fates.append(Fate(name, "keep", "an opaque pickle, as asked"))
            continue
        fates.append(Fate(name, "drop", why))
        losses.append(Loss("opaque-dropped", name, why))
    return replace(target, drafts=drafts, fates=tuple(fates), losses=tuple(losses))


def plan_digest(planned: Plan) -> str:
    """What identifies a conversion: its source's files and every byte of its target's headers."""
    h = hashlib.blake2b(digest_size=16)
    source, target = planned.source, planned.target
    h.update(source_stamp(source).encode())
    h.update(f"{source.format}\t{target.format}\t{target.topology}\t{target.folder}\n".encode())
    if planned.migration:
        h.update(json.dumps(planned.migration, sort_keys=True, default=str).encode())
    for draft in target.drafts:
        h.update(f"{draft.name}\t{draft.size}\n".encode())
        end = None
        for offset, data in draft.literals:
            if offset != end:  # one that goes on where the last ended is the same literal
                h.update(offset.to_bytes(8, "little"))
            h.update(data)
            end = offset + len(data)
    for tensor, feed in planned.feeds.items():
        if tensor != feed:
            h.update(f"{tensor}\t{feed}\n".encode())
    return h.hexdigest()


def source_stamp(source: Checkpoint) -> str:
    """Sizes and times of the source's files, as one digest: a change shows in it."""
    h = hashlib.blake2b(digest_size=16)
    for name in source.files:
        stat = os.stat(source.path / name)
        h.update(f"{name}\t{stat.st_size}\t{stat.st_mtime_ns}\n".encode())
    return h.hexdigest()
