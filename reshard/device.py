"""Arithmetic on blocks of values: permutations, casts, scales, fingerprints; by numpy or by torch.

Whatever the device, the bits are those that numpy gives (tests/test_device.py).
"""

from __future__ import annotations

import re
import threading
from functools import cache
from typing import Any, Protocol

import ml_dtypes
import numpy as np
import numpy.typing as npt

from reshard.errors import UsageError
from reshard.fingerprints import Words, by_rows

Array = npt.NDArray[Any]
_NAME = re.compile(r"cpu|torch|cuda(:\d+)?")
#: Floats between which torch and numpy round alike, by the name that both give them.
_FLOATS = ("float32", "float16", "bfloat16")
_WIDTHS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


class Device(Protocol):
    """Where the values of a block are worked on; arrays go in and come out on the CPU."""

    def gather(self, raw: Array, strides: tuple[int, ...], out: Array) -> None:
        """Fill `out` with the elements of flat `raw` at these strides (in elements)."""
        ...

    def cast(self, values: Array, dtype: np.dtype[Any]) -> Array:
        """The values, rounded to nearest even where `dtype` is narrower."""
        ...

    def scaled(self, values: Array, factors: Array, dtype: np.dtype[Any]) -> Array:
        """Values times fp32 factors of their shape, in fp32, rounded once to `dtype`."""
        ...

    def by_rows(
        self, values: Array, lead: int, weights: tuple[Words, Words]
    ) -> tuple[Words, Words]:
        """Of both lanes, the weighted sum of each row: see `fingerprint.by_rows`."""
        ...


class Cpu:
    """numpy."""

    def gather(self, raw: Array, strides: tuple[int, ...], out: Array) -> None:
        """A copy by numpy's strides."""
        steps = tuple(s * raw.itemsize for s in strides)
        out[...] = np.lib.stride_tricks.as_strided(raw, out.shape, steps, writeable=False)

    def cast(self, values: Array, dtype: np.dtype[Any]) -> Array:
        """astype, of what is not yet of the type; values out of range become infinite."""
        with np.errstate(over="ignore", invalid="ignore"):
            return values if values.dtype == dtype else values.astype(dtype)

    def scaled(self, values: Array, factors: Array, dtype: np.dtype[Any]) -> Array:
        """A product in fp32."""
        with np.errstate(over="ignore", invalid="ignore"):
            return np.asarray((values.astype(np.float32) * factors).astype(dtype))

    def by_rows(
        self, values: Array, lead: int, weights: tuple[Words, Words]
    ) -> tuple[Words, Words]:
        """Sums of products of words."""
        return by_rows(values, lead, weights)


CPU = Cpu()


