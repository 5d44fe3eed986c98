"""The TOML files of families and dialects, read one by one as they are asked for."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from reshard.errors import FormatError

T = TypeVar("T")


def root() -> Path:
    """Where schemas/ is installed."""
    return Path(import_module("reshard.schemas").__path__[0])


@cache
def names(folder: str) -> tuple[str, ...]:
    """The files of `families` or `dialects`, without suffix, in order."""
    return tuple(sorted(p.stem for p in (root() / folder).iterdir() if p.suffix == ".toml"))


@cache
def text(folder: str, name: str) -> str:
    """What the file of this name holds."""
    return (root() / folder / f"{name}.toml").read_text(encoding="utf-8")


def parsed(text: str, where: str) -> dict[str, Any]:
    """A TOML text as a table. Raises FormatError naming `where` it is from."""
    import tomllib

    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise FormatError(f"{where}: not TOML: {error}") from error


def section(folder: str, name: str, key: str) -> dict[str, Any]:
    """One table at the top of a file, without the rest of it where it stands under its header."""
    whole = text(folder, name)
    found = re.search(rf"^\[{key}\]\n(?:(?!\[).*\n?)*", whole, re.MULTILINE)
    found_in: dict[str, Any] = parsed(found[0] if found else whole, name)[key]
    return found_in


class Tables(Mapping[str, T]):
    """The files of a folder by name, each made into a T when it is first asked for."""

    def __init__(self, folder: str, make: Callable[[str, str], T]) -> None:
        self._folder = folder
        self._make = make
        self._made: dict[str, T] = {}

    def __getitem__(self, name: str) -> T:
        if name not in self._made:
            if name not in self:
                raise KeyError(name)
            self._made[name] = self._make(text(self._folder, name), name)
        return self._made[name]

    def __contains__(self, name: object) -> bool:
        return name in names(self._folder)

    def __iter__(self) -> Iterator[str]:
        return iter(names(self._folder))

    def __len__(self) -> int:
        return len(names(self._folder))
