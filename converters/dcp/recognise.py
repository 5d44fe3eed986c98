"""By what the folders and files of PyTorch's own checkpoints are known."""

from __future__ import annotations

import re
from pathlib import Path

from reshard.containers.marks import METADATA
from reshard.containers.small import object_beside
from reshard.errors import CorruptError, FormatError

from . import listing

#: What the formats are called.
DCP, TORCH = "dcp", "torch"
#: Of accelerate: a model's store and an optimizer's.
MODEL_FOLDER, OPTIMIZER_FOLDER = "pytorch_model_fsdp_0", "optimizer_0"
#: Rank, and which of the model's files. Source: torch 2.13 distributed/checkpoint/_hf_utils.py.
SHARD = r"shard-(\d{5})-model-(\d{5})-of-(\d{5})\.safetensors"
#: A folder of one process or DDP: weights, and an optimizer that numbers them, the HF Trainer's or
#: accelerate's. Source: transformers 5.24 trainer.py; accelerate 1.15.0 checkpointing.py.
MODEL, INDEX, BINARY = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"
OPTIMIZERS = {"optimizer.pt": "HF Trainer", "optimizer.bin": "accelerate"}


def is_dcp(folder: Path) -> str | None:
    """Why a folder is a DCP checkpoint and not Megatron's."""
    try:
        if "sharded_backend" in (object_beside(folder / "metadata.json") or {}):
            return None
    except CorruptError:
        pass  # some other tool's
    if (folder / METADATA).is_file():
        return None if _is_megatron_fsdp(folder / METADATA) else "holds .metadata"
    if folder.is_dir() and any(folder.glob("__*.distcp")):
        return "holds .distcp files"  # an incomplete save, which opening refuses by name
    for inner in (MODEL_FOLDER, OPTIMIZER_FOLDER):
        if (folder / inner).is_dir() and any((folder / inner).glob("*.distcp")):
            return f"holds {inner}"
    if folder.is_dir() and (shards := shard_names(folder)):
        return f"holds {shards[0]}"
    return None


def _is_megatron_fsdp(path: Path) -> bool:
    """Whether Megatron-FSDP wrote it: only its optimizer has param_to_group_meta.

    Source: megatron/core/optimizer/distrib_optimizer.py sharded_param_state_fsdp_dtensor
    @ core_v0.16.1.
    """
    return b"param_to_group_meta" in path.read_bytes()


def shard_names(folder: Path) -> list[str]:
    """The files of HuggingFaceStorageWriter(save_distributed=True) in a folder."""
    return sorted(p.name for p in folder.iterdir() if re.fullmatch(SHARD, p.name))


def numbered_optimizer(folder: Path) -> str | None:
    """The optimizer's file of a folder that has the weights beside it by name, else None.

    With the weights as FSDP's FULL_STATE_DICT, it goes by names.
    """
    held = any((folder / name).is_file() for name in (MODEL, INDEX, BINARY))
    if not held or listing.full_models(p.name for p in folder.iterdir()):
        return None
    return next((name for name in OPTIMIZERS if (folder / name).is_file()), None)


def is_torch(path: Path) -> str | None:
    """Why a file or folder is torch.save's."""
    if path.is_file():
        return "is a file of torch.save" if listing.is_state_file(path) else None
    if not path.is_dir() or is_dcp(path) is not None or (path / METADATA).exists():
        return None
    optimizer = numbered_optimizer(path)
    if optimizer is not None:
        return f"holds {optimizer} beside weights"
    try:
        found = listing.listed(path)
    except (CorruptError, FormatError):
        return "holds torch.save files of ranks"  # opening says what is wrong
    if found is None:
        return None
    return f"holds {found.states[0][0]}" + (f" of {found.ranks} ranks" if found.ranks else "")
