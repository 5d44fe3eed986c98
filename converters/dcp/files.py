"""Which torch.save files a folder has, and what each is: whole states, or a rank's."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path as Folder

from reshard.checkpoint import Checkpoint
from reshard.containers.carried import carry
from reshard.containers.dcp import METADATA
from reshard.errors import CorruptError, FormatError
from reshard.format import OpenOptions

from .leaves import Leaf, ObjectLeaf
from .local import local_leaves, reference_shapes
from .pickles import leaves_of, load
from .read import Found, build
from .sources import SIDE, side_leaves
from .sources import recognise as recognise_dcp
from .trainer import OPTIMIZER, is_trainer, trainer_leaves
from .values import Path

NAME = "torch"
_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".tar")
#: model_world_size_4_rank_0.pt (verl, SkyRL, slime), pytorch_model_fsdp_0_rank0.bin (accelerate
#: with use_dcp=False), pytorch_model_fsdp_rank0.bin (FSDP1 LOCAL), rank0.pt.
_RANK = re.compile(
    r"(?P<stem>.*?)_?(?:world_size_(?P<world>\d+)_)?rank[_-]?(?P<rank>\d+)\.(?:pt|pth|bin)"
)
#: FULL_STATE_DICT of accelerate and the HF Trainer (utils/fsdp_utils.py, save_fsdp_model).
_FULL_MODEL = re.compile(r"pytorch_model_fsdp(_\d+)?\.bin")
_FULL_OPTIMIZER = re.compile(r"optimizer(_\d+)?\.bin")
#: Other frameworks' files: DeepSpeed's, Hugging Face's, the Trainer's arguments.
_FOREIGN = re.compile(
    r".*_(model|optim)_states\.pt|mp_rank_\d+.*|layer_\d+-model.*|pytorch_model(-\d+-of-\d+)?\.bin|"
    r"training_args\.bin|model_optim_rng\.pt|distrib_optim\.pt|common\.pt|optimizer\.pt|"
    r"adapter_model\.bin"
)


@dataclass(frozen=True, slots=True)
class _Listed:
    """The state files of a folder, each with the path its contents go under, and side files."""

    states: tuple[tuple[str, Path], ...]
    ranks: int | None = None
    extras: tuple[str, ...] = ()  # other files of each rank


def recognise(path: Folder) -> str | None:
    """Why a file or folder is one."""
    if path.is_file():
        return "is a file of torch.save" if _is_state_file(path) else None
    if not path.is_dir() or recognise_dcp(path) is not None or (path / METADATA).exists():
        return None
    if is_trainer(path):
        return f"holds {OPTIMIZER} beside weights"
    try:
        listed = _listed(path)
    except (CorruptError, FormatError):
        return "holds torch.save files of ranks"  # opening says what is wrong
    if listed is None:
        return None
    return f"holds {listed.states[0][0]}" + (f" of {listed.ranks} ranks" if listed.ranks else "")


def _is_state_file(path: Folder) -> bool:
    if path.suffix not in _SUFFIXES:
        return False
    with path.open("rb") as file:
        first = file.read(4)
    return first == b"PK\x03\x04" or first[:1] == b"\x80"


def _listed(folder: Folder) -> _Listed | None:
    """The state files of a folder; None if it has none."""
    names = sorted(
        p.name
        for p in folder.iterdir()
        if p.is_file() and p.suffix in _SUFFIXES and not _FOREIGN.fullmatch(p.name)
    )
    ranked = {name: m for name in names if (m := _RANK.fullmatch(name))}
    by_stem: dict[str, dict[int, str]] = {}
    for name, match in ranked.items():
        by_stem.setdefault(match["stem"], {})[int(match["rank"])] = name
    states = {s: files for s, files in by_stem.items() if _is_state_stem(s)}
    if states:
        return _of_ranks(folder, ranked, states, by_stem)
    models = [n for n in names if _FULL_MODEL.fullmatch(n)]
    if models:
        optimizers = [n for n in names if _FULL_OPTIMIZER.fullmatch(n)]
        if len(models) > 1 or len(optimizers) > 1:
            raise FormatError(
                f"{folder}: several models ({', '.join(models)}) are not read together"
            )
        pairs = [(models[0], ("model",)), *((n, ("optim",)) for n in optimizers)]
        return _Listed(tuple(pairs))
    left = [n for n in names if not side_name(n) and _is_state_file(folder / n)]
    return _Listed(((left[0], ()),)) if len(left) == 1 else None


def side_name(name: str) -> bool:
    """Whether a file is one of the small ones beside states."""
    return SIDE.fullmatch(name) is not None


def _is_state_stem(stem: str) -> bool:
    return stem == "" or stem.startswith(("model", "optim", "pytorch_model"))


def _of_ranks(
    folder: Folder,
    ranked: dict[str, re.Match[str]],
    states: dict[str, dict[int, str]],
    by_stem: dict[str, dict[int, str]],
) -> _Listed:
    """Files of all ranks. Raises CorruptError naming those that are missing or foreign."""
    worlds = {int(m["world"]) for m in ranked.values() if m["world"] is not None}
    if len(worlds) > 1:
        raise CorruptError(
            f"{folder}: files of world sizes {sorted(worlds)} lie together; remove those of "
            "another run"
        )
    world = worlds.pop() if worlds else max(r for files in states.values() for r in files) + 1
    out: list[tuple[str, Path]] = []
    for stem in sorted(states, key=lambda s: (s.startswith("optim"), s)):
        files = states[stem]
        missing = [r for r in range(world) if r not in files]
        foreign = [files[r] for r in files if r >= world]
        if missing or foreign:
            raise CorruptError(
                f"{folder}: of {world} ranks' {stem or 'state'} files, "
                + (
                    f"those of ranks {missing[:8]} are missing"
                    if missing
                    else f"{foreign[0]} is of none"
                )
            )
        under: Path = () if not stem else (("optim",) if stem.startswith("optim") else ("model",))
        out += [(files[r], under) for r in range(world)]
    extras = [n for s, files in by_stem.items() if s not in states for n in files.values()]
    return _Listed(tuple(out), world, tuple(sorted(extras)))


def open_torch(path: Folder, options: OpenOptions) -> Checkpoint:
    """Read the headers of torch.save files, and the small values in them."""
    root = path.parent if path.is_file() else path
    if path.is_dir() and is_trainer(path):
        return _open_trainer(path, options)
    listed = _Listed(((path.name, ()),)) if path.is_file() else _listed(path)
    if listed is None:
        raise FormatError(f"{path}: holds no state of torch.save")
    reference = options.given.take("reference").get("reference")
    if reference is not None:
        models = [name for name, under in listed.states if under[:1] != ("optim",)]
        optimizers = [name for name, under in listed.states if under[:1] == ("optim",)]
        leaves = local_leaves(root, models, optimizers, reference_shapes(reference))
    else:
        leaves = leaves_of(root, listed.states)
    names = [name for name, _ in listed.states]
    more: list[Leaf] = []
    if path.is_dir():
        more, side = side_leaves(path)
        for name in listed.extras:
            if name not in side and name not in names:
                file = load(root, name)
                more.append(ObjectLeaf((name,), carry(file, file.root), name))
                side.append(name)
        more = [leaf for leaf in more if leaf.path[0] not in names]
        names += [n for n in side if n not in names]
    whole = len(listed.states) == 1
    kind = "lightning" if _is_lightning(leaves) else ("plain" if whole else "files")
    said = f"files of {listed.ranks} ranks" if listed.ranks else "one state"
    return build(
        Found(
            root=root,
            format=NAME,
            version=said,
            kind=kind,
            leaves=(*leaves, *more),
            files=tuple(names),
            ranks=listed.ranks,
            weights_only=options.weights_only,
        )
    )


def _open_trainer(folder: Folder, options: OpenOptions) -> Checkpoint:
    """A Trainer's folder of one process, or of DDP."""
    leaves, names = trainer_leaves(folder)
    more, side = side_leaves(folder)
    return build(
        Found(
            root=folder,
            format=NAME,
            version="HF Trainer, numbered optimizer",
            kind="files",
            leaves=(*leaves, *more),
            files=(*names, *side),
            weights_only=options.weights_only,
        )
    )


def _is_lightning(leaves: Iterable[Leaf]) -> bool:
    return any(leaf.path == ("pytorch-lightning_version",) for leaf in leaves)
