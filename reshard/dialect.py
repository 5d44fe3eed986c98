"""A model's tensors in one dialect: names, shapes, and where each logical tensor lies in them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from reshard.box import row_major
from reshard.errors import FormatError
from reshard.schema import (
    MODEL,
    Entry,
    Family,
    Fuse,
    Leaf,
    Logical,
    Made,
    Rope,
    Run,
    Scope,
    Stack,
    Turn,
    entries_in,
    leaves_of,
    prefix_in,
    sensitive,
    spelled,
)
from reshard.tensor import MASTER, PARAM

#: One axis as (elements, stride) factors, the coarsest first.
Axis = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class View:
    """A tensor as strides over the row-major elements of the stored one that holds it."""

    base: int  # elements
    axes: tuple[Axis, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> View:
        """All of a stored tensor."""
        return cls(0, tuple(((n, s),) for n, s in zip(shape, row_major(shape), strict=True)))


@dataclass(frozen=True, slots=True)
class Held:
    """A logical tensor within a stored one."""

    name: str  # full: run, index, name
    shape: tuple[int, ...]
    view: View
    keep: bool


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor as a dialect stores it."""

    name: str
    shape: tuple[int, ...]
    held: tuple[Held, ...]
    spare: bool = False
    add: float = 0.0
    optional: str | None = None  # the dimension that is 0 if this tensor's whole run is missing
    slots: str = "all"  # what is written under this name: "all", "weight" or "state"

    def takes(self, slot: str) -> bool:
        """Whether a slot is written under this name."""
        return self.slots == "all" or (slot in (PARAM, MASTER)) == (self.slots == "weight")


def expand(scope: Scope, dialect: str) -> dict[str, Stored]:
    """Every tensor that a model of this config has in a dialect, by name.

    Raises FormatError for a size that the config does not give, or parts that do not fit.
    """
    family = scope.family
    refusal = family.refuse.get(dialect)
    if refusal is not None and scope.holds(refusal.when):
        raise FormatError(f"{family.title} in {dialect}: {refusal.why}")
    out: dict[str, Stored] = {}
    for run in family.runs:
        forms = _Forms(scope, run, dialect)
        for number in range(_length(scope, run)):
            for stored in forms.tensors(number):
                if stored.name in out and not (stored.spare or out[stored.name].spare):
                    raise FormatError(f"{family.name}: {dialect} names {stored.name} twice")
                out[stored.name] = stored
    return out


def logical_names(scope: Scope) -> dict[str, tuple[int, ...]]:
    """Every logical tensor of the model, with its shape."""
    out: dict[str, tuple[int, ...]] = {}
    family = scope.family
    for run in family.runs:
        for number in range(_length(scope, run)):
            here = scope.at(_index(scope, run, number))
            for name, tensor in family.logical.get(run.block, {}).items():
                for index in _instances(here, name):
                    if index.holds(tensor.when):
                        out[_full(run, number, spelled(name, index))] = shape_of(
                            tensor, index, name
                        )
    return out


def shape_of(tensor: Logical, scope: Scope, name: str) -> tuple[int, ...]:
    """The shape of a logical tensor."""
    return tuple(scope.count(n, name) for n in tensor.shape)


#: More copies of a block, or of a tensor in one, than any model has.
_MOST_COPIES = 1 << 14


def _length(scope: Scope, run: Run) -> int:
    return _copies(scope.count(run.count, f"run {run.name}"), run.name) if run.over else 1


def _copies(n: int, what: str) -> int:
    """`n`, or a FormatError where a config has been damaged."""
    if n > _MOST_COPIES:
        raise FormatError(f"the config makes {n} of {what}; at most {_MOST_COPIES} are believed")
    return n


def _index(scope: Scope, run: Run, number: int) -> dict[str, int]:
    index = {run.over: number} if run.over else {}
    for name, text in run.also.items():
        index[name] = scope.at(index).count(text, name)
    return index


def _full(run: Run, number: int, name: str) -> str:
    return f"{run.name}.{number}.{name}" if run.over else name


