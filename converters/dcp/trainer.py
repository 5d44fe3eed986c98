"""HF Trainer folders of one process or DDP: weights by name, an optimizer that numbers them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path as Folder

from reshard.box import Box
from reshard.containers.safetensors import read_header
from reshard.errors import CorruptError, FormatError
from reshard.layout import place
from reshard.schema import dialects, in_order

from .leaves import Leaf, TensorLeaf
from .pickles import given, leaves_of

MODEL, INDEX, BINARY = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"
OPTIMIZER = "optimizer.pt"
#: Whose order of modules an optimizer's numbers follow: safetensors files are sorted by name and do
#: not tell.
_DIALECT = "hf"


def is_trainer(folder: Folder) -> bool:
    """Whether a folder is one: an optimizer.pt beside weights."""
    held = any((folder / name).is_file() for name in (MODEL, INDEX, BINARY))
    return held and (folder / OPTIMIZER).is_file()


def trainer_leaves(folder: Folder) -> tuple[list[Leaf], tuple[str, ...]]:
    """The leaves of a Trainer's folder, weights in module order, and the files they lie in."""
    if (folder / BINARY).is_file():
        files: list[str] = [BINARY]
        leaves = leaves_of(folder, [(BINARY, ("model",))])
    else:
        files = _safe_names(folder)
        leaves = _safe_leaves(folder, files)
    leaves += leaves_of(folder, [(OPTIMIZER, ("optim",))])
    return leaves, (*files, OPTIMIZER)


def _safe_names(folder: Folder) -> list[str]:
    if (folder / MODEL).is_file():
        return [MODEL]
    try:
        table = json.loads((folder / INDEX).read_text())["weight_map"]
        return sorted(set(table.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptError(f"{folder / INDEX}: no index of safetensors files ({error})") from None


def _safe_leaves(folder: Folder, names: Sequence[str]) -> list[Leaf]:
    found: dict[str, Leaf] = {}
    for name in names:
        if "/" in name:
            raise CorruptError(f"{folder / INDEX}: names {name}, outside the folder")
        for key, array in read_header(folder, name).arrays.items():
            if key in found:
                raise CorruptError(f"{folder}: {key} stands in two files")
            pieces = [place(Box.whole(array.shape), array)] if array.numel else []
            found[key] = TensorLeaf(("model", key), array.shape, array.dtype, given(pieces))
    _check_type(folder)
    return [found[key] for key in module_order(found, str(folder))]


def _check_type(folder: Folder) -> None:
    """Raises FormatError for a model whose order of parameters is not known."""
    try:
        kind = json.loads((folder / "config.json").read_text()).get("model_type")
    except (OSError, ValueError, AttributeError):
        kind = None
    known = dialects()[_DIALECT].ordered
    if kind not in known:
        raise FormatError(
            f"{folder}: its optimizer numbers the parameters in the order of the model's modules, "
            f"and that of model_type {kind!r} is not known (known: {', '.join(sorted(known))}). "
            "Read the weights alone with --from hf."
        )


def module_order(names: Iterable[str], where: str) -> list[str]:
    """Parameter names in the order in which the model's modules are made.

    Raises FormatError naming siblings whose order is not known.
    """
    found = list(names)
    order = dialects()[_DIALECT].order
    for name in found:
        odd = [p for p in name.split(".") if not p.isdigit() and p not in order]
        if odd:
            raise FormatError(
                f"{where}: its optimizer numbers the parameters in the order of the model's "
                f"modules, and where {odd[0]!r} of {name} stands among its siblings is not known. "
                "Read the weights alone with --from hf."
            )
    return in_order(found, order)
