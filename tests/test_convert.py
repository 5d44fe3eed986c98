"""The conversion as a whole: staging, resume, memory, damaged input, hostile input."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import reshard
from reshard import conversion
from reshard.containers import dcp, torchfile
from reshard.containers.inert import Global, Record
from reshard.errors import (
    CorruptError,
    CoverageError,
    FormatError,
    LossError,
    ReplicaError,
    ReshardError,
    TargetError,
    UsageError,
    VerifyError,
)
from reshard.tensor import TensorId
from support import ROOT, mend_checksums

Unpack = Callable[[str], Path]


def copied(source: Path, target: Path) -> Path:
    """A copy of a fixture that may be changed."""
    shutil.copytree(source, target, copy_function=shutil.copyfile)
    return target


def left_behind(folder: Path) -> list[str]:
    """What a reader could take for a checkpoint below a folder."""
    marks = ("metadata.json", ".metadata", "reshard.json", "latest_checkpointed_iteration.txt")
    return [str(p) for m in marks for p in folder.rglob(m)]


# --- staging and resume --------------------------------------------------------------------------

_KILLED = """
import os, signal, sys
import reshard.commit, reshard.engine
reshard.commit.SYNC_EVERY = 1
move, seen = reshard.engine.Mover.move, []
def dying(self, name, tensors):
    seen.append(name)
    if len(seen) > int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)
    return move(self, name, tensors)
