"""Logical difference of two checkpoints across formats and topologies, slot by slot."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from reshard.checkpoint import Checkpoint, Json, ParamGroup
from reshard.dtypes import FLOAT32
from reshard.errors import CoverageError
from reshard.files import Files, blocks
from reshard.join import Cover, cover
from reshard.layout import refactor
from reshard.namings import Choice
from reshard.options import means_nothing
from reshard.readback import read_block
from reshard.renaming import in_naming_of
from reshard.tensor import MASTER, PARAM, TensorId

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing in which two checkpoints differ."""

    what: str  # the tensor, group option or extra
    kind: str  # only-left | only-right | shape | dtype | bits | step | option | extra
    detail: str


def differences(
    left: Checkpoint,
    right: Checkpoint,
    *,
    elements: int,
    extras: bool = False,
    slots: frozenset[str] | None = None,
    choice: Choice | None = None,
    progress: Callable[[int], object] = lambda _: None,
) -> tuple[list[Difference], int]:
    """What differs, and how many tensors were compared bit for bit over the true shape.

    Where the two name their tensors differently, the right one is seen in the left one's names;
    raises CoverageError if no family joins them.
    """
    right = in_naming_of(left, right, choice or Choice())
    out: list[Difference] = []
    compared = 0
    mine = {t: t for t in left.layout.tensors if slots is None or t.slot in slots}
    theirs = {t: t for t in right.layout.tensors if slots is None or t.slot in slots}
    mine, theirs = _as_masters(mine, theirs, left), _as_masters(theirs, mine, right)
    mine, theirs = _without_copies(mine, theirs), _without_copies(theirs, mine)
    only, others = sorted(mine.keys() - theirs.keys()), sorted(theirs.keys() - mine.keys())
    out += [Difference(str(t), "only-left", f"not in {right.path}") for t in only]
    out += [Difference(str(t), "only-right", f"not in {left.path}") for t in others]
    with Files(left.path) as a, Files(right.path) as b:
        for tensor in sorted(mine.keys() & theirs.keys()):
            found = _compare(left, right, (mine[tensor], theirs[tensor]), a, b, elements, progress)
            compared += 1
            if found is not None:
                out.append(found)
    if slots is None:
        out += _steps(left.steps, right.steps)
        out += _groups(left, right)
    if extras:
        out += _extras(left.extras, right.extras)
    return out, compared


def diff_report(found: list[Difference], compared: int) -> dict[str, Json]:
    """What `diff --json` prints."""
    return {
        "status": "different" if found else "equal",
        "compared": compared,
        "differences": [{"what": d.what, "kind": d.kind, "detail": d.detail} for d in found],
    }


_Named = dict[TensorId, TensorId]  # what a tensor counts as -> the stored one


def _as_masters(mine: _Named, theirs: _Named, checkpoint: Checkpoint) -> _Named:
    """A lone fp32 weight is its own master, where the other side has a master."""
    held = checkpoint.layout.tensors
    out: _Named = {}
    for tensor, stored in mine.items():
        master = TensorId(tensor.name, MASTER)
        lone = tensor.slot == PARAM and master not in held and master in theirs
        wide = held[stored].dtype == FLOAT32
        out[master if lone and wide else tensor] = stored
    return out


def _without_copies(mine: _Named, theirs: _Named) -> _Named:
    """Without weights rounded from a master that both sides have, where the other keeps none."""
    return {
        t: stored
        for t, stored in mine.items()
        if t.slot != PARAM
        or t in theirs
        or not (TensorId(t.name, MASTER) in mine and TensorId(t.name, MASTER) in theirs)
    }


