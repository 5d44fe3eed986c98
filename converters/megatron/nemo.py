"""NeMo 2 around a torch_dist checkpoint: `weights/`, `context/model.yaml`, the keys of Lightning.

Lightning keeps no args: the sizes are the scalars of the model's config in context/model.yaml, as
fiddle prints them ("config:", then two spaces). The optimizer comes in a list of one, the iteration
as global_step, tensors under `module.`.
Source: NeMo 2 nemo/lightning/pytorch/strategies/megatron_strategy.py save_checkpoint,
nemo/lightning/megatron_parallel.py _module_sharded_state_dict, nemo/lightning/io (read, never run);
no fixture.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from reshard.containers.small import JSON, read_small

WEIGHTS = ("weights", "model_weights")
_SCALAR = re.compile(r"  ([a-z_0-9]+): (\S.*)")


def weights_folder(checkpoint: Path) -> Path | None:
    """The folder of tensors in a NeMo checkpoint."""
    for name in WEIGHTS:
        if (checkpoint / name / "metadata.json").is_file():
            return checkpoint / name
    return None


def context_args(weights: Path) -> dict[str, object]:
    """What the config beside a weights folder says, under the names of Megatron's args."""
    path = weights.parent / "context" / "model.yaml"
    if not os.path.lexists(path):
        return {}
    text = read_small(path, JSON).decode("utf-8", "replace")
    found: dict[str, object] = {}
    inside = False
    for line in text.splitlines():
        if line and not line.startswith(" "):
            inside = line.rstrip() == "config:"
        elif inside and (m := _SCALAR.fullmatch(line)) is not None and not m[1].startswith("_"):
            value = _scalar(m[2].strip())
            if value is not None:
                found[m[1]] = value
    shared = found.pop("share_embeddings_and_output_weights", None)
    if isinstance(shared, bool):
        found["untie_embeddings_and_output_weights"] = not shared
    return found


def _scalar(text: str) -> object:
    """A YAML scalar; None for null and for anything else than numbers, booleans and words."""
    if text in ("true", "false"):
        return text == "true"
    if re.fullmatch(r"-?\d{1,18}", text):
        return int(text)
    return text if re.fullmatch(r"[A-Za-z_][\w-]*", text) and text != "null" else None


def lightning(root: Mapping[object, object]) -> dict[object, object]:
    """Lightning's dict with the entries that Megatron has under Megatron's names."""
    out = dict(root)
    optimizer = root.get("optimizer")
    if isinstance(optimizer, list | tuple) and len(optimizer) == 1:
        out["optimizer"] = optimizer[0]
    if "iteration" not in root and isinstance(root.get("global_step"), int):
        out["iteration"] = root["global_step"]
    return out


def is_lightning(root: Mapping[object, object]) -> bool:
    """Whether a common dict is Lightning's."""
    return "pytorch-lightning_version" in root or "global_step" in root
