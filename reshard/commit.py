"""Staging beside the target, a journal for resume, fsync, rename, trackers last."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from reshard.errors import TargetError
from reshard.files import Files
from reshard.fingerprints import Sum
from reshard.format import Declaration, Loss, formats
from reshard.layout import Draft
from reshard.tensor import TensorId
from reshard.workers import for_syncs

STAGING = ".reshard-staging"
_LONGEST_NAME = 255  # bytes, of every file system in use
_LONGEST_PATH = 3800  # of 4096 that Linux takes, with room for names within the folder
JOURNAL = "journal.jsonl"
LEASE = "lease.json"
#: What an overwriting run has moved away, with the place it lay in behind the dot.
REPLACED = "replaced."
#: Bytes moved between two fsyncs; what a kill can cost.
SYNC_EVERY = 256 << 20
#: Seconds in which a run that has made its lease has also written it.
PATIENCE = 1.0


@dataclass
class Staging:
    """A folder beside the target that becomes the target by one rename."""

    target: Path  # DST, the run folder
    folder: str  # the checkpoint's folder below it
    path: Path  # the staging folder
    digest: str
    lease: str = ""  # what our lease says
    done: dict[str, dict[TensorId, Sum]] = field(default_factory=dict)
    losses: list[Loss] = field(default_factory=list)
    synced: set[str] = field(default_factory=set)  # files that hold what the journal names
    resumed: bool = False
    workers: int = 1

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
        if self._laid_out.exists():  # killed while the compressed ones took their place
            shutil.rmtree(self.files, ignore_errors=True)
            os.rename(self._laid_out, self.files)
        sizes = {d.name: d.size for d in drafts}
        if any(_size(self.files / name) != sizes.get(name) for name in self.synced):
            self._start_anew()  # what the journal calls durable is gone
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
            with for_syncs(self.workers) as each:
                for _ in each(sync_folder, [Path(folder) for folder, _, _ in os.walk(self.files)]):
                    pass
            with open(self.path / JOURNAL, "x") as out:
                out.write(json.dumps({"plan": self.digest}) + "\n")
                out.flush()
                os.fsync(out.fileno())
            sync_folder(self.path)

    @property
    def _laid_out(self) -> Path:
        """Where files are kept as they were laid out, once compressed ones have their place."""
        return self.path / "laid-out"

    def compress(self, make: Callable[[Path, Path], Sequence[Draft]]) -> list[Draft]:
        """Put what `make` writes, from one folder into another, in the place of the staged files.

        Those stay until the end: a run that is killed compresses anew what the journal says is
        there.
        """
        made = self.path / "compressed"
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir()
        drafts = list(make(self.files, made))
        self._check_lease()
        os.rename(self.files, self._laid_out)
        os.rename(made, self.files)
        sync_folder(self.path)
        return drafts

    def _start_anew(self) -> None:
        self.done.clear()
        self.losses.clear()
        self.synced.clear()
        self.resumed = False
        _empty(self.path)

    def write_literals(self, drafts: Sequence[Draft]) -> None:
        """Write everything around the arrays, once all of them are moved."""
        for draft in drafts:
            fd = os.open(self.files / draft.name, os.O_RDWR | os.O_CLOEXEC)
            try:
                with _named(self.files / draft.name):
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
        self._check_lease()
        written = files.sync_written(self.workers) - self.synced
        with open(self.path / JOURNAL, "a") as out:
            if written:
                out.write(json.dumps({"synced": sorted(written)}) + "\n")
                self.synced |= written
            for name, sums in finished.items():
                row = {t.slot: [s.a, s.b, s.elements] for t, s in sums.items()}
                out.write(json.dumps({"name": name, "sums": row}) + "\n")
            for loss in losses:
                out.write(json.dumps({"loss": [loss.code, loss.what, loss.detail]}) + "\n")
            out.flush()
            os.fsync(out.fileno())

    def publish(self, trackers: Mapping[str, bytes], *, overwrite: bool) -> None:
        """Rename the staged files into place, then write the trackers.

        What was there before lies in the staging folder until the new one is in place.
        """
        sync_tree(self.files, self.workers)
        make_folder(self.final.parent)
        self._check_lease()
        if self.final.exists():
            if not any(self.final.iterdir()):
                self.final.rmdir()
            elif overwrite:
                os.rename(self.final, self.path / (REPLACED + quote(self.folder, safe="")))
            else:
                raise TargetError(
                    f"{self.final} has come to exist during the run; nothing was replaced"
                )
        os.rename(self.files, self.final)
        sync_folder(self.final.parent)
        self.finish(trackers)

    def finish(self, trackers: Mapping[str, bytes]) -> None:
        """Write the trackers of what is in place, and remove the staging folder."""
        for name, data in trackers.items():
            path, draft = self.target / name, self.path / "tracker"
            make_folder(path.parent)
            with open(draft, "wb") as out:
                out.write(data)
                out.flush()
                os.fsync(out.fileno())
            os.replace(draft, path)
            sync_folder(path.parent)
        with _named(self.path):
            shutil.rmtree(self.path)

    def _held(self) -> bool:
        try:
            return (self.path / LEASE).read_text() == self.lease
        except OSError:
            return False

    def _check_lease(self) -> None:
        if not self._held():
            raise TargetError(
                f"{self.path} has been taken by another run, which took this one for dead; "
                "nothing was published. Wait for it."
            )

    def release(self) -> None:
        """Give the lease back and keep what is staged, so that the same command resumes."""
        if self._held():
            try:
                mend(self.target)
            finally:
                (self.path / LEASE).unlink(missing_ok=True)

    def discard(self) -> None:
        """Remove everything staged."""
        if self._held():
            mend(self.target)
            shutil.rmtree(self.path, ignore_errors=True)


def staging_path(target: Path) -> Path:
    """Where a target is staged: beside it, so that the rename is atomic; else inside."""
    if target.name in ("", ".."):
        target = target.resolve()  # `.` and `..` have nothing beside them by name
    if target.exists() and _must_hold_staging(target):
        return target / STAGING
    return target.with_name(target.name + STAGING)


def _must_hold_staging(target: Path) -> bool:
    return os.path.ismount(target) or not os.access(target.parent, os.W_OK)


def check_name(target: Path) -> None:
    """Raises TargetError for a name that leaves no room for that of the staging folder."""
    whole = len(os.fsencode(os.path.abspath(target)))
    if whole > _LONGEST_PATH:
        raise TargetError(f"the path of DST has {whole} bytes, {_LONGEST_PATH} at most go through")
    longest = _LONGEST_NAME - len(STAGING)
    found = len(os.fsencode(target.name))
    if found > longest:
        raise TargetError(
            f"the name of DST has {found} bytes; with {STAGING} of the folder beside it a file "
            f"system takes {longest}. Choose a shorter one."
        )


def check_target(target: Path, declaration: Declaration, *, overwrite: bool) -> None:
    """Raises TargetError if the target's place is taken."""
    final = target / declaration.folder if declaration.folder else target
    if target.exists() and not target.is_dir():
        raise TargetError(f"{target} is not a folder; choose another DST")
    parent = target
    while not parent.exists():
        parent = parent.parent
    if not os.access(parent, os.W_OK) or not parent.is_dir():
        raise TargetError(f"{parent} cannot be written to")
    if final == target and target.exists() and _must_hold_staging(target):
        raise TargetError(
            f"{target} is a mount point, or its parent cannot be written to: no finished folder "
            "can be renamed to it. Choose a DST inside it."
        )
    if final.exists() and not final.is_dir():
        raise TargetError(f"{final} is not a folder; choose another DST")
    if final != target and target.is_dir():
        why = next(filter(None, (f.recognise(target) for f in formats()[0])), None)
        if why is not None:
            raise TargetError(
                f"{target} is a checkpoint itself ({why}), not a run folder that holds some; "
                "choose another DST"
            )
    if not final.exists() or not any(final.iterdir()):
        return
    if not overwrite:
        raise TargetError(f"{final} exists; choose another DST or give --overwrite")
    if not any(f.recognise(final) for f in formats()[0]):
        raise TargetError(
            f"{final} is no checkpoint, and only checkpoints are replaced. Remove it, or choose "
            "another DST."
        )


