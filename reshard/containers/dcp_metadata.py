"""Reads the `.metadata` pickle of torch.distributed.checkpoint folders.

Facts from torch 2.13 distributed/checkpoint (metadata.py, filesystem.py) and the fixtures in
fixtures/dcp and fixtures/megatron; older classes are read as bags of attributes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from reshard import dtypes
from reshard.containers.dcp_chunks import Chunk, Chunks, Kinds, Place, TensorEntry
from reshard.containers.inert import Global, Record
from reshard.containers.marks import METADATA as METADATA
from reshard.containers.slim import load_large
from reshard.dtypes import DType
from reshard.errors import CorruptError, FormatError, UnsafeError

_OF_RANK = re.compile(r"__(\d+)\.metadata")
CUT = "The file is cut short: copy it again, or save the checkpoint again."
AGAIN = "The checkpoint contradicts itself; save it again."


@dataclass(frozen=True, slots=True)
class Metadata:
    """What `.metadata` says. `planner_data` maps flat keys to paths, or is None (Megatron).

    `other` holds attributes torch does not have (Megatron's `mcore_data`).
    """

    tensors: Mapping[str, TensorEntry]
    objects: Mapping[str, Place]
    planner_data: object = None
    version: str | None = None
    other: Mapping[str, object] = field(default_factory=dict)


class _Bag:
    """One of the classes of which there are millions: its attributes, and nothing else."""

    __slots__: tuple[str, ...] = ()

    def __setstate__(self, state: object) -> None:
        if not isinstance(state, dict):
            raise CorruptError(f"the state of a {type(self).__name__} is {state!r:.60}")
        for name in self.__slots__:
            setattr(self, name, state.get(name))

    def __repr__(self) -> str:
        return repr({name: getattr(self, name, None) for name in self.__slots__})


class _Chunk(_Bag):
    """ChunkStorageMetadata."""

    __slots__ = ("offsets", "sizes")
    offsets: object
    sizes: object


class _Index(_Bag):
    """MetadataIndex."""

    __slots__ = ("fqn", "offset")
    fqn: object
    offset: object


class _Info(_Bag):
    """_StorageInfo."""

    __slots__ = ("length", "offset", "relative_path", "transform_descriptors")
    relative_path: object
    offset: object
    length: object
    transform_descriptors: object


_CLASSES: Mapping[str, type] = {
    "ChunkStorageMetadata": _Chunk, "MetadataIndex": _Index, "_StorageInfo": _Info,
}  # fmt: skip
_SIZE = ("torch", "Size")

# ---------------------------------------------------------------------- .metadata, read


def is_metadata(name: str) -> bool:
    """Whether a file of this name is `.metadata`, or that of one rank."""
    return name == METADATA or _OF_RANK.fullmatch(name) is not None


def rank_metadata(folder: Path) -> list[str]:
    """The metadata files of ranks that saved without collectives (`use_collectives=False`).

    Source: torch 2.13 distributed/checkpoint/filesystem.py, _get_metadata_path. Raises
    CorruptError for ranks that are missing between others.
    """
    found = {int(m[1]): p.name for p in folder.iterdir() if (m := _OF_RANK.fullmatch(p.name))}
    missing = [rank for rank in range(max(found, default=-1)) if rank not in found]
    if missing:
        raise CorruptError(
            f"{folder}: a save without collectives, and the metadata of ranks {missing[:8]} is "
            "missing. Copy it again."
        )
    return [found[rank] for rank in sorted(found)]


def read_metadata(folder: Path, name: str = METADATA) -> Metadata:
    """The checked contents of the folder's `.metadata`, or a rank's; no blob is opened.

    Raises CorruptError for a save that never finished, entries that do not match, files that are
    missing or too short; UnsafeError for paths that leave the folder.
    Gaps and overlaps of chunks are `Layout.check`'s.
    """
    path = folder / name
    if not path.is_file():
        _explain_missing(folder)
    root = load_large(path, _CLASSES, intern=_SIZE)
    if not isinstance(root, Record) or not root.fields:
        raise CorruptError(f"{path}: holds no Metadata but {root!r:.80}. {AGAIN}")
    fields = root.fields
    entries, storage = fields.get("state_dict_metadata"), fields.get("storage_data")
    if not isinstance(entries, dict) or not isinstance(storage, dict):
        raise CorruptError(f"{path}: lacks state_dict_metadata or storage_data. {AGAIN}")
    places = _places(path, storage, Listed(folder))
    tensors: dict[str, TensorEntry] = {}
    objects: dict[str, Place] = {}
    kinds = Kinds()
    for key, entry in entries.items():
        if not isinstance(key, str) or not isinstance(entry, Record):
            raise CorruptError(f"{path}: {key!r:.80} is no key with an entry. {AGAIN}")
        if entry.type.name == "TensorStorageMetadata":
            tensors[key] = _tensor_entry(path, key, entry, places.get(key, {}), kinds)
        elif entry.type.name == "BytesStorageMetadata":
            place = places.get(key, {}).pop(None, None)
            if place is None:
                raise CorruptError(f"{path}: {key}: no storage entry for the object. {AGAIN}")
            objects[key] = place
        else:
            raise FormatError(f"{path}: {key}: an entry of type {entry.type.path} is not known")
    left = [(key, at, place) for key, held in places.items() for at, place in held.items()]
    if left:
        key, offset, place = left[0]
        raise CorruptError(
            f"{path}: storage entry {key!r} at offset {offset} in {place.file} belongs to no chunk "
            f"({len(left)} such entries). {AGAIN}"
        )
    version = fields.get("version")
    known = {"state_dict_metadata", "storage_data", "planner_data", "storage_meta", "version"}
    return Metadata(
        tensors,
        objects,
        fields.get("planner_data"),
        version if isinstance(version, str) else None,
        {k: v for k, v in fields.items() if k not in known and k != "all_local_plans"},
    )


def _explain_missing(folder: Path) -> None:
    if not folder.is_dir():
        raise FormatError(f"{folder}: no such folder")
    names = os.listdir(folder)
    if any(name.endswith(".distcp") for name in names):
        raise CorruptError(
            f"{folder}: an incomplete save: .distcp files but no .metadata, which is written last. "
            "Use an earlier step, or save again."
        )
    raise FormatError(f"{folder}: no .metadata: not a torch.distributed.checkpoint folder")


class Listed:
    """The files the metadata names: checked once each, with their sizes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.paths: dict[str, Path] = {}
        self.sizes: dict[str, int] = {}

    def path(self, name: str) -> Path:
        """The path of the file `name`, as `inside` gives it."""
        path = self.paths.get(name)
        if path is None:
            path = self.paths[name] = inside(self.folder, name)
        return path

    def size(self, name: str) -> int:
        """Bytes of the file `name`."""
        size = self.sizes.get(name)
        if size is None:
            size = self.sizes[name] = os.stat(self.path(name)).st_size
        return size


def inside(folder: Path, name: str) -> Path:
    """The path of an existing file below `folder`.

    Raises UnsafeError if the name or a link leads out of it, CorruptError if there is no file.
    """
    pure = PurePosixPath(name)
    if not name or pure.is_absolute() or ".." in pure.parts or "\\" in name or "\0" in name:
        raise UnsafeError(f"{folder}: {METADATA} names the file {name!r:.200}, outside the folder")
    path = folder / name
    if not path.is_file():
        raise CorruptError(f"{folder}: the file {name} that {METADATA} names is missing. Copy it.")
    if not path.resolve().is_relative_to(folder.resolve()):
        raise UnsafeError(f"{folder}: {name} is a link to {path.resolve()}, outside the folder")
    return path


_ByOffset = dict[tuple[int, ...] | None, Place]


def _places(path: Path, storage: dict[object, object], files: Listed) -> dict[str, _ByOffset]:
    """The storage entries by key and chunk offset; `storage` is emptied, as there are millions."""
    out: dict[str, _ByOffset] = {}
    names: dict[str, str] = {}  # one object per distinct name: a million entries share few
    while storage:
        index, info = storage.popitem()
        if not isinstance(index, _Index) or not isinstance(info, _Info):
            raise CorruptError(f"{path}: storage_data holds {index!r:.60}: {info!r:.60}. {AGAIN}")
        key, offset = index.fqn, index.offset
        name, at, length = info.relative_path, info.offset, info.length
        if (
            not isinstance(key, str)
            or not (offset is None or _is_sizes(offset))
            or not isinstance(name, str)
            or not (type(at) is int and type(length) is int and at >= 0 and length >= 0)
        ):
            raise CorruptError(f"{path}: a storage entry is {index!r:.150}: {info!r:.150}. {AGAIN}")
        size = files.size(name)
        if at + length > size:
            raise CorruptError(
                f"{files.folder / name}: has {size} bytes, but {key} lies at {at} to "
                f"{at + length}. {CUT}"
            )
        steps = info.transform_descriptors or ()
        if not isinstance(steps, tuple | list) or not all(isinstance(s, str) for s in steps):
            raise CorruptError(f"{path}: {key}: transform_descriptors is {steps!r:.80}. {AGAIN}")
        held = out.setdefault(key, {})
        if offset in held:
            raise CorruptError(f"{path}: {key}: two storage entries at offset {offset}. {AGAIN}")
        place = Place(names.setdefault(name, name), at, length, tuple(map(str, steps)))
        held[offset] = place  # type: ignore[index]  # _is_sizes has checked it
    return out


def _is_sizes(value: object) -> bool:
    if type(value) is not tuple:
        return False
    for n in value:  # noqa: SIM110  # twice as fast as all(): this runs millions of times
        if type(n) is not int or not 0 <= n < 1 << 62:
            return False
    return True


def _sizes(path: Path, key: str, what: str, value: object) -> tuple[int, ...]:
    if not _is_sizes(value):
        raise CorruptError(f"{path}: {key}: {what} is {value!r:.80}. {AGAIN}")
    return value  # type: ignore[return-value]  # _is_sizes has checked it


def _tensor_entry(
    path: Path, key: str, entry: Record, places: _ByOffset, kinds: Kinds
) -> TensorEntry:
    """The tensor's entry; takes its storage entries out of `places`."""
    fields = entry.fields
    shape = _sizes(path, key, "its size", fields.get("size"))
    dtype = _dtype(path, key, fields.get("properties"))
    listed = fields.get("chunks")
    if not isinstance(listed, list):
        raise CorruptError(f"{path}: {key}: chunks is {listed!r:.80}. {AGAIN}")
    chunks = Chunks(len(shape), kinds)
    for item in listed:
        if not isinstance(item, _Chunk):
            raise CorruptError(f"{path}: {key}: a chunk is {item!r:.80}. {AGAIN}")
        offsets = _sizes(path, key, "a chunk's offset", item.offsets)
        sizes = _sizes(path, key, "a chunk's size", item.sizes)
        if not (len(offsets) == len(sizes) == len(shape)) or any(
            a + n > whole for a, n, whole in zip(offsets, sizes, shape, strict=True)
        ):
            raise CorruptError(
                f"{path}: {key}: chunk at {list(offsets)} of {list(sizes)} lies outside shape "
                f"{list(shape)}. {AGAIN}"
            )
        if 0 in sizes:
            continue
        place = places.pop(offsets, None)
        if place is None:
            raise CorruptError(
                f"{path}: {key}: no storage entry for the chunk at {list(offsets)}, or two chunks "
                f"there. {AGAIN}"
            )
        chunks.append(Chunk(offsets, sizes, place))
    for item in listed:  # an empty chunk may share its offset with another (fsdp2_w4_uneven)
        if 0 in item.sizes:
            places.pop(item.offsets, None)
    listed.clear()
    return TensorEntry(shape, dtype, chunks)


def _dtype(path: Path, key: str, properties: object) -> DType:
    """The dtype of TensorProperties: first of a 5-tuple state, or an attribute."""
    found: object = None
    if isinstance(properties, Record):
        state = properties.state
        found = state[0] if isinstance(state, tuple) and state else properties.get("dtype")
        if isinstance(found, dict):
            found = found.get("dtype")
    if not isinstance(found, Global) or found.module != "torch":
        raise CorruptError(f"{path}: {key}: its dtype is {found!r:.80}. {AGAIN}")
    try:
        return dtypes.named(found.name)
    except FormatError as error:
        raise FormatError(f"{path}: {key}: {error}") from None
