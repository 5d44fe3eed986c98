"""Finds the bytes in the blobs of torch.distributed.checkpoint files, each a torch.save zip.

Facts from torch 2.13 distributed/checkpoint/filesystem.py and the fixtures in fixtures/dcp and
fixtures/megatron.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import overload

from reshard.box import Box
from reshard.containers import torchfile, zips
from reshard.containers.dcp_chunks import Chunk, Place, TensorEntry
from reshard.containers.dcp_metadata import AGAIN, CUT, METADATA, Listed, inside
from reshard.containers.inert import TensorRef, unread_tensor
from reshard.containers.torchfile import TorchFile
from reshard.containers.zips import Window
from reshard.dtypes import DType
from reshard.errors import CorruptError, FormatError
from reshard.layout import Piece, StoredArray
from reshard.layout import place as put

_WHOLE = 64 << 10  # blobs up to this size are read in one call
_EDGE = 2 << 10  # of bigger ones, this much of head and tail: all but the tensor's bytes
_KNOWN = 4096


class Blobs:
    """Finds the raw bytes of tensor chunks in a folder's `.distcp` files.

    A blob whose head, length and directory equal those of one already parsed is not parsed again.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = Listed(folder)
        self._known: dict[tuple[object, ...], _Shape] = {}

    def arrays(self, items: Iterable[tuple[str, Chunk, DType]]) -> list[StoredArray]:
        """Where each chunk's elements lie, in the order asked; files are read front to back.

        Raises CorruptError if a blob is not the tensor the metadata says, FormatError if one is
        not row-major (`pieces` describes those).
        """
        wanted = list(items)
        found = self.pieces(wanted)
        for (key, chunk, _), piece in zip(wanted, found, strict=True):
            if piece.array.shape != chunk.sizes:
                raise FormatError(
                    f"{self.folder / chunk.place.file}: {key}: its chunk of shape "
                    f"{list(chunk.sizes)} is stored with strides {list(piece.strides)}; only "
                    "row-major chunks are read"
                )
        return [piece.array for piece in found]

    def located(self, key: str, entry: TensorEntry) -> Sequence[StoredArray]:
        """Where the elements of each of a tensor's chunks lie, to be kept: little is held."""
        found = self.arrays((key, c, entry.dtype) for c in entry.chunks)
        return found if any(a.codec for a in found) else Located(key, entry, found)

    def pieces(self, items: Iterable[tuple[str, Chunk, DType]]) -> list[Piece]:
        """The piece of each chunk, whatever its strides (a transposed view is saved as one)."""
        wanted = list(items)
        order = sorted(range(len(wanted)), key=lambda i: wanted[i][1].place[:2])
        found: dict[int, Piece] = {}
        window: Window | None = None
        file = None
        try:
            for i in order:
                key, chunk, dtype = wanted[i]
                place = chunk.place
                if place.transform:
                    found[i] = _piece(chunk, self._packed(key, chunk, dtype))
                    continue
                if window is None or place.file != file:
                    if window:
                        window.close()
                    window, file = Window(self._files.path(place.file)), place.file
                    end = window.length
                if place.offset + place.length > end:
                    raise CorruptError(
                        f"{window.path}: has {end} bytes; {key} ends beyond it. {CUT}"
                    )
                window.move(place.offset, place.length)
                found[i] = self._locate(window, key, chunk, dtype)
        finally:
            if window:
                window.close()
        return [found[i] for i in range(len(wanted))]

    def _locate(self, window: Window, key: str, chunk: Chunk, dtype: DType) -> Piece:
        length = window.length
        if length <= _WHOLE:
            window.hold(0, length)
        else:
            window.hold(0, _EDGE)
            window.hold(length - _EDGE, _EDGE)
        ident = (length, chunk.sizes, dtype.name)
        shape = self._known.get(ident)
        place = chunk.place
        if shape is None or not shape.fits(window):
            _refuse_safetensors(window, key)
            made = _named(window, place, key)
            ref = _checked(made, key, chunk.sizes, dtype)
            if not ref.contiguous:
                array, base, strides = made.strided(ref, key, place.file)
                return Piece(Box.at(chunk.offsets, chunk.sizes), array, base, strides)
            array = made.array(ref, key)
            shape = _Shape.of(window, array.offset - window.start, array.nbytes)
            if len(self._known) < _KNOWN:
                self._known[ident] = shape
        return _piece(
            chunk,
            StoredArray(place.file, place.offset + shape.data, chunk.sizes, dtype, key, place.file),
        )

    def _packed(self, key: str, chunk: Chunk, dtype: DType) -> StoredArray:
        """A chunk inside a compressed blob: the blob's place, and the elements' inside it."""
        place = chunk.place
        window = unpacked(self.folder, place, key, prod(chunk.sizes) * dtype.itemsize)
        made = _named(window, place, key)
        array = made.array(_checked(made, key, chunk.sizes, dtype), key)
        return StoredArray(
            place.file, place.offset, chunk.sizes, dtype, key, place.file,
            codec="zstd", packed=place.length, inner=array.offset,
        )  # fmt: skip


