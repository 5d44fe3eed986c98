"""By what a model folder is known."""

from __future__ import annotations

import re
from pathlib import Path

SAFE, SAFE_INDEX = "model.safetensors", "model.safetensors.index.json"
TORCH, TORCH_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_SHARD = r"(?:model|pytorch_model)-\d{5}-of-\d{5}\.(?:safetensors|bin)"
ADAPTERS = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")


def recognise(folder: Path) -> str | None:
    """Why a folder is a model folder: a weight file or index under one of the standard names."""
    for name in (SAFE, SAFE_INDEX, TORCH, TORCH_INDEX):
        if (folder / name).is_file():
            return f"holds {name}"
    if not (folder / "config.json").is_file() and not (folder / ADAPTERS[0]).is_file():
        return None
    found = next((n for n in ADAPTERS if (folder / n).is_file()), None)
    if found is not None:
        return f"holds {found}"
    shards = sorted(p.name for p in folder.iterdir() if re.fullmatch(_SHARD, p.name))
    return f"holds config.json and {shards[0]}" if shards else None
