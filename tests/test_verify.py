"""`verify`: parts of a whole, digests that other tools check, checksums of archives."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as distributed
import xxhash
import zstandard

import reshard
from reshard.box import Box
from reshard.containers.dcp import read_metadata
from reshard.containers.zips import Window, read_members
from reshard.dtypes import BFLOAT16, FLOAT32
from reshard.errors import CorruptError, ReshardError, UsageError, VerifyError
from reshard.layout import StoredArray
from reshard.rounding import Rounding
from reshard.tensor import MASTER, LogicalTensor, TensorId
from support import flip

Unpack = Callable[[str], Path]


@pytest.fixture
def source(unpacked: Unpack) -> Path:
    return unpacked("dcp/tp_only_w2") / "checkpoint"


def test_parts_are_the_whole_and_each_byte_is_in_one(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    reshard.convert(source, out, "dcp:dp2")
    parts = [reshard.verify(out, subset=f"{i}/5") for i in range(1, 6)]
    assert all(p["of"] == parts[0]["of"] for p in parts)
    assert sum(int(str(p["tensors"])) for p in parts) == parts[0]["of"]
    assert reshard.verify(out)["tensors"] == parts[0]["of"]
    opened = reshard.open(out)
    piece = opened["model.norm.weight", "exp_avg"].pieces[0]
    flip(out / piece.array.file, piece.array.offset)
    seen = 0
    for i in range(1, 6):
        try:
            reshard.verify(out, subset=f"{i}/5")
        except VerifyError:
            seen += 1
    assert seen in (1, 2)  # by its tensor, and by its file where another part has that
    with pytest.raises(VerifyError):
        reshard.verify(out)


@pytest.mark.parametrize("to", ["dcp:dp3", "torch", "universal", "hf"])
def test_a_conversion_reads_what_its_sources_manifest_recorded(
    source: Path, tmp_path: Path, to: str
) -> None:
    """safetensors have no checksums of their own."""
    made = tmp_path / "made"
    reshard.convert(source, made, "hf")
    assert reshard.convert(made, tmp_path / "good", to)["status"] == "ok"
    array = stored(made, "model.norm.weight")
    flip(made / array.file, array.offset + 1)
    with pytest.raises(CorruptError, match=r"norm.weight.*: .* recorded"):
        reshard.convert(made, tmp_path / "bad", to)
    assert not (tmp_path / "bad").exists() or not any((tmp_path / "bad").iterdir())
    (made / "reshard.json").unlink()  # changed on purpose, the user says
    assert reshard.convert(made, tmp_path / "bad", to)["status"] == "ok"


def test_a_part_checks_the_structure_of_everything(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    reshard.convert(source, out, "dcp:dp2")
    file = out / "__1_0.distcp"
    os.truncate(file, file.stat().st_size - 1)
    for i in range(1, 4):
        with pytest.raises(ReshardError):
            reshard.verify(out, subset=f"{i}/3")


@pytest.mark.parametrize("text", ["0/5", "6/5", "1", "1/0", "a/b", "-1/5", "1/5/2", ""])
def test_a_part_that_is_none(text: str, source: Path) -> None:
    with pytest.raises(UsageError, match="1/5"):
        reshard.verify(source, subset=text)


def test_deep_reads_the_disk(source: Path, tmp_path: Path) -> None:
    """The files' pages leave the cache first, where the file system takes the advice."""
    out = tmp_path / "out"
    reshard.convert(source, out, "dcp:dp2")
    report = reshard.verify(out, deep=True)
    assert report["deep"] is True
    assert report["fingerprints"] == reshard.verify(out)["fingerprints"]
    done = subprocess.run(
        [sys.executable, "-m", "reshard", "verify", str(out), "--deep", "--subset", "2/5"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert re.search(r"\d+ of \d+: part 2/5 tensors whole", done.stdout)


def test_other_tools_check_the_digests(source: Path, tmp_path: Path) -> None:
    """`xxhsum -c` takes 32 hex digits and two spaces as XXH128 (xxhash 0.8, xxhsum.1)."""
    out = tmp_path / "out"
    reshard.convert(source, out, "universal")
    lines = (out / "reshard-files.xxh128").read_text().splitlines()
    listed = dict(reversed(line.split("  ", 1)) for line in lines)
    manifests = ("reshard.json", "reshard-tensors-00000.jsonl", "reshard-files.xxh128")
    files = [str(p.relative_to(out)) for p in out.rglob("*") if p.is_file()]
    assert sorted(listed) == sorted(f for f in files if f not in manifests)
    for name, digest in listed.items():
        assert digest == xxhash.xxh3_128((out / name).read_bytes()).hexdigest()
    xxhsum = shutil.which("xxhsum")
    if xxhsum is not None:  # the grammar is checked above where it is not installed
        subprocess.run([xxhsum, "-c", "reshard-files.xxh128"], cwd=out, check=True)


def test_sha256_on_request(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    reshard.convert(source, out, "dcp:dp2", digest="sha256")
    assert not (out / "reshard-files.xxh128").exists()
    check = ["sha256sum", "-c", "--quiet", "reshard-files.sha256"]
    subprocess.run(check, cwd=out, check=True)
    reshard.verify(out)
    file = out / "__0_0.distcp"
    flip(file, file.stat().st_size // 2)
    assert subprocess.run(check, cwd=out, check=False, capture_output=True).returncode == 1
    with pytest.raises(VerifyError):
        reshard.verify(out)
    with pytest.raises(UsageError, match="sha256"):
        reshard.convert(source, tmp_path / "other", "dcp:dp2", digest="md5")


def test_a_digest_of_an_unknown_kind_is_refused(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    reshard.convert(source, out, "dcp:dp2")
    manifest = out / "reshard.json"
    manifest.write_text(manifest.read_text().replace("xxh3_128:", "md5:"))
    with pytest.raises(CorruptError, match="no known kind"):
        reshard.verify(out)


def test_a_wrong_crc_is_reported_where_there_is_no_manifest(
    unpacked: Unpack, tmp_path: Path
) -> None:
    """torch does not look at it. The byte is one of a tensor: nothing else would notice."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(unpacked("dcp/ddp_w2_torchsave") / "checkpoint", folder)
    report = reshard.verify(folder)
    assert report["findings"] == []
    opened = reshard.open(folder)
    tensor = next(iter(opened.checkpoint.layout.tensors))
    array = opened.checkpoint.layout.pieces(tensor)[0].array
    flip(folder / array.file, array.offset)
    with pytest.raises(CorruptError, match=r"1 of .*CRC-32"):
        reshard.verify(folder)


def flipped(source: Path, folder: Path, file: str, at: int) -> str:
    """What `verify` says of a copy of which one bit of a file is another, behind the file."""
    shutil.copytree(source, folder)
    flip(folder / file, at)
    with pytest.raises(CorruptError, match="CRC-32") as raised:
        reshard.verify(folder)
    said = str(raised.value)
    assert said.startswith(f"{folder / file}: ")
    return said.removeprefix(f"{folder / file}: ")


def stored(folder: Path, name: str, slot: str = "param") -> StoredArray:
    """Where a tensor's first piece lies."""
    return reshard.open(folder)[name, slot].pieces[0].array  # type: ignore[union-attr]  # no step


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("dcp/tp_only_w2/checkpoint", "model.norm.weight"),
        ("dcp/fsdp2_w4_uneven/checkpoint", "model.layers.1.mlp.up_proj.weight"),
        ("dcp/accelerate_fsdp2_w2_sharded/checkpoint", "model.norm.weight"),
        ("megatron/h-llama-tp2pp2/dist/iter_0000003", "decoder.final_layernorm.weight"),
    ],
)
def test_a_wrong_crc_inside_a_distcp_file_is_reported(
    unpacked: Unpack, tmp_path: Path, source: str, name: str
) -> None:
    """One bit of a payload: nothing else would notice. File, tensor and byte are named."""
    first, second, *rest = source.split("/")
    folder = unpacked(f"{first}/{second}").joinpath(*rest)
    assert reshard.verify(folder)["findings"] == []
    array = stored(folder, name, "exp_avg")
    said = flipped(folder, tmp_path / "bad", array.file, array.offset + array.nbytes - 1)
    assert said.startswith(f"{array.key} at [")
    assert f"data/0 at byte {array.offset})" in said


def test_a_wrong_crc_of_an_object_is_reported(source: Path, tmp_path: Path) -> None:
    held = read_metadata(source)
    key, place = next((k, p) for k, p in held.objects.items() if "weight_decay" in k)
    with Window(source / place.file, place.offset, place.length) as window:
        members = read_members(window)
    member = next(m for n, m in members.items() if n.endswith("/.data/serialization_id"))
    said = flipped(source, tmp_path / "bad", place.file, member.offset)
    stop = place.offset + place.length
    assert said.startswith(f"{key}, bytes {place.offset} to {stop}: 1 of ")


def test_archives_under_zstd_are_looked_into(unpacked: Unpack, tmp_path: Path) -> None:
    folder = unpacked("dcp/fsdp2_w2_zstd") / "checkpoint"
    assert reshard.verify(folder)["findings"] == []
    bad = tmp_path / "bad"
    shutil.copytree(folder, bad)
    place = next(c.place for e in read_metadata(folder).tensors.values() for c in e.chunks)
    data = bytearray((folder / place.file).read_bytes())
    stream = data[place.offset : place.offset + place.length]
    inner = bytearray(zstandard.ZstdDecompressor().decompressobj().decompress(stream))
    at = inner.index(b"archive/data/0") + 80
    for level in range(1, 20):  # until it fits where it was; what is behind a frame is not read
        inner[at] ^= 1
        packed = zstandard.ZstdCompressor(level=level).compress(bytes(inner))
        inner[at] ^= 1
        if len(packed) <= place.length:
            break
    else:
        pytest.fail("no level packs the blob as small")
    data[place.offset : place.offset + len(packed)] = packed
    (bad / place.file).chmod(0o644)
    (bad / place.file).write_bytes(data)
    with pytest.raises(CorruptError, match="CRC-32"):
        reshard.verify(bad)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("taken", [True, False])
def test_a_save_without_checksums_is_not_accused(tmp_path: Path, taken: bool) -> None:
    """torch records zeros where it was told to take none; a file of each kind."""
    state = {"a": torch.arange(40.0), "b": torch.ones(3, dtype=torch.bfloat16), "n": 7}
    torch.serialization.set_crc32_options(taken)
    try:
        distributed.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
        torch.save(state, tmp_path / "model.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    for path, key in ((tmp_path / "dcp", "a"), (tmp_path / "model.pt", "a")):
        assert reshard.verify(path)["findings"] == []
        opened = reshard.open(path)
        array = opened[key].pieces[0].array  # type: ignore[union-attr]  # no step
        flip(opened.checkpoint.path / array.file, array.offset)
        if taken:
            with pytest.raises(CorruptError, match="CRC-32"):
                reshard.verify(path)
        else:
            assert reshard.verify(path)["findings"] == []


@pytest.mark.parametrize(("shape", "refused"), [((64,), False), ((8, 8), True)])
def test_a_matrix_of_other_masters_is_refused_and_a_norm_is_not(
    shape: tuple[int, ...], refused: bool
):
    """A norm's weight may be a 16-bit gain less 1, which is far from its master less 1."""
    box = Box((0,) * len(shape), shape)
    weight = LogicalTensor(TensorId("w"), shape, BFLOAT16)
    master = LogicalTensor(TensorId("w", MASTER), shape, FLOAT32)
    rounding = Rounding.between([weight, master])
    assert rounding is not None
    held = np.linspace(1, 2, 64, dtype=np.float32).reshape(shape)
    rounding.compare(box, [(box, held.astype(BFLOAT16.numpy))], [(box, held * np.float32(1.1))])
    if refused:
        with pytest.raises(CorruptError, match="of two saves"):
            rounding.findings("w")
    else:
        assert [x.code for x in rounding.findings("w")] == ["master-differs"]
