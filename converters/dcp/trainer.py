"""Folders of one process or DDP: weights by name, an optimizer that numbers them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path as Folder

from reshard.containers.safetensors import read_header
from reshard.containers.small import object_beside, read_object
from reshard.errors import CorruptError, FormatError
from reshard.layout import whole
from reshard.namings import dialects, module_order

from .leaves import Leaf, TensorLeaf
from .names import spelling
from .pickles import Given, leaves_of
from .recognise import BINARY, INDEX, MODEL

#: Whose order of modules an optimizer's numbers follow: safetensors files are sorted by name and do
#: not tell.
_DIALECT = "hf"


def trainer_leaves(
    folder: Folder, optimizer: str, reference: str | None = None
) -> tuple[list[Leaf], tuple[str, ...]]:
    """The leaves of such a folder, weights in module order, and the files they lie in.

    `reference` holds the model's config.json, where the folder itself has none.
    """
    if (folder / BINARY).is_file():
        files: list[str] = [BINARY]
        leaves = leaves_of(folder, [(BINARY, ("model",))])
    else:
        files = _safe_names(folder)
        leaves = _safe_leaves(folder, files, Folder(reference) if reference else folder)
    leaves += leaves_of(folder, [(optimizer, ("optim",))])
    return leaves, (*files, optimizer)


def _safe_names(folder: Folder) -> list[str]:
    if (folder / MODEL).is_file():
        return [MODEL]
    try:
        return sorted(set(read_object(folder / INDEX)["weight_map"].values()))
    except (KeyError, TypeError, AttributeError) as error:
        raise CorruptError(f"{folder / INDEX}: no index of safetensors files ({error})") from None


def _safe_leaves(folder: Folder, names: Sequence[str], reference: Folder) -> list[Leaf]:
    found: dict[str, Leaf] = {}
    for name in names:
        if "/" in name:
            raise CorruptError(f"{folder / INDEX}: names {name}, outside the folder")
        for key, array in read_header(folder, name).arrays.items():
            if key in found:
                raise CorruptError(f"{folder}: {key} stands in two files")
            pieces = [whole(array)] if array.numel else []
            found[key] = TensorLeaf(("model", key), array.shape, array.dtype, Given(pieces))
    spelled = spelling(found)
    stored = {spelled.canonical(name): name for name in found}
    return [found[stored[name]] for name in _in_module_order(folder, stored, reference)]


def _in_module_order(folder: Folder, names: Collection[str], reference: Folder) -> list[str]:
    """Parameter names in the order in which the model's modules are made.

    Raises FormatError for a model whose order is not known.
    """
    config = object_beside(reference / "config.json")
    if config is None:
        raise FormatError(
            f"{folder}: its optimizer numbers the parameters in the order of the model's modules, "
            f"which safetensors do not keep, and {reference} has no config.json to tell it. Name a "
            "folder that has the model's: --from torch:reference=DIR."
        )
    said = config.get("model_type")
    kind = said if isinstance(said, str) else None
    found = module_order(names, _DIALECT, kind)
    if found is None:
        known = dialects()[_DIALECT].orders
        parts = {p for n in names for p in n.split(".") if not p.isdigit()}
        odd = sorted(parts - set(known.get(kind or "", ())))
        raise FormatError(
            f"{folder}: its optimizer numbers the parameters in the order of the model's modules, "
            + (
                f"and where {odd[0]!r} stands among its siblings is not known. "
                if kind in known
                else f"and that of model_type {kind!r} is not known (known: "
                f"{', '.join(sorted(known))}). "
            )
            + "Read the weights alone with --from hf."
        )
    return found
