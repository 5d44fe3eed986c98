"""Values of unpickled files, made plain, checked, or carried with their tensors' bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

from reshard.checkpoint import Json
from reshard.containers.carried import Carried, replaced
from reshard.containers.inert import (
    Global,
    Record,
    TensorRef,
    globals_in,
)
from reshard.containers.torchfile import TorchFile
from reshard.errors import CorruptError

#: Globals that may stand in a file we write, beside torch's own. Everything DeepSpeed's loaders
#: need, and the types its users' client state is made of. Source: formats/deepspeed.md, part d;
#: scan of fixtures/deepspeed @ 0.19.8.
ALLOWED = frozenset(
    {
        "argparse.Namespace",
        "numpy.core.multiarray._reconstruct",
        "numpy._core.multiarray._reconstruct",
        "numpy.ndarray",
        "numpy.dtype",
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        "deepspeed.utils.tensor_fragment.fragment_address",
    }
)

#: Names that values of torch itself bring along and that the writer of archives always allows.
_TORCH = ("torch.", "collections.OrderedDict", "_codecs.encode", "builtins.", "__builtin__.")


class Writable:
    """The globals that may be written again."""

    def __contains__(self, path: object) -> bool:
        return isinstance(path, str) and (path in ALLOWED or path.startswith(_TORCH))


def renamed(carried: Carried, prefix: str) -> Carried:
    """The same with other storage keys, so that several can lie in one file."""
    keys = {k: f"{prefix}{i}" for i, k in enumerate(carried.values)}
    obj = replaced(carried.obj, lambda ref: replace(ref, key=keys[ref.key]))
    return Carried(obj, {keys[k]: v for k, v in carried.values.items()})


def strange_names(obj: object) -> list[str]:
    """The globals in a tree that may not be written again, sorted."""
    return sorted(g.path for g in globals_in(obj) if g.path not in Writable())


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
        inside = {**{str(i): plain(a) for i, a in enumerate(value.args)}, **_fields(value)}
        return inside or value.type.name
    if isinstance(value, TensorRef):
        return f"tensor {list(value.shape)} {value.dtype.name}"
    if isinstance(value, (bytes, bytearray)):
        return f"{len(value)} bytes"
    return type(value).__name__


def _fields(value: Record) -> dict[str, Json]:
    return {str(k): plain(v) for k, v in value.fields.items()}


def mapping(value: object, where: str) -> Mapping[object, object]:
    """A dict, or a CorruptError saying where one is missing."""
    if isinstance(value, Mapping):
        return value
    raise CorruptError(f"{where}: a dict is expected, found {_shown(value)}")


def sequence(value: object, where: str) -> Sequence[object]:
    """A list or tuple, or a CorruptError saying where one is missing."""
    if isinstance(value, (list, tuple)):
        return value
    raise CorruptError(f"{where}: a list is expected, found {_shown(value)}")


def whole(value: object, where: str) -> int:
    """A non-negative integer, also one inside an enum's record (ZeroStageEnum(2))."""
    if isinstance(value, Record) and len(value.args) == 1:
        value = value.args[0]
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise CorruptError(f"{where}: a number is expected, found {_shown(value)}")


def shape_of(value: object, where: str) -> tuple[int, ...]:
    """A tensor's shape, kept as a torch.Size or (MoE files) as a plain tuple."""
    return tuple(whole(n, where) for n in sequence(value, where))


def number(file: TorchFile, value: object) -> float | None:
    """A number, given as one or as a tensor of one element; None for anything else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        return float(value)
    if isinstance(value, TensorRef) and prod(value.shape) == 1:
        return float(file.read(value).reshape(-1)[0])
    return None


def texts(value: object) -> Iterator[str]:
    """The strings of a list; nothing for None."""
    if isinstance(value, (list, tuple)):
        yield from (v for v in value if isinstance(v, str))


def _shown(value: object) -> str:
    return f"{plain(value)!r:.80}"
