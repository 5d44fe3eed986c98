"""Model families read from TOML: dimensions, logical tensors, and how each dialect stores them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from reshard import tables
from reshard.errors import FormatError
from reshard.expression import Value, evaluate, names_in
from reshard.namings import Dialect, dialects

MODEL = "model"  # the block of tensors that stand once, outside every stack
_PLACE = re.compile(r"<([^<>]+)>")


# --- what a dialect's tensor is made of ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Leaf:
    """One logical tensor, by its name within the block."""

    name: str


@dataclass(frozen=True, slots=True)
class Fuse:
    """Block i of every part, for i in 0..groups, along axis 0; one group is a concatenation."""

    parts: tuple[Made, ...]
    groups: str


@dataclass(frozen=True, slots=True)
class Turn:
    """The last two axes exchanged."""

    of: Made


@dataclass(frozen=True, slots=True)
class Stack:
    """One after the other along a new leading axis, for `over` in 0..count."""

    of: Made
    over: str
    count: str


@dataclass(frozen=True, slots=True)
class Rope:
    """Rows of each head interleaved (x0, y0, x1, y1, …) where the logical ones are (x…, y…)."""

    of: Made
    heads: str


Made = Leaf | Fuse | Turn | Stack | Rope


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a dialect: its name within the block, and what it is made of.

    `spare`: read if it is there (a redundant copy of a tied head) and never written.
    `add`: the stored value is the logical one plus this; weights and masters only.
    `slots`: what is written under this name: "weight" (and master), "state" of the optimizer, or
    "all" (torchtitan's state dict has wq, its optimizer the fused wqkv). Read is what is there.
    """

    name: str
    made: Made
    when: str | None = None
    spare: bool = False
    add: float = 0.0
    slots: str = "all"


@dataclass(frozen=True, slots=True)
class Logical:
    """A logical tensor: shape as expressions. `keep`: --dtype leaves its dtype alone."""

    shape: tuple[str, ...]
    when: str | None = None
    keep: bool = False


@dataclass(frozen=True, slots=True)
class Run:
    """A block of tensors repeated `count` times, each copy under its own prefix per dialect."""

    name: str
    block: str
    over: str = ""  # the loop variable; empty for the block that stands once
    count: str = "1"
    also: Mapping[str, str] = field(default_factory=dict)  # further variables
    prefix: Mapping[str, str] = field(default_factory=dict)  # by dialect
    #: A run whose tensors a checkpoint may leave out altogether (MTP layers): the dimension
    #: that is then 0.
    optional: str | None = None


