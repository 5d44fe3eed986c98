"""Which leaves are parameters, which are optimizer state, options or steps, and what is left."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from reshard.containers.carried import Carried
from reshard.containers.inert import Record, unread_tensor
from reshard.errors import CorruptError, FormatError

from .leaves import Leaf, ObjectLeaf, TensorLeaf, dotted
from .names import Spelling, spelling
from .values import Path, renamed

#: Names under which training scripts keep a model, the likeliest first.
#: Source: fixtures in fixtures/dcp; PyTorch DCP tutorials; Composer's `state.model`.
_MODELS = ("model", "state_dict", "model_state_dict", "module", "app", "net", "network")
_STATE, _GROUPS = "state", "param_groups"
_EXTRA_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class StateEntry:
    """One entry of an optimizer's state: of which parameter, called what, in which optimizer."""

    container: Path
    parameter: str | int
    name: str
    leaf: Leaf


@dataclass(frozen=True, slots=True)
class Group:
    """One parameter group: its options as stored, and its members' stored names or numbers."""

    container: Path
    options: Mapping[str, Carried]
    members: tuple[str | int, ...]


@dataclass
class Roles:
    """The leaves of a checkpoint, sorted by what they are."""

    model: Path = ()
    spelling: Spelling = field(default_factory=Spelling)
    parameters: dict[str, TensorLeaf] = field(default_factory=dict)  # by canonical name
    state: list[StateEntry] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    extras: list[Leaf] = field(default_factory=list)
    containers: tuple[Path, ...] = ()  # of optimizers
    flat: bool = False  # whether optimizer keys are `state.<fqn>.<name>` in one component
    others: dict[str, Path] = field(default_factory=dict)  # parameters outside the model, by name


def sort_leaves(leaves: Sequence[Leaf], *, lightning: bool = False) -> Roles:
    """Sort the leaves of a state dict.

    An optimizer is what has param_groups beside its state; the model is the container whose names
    the optimizer knows, else the one with a usual name.
    """
    roles = Roles()
    for leaf in leaves:
        _refuse_unread(leaf)
    roles.containers = tuple(
        dict.fromkeys(c for leaf in leaves if (c := _groups_of(leaf)) is not None)
    )
    rest: list[Leaf] = []
    options: dict[tuple[Path, str | int], dict[str, Carried]] = {}
    parts: dict[Path, dict[Path, Carried]] = {}
    whole: list[tuple[Path, Carried]] = []
    for leaf in leaves:
        container = next((c for c in roles.containers if leaf.path[: len(c)] == c), None)
        at = None if container is None else _option_of(leaf, container)
        if at is not None and isinstance(leaf, ObjectLeaf):
            parts.setdefault(leaf.path[:at], {})[leaf.path[at:]] = leaf.value
        elif container is None or not _take(leaf, container, roles, options, whole):
            rest.append(leaf)
    for path, held in parts.items():
        container = next(c for c in roles.containers if path[: len(c)] == c)
        _take(ObjectLeaf(path, nested(held)), container, roles, options, whole)
    for container, value in whole:
        roles.groups += _listed_groups(container, value)
    roles.groups += _groups(options)
    if any(isinstance(m, int) for g in roles.groups for m in g.members):
        roles.state = [_numbered(entry) for entry in roles.state]
    _take_model(rest, roles, lightning)
    return roles


_MODULE = {"_parameters", "_buffers", "_modules"}  # fields of a torch.nn.Module


def _refuse_unread(leaf: Leaf) -> None:
    """Raises FormatError for a tensor or a module that is kept as code: its values have no name."""
    where = dotted(leaf.path) or "the file"
    value = leaf.value.obj if isinstance(leaf, ObjectLeaf) and not leaf.file else None
    if isinstance(value, Record) and value.fields.keys() >= _MODULE:
        raise FormatError(
            f"{where}: a whole module was pickled ({value.type.path}), not its state dict, and "
            "code of a pickle is never run. Save module.state_dict()."
        )
    if not leaf.path:
        raise FormatError("the file holds one value, and no state dict that names tensors")
    unread = unread_tensor(value)
    if unread is not None:
        raise FormatError(f"{where}: {unread}")


