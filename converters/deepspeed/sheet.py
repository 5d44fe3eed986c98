"""A torch file in the making: a tree with tensors to be filled, and the arrays they become."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from reshard.containers import torchfile
from reshard.containers.carried import Carried, replaced
from reshard.containers.inert import Global, Record, TensorRef, new_tensor
from reshard.dtypes import FLOAT32, DType
from reshard.layout import Draft, StoredArray

from .values import ALLOWED

_ALLOWED = ALLOWED | {"torch.Size"}


@dataclass
class Sheet:
    """The storages of one file, keyed "0", "1", … in order."""

    name: str
    holder: str = ""
    values: dict[str, bytes] = field(default_factory=dict)
    count: int = 0
    awaited: set[str] = field(default_factory=set)  # keys of storages to be filled

    def key(self) -> str:
        """A storage key not used before."""
        self.count += 1
        return str(self.count - 1)

    def tensor(self, shape: Iterable[int], dtype: DType, *, grad: bool = False) -> TensorRef:
        """A tensor that is to be filled."""
        key = self.key()
        self.awaited.add(key)
        return new_tensor(tuple(shape), dtype, key, requires_grad=grad)

    def placeholder(self, dtype: DType) -> TensorRef:
        """A tensor without elements, as ZeRO 3 leaves behind for a weight."""
        return new_tensor((0,), dtype, self.key())

    def number(self, value: float) -> TensorRef:
        """A 0-d fp32 tensor, as torch's optimizers count steps."""
        key = self.key()
        self.values[key] = np.float32(value).tobytes()
        return new_tensor((), FLOAT32, key)

    def put(self, carried: Carried) -> object:
        """A carried object, its tensors' bytes written at once."""
        keys: dict[str, str] = {}

        def take(ref: TensorRef) -> TensorRef:
            if ref.key not in keys:
                keys[ref.key] = self.key()
                self.values[keys[ref.key]] = carried.values[ref.key]
            return replace(ref, key=keys[ref.key])

        return replaced(carried.obj, take)

    def entries(self, carried: Carried) -> Mapping[object, object]:
        """The entries of a carried dict."""
        found = self.put(carried)
        return found if isinstance(found, dict) else {}

    def draft(self, root: object) -> tuple[Draft, dict[str, StoredArray]]:
        """The file, laid out, and the array of every storage.

        `root` is what torch.load will give.
        """
        stem = self.name.rpartition("/")[2].removesuffix(".pt")
        return torchfile.draft(
            self.name, root, allow=_ALLOWED, archive=stem, values=self.values,
            holder=self.holder or self.name,
        )  # fmt: skip


def size(shape: Iterable[int]) -> Record:
    """A torch.Size, which DeepSpeed's own tools ask for its numel()."""
    return Record(Global("torch", "Size"), (tuple(shape),), made="reduce")


def fragment(numel: int, start: int) -> Record:
    """Where a parameter lies in a partition. Source: utils/tensor_fragment.py @ 0.19.8."""
    made = Record(Global("deepspeed.utils.tensor_fragment", "fragment_address"))
    made.state = {"numel": numel, "start": start}
    return made


def stage_enum(stage: int) -> Record:
    """ZeroStageEnum(stage). Source: runtime/zero/config.py @ 0.19.8."""
    return Record(Global("deepspeed.runtime.zero.config", "ZeroStageEnum"), (stage,), made="reduce")


_SCALERS = "deepspeed.runtime.fp16.loss_scaler"


def static_scaler(scale: float) -> Record:
    """A LossScaler. Source: runtime/fp16/loss_scaler.py @ 0.19.8."""
    made = Record(Global(_SCALERS, "LossScaler"))
    made.state = {"cur_scale": scale, "dynamic": False}
    return made


def dynamic_scaler(found: Mapping[str, object]) -> Record:
    """A DynamicLossScaler that goes on from a 16-bit wrapper's counters (ZeRO 0)."""
    made = Record(Global(_SCALERS, "DynamicLossScaler"))
    made.state = {
        "cur_scale": found.get("cur_scale", 65536.0),
        "dynamic": True,
        "cur_iter": found.get("cur_iter", 0),
        "last_overflow_iter": found.get("last_overflow_iter", -1),
        "scale_factor": found.get("scale_factor", 2.0),
        "scale_window": found.get("scale_window", 1000),
        "min_scale": 1,
        "delayed_shift": found.get("delayed_shift", 1),
        "cur_hysteresis": found.get("cur_hysteresis", 1),
        "consecutive_hysteresis": False,
        "raise_error_at_min_scale": True,
        "dtype": Global("torch", "float16"),
    }
    return made