@dataclass(frozen=True, slots=True)
class ModelType:
    """One `model_type` of a family: its class, and the expression over args that tells it."""

    architecture: str
    when: str | None


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a model, or the models of which `when` holds, has no form in a dialect."""

    why: str
    when: str | None


@dataclass(frozen=True)
class Family:
    """A model family as its file describes it, with what it extends filled in."""

    name: str
    title: str
    types: Mapping[str, ModelType]
    defaults: Mapping[str, Value]  # of config keys
    dims: Mapping[str, str]
    indices: Mapping[str, str]  # loop variable within a block -> its count
    runs: Sequence[Run]
    logical: Mapping[str, Mapping[str, Logical]]  # block -> name
    entries: Mapping[str, Mapping[str, Sequence[Entry]]]  # dialect -> block
    args: Mapping[str, Any]  # over the common ones of the mcore dialect
    config: Mapping[str, Any]  # config.json as expressions over a trainer's args
    refuse: Mapping[str, Refusal]  # dialect -> why it is not done
    tell: Mapping[str, Sequence[Refusal]]  # dialect -> what of the config it does not carry
    examples: Sequence[Mapping[str, Value]]

    def speaks(self, dialect: str) -> bool:
        """Whether the family says anything of its own in this dialect."""
        return any(self.entries.get(dialect, {}).values())


# --- reading -------------------------------------------------------------------------------------


@cache
def families() -> Mapping[str, Family]:
    """Every family in schemas/families, by name."""
    return tables.Tables("families", parse_family)


@cache
def model_types() -> Mapping[str, Mapping[str, ModelType]]:
    """The `types` of every family in schemas/families, without the rest of its file."""
    found = tables.names("families")
    return {name: _types(tables.section("families", name, "types")) for name in found}


def _types(rows: Mapping[str, Any]) -> dict[str, ModelType]:
    return {k: ModelType(v["class"], v.get("when")) for k, v in rows.items()}


def parse_family(text: str, where: str) -> Family:
    """The family that a TOML text describes; `where` is the file, for messages.

    Raises FormatError naming the key that is missing or not understood.
    """
    table = tables.parsed(text, where)
    try:
        return _family(table, where)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise FormatError(f"{where}: not a family file: {type(error).__name__}: {error}") from error


_KEYS = {
    "family", "title", "types", "extends", "remove", "defaults", "dims", "indices", "runs",
    "logical", "args", "config", "refuse", "tell", "examples",
}  # fmt: skip


def _family(table: Mapping[str, Any], where: str) -> Family:
    known = dialects()
    unknown = [k for k in table if k not in _KEYS and k not in known]
    if unknown:
        raise FormatError(f"{where}: unknown keys {unknown}; dialects: {', '.join(known)}")
    base = _base(table.get("extends"))
    removed = set(table.get("remove", ()))
    logical = {b: dict(m) for b, m in base.logical.items()}
    entries = {
        d: {b: list(e) for b, e in m.items()} for d, m in base.entries.items() if known[d].inherited
    }
    _forget(logical, entries, removed)
    for block, members in table.get("logical", {}).items():
        for name, row in members.items():
            _take_logical(logical, entries, block, name, dict(row), known)
    for dialect in known:
        for block, members in table.get(dialect, {}).items():
            for name, rows in members.items():
                for row in rows if isinstance(rows, list) else [rows]:
                    _put(entries.setdefault(dialect, {}).setdefault(block, []), entry_of(name, row))
    return Family(
        name=table["family"],
        title=table.get("title", table["family"]),
        types=_types(table["types"]),
        defaults={**base.defaults, **table.get("defaults", {})},
        dims={**base.dims, **table.get("dims", {})},
        indices={**base.indices, **table.get("indices", {})},
        runs=_runs(table.get("runs"), base.runs),
        logical=logical,
        entries=entries,
        args={**base.args, **table.get("args", {})},
        config={**base.config, **table.get("config", {})},
        refuse={
            d: Refusal(r, None) if isinstance(r, str) else Refusal(r["why"], r.get("when"))
            for d, r in table.get("refuse", {}).items()
        },
        tell={
            **base.tell,
            **{
                d: tuple(Refusal(r["why"], r["when"]) for r in rows)
                for d, rows in table.get("tell", {}).items()
            },
        },
        examples=tuple(table["examples"]),
    )


_EMPTY = Family("", "", {}, {}, {}, {}, (), {}, {}, {}, {}, {}, {}, ())


def _base(name: str | None) -> Family:
    if name is None:
        return _EMPTY
    if name not in families():
        raise FormatError(f"extends {name!r}, which is no family")
    return families()[name]


def _runs(rows: Sequence[Mapping[str, Any]] | None, base: Sequence[Run]) -> Sequence[Run]:
    if rows is None:
        return base
    return tuple(
        Run(
            r["name"], r["block"], r.get("over", ""), r.get("count", "1"), r.get("also", {}),
            r.get("prefix", {}), r.get("optional"),
        )
        for r in rows
    )  # fmt: skip


def _forget(
    logical: Mapping[str, dict[str, Logical]],
    entries: Mapping[str, dict[str, list[Entry]]],
    removed: set[str],
) -> None:
    """Take out logical tensors, and every entry that is made of one of them or so named."""
    for members in logical.values():
        for name in removed & members.keys():
            del members[name]
    for blocks in entries.values():
        for block, listed in blocks.items():
            blocks[block] = [
                e for e in listed if e.name not in removed and not removed & set(leaves_of(e.made))
            ]


def _take_logical(
    logical: dict[str, dict[str, Logical]],
    entries: dict[str, dict[str, list[Entry]]],
    block: str,
    name: str,
    row: dict[str, Any],
    known: Mapping[str, Dialect],
) -> None:
    """A logical tensor, with the dialects that store it alone."""
    tensor = Logical(tuple(row.pop("shape")), row.pop("when", None), row.pop("keep", False))
    if name in logical.setdefault(block, {}):  # told anew: where it stood alone is told anew too
        for blocks in entries.values():
            blocks[block] = [e for e in blocks.get(block, ()) if e.made != Leaf(name) or e.spare]
    logical[block][name] = tensor
    for dialect, spelled in row.items():
        if dialect not in known:
            raise FormatError(f"logical tensor {name!r}: {dialect!r} is no dialect")
        for text in [spelled] if isinstance(spelled, str) else spelled:
            _put(entries.setdefault(dialect, {}).setdefault(block, []), Entry(text, Leaf(name)))


def _put(listed: list[Entry], entry: Entry) -> None:
    """Add an entry in place of those of the same name, or made of the same logical tensors.

    Entries of one tensor under several conditions, and spare copies, stand side by side.
    """
    mine = set(leaves_of(entry.made))
    listed[:] = [
        e
        for e in listed
        if entry.spare
        or e.spare
        or e.when != entry.when
        or e.slots != entry.slots
        or not (e.name == entry.name or mine & set(leaves_of(e.made)))
    ]
    listed.append(entry)


_MADE = ("of", "fuse", "turn", "stack", "rope")


def entry_of(name: str, row: str | Mapping[str, Any]) -> Entry:
    """An entry from its TOML value: a logical name, or a table."""
    if isinstance(row, str):
        return Entry(name, Leaf(row))
    known = {*_MADE, "groups", "over", "count", "heads", "when", "spare", "add", "slots"}
    if unknown := [k for k in row if k not in known]:
        raise FormatError(f"{name}: unknown keys {unknown}")
    slots = row.get("slots", "all")
    if slots not in ("all", "weight", "state"):
        raise FormatError(f"{name}: slots = {slots!r}; weight, state or all")
    spare, add = row.get("spare", False), float(row.get("add", 0))
    return Entry(name, _made(row, name), row.get("when"), spare, add, slots)


def _made(row: str | Mapping[str, Any], where: str) -> Made:
    if isinstance(row, str):
        return Leaf(row)
    kinds = [k for k in _MADE if k in row]
    if len(kinds) != 1:
        raise FormatError(f"{where}: one of {', '.join(_MADE)} is expected, not {kinds}")
    inner = row[kinds[0]]
    match kinds[0]:
        case "fuse":
            return Fuse(tuple(_made(p, where) for p in inner), str(row.get("groups", 1)))
        case "turn":
            return Turn(_made(inner, where))
        case "stack":
            return Stack(_made(inner, where), row.get("over", "e"), str(row.get("count", "E")))
        case "rope":
            return Rope(_made(inner, where), str(row["heads"]))
        case _:
            return _made(inner, where)


def leaves_of(made: Made) -> Iterator[str]:
    """The logical names an entry is made of."""
    match made:
        case Leaf(name=name):
            yield name
        case Fuse(parts=parts):
            for part in parts:
                yield from leaves_of(part)
        case Turn(of=of) | Stack(of=of) | Rope(of=of):
            yield from leaves_of(of)


def entries_in(family: Family, dialect: str, block: str) -> list[Entry]:
    """The entries of a dialect, its base's where it is silent about a logical tensor."""
    own = list(family.entries.get(dialect, {}).get(block, ()))
    base = dialects()[dialect].base
    if base is None:
        return own
    told = {leaf for e in own for leaf in leaves_of(e.made)}
    named = {e.name for e in own}
    return own + [
        e
        for e in entries_in(family, base, block)
        if e.name not in named and not told & set(leaves_of(e.made))
    ]