def check_space(target: Path, drafts: Sequence[Draft], *, copies: int = 1) -> None:
    """Raises TargetError if the drafts do not fit on the target's disk beside what is staged.

    `copies`: 2 where compressed files are made beside them, which may be no smaller.
    """
    files = (staging_path(target) / "checkpoint").rglob("*")
    staged = sum(p.stat().st_blocks * 512 for p in files if p.is_file())
    needed = sum(d.size for d in drafts) * copies - staged
    parent = target
    while not parent.exists():
        parent = parent.parent
    free = shutil.disk_usage(parent).free
    if needed > free:
        raise TargetError(
            f"{target}: {needed:,} bytes are to be written and {free:,} are free on the disk. "
            "Free some space or choose another DST."
        )


def open_staging(target: Path, folder: str, digest: str, workers: int = 1) -> Staging:
    """Take the staging folder of a target, resuming what the same plan has left there.

    Raises TargetError if another live run holds it.
    """
    path = staging_path(target)
    if path.is_symlink():
        raise TargetError(f"{path} is a symbolic link; remove it")
    make_folder(path)
    staging = Staging(target, folder, path, digest, _take_lease(path), workers=workers)
    try:
        mend(target)
        if not _read_journal(staging):
            staging._start_anew()
    except BaseException:
        staging.release()
        raise
    return staging


def leftover(target: Path, folder: str, digest: str) -> Staging | None:
    """What a run of this plan has left after its checkpoint was in place, if anything."""
    path = staging_path(target)
    if not path.is_dir() or _plan_of(path) not in (None, digest):
        return None
    return Staging(target, folder, path, digest, _take_lease(path))


def mend(target: Path) -> None:
    """Put a checkpoint back that an overwriting run moved away and did not replace."""
    path = staging_path(target)
    for old in sorted(path.glob(REPLACED + "*")):
        folder = unquote(old.name[len(REPLACED) :])
        final = target / folder if folder else target
        if not final.exists():
            make_folder(final.parent)
            os.rename(old, final)
            sync_folder(final.parent)
            sync_folder(path)


