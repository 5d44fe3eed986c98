"""PyTorch's own checkpoints: torch.distributed.checkpoint folders, and files of torch.save."""

from __future__ import annotations

from pathlib import Path

from reshard.checkpoint import Checkpoint, Json
from reshard.format import Declaration, OpenOptions, Packed, WriteOptions
from reshard.topology import Target


class Dcp:
    """torch.distributed.checkpoint, as FSDP, torchtitan, accelerate and Lightning save it."""

    name = "dcp"
    summary = "torch.distributed.checkpoint: .metadata, *.distcp"
    writes = True
    takes = frozenset({"data_cursor"})
    naming = "torch"  # of every target

    def recognise(self, folder: Path) -> str | None:
        """Why a folder is one."""
        from .recognise import is_dcp

        return is_dcp(folder)

    def checkpoint_folder(self, run: Path, iteration: int | None) -> Path | None:
        """The checkpoint of a run folder."""
        from reshard.containers.runs import checkpoint_folder

        return checkpoint_folder(run, iteration, self.recognise)

    def open(self, folder: Path, options: OpenOptions) -> Checkpoint:
        """Read headers and small values."""
        from .sources import open_dcp

        return open_dcp(folder, options)

    def declare(self, source: Checkpoint, target: Target, options: WriteOptions) -> Declaration:
        """Lay out a target."""
        from .write import declare_dcp

        return declare_dcp(source, target, options)

    def pack(self, source: Checkpoint) -> Packed | None:
        """A State as JSON."""
        from .packed import pack

        return pack(source)

    def unpack(self, state: Json, source: Checkpoint) -> object:
        """A State from JSON."""
        from .packed import unpack

        return unpack(state, source)


class TorchSave:
    """Files of torch.save: one state dict for the whole job, or one for each rank."""

    name = "torch"
    summary = "torch.save: a state dict (name its file), or *_rank_N.pt of every rank"
    writes = True
    takes = frozenset({"data_cursor"})
    naming = "torch"  # of every target

    def recognise(self, folder: Path) -> str | None:
        """Why a file or folder is one."""
        from .recognise import is_torch

        return is_torch(folder)

    def checkpoint_folder(self, run: Path, iteration: int | None) -> Path | None:
        """The checkpoint of a run folder."""
        from reshard.containers.runs import checkpoint_folder

        return checkpoint_folder(run, iteration, self.recognise)

    def open(self, folder: Path, options: OpenOptions) -> Checkpoint:
        """Read headers and small values."""
        from .files import open_torch

        return open_torch(folder, options)

    def declare(self, source: Checkpoint, target: Target, options: WriteOptions) -> Declaration:
        """Lay out a target."""
        from .write_torch import declare_torch

        return declare_torch(source, target, options)

    def pack(self, source: Checkpoint) -> Packed | None:
        """A State as JSON."""
        from .packed import pack

        return pack(source)

    def unpack(self, state: Json, source: Checkpoint) -> object:
        """A State from JSON."""
        from .packed import unpack

        return unpack(state, source)


FORMATS = (Dcp(), TorchSave())
