"""Small objects of torch files with their tensors' bytes, so that they can be written anywhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod

import numpy as np

from reshard.containers.inert import Ordered, Record, TensorRef, new_tensor, tensors_in
from reshard.containers.torchfile import TorchFile
from reshard.errors import CorruptError

_SMALL = 64 << 20  # bytes: what is carried is state, not a model


@dataclass(frozen=True, slots=True)
class Carried:
    """An inert object; `values` are the bytes of the storages its tensors name."""

    obj: object
    values: Mapping[str, bytes] = field(default_factory=dict)


def carry(file: TorchFile, obj: object, prefix: str = "") -> Carried:
    """`obj`, found in `file`, with every tensor's bytes under keys that start with `prefix`.

    Raises CorruptError if they are too many to be state.
    """
    size = sum(prod(r.shape) * r.dtype.itemsize for r in tensors_in(obj))
    if size > _SMALL:
        raise CorruptError(f"{file.path}: {size:,} bytes of tensors where small state is expected")
    values: dict[str, bytes] = {}

    def take(ref: TensorRef) -> TensorRef:
        key = f"{prefix}{len(values)}"
        values[key] = np.ascontiguousarray(file.read(ref)).tobytes()
        return new_tensor(ref.shape, ref.dtype, key)

    return Carried(replaced(obj, take), values)


def replaced(obj: object, change: Callable[[TensorRef], object]) -> object:
    """The same tree with every tensor changed; containers keep their types."""
    if isinstance(obj, TensorRef):
        return change(obj)
    if isinstance(obj, Ordered):
        return Ordered(((k, replaced(v, change)) for k, v in obj.items()), obj.state)
    if isinstance(obj, dict):
        return {k: replaced(v, change) for k, v in obj.items()}
    if isinstance(obj, list):
        return [replaced(v, change) for v in obj]
    if isinstance(obj, tuple):
        return tuple(replaced(v, change) for v in obj)
    if isinstance(obj, Record) and tensors_in(obj):
        made = Record(obj.type, tuple(replaced(a, change) for a in obj.args), obj.kwargs, obj.made)
        made.state = replaced(obj.state, change)
        made.items, made.pairs = obj.items, obj.pairs
        return made
    return obj
