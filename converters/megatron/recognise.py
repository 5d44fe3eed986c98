"""By what Megatron's checkpoints are known."""

from __future__ import annotations

import json
import mmap
from pathlib import Path

from reshard.containers.marks import METADATA
from reshard.containers.small import JSON, read_small

_BACKENDS = ("torch_dist", "zarr")
_FSDP = b"param_to_group_meta"


def is_dist(folder: Path) -> str | None:
    """Why a folder is a distributed checkpoint: its metadata.json names the backend."""
    found = backend(folder)
    return f"metadata.json names the backend {found}" if found in _BACKENDS else None


def backend(folder: Path) -> object:
    """What metadata.json says of how tensors are stored; None if it says nothing.

    Raises CorruptError if it is there and cannot be read: without it the folder is taken for
    another kind.
    """
    path = folder / "metadata.json"
    if not path.is_file() or path.stat().st_size > JSON:
        return None
    data = read_small(path, JSON)
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return found.get("sharded_backend") if isinstance(found, dict) else None


def is_fsdp(folder: Path) -> str | None:
    """Why a folder is fsdp_dtensor: only Megatron-FSDP keeps param_to_group_meta in its .metadata.

    Source: megatron/core/optimizer/distrib_optimizer.py sharded_param_state_fsdp_dtensor
    @ core_v0.16.1.
    """
    path = folder / METADATA
    if (folder / "metadata.json").exists() or not path.is_file() or not path.stat().st_size:
        return None
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data.find(_FSDP) < 0:
            return None
    return "its .metadata names Megatron-FSDP's param_to_group_meta"


def is_legacy(folder: Path) -> str | None:
    """Why a folder is a legacy checkpoint, or None."""
    if any(folder.glob("mp_rank_*/model_optim_rng.pt")):
        return "holds mp_rank_*/model_optim_rng.pt"
    return None
