"""Random states for ranks that the source did not have: from step and rank, never step 0 again."""

from __future__ import annotations

import hashlib
import random
from math import prod

import numpy as np

from reshard.containers.carried import Carried
from reshard.containers.generator import TORCH_BYTES, torch_state
from reshard.containers.inert import Ordered, Record, TensorRef, new_tensor
from reshard.errors import FormatError

#: Bytes of a CUDA generator's state: seed and Philox offset.
CUDA_BYTES = 16


def seed_of(step: int, stream: str, rank: int) -> int:
    """A 63-bit seed that differs by step, stream and rank."""
    text = f"{step}/{stream}/rank{rank}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def numpy_state(seed: int, like: object) -> tuple[object, ...]:
    """numpy.random.get_state() of a generator with this seed, spelled as another state is.

    numpy 1 and 2 pickle arrays under other module names, and trainers allow those of their own.
    """
    kind, keys, position, has_gauss, gauss = np.random.RandomState(seed % 2**32).get_state()
    values = np.asarray(keys, np.uint32)
    if not isinstance(like, Record) or not isinstance(like.state, tuple) or len(like.state) != 5:
        raise FormatError("a numpy random state of an unknown form cannot be derived")
    array = Record(like.type, like.args, made=like.made)
    version, _, dtype, order, _ = like.state
    array.state = (version, values.shape, dtype, order, values.tobytes())
    return (kind, array, position, has_gauss, gauss)


def derived(like: Carried, step: int, rank: int, prefix: str = "new/") -> Carried:
    """A rank's state file in the form of another's, every stream of it made anew."""
    values: dict[str, bytes] = {}

    def change(value: object, stream: str) -> object:
        if isinstance(value, TensorRef):
            return _tensor(value, like.values, seed_of(step, stream, rank), values, prefix)
        if isinstance(value, Ordered):
            return Ordered((k, change(v, f"{stream}.{k}")) for k, v in value.items())
        if isinstance(value, dict):
            return {k: change(v, f"{stream}.{k}") for k, v in value.items()}
        if isinstance(value, list):
            return [change(v, f"{stream}.{i}") for i, v in enumerate(value)]
        if isinstance(value, tuple) and value[:1] == ("MT19937",):
            return numpy_state(seed_of(step, stream, rank), value[1])
        if isinstance(value, tuple) and len(value) == 3 and value[0] == 3:
            return random.Random(seed_of(step, stream, rank)).getstate()
        return value

    return Carried(change(like.obj, "rng"), values)


def _tensor(
    ref: TensorRef,
    held: dict[str, bytes] | object,
    seed: int,
    values: dict[str, bytes],
    prefix: str,
) -> TensorRef:
    size = prod(ref.shape) * ref.dtype.itemsize
    key = f"{prefix}{len(values)}"
    if size == TORCH_BYTES:
        values[key] = torch_state(seed)
    elif size == CUDA_BYTES:
        values[key] = seed.to_bytes(8, "little") + bytes(8)
    else:
        assert isinstance(held, dict)
        values[key] = held[ref.key]
    return new_tensor(ref.shape, ref.dtype, key)
