"""Hugging Face model folders: safetensors and pytorch_model.bin, whole or in shards."""

from __future__ import annotations

from pathlib import Path

from reshard.checkpoint import Checkpoint
from reshard.errors import FormatError, UsageError
from reshard.format import Declaration, OpenOptions, WriteOptions
from reshard.topology import Target

#: TARGET variant -> the dialect that is written.
VARIANTS = {None: "hf", "fused": "hf_fused"}


class HuggingFace:
    """A model as from_pretrained and the inference engines read it."""

    name = "hf"
    summary = "model.safetensors or pytorch_model.bin, with config.json"
    writes = True
    takes = frozenset({"max_shard_size", "tokenizer"})
    weights = True  # a folder holds weights and nothing else
    generic = True  # trainers leave such files beside their own states

    def recognise(self, folder: Path) -> str | None:
        """Why a folder is one."""
        from .recognise import recognise

        return recognise(folder)

    def checkpoint_folder(self, run: Path, iteration: int | None) -> Path | None:
        """The model of a run folder that `iteration` names; nothing says which is meant without."""
        from reshard.containers.runs import checkpoint_folder

        if iteration is None:
            return None
        try:
            return checkpoint_folder(run, iteration, self.recognise)
        except FormatError:  # exports beside another format's checkpoints, which have it
            return None

    def dialect(self, target: Target) -> str:
        """Whose names are written: the hub's, or (`hf.fused`) transformers' in memory."""
        if target.variant not in VARIANTS:
            raise UsageError(f"hf.{target.variant}: the one variant of hf is hf.fused")
        return VARIANTS[target.variant]

    def open(self, folder: Path, options: OpenOptions) -> Checkpoint:
        """Read headers."""
        from .read import open_folder

        return open_folder(folder, options)

    def declare(self, source: Checkpoint, target: Target, options: WriteOptions) -> Declaration:
        """Lay out a target."""
        from .write import declare_folder

        return declare_folder(source, target, options)


FORMATS = (HuggingFace(),)
