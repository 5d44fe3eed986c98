"""Reads a PipelineModule's layer files, and joins them with the optimizer's names."""

from __future__ import annotations

import re

from reshard.errors import CorruptError, FormatError

from .grid import Grid
from .model_read import Held, layer_tensors
from .names import Names
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
    for layer, row in files_of(grid).items():
        for tp, file in enumerate(row):
            _, tensors = layer_tensors(grid.files.folder, file)
            if tp == 0:
                layers[layer] = _named(tensors, known, taken, layer, file)
            table = layers[layer]
            if tensors.keys() != table.keys():
                raise CorruptError(
                    f"{file}: holds other tensors than {row[0]}: the files are of different saves"
                )
            for key, held in tensors.items():
                spot = names.place(table[key], held.array.shape, tp, None)
                names.files.append((spot, held, file))
                names.kinds.setdefault(table[key], held.array.dtype)
    _no_gaps(grid, known, layers)
    named = [n for table in layers.values() for n in table.values()]
    tied = [n for n in named if n.startswith(TIED)]
    names.order = tuple(dict.fromkeys(tied + named))
    names.pipeline = Pipeline(layers, ())


def files_of(grid: Grid) -> dict[int, list[str]]:
    """Each layer's files by tensor-parallel rank. Raises CorruptError for one that is missing.

    Those of a pipeline with a tensor axis name the rank. Source: runtime/pipe/module.py
    ckpt_layer_path, topology.py get_rank_repr @ 0.19.8.
    """
    out = {layer: [file] for layer, file in sorted(grid.files.layers.items())}
    if out and grid.files.layers_tp:
        a, b = out[min(out)][0], next(iter(grid.files.layers_tp.values()))
        raise CorruptError(f"{grid.files.folder}: {a} and {b}: two saves in one folder")
    for layer in sorted({n for n, _ in grid.files.layers_tp}):
        found = sorted(t for n, t in grid.files.layers_tp if n == layer)
        if found != list(range(grid.tp)):
            raise CorruptError(
                f"{grid.files.folder}: files of layer {layer} are of tensor-parallel ranks "
                f"{found[:8]}, and there are {grid.tp}: one is missing or left over"
            )
        out[layer] = [grid.files.layers_tp[layer, t] for t in found]
    return out


def _named(
    tensors: dict[str, Held],
    known: dict[str, tuple[int, ...]] | None,
    taken: dict[str, int],
    layer: int,
    file: str,
) -> dict[str, str]:
    """The optimizer's names of a layer file's tensors."""
    table = {key: f"{layer}.{key}" for key in tensors}
    if known is not None and not all(table[k] in known for k in tensors):
        tie = _tie(tensors, known, taken, layer, file)
        if tie is not None:
            table = {key: f"{TIED}{tie}.{key}" for key in tensors}
    return table


def _optimizer_shapes(grid: Grid) -> dict[str, tuple[int, ...]] | None:
    """What the stages' param_shapes name on tensor-parallel rank 0; None without ZeRO."""
    if any(m.shapes is None for m in grid.models):
        return None
    firsts = grid.models[:: grid.tp]
    return {n: s for m in firsts for row in m.shapes or () for n, s in row.items()}


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
