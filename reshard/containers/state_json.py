"""Param groups and other plain values as JSON proper, and back: what our own files keep of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from reshard.containers.inert_json import Reader, to_json
from reshard.errors import CorruptError
from reshard.values import Json

#: A group as it is kept: its options, and the names of its tensors.
Kept = tuple[Mapping[str, Json], tuple[str, ...]]


def strict(value: Json) -> Json:
    """The value as JSON proper, which has no NaN and no infinity; `loose` gives it back."""
    return to_json(_plain(value))


def loose(value: object, where: Path) -> Any:
    """What `strict` was given, tuples as lists."""
    return Reader((), str(where)).read(value)


def _plain(value: Json) -> object:
    """The same with dicts and lists alone."""
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(v) for v in value]
    return value


def kept_groups(groups: Sequence[Kept], names: Collection[str]) -> list[Json]:
    """(options, members) of every group as JSON, with those members that are among `names`."""
    return [
        {"options": strict(options), "members": [n for n in members if n in names]}
        for options, members in groups
    ]


def read_groups(listed: Any, where: Path) -> list[Kept]:
    """What `kept_groups` gave. Raises CorruptError for a member that is no name."""
    if any(not isinstance(name, str) for g in listed for name in g["members"]):
        raise CorruptError(f"{where}: a param group names what is no tensor")
    return [(loose(g["options"], where), tuple(g["members"])) for g in listed]
