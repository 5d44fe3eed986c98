"""Shows that a family file is whole: every logical tensor, every element once per dialect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from reshard.checkpoint import Json
from reshard.dialect import Held, Stored, View, expand, logical_names
from reshard.errors import CoverageError, FormatError, LayoutError
from reshard.namings import dialects
from reshard.schema import Family, Scope
from reshard.splice import Link, splice
from reshard.tensor import EXP_AVG, PARAM

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Proven:
    """A dialect of one example: how many tensors it has, and how many logical ones they hold."""

    example: int
    dialect: str
    stored: int
    logical: int

    def shown(self) -> dict[str, Json]:
        """As `reshard schemas check --json` prints it."""
        return {
            "example": self.example, "dialect": self.dialect, "stored": self.stored,
            "logical": self.logical,
        }  # fmt: skip


def spoken_by(family: Family, scope: Scope | None = None) -> list[str]:
    """The dialects that a family, or one model of it, has names in."""
    out = []
    for name, dialect in dialects().items():
        refusal = family.refuse.get(name)
        if refusal is not None and (scope.holds(refusal.when) if scope else refusal.when is None):
            continue
        if family.speaks(name) and (dialect.base is None or family.speaks(dialect.base)):
            out.append(name)
    return out


def prove(family: Family) -> list[Proven]:
    """Check a family's examples in every dialect, and every pair of dialects against each other.

    Raises FormatError, CoverageError or LayoutError naming the first tensor that is wrong.
    """
    if not family.examples:
        raise FormatError(f"{family.name}: no [[examples]]: nothing can be checked")
    out: list[Proven] = []
    for number, example in enumerate(family.examples):
        scope = Scope(family, example)
        logical = logical_names(scope)
        spoken = spoken_by(family, scope)
        for slot in (PARAM, EXP_AVG):
            seen: dict[str, dict[str, Stored]] = {}
            for dialect in spoken:
                every = expand(scope, dialect).items()
                stored = {n: s for n, s in every if not s.spare and s.takes(slot)}
                _each_once(family, dialect, stored, logical)
                for tensor in stored.values():
                    _tiled(tensor)
                seen[dialect] = stored
            for mine in seen:
                for theirs in seen:
                    _joined(seen[mine], seen[theirs], f"{theirs} -> {mine}")
            if slot == PARAM:
                out += [Proven(number, d, len(s), len(logical)) for d, s in seen.items()]
    return out


def _each_once(
    family: Family,
    dialect: str,
    stored: Mapping[str, Stored],
    logical: Mapping[str, tuple[int, ...]],
) -> None:
    """Every logical tensor is held once; copies in another run's block are declared ones."""
    holders: dict[str, list[str]] = {}
    for tensor in stored.values():
        for held in tensor.held:
            if logical.get(held.name) != held.shape:
                raise CoverageError(
                    f"{family.name}: {dialect}: {tensor.name} holds {held.name} of shape "
                    f"{list(held.shape)}, which the model does not have"
                )
            holders.setdefault(held.name, []).append(tensor.name)
    missing = [n for n in logical if n not in holders]
    if missing:
        raise CoverageError(f"{family.name}: {dialect}: nothing holds {missing[0]}")
    for name, names in holders.items():
        optional = [n for n in names if stored[n].optional is not None]
        if len(names) - len(optional) > 1 or (len(names) > 1 and not optional):
            raise CoverageError(
                f"{family.name}: {dialect}: {name} is held more than once: {', '.join(names)}"
            )


def indices(view: View, shape: tuple[int, ...]) -> Array:
    """The element of the stored tensor behind every element of a logical one."""
    out = np.array(view.base, np.int64)
    for axis in view.axes:
        for n, stride in axis:
            out = np.add.outer(out, np.arange(n, dtype=np.int64) * stride)
    return out.reshape(shape)


def _tiled(tensor: Stored) -> None:
    """The logical tensors in a stored one take up every element of it, none twice."""
    flat = np.concatenate([indices(h.view, h.shape).reshape(-1) for h in tensor.held])
    if not np.array_equal(np.sort(flat), np.arange(prod(tensor.shape))):
        raise CoverageError(
            f"{tensor.name}: its parts ({', '.join(h.name for h in tensor.held)}) do not fill its "
            f"shape {list(tensor.shape)} once"
        )


def _joined(mine: Mapping[str, Stored], theirs: Mapping[str, Stored], what: str) -> None:
    """Every target tensor is spliced of the source's elements, each where its index says."""
    holders: dict[str, tuple[Stored, Held]] = {}
    for tensor in theirs.values():
        for held in tensor.held:
            holders.setdefault(held.name, (tensor, held))
    for name, tensor in mine.items():
        pairs = [(held, *holders[held.name]) for held in tensor.held]
        links = tuple(Link(h.view, other.view, source.shape) for h, source, other in pairs)
        try:
            factors, splices = splice(tensor.shape, links)
        except LayoutError as error:
            raise LayoutError(f"{what}: {name}: {error}") from error
        for (held, source, other), cut in zip(pairs, splices, strict=True):
            wanted = np.full(prod(tensor.shape), -1)
            wanted[indices(held.view, held.shape)] = indices(other.view, other.shape)
            got = np.full(factors, -1)
            numbers = np.arange(prod(source.shape)).reshape(cut.source_factors)
            for part in cut.parts:
                box = numbers[_slices(part.source.start, part.source.stop)]
                order = [a for a in part.axes if a is not None]
                rest = [i for i in range(box.ndim) if i not in order]
                turned = box.transpose(*order, *rest).reshape(part.target.shape)
                got[_slices(part.target.start, part.target.stop)] = turned
            if not np.array_equal(got.reshape(-1), wanted):
                raise LayoutError(f"{what}: {name}: {held.name} does not arrive as declared")


def _slices(start: tuple[int, ...], stop: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(start, stop, strict=True))


def listing(family: Family) -> dict[str, Json]:
    """A family as `reshard schemas --json` prints it."""
    return {
        "name": family.name,
        "title": family.title,
        "model_types": list(family.types),
        "dialects": list(spoken_by(family)),
        "refused": {d: r.why for d, r in family.refuse.items()},
        "known_by_arguments": [k for k, t in family.types.items() if t.when is not None],
    }
