"""The conversion, whole: stage, move, verify, publish."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from reshard import commit, manifest
from reshard.checkpoint import Json
from reshard.commit import Staging
from reshard.device import device
from reshard.engine import Checksums, Moved, Mover, block_elements, move_all
from reshard.errors import CorruptError, LossError, TargetError, UsageError, VerifyError
from reshard.files import Files
from reshard.fingerprints import Sum, complete
from reshard.format import (
    Loss,
    OpenOptions,
    find,
)
from reshard.join import Plan, loss_lines
from reshard.layout import Draft
from reshard.planning import Options, make_plan, plan_digest, source_stamp
from reshard.readback import read_files
from reshard.recorded import Recorded
from reshard.report import peak_rss, plan_report, weights_of
from reshard.tensor import TensorId
from reshard.topology import Target
from reshard.version import VERSION
from reshard.workers import behind, spread

Progress = Callable[[str, int, int], object]  # phase, bytes done, bytes in all


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
    commit.check_name(Path(target))
    planned = make_plan(source, options)
    place = _place(Path(target))
    digest = plan_digest(planned)
    final = place / planned.target.folder
    before = manifest.read(final) if final.is_dir() else None
    changed = _changed(final, before or {})
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
    copies = 1 if planned.target.compress is None else 2
    commit.check_space(place, planned.target.drafts, copies=copies)
    staging = commit.open_staging(place, planned.target.folder, digest, options.workers)
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


def _changed(final: Path, recorded: Mapping[str, Json]) -> str | None:
    """What has become of a file of a finished target, by its size; None if all are there."""
    files = recorded.get("files")
    for name, said in files.items() if isinstance(files, Mapping) else ():
        path, size = final / name, said.get("bytes") if isinstance(said, Mapping) else None
        if not path.is_file():
            return f"{name} has gone"
        if path.stat().st_size != size:
            return f"{name} has changed from {size} to {path.stat().st_size} bytes"
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
    if options.verify:
        _check_source(planned, sums)
    planned = replace(planned, losses=(*planned.losses, *losses))
    if options.strict and losses:
        raise LossError("--strict forbids every loss: " + "; ".join(loss_lines(losses)))
    compress = target.compress
    if compress is not None:
        with spread(options.workers) as each:
            drafts = staging.compress(lambda laid_out, made: compress(laid_out, made, each))
        planned = replace(planned, target=replace(target, drafts=drafts))
    taken: Mapping[str, str] = {}
    checked = _verify(planned, staging, options, elements, sums, drafts, progress)
    if checked is not None:
        taken = checked
    if source_stamp(planned.source) != stamp:
        raise VerifyError(
            f"{planned.source.path}: a file has changed during the run; what was read may be of "
            "two states. Run it again when the source is at rest."
        )
    first = manifest.head(
        planned,
        sums,
        taken,
        tool=VERSION,
        digest=digest,
        options=_told(planned, options),
        verified=checked is not None and options.verify,
        started=started,
        ended=time.time(),
    )
    manifest.write(staging.files, first, planned, sums, taken)
    trackers = _trackers(planned, staging.target, options)
    staging.publish(trackers, overwrite=options.overwrite)
    return {
        **plan_report(planned, staging.target),
        "path": str(staging.final),
        "plan": digest,
        "verified": {
            "tensors": len(sums) if options.verify else 0,
            "of": len(sums),
            "files": len(taken),
        },
        "fingerprints": first["fingerprints"],
        "resumed": staging.resumed,
        "seconds": round(time.time() - started, 3),
        "trackers_written": sorted(trackers),
        "files": {
            d.name: {"bytes": d.size, "digest": taken.get(d.name)} for d in planned.target.drafts
        },
        **weights_of(planned.target.layout),
        "peak_rss": peak_rss(),
    }


def _check_source(planned: Plan, sums: Mapping[TensorId, Sum]) -> None:
    """Raises CorruptError for a tensor that is not what the source's own manifest recorded.

    Only of tensors that go as they are: a cast, a map of values, another name has another sum.
    """
    source, target = planned.source, planned.target.layout.tensors
    recorded = manifest.read(source.path) if source.path.is_dir() else None
    if recorded is None or planned.migration:
        return
    expected = manifest.read_tensors(source.path, recorded)
    for tensor, feed in planned.feeds.items():
        before, after = source.layout.tensors.get(feed), target.get(tensor)
        said = expected.get(feed)
        if before is None or after is None or said is None or tensor not in sums:
            continue
        alike = (before.dtype, before.true, before.factors) == (
            after.dtype,
            after.true,
            after.factors,
        )
        if not alike or sums[tensor].hex == said:
            continue
        if all(piece.codec is None for piece in source.layout.pieces(feed)):
            raise CorruptError(
                f"{feed}: read from {source.path} with fingerprint {sums[tensor].hex}; its "
                f"{manifest.NAME} recorded {said}: the file has changed since, or the disk returns "
                f"other bytes. Copy it again; if it was changed on purpose, remove {manifest.NAME}."
            )


def _told(planned: Plan, options: Options) -> dict[str, Json]:
    """What the manifest records of the options: a migration step by step."""
    told = options.shown()
    if planned.migration:
        told["migrate"] = [dict(s) for s in planned.migration]
    return told


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
        Files(planned.source.path, keep=_kept(options), device=device(options.device)) as source,
        Files(staging.files, writable=True) as out,
        contextlib.ExitStack() as stack,
    ):
        checksums = Checksums(target.drafts, fresh=not staging.resumed)
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
        recorded = Recorded(source)
        if options.verify:
            source.watch = recorded.saw
            again = [t for n, ts in planned.names.items() if n not in work for t in ts]
            for cover in (planned.join(t).cover for t in again):
                recorded.expect(p.array for _, p in (*cover.parts.items, *cover.replicas))
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
                record(out, finished, found)
                unsynced, finished, found = 0, {}, []

        with behind(staging.record, options.workers) as record:
            move_all(mover, work, executor, done, workers=options.workers)
            record(out, finished, found)
        recorded.check()
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
    back = read_files(
        cold,
        drafts,
        elements=elements,
        workers=options.workers,
        device=device(options.device),
        digest=options.digest,
        progress=advance,
    )
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
