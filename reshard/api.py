"""What `import reshard` offers: the commands as functions, and lazy tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from reshard.box import Box, row_major
from reshard.checkpoint import Checkpoint, Json, ParamGroup, ties
from reshard.conversion import convert as _convert
from reshard.differences import diff_report, differences
from reshard.engine import block_elements
from reshard.errors import UsageError
from reshard.files import Files
from reshard.fingerprints import slot_digests
from reshard.format import refuse_idle
from reshard.join import cover
from reshard.layout import Piece, StoredArray, refactor
from reshard.namings import Choice
from reshard.opening import open_as
from reshard.planning import Options, make_plan
from reshard.readback import fingerprints, read_block
from reshard.report import plan_report
from reshard.tensor import PARAM, STEP, LogicalTensor, TensorId
from reshard.verification import Part
from reshard.verification import verify as _verify

Array = npt.NDArray[Any]
_T = TypeVar("_T")
_ELEMENTS = block_elements(1 << 30, 1 << 20, 1)


@dataclass(frozen=True)
class LazyTensor:
    """A tensor on disk; indexing reads just the rows and columns asked for."""

    checkpoint: Checkpoint
    logical: LogicalTensor

    @property
    def shape(self) -> tuple[int, ...]:
        """The true shape, without padding."""
        return self.logical.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The numpy (or ml_dtypes) type."""
        return self.logical.dtype.numpy

    @property
    def pieces(self) -> Sequence[Piece]:
        """Where the elements lie, replicas included."""
        return self.checkpoint.layout.pieces(self.logical.id)

    def __getitem__(self, index: Any) -> Array:
        """The values at `index`: integers, slices with step 1, and `...`."""
        box, squeeze = _box(self.shape, index)
        kept = [n for i, n in enumerate(box.shape) if i not in squeeze]
        if box.numel == 0:
            return np.empty(kept, self.dtype)
        with Files(self.checkpoint.path) as files:
            return self._read(files, box).reshape(kept)

    def _read(self, files: Files, box: Box) -> Array:
        logical, pieces = self.logical, self.pieces
        if logical.factors is None:
            return read_block(files, cover(pieces).parts.near(box), box, logical)
        array = StoredArray("", 0, logical.shape, logical.dtype, "")
        parts = cover(pieces).parts
        out = np.empty(box.shape, self.dtype)
        flat = out.reshape(-1)
        wanted = Piece(box, array, 0, row_major(box.shape))
        for part in refactor(wanted, logical.shape, logical.factors):
            values = read_block(files, parts.near(part.box), part.box, logical)
            strides = tuple(s * out.itemsize for s in part.strides)
            view = np.lib.stride_tricks.as_strided(flat[part.base :], part.box.shape, strides)
            view[...] = values
        return out


@dataclass(frozen=True)
class Step:
    """A parameter's step counter, indexed as a 0-d tensor is."""

    value: float
    shape: tuple[int, ...] = ()
    pieces: tuple[Piece, ...] = ()

    @property
    def dtype(self) -> np.dtype[Any]:
        """Steps are shown as float32, torch's own type for them."""
        return np.dtype(np.float32)

    def __getitem__(self, index: Any) -> Array:
        """The count, for `...` or `()`."""
        return np.asarray(np.asarray(self.value, np.float32)[index])


def _box(shape: tuple[int, ...], index: Any) -> tuple[Box, set[int]]:
    items = list(index) if isinstance(index, tuple) else [index]
    if any(i is Ellipsis for i in items):
        at = next(k for k, i in enumerate(items) if i is Ellipsis)
        items[at : at + 1] = [slice(None)] * (len(shape) - len(items) + 1)
    items += [slice(None)] * (len(shape) - len(items))
    if len(items) != len(shape):
        raise UsageError(f"{len(items)} indices for a tensor of shape {list(shape)}")
    start, stop, squeeze = [], [], set()
    for axis, (item, n) in enumerate(zip(items, shape, strict=True)):
        if isinstance(item, slice):
            a, b, step = item.indices(n)
            if step != 1:
                raise UsageError("a lazy tensor is indexed with step 1")
            start.append(a)
            stop.append(max(a, b))
        else:
            if isinstance(item, (bool, np.bool_)) or not hasattr(item, "__index__"):
                raise UsageError(f"a lazy tensor is indexed with integers and slices, not {item!r}")
            i = int(item) + (n if int(item) < 0 else 0)
            if not 0 <= i < n:
                raise IndexError(f"index {item} is outside an axis of {n} elements")
            start.append(i)
            stop.append(i + 1)
            squeeze.add(axis)
    return Box(tuple(start), tuple(stop)), squeeze


