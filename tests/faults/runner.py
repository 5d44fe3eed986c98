"""Runs one conversion many times, spoilt at another operation each time; prints what went wrong.

    python -m faults.runner '{"source": …, "work": …, "to": …}'      (in tests/)

The process imports reshard and plans once, then forks: a run costs its own work and no start.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import reshard
from faults import seam
from faults.disk import Disk
from faults.seam import Before, Seam
from reshard import cli, commit, conversion
from reshard.errors import ReshardError

#: Files by which a framework, or reshard, takes a folder for a checkpoint.
MARKS = (
    "metadata.json", ".metadata", "reshard.json", "latest_checkpointed_iteration.txt", "latest",
    "model_optim_rng.pt", "model.safetensors", "zarr.json", "*.pt",
)  # fmt: skip
ERRORS = ("EIO", "ENOSPC", "EDQUOT", "EINTR")


@dataclass(frozen=True)
class Ended:
    """How a forked run ended: exit code (or -signal), its stderr, the operations it counted."""

    code: int
    said: str
    log: tuple[str, ...]


class Case:
    """A conversion, its folder of work, and what an uninterrupted run gives."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.work = Path(spec["work"])
        self.disk = self.work / "disk"
        self.out = self.disk / "out"
        self.options = [*spec.get("options", ())]
        self.command = ["convert", spec["source"], str(self.out), "--to", spec["to"]]
        self.command += ["--workers", "1"]  # operations in one order, to be counted
        self.every = spec.get("every", 1)  # of the pwrites, one in this many; all else always
        self.kills = spec.get("kills", 1)  # of the pwrites, a kill at one in this many
        self.all = spec.get("all", False)  # every error, stop and power cut at every operation
        self.bad: list[str] = []
        self.runs = 0
        self._old: Path | None = None
        plans: dict[str, Any] = {}
        real = conversion.make_plan

        def planned(source: Any, options: Any) -> Any:  # headers are read once for all runs
            key = repr(options)
            if key not in plans:
                plans[key] = real(source, options)
            return plans[key]

        conversion.make_plan = planned
        commit.SYNC_EVERY = 1 << 15
        commit.PATIENCE = 0.0
        self.fresh()
        assert self.run().code == 0
        conversion.make_plan(spec["source"], _options(self.command + self.options))
        self.whole = digests(self.out)
        self.fresh()
        self.log = self.run(lambda n, name, args: None).log

    def fresh(self) -> None:
        """An empty disk, or one with the old checkpoint."""
        shutil.rmtree(self.work, ignore_errors=True)
        self.disk.mkdir(parents=True)
        if self._old is not None:
            shutil.copytree(self._old, self.out)

    def run(
        self,
        before: Before | None = None,
        *,
        most: int | None = None,
        reading: bool = False,
        power: int | None = None,
        more: Sequence[str] = (),
    ) -> Ended:
        """The command in a forked process, behind a seam."""
        self.runs += 1
        err, ops = self.work / "stderr", self.work / "ops"
        pid = os.fork()
        if pid == 0:
            try:
                code = self._child(err, ops, before, most, reading, power, more)
            except BaseException:
                traceback.print_exc()
                code = 98
            os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        log = tuple(json.loads(ops.read_text())) if ops.exists() else ()
        ops.unlink(missing_ok=True)
        return Ended(code, err.read_text(), log)

    def _child(
        self,
        err: Path,
        ops: Path,
        before: Before | None,
        most: int | None,
        reading: bool,
        power: int | None,
        more: Sequence[str],
    ) -> int:
        signal.alarm(60)
        null = os.open(os.devnull, os.O_WRONLY)
        out = os.open(err, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(null, 1)
        os.dup2(out, 2)
        sys.stderr = os.fdopen(2, "w", closefd=False)
        real_open = open
        used: Seam | None = None
        if before is not None or most is not None or power is not None:
            disk: Disk | None = None

            def cut(n: int, name: str, args: tuple[Any, ...]) -> None:
                if n == power and disk is not None and used is not None:
                    for real in used.real:
                        setattr(os, real, used.real[real])
                    disk.dump(self.work / "left")
                    os.kill(os.getpid(), signal.SIGKILL)

            used = Seam(before or cut)
            used.most, used.reading = most, reading
            if power is not None:
                disk = Disk(self.disk, real_open)
                used.after = disk.saw
            used.install()
        code = 97
        try:
            cli.main(args=[*self.command, *self.options, *more], standalone_mode=False)
        except SystemExit as stop:
            code = int(stop.code or 0)
        sys.stderr.flush()
        if used is not None:
            with real_open(ops, "w") as file:
                json.dump(used.log, file)
        return code

    # --- what must hold ---------------------------------------------------------------------------

    def complain(self, what: str, problem: str) -> None:
        """One more thing that is wrong."""
        self.bad.append(f"{what}: {problem}")

    def incomplete_or_whole(self, what: str) -> bool:
        """No reader takes the target for complete, unless it is the whole result (or the old)."""
        found = digests(self.out)
        whole = self.bare(found) == self.bare(self.whole)
        old = self._old is not None and found == digests(self._old)
        try:
            reshard.open(self.out)
        except ReshardError:
            marks = {str(p.relative_to(self.out)) for m in MARKS for p in self.out.rglob(m)}
            if marks - set(self.trackers) and not whole:
                self.complain(what, f"left {sorted(marks)[:4]}, which do not open")
            return whole
        if not whole and not old:
            self.complain(what, f"opens, and is not whole: {difference(found, self.whole)}")
        return True

    def bare(self, found: dict[str, str]) -> dict[str, str]:
        """The checkpoint's own files, without trackers."""
        return {k: v for k, v in found.items() if k not in self.trackers}

    @property
    def trackers(self) -> tuple[str, ...]:
        """Files of the run folder, written after the checkpoint's."""
        return ("latest_checkpointed_iteration.txt", "latest", "latest_universal")

    def finishes(self, what: str, more: Sequence[str] = ()) -> None:
        """The same command succeeds, with the same bytes and nothing left beside."""
        ended = self.run(more=more)
        if ended.code != 0:
            self.complain(what, f"the same command then gave {ended.code}: {ended.said[-300:]}")
            return
        found = digests(self.out)
        if found != self.whole:
            self.complain(what, f"then ended otherwise: {difference(found, self.whole)}")
        left = [p.name for p in self.disk.iterdir() if p.name != "out"]
        if left:
            self.complain(what, f"then left {left}")

    def refused(self, what: str, ended: Ended, code: int = 1) -> None:
        """A clear error and its exit code."""
        if ended.code != code or "Traceback" in ended.said or "a bug in" in ended.said:
            self.complain(what, f"exit {ended.code}: {ended.said[-300:]!r}")
        elif not re.search(r"^reshard: .*/" if code == 1 else r"^reshard: ", ended.said, re.M):
            self.complain(what, f"says {ended.said!r}")

    # --- the trials -------------------------------------------------------------------------------

    def numbers(self, every: int | None = None) -> Iterator[int]:
        """Numbers of operations: all but pwrites, and one pwrite in `every`."""
        every, seen = every or self.every, self.runs
        for n, name in enumerate(self.log, 1):
            seen += name == "pwrite"
            if name != "pwrite" or seen % every == 0:
                yield n

    def killed(self) -> None:
        """Killed before every operation, with torn writes between; then the same command."""
        finished = set(self.numbers())
        for n, name in enumerate(self.log, 1):
            if name == "pwrite" and n % self.kills and n not in finished:
                continue
            torn = name in ("write", "pwrite") and n % 2 == 0
            self.fresh()
            what = f"{'torn by a' if torn else 'a'} kill at {n} ({name})"
            ended = self.run(seam.kill(n, torn=torn))
            if ended.code != -9:
                self.complain(what, f"exit {ended.code}: {ended.said[-300:]}")
            self.incomplete_or_whole(what)
            if n in finished:
                self.finishes(what)

    def killed_again(self) -> None:
        """Killed twice: half-way, then anywhere in the run that resumes."""
        half = len(self.log) // 2
        self.fresh()
        self.run(seam.kill(half))
        log = self.run(lambda n, name, args: None).log
        for n in range(1 + half % 3, len(log) + 1, max(3, len(log) // 15)):
            self.fresh()
            self.run(seam.kill(half))
            what = f"a kill at {half}, then at {n} ({log[n - 1]})"
            self.run(seam.kill(n))
            self.incomplete_or_whole(what)
            self.finishes(what)

    def failing(self) -> None:
        """An error at every operation, another kind each time; every third of them stays."""
        import errno

        chosen = [(n, ERRORS if self.all else [ERRORS[n % 4]]) for n in self.numbers()]
        for n, name in ((n, name) for n, names in chosen for name in names):
            self.fresh()
            what = f"{name} at {n} ({self.log[n - 1]})"
            stays = n % 3 == 0 and name in ("ENOSPC", "EDQUOT")
            ended = self.run(seam.fail(n, getattr(errno, name), stays=stays))
            after = self.incomplete_or_whole(what)
            if ended.code == 0 and not after:
                self.complain(what, "exit 0 and nothing there")
            elif ended.code:
                self.refused(what, ended)
            self.finishes(what)

    def failing_reads(self) -> None:
        """An error at a sample of the reads."""
        self.fresh()
        log = self.run(lambda n, name, args: None, reading=True).log
        import errno

        for n in range(1, len(log) + 1, 1 if self.all else max(1, len(log) // 20)):
            self.fresh()
            what = f"EIO at read {n} ({log[n - 1]})"
            ended = self.run(seam.fail(n, errno.EIO), reading=True)
            after = self.incomplete_or_whole(what)
            if ended.code == 0 and not after:
                self.complain(what, "exit 0 and nothing there")
            elif ended.code:
                self.refused(what, ended)
            self.finishes(what)

    def short(self) -> None:
        """Every write and read moves a few bytes only: the result is the same."""
        self.fresh()
        ended = self.run(lambda n, name, args: None, most=997)
        what = "short reads and writes"
        if ended.code or digests(self.out) != self.whole:
            self.complain(what, f"exit {ended.code}: {difference(digests(self.out), self.whole)}")

    def power(self) -> None:
        """Power lost before a sample of the operations: what was not synced is gone."""
        total = len(self.log)
        late = next((i for i, n in enumerate(self.log) if n == "rename"), total)
        for n in [*range(1, late - 3, 1 if self.all else 7), *range(late - 3, total + 2)]:
            self.fresh()
            what = f"power cut at {n} ({self.log[n - 1] if n <= total else 'the end'})"
            shutil.rmtree(self.work / "left", ignore_errors=True)
            if n > total:
                ended = self.run(power=-1, more=())
                if ended.code:
                    self.complain(what, f"exit {ended.code}: {ended.said[-300:]}")
                continue
            self.run(power=n)
            shutil.rmtree(self.disk)
            (self.work / "left").rename(self.disk)
            self.incomplete_or_whole(what)
            self.finishes(what)

    def stopped(self) -> None:
        """SIGINT and SIGTERM: tidy, resumable, 130 and 143."""
        for n in range(3, len(self.log) + 1, 1 if self.all else len(self.log) // 9):
            for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
                self.fresh()
                what = f"{number.name} at {n} ({self.log[n - 1]})"
                ended = self.run(seam.interrupt(n, number))
                if ended.code != 0:
                    self.refused(what, ended, code)
                if (self.disk / "out.reshard-staging" / "lease.json").exists():
                    self.complain(what, "the lease is still there")
                self.incomplete_or_whole(what)
                self.finishes(what)

    def overwriting(self) -> None:
        """--overwrite: the old checkpoint stands until the new one does, whatever happens."""
        old = self.work.with_name(self.work.name + "-old")
        shutil.rmtree(old, ignore_errors=True)
        self.fresh()
        assert self.run(more=["--dtype", "float16"]).code == 0
        shutil.copytree(self.out, old)
        self._old = old
        more = ["--overwrite"]
        self.fresh()
        log = self.run(lambda n, name, args: None, more=more).log
        first = next(i for i, n in enumerate(log) if n == "rename")
        for n in range(first - 1, len(log) + 1):
            for action in ("kill", "EIO"):
                self.fresh()
                what = f"{action} at {n} ({log[n - 1]}) of an overwriting run"
                ended = self.run(seam.kill(n) if action == "kill" else seam.fail(n, 5), more=more)
                if action == "EIO" and ended.code:
                    self.refused(what, ended)
                if not self.incomplete_or_whole(what):
                    self.kept(what)
                self.other_command(what, ended)
                self.finishes(what, more)
        self._old = None
        shutil.rmtree(old)

    def kept(self, what: str) -> None:
        """Between two renames the old one is in the staging folder, and the message says so."""
        said = ""
        try:
            reshard.open(self.out)
        except ReshardError as error:
            said = str(error)
        kept = next((self.disk / "out.reshard-staging").glob("replaced.*"), Path("/nowhere"))
        if not kept.is_dir() or str(kept) not in said:
            self.complain(what, f"neither checkpoint can be found; the error says {said!r}")

    def other_command(self, what: str, ended: Ended) -> None:
        """A run with another plan must not lose the old checkpoint either: it fails half-way."""
        if ended.code == 0:
            return
        shutil.copytree(self.disk, self.work / "aside")
        failed = self.run(seam.fail(12, 5), more=["--dtype", "bfloat16", "--overwrite"]).code
        # (an error in a mkdir of what is there is no error: that run ends well)
        if failed and not self.incomplete_or_whole(f"{what}, then another command"):
            self.complain(what, "another command has lost the old checkpoint")
        shutil.rmtree(self.disk)
        (self.work / "aside").rename(self.disk)


def _options(command: Sequence[str]) -> Any:
    from reshard.planning import Options

    return Options(to=command[4])


def digests(folder: Path) -> dict[str, str]:
    """A digest per file; what tells the time of a run is left out."""
    out = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        data = path.read_bytes()
        if path.name == "reshard.json":
            table = json.loads(data)
            table.pop("started"), table.pop("ended")
            data = json.dumps(table).encode()
        out[str(path.relative_to(folder))] = hashlib.blake2b(data).hexdigest()
    return out


def difference(found: dict[str, str], wanted: dict[str, str]) -> str:
    """The files that differ."""
    names = sorted(n for n in {*found, *wanted} if found.get(n) != wanted.get(n))
    return ", ".join(f"{n} ({'' if n in found else 'not '}there)" for n in names[:5])


def main() -> None:
    """One case: all the trials it names."""
    spec = json.loads(sys.argv[1])
    case = Case(spec)
    counts = {}
    trials: dict[str, Callable[[], None]] = {t: getattr(case, t) for t in spec["trials"]}
    for name, trial in trials.items():
        runs, start = case.runs, time.process_time()
        trial()
        del start
        counts[name] = case.runs - runs
    shutil.rmtree(case.work)
    json.dump({"operations": len(case.log), "runs": counts, "bad": case.bad}, sys.stdout)


if __name__ == "__main__":
    main()
