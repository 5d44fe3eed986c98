"""What is told of a plan and of a run, as JSON."""

from __future__ import annotations

import math
import resource
import shutil
from pathlib import Path

from reshard.checkpoint import Checkpoint, Json
from reshard.join import Plan
from reshard.layout import Layout
from reshard.tensor import PARAM


def plan_report(planned: Plan, place: Path | None = None) -> dict[str, Json]:
    """What `plan --json` prints. `place`: the target folder, if one is known."""
    target = planned.target
    return {
        "status": "ok",
        "source": describe(planned.source),
        "target": {
            "format": target.format,
            "topology": str(target.topology),
            "folder": target.folder,
            "files": len(target.drafts),
            "bytes": sum(d.size for d in target.drafts),
            "largest_file": max((d.size for d in target.drafts), default=0),
            "per_rank": per_rank(planned),
            "trackers": sorted(target.trackers),
        },
        "tensors": len(target.layout.tensors),
        "copies": planned.copies,
        "fills": planned.fills,
        "bytes_read": planned.bytes_read,
        "bytes_written": planned.bytes_written,
        "read_amplification": amplification(planned),
        "temporary_bytes": 0,
        "free_disk": free_disk(place or Path()),
        "replicated_elements": planned.replicas,
        "losses": [{"code": x.code, "what": x.what, "detail": x.detail} for x in planned.losses],
        "notes": list(planned.notes),
        "fates": [{"path": f.path, "kind": f.kind, "detail": f.detail} for f in target.fates],
        "recipe": dict(target.recipe),
        **({"migration": [dict(s) for s in planned.migration]} if planned.migration else {}),
    }


def per_rank(planned: Plan) -> dict[str, Json]:
    """Bytes of state that a rank of the target's model-parallel grid holds: mean, by slot."""
    target = planned.target
    ranks = target.topology.tp * target.topology.pp
    held: dict[str, int] = {}
    for tensor, logical in target.layout.tensors.items():
        held[tensor.slot] = held.get(tensor.slot, 0) + logical.nbytes
    return {slot: n // ranks for slot, n in sorted(held.items())}


def free_disk(place: Path) -> int:
    """Bytes free where a target would be written."""
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def amplification(planned: Plan) -> float:
    """Bytes read over the bytes of the tensors that are moved."""
    held = planned.source.layout.tensors
    needed = sum(held[f].nbytes for f in dict.fromkeys(planned.feeds.values()))  # in their order
    return round(planned.bytes_read / needed, 3) if needed else 1.0


def describe(checkpoint: Checkpoint) -> dict[str, Json]:
    """A checkpoint in one line of JSON."""
    return {
        "path": str(checkpoint.path),
        "format": checkpoint.format,
        "version": checkpoint.version,
        "topology": str(checkpoint.topology),
        "iteration": checkpoint.iteration,
    }


def weights_of(layout: Layout) -> dict[str, Json]:
    """How many parameters a target has, and how many of which element type."""
    kinds: dict[str, int] = {}
    for tensor, logical in layout.tensors.items():
        if tensor.slot == PARAM:
            n = math.prod(logical.shape)
            kinds[logical.dtype.name] = kinds.get(logical.dtype.name, 0) + n
    return {"parameters": sum(kinds.values()), "dtypes": dict(sorted(kinds.items()))}


def peak_rss() -> int:
    """The most memory this process has held, in bytes.

    Not ru_maxrss where it can be helped: that counts the process which forked this one, too.
    """
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
