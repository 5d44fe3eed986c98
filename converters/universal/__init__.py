"""The universal store: a zarr v3 group with an array per tensor and slot, and all state as JSON."""

from __future__ import annotations

from pathlib import Path

from reshard.checkpoint import Checkpoint
from reshard.format import Declaration, OpenOptions, WriteOptions
from reshard.topology import Target


class Universal:
    """The archive, and the hub for partial reads: whole tensors, whatever the source's cuts."""

    name = "universal"
    summary = "zarr v3 group of reshard: zarr.json, SLOT/TENSOR/c.*"
    writes = True
    takes = frozenset({"vocab_size"})
    compresses = True

    def recognise(self, folder: Path) -> str | None:
        """Why a folder is one."""
        from .recognise import recognise

        return recognise(folder)

    def checkpoint_folder(self, run: Path, iteration: int | None) -> Path | None:
        """A store is its own folder: there is no run folder around it."""
        return None

    def open(self, folder: Path, options: OpenOptions) -> Checkpoint:
        """Read the JSON of every node."""
        from .read import open_universal

        return open_universal(folder, options)

    def declare(self, source: Checkpoint, target: Target, options: WriteOptions) -> Declaration:
        """Lay out a store."""
        from .write import declare_universal

        return declare_universal(source, target, options)


FORMATS = (Universal(),)