class Located(Sequence[StoredArray]):
    """The arrays of a tensor's chunks, which lie in their blobs as they are: 8 bytes each."""

    __slots__ = ("begins", "entry", "key")

    def __init__(self, key: str, entry: TensorEntry, arrays: Iterable[StoredArray]) -> None:
        self.key = key
        self.entry = entry
        self.begins = array("q", (a.offset for a in arrays))  # of the elements, in the file

    def __len__(self) -> int:
        return len(self.begins)

    @overload
    def __getitem__(self, at: int) -> StoredArray: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[StoredArray]: ...
    def __getitem__(self, at: int | slice) -> StoredArray | Sequence[StoredArray]:
        which = range(len(self))[at]
        return self._array(which) if isinstance(which, int) else [self._array(i) for i in which]

    def __iter__(self) -> Iterator[StoredArray]:
        return map(self._array, range(len(self)))

    def _array(self, at: int) -> StoredArray:
        chunk = self.entry.chunks[at]
        file = chunk.place.file
        return StoredArray(file, self.begins[at], chunk.sizes, self.entry.dtype, self.key, file)


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
        return _named(unpacked(folder, place, key, 1 << 30), place, key)
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


def _piece(chunk: Chunk, array: StoredArray) -> Piece:
    """The chunk as a piece of its tensor."""
    return put(Box.at(chunk.offsets, chunk.sizes), array)


def _checked(made: TorchFile, key: str, sizes: tuple[int, ...], dtype: DType) -> TensorRef:
    """The blob's tensor, compared with what the metadata says of the chunk."""
    ref = made.root
    unread = unread_tensor(ref)
    if unread is not None:
        raise FormatError(f"{made.path}: {key}: {unread}")
    if not isinstance(ref, TensorRef):
        raise CorruptError(f"{made.path}: {key}: its blob holds {ref!r:.80}, not a tensor. {AGAIN}")
    if ref.shape != sizes or ref.dtype != dtype:
        raise CorruptError(
            f"{made.path}: {key}: its blob holds {ref.dtype} {list(ref.shape)}, but {METADATA} "
            f"says {dtype} {list(sizes)}. {AGAIN}"
        )
    return ref


def unpacked(folder: Path, place: Place, key: str, nbytes: int) -> Window:
    """The decoded bytes of a compressed blob that holds `nbytes` and little beside them."""
    limit = nbytes + (1 << 20)
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
        raise CorruptError(f"{path}: {key}: not a whole zstd stream ({error}). {CUT}") from None
    if len(data) > limit:
        raise CorruptError(
            f"{path}: {key}: decompresses to more than the {limit} bytes it may have"
        )
    return Window.over(path, data)
