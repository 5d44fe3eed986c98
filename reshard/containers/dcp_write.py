"""Drafts torch.distributed.checkpoint folders: `.distcp` files of blobs, the `.metadata` pickle.

torch 2.13 distributed/checkpoint (metadata.py, filesystem.py); real torch loads what is written.
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from reshard.containers import torchfile
from reshard.containers.dcp_chunks import Place, TensorEntry
from reshard.containers.dcp_metadata import METADATA
from reshard.containers.inert import Global, Record, new_tensor
from reshard.containers.pickler import Writer, integer
from reshard.containers.torchfile import Blob
from reshard.dtypes import DType
from reshard.errors import CorruptError
from reshard.layout import Checksum, Draft, Made, StoredArray


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
    """A `.distcp` file laid out. `places` and `begins` go with the items, in order."""

    draft: Draft
    places: list[Place]
    begins: list[int | None]  # where a tensor's elements lie in the file; None for objects


@dataclass(slots=True)
class _Blobs:
    """Blobs of one file, one after the other; those of tensors alike in shape share one.

    Literals, arrays and checksums are made when they are asked for: headers of 10^6 blobs differ
    in their place alone.
    """

    file: str
    starts: array[int] = field(default_factory=lambda: array("q"))
    blobs: list[Blob] = field(default_factory=list)  # each as if it began the file
    keys: list[str] = field(default_factory=list)
    stop: int = 0

    def add(self, key: str, blob: Blob) -> None:
        """Put one more at the end."""
        self.starts.append(self.stop)
        self.blobs.append(blob)
        self.keys.append(key)
        self.stop += blob.length

    def literals(self) -> Iterator[tuple[int, bytes]]:
        """The bytes around the elements, runs that touch made one."""
        begin, run = 0, b""
        for start, blob in zip(self.starts, self.blobs, strict=True):
            for at, raw in blob.literals:
                if begin + len(run) == start + at:
                    run += raw
                    continue
                yield begin, run
                begin, run = start + at, raw
        if run:
            yield begin, run

    def arrays(self) -> Iterator[StoredArray]:
        """What is to be filled."""
        for start, blob, key in zip(self.starts, self.blobs, self.keys, strict=True):
            for stored in blob.arrays.values():
                if stored.numel:
                    yield self._moved(stored, start, key)

    def checksums(self) -> Iterator[Checksum]:
        """What is to be patched in once the elements are there."""
        for start, blob, key in zip(self.starts, self.blobs, self.keys, strict=True):
            for c in blob.checksums:
                stored = self._moved(c.array, start, key)
                yield Checksum(stored, tuple(start + at for at in c.at))

    def _moved(self, stored: StoredArray, by: int, key: str) -> StoredArray:
        return StoredArray(
            self.file, by + stored.offset, stored.shape, stored.dtype, key, self.file
        )


@lru_cache(maxsize=1 << 12)
def _tensor_blob(sizes: tuple[int, ...], dtype: DType) -> Blob:
    """The blob of a tensor, as if it began a file without a name."""
    return torchfile.blob(new_tensor(sizes, dtype, "0"), file="")


def distcp_file(name: str, items: Iterable[TensorItem | ObjectItem]) -> DistcpFile:
    """The file of these blobs, one after the other without padding, as torch 2.13 writes it.

    torch puts objects before tensors; any order loads.
    """
    made = _Blobs(name)
    places: list[Place] = []
    begins: list[int | None] = []
    for item in items:
        start = made.stop
        if isinstance(item, TensorItem):
            blob = _tensor_blob(item.sizes, item.dtype)
            begins.append(start + blob.arrays["0"].offset)
        else:
            blob = torchfile.blob(item.value, file=name, allow=item.allow, values=item.values)
            if any(stored.numel for stored in blob.arrays.values()):
                missing = ", ".join(blob.arrays)
                raise CorruptError(f"{name}: {item.key}: no bytes for its storages {missing}")
            begins.append(None)
        made.add(item.key, blob)
        places.append(Place(name, start, blob.length))
    draft = Draft(name, made.stop, Made(made.literals), Made(made.arrays), Made(made.checksums))
    return DistcpFile(draft, places, begins)


Path = tuple[str | int, ...]
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
    planner_data: Mapping[str, Path] | None = None
    save_id: str | None = None
    version: str = "1.0.0"

    def pickled(self) -> bytes:
        """The pickle: torch 2.13's classes and values, in protocol 2."""
        writer = Writer(_ALLOWED, {})
        writer.put(b"\x80\x02")
        parts = _Parts(writer)
        parts.metadata(self)
        writer.put(b".")
        return bytes(writer.out)


def _shared(plan: Mapping[str, Path]) -> dict[str, Path]:
    """The same with one object for equal texts: a pickle refers to those by identity."""
    texts: dict[str | int, str | int] = {}
    return {
        str(texts.setdefault(key, key)): tuple(texts.setdefault(p, p) for p in path)
        for key, path in plan.items()
    }


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
        self.pair("planner_data", None if plan is None else _shared(plan))
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
