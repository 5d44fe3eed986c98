"""Staging beside the target, a journal for resume, fsync, rename, trackers last."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from reshard.errors import TargetError
from reshard.files import Files
from reshard.fingerprint import Sum
from reshard.format import Declaration, Loss
from reshard.layout import Draft
from reshard.tensor import TensorId

STAGING = ".reshard-staging"
JOURNAL = "journal.jsonl"
LEASE = "lease.json"
#: Bytes moved between two fsyncs; what a kill can cost.
SYNC_EVERY = 256 << 20


@dataclass
class Staging:
    """A folder beside the target that becomes the target by one rename."""

    target: Path  # DST, the run folder
    folder: str  # the checkpoint's folder below it
    path: Path  # the staging folder
    digest: str
    done: dict[str, dict[TensorId, Sum]] = field(default_factory=dict)
    losses: list[Loss] = field(default_factory=list)
    resumed: bool = False

    @property
    def files(self) -> Path:
        """Where the checkpoint's files are staged."""
        return self.path / "checkpoint"

    @property
    def final(self) -> Path:
        """Where they will be."""
        return self.target / self.folder if self.folder else self.target

    def lay_out(self, drafts: Sequence[Draft]) -> None:
        """Create every file at its full size, empty: no reader takes one for whole.

        Headers, directories and metadata come last, with `write_literals`.
        """
        if not self.resumed:
            shutil.rmtree(self.files, ignore_errors=True)
        self.files.mkdir(exist_ok=True)
        for draft in drafts:
            path = self.files / draft.name
            path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                os.ftruncate(fd, draft.size)
            finally:
                os.close(fd)
        if not self.resumed:
            with open(self.path / JOURNAL, "x") as out:
                out.write(json.dumps({"plan": self.digest}) + "\n")
                out.flush()
                os.fsync(out.fileno())

    def write_literals(self, drafts: Sequence[Draft]) -> None:
        """Write everything around the arrays, once all of them are moved."""
        for draft in drafts:
            fd = os.open(self.files / draft.name, os.O_RDWR | os.O_CLOEXEC)
            try:
                for offset, data in draft.literals:
                    _pwrite(fd, data, offset)
            finally:
                os.close(fd)

    def record(
        self,
        files: Files,
        finished: Mapping[str, Mapping[TensorId, Sum]],
        losses: Iterable[Loss],
    ) -> None:
        """Make finished names durable, then say in the journal that they are."""
        files.sync_written()
        with open(self.path / JOURNAL, "a") as out:
            for name, sums in finished.items():
                row = {t.slot: [s.a, s.b, s.elements] for t, s in sums.items()}
                out.write(json.dumps({"name": name, "sums": row}) + "\n")
            for loss in losses:
                out.write(json.dumps({"loss": [loss.code, loss.what, loss.detail]}) + "\n")
            out.flush()
            os.fsync(out.fileno())

    def publish(self, trackers: Mapping[str, bytes], *, overwrite: bool) -> None:
        """Rename the staged files into place, then write the trackers."""
        sync_tree(self.files)
        self.target.parent.mkdir(parents=True, exist_ok=True)
        old: Path | None = None
        if self.final.exists():
            if any(self.final.iterdir()):
                if not overwrite:
                    raise TargetError(
                        f"{self.final} has come to exist during the run; nothing was replaced"
                    )
                old = self.path / "replaced"
                os.rename(self.final, old)
            elif self.final == self.target and self.path.parent == self.target:
                raise TargetError(f"{self.final} exists; remove it or choose another DST")
            else:
                self.final.rmdir()
        self.final.parent.mkdir(parents=True, exist_ok=True)
        os.rename(self.files, self.final)
        sync_folder(self.final.parent)
        for name, data in trackers.items():
            write_atomically(self.target / name, data)
        shutil.rmtree(self.path)

    def release(self) -> None:
        """Give the lease back and keep what is staged, so that the same command resumes."""
        (self.path / LEASE).unlink(missing_ok=True)

    def discard(self) -> None:
        """Remove everything staged."""
        shutil.rmtree(self.path, ignore_errors=True)


