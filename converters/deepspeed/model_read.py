"""Reads one model-states file: module tensors, shapes in flat order, frozen parameters."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

from reshard.containers.inert import TensorRef
from reshard.containers.torchfile import TorchFile
from reshard.dtypes import DType
from reshard.errors import CorruptError
from reshard.layout import StoredArray

from .rank_file import load
from .values import mapping, sequence, shape_of, texts, whole

#: Entries that DeepSpeed writes itself; everything else at the top level is the client's.
#: Source: runtime/engine.py _common_checkpoint_state, _save_moe_checkpoint @ 0.19.8.
OWN = frozenset(
    {
        "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes",
        "shared_params", "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd",
        "sparse_tensor_module_names", "skipped_steps", "global_steps", "global_samples",
        "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_config",
        "ds_version", "num_experts", "ds_autoep_layers", "autoep_layers",
        "universal_checkpoint_info",
    }
)  # fmt: skip

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor of the module: where it lies, and which storage it is a view of."""

    array: StoredArray
    storage: tuple[str, int]  # key, first element
    view: bool  # whether the storage holds more than this tensor


@dataclass(frozen=True)
class ModelFile:
    """One rank's model states. `module` is in the order of the state dict; None for a pipeline.

    `placeholders` are the parameters that ZeRO 3 leaves empty here, with their dtype.
    """

    file: TorchFile
    module: Mapping[str, Held] | None
    placeholders: Mapping[str, DType]
    order: tuple[str, ...]
    buffers: tuple[str, ...]
    shapes: tuple[Shapes, ...] | None
    frozen: Shapes | None
    fragments: Mapping[str, StoredArray]
    shared: Mapping[str, str]
    steps: int
    dp: int
    mp: int
    top: Mapping[object, object] = field(repr=False)

    @property
    def name(self) -> str:
        """The file's name in the tag folder."""
        return self.file.name

    @property
    def config(self) -> Mapping[object, object]:
        """The DeepSpeed config of the run."""
        found = self.top.get("ds_config")
        return found if isinstance(found, Mapping) else {}

    @property
    def zero_config(self) -> Mapping[object, object]:
        """Its zero_optimization part."""
        found = self.config.get("zero_optimization")
        return found if isinstance(found, Mapping) else {}


def read_model(folder: Path, name: str) -> ModelFile:
    """The model-states file `name` of a tag folder; no tensor bytes.

    Raises CorruptError for a file that is not one.
    """
    file = load(folder, name)
    where = str(folder / name)
    top = mapping(file.root, where)
    zero3 = name.rpartition("/")[2].startswith("zero_pp_rank_")
    if "dp_world_size" not in top and "module" not in top:
        raise CorruptError(f"{where}: holds no 'module'; it is no model-states file of DeepSpeed")
    shapes = _shapes(top.get("param_shapes"), where)
    elsewhere = {n for row in shapes or () for n in row}  # a universal folder's too
    module, placeholders, order = _module(
        file, top.get("module"), where, None if zero3 else elsewhere
    )
    return ModelFile(
        file=file,
        module=module,
        placeholders=placeholders,
        order=order,
        buffers=tuple(texts(top.get("buffer_names"))),
        shapes=shapes,
        frozen=_frozen_shapes(top.get("frozen_param_shapes"), where),
        fragments=_fragments(file, top.get("frozen_param_fragments"), where),
        shared=_shared(top.get("shared_params")),
        steps=whole(top.get("global_steps", 0), f"{where}: global_steps"),
        dp=whole(top.get("dp_world_size"), f"{where}: dp_world_size"),
        mp=whole(top.get("mp_world_size", 1), f"{where}: mp_world_size"),
        top=top,
    )


def _module(
    file: TorchFile, found: object, where: str, elsewhere: Container[str] | None
) -> tuple[Mapping[str, Held] | None, Mapping[str, DType], tuple[str, ...]]:
    """Tensors, placeholders, and names in order.

    A tensor without elements is a placeholder if it is one of `elsewhere` (None: in any case).
    """
    if found is None:
        return None, {}, ()
    held: dict[str, Held] = {}
    empty: dict[str, DType] = {}
    order: list[str] = []
    for key, ref in mapping(found, f"{where}: module").items():
        name = str(key)
        if not isinstance(ref, TensorRef):
            continue  # a module's _extra_state
        order.append(name)
        if ref.shape == (0,) and (elsewhere is None or name in elsewhere):
            empty[name] = ref.dtype
        else:
            held[name] = _held(file, ref, f"{where}: {name}")
    return held, empty, tuple(order)


def _held(file: TorchFile, ref: TensorRef, key: str) -> Held:
    size = ref.dtype.itemsize
    view = ref.storage_nbytes > prod(ref.shape) * size
    return Held(file.array(ref, key, file.name), (ref.key, ref.offset), view)


def layer_tensors(folder: Path, name: str) -> tuple[TorchFile, dict[str, Held]]:
    """The tensors of a layer's or an expert's file."""
    file = load(folder, name)
    held, _, _ = _module(file, file.root, str(folder / name), ())
    return file, dict(held or {})


def _shapes(found: object, where: str) -> tuple[Shapes, ...] | None:
    if found is None:
        return None
    where = f"{where}: param_shapes"
    rows = sequence(found, where) if isinstance(found, (list, tuple)) else [found]
    return tuple(
        {str(k): shape_of(v, where) for k, v in mapping(row, where).items()} for row in rows
    )


def _frozen_shapes(found: object, where: str) -> Shapes | None:
    if not isinstance(found, Mapping):
        return None
    return {str(k): shape_of(v, f"{where}: frozen {k}") for k, v in found.items()}


def _fragments(file: TorchFile, found: object, where: str) -> dict[str, StoredArray]:
    if not isinstance(found, Mapping):
        return {}
    return {
        str(k): file.array(v, f"{where}: frozen {k}", file.name)
        for k, v in found.items()
        if isinstance(v, TensorRef)
    }


def _shared(found: object) -> dict[str, str]:
    if not isinstance(found, Mapping):
        return {}
    return {str(k): str(v) for k, v in found.items()}