reshard.engine.Mover.move = dying
import reshard
reshard.convert(sys.argv[2], sys.argv[3], "tp2pp4")
"""


def test_a_killed_run_resumes_and_ends_the_same(unpacked: Unpack, tmp_path: Path) -> None:
    source = unpacked("megatron/a-tp4pp2") / "dist"
    out = tmp_path / "out"
    for names in (7, 20):
        done = subprocess.run(
            [sys.executable, "-c", _KILLED, str(names), str(source), str(out)],
            cwd=ROOT,
            check=False,
            capture_output=True,
        )
        assert done.returncode == -9
        assert not out.exists()
    report = reshard.convert(source, out, "tp2pp4")
    assert report["resumed"]
    whole = tmp_path / "whole"
    reshard.convert(source, whole, "tp2pp4")
    for file in sorted(p for p in whole.rglob("*") if p.is_file() and p.name != "reshard.json"):
        assert (out / file.relative_to(whole)).read_bytes() == file.read_bytes(), file
    assert not list(tmp_path.glob("*staging*"))


def test_a_finished_target_is_left_as_it_is(unpacked: Unpack, tmp_path: Path) -> None:
    source = unpacked("megatron/a-tp1pp1") / "dist"
    reshard.convert(source, tmp_path / "out", "tp2")
    stamps = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("*")}
    again = reshard.convert(source, tmp_path / "out", "tp2")
    assert again["already"]
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("*")} == stamps
    with pytest.raises(TargetError, match="exists"):
        reshard.convert(source, tmp_path / "out", "tp4")
    reshard.convert(source, tmp_path / "out", "tp4", overwrite=True)
    assert reshard.diff(source, tmp_path / "out")["differences"] == []


def test_a_live_run_folder_keeps_its_tracker(unpacked: Unpack, tmp_path: Path) -> None:
    """The tracker of a run that goes on is moved only on request."""
    source = unpacked("megatron/a-tp1pp1") / "dist"
    out = tmp_path / "out"
    out.mkdir()
    tracker = out / "latest_checkpointed_iteration.txt"
    tracker.write_text("9")
    reshard.convert(source, out, "tp2")
    assert tracker.read_text() == "9"
    shutil.rmtree(out / "iter_0000003")
    reshard.convert(source, out, "tp2", set_latest=True)
    assert tracker.read_text() == "3"


def test_two_writers_of_one_target(unpacked: Unpack, tmp_path: Path) -> None:
    source = unpacked("megatron/a-tp1pp1") / "dist"
    staging = tmp_path / "out.reshard-staging"
    staging.mkdir()
    lease = staging / "lease.json"
    import socket

    lease.write_text(json.dumps({"pid": os.getppid(), "host": socket.gethostname()}))
    with pytest.raises(TargetError, match="another run"):
        reshard.convert(source, tmp_path / "out", "tp2")
    lease.write_text(json.dumps({"pid": 2**22 + 1, "host": socket.gethostname()}))
    reshard.convert(source, tmp_path / "out", "tp2")


@pytest.mark.parametrize("workers", [1, 3])
def test_a_changed_byte_after_writing_is_not_published(
    unpacked: Unpack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """The cold reading sees what the disk holds, not what was meant."""
    real = conversion.read_files

    def spoilt(checkpoint: Any, *args: Any, **kwargs: Any) -> Any:
        array = checkpoint.layout.pieces(next(iter(checkpoint.layout.tensors)))[0].array
        file = checkpoint.path / array.file
        data = bytearray(file.read_bytes())
        data[array.offset] ^= 1
        file.write_bytes(data)
        return real(checkpoint, *args, **kwargs)

    monkeypatch.setattr(conversion, "read_files", spoilt)
    with pytest.raises((VerifyError, CorruptError)):
        reshard.convert(
            unpacked("megatron/a-tp1pp1") / "dist", tmp_path / "out", "tp1", workers=workers
        )
    assert left_behind(tmp_path) == []


def test_several_workers_read_one_file_back_as_one_does(unpacked: Unpack, tmp_path: Path) -> None:
    """They sum what was read while the next is read."""
    seen: list[Any] = []
    for workers in (1, 2, 4):
        out = tmp_path / str(workers)
        report: Any = reshard.convert(
            unpacked("hf/llama2") / "plain", out, "hf", workers=workers, block=1 << 12
        )
        assert report["verified"]["tensors"] == report["tensors"]
        seen.append((report["files"], report["fingerprints"]))
        assert len(list(out.glob("*.safetensors"))) == 1
    assert seen[0] == seen[1] == seen[2]


def test_a_source_that_changes_during_the_run_is_seen(
    dist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = sys.modules["reshard.engine"]
    real = engine.Mover.move

    def move(self: Any, name: str, tensors: Any) -> Any:
        os.utime(dist / "__0_0.distcp", ns=(1, 1))
        return real(self, name, tensors)

    monkeypatch.setattr(engine.Mover, "move", move)
    refused(dist, tmp_path, VerifyError, "changed during the run")


def test_disk_too_small_is_said_before_work(
    unpacked: Unpack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(TargetError, match=r"1,000 are free"):
        reshard.convert(unpacked("megatron/a-tp1pp1") / "dist", tmp_path / "out", "tp2")
    assert list(tmp_path.iterdir()) == []


def test_strict_refuses_any_loss(unpacked: Unpack, tmp_path: Path) -> None:
    source = unpacked("megatron/a-tp4pp2") / "dist"
    with pytest.raises(LossError, match="rng-derived"):
        reshard.convert(source, tmp_path / "out", "tp2pp4", strict=True)
    assert list(tmp_path.iterdir()) == []
    report = reshard.convert(source, tmp_path / "out", "tp4pp2", strict=True)
    assert report["losses"] == []
    assert report["recipe"]["verdict"] == "exact"


def test_target_inside_the_source_is_refused(unpacked: Unpack, tmp_path: Path) -> None:
    source = copied(unpacked("megatron/a-tp1pp1") / "dist", tmp_path / "source")
    with pytest.raises(UsageError, match="inside"):
        reshard.convert(source, source / "iter_0000003" / "out", "tp2")


# --- damaged input -------------------------------------------------------------------------------


@pytest.fixture
def dist(unpacked: Unpack, tmp_path: Path) -> Path:
    return copied(unpacked("megatron/a-tp4pp2") / "dist", tmp_path / "source") / "iter_0000003"


def refused(source: Path, tmp_path: Path, kind: type[ReshardError], message: str) -> None:
    """Refused by convert, with this message, and nothing left."""
    with pytest.raises(kind, match=message):
        reshard.convert(source, tmp_path / "out", "tp2pp4")
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.reshard-staging").exists()


def test_a_missing_distcp(dist: Path, tmp_path: Path) -> None:
    (dist / "__5_1.distcp").unlink()
    refused(dist, tmp_path, CorruptError, "__5_1.distcp")


def test_a_truncated_distcp(dist: Path, tmp_path: Path) -> None:
    file = dist / "__3_0.distcp"
    os.truncate(file, file.stat().st_size - 700)
    refused(dist, tmp_path, CorruptError, "__3_0.distcp")


def rewritten(folder: Path, change: Callable[[dict[str, dcp.TensorEntry]], None]) -> None:
    """The folder's .metadata with its tensors changed."""
    metadata = dcp.read_metadata(folder)
    tensors = dict(metadata.tensors)
    change(tensors)
    raw = dcp.MetadataDraft(tensors, metadata.objects).pickled()
    (folder / ".metadata").write_bytes(raw)


