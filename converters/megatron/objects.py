"""One ShardedObject of a checkpoint, wherever its backend keeps it."""

from __future__ import annotations

from pathlib import Path

from reshard.containers import dcp
from reshard.containers.dcp import Place
from reshard.containers.torchfile import TorchFile
from reshard.errors import CorruptError

from .carry import sequence


def load(folder: Path, place: Place, key: str) -> tuple[TorchFile, object]:
    """The file that holds an object, and the object.

    torch_dist saves a list of the objects of one key, which is always one; zarr has a file each.
    Source: strategies/torch.py _mcore_to_torch_sharded_object, serialization.py
    _save_sharded_objects @ core_v0.12.3.
    """
    file = dcp.load_object(folder, place, key)
    if place.file.endswith(".pt"):
        return file, file.root
    listed = sequence(file.root, f"{folder}: {key}")
    if len(listed) != 1:
        raise CorruptError(f"{folder}: {key} holds {len(listed)} objects, not one")
    return file, listed[0]
