"""Model folders of the fixtures, and whole tensors read out of any checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from reshard.box import Box
from reshard.checkpoint import Checkpoint
from reshard.files import Files
from reshard.join import cover
from reshard.readback import read_block
from reshard.tensor import TensorId

Array = npt.NDArray[Any]
Unpacked = Callable[[str], Path]

#: Every family of the fixtures that Megatron-Bridge maps: truth.json lies beside its weights.
WITH_TRUTH = (
    "deepseek_v2", "deepseek_v3", "gemma", "gemma2", "gemma3_text", "glm4_moe", "gpt_oss", "llama2",
    "llama3", "llama3_tied", "minimax_m2", "mistral", "nemotron", "olmoe", "qwen2", "qwen2_tied",
    "qwen3", "qwen3_moe", "qwen3_next",
)  # fmt: skip
#: The others whose weights are there.
WITHOUT_TRUTH = ("gpt2", "mixtral", "phi3", "qwen2_moe")


def plain(unpacked: Unpacked, family: str) -> Path:
    """The folder of a family as save_pretrained wrote it."""
    return unpacked(f"hf/{family}") / "plain"


def whole(checkpoint: Checkpoint, tensor: TensorId) -> Array:
    """All of a tensor, padding included."""
    logical = checkpoint.layout.tensors[tensor]
    with Files(checkpoint.path) as files:
        parts = cover(checkpoint.layout.pieces(tensor)).parts.items
        found = read_block(files, parts, Box.whole(logical.space), logical)
    return np.asarray(found.reshape(logical.extent))
