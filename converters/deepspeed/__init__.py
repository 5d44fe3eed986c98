"""DeepSpeed: ZeRO 0 to 3, pipeline, AutoTP and MoE checkpoints, and universal ones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from reshard.checkpoint import Checkpoint
from reshard.format import Declaration, OpenOptions, WriteOptions
from reshard.topology import Target

from .folder import (
    LATEST,
    LATEST_UNIVERSAL,
    recognise_native,
    recognise_universal,
    tagged_folder,
)


@dataclass(frozen=True)
class DeepSpeed:
    """Native checkpoints: a tag folder with one file or more a rank."""

    name: str = "deepspeed"
    summary: str = "mp_rank_*_model_states.pt, *zero_pp_rank_*_optim_states.pt"
    writes: bool = True
    naming: str = "torch"  # of every target

    def recognise(self, folder: Path) -> str | None:
        """Why a folder is one."""
        from .wrapper import recognise_wrapper

        return recognise_native(folder) or recognise_wrapper(folder)

    def checkpoint_folder(self, run: Path, iteration: int | None) -> Path | None:
        """The tag folder of a run folder."""
        return tagged_folder(run, iteration, LATEST)

    def open(self, folder: Path, options: OpenOptions) -> Checkpoint:
        """Read headers."""
        from .read import open_native
        from .wrapper import open_wrapped

        wrapped = recognise_native(folder) is None
        return open_wrapped(folder, options) if wrapped else open_native(folder, options)

    def declare(self, source: Checkpoint, target: Target, options: WriteOptions) -> Declaration:
        """Lay out a target."""
        from .write import declare_native

        return declare_native(source, target, options)


@dataclass(frozen=True)
class Universal:
    """Universal checkpoints, which a job of any stage and size loads."""

    name: str = "deepspeed-universal"
    summary: str = "zero/NAME/fp32.pt beside model states"
    writes: bool = True
    naming: str = "torch"  # of every target

    def recognise(self, folder: Path) -> str | None:
        """Why a folder is one."""
        return recognise_universal(folder)

    def checkpoint_folder(self, run: Path, iteration: int | None) -> Path | None:
        """The universal folder of a run folder."""
        return tagged_folder(run, iteration, LATEST_UNIVERSAL)

    def open(self, folder: Path, options: OpenOptions) -> Checkpoint:
        """Read headers."""
        from .universal_read import open_universal

        return open_universal(folder, options)

    def declare(self, source: Checkpoint, target: Target, options: WriteOptions) -> Declaration:
        """Lay out a target."""
        from .universal_write import declare_universal

        return declare_universal(source, target, options)


FORMATS = (DeepSpeed(), Universal())
