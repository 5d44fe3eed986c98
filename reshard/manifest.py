"""The manifest: what came from what, a fingerprint per tensor, a digest per file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from reshard.checkpoint import Json
from reshard.containers.small import JSON, read_small
from reshard.digests import listing
from reshard.errors import CorruptError
from reshard.fingerprints import Sum, slot_digests
from reshard.join import Plan
from reshard.tensor import TensorId

NAME = "reshard.json"
TENSORS = "reshard-tensors-{:05d}.jsonl"
VERSION = 1
_ROWS = 50_000  # tensors per file


def head(
    plan: Plan,
    sums: Mapping[TensorId, Sum],
    digests: Mapping[str, str],
    *,
    tool: str,
    digest: str,
    options: Mapping[str, Json],
    verified: bool,
    started: float,
    ended: float,
) -> dict[str, Json]:
    """The manifest's first file, all but the rows of tensors."""
    source, target = plan.source, plan.target
    slots: dict[str, str] = {}
    if verified:  # without the comparison nothing was fingerprinted
        slots = slot_digests(target.layout.tensors.values(), {t: s.hex for t, s in sums.items()})
    return {
        "manifest": VERSION,
        "tool": f"reshard {tool}",
        "plan": digest,
        "verified": verified,
        "naming": target.layout.naming,
        "source": {
            "path": str(source.path),
            "format": source.format,
            "version": source.version,
            "topology": str(source.topology),
            "iteration": source.iteration,
        },
        "target": {
            "format": target.format,
            "topology": str(target.topology),
            "folder": target.folder,
        },
        "fingerprints": slots,
        "tensors": len(target.layout.tensors),
        "tensor_files": [TENSORS.format(i) for i in range(_files(len(target.layout.tensors)))],
        "files": {d.name: {"bytes": d.size, "digest": digests.get(d.name)} for d in target.drafts},
        "extras": {k: v for k, v in source.extras.items()},
        "fates": [asdict(f) for f in target.fates],
        "losses": [asdict(loss) for loss in plan.losses],
        "notes": list(plan.notes),
        "recipe": dict(target.recipe),
        "options": dict(options),
        "started": started,
        "ended": ended,
    }


def _files(tensors: int) -> int:
    return max(1, -(-tensors // _ROWS))


def write(
    folder: Path,
    first: Mapping[str, Json],
    plan: Plan,
    sums: Mapping[TensorId, Sum],
    digests: Mapping[str, str],
) -> None:
    """Write the rows, the list of digests for `xxhsum -c`, then the manifest itself."""
    rows = _rows(plan, sums, fingerprinted=bool(first["verified"]))
    for i in range(_files(len(sums))):
        with open(folder / TENSORS.format(i), "w") as out:
            for _, row in zip(range(_ROWS), rows, strict=False):
                out.write(json.dumps(row) + "\n")
    if (listed := listing(digests)) is not None:
        (folder / listed[0]).write_bytes(listed[1])
    (folder / NAME).write_text(json.dumps(first, indent=1) + "\n")


def _rows(
    plan: Plan, sums: Mapping[TensorId, Sum], *, fingerprinted: bool
) -> Iterator[dict[str, Json]]:
    for tensor, logical in plan.target.layout.tensors.items():
        row: dict[str, Json] = {
            "name": tensor.name,
            "slot": tensor.slot,
            "shape": list(logical.shape),
            "dtype": logical.dtype.name,
            "fingerprint": sums[tensor].hex if fingerprinted else None,
            "held": [
                [p.array.file, *_span(p.box.start, p.box.stop)]
                for p in plan.target.layout.pieces(tensor)
            ],
        }
        if logical.padded is not None:
            row["padded"] = list(logical.padded)
        yield row


def _span(start: Sequence[int], stop: Sequence[int]) -> tuple[list[int], list[int]]:
    return list(start), list(stop)


def read(folder: Path) -> dict[str, Json] | None:
    """The manifest of a checkpoint's folder, or None if it has none."""
    path = folder / NAME
    if not path.exists():
        return None
    try:
        found = json.loads(read_small(path, JSON))
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{path}: not JSON: {error}. Convert again.") from error
    if not isinstance(found, dict) or found.get("manifest") != VERSION:
        raise CorruptError(f"{path}: not a manifest of version {VERSION}")
    return found


def read_tensors(folder: Path, manifest: Mapping[str, Json]) -> dict[TensorId, str | None]:
    """The recorded fingerprint of every tensor; None where none was taken (--no-verify)."""
    out: dict[TensorId, str | None] = {}
    names = manifest.get("tensor_files")
    for name in names if isinstance(names, list) else []:
        if not isinstance(name, str) or "/" in name:
            raise CorruptError(f"{folder / NAME}: {name!r} is not a file of the manifest")
        try:
            for line in (folder / name).read_text().splitlines():
                row = json.loads(line)
                out[TensorId(row["name"], row["slot"])] = row["fingerprint"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise CorruptError(f"{folder / name}: damaged: {error}. Convert again.") from error
    if len(out) != manifest.get("tensors"):
        raise CorruptError(
            f"{folder}: {len(out)} rows of tensors, the manifest says {manifest.get('tensors')}"
        )
    return out