@dataclass(frozen=True)
class Opened:
    """An open checkpoint: headers in memory, tensors on disk."""

    checkpoint: Checkpoint

    @property
    def tensors(self) -> Mapping[tuple[str, str], LazyTensor | Step]:
        """(name, slot) to shape, dtype and pieces; in the checkpoint's own naming.

        Names are per layer and expert. Slots: param, master, exp_avg, exp_avg_sq, step, or what
        the optimizer calls its state.
        """
        own = {t.name: v.stored_name or t.name for t, v in self.checkpoint.layout.tensors.items()}
        return {(own[name], slot): v for (name, slot), v in self.logical.items()}

    @property
    def logical(self) -> Mapping[tuple[str, str], LazyTensor | Step]:
        """The same by canonical name, equal in every container of a framework."""
        out: dict[tuple[str, str], LazyTensor | Step] = {
            (t.name, t.slot): LazyTensor(self.checkpoint, v)
            for t, v in self.checkpoint.layout.tensors.items()
        }
        for name, value in self.checkpoint.steps.items():
            out.setdefault((name, STEP), Step(value))
        return out

    @property
    def steps(self) -> Mapping[str, float]:
        """Adam's step counter by canonical name."""
        return self.checkpoint.steps

    @property
    def groups(self) -> tuple[ParamGroup, ...] | None:
        """The optimizer's param groups: options, and members by canonical name."""
        return self.checkpoint.groups

    @property
    def extras(self) -> Mapping[str, Json]:
        """Everything that is neither tensor, group nor step."""
        return self.checkpoint.extras

    def __getitem__(self, key: str | tuple[str, str]) -> LazyTensor | Step:
        """The tensor of this name (own, canonical or tied); `(name, slot)` for other slots than
        param."""
        name, slot = key if isinstance(key, tuple) else (key, PARAM)
        name = ties(self.checkpoint).get(name, name)
        found = self.checkpoint.layout.tensors.get(TensorId(name, slot))
        if found is not None:
            return LazyTensor(self.checkpoint, found)
        everything = self.tensors if (name, slot) not in self.logical else self.logical
        if (name, slot) not in everything:
            raise KeyError(f"{name} ({slot}) is not in {self.checkpoint.path}")
        return everything[name, slot]


def open(  # the name users expect
    path: str | Path,
    given: str | None = None,
    *,
    iteration: int | None = None,
    vocab_size: int | None = None,
) -> Opened:
    """Open a checkpoint or run folder, headers only. `given` is what --from says."""
    checkpoint = open_as(path, given, iteration, vocab_size)
    if vocab_size is not None:
        refuse_idle("vocab_size", checkpoint.format)
    return Opened(checkpoint)


def plan(source: str | Path, to: str | None = None, **options: Any) -> dict[str, Json]:
    """What convert would do, as `reshard plan --json` prints it."""
    return plan_report(make_plan(source, _options(to, options)))


def convert(
    source: str | Path, target: str | Path, to: str | None = None, **options: Any
) -> dict[str, Json]:
    """Convert; the report of `reshard convert --json`. Options are those of `planning.Options`."""
    return _convert(source, target, _options(to, options))


def _options(to: str | None, given: Mapping[str, Any]) -> Options:
    """Options as on the command line: a path may be a Path, one pattern may stand alone."""
    made: dict[str, Any] = {k: str(v) if isinstance(v, Path) else v for k, v in given.items()}
    for name in ("include", "exclude"):
        if isinstance(made.get(name), str):
            made[name] = (made[name],)
    return Options(to=to, **made)


def verify(
    path: str | Path, *, deep: bool = False, subset: str | None = None, **options: Any
) -> dict[str, Json]:
    """Read everything, or one part in `subset`, and check it: what `verify --json` prints."""
    part = Part.parse(subset) if subset is not None else Part()
    return _verify(open(path, **options).checkpoint, elements=_ELEMENTS, deep=deep, part=part)


def diff(
    left: str | Path,
    right: str | Path,
    *,
    extras: bool = False,
    schema: str | None = None,
    config: str | Path | None = None,
    vocab_size: int | None = None,
    given: Sequence[str | None] = (),
    iteration: Sequence[int | None] = (),
) -> dict[str, Json]:
    """The logical difference, as `reshard diff --json` prints it.

    `given` and `iteration` are what --from and --iteration say: of the left one, then of the right.
    """
    opened = [
        open_as(path, said, number, vocab_size)
        for path, said, number in zip(
            (left, right), _both(given, "--from"), _both(iteration, "--iteration"), strict=True
        )
    ]
    if vocab_size is not None:
        refuse_idle("vocab_size", *(c.format for c in opened))
    return diff_report(
        *differences(
            *opened,
            elements=_ELEMENTS,
            extras=extras,
            choice=Choice(schema, None if config is None else str(config)),
        )
    )


def _both(values: Sequence[_T | None], option: str) -> tuple[_T | None, _T | None]:
    """What is said of the left and of the right one. Raises UsageError for more than two."""
    if isinstance(values, str) or len(values) > 2:
        raise UsageError(f"{option} is said of A, then of B: two at most")
    return (*values, None, None)[0], (*values, None, None)[1]


def fingerprint(path: str | Path, **options: Any) -> dict[str, str]:
    """One digest per slot."""
    opened = open(path, **options).checkpoint
    sums = fingerprints(opened, elements=_ELEMENTS)
    return slot_digests(opened.layout.tensors.values(), {t: s.hex for t, s in sums.items()})
