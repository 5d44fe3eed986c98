"""Which files a tag folder holds, by the coordinates in their names."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from reshard.errors import CorruptError

from .recognise import PATTERNS


@dataclass(frozen=True)
class TagFiles:
    """The files of one tag folder by coordinates: ranks are numbers, so 10 follows 9."""

    folder: Path
    model: Mapping[int, str] = field(default_factory=dict)  # mp -> file, ZeRO 0 to 2
    model3: Mapping[tuple[int, int], str] = field(default_factory=dict)  # (mp, dp), ZeRO 3
    optim: Mapping[tuple[int, int], str] = field(default_factory=dict)  # (mp, dp)
    prefixes: frozenset[str] = frozenset()  # of the optimizer files: "", "bf16_", "fp16_"
    layers: Mapping[int, str] = field(default_factory=dict)  # layer -> file
    layers_tp: Mapping[tuple[int, int], str] = field(default_factory=dict)  # (layer, tp)
    experts: Mapping[tuple[int, int, int], str] = field(default_factory=dict)  # layer, expert, mp
    expert_optim: Mapping[tuple[int, int], str] = field(default_factory=dict)  # (mp, ep)
    others: tuple[str, ...] = ()
    under: str = ""  # the tag folder below `folder`; names begin with it

    @property
    def place(self) -> Path:
        """The tag folder."""
        return self.folder / self.under

    @property
    def names(self) -> tuple[str, ...]:
        """Every file that belongs to the checkpoint, sorted."""
        tables = (self.model, self.model3, self.optim, self.layers, self.layers_tp, self.experts)
        found = {name for table in tables for name in table.values()}
        return tuple(sorted(found | set(self.expert_optim.values())))


def tag_files(folder: Path, under: str = "") -> TagFiles:
    """What the tag folder `under` a folder holds. Raises CorruptError for two files of one rank."""
    tables: dict[str, dict[object, str]] = {kind: {} for kind in PATTERNS}
    prefixes: set[str] = set()
    others: list[str] = []
    for name in sorted(os.listdir(folder / under)):
        for kind, pattern in PATTERNS.items():
            found = re.fullmatch(pattern, name)
            if found is None:
                continue
            at = _coordinates(kind, found)
            if at in tables[kind]:
                raise CorruptError(
                    f"{folder}: {tables[kind][at]} and {name} are files of the same rank; one is "
                    "left from another save. Remove it."
                )
            tables[kind][at] = f"{under}/{name}" if under else name
            if kind == "optim":
                prefixes.add(found["prefix"])
            break
        else:
            others.append(name)
    t: dict[str, dict] = tables  # type: ignore[type-arg]  # keys by kind, as TagFiles says
    return TagFiles(
        folder, t["model"], t["model3"], t["optim"], frozenset(prefixes), t["layer"],
        t["layer_tp"], t["expert"], t["expert_optim"], tuple(others),
        under,
    )  # fmt: skip


def _coordinates(kind: str, found: re.Match[str]) -> object:
    at = {k: int(v) for k, v in found.groupdict().items() if v is not None and k != "prefix"}
    match kind:
        case "model":
            return at["mp"]
        case "layer":
            return at["layer"]
        case "layer_tp":
            return at["layer"], at["tp"]
        case "expert":
            return at.get("layer", -1), at["expert"], at["mp"]
        case "expert_optim":
            return at["mp"], at["ep"]
    return at["mp"], at["dp"]