def _compare(
    left: Checkpoint,
    right: Checkpoint,
    pair: tuple[TensorId, TensorId],
    a: Files,
    b: Files,
    elements: int,
    progress: Callable[[int], object],
) -> Difference | None:
    tensor = pair[0]
    x, y = left.layout.tensors[pair[0]], right.layout.tensors[pair[1]]
    if x.shape != y.shape:
        return Difference(str(tensor), "shape", f"{list(x.shape)} and {list(y.shape)}")
    if x.dtype != y.dtype:
        return Difference(str(tensor), "dtype", f"{x.dtype.name} and {y.dtype.name}")
    left.layout.check(pair[0])
    right.layout.check(pair[1])
    ours, theirs, space = _together(left, right, pair)
    different, first = 0, ""
    bits = np.dtype((np.void, x.dtype.itemsize))
    for box in blocks(space, elements):
        v = read_block(a, ours.parts.near(box), box, x)
        w = read_block(b, theirs.parts.near(box), box, y)
        progress(v.nbytes)
        p, q = (np.ascontiguousarray(z).reshape(-1).view(bits) for z in (v, w))
        unequal = p != q
        n = int(np.count_nonzero(unequal))
        if n and not first:
            i = np.unravel_index(int(np.argmax(unequal)), box.shape)
            at = [int(k) + s for k, s in zip(i, box.start, strict=True)]
            first = f"first at {at}: {v[i]} and {w[i]}"
        different += n
    if different:
        return Difference(
            str(tensor), "bits", f"{different} of {_numel(x.shape)} elements; {first}"
        )
    return None


def _together(
    left: Checkpoint, right: Checkpoint, pair: tuple[TensorId, TensorId]
) -> tuple[Cover, Cover, tuple[int, ...]]:
    """Both covers counted in one space, and the true shape in it."""
    x, y = left.layout.tensors[pair[0]], right.layout.tensors[pair[1]]
    mine, theirs = list(left.layout.pieces(pair[0])), list(right.layout.pieces(pair[1]))
    if x.factors is not None and y.factors is None:
        theirs = [q for p in theirs for q in refactor(p, y.extent, x.factors)]
    elif y.factors is not None and x.factors is None:
        mine = [q for p in mine for q in refactor(p, x.extent, y.factors)]
    elif x.factors != y.factors:
        raise CoverageError(f"{pair[0]}: counted as {x.factors} and as {y.factors}")
    return cover(mine), cover(theirs), x.factors or y.factors or x.shape


def _numel(shape: tuple[int, ...]) -> int:
    n = 1
    for d in shape:
        n *= d
    return n


def _steps(left: Mapping[str, float], right: Mapping[str, float]) -> list[Difference]:
    out = []
    for name in sorted(left.keys() | right.keys()):
        if left.get(name) != right.get(name):
            out.append(Difference(name, "step", f"{left.get(name)} and {right.get(name)}"))
    return out


def _groups(left: Checkpoint, right: Checkpoint) -> list[Difference]:
    """Options compared by tensor: how members are grouped is the topology's business.

    One that only one side has counts, unless a group without it is updated alike.
    """
    mine, theirs = _by_member(left.groups), _by_member(right.groups)
    foreign = left.format.partition("-")[0] != right.format.partition("-")[0]
    out: dict[tuple[str, str], Difference] = {}
    for name in sorted(mine.keys() & theirs.keys()):
        for option in sorted(mine[name].keys() | theirs[name].keys()):
            found = _unequal(mine[name], theirs[name], option, foreign=foreign)
            if found is not None:
                out.setdefault((option, found), Difference(f"{name}: {option}", "option", found))
    if (left.groups is None) != (right.groups is None):
        side = "only-left" if right.groups is None else "only-right"
        out["", ""] = Difference("optimizer", side, "")
    return list(out.values())


def _unequal(
    mine: Mapping[str, Json], theirs: Mapping[str, Json], option: str, *, foreign: bool
) -> str | None:
    """What is said of an option that is not the same; None if it is."""
    if option in mine and option in theirs:
        x, y = mine[option], theirs[option]
        return None if _plain(x) == _plain(y) else f"{x} and {y}"
    side, value = ("left", mine[option]) if option in mine else ("right", theirs[option])
    if means_nothing(option, value, foreign=foreign):
        return None
    return f"only {side}: {value}"


def _by_member(groups: tuple[ParamGroup, ...] | None) -> dict[str, Mapping[str, Json]]:
    return {name: g.options for g in groups or () for name in g.members}


def _plain(value: Json) -> Json:
    return list(value) if isinstance(value, tuple) else value


def _extras(left: Mapping[str, Json], right: Mapping[str, Json]) -> list[Difference]:
    out = []
    for path in sorted(left.keys() | right.keys()):
        if path not in left:
            out.append(Difference(path, "extra", "only right"))
        elif path not in right:
            out.append(Difference(path, "extra", "only left"))
        elif _plain(left[path]) != _plain(right[path]):
            out.append(Difference(path, "extra", f"{left[path]} and {right[path]}"))
    return out
