"""PyTorch's own checkpoints: torch.distributed.checkpoint folders, and files of torch.save."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from reshard.checkpoint import Checkpoint
from reshard.format import Declaration, OpenOptions, WriteOptions
from reshard.topology import Target


@dataclass(frozen=True)
class Dcp:
    """torch.distributed.checkpoint, as FSDP, torchtitan, accelerate and Lightning save it."""

    name: str = "dcp"
    summary: str = "torch.distributed.checkpoint: .metadata, *.distcp"
    writes: bool = True
    naming: str = "torch"  # of every target

    def recognise(self, folder: Path) -> str | None:
        """Why a folder is one."""
        from .sources import recognise

        return recognise(folder)

    def checkpoint_folder(self, run: Path, iteration: int | None) -> Path | None:
        """The checkpoint of a run folder."""
        from .runs import checkpoint_folder

        return checkpoint_folder(run, iteration, self.recognise)

    def open(self, folder: Path, options: OpenOptions) -> Checkpoint:
        """Read headers and small values."""
        from .sources import open_dcp

        return open_dcp(folder, options)

    def declare(self, source: Checkpoint, target: Target, options: WriteOptions) -> Declaration:
        """Lay out a target."""
        from .write import declare_dcp

        return declare_dcp(source, target, options)


@dataclass(frozen=True)
class TorchSave:
    """Files of torch.save: one state dict for the whole job, or one for each rank."""

    name: str = "torch"
    summary: str = "torch.save: a state dict, or *_rank_N.pt of every rank"
    writes: bool = True
    naming: str = "torch"  # of every target

    def recognise(self, folder: Path) -> str | None:
        """Why a file or folder is one."""
        from .files import recognise

        return recognise(folder)

    def checkpoint_folder(self, run: Path, iteration: int | None) -> Path | None:
        """The checkpoint of a run folder."""
        from .runs import checkpoint_folder

        return checkpoint_folder(run, iteration, self.recognise)

    def open(self, folder: Path, options: OpenOptions) -> Checkpoint:
        """Read headers and small values."""
        from .files import open_torch

        return open_torch(folder, options)

    def declare(self, source: Checkpoint, target: Target, options: WriteOptions) -> Declaration:
        """Lay out a target."""
        from .write_torch import declare_torch

        return declare_torch(source, target, options)


FORMATS = (Dcp(), TorchSave())