def _numbered(entry: StateEntry) -> StateEntry:
    """The entry by its number, which DCP spells as text (torch 2.13 _traverse.py)."""
    if isinstance(entry.parameter, str) and entry.parameter.isdecimal():
        return replace(entry, parameter=int(entry.parameter))
    return entry


def _groups_of(leaf: Leaf) -> Path | None:
    """The optimizer that a leaf shows by being a part of its param_groups."""
    for i, part in enumerate(leaf.path):
        if part == _GROUPS or (isinstance(part, str) and part.startswith(f"{_GROUPS}.")):
            return leaf.path[:i]
    return None


def is_option(leaf: TensorLeaf) -> bool:
    """Whether a tensor is an option of a parameter group."""
    return prod(leaf.shape) == 1 and _groups_of(leaf) is not None


def _option_of(leaf: Leaf, container: Path) -> int | None:
    """Where the path of the option ends that this is a part of, as torch descends into dicts.

    None for what is none; a value that differs between ranks ends in the rank.
    """
    first = leaf.path[len(container)] if len(leaf.path) > len(container) else None
    flat = isinstance(first, str) and first.startswith(f"{_GROUPS}.")
    at = len(container) + (3 if first == _GROUPS else 1)
    if not flat and first != _GROUPS:
        return None
    inside = leaf.path[at:]
    return None if not inside or re.fullmatch(r"rank\d+", str(inside[-1])) else at


def nested(parts: Mapping[Path, Carried]) -> Carried:
    """The dict or list of which these are the leaves; numbers of a path count a list's items."""
    values: dict[str, bytes] = {}
    root: dict[str | int, object] = {}
    for path, value in parts.items():
        at = root
        for part in path[:-1]:
            inner = at.setdefault(part, {})
            if not isinstance(inner, dict):
                raise CorruptError(f"{dotted(path)}: a part of what is no dict")
            at = inner
        at[path[-1]] = _Leaf(renamed(value, len(values), values))
    return Carried(_listed(root), values)


@dataclass(frozen=True, slots=True)
class _Leaf:
    value: object


def _listed(value: object) -> object:
    """The tree with lists where all keys are the numbers of a list's items."""
    if isinstance(value, _Leaf):
        return value.value
    assert isinstance(value, dict)
    if all(type(k) is int for k in value) and sorted(value) == list(range(len(value))):
        return [_listed(value[i]) for i in range(len(value))]
    return {k: _listed(v) for k, v in value.items()}


def _take(
    leaf: Leaf,
    container: Path,
    roles: Roles,
    options: dict[tuple[Path, str | int], dict[str, Carried]],
    whole: list[tuple[Path, Carried]],
) -> bool:
    """Sort in a leaf of an optimizer; False if it is neither state nor option."""
    path = leaf.path[len(container) :]
    match path:
        case ("state", (str() | int()) as parameter, str() as name):
            roles.state.append(StateEntry(container, parameter, name, leaf))
        case (str() as joined,) if joined.startswith(f"{_STATE}."):
            parameter, _, name = joined[len(_STATE) + 1 :].rpartition(".")
            roles.state.append(StateEntry(container, parameter, name, leaf))
            roles.flat = True
        case ("param_groups", (str() | int()) as group, str() as name) if isinstance(
            leaf, ObjectLeaf
        ):
            options.setdefault((container, group), {})[name] = leaf.value
        case ("param_groups",) if isinstance(leaf, ObjectLeaf):
            whole.append((container, leaf.value))
        case (str() as joined,) if joined.startswith(f"{_GROUPS}.") and isinstance(
            leaf, ObjectLeaf
        ):
            parameter, _, name = joined[len(_GROUPS) + 1 :].rpartition(".")
            options.setdefault((container, parameter), {})[name] = leaf.value
            roles.flat = True
        case _:
            return False
    return True


def _listed_groups(container: Path, value: Carried) -> list[Group]:
    """Groups kept as one list: torch < 2.4 did not descend into it, and pickles hold it so."""
    if not isinstance(value.obj, list):
        raise CorruptError(f"{dotted(container)}.param_groups is no list")
    found = []
    for item in value.obj:
        if not isinstance(item, Mapping):
            raise CorruptError(f"{dotted(container)}.param_groups holds no dict but {item!r:.60}")
        held = {str(k): Carried(v, value.values) for k, v in item.items()}
        members = _members(container, held.pop("params", Carried([])))
        found.append(Group(container, held, members))
    return found