def staging_path(target: Path) -> Path:
    """Where a target is staged: beside it, so that the rename is atomic."""
    if target.exists() and os.path.ismount(target):
        return target / STAGING
    return target.with_name(target.name + STAGING)


def check_target(target: Path, declaration: Declaration, *, overwrite: bool) -> None:
    """Raises TargetError if the target's place is taken."""
    final = target / declaration.folder if declaration.folder else target
    if target.is_symlink() and not target.exists():
        raise TargetError(f"{target} is a symbolic link to nothing")
    if target.exists() and not target.is_dir():
        raise TargetError(f"{target} is not a folder; choose another DST")
    if final.exists() and any(final.iterdir()) and not overwrite:
        raise TargetError(f"{final} exists; choose another DST or give --overwrite")
    parent = target
    while not parent.exists():
        parent = parent.parent
    if not os.access(parent, os.W_OK):
        raise TargetError(f"{parent} cannot be written to")


def check_space(target: Path, drafts: Sequence[Draft]) -> None:
    """Raises TargetError if the drafts do not fit on the target's disk beside what is staged."""
    staged = sum(p.stat().st_blocks * 512 for p in staging_path(target).rglob("*") if p.is_file())
    needed = sum(d.size for d in drafts) - staged
    parent = target
    while not parent.exists():
        parent = parent.parent
    free = shutil.disk_usage(parent).free
    if needed > free:
        raise TargetError(
            f"{target}: {needed:,} bytes are to be written and {free:,} are free on the disk. "
            "Free some space or choose another DST."
        )


def open_staging(target: Path, folder: str, digest: str) -> Staging:
    """Take the staging folder of a target, resuming what the same plan has left there.

    Raises TargetError if another live run holds it.
    """
    path = staging_path(target)
    path.mkdir(parents=True, exist_ok=True)
    _take_lease(path)
    staging = Staging(target, folder, path, digest)
    try:
        rows = [json.loads(line) for line in (path / JOURNAL).read_text().splitlines() if line]
    except (OSError, ValueError):
        rows = []
    if rows and rows[0] == {"plan": digest}:
        staging.resumed = True
        for row in rows[1:]:
            if "loss" in row:
                staging.losses.append(Loss(*row["loss"]))
            else:
                staging.done[row["name"]] = {
                    TensorId(row["name"], slot): Sum(*s) for slot, s in row["sums"].items()
                }
    else:
        for entry in path.iterdir():
            if entry.name != LEASE:
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    return staging


def _take_lease(path: Path) -> None:
    lease = path / LEASE
    mine = json.dumps({"pid": os.getpid(), "host": socket.gethostname()})
    for _ in range(2):
        try:
            fd = os.open(lease, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            if _is_stale(lease):
                lease.unlink(missing_ok=True)
                continue
            raise TargetError(
                f"{path} is held by another run. Wait for it; if it is dead, remove {lease}."
            ) from None
        with os.fdopen(fd, "w") as out:
            out.write(mine)
        return
    raise TargetError(f"{path} is held by another run")


def _is_stale(lease: Path) -> bool:
    try:
        row = json.loads(lease.read_text())
        if row["host"] != socket.gethostname():
            return False
        os.kill(int(row["pid"]), 0)
    except ProcessLookupError:
        return True
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return int(row["pid"]) == os.getpid()


def _pwrite(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        n = os.pwrite(fd, view, offset)
        view, offset = view[n:], offset + n


def write_atomically(path: Path, data: bytes) -> None:
    """Write a small file so that a reader sees all of it or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".tmp")
    with open(draft, "wb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())
    os.replace(draft, path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_tree(path: Path) -> None:
    """Make every file and name below a folder durable."""
    for folder, _, names in os.walk(path):
        for name in names:
            fd = os.open(Path(folder) / name, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        sync_folder(Path(folder))
