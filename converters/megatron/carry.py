"""Small carried objects numbered, shown as JSON, or taken apart with an error that says where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from reshard.checkpoint import Json
from reshard.containers.carried import Carried, replaced
from reshard.containers.inert import Global, Record, TensorRef, new_tensor
from reshard.dtypes import named
from reshard.errors import CorruptError, FormatError


def numbered(obj: object) -> tuple[object, dict[str, str]]:
    """The same tree with storages keyed "0", "1", … in order, and old key -> new key."""
    keys: dict[str, str] = {}

    def number(ref: TensorRef) -> TensorRef:
        return replace(ref, key=keys.setdefault(ref.key, str(len(keys))))

    return replaced(obj, number), keys


def tensor_of(data: bytes, dtype: str, key: str, shape: tuple[int, ...] | None = None) -> Carried:
    """A tensor of these bytes."""
    kind = named(dtype)
    return Carried(
        new_tensor((len(data) // kind.itemsize,) if shape is None else shape, kind, key),
        {key: data},
    )


def scalar(carried: Carried, value: object) -> float | None:
    """A number, given as one or as a 0-d tensor of `carried`."""
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        return float(value)
    if isinstance(value, TensorRef) and value.shape in ((), (1,)) and value.key in carried.values:
        array = np.frombuffer(carried.values[value.key], value.dtype.numpy)
        return float(array.astype(np.float64)[0])
    return None


def plain(value: object) -> Json:
    """A value as JSON shows it; what is not JSON is named, not copied."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else str(value)
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(v) for v in value]
    if isinstance(value, Global):
        return value.path
    if isinstance(value, Record):
        shown = ", ".join(str(plain(a)) for a in value.args)
        return f"{value.type.name}({shown})"
    if isinstance(value, TensorRef):
        return f"tensor {list(value.shape)} {value.dtype.name}"
    if isinstance(value, (bytes, bytearray)):
        return f"{len(value)} bytes"
    return type(value).__name__


def fields_of(value: object, where: str) -> dict[str, object]:
    """The fields of an argparse.Namespace as a pickle described it."""
    if isinstance(value, Record):
        return {str(k): v for k, v in value.fields.items()}
    if isinstance(value, Mapping):
        return {str(k): v for k, v in value.items()}
    raise FormatError(f"{where}: args are {plain(value)}, not a Namespace")


def sequence(value: object, where: str) -> Sequence[object]:
    """A list or tuple, or a CorruptError saying where one is missing."""
    if isinstance(value, (list, tuple)):
        return value
    raise CorruptError(f"{where}: a list is expected, found {plain(value)}")


def mapping(value: object, where: str) -> Mapping[object, object]:
    """A dict, or a CorruptError saying where one is missing."""
    if isinstance(value, Mapping):
        return value
    raise CorruptError(f"{where}: a dict is expected, found {plain(value)}")
