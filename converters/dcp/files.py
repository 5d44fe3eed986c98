"""Opens torch.save files: whole states, or those of every rank."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path as Folder

from reshard.checkpoint import Checkpoint
from reshard.containers.carried import carry
from reshard.errors import FormatError
from reshard.format import OpenOptions

from .leaves import Leaf, ObjectLeaf
from .listing import Listed, listed
from .local import local_leaves, reference_shapes
from .pickles import leaves_of, load
from .read import Found, build
from .recognise import OPTIMIZERS, TORCH, numbered_optimizer
from .sources import may_tie, side_leaves
from .trainer import trainer_leaves


def open_torch(path: Folder, options: OpenOptions) -> Checkpoint:
    """Read the headers of torch.save files, and the small values in them."""
    root = path.parent if path.is_file() else path
    optimizer = numbered_optimizer(path) if path.is_dir() else None
    if optimizer is not None:
        return _open_numbered(path, optimizer, options)
    found = Listed(((path.name, ()),)) if path.is_file() else listed(path)
    if found is None:
        raise FormatError(f"{path}: holds no state of torch.save")
    asked = options.given.take("reference", "ties")
    reference = asked.get("reference")
    if reference is not None:
        models = [name for name, under in found.states if under[:1] != ("optim",)]
        optimizers = [name for name, under in found.states if under[:1] == ("optim",)]
        leaves = local_leaves(root, models, optimizers, reference_shapes(reference))
    else:
        leaves = leaves_of(root, found.states)
    names = [name for name, _ in found.states]
    more: list[Leaf] = []
    if path.is_dir():
        more, side = side_leaves(path)
        for name in found.extras:
            if name not in side and name not in names:
                file = load(root, name)
                more.append(ObjectLeaf((name,), carry(file, file.root), name))
                side.append(name)
        more = [leaf for leaf in more if leaf.path[0] not in names]
        names += [n for n in side if n not in names]
    whole = len(found.states) == 1
    kind = "lightning" if _is_lightning(leaves) else ("plain" if whole else "files")
    said = f"files of {found.ranks} ranks" if found.ranks else "one state"
    return build(
        Found(
            root=root,
            format=TORCH,
            version=said,
            kind=kind,
            leaves=(*leaves, *more),
            files=tuple(names),
            ranks=found.ranks,
            weights_only=options.weights_only,
            ties=may_tie(asked),
        )
    )


def _open_numbered(folder: Folder, optimizer: str, options: OpenOptions) -> Checkpoint:
    """A folder of the Trainer or accelerate, of one process or of DDP."""
    asked = options.given.take("reference", "ties")
    leaves, names = trainer_leaves(folder, optimizer, asked.get("reference"))
    more, side = side_leaves(folder)
    return build(
        Found(
            root=folder,
            format=TORCH,
            version=f"{OPTIMIZERS[optimizer]}, numbered optimizer",
            kind="files",
            leaves=(*leaves, *more),
            files=(*names, *side),
            weights_only=options.weights_only,
            ties=may_tie(asked),
        )
    )


def _is_lightning(leaves: Iterable[Leaf]) -> bool:
    return any(leaf.path == ("pytorch-lightning_version",) for leaf in leaves)