def prefix_in(run: Run, dialect: str) -> str:
    """What stands before a run's names in a dialect: its own, else its base's."""
    at: str | None = dialect
    while at is not None:
        if at in run.prefix:
            return run.prefix[at]
        at = dialects()[at].base
    return ""


# --- dimensions ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scope:
    """A family with one model's config: what the expressions of its file are worth."""

    family: Family
    config: Mapping[str, Value]
    fixed: Mapping[str, Value] = field(default_factory=dict)  # dimensions set from outside
    index: Mapping[str, int] = field(default_factory=dict)  # loop variables
    _known: dict[str, Value] = field(default_factory=dict, repr=False, compare=False)

    def at(self, index: Mapping[str, int]) -> Scope:
        """The same with these loop variables set."""
        return replace(self, index={**self.index, **index}, _known={})

    def fix(self, fixed: Mapping[str, Value]) -> Scope:
        """The same with these dimensions set."""
        return replace(self, fixed={**self.fixed, **fixed}, _known={})

    def __getitem__(self, name: str) -> Value:
        if name in self.index:
            return self.index[name]
        if name in self.fixed:
            return self.fixed[name]
        if name not in self._known:
            self._known[name] = self._look_up(name, frozenset())
        return self._known[name]

    def _look_up(self, name: str, within: frozenset[str]) -> Value:
        """A dimension, else a config key. A dimension that names itself means the config key."""
        if name in self.index:
            return self.index[name]
        if name in self.fixed:
            return self.fixed[name]
        text = self.family.dims.get(name)
        if text is None or name in within:
            found = self.config.get(name)
            return self.family.defaults.get(name) if found is None else found
        return evaluate(text, lambda n: self._look_up(n, within | {name}))

    def value(self, text: str) -> Value:
        """The value of an expression."""
        return evaluate(text, self.__getitem__)

    def holds(self, when: str | None) -> bool:
        """Whether a condition holds; no condition always does."""
        return when is None or bool(self.value(when))

    def count(self, text: str, what: str) -> int:
        """An expression's value as a number of elements. Raises FormatError for anything else."""
        found = self.value(text)
        if isinstance(found, bool) or not isinstance(found, int) or found < 0:
            raise FormatError(
                f"{self.family.name}: {what}: {text} is {found!r}, not a size. The config does not "
                "say it, or is another model's (--config DIR)."
            )
        return found


def sensitive(family: Family, texts: Sequence[str], variables: frozenset[str]) -> frozenset[str]:
    """Which loop variables some expressions look up, directly or through dimensions."""
    seen: set[str] = set()
    queue = [n for t in texts for n in names_in(t)]
    while queue:
        name = queue.pop()
        if name not in seen:
            seen.add(name)
            if name not in variables and name in family.dims:
                queue += names_in(family.dims[name])
    return frozenset(seen & variables)


def spelled(pattern: str, scope: Scope) -> str:
    """A name with its <expressions> put in."""
    return _PLACE.sub(lambda m: str(scope.value(m[1])), pattern)


def pattern(name: str) -> str:
    """A regular expression for every name that `spelled` can make of a pattern."""
    parts = _PLACE.split(name)
    return "".join(r"\d+" if i % 2 else re.escape(p) for i, p in enumerate(parts))
