"""What a person sees of a checkpoint: format, topology, sizes, slots, extras, problems."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from reshard.checkpoint import Checkpoint, Json
from reshard.tensor import PARAM, LogicalTensor, TensorId


def inspect(checkpoint: Checkpoint) -> dict[str, Json]:
    """Headers only: what `inspect --json` prints."""
    tensors = checkpoint.layout.tensors
    slots = {slot: held.shown() for slot, held in sorted(_slots(tensors).items())}
    padded = {
        v.id.name: [list(v.shape), list(v.padded)]
        for t, v in tensors.items()
        if v.padded is not None and t.slot == PARAM
    }
    parameters = slots.get(PARAM) or (next(iter(slots.values())) if slots else {"elements": 0})
    groups: list[Json] = [
        {"members": len(g.members), **dict(g.options)} for g in checkpoint.groups or ()
    ]
    size = sum((checkpoint.path / f).stat().st_size for f in checkpoint.files)
    return {
        "status": "ok",
        "path": str(checkpoint.path),
        "format": checkpoint.format,
        "version": checkpoint.version,
        "topology": str(checkpoint.topology),
        "family": checkpoint.family,
        "naming": checkpoint.layout.naming,
        "iteration": checkpoint.iteration,
        "step": max(checkpoint.steps.values(), default=None),
        "parameters": parameters["elements"],
        "slots": dict(slots),
        "padded": dict(padded),
        "param_groups": groups,
        "files": len(checkpoint.files),
        "bytes": size,
        "extras": dict(checkpoint.extras),
        "problems": list(checkpoint.problems),
    }


@dataclass(slots=True)
class _Slot:
    """What one slot holds, counted."""

    tensors: int = 0
    elements: int = 0
    nbytes: int = 0
    dtypes: Counter[str] = field(default_factory=Counter)

    def shown(self) -> dict[str, Json]:
        return {
            "tensors": self.tensors,
            "elements": self.elements,
            "bytes": self.nbytes,
            "dtypes": dict(self.dtypes),
        }


def _slots(tensors: Mapping[TensorId, LogicalTensor]) -> dict[str, _Slot]:
    found: defaultdict[str, _Slot] = defaultdict(_Slot)
    for tensor, logical in tensors.items():
        slot, elements = found[tensor.slot], prod(logical.shape)
        slot.tensors += 1
        slot.elements += elements
        slot.nbytes += elements * logical.dtype.itemsize
        slot.dtypes[logical.dtype.name] += 1
    return found


def size_text(n: int | float) -> str:
    """Bytes as a person reads them."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(n) < 1024 or unit == "TiB":
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    raise AssertionError("unreachable")


def lines(seen: dict[str, Json]) -> list[str]:
    """The same as text."""
    out = [
        f"{seen['path']}",
        f"  format      {seen['format']} {seen['version']}",
        f"  topology    {seen['topology']}",
        f"  iteration   {seen['iteration']}   optimizer step {seen['step']}",
        f"  parameters  {seen['parameters']:,}",
        f"  files       {seen['files']}, {size_text(_number(seen['bytes']))}",
    ]
    slots = seen["slots"]
    assert isinstance(slots, dict)
    for slot, row in slots.items():
        assert isinstance(row, dict)
        dtypes = ", ".join(f"{n} {d}" for d, n in row["dtypes"].items())
        out.append(f"  {slot:<11} {row['tensors']} tensors ({dtypes}), {size_text(row['bytes'])}")
    padded = seen["padded"]
    assert isinstance(padded, dict)
    for name, shapes in padded.items():
        out.append(f"  padded      {name}: {shapes[0]} stored as {shapes[1]}")
    problems = seen["problems"]
    assert isinstance(problems, list)
    out += [f"  problem     {p}" for p in problems]
    return out


def _number(value: Json) -> int:
    assert isinstance(value, int)
    return value
