"""Drafts torch.distributed.checkpoint folders: `.distcp` files of blobs, the `.metadata` pickle.

torch 2.13 distributed/checkpoint (metadata.py, filesystem.py); real torch loads what is written.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from reshard.containers import torchfile
from reshard.containers.dcp_read import Place, TensorEntry
from reshard.containers.inert import Global, Record, new_tensor
from reshard.containers.pickler import Writer
from reshard.dtypes import DType
from reshard.errors import CorruptError
from reshard.layout import Checksum, Draft, StoredArray


@dataclass(frozen=True, slots=True)
class TensorItem:
    """A chunk to be written: the box of tensor `key` at `offsets`."""

    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: DType


@dataclass(frozen=True, slots=True)
class ObjectItem:
    """A python object to be written; `allow` holds the globals it may name."""

    key: str
    value: object
    allow: Container[str] = ()
    values: Mapping[str, bytes] = field(default_factory=dict)  # of its tensors' storages


class DistcpFile(NamedTuple):
    """A `.distcp` file laid out. `places` and `arrays` go with the items, in order."""

    draft: Draft
    places: list[Place]
    arrays: list[StoredArray | None]  # None for objects


def distcp_file(name: str, items: Iterable[TensorItem | ObjectItem]) -> DistcpFile:
    """The file of these blobs, one after the other without padding, as torch 2.13 writes it.

    torch puts objects before tensors; any order loads.
    """
    literals: list[tuple[int, bytes]] = []
    checksums: list[Checksum] = []
    places: list[Place] = []
    arrays: list[StoredArray | None] = []
    at = 0
    for item in items:
        if isinstance(item, TensorItem):
            ref = new_tensor(item.sizes, item.dtype, "0")
            made = torchfile.blob(ref, file=name, start=at, key=item.key, holder=name)
            arrays.append(made.arrays["0"])
        else:
            made = torchfile.blob(
                item.value, file=name, start=at, allow=item.allow, values=item.values
            )
            if any(array.numel for array in made.arrays.values()):
                missing = ", ".join(made.arrays)
                raise CorruptError(f"{name}: {item.key}: no bytes for its storages {missing}")
            arrays.append(None)
        literals += made.literals
        checksums += made.checksums
        places.append(Place(name, at, made.length))
        at += made.length
    filled = [array for array in arrays if array is not None and array.numel]
    return DistcpFile(Draft(name, at, _joined(literals), filled, checksums), places, arrays)


def _joined(literals: Sequence[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
    """The same bytes, with runs that touch made one."""
    runs: list[tuple[int, list[bytes], int]] = []
    for at, raw in literals:
        if runs and runs[-1][2] == at:
            start, parts, _ = runs[-1]
            parts.append(raw)
            runs[-1] = (start, parts, at + len(raw))
        else:
            runs.append((at, [raw], at + len(raw)))
    return [(at, b"".join(parts)) for at, parts, _ in runs]


_MODULE = "torch.distributed.checkpoint.metadata"
_METADATA = Global(_MODULE, "Metadata")
_TENSOR = Global(_MODULE, "TensorStorageMetadata")
_BYTES = Global(_MODULE, "BytesStorageMetadata")
_PROPERTIES = Global(_MODULE, "TensorProperties")
_CHUNK = Global(_MODULE, "ChunkStorageMetadata")
_INDEX = Global(_MODULE, "MetadataIndex")
_META = Global(_MODULE, "StorageMeta")
_MEMORY = Global(_MODULE, "_MEM_FORMAT_ENCODING")
_INFO = Global("torch.distributed.checkpoint.filesystem", "_StorageInfo")
_LAYOUT = Global("torch.serialization", "_get_layout")
_SIZE = Global("torch", "Size")
_ALLOWED = frozenset(
    g.path for g in (_METADATA, _TENSOR, _BYTES, _PROPERTIES, _CHUNK, _INDEX, _META, _MEMORY, _INFO)
)


@dataclass(frozen=True, slots=True)
class MetadataDraft:
    """A `.metadata` to be written. `planner_data` is None for Megatron."""

    tensors: Mapping[str, TensorEntry]
    objects: Mapping[str, Place]
    planner_data: Mapping[str, tuple[str | int, ...]] | None = None
    save_id: str | None = None
    version: str = "1.0.0"

    def pickled(self) -> bytes:
        """The pickle: torch 2.13's classes and values, in protocol 2."""
        return b"".join(_metadata(self))


def _metadata(draft: MetadataDraft) -> Iterator[bytes]:
    writer = Writer(_ALLOWED, {})
    out = writer.out
    layout = Record(_LAYOUT, ("torch.strided",), made="reduce")
    memory = Record(_MEMORY, (0,), made="reduce")

    def new(kind: Global) -> None:
        writer.name(kind, kind.name)
        out.append(b")\x81")

    def put(name: str, value: object) -> None:
        writer.word(name)
        writer.save(value, name)

    def size(numbers: tuple[int, ...]) -> None:
        writer.name(_SIZE, "")
        writer.sizes(numbers)
        out.append(b"\x85R")

    out.append(b"\x80\x02")
    new(_METADATA)
    out.append(b"}(")
    writer.word("state_dict_metadata")
    out.append(b"}(")
    for key, entry in draft.tensors.items():
        writer.word(key)
        new(_TENSOR)
        out.append(b"}(")
        writer.word("properties")
        new(_PROPERTIES)
        writer.save((Global("torch", entry.dtype.name), layout, False, memory, False), key)
        out.append(b"b")
        writer.word("size")
        size(entry.shape)
        writer.word("chunks")
        out.append(b"](")
        for chunk in entry.chunks:
            new(_CHUNK)
            out.append(b"}(")
            writer.word("offsets")
            size(chunk.offsets)
            writer.word("sizes")
            size(chunk.sizes)
            out.append(b"ub")
        out.append(b"eub")
    for key in draft.objects:
        writer.word(key)
        new(_BYTES)
    out.append(b"u")
    put("planner_data", None if draft.planner_data is None else dict(draft.planner_data))
    writer.word("storage_data")
    out.append(b"}(")

    def stored(key: str, offset: tuple[int, ...] | None, index: int | None, place: Place) -> None:
        new(_INDEX)
        out.append(b"}(")
        writer.word("fqn")
        writer.word(key)
        writer.word("index")
        writer.save(index, key)
        if offset is not None:
            writer.word("offset")
            size(offset)
        out.append(b"ub")
        new(_INFO)
        out.append(b"}(")
        writer.word("relative_path")
        writer.word(place.file)
        put("offset", place.offset)
        put("length", place.length)
        if place.transform:
            put("transform_descriptors", list(place.transform))
        out.append(b"ub")

    for key, entry in draft.tensors.items():
        for i, chunk in enumerate(entry.chunks):
            stored(key, chunk.offsets, i, chunk.place)
    for key, place in draft.objects.items():
        stored(key, None, None, place)
    out.append(b"u")
    writer.word("storage_meta")
    new(_META)
    out.append(b"}(")
    put("checkpoint_id", None)
    put("save_id", draft.save_id)
    put("load_id", None)
    put("modules", [])
    out.append(b"ub")
    put("version", draft.version)
    out.append(b"ub.")
    yield from out
