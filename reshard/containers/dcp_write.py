"""Drafts torch.distributed.checkpoint folders: `.distcp` files of blobs, the `.metadata` pickle.

torch 2.13 distributed/checkpoint (metadata.py, filesystem.py); real torch loads what is written.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from reshard.containers import torchfile
from reshard.containers.dcp_chunks import Place, TensorEntry
from reshard.containers.dcp_metadata import METADATA
from reshard.containers.inert import Global, Record, interned, new_tensor
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
        """The bytes around the elements, runs that touch made one up to some length."""
        begin, run = 0, bytearray()
        for start, blob in zip(self.starts, self.blobs, strict=True):
            for at, raw in blob.literals:
                if begin + len(run) != start + at or len(run) >= _PIECE:
                    yield begin, bytes(run)
                    begin = start + at
                    run.clear()
                run += raw
        if run:
            yield begin, bytes(run)

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


def tensor_span(sizes: tuple[int, ...], dtype: DType) -> tuple[int, int]:
    """Bytes of a tensor's blob before the elements, and of all of it."""
    blob = _tensor_blob(sizes, dtype)
    return blob.arrays["0"].offset, blob.length


def distcp_file(name: str, items: Iterable[TensorItem | ObjectItem]) -> DistcpFile:
    """The file of these blobs, one after the other without padding, as torch 2.13 writes it.

    torch puts objects before tensors; any order loads.
    """
    made = _Blobs(name)
    places: list[Place] = []
    begins: list[int | None] = []
    objects: dict[int, tuple[ObjectItem, Blob]] = {}  # a step counter is mostly one for all
    for item in items:
        start = made.stop
        if isinstance(item, TensorItem):
            blob = _tensor_blob(item.sizes, item.dtype)
            begins.append(start + blob.arrays["0"].offset)
        else:
            known = objects.get(id(item.value))
            if known is not None and (known[0].allow, known[0].values) == (item.allow, item.values):
                blob = known[1]
            else:
                blob = _object_blob(name, item)
                objects[id(item.value)] = item, blob
            begins.append(None)
        made.add(item.key, blob)
        places.append(Place(name, start, blob.length))
    draft = Draft(name, made.stop, Made(made.literals), Made(made.arrays), Made(made.checksums))
    return DistcpFile(draft, places, begins)


def _object_blob(name: str, item: ObjectItem) -> Blob:
    blob = torchfile.blob(item.value, file=name, allow=item.allow, values=item.values)
    if any(stored.numel for stored in blob.arrays.values()):
        missing = ", ".join(blob.arrays)
        raise CorruptError(f"{name}: {item.key}: no bytes for its storages {missing}")
    return blob


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
_PIECE = 1 << 20  # bytes of a pickle, or of literals that touch, that are made together
_SIZES = 1 << 14  # sizes and offsets whose opcodes are kept
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
        return b"".join(self.pieces())

    def pieces(self) -> Iterator[bytes]:
        """The pickle in pieces, each made when it is asked for: there can be millions of chunks."""
        writer = Writer(_ALLOWED, {})
        writer.put(b"\x80\x02")
        for _ in _Parts(writer).metadata(self):
            if len(writer.out) >= _PIECE:
                yield writer.take()
        writer.put(b".")
        yield writer.take()


def metadata_file(name: str, make: Callable[[], MetadataDraft]) -> Draft:
    """The `.metadata` file of what `make` gives, whenever its bytes are asked for."""

    def literals() -> Iterator[tuple[int, bytes]]:
        at = 0
        for piece in make().pieces():
            yield at, piece
            at += len(piece)

    return Draft(name, sum(len(piece) for _, piece in literals()), Made(literals))


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
        self.hint = writer.get("index")
        self.offset, self.length = writer.get("offset"), writer.get("length")
        self.info = b"ub" + self.new(_INFO) + b"}(" + writer.get("relative_path")
        self.known: dict[tuple[int, ...], bytes] = {}  # sizes, of which there are few

    def new(self, kind: Global) -> bytes:
        """A new object of this class, without arguments."""
        return self.writer.get(kind) + b")\x81"

    def size(self, numbers: tuple[int, ...]) -> bytes:
        """A torch.Size."""
        found = self.known.get(numbers)
        if found is None:
            found = self._size(numbers)
            if len(self.known) < _SIZES:
                self.known[numbers] = found
        return found

    def _size(self, numbers: tuple[int, ...]) -> bytes:
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

    def metadata(self, draft: MetadataDraft) -> Iterator[None]:
        """The Metadata object, with a pause after each of its entries."""
        writer, put = self.writer, self.writer.put
        put(self.new(_METADATA) + b"}(")
        writer.word("state_dict_metadata")
        put(b"}(")
        for key, entry in draft.tensors.items():
            self.tensor(key, entry)
            yield
        for key in draft.objects:
            writer.word(key)
            put(self.new(_BYTES))
        put(b"u")
        yield
        plan = draft.planner_data
        self.pair("planner_data", None if plan is None else _shared(plan))
        writer.word("storage_data")
        put(b"}(")
        for key, entry in draft.tensors.items():
            head = self.index + writer.get(key) + self.hint
            for i, chunk in enumerate(entry.chunks):
                put(head + integer(i) + self.offset + self.size(chunk.offsets))
                self.stored(chunk.place)
            yield
        for key, place in draft.objects.items():
            put(self.index + writer.get(key) + self.hint + b"N")
            self.stored(place)
            yield
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
        kind = interned("torch", entry.dtype.name)  # a Global is a type: 2 KB each
        put(b"(")
        for part in (kind, _STRIDED, False, _CONTIGUOUS, False):
            writer.save(part, key)
        put(b"t")
        writer.skip()  # each a tuple of its own, as torch has them
        put(b"b")
        writer.word("size")
        put(self.size(entry.shape))
        writer.word("chunks")
        put(b"](")
        for chunk in entry.chunks:
            put(self.chunk + self.size(chunk.offsets) + self.sizes + self.size(chunk.sizes) + b"ub")
        put(b"eub")

    def stored(self, place: Place) -> None:
        """What ends a MetadataIndex, and its _StorageInfo; its hint is None for objects."""
        writer = self.writer
        writer.put(self.info)
        writer.word(place.file)
        writer.put(self.offset + integer(place.offset) + self.length + integer(place.length))
        if place.transform:
            self.pair("transform_descriptors", list(place.transform))
        writer.put(b"ub")