def _instances(scope: Scope, pattern: str) -> Iterator[Scope]:
    """The scope once per combination of the block's own indices that a name holds open."""
    open_ = [v for v in scope.family.indices if f"<{v}>" in pattern and v not in scope.index]
    counts = [_copies(scope.count(scope.family.indices[v], v), v) for v in open_]
    for values in product(*map(range, counts)):
        yield scope.at(dict(zip(open_, values, strict=True))) if open_ else scope


@dataclass(frozen=True, slots=True)
class _Form:
    """An entry worked out: what is the same for every instance that its sizes do not depend on."""

    shape: tuple[int, ...]
    held: tuple[tuple[str, Mapping[str, int], tuple[int, ...], View, bool], ...]


class _Forms:
    """The tensors of one run in one dialect; equal ones are worked out once."""

    def __init__(self, scope: Scope, run: Run, dialect: str) -> None:
        self.scope, self.run = scope, run
        self.family: Family = scope.family
        self.entries = entries_in(self.family, dialect, run.block)
        self.prefix = prefix_in(run, dialect)
        loops = frozenset({run.over, *run.also, *self.family.indices} - {""})
        self.depends = [sensitive(self.family, self._texts(e), loops) for e in self.entries]
        self.known: dict[tuple[int, tuple[int, ...]], _Form | None] = {}

    def _texts(self, entry: Entry) -> list[str]:
        """Every expression that an entry's form hangs on."""
        texts = [entry.when or "True", *_texts_in(entry.made)]
        for leaf in leaves_of(entry.made):
            tensor = self.tensor(leaf)
            texts += [tensor.when or "True", *tensor.shape]
        return texts

    def tensor(self, name: str) -> Logical:
        """A logical tensor of the run's block, else of the model."""
        for block in (self.run.block, MODEL):
            if name in self.family.logical.get(block, {}):
                return self.family.logical[block][name]
        raise FormatError(f"{self.family.name}: {name!r} is no logical tensor of {self.run.block}")

    def tensors(self, number: int) -> Iterator[Stored]:
        """The tensors of one copy of the block."""
        here = self.scope.at(_index(self.scope, self.run, number))
        prefix = spelled(self.prefix, here)
        for at, entry in enumerate(self.entries):
            for scope in _instances(here, entry.name):
                form = self._form(at, entry, scope)
                if form is None:
                    continue
                held = tuple(
                    Held(
                        self._name(leaf, number, scope.at(more) if more else scope), shape, v, keep
                    )
                    for leaf, more, shape, v, keep in form.held
                )
                name = prefix + spelled(entry.name, scope)
                run = self.run.optional
                yield Stored(name, form.shape, held, entry.spare, entry.add, run, entry.slots)

    def _name(self, leaf: str, number: int, scope: Scope) -> str:
        name = spelled(leaf, scope)
        own = leaf in self.family.logical.get(self.run.block, {})
        return _full(self.run, number, name) if own else name

    def _form(self, at: int, entry: Entry, scope: Scope) -> _Form | None:
        key = (at, tuple(scope.index[v] for v in sorted(self.depends[at] & scope.index.keys())))
        if key not in self.known:
            self.known[key] = self._work_out(entry, scope)
        return self.known[key]

    def _work_out(self, entry: Entry, scope: Scope) -> _Form | None:
        if not scope.holds(entry.when):
            return None
        there = [scope.holds(self.tensor(n).when) for n in leaves_of(entry.made)]
        if not all(there):
            return None
        shape = self.shape(entry.made, scope, entry.name)
        held = tuple(self.views(entry.made, View.whole(shape), scope, {}, entry.name))
        return _Form(shape, held)

    def shape(self, made: Made, scope: Scope, name: str) -> tuple[int, ...]:
        """The shape of what an entry is made of."""
        match made:
            case Leaf(name=leaf):
                return shape_of(self.tensor(leaf), scope, leaf)
            case Fuse(parts=parts, groups=groups):
                shapes = [self.shape(p, scope, name) for p in parts]
                n = scope.count(groups, name)
                if len({s[1:] for s in shapes}) != 1 or not n or any(s[0] % n for s in shapes):
                    raise FormatError(f"{name}: parts of shapes {shapes} do not fuse in {n} groups")
                return (sum(s[0] for s in shapes), *shapes[0][1:])
            case Turn(of=of):
                *lead, a, b = self.shape(of, scope, name)
                return (*lead, b, a)
            case Stack(of=of, over=over, count=count):
                first = self.shape(of, scope.at({over: 0}), name)
                return (scope.count(count, name), *first)
            case Rope(of=of, heads=heads):
                shape = self.shape(of, scope, name)
                if shape[0] % (2 * scope.count(heads, name)):
                    raise FormatError(f"{name}: {shape[0]} rows are not pairs in {heads} heads")
                return shape

    def views(
        self, made: Made, view: View, scope: Scope, more: Mapping[str, int], name: str
    ) -> Iterator[tuple[str, Mapping[str, int], tuple[int, ...], View, bool]]:
        """Every logical tensor in what an entry is made of, as a view of the stored tensor."""
        match made:
            case Leaf(name=leaf):
                tensor = self.tensor(leaf)
                yield leaf, more, shape_of(tensor, scope, leaf), view, tensor.keep
            case Fuse(parts=parts, groups=groups):
                n = scope.count(groups, name)
                outer, inner = _split(view.axes[0], n)
                low = 0
                for piece in parts:
                    size = self.shape(piece, scope, name)[0] // n
                    move, mine = _range(inner, low, size)
                    axes = (outer + mine, *view.axes[1:])
                    yield from self.views(piece, View(view.base + move, axes), scope, more, name)
                    low += size
            case Turn(of=of):
                axes = (*view.axes[:-2], view.axes[-1], view.axes[-2])
                yield from self.views(of, View(view.base, axes), scope, more, name)
            case Stack(of=of, over=over, count=count):
                ((_, stride),) = view.axes[0]
                for i in range(scope.count(count, name)):
                    part = View(view.base + i * stride, view.axes[1:])
                    inside = {**more, over: i}
                    yield from self.views(of, part, scope.at({over: i}), inside, name)
            case Rope(of=of, heads=heads):
                outer, inner = _split(view.axes[0], scope.count(heads, name))
                pairs, halves = _split(inner, prod(n for n, _ in inner) // 2)
                axes = (outer + halves + pairs, *view.axes[1:])
                yield from self.views(of, View(view.base, axes), scope, more, name)


def _texts_in(made: Made) -> Iterator[str]:
    match made:
        case Fuse(parts=parts, groups=groups):
            yield groups
            for part in parts:
                yield from _texts_in(part)
        case Turn(of=of):
            yield from _texts_in(of)
        case Stack(of=of, count=count):
            yield count
            yield from _texts_in(of)
        case Rope(of=of, heads=heads):
            yield heads
            yield from _texts_in(of)
        case Leaf():
            pass


def _split(axis: Axis, outer: int) -> tuple[Axis, Axis]:
    """The axis as `outer` equal runs, and one run: both as factors."""
    lead: list[tuple[int, int]] = []
    rest = list(axis)
    need = outer
    while need > 1:
        n, stride = rest.pop(0)
        if need % n == 0:
            lead.append((n, stride))
            need //= n
        elif n % need == 0:
            lead.append((need, stride * (n // need)))
            rest.insert(0, (n // need, stride))
            need = 1
        else:
            raise FormatError(f"an axis of {[n for n, _ in axis]} is not {outer} equal runs")
    return tuple(lead), tuple(rest)


def _range(axis: Axis, start: int, size: int) -> tuple[int, Axis]:
    """(elements to the first, factors) of a range of an axis. An axis of parts is cut at parts."""
    if not axis:
        return 0, axis
    (n, stride), *rest = axis
    part = prod(m for m, _ in rest)
    if start % part or size % part:
        raise FormatError(f"a range {start}+{size} of an axis of {n} x {part} cuts a part")
    return start // part * stride, ((size // part, stride), *rest)
