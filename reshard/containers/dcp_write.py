"""Drafts torch.distributed.checkpoint folders: `.distcp` files of blobs, the `.metadata` pickle.

torch 2.13 distributed/checkpoint (metadata.py, filesystem.py); real torch loads what is written.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from reshard.containers import torchfile
from reshard.containers.dcp_read import METADATA, Place, TensorEntry
from reshard.containers.inert import Global, Record, new_tensor
from reshard.containers.pickler import Writer, integer
from reshard.containers.torchfile import Blob
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
    known: dict[tuple[tuple[int, ...], str], Blob] = {}  # blobs of tensors differ in nothing else
    at = 0
    for item in items:
        if isinstance(item, TensorItem):
            alike = (item.sizes, item.dtype.name)
            if alike not in known:
                ref = new_tensor(item.sizes, item.dtype, "0")
                known[alike] = torchfile.blob(ref, file=name, holder=name)
            made = _moved(known[alike], at, item.key)
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


def _moved(blob: Blob, by: int, key: str) -> Blob:
    """A tensor's blob laid out `by` bytes further, for another key."""
    arrays = {k: replace(a, offset=a.offset + by, key=key) for k, a in blob.arrays.items()}
    return Blob(
        blob.length,
        [(at + by, raw) for at, raw in blob.literals],
        arrays,
        [Checksum(arrays["0"], tuple(at + by for at in c.at)) for c in blob.checksums],
    )


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
_STRIDED = Record(_LAYOUT, ("torch.strided",), made="reduce")
_CONTIGUOUS = Record(_MEMORY, (0,), made="reduce")
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
        writer = Writer(_ALLOWED, {})
        writer.put(b"\x80\x02")
        parts = _Parts(writer)
        parts.metadata(self)
        writer.put(b".")
        return b"".join(writer.out)


class _Parts:
    """Runs of opcodes for the metadata's classes, most made once: there can be millions."""

    def __init__(self, writer: Writer) -> None:
        self.writer = writer
        kinds = (_METADATA, _TENSOR, _BYTES, _PROPERTIES, _CHUNK, _INDEX, _META, _INFO, _SIZE)
        writer.put(b"(")  # all names once, remembered, then dropped from the stack
        for kind in kinds:
            writer.name(kind, METADATA)
        for word in ("offsets", "sizes", "fqn", "index", "offset", "relative_path", "length"):
            writer.word(word)
        writer.put(b"1")
        self.chunk = self.new(_CHUNK) + b"}(" + writer.get("offsets")
        self.sizes = writer.get("sizes")
        self.index = self.new(_INDEX) + b"}(" + writer.get("fqn")
        self.info = self.new(_INFO) + b"}(" + writer.get("relative_path")

    def new(self, kind: Global) -> bytes:
        """A new object of this class, without arguments."""
        return self.writer.get(kind) + b")\x81"

    def size(self, numbers: tuple[int, ...]) -> bytes:
        """A torch.Size."""
        body = b"".join(map(integer, numbers))
        if len(numbers) > 3:
            body = b"(" + body + b"t"
        else:
            body += (b")", b"\x85", b"\x86", b"\x87")[len(numbers)]
        return self.writer.get(_SIZE) + body + b"\x85R"

    def pair(self, name: str, value: object) -> None:
        """An attribute and its value."""
        self.writer.word(name)
        self.writer.save(value, name)

    def metadata(self, draft: MetadataDraft) -> None:
        """The Metadata object."""
        writer, put = self.writer, self.writer.put
        put(self.new(_METADATA) + b"}(")
        writer.word("state_dict_metadata")
        put(b"}(")
        for key, entry in draft.tensors.items():
            self.tensor(key, entry)
        for key in draft.objects:
            writer.word(key)
            put(self.new(_BYTES))
        put(b"u")
        plan = draft.planner_data
        self.pair("planner_data", None if plan is None else dict(plan))
        writer.word("storage_data")
        put(b"}(")
        for key, entry in draft.tensors.items():
            for i, chunk in enumerate(entry.chunks):
                self.stored(key, chunk.offsets, i, chunk.place)
        for key, place in draft.objects.items():
            self.stored(key, None, None, place)
        put(b"u")
        writer.word("storage_meta")
        put(self.new(_META) + b"}(")
        self.pair("checkpoint_id", None)
        self.pair("save_id", draft.save_id)
        self.pair("load_id", None)
        self.pair("modules", [])
        put(b"ub")
        self.pair("version", draft.version)
        put(b"ub")

    def tensor(self, key: str, entry: TensorEntry) -> None:
        """A key and its TensorStorageMetadata."""
        writer, put = self.writer, self.writer.put
        writer.word(key)
        put(self.new(_TENSOR) + b"}(")
        writer.word("properties")
        put(self.new(_PROPERTIES))
        writer.save((Global("torch", entry.dtype.name), _STRIDED, False, _CONTIGUOUS, False), key)
        put(b"b")
        writer.word("size")
        put(self.size(entry.shape))
        writer.word("chunks")
        put(b"](")
        for chunk in entry.chunks:
            put(self.chunk + self.size(chunk.offsets) + self.sizes + self.size(chunk.sizes) + b"ub")
        put(b"eub")

    def stored(
        self, key: str, offset: tuple[int, ...] | None, index: int | None, place: Place
    ) -> None:
        """A MetadataIndex and its _StorageInfo. The index is a hint, None for objects."""
        writer, get = self.writer, self.writer.get
        hint = b"N" if index is None else integer(index)
        where = b"" if offset is None else get("offset") + self.size(offset)
        writer.put(self.index + get(key) + get("index") + hint + where + b"ub" + self.info)
        writer.word(place.file)
        offset_length = (
            get("offset") + integer(place.offset) + get("length") + integer(place.length)
        )
        writer.put(offset_length)
        if place.transform:
            self.pair("transform_descriptors", list(place.transform))
        writer.put(b"ub")