def test_a_gap_in_the_metadata(dist: Path, tmp_path: Path) -> None:
    """torch's own loader leaves the hole's old values in place and says nothing."""

    def drop(tensors: dict[str, dcp.TensorEntry]) -> None:
        key = "decoder.layers.mlp.linear_fc2.weight"
        entry = tensors[key]
        tensors[key] = dcp.TensorEntry(entry.shape, entry.dtype, list(entry.chunks)[1:])

    rewritten(dist, drop)
    refused(dist, tmp_path, CoverageError, r"linear_fc2.weight: no stored array holds")


def test_an_unknown_key(dist: Path, tmp_path: Path) -> None:
    def add(tensors: dict[str, dcp.TensorEntry]) -> None:
        tensors["decoder.layers.mystery.weight"] = tensors["decoder.layers.mlp.linear_fc2.weight"]

    rewritten(dist, add)
    refused(dist, tmp_path, ReshardError, "mystery")


def test_two_checkpoints_in_one_folder(unpacked: Unpack, dist: Path, tmp_path: Path) -> None:
    """Another run's .metadata over these files, or another run's files under this .metadata."""
    other = unpacked("megatron/a-tp2pp4") / "dist" / "iter_0000003"
    shutil.copyfile(other / "__0_0.distcp", dist / "__0_0.distcp")
    refused(dist, tmp_path, ReshardError, r"__0_0\.distcp")


def test_replicas_that_differ(unpacked: Unpack, tmp_path: Path) -> None:
    """A norm that every TP rank holds, changed on one of them."""
    source = copied(unpacked("megatron/a-tp4pp2") / "torch", tmp_path / "source")
    file = source / "iter_0000003" / "mp_rank_02_000" / "model_optim_rng.pt"
    opened = reshard.open(source)
    name = "decoder.layers.0.input_layernorm.weight"
    pieces = opened.checkpoint.layout.pieces(TensorId(name))
    array = next(p.array for p in pieces if "mp_rank_02_000" in p.array.file)
    raw = bytearray(file.read_bytes())
    raw[array.offset] ^= 1
    file.write_bytes(raw)
    mend_checksums(file)  # the run itself had diverged
    with pytest.raises(ReplicaError, match=r"input_layernorm.*mp_rank_02_000"):
        reshard.convert(source, tmp_path / "out", "megatron:tp2pp4")
    assert left_behind(tmp_path / "out.reshard-staging") == []
    with pytest.raises(ReplicaError, match="input_layernorm"):
        reshard.verify(source)
    report = reshard.convert(source, tmp_path / "out", "megatron:tp2pp4", first_replica=True)
    assert report["status"] == "ok"


def test_from_that_contradicts_the_files(dist: Path, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"--from says tp=2.*tp=4"):
        reshard.convert(dist, tmp_path / "out", "tp1", given="tp2pp2")


def test_a_tracker_that_names_nothing(dist: Path, tmp_path: Path) -> None:
    (dist.parent / "latest_checkpointed_iteration.txt").write_text("77")
    with pytest.raises(CorruptError, match=r"'77'.*iter_0000003"):
        reshard.convert(dist.parent, tmp_path / "out", "tp1")
    assert reshard.open(dist.parent, iteration=3).checkpoint.iteration == 3


# --- verify --------------------------------------------------------------------------------------


def test_verify_finds_a_flipped_bit(unpacked: Unpack, tmp_path: Path) -> None:
    """In the payload of any file, by its digest; the manifest needs nothing else."""
    reshard.convert(unpacked("megatron/a-tp1pp1") / "dist", tmp_path / "out", "tp2")
    assert reshard.verify(tmp_path / "out")["manifest"]
    file = tmp_path / "out" / "iter_0000003" / "__1_0.distcp"
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 16
    file.write_bytes(raw)
    with pytest.raises((VerifyError, CorruptError)):
        reshard.verify(tmp_path / "out")


def test_files_carry_correct_checksums(unpacked: Unpack, tmp_path: Path) -> None:
    """torch ignores a zip's CRC; zipfile does not."""
    import zipfile

    source = unpacked("megatron/a-tp2pp4") / "dist"
    reshard.convert(source, tmp_path / "out", "megatron-legacy:tp2")
    for file in (tmp_path / "out").rglob("*.pt"):
        with zipfile.ZipFile(file) as archive:
            assert archive.testzip() is None


# --- hostile input -------------------------------------------------------------------------------


def bomb(path: Path) -> Record:
    """What pickles as a call of os.system; it would leave a file behind."""
    return Record(Global("os", "system"), (f"touch {path}",), made="reduce")


ANYTHING = type("Anything", (), {"__contains__": lambda _, item: True})()


