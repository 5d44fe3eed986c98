"""The DCP folders: one store, or a model's and an optimizer's beside small files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path as Folder

from reshard.checkpoint import Checkpoint
from reshard.containers import dcp, rank_names, torchfile
from reshard.containers.carried import Carried, carry
from reshard.containers.small import read_object
from reshard.errors import CorruptError, FormatError, ReshardError, UsageError
from reshard.format import OpenOptions

from .leaves import Leaf, ObjectLeaf
from .listing import side_name
from .read import Found, build
from .recognise import DCP, MODEL_FOLDER, OPTIMIZER_FOLDER, shard_names
from .safe_stores import open_shards
from .stores import Store, open_store
from .values import Path

META = "meta.pt"
_RNG = r"(?:rng_state|random_states)_(?P<rank>\d+)\.(?:pth|pkl)"
_SECOND = re.compile(r"(?:pytorch_model_fsdp|optimizer)_[1-9]\d*")
_OWNER = re.compile(r"__(\d+)_\d+\.distcp")


def open_dcp(folder: Folder, options: OpenOptions) -> Checkpoint:
    """Read the headers of a DCP checkpoint, and the small values in it."""
    ties = may_tie(options.given.take("ties"))
    if not (folder / dcp.METADATA).exists() and (names := shard_names(folder)):
        return _open_shards(folder, names)
    if (folder / "common.pt").is_file() and options.given.format is None:
        raise CorruptError(
            f"{folder}: common.pt is Megatron's, and metadata.json, which its save ends with, is "
            "missing or damaged. Copy it again, or use an earlier iteration; --from dcp reads the "
            "tensors alone."
        )
    inner = [f for f in (MODEL_FOLDER, OPTIMIZER_FOLDER) if (folder / f).is_dir()]
    if inner and not (folder / dcp.METADATA).exists():
        kind, folders = "accelerate", (MODEL_FOLDER, OPTIMIZER_FOLDER)
        _refuse_others(folder)
    else:
        kind, folders, inner = "plain", ("", ""), [""]
    leaves: list[Leaf] = []
    files: list[str] = []
    versions: set[str] = set()
    ranks: set[int] = set()
    for under in inner:
        store, found = open_store(folder, under)
        leaves += found
        files += _files(store)
        versions.add(store.metadata.version or "no version")
        ranks |= _owners(store)
    side, names = side_leaves(folder)
    if any(leaf.path[0] == META for leaf in side):
        kind = "lightning" if _is_lightning(side) else kind
    said = f"metadata {', '.join(sorted(versions))}"
    return build(
        Found(
            root=folder,
            format=DCP,
            version=said,
            kind=kind,
            leaves=(*leaves, *side),
            files=(*files, *names),
            ranks=_checked_ranks(folder, ranks, options),
            folders=folders,
            weights_only=options.weights_only,
            ties=ties,
        )
    )


def _refuse_others(folder: Folder) -> None:
    """Raises for an optimizer's store without the model's beside it, and for a second model's."""
    others = sorted(p.name for p in folder.iterdir() if _SECOND.fullmatch(p.name))
    if others:
        raise FormatError(
            f"{folder}: several models or optimizers ({', '.join(others)} beside the first) are "
            "not read together"
        )
    if not (folder / MODEL_FOLDER).is_dir():
        raise CorruptError(
            f"{folder}: {OPTIMIZER_FOLDER} is there, and {MODEL_FOLDER} is missing. Copy it again; "
            "of FSDP1's LOCAL_STATE_DICT, whose model lies in files of ranks, save a "
            "SHARDED_STATE_DICT."
        )


def may_tie(asked: Mapping[str, str]) -> bool:
    """Whether equal bytes may show tied weights: `--from dcp:ties=no` says that they do not."""
    said = asked.get("ties", "yes")
    if said not in ("yes", "no"):
        raise UsageError(f"ties={said}: say yes or no")
    return said == "yes"


def _open_shards(folder: Folder, names: list[str]) -> Checkpoint:
    """The weights that HuggingFaceStorageWriter left on each rank."""
    found = open_shards(folder)
    return build(
        Found(
            root=folder,
            format=DCP,
            version=f"Hugging Face storage, {len(names)} shards",
            kind="plain",
            leaves=found.leaves,
            files=found.files,
            ranks=found.ranks,
            problems=found.problems,
        )
    )


def _checked_ranks(folder: Folder, owners: set[int], options: OpenOptions) -> int | None:
    """How many ranks wrote the files; `--from` may only repeat it or say what they do not."""
    found = max(owners) + 1 if owners else None
    degrees = options.given.degrees
    if not degrees:
        return found
    said = 1
    for name, n in degrees.items():
        if name not in ("tp", "pp", "cp", "dp", "ep"):
            raise FormatError(f"--from says {name}={n}; a DCP checkpoint has no such degree")
        said *= n if name != "ep" else 1
    if found is not None and "dp" in degrees and said < found:
        raise FormatError(f"{folder}: --from says {said} ranks, but files of {found} are there")
    if found is None or "dp" in degrees:  # the last ranks may have written nothing
        return said
    if said > found:
        raise FormatError(f"{folder}: --from says {said} ranks, but files of {found} are there")
    return found


def _files(store: Store) -> list[str]:
    held = {c.place.file for e in store.metadata.tensors.values() for c in e.chunks}
    held |= {p.file for p in store.metadata.objects.values()}
    lead = f"{store.under}/" if store.under else ""
    return [lead + name for name in sorted(held | set(store.names))]


def _owners(store: Store) -> set[int]:
    return {int(m[1]) for name in _files(store) if (m := _OWNER.fullmatch(name.rpartition("/")[2]))}


def side_leaves(folder: Folder) -> tuple[list[Leaf], list[str]]:
    """The values of the small files beside the stores, each file one path component."""
    leaves: list[Leaf] = []
    names: list[str] = []
    for path in sorted(folder.iterdir()):
        if not side_name(path.name) or not path.is_file():
            continue
        leaves += [ObjectLeaf(p, v, path.name) for p, v in _side_values(path)]
        names.append(path.name)
    return leaves, names


def _side_values(path: Folder) -> Iterable[tuple[Path, Carried]]:
    if path.suffix == ".json":
        return [((path.name,), Carried(read_object(path)))]
    try:
        file = torchfile.load(path)
    except CorruptError:
        try:  # accelerate pickles random_states without torch where it can
            return [((path.name,), Carried(torchfile.load_pickle(path)))]
        except ReshardError as error:
            raise CorruptError(f"{path}: neither torch.save's nor a pickle: {error}") from None
    rank_names.refuse_other(file, (_RNG,))
    return [((path.name,), carry(file, file.root))]


def _is_lightning(side: Iterable[Leaf]) -> bool:
    for leaf in side:
        if (
            leaf.path == (META,)
            and isinstance(leaf, ObjectLeaf)
            and isinstance(leaf.value.obj, dict)
        ):
            return "pytorch-lightning_version" in leaf.value.obj
    return False
