"""Megatron-LM and megatron-core: torch_dist and the legacy `torch` container."""

from __future__ import annotations

import re
from pathlib import Path

from reshard.checkpoint import Checkpoint, Json
from reshard.containers.small import read_tracker
from reshard.errors import CorruptError, FormatError
from reshard.format import Declaration, OpenOptions, Packed, WriteOptions
from reshard.topology import Target

DIALECT = "mcore"
TRACKER = "latest_checkpointed_iteration.txt"


def checkpoint_folder(run: Path, iteration: int | None) -> Path | None:
    """The checkpoint of a run folder: `iteration`, else what the tracker names.

    Raises FormatError for an iteration that is not there, CorruptError for a tracker that names
    none.
    """
    folders = {p.name: p for p in run.glob("iter_*") if p.is_dir()} if run.is_dir() else {}
    if iteration is not None:
        found = folders.get(f"iter_{iteration:07d}")
        if found is None and folders:
            raise FormatError(
                f"{run}: no iteration {iteration}; there: {', '.join(sorted(folders))}"
            )
        return found
    tracker = run / TRACKER
    if not tracker.is_file():
        return None
    text = read_tracker(tracker)
    if text == "release" and (run / "release").is_dir():
        return run / "release"
    if re.fullmatch(r"\d{1,12}", text) and f"iter_{int(text):07d}" in folders:
        return folders[f"iter_{int(text):07d}"]
    raise CorruptError(
        f"{tracker} names {text[:40]!r}, and {run} has no such checkpoint. There: "
        f"{', '.join(sorted(folders)) or 'none'}. Choose one with --iteration."
    )


class TorchDist:
    """megatron-core's distributed checkpoints."""

    name = "megatron"
    summary = "torch_dist: metadata.json, .metadata, *.distcp; zarr; fsdp_dtensor"
    writes = True
    takes = frozenset({"vocab_size"})

    def recognise(self, folder: Path) -> str | None:
        """Why a folder is one."""
        from .recognise import is_dist, is_fsdp

        return is_dist(folder) or is_fsdp(folder)

    def checkpoint_folder(self, run: Path, iteration: int | None) -> Path | None:
        """The checkpoint of a run folder, or the weights of a NeMo checkpoint."""
        from .nemo import weights_folder

        return checkpoint_folder(run, iteration) or weights_folder(run)

    def dialect(self, target: Target) -> str:
        """Whose names are written."""
        return DIALECT

    def open(self, folder: Path, options: OpenOptions) -> Checkpoint:
        """Read headers."""
        from .recognise import is_dist

        if is_dist(folder) is None:
            from .fsdp_dtensor_read import open_fsdp

            return open_fsdp(folder, options)
        from .dist_read import open_dist

        return open_dist(folder, options)

    def declare(self, source: Checkpoint, target: Target, options: WriteOptions) -> Declaration:
        """Lay out a target."""
        from .dist_write import declare_dist

        return declare_dist(source, target, options)

    def pack(self, source: Checkpoint) -> Packed | None:
        """A run's state as JSON."""
        from .packed import pack

        return pack(source)

    def unpack(self, state: Json, source: Checkpoint) -> object:
        """A run's state from JSON."""
        from .packed import unpack

        return unpack(state, source)


class Legacy:
    """Megatron-LM's `torch` checkpoints: one pickle per model-parallel rank."""

    name = "megatron-legacy"
    summary = "torch: mp_rank_*/model_optim_rng.pt"
    writes = True
    takes = frozenset({"vocab_size"})

    def recognise(self, folder: Path) -> str | None:
        """Why a folder is one."""
        from .recognise import is_legacy

        return is_legacy(folder)

    def checkpoint_folder(self, run: Path, iteration: int | None) -> Path | None:
        """The checkpoint of a run folder."""
        return checkpoint_folder(run, iteration)

    def dialect(self, target: Target) -> str:
        """Whose names are written."""
        return DIALECT

    def open(self, folder: Path, options: OpenOptions) -> Checkpoint:
        """Read pickles."""
        from .legacy_read import open_legacy

        return open_legacy(folder, options)

    def declare(self, source: Checkpoint, target: Target, options: WriteOptions) -> Declaration:
        """Lay out a target."""
        from .legacy_write import declare_legacy

        return declare_legacy(source, target, options)

    def pack(self, source: Checkpoint) -> Packed | None:
        """A run's state as JSON."""
        from .packed import pack

        return pack(source)

    def unpack(self, state: Json, source: Checkpoint) -> object:
        """A run's state from JSON."""
        from .packed import unpack

        return unpack(state, source)


FORMATS = (TorchDist(), Legacy())
