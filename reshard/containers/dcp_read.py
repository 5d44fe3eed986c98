"""Reads torch.distributed.checkpoint folders: the `.metadata` pickle, and blobs of torch.save.

Facts from torch 2.13 distributed/checkpoint (metadata.py, filesystem.py) and the fixtures in
fixtures/dcp and fixtures/megatron; older classes are read as bags of attributes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from reshard import dtypes
from reshard.containers import torchfile, zips
from reshard.containers.inert import Global, Record, TensorRef
from reshard.containers.pickles import load_pickle
from reshard.containers.torchfile import TorchFile
from reshard.containers.zips import Window
from reshard.dtypes import DType
from reshard.errors import CorruptError, FormatError, UnsafeError
from reshard.layout import StoredArray

METADATA = ".metadata"
_CUT = "The file is cut short: copy it again, or save the checkpoint again."
_AGAIN = "The checkpoint contradicts itself; save it again."


class Place(NamedTuple):
    """Where a blob lies: bytes [offset, offset + length) of `file`, encoded by `transform`."""

    file: str  # relative to the checkpoint's folder
    offset: int
    length: int
    transform: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Chunk:
    """The box of a tensor at `offsets`, of `sizes`, and the blob that holds it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: Place


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A whole tensor and its chunks, in the metadata's order, empty ones left out."""

    shape: tuple[int, ...]
    dtype: DType
    chunks: Sequence[Chunk]


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


# ---------------------------------------------------------------------- .metadata, read


