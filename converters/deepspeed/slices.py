"""The parameters of an optimizer that lists none, from its table of fragments.

BF16_Optimizer keeps partitions at ZeRO 0 too (a PipelineModule in bf16), and the engine records
param_shapes under ZeRO alone. Source: runtime/engine.py _get_zero_param_shapes, bf16_optimizer.py
@ 0.19.8; tests/peers/deepspeed_make.py pp2_z0_bf16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from reshard.errors import CorruptError, FormatError

from .folder import TagFiles
from .model_read import ModelFile, layer_tensors
from .optim_read import RankState

Shape = tuple[int, ...]


def with_shapes(
    files: TagFiles, models: Sequence[ModelFile], ranks: Sequence[Sequence[RankState]]
) -> tuple[ModelFile, ...]:
    """The model files, with param_shapes in flat order as the ranks' fragments tell them."""
    every = [*files.layers.items(), *((n, file) for (n, _), file in files.layers_tp.items())]
    held: dict[str, set[Shape]] = {}
    for n, file in every:
        for key, tensor in layer_tensors(files.folder, file)[1].items():
            held.setdefault(f"{n}.{key}", set()).add(tensor.array.shape)
            held.setdefault(f"tied/{key}", set()).add(tensor.array.shape)
    out = []
    for model, row in zip(models, ranks, strict=True):
        own = {k: {h.array.shape} for k, h in (model.module or {}).items()}
        shapes = [
            {name: _shape(name, n, {**held, **own}, row[0].file) for name, n in group.items()}
            for group in _numels(row)
        ]
        out.append(replace(model, shapes=tuple(shapes)))
    return tuple(out)


def _numels(row: Sequence[RankState]) -> list[dict[str, int]]:
    """Elements of each group's parameters, in the order in which the partitions hold them."""
    first = row[0]
    if any(len(rank.slices) != len(first.states) for rank in row):
        raise CorruptError(f"{first.file}: no table of parameter fragments for each of its groups")
    groups: list[dict[str, int]] = []
    for i in range(len(first.states)):
        sizes: dict[str, int] = {}
        for rank in row:
            for name, (_, n) in sorted(rank.slices[i].at.items(), key=lambda item: item[1]):
                sizes[name] = sizes.get(name, 0) + n
        groups.append(sizes)
    return groups


def _shape(name: str, numel: int, held: dict[str, set[Shape]], where: str) -> Shape:
    """The shape of a parameter, as the module or a layer file has it."""
    tied = name.split(".", 2)
    key = f"tied/{tied[2]}" if tied[0] == "tied_modules" and len(tied) == 3 else name
    fits = [shape for shape in held.get(key, ()) if prod(shape) == numel]
    if len(fits) != 1:
        raise FormatError(
            f"{where}: {name} has {numel} elements there, and {len(fits)} tensors of the module or "
            "of layer files fit; its shape cannot be told"
        )
    return fits[0]