def interrupted(target: Path) -> str | None:
    """What to say of a target whose conversion has not ended; None if there is none."""
    path = staging_path(target)
    if not path.is_dir():
        return None
    said = f"a conversion to {target} was interrupted or is running, staged in {path}"
    old = next(iter(sorted(path.glob(REPLACED + "*"))), None)
    if old is not None:
        said += f"; the checkpoint it was to replace is {old}"
    return f"{said}. It is incomplete: the same command finishes it."


def _rows(path: Path) -> tuple[list[dict[str, object]], int]:
    """The journal's rows up to the first that is torn, and where they end in the file."""
    rows: list[dict[str, object]] = []
    end = 0
    try:
        raw = (path / JOURNAL).read_bytes()
        for line in raw.splitlines(keepends=True):
            row = json.loads(line)
            if not isinstance(row, dict) or not line.endswith(b"\n"):
                break
            rows.append(row)
            end += len(line)
    except (FileNotFoundError, ValueError):
        pass
    return rows, end


def _plan_of(path: Path) -> object:
    rows, _ = _rows(path)
    return rows[0].get("plan") if rows else None


def _read_journal(staging: Staging) -> bool:
    """Take in what the journal of the same plan says is durable; False if it is of another."""
    rows, end = _rows(staging.path)
    if not rows or rows[0] != {"plan": staging.digest}:
        return False
    try:
        for row in rows[1:]:
            if "loss" in row:
                staging.losses.append(Loss(*_listed(row["loss"])))
            elif "synced" in row:
                staging.synced.update(_listed(row["synced"]))
            else:
                name, sums = str(row["name"]), row["sums"]
                if not isinstance(sums, dict):
                    return False
                staging.done[name] = {TensorId(name, slot): _sum(s) for slot, s in sums.items()}
    except (KeyError, TypeError, ValueError):
        return False
    os.truncate(staging.path / JOURNAL, end)
    staging.resumed = True
    return True


def _sum(value: object) -> Sum:
    a, b, elements = _listed(value)
    if any(type(n) is not int for n in (a, b, elements)):
        raise TypeError(f"{value!r:.40} is no sum")
    return Sum(a, b, elements)


def _listed(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r:.40} is no list")
    return value


def _empty(path: Path) -> None:
    """Remove what is staged: all but the lease and what may have to be put back."""
    for entry in path.iterdir():
        if entry.name != LEASE and not entry.name.startswith(REPLACED):
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def _take_lease(path: Path) -> str:
    """Make the lease of a staging folder; what it says."""
    lease = path / LEASE
    pid = os.getpid()
    row = {"pid": pid, "host": socket.gethostname(), "started": _started(pid)}
    mine = json.dumps({**row, "token": os.urandom(8).hex()})
    for _ in range(3):
        try:
            fd = os.open(lease, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            if not _is_stale(lease):
                break
            with contextlib.suppress(FileNotFoundError):  # another run was quicker
                lease.unlink()
            continue
        try:
            with _named(lease), os.fdopen(fd, "w") as out:
                out.write(mine)
        except BaseException:
            lease.unlink(missing_ok=True)
            raise
        return mine
    raise TargetError(f"{path} is held by another run. Wait for it; if it is dead, remove {lease}.")


def _is_stale(lease: Path) -> bool:
    """Whether the run that made a lease is dead. One that died before it wrote it left it empty."""
    row = _lease_row(lease)
    if row is None:
        time.sleep(PATIENCE)
        row = _lease_row(lease)
    if row is None:
        return True
    pid, started = row.get("pid"), row.get("started")
    if row.get("host") != socket.gethostname() or type(pid) is not int or pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    return started is not None and started != _started(pid)  # the number is another's now


def _lease_row(lease: Path) -> dict[str, object] | None:
    try:
        row = json.loads(lease.read_text())
    except (FileNotFoundError, ValueError):
        return None
    return row if isinstance(row, dict) else None


def _started(pid: int) -> int | None:
    """When a process began, in ticks since the boot; None where /proc does not tell."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
        return int(text.rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def _pwrite(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        n = os.pwrite(fd, view, offset)
        view, offset = view[n:], offset + n


def make_folder(path: Path) -> None:
    """Create a folder with its parents, so that a power cut leaves them there."""
    if path.is_dir():
        return
    make_folder(path.parent)
    path.mkdir(exist_ok=True)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    _sync(path, os.O_RDONLY | os.O_DIRECTORY)


def sync_tree(path: Path, workers: int = 1) -> None:
    """Make every file and name below a folder durable: files, then the folders they are in."""
    found = [(Path(folder), names) for folder, _, names in os.walk(path)]
    with for_syncs(workers) as each:
        for _ in each(_sync, [folder / name for folder, names in found for name in names]):
            pass
        for _ in each(sync_folder, [folder for folder, _ in found]):
            pass


def _sync(path: Path, flags: int = os.O_RDONLY) -> None:
    fd = os.open(path, flags)
    try:
        with _named(path):
            os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """An error of the system that does not say where, says so."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
