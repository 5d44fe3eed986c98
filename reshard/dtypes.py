"""One table of element types: names of every container, width, numpy type."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

from reshard.errors import FormatError


@dataclass(frozen=True, slots=True)
class DType:
    """An element type. `name` is torch's attribute name; `storage` its legacy storage class."""

    name: str
    itemsize: int  # bytes
    numpy: np.dtype[np.generic]
    storage: str | None  # torch.<storage>; None: pickled through UntypedStorage
    safetensors: str | None
    floating: bool = True

    def __repr__(self) -> str:
        return self.name

    def holds(self, other: DType) -> bool:
        """Whether this type has every value of the other one: float16 and bfloat16 hold neither."""
        return self is other or holds(self.numpy, other.numpy)


@cache
def holds(wide: np.dtype[Any], kind: np.dtype[Any]) -> bool:
    """Whether every value of `kind` is one of `wide`: as many bits of precision, and the range."""
    if wide == kind:
        return True
    try:
        a, b = (ml_dtypes.finfo(k) for k in (wide, kind))  # type: ignore[no-untyped-call]
    except (TypeError, ValueError):  # integers
        return bool(np.can_cast(kind, wide, "safe"))
    if wide.kind == "c" or kind.kind == "c":
        return bool(np.can_cast(kind, wide, "safe"))
    small = float(a.smallest_subnormal) <= float(b.smallest_subnormal)
    return bool(a.nmant >= b.nmant and float(a.max) >= float(b.max) and small)


def _row(
    name: str, kind: object, storage: str | None, safe: str | None, floating: bool = True
) -> DType:
    numpy = np.dtype(kind)  # type: ignore[call-overload]  # ml_dtypes types are not in numpy's stubs
    return DType(name, numpy.itemsize, numpy, storage, safe, floating)


TABLE: tuple[DType, ...] = (
    _row("float64", np.float64, "DoubleStorage", "F64"),
    _row("float32", np.float32, "FloatStorage", "F32"),
    _row("float16", np.float16, "HalfStorage", "F16"),
    _row("bfloat16", ml_dtypes.bfloat16, "BFloat16Storage", "BF16"),
    _row("int64", np.int64, "LongStorage", "I64", False),
    _row("int32", np.int32, "IntStorage", "I32", False),
    _row("int16", np.int16, "ShortStorage", "I16", False),
    _row("int8", np.int8, "CharStorage", "I8", False),
    _row("uint8", np.uint8, "ByteStorage", "U8", False),
    _row("bool", np.bool_, "BoolStorage", "BOOL", False),
    _row("uint16", np.uint16, None, "U16", False),
    _row("uint32", np.uint32, None, "U32", False),
    _row("uint64", np.uint64, None, "U64", False),
    _row("complex64", np.complex64, "ComplexFloatStorage", "C64"),
    _row("complex128", np.complex128, "ComplexDoubleStorage", None),
    _row("float8_e4m3fn", ml_dtypes.float8_e4m3fn, None, "F8_E4M3"),
    _row("float8_e5m2", ml_dtypes.float8_e5m2, None, "F8_E5M2"),
    _row("float8_e4m3fnuz", ml_dtypes.float8_e4m3fnuz, None, None),
    _row("float8_e5m2fnuz", ml_dtypes.float8_e5m2fnuz, None, None),
    _row("float8_e8m0fnu", ml_dtypes.float8_e8m0fnu, None, "F8_E8M0"),
)

_BY_NAME = {t.name: t for t in TABLE}
_BY_STORAGE = {t.storage: t for t in TABLE if t.storage}
_BY_SAFETENSORS = {t.safetensors: t for t in TABLE if t.safetensors}
_SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}


def named(name: str) -> DType:
    """The type with this torch name ("bfloat16") or short name ("bf16")."""
    found = _BY_NAME.get(_SHORT.get(name, name))
    if found is None:
        raise FormatError(f"dtype {name!r} is not known; known: {', '.join(sorted(_BY_NAME))}")
    return found


def of_storage(storage: str) -> DType:
    """The type of a torch storage class name ("BFloat16Storage")."""
    found = _BY_STORAGE.get(storage)
    if found is None:
        raise FormatError(f"torch storage class {storage!r} is not known")
    return found


def of_safetensors(code: str) -> DType:
    """The type of a safetensors code ("BF16")."""
    found = _BY_SAFETENSORS.get(code)
    if found is None:
        raise FormatError(f"safetensors dtype {code!r} is not known")
    return found


FLOAT32 = named("float32")
BFLOAT16 = named("bfloat16")
