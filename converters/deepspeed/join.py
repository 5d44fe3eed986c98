"""Groups of every model-parallel rank put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from reshard.errors import CorruptError

from .grid import Grid
from .names import Names
from .native import Group


def set_stages(grid: Grid, names: Names, per_mp: Sequence[Sequence[Group]]) -> None:
    """Remember which pipeline stage's optimizer holds which tensors."""
    if names.pipeline is None:
        return
    rows = per_mp[:: grid.tp]
    stages = tuple(frozenset(n for g in row for n in g.members) for row in rows)
    names.pipeline = replace(names.pipeline, stages=stages)


def merged(per_mp: Sequence[Sequence[Group]]) -> tuple[Group, ...]:
    """The groups of every model-parallel rank put together: members in order, each once."""
    out: list[Group] = []
    for i, first in enumerate(per_mp[0] if per_mp else ()):  # none: weights only
        members = dict.fromkeys(n for row in per_mp for n in row[i].members)
        states = dict.fromkeys(s for row in per_mp for s in row[i].states)
        numbers = next((row[i].numbers for row in per_mp if row[i].numbers), {})
        if any(row[i].numbers not in ({}, numbers) for row in per_mp):
            raise CorruptError(f"group {i}: model-parallel ranks count optimizer steps differently")
        out.append(
            Group(
                first.options,
                tuple(members),
                tuple(states),
                first.whole,
                numbers,
                next((r[i].step_tensor for r in per_mp if r[i].step_tensor is not None), None),
                first.expert,
            )
        )
    return tuple(out)
