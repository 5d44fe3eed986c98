"""What it takes to read a header of very many tensors, and to plan with it."""

from __future__ import annotations

import json
from pathlib import Path

from .measuring import MIB, RESHARD, empty, machine, run, table


def make(folder: Path, tensors: int) -> int:
    """A safetensors file of `tensors` weights of one element, all zero; the bytes of its header."""
    folder.mkdir()
    held = {
        f"l.{i}.w": {"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]}
        for i in range(tensors)
    }
    text = json.dumps(held, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(folder / "model.safetensors", "wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        out.truncate(8 + len(text) + 4 * tensors)
    return len(text)


def measure(folder: Path, tensors: int) -> list[str]:
    """The table: a tenth of `tensors`, then all of them."""
    rows = []
    for n in (tensors // 10, tensors):
        size = make(folder / "many", n)
        for name, more in (("inspect", []), ("plan", ["--to", "hf", "--schema", "none"])):
            cost = run([*RESHARD, name, str(folder / "many"), *more], folder / "log")
            rows.append([
                f"safetensors of {n:,} tensors", f"{size / 1e6:.0f} MB", name,
                f"{cost.cpu:.1f} s", f"{cost.peak / MIB:.0f} MiB",
            ])  # fmt: skip
        empty(folder / "many")
    return [machine(), "", *table(("source", "header", "command", "CPU", "peak RSS"), rows)]
