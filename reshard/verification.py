"""Whether a checkpoint is whole: structure, coverage, replicas, masters, recorded digests."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from reshard import manifest
from reshard.archives import check_archives
from reshard.checkpoint import Checkpoint, Json
from reshard.digests import of_file
from reshard.errors import CorruptError, UnsafeError, UsageError, VerifyError
from reshard.files import Files, blocks
from reshard.fingerprints import Sum, slot_digests
from reshard.format import Loss
from reshard.join import cover
from reshard.readback import fingerprints, read_block
from reshard.rounding import Rounding
from reshard.tensor import MASTER, PARAM, TensorId


@dataclass(frozen=True, slots=True)
class Part:
    """The `number`-th of `of` parts of a checkpoint's content: together they are all of it."""

    number: int = 1
    of: int = 1

    @classmethod
    def parse(cls, text: str) -> Part:
        """`2/5`, the second of five. Raises UsageError."""
        found = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text)
        if found is None or not 1 <= int(found[1]) <= int(found[2]):
            raise UsageError(f"--subset {text!r:.40}: write 1/5 for the first of five parts")
        return cls(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    def taken(self, names: Iterable[str]) -> list[str]:
        """Those of the names that lie in this part."""
        return sorted(set(names))[self.number - 1 :: self.of]


_ALL = Part()


def verify(
    checkpoint: Checkpoint,
    *,
    elements: int,
    deep: bool = False,
    part: Part = _ALL,
    progress: Callable[[int], object] = lambda _: None,
) -> dict[str, Json]:
    """Read every byte: gaps, replicas, masters against weights, and what the manifest recorded.

    `deep`: the page cache is asked to forget the files first, so that the disk is read. `part`:
    structure and sizes of everything, the content of this part of the tensors and files.
    Raises a ReshardError for the first thing that is wrong.
    """
    recorded = manifest.read(checkpoint.path)
    if deep:
        for name in checkpoint.files:
            _forget(checkpoint.path / name)
    chosen = _chosen(checkpoint, part)
    sums = fingerprints(chosen, elements=elements, progress=progress)
    findings = check_masters(chosen, elements=elements)
    if recorded is not None:
        _check_files(checkpoint.path, recorded, part)
        _check_tensors(checkpoint, recorded, sums)
    else:
        _check_archives(checkpoint, part)
    tensors = checkpoint.layout.tensors
    shown: dict[str, str] = {}
    if part == _ALL:
        shown = slot_digests(tensors.values(), {t: s.hex for t, s in sums.items()})
    return {
        "status": "ok",
        "path": str(checkpoint.path),
        "format": checkpoint.format,
        "topology": str(checkpoint.topology),
        "tensors": len(sums),
        "of": len(tensors),
        "subset": str(part),
        "deep": deep,
        "manifest": recorded is not None,
        "fingerprints": dict(shown),
        "findings": [
            *({"code": f.code, "what": f.what, "detail": f.detail} for f in findings),
            *(
                {"code": "problem", "what": checkpoint.format, "detail": p}
                for p in checkpoint.problems
            ),
        ],
    }


def _forget(path: Path) -> None:
    """Have the page cache drop a file's clean pages. Advice: a file system may ignore it."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def _chosen(checkpoint: Checkpoint, part: Part) -> Checkpoint:
    """The checkpoint with the tensors of one part; the slots of a name lie in one."""
    if part == _ALL:
        return checkpoint
    layout = checkpoint.layout
    for tensor in layout.tensors:
        layout.check(tensor)
    names = set(part.taken(t.name for t in layout.tensors))
    tensors = {t: v for t, v in layout.tensors.items() if t.name in names}
    return replace(checkpoint, layout=replace(layout, tensors=tensors))


def check_masters(checkpoint: Checkpoint, *, elements: int) -> list[Loss]:
    """Whether fp32 masters round to the weights. Raises CorruptError on a known corruption."""
    findings: list[Loss] = []
    tensors = checkpoint.layout.tensors
    with Files(checkpoint.path) as files:
        for name in sorted({t.name for t in tensors if t.slot == MASTER}):
            pair = [TensorId(name, PARAM), TensorId(name, MASTER)]
            if pair[0] not in tensors:
                continue
            rounding = Rounding.between(tensors[t] for t in pair)
            if rounding is None:
                continue
            shelves = [cover(checkpoint.layout.pieces(t)).parts for t in pair]
            for box in blocks(tensors[pair[0]].true.stop, elements):
                w, m = (
                    read_block(files, shelf.near(box), box, tensors[t])
                    for shelf, t in zip(shelves, pair, strict=True)
                )
                rounding.compare(box, [(box, w)], [(box, m)])
            findings += rounding.findings(name)
    return findings


def _check_archives(checkpoint: Checkpoint, part: Part) -> None:
    """Raises CorruptError for members that have another CRC-32 than their archive says."""
    found = check_archives(checkpoint, part.taken(checkpoint.files))
    if found:
        more = f"; and {len(found) - 3} more" if found[3:] else ""
        raise CorruptError("; ".join(found[:3]) + more)


def _check_files(folder: Path, recorded: dict[str, Json], part: Part) -> None:
    files = recorded.get("files")
    content = set(part.taken(files)) if isinstance(files, dict) else set()
    for name, row in files.items() if isinstance(files, dict) else ():
        if not isinstance(row, dict):
            raise CorruptError(f"{folder / manifest.NAME}: the row of {name} is damaged")
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or "\0" in name:
            raise UnsafeError(f"{folder / manifest.NAME}: names {name!r:.200}, outside the folder")
        path = folder / name
        size = path.stat().st_size if path.exists() else None
        if size != row.get("bytes"):
            there = "missing" if size is None else f"{size} bytes"
            raise VerifyError(f"{path}: {there}, the manifest says {row.get('bytes')} bytes")
        digest = row.get("digest")
        if digest is not None and name in content and digest != of_file(path, str(digest)):
            raise VerifyError(f"{path}: its digest is not the manifest's {digest}; copy it again")


def _check_tensors(
    checkpoint: Checkpoint, recorded: dict[str, Json], sums: dict[TensorId, Sum]
) -> None:
    expected = manifest.read_tensors(checkpoint.path, recorded)
    for tensor, fingerprint in expected.items():
        if tensor not in checkpoint.layout.tensors:
            raise VerifyError(f"{tensor}: in the manifest, not in the checkpoint")
        if fingerprint is not None and tensor in sums and sums[tensor].hex != fingerprint:
            raise VerifyError(
                f"{tensor}: fingerprint {sums[tensor].hex}, the manifest says {fingerprint}"
            )
    unexpected = [t for t in checkpoint.layout.tensors if t not in expected]
    if unexpected:
        raise VerifyError(f"{unexpected[0]}: in the checkpoint, not in the manifest")
