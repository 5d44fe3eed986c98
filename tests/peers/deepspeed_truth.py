"""What a fixture's live engine held at the save, under the names of the whole model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

_DTYPES: dict[str, Any] = {
    "F32": np.float32, "BF16": ml_dtypes.bfloat16, "F16": np.float16, "I64": np.int64,
}  # fmt: skip
_EXPERT = re.compile(r"(.*deepspeed_experts\.)(\d+)(\..+)")


def tensors(path: Path) -> dict[str, Any]:
    """The arrays of a safetensors file."""
    raw = path.read_bytes()
    n = int.from_bytes(raw[:8], "little")
    out = {}
    for key, row in json.loads(raw[8 : 8 + n]).items():
        if key != "__metadata__":
            a, b = row["data_offsets"]
            flat = np.frombuffer(raw[8 + n + a : 8 + n + b], _DTYPES[row["dtype"]])
            out[key] = flat.reshape(row["shape"])
    return out


def truth_of(fixture: Path) -> dict[tuple[str, str], Any]:
    """(name, slot) -> the whole tensor; slots are fp32, exp_avg, exp_avg_sq, frozen.

    Tensor-parallel truths are what each rank saw: they are put together along the axis that grows.
    """
    held = tensors(fixture / "truth.safetensors")
    recipe = json.loads((fixture / "recipe.json").read_text())
    out: dict[tuple[str, str], list[Any]] = {}
    for key, value in held.items():
        rank, name, slot = _parts(key)
        found = _EXPERT.fullmatch(name)
        if found is not None:
            ep, each = recipe["ep_size"], recipe["experts"] // recipe["ep_size"]
            name = f"{found[1]}{rank % ep * each + int(found[2])}{found[3]}"
        rows = out.setdefault((name, slot), [])
        if not any(np.array_equal(value, other) for other in rows):
            rows.append(value)
    return {key: _joined(key[0], rows) for key, rows in out.items()}


def _parts(key: str) -> tuple[int, str, str]:
    rank = 0
    if key.startswith("rank"):
        head, _, key = key.partition("/")
        rank = int(head[4:])
    name, _, slot = key.rpartition("/")
    return rank, name, slot


#: Weights that are cut on the second axis: AutoTP's of Llama, Megatron's.
_ROW = ("o_proj.weight", "down_proj.weight", "dense_4h_to_h.weight")
#: Rows of which each rank has a part of the first half and of the second.
_PAIR = "dense_h_to_4h.weight"


def _joined(name: str, rows: list[Any]) -> Any:
    if name.endswith(_PAIR) and len(rows) > 1:
        return np.concatenate([np.split(r, 2)[i] for i in range(2) for r in rows])
    return rows[0] if len(rows) == 1 else np.concatenate(rows, 1 if name.endswith(_ROW) else 0)


def compared(opened: Any, truth: Mapping[tuple[str, str], Any]) -> Iterator[tuple[str, Any, Any]]:
    """(what, the truth, what reshard reads) of every tensor; None where it has none.

    The fp32 weight is the master, or in an fp32 run the weight itself.
    """
    for (name, slot), wanted in truth.items():
        slots = {"fp32": ("master", "param"), "frozen": ("param",)}.get(slot, (slot,))
        held = [s for s in slots if (name, s) in opened.tensors]
        value = opened[name, held[0]][...] if held else None
        yield f"{name}/{slot}", wanted, value


def equal_bits(a: Any, b: Any) -> bool:
    """Whether two arrays are equal in dtype, shape and every bit."""
    return (
        b is not None and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    )
