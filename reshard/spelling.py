"""Whose names a checkpoint's tensors bear, where nothing but the names tells it."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache

from reshard.errors import CoverageError
from reshard.namings import Dialect, dialects
from reshard.schema import Family, entries_in, families, pattern, prefix_in


@dataclass(frozen=True)
class Spelling:
    """A dialect of a family in which every one of some names is a tensor's."""

    family: Family
    dialect: Dialect


@cache
def _names(family: str, dialect: str) -> re.Pattern[str]:
    """Every name that tensors of a family may have in a dialect, whatever the sizes."""
    made = families()[family]
    found = [
        pattern(prefix_in(run, dialect) + entry.name)
        for run in made.runs
        for entry in entries_in(made, dialect, run.block)
    ]
    return re.compile("|".join(found))


def spellings(names: Collection[str], naming: str) -> Iterator[Spelling]:
    """The dialects under a naming in which some family has tensors of all these names.

    Checked ones come first; a family's file is read when it comes to it.
    """
    for dialect in sorted(dialects().values(), key=lambda d: not d.checked):
        if dialect.naming != naming:
            continue
        for family in families().values():
            pattern = _names(family.name, dialect.name) if family.speaks(dialect.name) else None
            if pattern and all(pattern.fullmatch(n) or _dropped(n, dialect) for n in names):
                yield Spelling(family, dialect)


def _dropped(name: str, dialect: Dialect) -> bool:
    return any(fnmatch.fnmatchcase(name, g) for g in dialect.drop)


def check(names: Collection[str], dialect: str, what: str, *, config: bool) -> None:
    """Names that are kept for want of a family must be what the target's loaders look for.

    Only of a dialect that is `checked`. `config`: a config says what model it is, though no family
    knows it; then names pass that are nobody else's. Raises CoverageError naming the first name.
    """
    said = dialects()[dialect]
    if not said.checked:
        return
    never = said.never or dialects()[said.base or dialect].never
    wrapped = next((n for n in names for g in never if fnmatch.fnmatchcase(n, g)), None)
    if wrapped is not None:
        raise CoverageError(
            f"{what}: {wrapped} is a wrapper's name, not the module's: whatever loads {said.title} "
            "names would not find it. --schema none keeps the names as they are."
        )
    found = spellings(names, said.naming)
    first = next(found, None)
    if first.dialect.checked if first else config:
        return
    if first is not None:
        other, rest = first, [first, *found]
        told = ", ".join(sorted({s.family.name for s in rest if s.dialect is other.dialect}))
        raise CoverageError(
            f"{what}: its names ({_first(names)}) are those of {other.dialect.title} (families: "
            f"{told}), and nothing says which model it is. Give the model's config with --config "
            f"DIR to have them translated to {said.title} names."
        )
    raise CoverageError(
        f"{what}: its names ({_first(names)}) are not all a known family's {said.title} names, and "
        "nothing says which model it is. Give the model's config with --config DIR, a family with "
        "--schema NAME|FILE, or --schema none to keep the names as they are."
    )


def _first(names: Collection[str]) -> str:
    """The name that says most about a spelling: one of a layer, if there is one."""
    return next((n for n in names if re.search(r"\.\d+\.", n)), next(iter(names)))
