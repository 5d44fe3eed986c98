"""Random states of a rank: kept for the same rank set, else derived from seed, step and rank."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from reshard.containers.generator import torch_state
from reshard.containers.inert import Global, Record

#: Streams of Megatron's tracker. Source: megatron/core/tensor_parallel/random.py @ core_v0.16.1.
TRACKER = ("data-parallel-rng", "model-parallel-rng", "expert-parallel-rng")


@dataclass(frozen=True, slots=True)
class RankOfRng:
    """The coordinates that a random state is derived for."""

    pp: int
    tp: int
    dp: int = 0
    ep: int = 0


def seed_of(seed: int, step: int, stream: str, rank: RankOfRng) -> int:
    """A 63-bit seed that differs by stream, rank and step: step 0 is never replayed.

    The data-parallel stream does not depend on tp, as in Megatron, whose tensor-parallel ranks
    draw equal dropout masks for what they hold in common.
    """
    tp = "-" if stream in ("data-parallel-rng", "torch", "numpy", "python", "cuda") else rank.tp
    ep = rank.ep if stream == "expert-parallel-rng" else "-"
    text = f"{seed}/{step}/{stream}/pp{rank.pp}/tp{tp}/dp{rank.dp}/ep{ep}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def cuda_state(seed: int) -> bytes:
    """A CUDA generator's 16 bytes: seed and Philox offset, little-endian.

    Source: torch 2.13 aten/src/ATen/cuda/CUDAGeneratorImpl.cpp, get_state.
    """
    return seed.to_bytes(8, "little") + bytes(8)


def python_state(seed: int) -> tuple[object, ...]:
    """random.getstate() of a generator with this seed."""
    return random.Random(seed).getstate()


def numpy_state(seed: int) -> tuple[object, ...]:
    """numpy.random.get_state() of a generator with this seed, its array as pickles spell it."""
    kind, keys, position, has_gauss, gauss = np.random.RandomState(seed % 2**32).get_state()
    return (kind, numpy_array(np.asarray(keys, np.uint32)), position, has_gauss, gauss)


def numpy_array(values: np.ndarray[tuple[int, ...], np.dtype[np.uint32]]) -> Record:
    """A 1-D uint32 array as numpy 1 and 2 unpickle it.

    Source: numpy/_core/multiarray _reconstruct; the module is spelled as numpy 1.x and 2.x accept.
    """
    array = Record(
        Global("numpy.core.multiarray", "_reconstruct"),
        (Global("numpy", "ndarray"), (0,), b"b"),
        made="reduce",
    )
    dtype = Record(Global("numpy", "dtype"), ("u4", False, True), made="reduce")
    dtype.state = (3, "<", None, None, None, -1, -1, 0)
    array.state = (1, values.shape, dtype, False, values.tobytes())
    return array


@dataclass(frozen=True, slots=True)
class Derived:
    """The plain parts of a rank's random state; tensors are given as bytes."""

    python: tuple[object, ...]
    numpy: tuple[object, ...]
    torch: bytes
    cuda: bytes
    tracker: Mapping[str, bytes]


def derive(seed: int, step: int, rank: RankOfRng) -> Derived:
    """A rank's random state for a rank set that changed."""
    return Derived(
        python_state(seed_of(seed, step, "python", rank)),
        numpy_state(seed_of(seed, step, "numpy", rank)),
        torch_state(seed_of(seed, step, "torch", rank)),
        cuda_state(seed_of(seed, step, "cuda", rank)),
        {name: cuda_state(seed_of(seed, step, name, rank)) for name in TRACKER},
    )
