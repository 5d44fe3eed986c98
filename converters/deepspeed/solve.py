"""Which parameter each entry of a nameless optimizer is: by order, shape and value, or refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from reshard.errors import FormatError
from reshard.layout import StoredArray


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight of the module, as one rank holds it."""

    name: str
    local: tuple[int, ...]
    array: StoredArray


@dataclass(frozen=True, slots=True)
class Entry:
    """One parameter of an optimizer: its shape, and its master where there is one."""

    shape: tuple[int, ...]
    master: StoredArray | None


Alike = Callable[[Weight, StoredArray | None, int], bool]


def solve(
    weights: Sequence[Weight], groups: Sequence[Sequence[Entry]], alike: Alike, where: str
) -> list[list[Weight]]:
    """The weights of every group, in order.

    A group lists its parameters in the order the model declares them; each weight is in at most
    one group, and in exactly one where there are as many entries as weights. `alike` compares a
    master with a weight. Raises FormatError if no naming fits or more than one does.
    """
    frozen = len(weights) - sum(map(len, groups))
    if frozen < 0:
        raise FormatError(
            f"{where}: the optimizer has {sum(map(len, groups))} parameters, the module "
            f"{len(weights)}; they cannot be named"
        )
    found: list[list[list[Weight]]] = []
    # depth-first over the weights in order; a state is (weight, taken of each group)
    dead: set[tuple[int, ...]] = set()
    stack: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = [(0, (0,) * len(groups), ())]
    ends = tuple(map(len, groups))
    while stack and len(found) < 2:
        i, taken, path = stack.pop()
        if i == len(weights):
            if taken == ends:
                found.append(_members(weights, path, len(groups)))
            continue
        if (i, *taken) in dead:
            continue
        choices = _choices(weights[i], taken, groups, alike)
        if i - sum(taken) < frozen:
            choices.insert(0, -1)
        if not choices:
            dead.add((i, *taken))
        for g in choices:
            after = taken if g < 0 else (*taken[:g], taken[g] + 1, *taken[g + 1 :])
            stack.append((i + 1, after, (*path, g)))
    if not found:
        return _by_value(weights, groups, alike, where)
    if len(found) > 1:
        a, b = found
        first = next((x, y) for x, y in zip(_flat(a), _flat(b), strict=True) if x != y)
        raise FormatError(
            f"{where}: ZeRO 0 records no names, and more than one naming fits the optimizer's "
            f"shapes (an entry is {first[0].name} or {first[1].name}). Convert with --weights-only."
        )
    return found[0]


def _flat(groups: Sequence[Sequence[Weight]]) -> list[Weight]:
    return [w for g in groups for w in g]


def _choices(
    weight: Weight, taken: tuple[int, ...], groups: Sequence[Sequence[Entry]], alike: Alike
) -> list[int]:
    """The groups whose next entry this weight may be."""
    fits = [
        g
        for g, entries in enumerate(groups)
        if taken[g] < len(entries) and entries[taken[g]].shape == weight.local
    ]
    return [g for g in fits if alike(weight, groups[g][taken[g]].master, 0)]


def _members(weights: Sequence[Weight], path: tuple[int, ...], groups: int) -> list[list[Weight]]:
    out: list[list[Weight]] = [[] for _ in range(groups)]
    for weight, g in zip(weights, path, strict=True):
        if g >= 0:
            out[g].append(weight)
    return out


def _by_value(
    weights: Sequence[Weight], groups: Sequence[Sequence[Entry]], alike: Alike, where: str
) -> list[list[Weight]]:
    """The naming of groups in an order of their own, by their masters' values alone."""
    left = list(weights)
    out: list[list[Weight]] = []
    for entries in groups:
        row = []
        for entry in entries:
            fits = [
                w
                for w in left
                if entry.master is not None and w.local == entry.shape and alike(w, entry.master, 0)
            ]
            if len(fits) != 1:
                raise FormatError(
                    f"{where}: ZeRO 0 records no names, and {len(fits)} parameters fit an entry of "
                    f"shape {list(entry.shape)}. Convert with --weights-only."
                )
            row.append(fits[0])
            left.remove(fits[0])
        out.append(row)
    return out


def solve_flat(
    weights: Sequence[Weight], flats: Sequence[StoredArray], alike: Alike, where: str
) -> list[list[Weight]]:
    """The weights of groups of which only flat masters are kept (FP16_Optimizer), by value.

    Raises FormatError where none or more than one fits.
    """
    left = list(weights)
    out: list[list[Weight]] = []
    for flat in flats:
        row: list[Weight] = []
        at = 0
        while at < flat.numel:
            fits = [w for w in left if w.array.numel and alike(w, flat, at)]
            later = [w for w in fits if not row or weights.index(w) > weights.index(row[-1])]
            if not fits:
                raise FormatError(
                    f"{where}: no weight is element {at} of a flat group of {flat.numel} rounded; "
                    "it cannot be named. Convert with --weights-only."
                )
            chosen = (later or fits)[0]
            row.append(chosen)
            left.remove(chosen)
            at += prod(chosen.local)
        if at != flat.numel:
            raise FormatError(f"{where}: weights do not fill a flat group of {flat.numel} elements")
        out.append(row)
    return out
