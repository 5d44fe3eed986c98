"""Reads a PipelineModule's layer files, and joins them with the optimizer's names."""

from __future__ import annotations

import re

from reshard.errors import CorruptError, FormatError

from .cuts import same
from .grid import Grid
from .model_read import Held, layer_tensors
from .names import Names, Spot
from .native import Pipeline

#: A tied layer's parameter in the optimizer. Source: runtime/pipe/module.py @ 0.19.8.
TIED = "tied_modules."


def read_layers(grid: Grid, names: Names) -> None:
    """Put every layer file's tensors into `names`, under the names the optimizer gives them.

    A layer's parameter is `<layer>.<key>`, a tied one `tied_modules.<tie>.<key>`: the layer file
    does not say which. Raises FormatError where two ties fit one file.
    """
    known = _optimizer_shapes(grid)
    layers: dict[int, dict[str, str]] = {}
    taken: dict[str, int] = {}
    for layer, file in sorted(grid.files.layers.items()):
        _, tensors = layer_tensors(grid.files.folder, file)
        table = {key: f"{layer}.{key}" for key in tensors}
        if known is not None and not all(table[k] in known for k in tensors):
            tie = _tie(tensors, known, taken, layer, file)
            if tie is not None:
                table = {key: f"{TIED}{tie}.{key}" for key in tensors}
        layers[layer] = table
        for key, held in tensors.items():
            spot = Spot(table[key], held.array.shape, same(held.array.shape))
            names.files.append((spot, held, file))
            names.kinds.setdefault(table[key], held.array.dtype)
    _no_gaps(grid, known, layers)
    named = [n for table in layers.values() for n in table.values()]
    tied = [n for n in named if n.startswith(TIED)]
    names.order = tuple(dict.fromkeys(tied + named))
    names.pipeline = Pipeline(layers, ())


def _optimizer_shapes(grid: Grid) -> dict[str, tuple[int, ...]] | None:
    """What the stages' param_shapes name; None without ZeRO."""
    if any(m.shapes is None for m in grid.models):
        return None
    return {n: s for m in grid.models for row in m.shapes or () for n, s in row.items()}


def _tie(
    tensors: dict[str, Held],
    known: dict[str, tuple[int, ...]],
    taken: dict[str, int],
    layer: int,
    file: str,
) -> str | None:
    """Which tied module a layer file is of, or None if it is of none (a frozen layer)."""
    ties = sorted({m[1] for n in known if (m := re.match(r"tied_modules\.([^.]+)\.", n))})
    fits = [
        tie
        for tie in ties
        if tie not in taken
        and any(f"{TIED}{tie}.{k}" in known for k in tensors)
        and all(
            known.get(f"{TIED}{tie}.{k}", h.array.shape) == h.array.shape
            for k, h in tensors.items()
        )
        and {n.removeprefix(f"{TIED}{tie}.") for n in known if n.startswith(f"{TIED}{tie}.")}
        <= tensors.keys()
    ]
    if len(fits) > 1:
        raise FormatError(
            f"{file}: could be any of the tied modules {', '.join(fits)}; the files do not say"
        )
    if fits:
        taken[fits[0]] = layer
        return fits[0]
    return None


def _no_gaps(
    grid: Grid, known: dict[str, tuple[int, ...]] | None, layers: dict[int, dict[str, str]]
) -> None:
    held = {n for table in layers.values() for n in table.values()}
    missing = sorted(n for n in known or () if n not in held)
    if missing:
        layer = missing[0].split(".")[0]
        raise CorruptError(
            f"{grid.files.folder}: no layer file holds {missing[0]}, which the optimizer has"
            + (f"; layer_{int(layer):02d}-model_states.pt is missing" if layer.isdigit() else "")
        )