class Torch:
    """torch, on one of its devices.

    Blocks go through pinned memory, which torch's allocator keeps for the next ones, on a stream of
    each thread: one worker's copies run beside another's arithmetic.
    """

    def __init__(self, name: str) -> None:
        import torch

        self._torch = torch
        self._device = torch.device(name)
        self._pinned = self._device.type == "cuda"
        self._own = threading.local()

    def gather(self, raw: Array, strides: tuple[int, ...], out: Array) -> None:
        """A copy by torch's strides."""
        words = self._up(raw.view(_WIDTHS[raw.itemsize]))
        out[...] = self._down(words.as_strided(out.shape, strides), raw.dtype)

    def cast(self, values: Array, dtype: np.dtype[Any]) -> Array:
        """torch's rounding; numpy's where it would differ: NaN payloads, other types."""
        if values.dtype == dtype or not {values.dtype.name, dtype.name} <= set(_FLOATS):
            return CPU.cast(values, dtype)
        given = self._floats(values)
        if bool(given.isnan().any()):
            return CPU.cast(values, dtype)
        return self._down(given.to(getattr(self._torch, dtype.name)), dtype)

    def scaled(self, values: Array, factors: Array, dtype: np.dtype[Any]) -> Array:
        """A product in fp32; fp8 is widened here, by a table of its 256 values."""
        if dtype.name not in _FLOATS or values.dtype.name not in (*_FLOATS, "float8_e4m3fn"):
            return CPU.scaled(values, factors, dtype)
        if values.dtype.name in _FLOATS:
            wide = self._floats(values).to(self._torch.float32)
        else:
            wide = self._up(_fp8())[self._up(values.view(np.uint8)).to(self._torch.int64)]
        product = wide * self._up(np.ascontiguousarray(factors))
        if bool(product.isnan().any()):
            return CPU.scaled(values, factors, dtype)
        return self._down(product.to(getattr(self._torch, dtype.name)), dtype)

    def by_rows(
        self, values: Array, lead: int, weights: tuple[Words, Words]
    ) -> tuple[Words, Words]:
        """Sums of products that wrap as those of unsigned words do."""
        rows = len(values)
        nbytes = values.nbytes // rows
        if lead or nbytes % 8:
            return CPU.by_rows(values, lead, weights)
        words = self._seen(values).view(self._torch.int64).reshape(rows, nbytes // 8)
        low, high = (self._up(w.view(np.int64)) for w in weights)
        first = (words * low).sum(1)
        second = ((words >> 32 & 0xFFFFFFFF) * high).sum(1)
        return self._down(first, np.dtype(np.uint64)), self._down(second, np.dtype(np.uint64))

    def _seen(self, values: Array) -> Any:
        """The bytes of an array as a tensor: the one it was made from, if it is the last made."""
        last = getattr(self._own, "last", None)
        if last is not None and values.flags.c_contiguous and _extent(values) == _extent(last[0]):
            return last[1].reshape(-1).view(self._torch.uint8)
        return self._up(np.ascontiguousarray(values).reshape(-1).view(np.uint8))

    def _floats(self, values: Array) -> Any:
        """An array of floats as a tensor."""
        words = np.ascontiguousarray(values).view(_WIDTHS[values.itemsize])
        return self._up(words).view(getattr(self._torch, values.dtype.name))

    def _up(self, values: Array) -> Any:
        """An array as a tensor on the device."""
        torch = self._torch
        if not self._pinned:
            return torch.from_numpy(values if values.flags.writeable else values.copy())
        self._stream()
        host = torch.empty(values.shape, dtype=getattr(torch, values.dtype.name), pin_memory=True)
        host.numpy()[...] = values
        return host.to(self._device, non_blocking=True)

    def _down(self, tensor: Any, dtype: np.dtype[Any]) -> Array:
        """A tensor as an array of a type as wide."""
        torch = self._torch
        words = tensor.contiguous().view(getattr(torch, _WIDTHS[dtype.itemsize]))
        host = words
        if self._pinned:
            host = torch.empty(words.shape, dtype=words.dtype, pin_memory=True)
            host.copy_(words, non_blocking=True)
            self._stream().synchronize()
        made: Array = host.numpy().view(dtype)
        self._own.last = (made, words)
        return made

    def _stream(self) -> Any:
        """This thread's stream, on which all that it does runs."""
        if not hasattr(self._own, "stream"):
            self._own.stream = self._torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            self._torch.cuda.set_stream(self._own.stream)
        return self._own.stream


def _extent(array: Array) -> tuple[int, int]:
    """Where an array's bytes lie."""
    return array.ctypes.data, array.nbytes


@cache
def _fp8() -> Array:
    """The fp32 value of each byte of float8_e4m3fn."""
    made: Array = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    return made.astype(np.float32)


def device(name: str) -> Device:
    """The device of a name: `cpu`, `cuda`, `cuda:N`; `torch` is torch on the CPU.

    Raises UsageError for another name, and where torch or its GPU is not there.
    """
    if _NAME.fullmatch(name) is None:
        raise UsageError(f"--device {name}: there are cpu, cuda and cuda:N")
    if name == "cpu":
        return CPU
    try:
        import torch
    except ImportError:
        raise UsageError(
            f"--device {name} needs torch: pip install torch, or leave --device out"
        ) from None
    if name == "torch":
        return Torch("cpu")
    number = int(name.partition(":")[2] or 0)
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if number >= found:
        raise UsageError(f"--device {name}: torch {torch.__version__} finds {found} GPUs here")
    return Torch(f"cuda:{number}")