def read_metadata(folder: Path) -> Metadata:
    """The checked contents of the folder's `.metadata`; no blob is opened.

    Raises CorruptError for a save that never finished, entries that do not match, files that are
    missing or too short; UnsafeError for paths that leave the folder.
    Gaps and overlaps of chunks are `Layout.check`'s.
    """
    path = folder / METADATA
    if not path.is_file():
        _explain_missing(folder)
    root = load_pickle(path)
    if not isinstance(root, Record) or not root.fields:
        raise CorruptError(f"{path}: holds no Metadata but {root!r:.80}. {_AGAIN}")
    fields = root.fields
    entries, storage = fields.get("state_dict_metadata"), fields.get("storage_data")
    if not isinstance(entries, dict) or not isinstance(storage, dict):
        raise CorruptError(f"{path}: lacks state_dict_metadata or storage_data. {_AGAIN}")
    places = _places(path, storage, _Files(folder))
    storage.clear()  # millions of records, not needed again
    tensors: dict[str, TensorEntry] = {}
    objects: dict[str, Place] = {}
    for key, entry in entries.items():
        if not isinstance(key, str) or not isinstance(entry, Record):
            raise CorruptError(f"{path}: {key!r:.80} is no key with an entry. {_AGAIN}")
        if entry.type.name == "TensorStorageMetadata":
            tensors[key] = _tensor_entry(path, key, entry, places)
        elif entry.type.name == "BytesStorageMetadata":
            place = places.pop((key, None), None)
            if place is None:
                raise CorruptError(f"{path}: {key}: no storage entry for the object. {_AGAIN}")
            objects[key] = place
        else:
            raise FormatError(f"{path}: {key}: an entry of type {entry.type.path} is not known")
    if places:
        (key, offset), place = next(iter(places.items()))
        raise CorruptError(
            f"{path}: storage entry {key!r} at offset {offset} in {place.file} belongs to no chunk "
            f"({len(places)} such entries). {_AGAIN}"
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
    if any(name.startswith("__") and name.endswith(".metadata") for name in names):
        raise FormatError(
            f"{folder}: a rank-local save (use_collectives=False) with one metadata file per rank; "
            "load it in torch and save it with collectives"
        )
    if any(name.endswith(".distcp") for name in names):
        raise CorruptError(
            f"{folder}: an incomplete save: .distcp files but no .metadata, which is written last. "
            "Use an earlier step, or save again."
        )
    raise FormatError(f"{folder}: no .metadata: not a torch.distributed.checkpoint folder")


class _Files:
    """The files the metadata names: checked once each, with their sizes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sizes: dict[str, int] = {}

    def size(self, name: str) -> int:
        """Bytes of the file `name`."""
        size = self.sizes.get(name)
        if size is None:
            size = self.sizes[name] = os.stat(inside(self.folder, name)).st_size
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


def _places(
    path: Path, storage: Mapping[object, object], files: _Files
) -> dict[tuple[str, tuple[int, ...] | None], Place]:
    """The storage entries by key and chunk offset."""
    out: dict[tuple[str, tuple[int, ...] | None], Place] = {}
    names: dict[str, str] = {}  # one object per distinct name: a million entries share few
    for index, info in storage.items():
        if not isinstance(index, Record) or not isinstance(info, Record):
            raise CorruptError(f"{path}: storage_data holds {index!r:.60}: {info!r:.60}. {_AGAIN}")
        where, what = index.fields, info.fields
        key, offset = where.get("fqn"), where.get("offset")
        name, at, length = what.get("relative_path"), what.get("offset"), what.get("length")
        if (
            not isinstance(key, str)
            or not (offset is None or _is_sizes(offset))
            or not isinstance(name, str)
            or not (type(at) is int and type(length) is int and at >= 0 and length >= 0)
        ):
            raise CorruptError(
                f"{path}: a storage entry is {where!r:.150}: {what!r:.150}. {_AGAIN}"
            )
        size = files.size(name)
        if at + length > size:
            raise CorruptError(
                f"{files.folder / name}: has {size} bytes, but {key} lies at {at} to "
                f"{at + length}. {_CUT}"
            )
        steps = what.get("transform_descriptors") or ()
        if not isinstance(steps, tuple | list) or not all(isinstance(s, str) for s in steps):
            raise CorruptError(f"{path}: {key}: transform_descriptors is {steps!r:.80}. {_AGAIN}")
        if (key, offset) in out:
            raise CorruptError(f"{path}: {key}: two storage entries at offset {offset}. {_AGAIN}")
        place = Place(names.setdefault(name, name), at, length, tuple(map(str, steps)))
        out[key, offset] = place  # type: ignore[index]  # _is_sizes has checked it
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
        raise CorruptError(f"{path}: {key}: {what} is {value!r:.80}. {_AGAIN}")
    return value  # type: ignore[return-value]  # _is_sizes has checked it


def _tensor_entry(
    path: Path,
    key: str,
    entry: Record,
    places: dict[tuple[str, tuple[int, ...] | None], Place],
) -> TensorEntry:
    """The tensor's entry; takes its storage entries out of `places`."""
    fields = entry.fields
    shape = _sizes(path, key, "its size", fields.get("size"))
    dtype = _dtype(path, key, fields.get("properties"))
    listed = fields.get("chunks")
    if not isinstance(listed, list):
        raise CorruptError(f"{path}: {key}: chunks is {listed!r:.80}. {_AGAIN}")
    chunks: list[Chunk] = []
    for item in listed:
        if not isinstance(item, Record):
            raise CorruptError(f"{path}: {key}: a chunk is {item!r:.80}. {_AGAIN}")
        box = item.fields
        offsets = _sizes(path, key, "a chunk's offset", box.get("offsets"))
        sizes = _sizes(path, key, "a chunk's size", box.get("sizes"))
        if not (len(offsets) == len(sizes) == len(shape)) or any(
            a + n > whole for a, n, whole in zip(offsets, sizes, shape, strict=True)
        ):
            raise CorruptError(
                f"{path}: {key}: chunk at {list(offsets)} of {list(sizes)} lies outside shape "
                f"{list(shape)}. {_AGAIN}"
            )
        if 0 in sizes:
            continue
        place = places.pop((key, offsets), None)
        if place is None:
            raise CorruptError(
                f"{path}: {key}: no storage entry for the chunk at {list(offsets)}, or two chunks "
                f"there. {_AGAIN}"
            )
        chunks.append(Chunk(offsets, sizes, place))
    for item in listed:  # an empty chunk may share its offset with another (fsdp2_w4_uneven)
        if 0 in item.fields["sizes"]:
            places.pop((key, item.fields["offsets"]), None)
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
        raise CorruptError(f"{path}: {key}: its dtype is {found!r:.80}. {_AGAIN}")
    try:
        return dtypes.named(found.name)
    except FormatError as error:
        raise FormatError(f"{path}: {key}: {error}") from None


# ---------------------------------------------------------------------- blobs, read

_WHOLE = 64 << 10  # blobs up to this size are read in one call
_EDGE = 2 << 10  # of bigger ones, this much of head and tail: all but the tensor's bytes
_KNOWN = 4096


class Blobs:
    """Finds the raw bytes of tensor chunks in a folder's `.distcp` files.

    A blob whose head, length and directory equal those of one already parsed is not parsed again.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known: dict[tuple[object, ...], _Shape] = {}

    def arrays(self, items: Iterable[tuple[str, Chunk, DType]]) -> list[StoredArray]:
        """Where each chunk's elements lie, in the order asked; files are read front to back.

        Raises CorruptError if a blob is not the tensor the metadata says.
        """
        wanted = list(items)
        order = sorted(range(len(wanted)), key=lambda i: wanted[i][1].place[:2])
        found: dict[int, StoredArray] = {}
        window: Window | None = None
        try:
            for i in order:
                key, chunk, dtype = wanted[i]
                place = chunk.place
                if place.transform:
                    found[i] = self._packed(key, chunk, dtype)
                    continue
                path = self.folder / place.file
                if window is None or window.path != path:
                    if window:
                        window.close()
                    window = Window(inside(self.folder, place.file))
                    end = window.length
                if place.offset + place.length > end:
                    raise CorruptError(f"{path}: has {end} bytes; {key} ends beyond it. {_CUT}")
                window.move(place.offset, place.length)
                found[i] = self._locate(window, key, chunk, dtype)
        finally:
            if window:
                window.close()
        return [found[i] for i in range(len(wanted))]

    def _locate(self, window: Window, key: str, chunk: Chunk, dtype: DType) -> StoredArray:
        length = window.length
        if length <= _WHOLE:
            window.hold(0, length)
        else:
            window.hold(0, _EDGE)
            window.hold(length - _EDGE, _EDGE)
        ident = (length, chunk.sizes, dtype.name)
        shape = self._known.get(ident)
        if shape is None or not shape.fits(window):
            shape = self._parse(window, key, chunk, dtype)
            if len(self._known) < _KNOWN:
                self._known[ident] = shape
        place = chunk.place
        return StoredArray(
            place.file, place.offset + shape.data, chunk.sizes, dtype, key, place.file
        )

    def _parse(self, window: Window, key: str, chunk: Chunk, dtype: DType) -> _Shape:
        _refuse_safetensors(window, key)
        array = _checked(_named(window, chunk.place, key), key, chunk.sizes, dtype)
        return _Shape.of(window, array.offset - window.start, array.nbytes)

    def _packed(self, key: str, chunk: Chunk, dtype: DType) -> StoredArray:
        """A chunk inside a compressed blob: the blob's place, and the elements' inside it."""
        place = chunk.place
        limit = prod(chunk.sizes) * dtype.itemsize + (1 << 20)
        window = _unpacked(self.folder, place, key, limit)
        array = _checked(_named(window, place, key), key, chunk.sizes, dtype)
        return StoredArray(
            place.file, place.offset, chunk.sizes, dtype, key, place.file,
            codec="zstd", packed=place.length, inner=array.offset,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Shape:
    """The bytes around the data of a parsed blob, without what differs from tensor to tensor."""

    head: bytes
    data: int  # where the elements start, from the blob's start
    begin: int  # where the bytes after them start
    kept: tuple[tuple[int, int], ...]  # runs after the data that are alike in every such blob
    tail: tuple[bytes, ...]

    @classmethod
    def of(cls, window: Window, data: int, nbytes: int) -> _Shape:
        members = zips.read_members(window)
        begin = data + nbytes
        loose: list[tuple[int, int]] = []  # CRCs, and the serialization id
        directory = window.read(begin, window.length - begin)
        for member in members.values():
            at = member.offset - window.start
            crc = member.crc32.to_bytes(4, "little")
            if at >= begin and member.name.endswith("/.data/serialization_id"):
                loose.append((at - begin, at - begin + member.size + 8))
            elif member.name.endswith("/data/0"):
                loose.append((4, 8))
            else:
                continue
            name = member.name.encode()
            entry = directory.rfind(name) - 46  # its place in the central directory
            if entry >= 0 and directory[entry + 16 : entry + 20] == crc:
                loose.append((entry + 16, entry + 20))
        kept: list[tuple[int, int]] = []
        last = 0
        for start, stop in sorted(loose):
            kept.append((last, start))
            last = stop
        kept.append((last, len(directory)))
        tail = tuple(directory[a:b] for a, b in kept)
        return cls(window.read(0, data), data, begin, tuple(kept), tail)

    def fits(self, window: Window) -> bool:
        """Whether this blob has the same bytes around its data."""
        if window.read(0, self.data) != self.head:
            return False
        rest = window.read(self.begin, window.length - self.begin)
        return all(rest[a:b] == want for (a, b), want in zip(self.kept, self.tail, strict=True))


def chunk_array(folder: Path, key: str, chunk: Chunk, dtype: DType) -> StoredArray:
    """Where one chunk's elements lie; `Blobs.arrays` does many at less cost."""
    return Blobs(folder).arrays([(key, chunk, dtype)])[0]


def read_object(folder: Path, place: Place, key: str = "") -> object:
    """The python object in a blob, inert; `load_object` tells where its tensors lie."""
    return load_object(folder, place, key).root


def load_object(folder: Path, place: Place, key: str = "") -> TorchFile:
    """The python object in a blob with the places of its tensors, if it holds any."""
    if place.transform:
        return _named(_unpacked(folder, place, key, 1 << 30), place, key)
    with Window(inside(folder, place.file), place.offset, place.length) as window:
        if place.length <= _WHOLE:
            window.hold(0, place.length)
        return _named(window, place, key)


def _named(window: Window, place: Place, key: str) -> TorchFile:
    try:
        return torchfile.parse(window, place.file)
    except (CorruptError, FormatError) as error:
        raise type(error)(f"{key}: {error}" if key else str(error)) from None


def _refuse_safetensors(window: Window, key: str) -> None:
    with Window(window.path) as whole:
        if whole.length > 10 and whole.read(8, 2) == b'{"':
            raise FormatError(
                f"{window.path}: {key} is in a safetensors file (SerializationFormat.SAFETENSORS), "
                "which torch's own reader cannot load either"
            )


def _checked(made: TorchFile, key: str, sizes: tuple[int, ...], dtype: DType) -> StoredArray:
    """The blob's tensor, compared with what the metadata says of the chunk."""
    ref = made.root
    if not isinstance(ref, TensorRef):
        raise CorruptError(
            f"{made.path}: {key}: its blob holds {ref!r:.80}, not a tensor. {_AGAIN}"
        )
    if ref.shape != sizes or ref.dtype != dtype:
        raise CorruptError(
            f"{made.path}: {key}: its blob holds {ref.dtype} {list(ref.shape)}, but {METADATA} "
            f"says {dtype} {list(sizes)}. {_AGAIN}"
        )
    if not ref.contiguous:
        raise FormatError(
            f"{made.path}: {key}: its chunk of shape {list(sizes)} is stored with strides "
            f"{list(ref.stride)}; only row-major chunks are read"
        )
    return made.array(ref, key)


def _unpacked(folder: Path, place: Place, key: str, limit: int) -> Window:
    """The decoded bytes of a compressed blob, at most `limit`."""
    path = inside(folder, place.file)
    if place.transform != ("stream.zstd/1",):
        raise FormatError(
            f"{path}: {key}: blobs encoded by {', '.join(place.transform)} are not read"
        )
    try:
        import zstandard
    except ImportError:
        raise FormatError(
            f"{path}: {key} is compressed with zstd; install the package zstandard to read it"
        ) from None
    with Window(path, place.offset, place.length) as window:
        raw = window.read(0, place.length)
    try:
        with zstandard.ZstdDecompressor().stream_reader(raw) as stream:
            data = stream.read(limit + 1)
    except zstandard.ZstdError as error:
        raise CorruptError(f"{path}: {key}: not a whole zstd stream ({error}). {_CUT}") from None
    if len(data) > limit:
        raise CorruptError(
            f"{path}: {key}: decompresses to more than the {limit} bytes it may have"
        )
    return Window.over(path, data)