def _groups(options: Mapping[tuple[Path, str | int], dict[str, Carried]]) -> list[Group]:
    """Groups kept option by option: by number, or by parameter with equal ones made one group."""
    numbered: list[tuple[int, Group]] = []
    by_value: dict[str, tuple[Path, dict[str, Carried], list[str | int]]] = {}
    for (container, group), held in options.items():
        if isinstance(group, int):
            rest = {k: v for k, v in held.items() if k != "params"}
            members = _members(container, held.get("params", Carried([])))
            numbered.append((group, Group(container, rest, members)))
            continue
        shown = repr((container, sorted((k, repr(v.obj), v.values) for k, v in held.items())))
        by_value.setdefault(shown, (container, held, []))[2].append(group)
    found = [group for _, group in sorted(numbered, key=lambda item: item[0])]
    found += [Group(c, held, tuple(members)) for c, held, members in by_value.values()]
    return found


def _members(container: Path, value: Carried) -> tuple[str | int, ...]:
    listed = value.obj
    if not isinstance(listed, list | tuple) or not all(type(m) in (str, int) for m in listed):
        raise CorruptError(f"{dotted(container)}.param_groups: params is {listed!r:.80}")
    return tuple(listed)


# ---------------------------------------------------------------------- the model


def _take_model(rest: Sequence[Leaf], roles: Roles, lightning: bool) -> None:
    """Sort what is not an optimizer's: the model's parameters, others, extras."""
    known = {str(e.parameter) for e in roles.state if isinstance(e.parameter, str)}
    known |= {m for g in roles.groups for m in g.members if isinstance(m, str)}
    candidates: dict[Path, list[TensorLeaf]] = {}
    for leaf in rest:
        if isinstance(leaf, TensorLeaf) and isinstance(leaf.path[-1], str):
            candidates.setdefault(leaf.path[:-1], []).append(leaf)
    roles.model = _model(candidates, known)
    inside = candidates.get(roles.model, [])
    roles.spelling = spelling([str(leaf.path[-1]) for leaf in inside], lightning=lightning)
    mine = {id(leaf) for leaf in inside}
    for leaf in rest:
        if isinstance(leaf, ObjectLeaf):
            roles.extras.append(leaf)
        elif id(leaf) in mine:
            _add(roles, roles.spelling.canonical(str(leaf.path[-1])), leaf)
        elif _is_extra(leaf):
            roles.extras.append(leaf)
        else:
            name = dotted(leaf.path)
            roles.others[name] = leaf.path
            _add(roles, name, leaf)


def _add(roles: Roles, name: str, leaf: TensorLeaf) -> None:
    other = roles.parameters.get(name)
    if other is not None:
        raise FormatError(
            f"{dotted(leaf.path)} and {dotted(other.path)} are both {name} once wrappers are "
            "stripped; which one is meant cannot be told"
        )
    roles.parameters[name] = leaf


def _model(candidates: Mapping[Path, Sequence[TensorLeaf]], known: Iterable[str]) -> Path:
    """The container of the model. Raises FormatError if none is likelier than the others."""
    bare = Spelling(parallel=True)
    wanted = {bare.canonical(name) for name in known}
    matches = Counter(
        {
            path: sum(bare.canonical(str(leaf.path[-1])) in wanted for leaf in leaves)
            for path, leaves in candidates.items()
        }
    )
    best = matches.most_common(2)
    if best and best[0][1] and (len(best) == 1 or best[0][1] > best[1][1]):
        return best[0][0]
    tied = {path for path, n in best if best and n == best[0][1]} if best and best[0][1] else None
    real = {
        path: leaves
        for path, leaves in candidates.items()
        if any(not _is_extra(leaf) for leaf in leaves) and (tied is None or path in tied)
    }
    if len(real) == 1:
        return next(iter(real))
    for name in _MODELS:
        named = [path for path in real if path and path[-1] == name]
        if len(named) == 1:
            return named[0]
    return ()


def _is_extra(leaf: TensorLeaf) -> bool:
    """Whether a tensor outside the model is state: an RNG state, a counter."""
    size = prod(leaf.shape) * leaf.dtype.itemsize
    return size <= _EXTRA_BYTES and (not leaf.dtype.floating or not leaf.shape)
