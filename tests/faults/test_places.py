"""Where a target lies, who else writes there, and what a source does meanwhile."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import reshard
from reshard import commit, conversion
from reshard.errors import CorruptError, ReshardError, TargetError, UsageError, VerifyError

Unpack = Callable[[str], Path]


@pytest.fixture
def source(unpacked: Unpack) -> Path:
    return unpacked("dcp/tp_only_w2") / "checkpoint"


def run(*args: object) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own."""
    command = [sys.executable, "-m", "reshard", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB and 24 inodes."""
    place = tmp_path / "tiny"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k,nr_inodes=24", "tmpfs", str(place)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting is not permitted")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_small_disk_is_refused_before_work(source: Path, tiny: Path) -> None:
    done = run("convert", source, tiny / "out", "--to", "dcp:dp2")
    assert done.returncode == 1
    assert "are free on the disk" in done.stderr
    assert list(tiny.iterdir()) == []


def test_a_disk_that_fills_up_during_the_run(
    source: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others write there too: what was free at the start is not at the end."""
    monkeypatch.setattr(commit, "check_space", lambda *_, **__: None)
    with pytest.raises(OSError, match=r"No space left.*reshard-staging"):
        reshard.convert(source, tiny / "out", "dcp:dp2")
    assert not (tiny / "out").exists()
    subprocess.run(["mount", "-o", "remount,size=4m,nr_inodes=99", str(tiny)], check=True)
    assert reshard.convert(source, tiny / "out", "dcp:dp2")["status"] == "ok"
    assert [p.name for p in tiny.iterdir()] == ["out"]


def test_a_disk_without_inodes(source: Path, tiny: Path) -> None:
    subprocess.run(["mount", "-o", "remount,size=8m", str(tiny)], check=True)
    for i in range(20):
        (tiny / f"{i}").touch()
    done = run("convert", source, tiny / "out", "--to", "dcp:dp2")
    assert done.returncode == 1
    assert "No space left" in done.stderr
    for i in range(20):
        (tiny / f"{i}").unlink()
    done = run("convert", source, tiny / "out", "--to", "dcp:dp2")
    assert done.returncode == 0, done.stderr


def test_a_mounted_target(source: Path, unpacked: Unpack, tiny: Path) -> None:
    """A run folder may be a mount: its checkpoint is staged inside. A bare folder cannot be one."""
    subprocess.run(["mount", "-o", "remount,size=64m,nr_inodes=999", str(tiny)], check=True)
    done = run("convert", source, tiny, "--to", "dcp:dp2")
    assert done.returncode == 1
    assert "mount point" in done.stderr
    assert list(tiny.iterdir()) == []
    reshard.convert(unpacked("megatron/a-tp1pp1") / "dist", tiny, "tp2", weights_only=True)
    assert sorted(p.name for p in tiny.iterdir()) == [
        "iter_0000003",
        "latest_checkpointed_iteration.txt",
    ]
    reshard.convert(source, tiny / "out", "dcp:dp2")
    assert reshard.diff(source, tiny / "out")["status"] == "equal"


def test_a_read_only_file_system(source: Path, tiny: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(tiny)], check=True)
    done = run("convert", source, tiny / "out", "--to", "dcp:dp2")
    assert done.returncode == 1
    assert "cannot be written to" in done.stderr


def test_a_linked_target_on_another_file_system(source: Path, tiny: Path, tmp_path: Path) -> None:
    subprocess.run(["mount", "-o", "remount,size=8m,nr_inodes=99", str(tiny)], check=True)
    (tiny / "real").mkdir()
    (tmp_path / "link").symlink_to(tiny / "real")
    reshard.convert(source, tmp_path / "link", "dcp:dp2")
    assert (tmp_path / "link").is_symlink()
    assert (tiny / "real" / ".metadata").is_file()
    (tmp_path / "dangling").symlink_to(tiny / "nothing")
    with pytest.raises(TargetError, match="link to nothing"):
        reshard.convert(source, tmp_path / "dangling", "dcp:dp2")


