"""Small values beside tensors: carried with their bytes, shown as JSON, told apart from code."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from math import prod

import numpy as np

from reshard.checkpoint import Json
from reshard.containers.carried import Carried, replaced
from reshard.containers.inert import (
    Global,
    Record,
    TensorRef,
    globals_in,
    new_tensor,
    tensors_in,
)
from reshard.containers.pickler import TORCH
from reshard.dtypes import DType

#: The place of a value in a nested state dict.
Path = tuple[str | int, ...]

#: Globals that may be written again beside torch's own: numpy arrays, as RNG states hold them.
#: Source: fixtures accelerate_fsdp2_w2_sharded/random_states_0.pkl, verl_fsdp2_w4/extra_state.
ALLOWED = frozenset(
    f"{module}.{name}"
    for module, names in (
        ("numpy", ("ndarray", "dtype")),
        ("numpy.core.multiarray", ("_reconstruct", "scalar")),
        ("numpy._core.multiarray", ("_reconstruct", "scalar")),
        ("numpy._core.numeric", ("_frombuffer",)),
    )
    for name in names
)


def tensor(data: bytes, shape: tuple[int, ...], dtype: DType) -> Carried:
    """A tensor of these bytes."""
    return Carried(new_tensor(shape, dtype, "0"), {"0": data})


def own_values(part: Carried) -> dict[str, bytes]:
    """The bytes of the storages that the object itself names, where more are carried."""
    return {ref.key: part.values[ref.key] for ref in tensors_in(part.obj)}


def renamed(part: Carried, first: int, values: dict[str, bytes]) -> object:
    """The object with its storages numbered from `first` on; their bytes go to `values`."""
    keys: dict[str, str] = {}

    def number(ref: TensorRef) -> TensorRef:
        new = keys.get(ref.key)
        if new is None:
            new = keys[ref.key] = str(first + len(keys))
            values[new] = part.values[ref.key]
        return replace(ref, key=new)

    return replaced(part.obj, number)


def strangers(obj: object) -> list[str]:
    """The globals in a tree that are never written again, by dotted name."""
    return sorted({g.path for g in globals_in(obj)} - TORCH - ALLOWED)


def scalar(part: Carried) -> float | None:
    """A number, given as one or as a tensor of one element."""
    value = part.obj
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value)
    if isinstance(value, TensorRef) and prod(value.shape) == 1 and value.key in part.values:
        array = np.frombuffer(part.values[value.key], value.dtype.numpy)
        return float(array.astype(np.float64)[0])
    return None


_LONG = 64


def plain(part: Carried) -> Json:
    """A value as JSON shows it. Bytes, tensors and long lists are shown by a digest."""
    return _plain(part.obj, part.values)


def _plain(value: object, values: Mapping[str, bytes]) -> Json:
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if value == value and abs(value) != float("inf") else str(value)
        case Mapping():
            return {str(k): _plain(v, values) for k, v in value.items()}
        case list() | tuple() if len(value) > _LONG:
            return f"{len(value)} values, {_digest(repr(value).encode())}"
        case list() | tuple():
            return [_plain(v, values) for v in value]
        case set() | frozenset():
            return sorted(str(_plain(v, values)) for v in value)
        case Global():
            return value.path
        case TensorRef():
            held = values.get(value.key)
            if held is not None and prod(value.shape) == 1:
                return scalar(Carried(value, values))
            shown = f"tensor {list(value.shape)} {value.dtype.name}"
            return shown if held is None else f"{shown}, {_digest(held)}"
        case bytes() | bytearray():
            return f"{len(value)} bytes, {_digest(bytes(value))}"
        case Record():
            shown = ", ".join(str(_plain(a, values)) for a in value.args)
            state = "" if value.state is None else f", {_plain(value.state, values)}"
            return f"{value.type.path}({shown}){state}"
    return type(value).__name__


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def flattened(part: Carried, path: str) -> dict[str, Json]:
    """The leaves of nested dicts by dotted path, as JSON shows them."""
    if isinstance(part.obj, Mapping) and part.obj:
        out: dict[str, Json] = {}
        for key, value in part.obj.items():
            out |= flattened(Carried(value, part.values), f"{path}.{key}" if path else str(key))
        return out
    return {path: plain(part)}
