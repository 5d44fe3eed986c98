"""DeepSpeed: ZeRO 0 to 3, pipeline, AutoTP and MoE checkpoints, and universal ones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from reshard.checkpoint import Checkpoint
from reshard.format import Declaration, OpenOptions, WriteOptions
from reshard.topology import Target

from .folder import LATEST, recognise_native, tagged_folder


@dataclass(frozen=True)
class DeepSpeed:
    """Native checkpoints: a tag folder with one file or more a rank."""

    name: str = "deepspeed"
    summary: str = "mp_rank_*_model_states.pt, *zero_pp_rank_*_optim_states.pt"
    writes: bool = True

    def recognise(self, folder: Path) -> str | None:
        """Why a folder is one."""
        return recognise_native(folder)

    def checkpoint_folder(self, run: Path, iteration: int | None) -> Path | None:
        """The tag folder of a run folder."""
        return tagged_folder(run, iteration, LATEST)

    def open(self, folder: Path, options: OpenOptions) -> Checkpoint:
        """Read headers."""
        from .read import open_native

        return open_native(folder, options)

    def declare(self, source: Checkpoint, target: Target, options: WriteOptions) -> Declaration:
        """Lay out a target."""
        from .write import declare_native

        return declare_native(source, target, options)


FORMATS = (DeepSpeed(),)