@pytest.mark.parametrize("where", ["common.pt", "args", "object", ".metadata"])
def test_a_pickle_that_would_run_code(unpacked: Unpack, tmp_path: Path, where: str) -> None:
    """Refused or inert, never run, never written on."""
    source = copied(unpacked("megatron/a-tp1pp1") / "dist", tmp_path / "source")
    folder = source / "iter_0000003"
    canary = tmp_path / "ran"
    if where == ".metadata":
        raw = torchfile.dumps([bomb(canary)], ANYTHING, {})
        (folder / ".metadata").write_bytes(raw)
    elif where == "object":
        metadata = dcp.read_metadata(folder)
        key = next(k for k in metadata.objects if k.startswith("rng_state"))
        made = dcp.distcp_file("evil.distcp", [dcp.ObjectItem(key, [[bomb(canary)]], ANYTHING)])
        (folder / "evil.distcp").write_bytes(b"".join(d for _, d in made.draft.literals))
        objects = {**metadata.objects, key: made.places[0]}
        raw = dcp.MetadataDraft(metadata.tensors, objects).pickled()
        (folder / ".metadata").write_bytes(raw)
    else:
        file = torchfile.load(folder / "common.pt", "common.pt")
        root: Any = dict(file.root)  # type: ignore[call-overload]
        if where == "args":
            root["args"].state["evil"] = bomb(canary)
        else:
            root["opt_param_scheduler"] = bomb(canary)
        draft, _ = torchfile.draft("common.pt", root, allow=ANYTHING, values=file.values())
        raw = bytearray(draft.size)
        for offset, data in draft.literals:
            raw[offset : offset + len(data)] = data
        (folder / "common.pt").write_bytes(raw)
    try:
        report = reshard.convert(source, tmp_path / "out", "tp2")
    except ReshardError:
        assert not (tmp_path / "out").exists()
    else:
        assert report["status"] == "ok"
        for file in (tmp_path / "out").rglob("*"):
            if file.is_file() and not file.name.startswith("reshard"):  # JSON text runs nothing
                assert b"touch" not in file.read_bytes(), file
    assert not canary.exists()


# --- memory --------------------------------------------------------------------------------------

_PEAK = """
import sys
import reshard
reshard.convert(sys.argv[1], sys.argv[2], "tp2pp4", memory=int(sys.argv[3]))
# not ru_maxrss: that counts the process which forked this one, too
print(next(x.split()[1] for x in open("/proc/self/status") if x.startswith("VmHWM")))
"""


@pytest.mark.parametrize(("budget", "bound"), [(64 << 20, 200), (256 << 20, 400)])
def test_memory_stays_within_the_budget(tmp_path: Path, budget: int, bound: int) -> None:
    """512 MB of state; peak RSS in MiB, interpreter and numpy included."""
    source = tmp_path / "source"
    maker = [sys.executable, "-m", "benchmarks.make_megatron", "512MB", str(source)]
    subprocess.run(maker, cwd=ROOT, check=True, capture_output=True)
    done = subprocess.run(
        [sys.executable, "-c", _PEAK, str(source), str(tmp_path / "out"), str(budget)],
        check=True,
        capture_output=True,
        text=True,
    )
    assert int(done.stdout) / 1024 < bound
    shutil.rmtree(tmp_path)


def test_an_extra_state_with_content_is_a_loss(dist: Path, tmp_path: Path) -> None:
    """fp8 scales of Transformer Engine are pickles that its loader runs: never written on."""
    metadata = dcp.read_metadata(dist)
    key = next(k for k in metadata.objects if "_extra_state" in k)
    made = dcp.distcp_file("more.distcp", [dcp.ObjectItem(key, [b"scales"])])
    (dist / "more.distcp").write_bytes(b"".join(d for _, d in made.draft.literals))
    objects = {**metadata.objects, key: made.places[0]}
    (dist / ".metadata").write_bytes(dcp.MetadataDraft(metadata.tensors, objects).pickled())
    file = torchfile.load(dist / "common.pt", "common.pt")
    root: Any = dict(file.root)  # type: ignore[call-overload]
    root["args"].state["transformer_impl"] = "transformer_engine"
    draft, _ = torchfile.draft("common.pt", root, allow=ANYTHING, values=file.values())
    raw = bytearray(draft.size)
    for offset, data in draft.literals:
        raw[offset : offset + len(data)] = data
    (dist / "common.pt").write_bytes(raw)
    report = reshard.plan(dist, "tp2pp4")
    assert [x["code"] for x in report["losses"]].count("extra-state-dropped") == 1
