"""Frozen dataclasses as JSON, and back by their annotations: nothing of another type comes in."""

from __future__ import annotations

import types
from collections.abc import Callable, Container, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from reshard.containers.carried import Carried
from reshard.containers.inert_json import Reader, to_json
from reshard.errors import CorruptError
from reshard.values import Json

#: Values of these are inert objects, kept as inert_json keeps them.
_INERT = (object, bytes)


def encode(value: object) -> Json:
    """A value of dataclasses, mappings, tuples, sets, `Carried` and inert objects, as JSON.

    Raises FormatError for a live object.
    """
    if isinstance(value, Carried):
        return to_json(value.obj, value.values)
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _field(getattr(value, f.name), _hints(type(value))[f.name])
                for f in fields(value)}  # fmt: skip
    return to_json(value)


def _field(value: object, hint: object) -> Json:
    """A field's value, told by its annotation how its parts are kept."""
    hint = _chosen(hint, value)
    origin, args = get_origin(hint), get_args(hint)
    if value is None or hint in _INERT or hint in (bool, int, float, str):
        return to_json(value)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        assert isinstance(value, Mapping)
        return [[_field(k, args[0]), _field(v, args[1])] for k, v in value.items()]
    if origin is tuple:
        assert isinstance(value, tuple)
        return [_field(v, h) for v, h in zip(value, _parts(args, len(value)), strict=True)]
    if origin is frozenset:
        assert isinstance(value, frozenset)
        return [_field(v, args[0]) for v in sorted(value)]
    return encode(value)


def decode(kind: Callable[..., Any], value: object, allowed: Container[str], where: str) -> Any:
    """A dataclass of what `encode` gave; fields that are newer than the state are unset.

    `allowed` are the names that inert objects may mention. Raises CorruptError for a field that is
    missing, unknown or of another type, UnsafeError for a name that is not allowed.
    """
    return _Decoder(allowed, where).made(kind, value)


class _Decoder:
    """Makes values by annotation; counts the objects with storages, which keep them apart."""

    def __init__(self, allowed: Container[str], where: str) -> None:
        self.allowed, self.where, self.count = allowed, where, 0

    def made(self, kind: Callable[..., Any], value: object) -> Any:
        if not isinstance(value, dict):
            return self._refuse(value, f"the fields of a {kind.__name__}")
        known = {f.name: f for f in fields(kind)}  # type: ignore[arg-type]  # only dataclasses come
        strange = sorted(value.keys() - known.keys())
        missing = [
            n for n, f in known.items()
            if n not in value and f.default is MISSING and f.default_factory is MISSING
        ]  # fmt: skip
        if strange or missing:
            raise CorruptError(
                f"{self.where}: a {kind.__name__} "
                + (f"with an unknown field {strange[0]!r}" if strange else f"without {missing[0]}")
            )
        hints = _hints(kind)
        return kind(**{n: self.value(hints[n], v) for n, v in value.items()})

    def value(self, hint: object, value: object) -> Any:
        if _optional(hint) and value is None:
            return None
        hint = _chosen(hint, value)
        origin, args = get_origin(hint), get_args(hint)
        if hint is Carried:
            self.count += 1
            reader = Reader(self.allowed, self.where, f"kept/{self.count}/")
            return Carried(reader.read(value), reader.values)
        if hint in _INERT:
            found = Reader(self.allowed, self.where).read(value)
            return (
                found if hint is object or isinstance(found, bytes) else self._refuse(value, hint)
            )
        if hint in (bool, int, float, str):
            fits = (int, float) if hint is float else (hint,)
            return value if type(value) in fits else self._refuse(value, hint)
        if isinstance(hint, type) and is_dataclass(hint):
            return self.made(hint, value)
        if not isinstance(value, list):
            return self._refuse(value, "a list")
        if origin is tuple:
            hints = _parts(args, len(value))
            if len(hints) != len(value):
                self._refuse(value, f"{len(hints)} values")
            return tuple(self.value(h, v) for h, v in zip(hints, value, strict=True))
        if origin is frozenset:
            return frozenset(self.value(args[0], v) for v in value)
        if any(not isinstance(pair, list) or len(pair) != 2 for pair in value):
            self._refuse(value, "pairs")
        return {self.value(args[0], k): self.value(args[1], v) for k, v in value}

    def _refuse(self, value: object, wanted: object) -> Any:
        said = wanted.__name__ if isinstance(wanted, type) else wanted
        raise CorruptError(f"{self.where}: {value!r:.60} where {said} belongs")


@cache
def _hints(kind: Callable[..., Any]) -> dict[str, Any]:
    return get_type_hints(kind)


def _optional(hint: object) -> bool:
    return get_origin(hint) in (Union, types.UnionType) and type(None) in get_args(hint)


def _chosen(hint: object, value: object) -> object:
    """The annotation without None."""
    if not _optional(hint) or value is None:
        return hint
    (inner,) = (h for h in get_args(hint) if h is not type(None))
    return inner


def _parts(args: tuple[Any, ...], n: int) -> tuple[Any, ...]:
    """The annotations of a tuple's n values."""
    return args[:1] * n if len(args) == 2 and args[1] is Ellipsis else args
