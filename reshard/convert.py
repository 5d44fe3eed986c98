"""The conversion, whole: open, declare, plan, stage, move, verify, publish."""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import json
import math
import os
import resource
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from reshard import commit, manifest
from reshard.checkpoint import Checkpoint, Json
from reshard.commit import Staging
from reshard.crossing import Choice, cross, dialect_of, unnamed
from reshard.dtypes import named
from reshard.engine import Checksums, Moved, Mover, block_elements, move_all
from reshard.errors import FormatError, LossError, TargetError, UsageError, VerifyError
from reshard.files import Files
from reshard.fingerprint import Sum, complete
from reshard.format import (
    Loss,
    OpenOptions,
    WriteOptions,
    find,
    open_checkpoint,
)
from reshard.layout import Draft, Layout
from reshard.migrate import Migrated, migrate, read_migration
from reshard.plan import Plan, loss_lines
from reshard.plan import plan as join_plan
from reshard.readback import read_files
from reshard.tensor import PARAM, TensorId
from reshard.topology import Target, parse_target
from reshard.version import VERSION

Progress = Callable[[str, int, int], object]  # phase, bytes done, bytes in all


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
    verify: bool = True
    first_replica: bool = False
    set_latest: bool = False
    overwrite: bool = False
    schema: str | None = None
    config: str | None = None
    tokenizer: str | None = None
    max_shard_size: int | None = None
    migrate: str | None = None

    def shown(self) -> dict[str, Json]:
        """What the manifest records."""
        kept = (
            "to", "given", "like", "weights_only", "dtype", "vocab_size", "first_replica", "schema",
            "config", "tokenizer", "max_shard_size",
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
    tensors = {t: v for t, v in checkpoint.layout.tensors.items() if kept(t)}
    if not tensors:
        raise UsageError("--include and --exclude leave no tensor")
    if len(tensors) == len(checkpoint.layout.tensors):
        return checkpoint
    return replace(checkpoint, layout=replace(checkpoint.layout, tensors=tensors))


def _slots(checkpoint: Checkpoint) -> str:
    return ", ".join(sorted({t.slot for t in checkpoint.layout.tensors}))


def make_plan(source: str | Path, options: Options) -> Plan:
    """Open the source, declare the target, join them. Reads headers only."""
    for flag, said in (("--to", options.to), ("--like", options.like), ("--from", options.given)):
        if said == "":
            raise UsageError(f"{flag} is empty")
    if options.to is None and options.like is None:
        raise UsageError("say what to write: --to TARGET or --like DIR")
    kind = named(options.dtype) if options.dtype is not None else None
    if kind is not None and (not kind.floating or kind.name.startswith("complex")):
        raise UsageError(f"--dtype {kind}: weights are real floating-point numbers; give bf16")
    whole = open_checkpoint(source, source_options(options))
    like = open_checkpoint(options.like, OpenOptions()) if options.like else None
    target = parse_target(options.to) if options.to else Target(None, None)
    name = target.format or (like.format if like else whole.format)
    form = find(name)
    if not form.writes:
        raise FormatError(f"format {name!r} is read, not written. See `reshard formats`.")
    # a reference of another naming says whose names are wanted
    spoken = whole.layout.naming if like is None else None
    dialect, target = dialect_of(form, target, spoken), unnamed(target)
    write = WriteOptions(
        options.weights_only, options.dtype, options.vocab_size, like, dict(target.options),
        options.config, options.tokenizer, options.max_shard_size,
    )  # fmt: skip
    # a format of weights alone picks the best copy of each itself
    asked = replace(options, weights_only=False) if getattr(form, "weights", False) else options
    moved = Migrated(whole)
    if options.migrate is not None:
        moved = migrate(whole, read_migration(options.migrate))
        whole = moved.checkpoint
    checkpoint = select(whole, asked)
    choice = Choice(options.schema, options.config, options.dtype)
    crossed = cross(checkpoint, dialect, choice, like)
    declaration = form.declare(crossed.checkpoint, target, write)
    planned = join_plan(crossed.checkpoint, declaration, narrow=options.dtype is not None)
    planned = replace(
        planned,
        notes=(*moved.notes, *crossed.notes, *planned.notes),
        migration=moved.steps,
    )
    losses = [*moved.losses, *crossed.losses, *planned.losses]
    if options.weights_only and len(checkpoint.layout.tensors) < len(whole.layout.tensors):
        n = len(whole.layout.tensors) - len(checkpoint.layout.tensors)
        losses.append(
            Loss("weights-only", "optimizer", f"{n} optimizer tensors left behind, as asked")
        )
    if options.include or options.exclude:
        n = len(whole.layout.tensors) - len(checkpoint.layout.tensors)
        losses.append(Loss("excluded", "tensors", f"{n} tensors left out, as asked"))
    planned = replace(planned, losses=tuple(losses))
    if options.strict and planned.losses:
        raise LossError(
            "--strict forbids every loss, and this conversion has: "
            + "; ".join(loss_lines(planned.losses))
        )
    return planned


def peak_rss() -> int:
    """The most memory this process has held, in bytes.

    Not ru_maxrss where it can be helped: that counts the process which forked this one, too.
    """
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


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
        for offset, data in draft.literals:
            h.update(offset.to_bytes(8, "little"))
            h.update(data)
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


def plan_report(planned: Plan, place: Path | None = None) -> dict[str, Json]:
    """What `plan --json` prints. `place`: the target folder, if one is known."""
    target = planned.target
    return {
        "status": "ok",
        "source": describe(planned.source),
        "target": {
            "format": target.format,
            "topology": str(target.topology),
            "folder": target.folder,
            "files": len(target.drafts),
            "bytes": sum(d.size for d in target.drafts),
            "largest_file": max((d.size for d in target.drafts), default=0),
            "per_rank": per_rank(planned),
            "trackers": sorted(target.trackers),
        },
        "tensors": len(target.layout.tensors),
        "copies": planned.copies,
        "fills": planned.fills,
        "bytes_read": planned.bytes_read,
        "bytes_written": planned.bytes_written,
        "read_amplification": amplification(planned),
        "temporary_bytes": 0,
        "free_disk": free_disk(place or Path()),
        "replicated_elements": planned.replicas,
        "losses": [{"code": x.code, "what": x.what, "detail": x.detail} for x in planned.losses],
        "notes": list(planned.notes),
        "fates": [{"path": f.path, "kind": f.kind, "detail": f.detail} for f in target.fates],
        "recipe": dict(target.recipe),
        **({"migration": [dict(s) for s in planned.migration]} if planned.migration else {}),
    }


def per_rank(planned: Plan) -> dict[str, Json]:
    """Bytes of state that a rank of the target's model-parallel grid holds: mean, by slot."""
    target = planned.target
    ranks = target.topology.tp * target.topology.pp
    held: dict[str, int] = {}
    for tensor, logical in target.layout.tensors.items():
        held[tensor.slot] = held.get(tensor.slot, 0) + logical.nbytes
    return {slot: n // ranks for slot, n in sorted(held.items())}


def free_disk(place: Path) -> int:
    """Bytes free where a target would be written."""
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def amplification(planned: Plan) -> float:
    """Bytes read over the bytes of the tensors that are moved."""
    needed = sum(planned.source.layout.tensors[f].nbytes for f in set(planned.feeds.values()))
    return round(planned.bytes_read / needed, 3) if needed else 1.0


def describe(checkpoint: Checkpoint) -> dict[str, Json]:
    """A checkpoint in one line of JSON."""
    return {
        "path": str(checkpoint.path),
        "format": checkpoint.format,
        "version": checkpoint.version,
        "topology": str(checkpoint.topology),
        "iteration": checkpoint.iteration,
    }


def convert(
    source: str | Path,
    target: str | Path,
    options: Options,
    progress: Progress = lambda *_: None,
) -> dict[str, Json]:
    """Convert a checkpoint; the report is what `convert --json` prints.

    Nothing that looks complete is left behind unless it is complete and verified.
    """
    started = time.time()
    planned = make_plan(source, options)
    place = _place(Path(target))
    digest = plan_digest(planned)
    final = place / planned.target.folder
    before = manifest.read(final) if final.is_dir() else None
    changed = _changed(final, planned.target.drafts)
    if before is not None and before.get("plan") == digest and changed and not options.overwrite:
        raise TargetError(
            f"{final} was written by this plan, and {changed} since. Give --overwrite to write it "
            "again."
        )
    if before is not None and before.get("plan") == digest and not changed:
        _finish(planned, place, digest, options)
        return {**plan_report(planned, place), "status": "ok", "already": True, "path": str(final)}
    if Path(source).is_dir():  # a file's folder may hold anything
        _not_inside(planned.source.path, place, final)
    commit.check_target(place, planned.target, overwrite=options.overwrite)
    commit.check_space(place, planned.target.drafts)
    staging = commit.open_staging(place, planned.target.folder, digest)
    try:
        return _run(planned, staging, options, digest, started, progress)
    except OSError as error:
        staging.release()
        if error.filename is None:
            raise OSError(error.errno, error.strerror, str(staging.path)) from error
        raise
    except (KeyboardInterrupt, SystemExit):
        staging.release()
        raise
    except BaseException:
        staging.discard()
        raise


def _changed(final: Path, drafts: Sequence[Draft]) -> str | None:
    """What has become of a file of a finished target, by its size; None if all are there."""
    for draft in drafts:
        path = final / draft.name
        if not path.is_file():
            return f"{draft.name} has gone"
        if path.stat().st_size != draft.size:
            return f"{draft.name} has changed from {draft.size} to {path.stat().st_size} bytes"
    return None


def _place(target: Path) -> Path:
    """DST, or the folder that it links to: a rename would replace the link."""
    if target.is_symlink():
        if not target.exists():
            raise TargetError(f"{target} is a symbolic link to nothing")
        return target.resolve()
    return target.resolve() if target.name in ("", "..") else target


def _finish(planned: Plan, place: Path, digest: str, options: Options) -> None:
    """End what a run was stopped at after its checkpoint was in place: trackers, tidying."""
    trackers = _trackers(planned, place, options)
    staging = commit.leftover(place, planned.target.folder, digest)
    if staging is None and trackers:
        staging = commit.open_staging(place, planned.target.folder, digest)
    if staging is None:
        return
    try:
        staging.finish(trackers)
    except BaseException:
        staging.release()
        raise


def _trackers(planned: Plan, place: Path, options: Options) -> dict[str, bytes]:
    """The trackers to be written: those of a live run folder only on request."""
    found = planned.target.trackers
    return {
        name: data
        for name, data in found.items()
        if not (place / name).exists()
        or (options.set_latest and (place / name).read_bytes() != data)
    }


def _not_inside(source: Path, target: Path, final: Path) -> None:
    """Raises UsageError if the target lies in the source, or would take its place."""
    there, resolved = source.resolve(), target.resolve()
    if resolved == there or there in resolved.parents:
        raise UsageError(f"{target} lies inside the source {source}; choose another DST")
    if final.resolve() == there or final.resolve() in there.parents:
        raise UsageError(f"{final} is or holds the source {source}; choose another DST")


def _run(
    planned: Plan,
    staging: Staging,
    options: Options,
    digest: str,
    started: float,
    progress: Progress,
) -> dict[str, Json]:
    target = planned.target
    stamp = source_stamp(planned.source)
    staging.lay_out(target.drafts)
    elements = block_elements(options.memory, options.block, options.workers)
    sums, losses, drafts = _move(planned, staging, options, elements, progress)
    planned = replace(planned, losses=(*planned.losses, *losses))
    if options.strict and losses:
        raise LossError("--strict forbids every loss: " + "; ".join(loss_lines(losses)))
    digests: Mapping[str, str] = {}
    checked = _verify(planned, staging, options, elements, sums, drafts, progress)
    if checked is not None:
        digests = checked
    if source_stamp(planned.source) != stamp:
        raise VerifyError(
            f"{planned.source.path}: a file has changed during the run; what was read may be of "
            "two states. Run it again when the source is at rest."
        )
    first = manifest.head(
        planned,
        sums,
        digests,
        tool=VERSION,
        digest=digest,
        options=_told(planned, options),
        verified=checked is not None and options.verify,
        started=started,
        ended=time.time(),
    )
    manifest.write(staging.files, first, planned, sums)
    trackers = _trackers(planned, staging.target, options)
    staging.publish(trackers, overwrite=options.overwrite)
    return {
        **plan_report(planned, staging.target),
        "path": str(staging.final),
        "plan": digest,
        "verified": {
            "tensors": len(sums) if options.verify else 0,
            "of": len(sums),
            "files": len(digests),
        },
        "fingerprints": first["fingerprints"],
        "resumed": staging.resumed,
        "seconds": round(time.time() - started, 3),
        "trackers_written": sorted(trackers),
        "files": {
            d.name: {"bytes": d.size, "digest": digests.get(d.name)} for d in planned.target.drafts
        },
        **weights_of(planned.target.layout),
        "peak_rss": peak_rss(),
    }


def _told(planned: Plan, options: Options) -> dict[str, Json]:
    """What the manifest records of the options: a migration step by step."""
    told = options.shown()
    if planned.migration:
        told["migrate"] = [dict(s) for s in planned.migration]
    return told


def weights_of(layout: Layout) -> dict[str, Json]:
    """How many parameters a target has, and how many of which element type."""
    kinds: dict[str, int] = {}
    for tensor, logical in layout.tensors.items():
        if tensor.slot == PARAM:
            n = math.prod(logical.shape)
            kinds[logical.dtype.name] = kinds.get(logical.dtype.name, 0) + n
    return {"parameters": sum(kinds.values()), "dtypes": dict(sorted(kinds.items()))}


def _kept(options: Options) -> int:
    """Bytes of grains kept decoded: a worker has one of each slot of a name under way."""
    return min(options.memory // 2, max(1, options.workers) * (64 << 20))


def _move(
    planned: Plan, staging: Staging, options: Options, elements: int, progress: Progress
) -> tuple[dict[TensorId, Sum], list[Loss], list[Draft]]:
    """Move what the journal does not name yet.

    Gives fingerprints of everything, losses found, and the files with the checksums that are still
    to be taken.
    """
    target = planned.target
    total, moved_bytes, unsynced = planned.bytes_written, 0, 0
    known = target.layout.tensors
    sums = {t: s for row in staging.done.values() for t, s in row.items() if t in known}
    losses = list(staging.losses)
    work = {n: ts for n, ts in planned.names.items() if not all(t in sums for t in ts)}
    finished: dict[str, dict[TensorId, Sum]] = {}
    found: list[Loss] = []

    def advance(n: int) -> None:
        nonlocal moved_bytes
        moved_bytes += n
        progress("move", moved_bytes, total)

    with (
        Files(planned.source.path, keep=_kept(options)) as source,
        Files(staging.files, writable=True) as out,
        contextlib.ExitStack() as stack,
    ):
        checksums = Checksums(target.drafts)
        mover = Mover(
            planned,
            source,
            out,
            elements,
            checksums,
            options.first_replica,
            options.verify,
            advance,
        )
        executor = None
        if options.workers > 1:
            executor = stack.enter_context(ThreadPoolExecutor(options.workers))

        def done(name: str, moved: Moved) -> None:
            nonlocal unsynced, finished, found
            for tensor, total_ in moved.sums.items():
                if not complete(target.layout.tensors[tensor], total_):
                    raise VerifyError(f"{tensor}: {total_.elements} elements moved")
            sums.update(moved.sums)
            losses.extend(moved.losses)
            found.extend(moved.losses)
            finished[name] = moved.sums
            unsynced += sum(target.layout.tensors[t].nbytes for t in moved.sums)
            if unsynced >= commit.SYNC_EVERY:
                staging.record(out, finished, found)
                unsynced, finished, found = 0, {}, []

        move_all(mover, work, executor, done)
        staging.record(out, finished, found)
        staging.write_literals(target.drafts)
        drafts = [checksums.patch(out, draft) for draft in target.drafts]
    return sums, losses, drafts


def _verify(
    planned: Plan,
    staging: Staging,
    options: Options,
    elements: int,
    sums: Mapping[TensorId, Sum],
    drafts: Sequence[Draft],
    progress: Progress,
) -> dict[str, str] | None:
    """Open the staged files with no memory of the plan, read them once, compare every tensor."""
    target = planned.target
    total, read = sum(d.size for d in target.drafts), 0

    def advance(n: int) -> None:
        nonlocal read
        read += n
        progress("verify", read, total)

    if not options.verify and not any(d.checksums for d in drafts):
        return None
    given = Target(target.format, None)
    cold = find(target.format).open(
        staging.files, OpenOptions(given, vocab_size=target.vocab_size, weights_only=False)
    )
    back = read_files(cold, drafts, elements=elements, progress=advance)
    if not options.verify:
        return back.digests
    missing = [t for t in target.layout.tensors if t not in back.sums]
    extra = [t for t in back.sums if t not in target.layout.tensors]
    if missing or extra:
        raise VerifyError(
            f"read back, the target holds {len(back.sums)} tensors, not {len(sums)}: "
            f"missing {[str(t) for t in missing[:3]]}, unexpected {[str(t) for t in extra[:3]]}"
        )
    for tensor, expected in sums.items():
        got = back.sums[tensor]
        if (got.a, got.b, got.elements) != (expected.a, expected.b, expected.elements):
            raise VerifyError(
                f"{tensor}: read back with fingerprint {got.hex}, written with {expected.hex}. "
                "The disk or the network returned other bytes than were written; nothing was "
                "published. Run it again, on another disk if it repeats."
            )
    return back.digests
