"""Whether a checkpoint is whole: structure, coverage, replicas, masters, recorded digests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path, PurePosixPath

import xxhash

from reshard import manifest
from reshard.checkpoint import Checkpoint, Json
from reshard.errors import CorruptError, UnsafeError, VerifyError
from reshard.files import Files, blocks
from reshard.fingerprint import Sum, slot_digests
from reshard.format import Loss
from reshard.plan import cover
from reshard.readback import fingerprints, read_block
from reshard.rounding import Rounding
from reshard.tensor import MASTER, PARAM, TensorId


def verify(
    checkpoint: Checkpoint,
    *,
    elements: int,
    progress: Callable[[int], object] = lambda _: None,
) -> dict[str, Json]:
    """Read every byte: gaps, replicas, masters against weights, and what the manifest recorded.

    Raises a ReshardError for the first thing that is wrong.
    """
    recorded = manifest.read(checkpoint.path)
    sums = fingerprints(checkpoint, elements=elements, progress=progress)
    findings = check_masters(checkpoint, elements=elements)
    if recorded is not None:
        _check_files(checkpoint.path, recorded)
        _check_tensors(checkpoint, recorded, sums)
    shown = slot_digests(checkpoint.layout.tensors.values(), {t: s.hex for t, s in sums.items()})
    return {
        "status": "ok",
        "path": str(checkpoint.path),
        "format": checkpoint.format,
        "topology": str(checkpoint.topology),
        "tensors": len(sums),
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


def _check_files(folder: Path, recorded: dict[str, Json]) -> None:
    files = recorded.get("files")
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
        if digest is not None and digest != file_digest(path):
            raise VerifyError(f"{path}: its digest is not the manifest's {digest}; copy it again")


def file_digest(path: Path) -> str:
    """The digest of a file as manifests record it."""
    h = xxhash.xxh3_128()
    with open(path, "rb") as source:
        while chunk := source.read(1 << 20):
            h.update(chunk)
    return f"xxh3_128:{h.hexdigest()}"


def _check_tensors(
    checkpoint: Checkpoint, recorded: dict[str, Json], sums: dict[TensorId, Sum]
) -> None:
    expected = manifest.read_tensors(checkpoint.path, recorded)
    for tensor, fingerprint in expected.items():
        if tensor not in sums:
            raise VerifyError(f"{tensor}: in the manifest, not in the checkpoint")
        if fingerprint is not None and sums[tensor].hex != fingerprint:
            raise VerifyError(
                f"{tensor}: fingerprint {sums[tensor].hex}, the manifest says {fingerprint}"
            )
    unexpected = [t for t in sums if t not in expected]
    if unexpected:
        raise VerifyError(f"{unexpected[0]}: in the checkpoint, not in the manifest")