def test_a_target_that_is_a_file_or_below_one(source: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    for out in (file, file / "out"):
        done = run("convert", source, out, "--to", "dcp:dp2")
        assert done.returncode == 1, done.stderr
        assert "Traceback" not in done.stderr
        assert "a bug in" not in done.stderr
    assert file.read_text() == "x"


def test_a_staging_folder_that_is_a_link_is_not_followed(source: Path, tmp_path: Path) -> None:
    """It would be emptied."""
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "precious").write_text("x")
    (tmp_path / "out.reshard-staging").symlink_to(victim)
    with pytest.raises(TargetError, match="symbolic link"):
        reshard.convert(source, tmp_path / "out", "dcp:dp2")
    assert (victim / "precious").read_text() == "x"


def test_overwrite_replaces_checkpoints_only(source: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.tex").write_text("x")
    with pytest.raises(TargetError, match="no checkpoint"):
        reshard.convert(source, home, "dcp:dp2", overwrite=True)
    assert (home / "thesis.tex").read_text() == "x"


def test_overwrite_never_replaces_the_source(source: Path, tmp_path: Path) -> None:
    mine = tmp_path / "runs" / "run"
    shutil.copytree(source, mine)
    for out in (mine, mine.parent):
        with pytest.raises(UsageError, match="source"):
            reshard.convert(mine, out, "torch", overwrite=True)
    assert reshard.diff(source, mine)["status"] == "equal"


# --- two writers ---------------------------------------------------------------------------------


def test_two_runs_at_once(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is refused, also within a process; the other ends well."""
    inside, go = threading.Event(), threading.Event()
    real = conversion._move

    def move(*args: Any) -> Any:
        inside.set()
        go.wait(20)
        return real(*args)

    monkeypatch.setattr(conversion, "_move", move)
    reports: list[Any] = []
    first = threading.Thread(
        target=lambda: reports.append(reshard.convert(source, tmp_path / "out", "dcp:dp2"))
    )
    first.start()
    assert inside.wait(20)
    with pytest.raises(TargetError, match="another run"):
        reshard.convert(source, tmp_path / "out", "dcp:dp4")
    done = run("convert", source, tmp_path / "out", "--to", "dcp:dp2")
    assert done.returncode == 1
    assert "held by another run" in done.stderr
    go.set()
    first.join()
    assert reports[0]["status"] == "ok"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_run_taken_for_dead_publishes_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another took its lease (a stale one, seen twice): it stops, and touches nothing of theirs."""
    real = conversion._move
    staging = tmp_path / "out.reshard-staging"

    def move(*args: Any) -> Any:
        (staging / "lease.json").write_text(json.dumps({"pid": 1, "host": "elsewhere"}))
        return real(*args)

    monkeypatch.setattr(conversion, "_move", move)
    with pytest.raises(TargetError, match="taken by another run"):
        reshard.convert(source, tmp_path / "out", "dcp:dp2")
    assert (staging / "checkpoint").is_dir()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("row", "stale"),
    [
        ("", True),
        ('{"pid": 12', True),
        ("[]", True),
        (json.dumps({"pid": 2**22 + 1, "host": socket.gethostname()}), True),
        (json.dumps({"pid": 2**80, "host": socket.gethostname()}), False),
        (json.dumps({"pid": "1", "host": socket.gethostname()}), False),
        (json.dumps({"pid": os.getppid(), "host": socket.gethostname()}), False),
        (json.dumps({"pid": os.getppid(), "host": socket.gethostname(), "started": 1}), True),
        (json.dumps({"pid": 2**22 + 1, "host": "another"}), False),
    ],
)
def test_leases(
    row: str, stale: bool, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dead run's lease is taken over: also one of a number that another process has now."""
    monkeypatch.setattr(commit, "PATIENCE", 0.0)
    staging = tmp_path / "out.reshard-staging"
    staging.mkdir()
    (staging / "lease.json").write_text(row)
    if stale:
        reshard.convert(source, tmp_path / "out", "dcp:dp2", weights_only=True)
    else:
        with pytest.raises(TargetError, match="another run"):
            reshard.convert(source, tmp_path / "out", "dcp:dp2", weights_only=True)


@pytest.mark.parametrize(
    "row",
    [
        "{", "[]", "1", '{"name": 1}', '{"name": "x", "sums": 1}', '{"loss": 3}', '{"loss": []}',
        '{"name": "x", "sums": {"param": [1]}}', '{"synced": 1}', '{"synced": ["../../x"]}',
        '{"name": "model.norm.weight", "sums": {"param": "abc"}}', "\\udcff",
    ],
)  # fmt: skip
def test_a_damaged_journal_costs_time_only(row: str, source: Path, tmp_path: Path) -> None:
    plan = conversion.make_plan(source, conversion.Options(to="dcp:dp2", weights_only=True))
    staging = tmp_path / "out.reshard-staging"
    staging.mkdir()
    head = json.dumps({"plan": conversion.plan_digest(plan)})
    (staging / "journal.jsonl").write_text(f"{head}\n{row}\n")
    reshard.convert(source, tmp_path / "out", "dcp:dp2", weights_only=True)
    assert reshard.verify(tmp_path / "out")["status"] == "ok"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


# --- an interrupted target, a changing source ----------------------------------------------------


def test_verify_says_that_a_target_is_incomplete(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(conversion, "_verify", stop)
        with pytest.raises(KeyboardInterrupt):
            reshard.convert(source, tmp_path / "out", "dcp:dp2")
    done = run("verify", tmp_path / "out")
    assert done.returncode == 1
    assert "was interrupted" in done.stderr
    assert "the same command finishes it" in done.stderr
    assert reshard.convert(source, tmp_path / "out", "dcp:dp2")["resumed"]


@pytest.mark.parametrize("when", ["_move", "_verify"])
@pytest.mark.parametrize("how", ["written", "replaced", "cut"])
def test_a_source_that_changes(
    when: str, how: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = tmp_path / "source"
    shutil.copytree(source, mine, copy_function=shutil.copyfile)
    file = mine / "__0_0.distcp"
    real = getattr(conversion, when)

    def change(*args: Any) -> Any:
        result = real(*args)
        data = bytearray(file.read_bytes())
        data[-3000] ^= 1
        if how == "replaced":
            (tmp_path / "new").write_bytes(data)
            os.replace(tmp_path / "new", file)
        else:
            file.write_bytes(data[:-1] if how == "cut" else data)
        return result

    with monkeypatch.context() as patch:
        patch.setattr(conversion, when, change)
        with pytest.raises(VerifyError, match="changed during the run"):
            reshard.convert(mine, tmp_path / "out", "dcp:dp2")
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.reshard-staging").exists()


def test_a_staged_byte_that_changes_while_stopped(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the journal calls done is still read back before it is published."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(conversion, "_verify", stop)
        with pytest.raises(KeyboardInterrupt):
            reshard.convert(source, tmp_path / "out", "dcp:dp2")
    file = next((tmp_path / "out.reshard-staging" / "checkpoint").glob("__0_0.distcp"))
    opened = reshard.open(file.parent)
    array = opened.checkpoint.layout.pieces(next(iter(opened.checkpoint.layout.tensors)))[0].array
    data = bytearray((file.parent / array.file).read_bytes())
    data[array.offset] ^= 1
    (file.parent / array.file).write_bytes(data)
    with pytest.raises(ReshardError, match="read back"):
        reshard.convert(source, tmp_path / "out", "dcp:dp2")
    assert not (tmp_path / "out").exists()
    reshard.convert(source, tmp_path / "out", "dcp:dp2")
    assert reshard.diff(source, tmp_path / "out")["status"] == "equal"


def test_a_metadata_json_that_cannot_be_read_is_named(
    unpacked: Unpack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it, a folder of Megatron's looks like another kind's."""
    real = os.open

    def broken(path: Any, *args: Any, **kwargs: Any) -> int:
        if str(path).endswith("metadata.json"):
            raise OSError(errno.EIO, "Input/output error", str(path))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", broken)
    with pytest.raises(CorruptError, match=r"metadata\.json: cannot be read"):
        reshard.open(unpacked("megatron/a-tp1pp1") / "dist")
