"""Inert values as typed JSON, and back: no pickle is kept, and no name outside a list comes back.

What JSON has stands for itself; everything else is an object with one key that starts with "$":
{"$tuple": […]}, {"$bytes": base64}, {"$float": hex bits}, {"$record": [module, name], "args": …}.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Callable, Container, Mapping, Sequence
from math import isfinite, prod

import numpy as np

from reshard.containers.inert import Global, Ordered, Record, TensorRef, interned, new_tensor
from reshard.dtypes import named
from reshard.errors import CorruptError, FormatError, UnsafeError
from reshard.values import Json

_DEEP = 100  # levels; an object that holds itself has no end
_PARTS = ("args", "state", "items", "kwargs")


def to_json(value: object, values: Mapping[str, bytes] | None = None, *, deep: int = 0) -> Json:
    """An inert value as JSON. `values` are the bytes of the storages its tensors name.

    Raises FormatError for what is neither JSON nor inert, and for a value that holds itself.
    """
    if deep > _DEEP:
        raise FormatError(f"a value is nested more than {_DEEP} deep; it may hold itself")

    def inner(part: object) -> Json:
        return to_json(part, values, deep=deep + 1)

    if value is None or type(value) in (bool, int, str):
        return value  # type: ignore[return-value]  # one of the four
    if isinstance(value, Global):
        return {"$global": [value.module, value.name]}
    match value:
        case float():
            bits = struct.pack(">d", value).hex()
            return value if isfinite(value) else {"$float": bits}
        case complex():
            return {"$complex": [inner(value.real), inner(value.imag)]}
        case bytes() | bytearray():
            return {f"${type(value).__name__}": base64.b64encode(value).decode()}
        case Ordered():
            pairs = [[inner(k), inner(v)] for k, v in value.items()]
            return {"$ordered": pairs, "state": inner(value.state)}
        case dict():
            if all(type(k) is str and not k.startswith("$") for k in value):
                return {k: inner(v) for k, v in value.items()}
            return {"$dict": [[inner(k), inner(v)] for k, v in value.items()]}
        case list():
            return [inner(v) for v in value]
        case tuple() | set() | frozenset():
            return {f"${type(value).__name__}": [inner(v) for v in _ordered(value)]}
        case Record():
            return _record(value, inner)
        case TensorRef():
            return _tensor(value, values or {})
    raise FormatError(f"a live {type(value).__name__} cannot be kept as JSON")


def _ordered(value: Sequence[object] | set[object] | frozenset[object]) -> list[object]:
    return sorted(value, key=repr) if isinstance(value, set | frozenset) else list(value)


def _record(value: Record, inner: Callable[[object], Json]) -> Json:
    parts = {name: getattr(value, name) for name in _PARTS}
    kept = {name: inner(part) for name, part in parts.items() if part is not None}
    if value.pairs is not None:
        kept["pairs"] = [[inner(k), inner(v)] for k, v in value.pairs]
    return {"$record": [value.type.module, value.type.name], "made": value.made, **kept}


def _tensor(value: TensorRef, values: Mapping[str, bytes]) -> Json:
    held = values.get(value.key)
    if held is None:
        raise FormatError(f"the bytes of a tensor {list(value.shape)} {value.dtype.name} are away")
    item = value.dtype.itemsize
    strides = [s * item for s in value.stride]
    raw = np.ndarray(value.shape, value.dtype.numpy, held, value.offset * item, strides)
    return {
        "$tensor": value.dtype.name,
        "shape": list(value.shape),
        "data": base64.b64encode(np.ascontiguousarray(raw).tobytes()).decode(),
    }


class Reader:
    """Typed JSON made into inert values; `values` grows by the bytes of the tensors met."""

    def __init__(self, allowed: Container[str], where: str, prefix: str = "") -> None:
        self.allowed, self.where, self.prefix = allowed, where, prefix
        self.values: dict[str, bytes] = {}

    def read(self, value: object) -> object:
        """The value. Raises CorruptError for a form not known, UnsafeError for a name not on the
        list."""
        if isinstance(value, list):
            return [self.read(v) for v in value]
        if not isinstance(value, dict):
            return value
        tag = next((k for k in value if k.startswith("$")), None)
        if tag is None:
            return {k: self.read(v) for k, v in value.items()}
        try:
            return self._tagged(tag, value[tag], value)
        except (TypeError, ValueError, KeyError, AttributeError, struct.error) as error:
            raise CorruptError(f"{self.where}: {tag} is damaged ({error!r})") from None

    def _tagged(self, tag: str, body: object, whole: Mapping[str, object]) -> object:
        match tag, body:
            case "$global", [str() as module, str() as name]:
                return self._name(module, name)
            case "$float", str():
                return struct.unpack(">d", bytes.fromhex(body))[0]
            case "$complex", [re, im]:
                return complex(self._number(re), self._number(im))
            case (("$bytes" | "$bytearray"), str()):
                raw = base64.b64decode(body, validate=True)
                return raw if tag == "$bytes" else bytearray(raw)
            case "$ordered", list():
                return Ordered(self._pairs(body), self.read(whole.get("state")))
            case "$dict", list():
                return dict(self._pairs(body))
            case (("$tuple" | "$set" | "$frozenset"), list()):
                made = (self.read(v) for v in body)
                return {"$tuple": tuple, "$set": set, "$frozenset": frozenset}[tag](made)
            case "$record", [str() as module, str() as name]:
                return self._record(self._name(module, name), whole)
            case "$tensor", str():
                return self._tensor(body, whole)
        raise CorruptError(f"{self.where}: {tag} is no form of value that is known")

    def _number(self, value: object) -> float:
        found = self.read(value)
        if not isinstance(found, int | float):
            raise TypeError(f"{found!r:.40} is no number")
        return float(found)

    def _pairs(self, body: Sequence[object]) -> list[tuple[object, object]]:
        out = []
        for pair in body:
            if not isinstance(pair, list) or len(pair) != 2:
                raise ValueError(f"{pair!r:.40} is no pair")
            out.append((self.read(pair[0]), self.read(pair[1])))
        return out

    def _name(self, module: str, name: str) -> Global:
        found = interned(module, name)
        if found.path not in self.allowed:
            raise UnsafeError(
                f"{self.where}: names {found.path}, which is not on the list of what may be "
                "written again. The state was changed by hand, or by a newer reshard."
            )
        return found

    def _record(self, kind: Global, whole: Mapping[str, object]) -> Record:
        args, kwargs = self.read(whole.get("args")), self.read(whole.get("kwargs"))
        made, items = whole.get("made"), self.read(whole.get("items"))
        if not isinstance(args, tuple) or made not in ("reduce", "newobj"):
            raise ValueError(f"{kind.path} has arguments {args!r:.40}, made by {made!r:.40}")
        if not isinstance(kwargs, dict | None) or not isinstance(items, list | None):
            raise TypeError(f"{kind.path} has keywords {kwargs!r:.40} and items {items!r:.40}")
        record = Record(kind, args, kwargs, str(made), self.read(whole.get("state")))
        record.items = items
        pairs = whole.get("pairs")
        if pairs is not None:
            record.pairs = self._pairs(pairs if isinstance(pairs, list) else [pairs])
        return record

    def _tensor(self, dtype: str, whole: Mapping[str, object]) -> TensorRef:
        shape, data = whole["shape"], whole["data"]
        if not isinstance(shape, list) or any(type(n) is not int or n < 0 for n in shape):
            raise ValueError(f"{shape!r:.40} is no shape")
        raw, kind = base64.b64decode(str(data), validate=True), named(dtype)
        if len(raw) != prod(shape) * kind.itemsize:
            raise ValueError(f"{len(raw)} bytes for a tensor {shape} {dtype}")
        key = f"{self.prefix}{len(self.values)}"
        self.values[key] = raw
        return new_tensor(tuple(shape), kind, key)
