"""Whose names tensors bear: the dialects of schemas/dialects."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from reshard.tables import Tables, parsed

#: The dialect that is written under a naming, where nothing else is asked for.
WRITTEN = {"megatron": "mcore", "torch": "hf"}


@dataclass(frozen=True, slots=True)
class Choice:
    """What a user says about the model: --schema, --config, --dtype."""

    schema: str | None = None
    config: str | None = None
    dtype: str | None = None


@dataclass(frozen=True, slots=True)
class Dialect:
    """Whose names these are. `base`: whose spelling holds where this one is silent."""

    name: str
    naming: str
    base: str | None
    title: str
    args: Mapping[str, Any]  # the trainer's arguments, as expressions over the family's dimensions
    drop: tuple[str, ...]  # globs of buffers that are made anew
    inherited: bool  # a family that extends another has its names too
    #: By model type: parts of names, as siblings follow each other in the modules.
    orders: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    checked: bool = False  # what loads these names loads no others
    never: tuple[str, ...] = ()  # globs of names that wrappers make, and no such model has


@cache
def dialects() -> Mapping[str, Dialect]:
    """Every dialect in schemas/dialects, by name."""
    return Tables("dialects", lambda text, name: _dialect(name, parsed(text, name)))


def _dialect(name: str, table: Mapping[str, Any]) -> Dialect:
    return Dialect(
        name,
        table["naming"],
        table.get("base"),
        table.get("title", ""),
        table.get("args", {}),
        tuple(table.get("drop", ())),
        table.get("inherited", True),
        {t: tuple(row["parts"]) for row in table.get("orders", ()) for t in row["types"]},
        table.get("checked", False),
        tuple(table.get("never", ())),
    )


def module_order(names: Collection[str], dialect: str, model_type: object) -> list[str] | None:
    """Tensor names in the order in which the model's modules are made; None where not known."""
    order = dialects()[dialect].orders.get(model_type) if isinstance(model_type, str) else None
    parts = {p for name in names for p in name.split(".") if not p.isdigit()}
    if order is None or not parts <= set(order):
        return None
    rank = {part: i for i, part in enumerate(order)}
    return sorted(names, key=lambda n: [int(p) if p.isdigit() else rank[p] for p in n.split(".")])
