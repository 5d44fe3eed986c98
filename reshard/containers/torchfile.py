"""Files of torch.save: read into inert values and stored arrays, drafted from the same.

Zip archives (torch >= 1.6) and the older stream of pickles and raw storages are read; zip
archives are written. Pickles are read in `pickles`, written in `pickler`, archives are in `zips`.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from reshard import dtypes
from reshard.containers import pickles, zips
from reshard.containers.inert import (
    Global,
    Ordered,
    Record,
    StorageRef,
    TensorRef,
    globals_in,
    new_tensor,
    tensors_in,
    walk,
)
from reshard.containers.pickler import dumps
from reshard.containers.pickles import load_pickle
from reshard.containers.zips import Member, Window
from reshard.dtypes import DType
from reshard.errors import CorruptError, FormatError, LayoutError
from reshard.layout import Checksum, Draft, StoredArray

__all__ = [
    "Blob", "Global", "Member", "Ordered", "Record", "StorageRef", "TensorRef", "TorchFile",
    "blob", "draft", "dumps", "globals_in", "load", "load_pickle", "new_tensor", "parse",
    "tensors_in", "walk",
]  # fmt: skip

_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_CUT = "The file is cut short or damaged: copy it again, or save the checkpoint again."


@dataclass(frozen=True, slots=True)
class TorchFile:
    """What one torch.save wrote: the object with inert values, and where its storages lie."""

    path: Path
    name: str  # relative to the checkpoint's folder
    root: object
    storages: Mapping[str, tuple[int, int]]  # key -> byte offset in the file, bytes
    byteorder: str = "little"
    members: Mapping[str, Member] = field(default_factory=dict)  # empty for the older format

    @property
    def saved_as(self) -> str | None:
        """The file's name when it was saved, up to its last dot; the older format has none."""
        return next((name.partition("/")[0] for name in self.members), None)

    def array(self, ref: TensorRef, key: str, holder: str = "") -> StoredArray:
        """Where a contiguous tensor's elements lie.

        Raises LayoutError for other strides; `strided` describes those.
        """
        if not ref.contiguous:
            raise LayoutError(
                f"{self.path}: {key}: shape {list(ref.shape)} with strides {list(ref.stride)} is "
                "not contiguous"
            )
        offset = self._span(ref)[0] + ref.offset * ref.dtype.itemsize
        return StoredArray(self.name, offset, ref.shape, ref.dtype, key, holder)

    def strided(
        self, ref: TensorRef, key: str = "", holder: str = ""
    ) -> tuple[StoredArray, int, tuple[int, ...]]:
        """A tensor's whole storage as a flat array, the element it starts at, and its strides."""
        offset, nbytes = self._span(ref)
        shape = (nbytes // ref.dtype.itemsize,)
        whole = StoredArray(self.name, offset, shape, ref.dtype, key, holder)
        return whole, ref.offset, ref.stride

    def read(self, ref: TensorRef) -> NDArray[np.generic]:
        """A tensor's elements, read now: for small tensors."""
        offset, _ = self._span(ref)
        size = ref.dtype.itemsize
        if 0 in ref.shape:
            return np.empty(ref.shape, ref.dtype.numpy)
        extent = 1 + sum((n - 1) * s for n, s in zip(ref.shape, ref.stride, strict=True))
        with Window(self.path) as window:
            raw = window.read(offset + ref.offset * size, extent * size)
        strides = tuple(s * size for s in ref.stride)
        return np.ndarray(ref.shape, ref.dtype.numpy, raw, 0, strides).copy()

    def values(self) -> dict[str, bytes]:
        """The bytes of every storage, read now, as `draft` takes them: for small files."""
        with Window(self.path) as window:
            return {key: window.read(at, size) for key, (at, size) in self.storages.items()}

    def _span(self, ref: TensorRef) -> tuple[int, int]:
        span = self.storages.get(ref.key)
        if span is None:
            raise CorruptError(f"{self.path}: no storage {ref.key} in the file. {_CUT}")
        if span[1] < ref.storage_nbytes:
            raise CorruptError(
                f"{self.path}: storage {ref.key} has {span[1]} bytes, not "
                f"{ref.storage_nbytes}. {_CUT}"
            )
        return span


# ---------------------------------------------------------------------- reading


def load(
    path: Path, root: str | None = None, start: int = 0, length: int | None = None
) -> TorchFile:
    """What the torch.save file at `path` holds; no tensor bytes are read.

    `root` is the file's name relative to the checkpoint's folder, "/" between parts.
    `start` and `length` give the byte range of an archive inside a bigger file (DCP).
    Raises CorruptError for a damaged file, FormatError for a form refused by name.
    """
    name = path.name if root is None else root
    with Window(path, start, length) as window:
        if window.length == 0:
            raise CorruptError(f"{window}: is empty. {_CUT}")
        first = window.read(0, min(512, window.length))
        if first.startswith(b"PK\x03\x04"):
            return parse(window, name)
        if first[257:262] == b"ustar":
            raise FormatError(
                f"{path}: a tar archive of torch < 0.1.10; load and save it with a newer torch"
            )
        if first.startswith(b"\x28\xb5\x2f\xfd"):
            raise FormatError(f"{window}: is compressed with zstd; decompress it first")
        if not first.startswith(b"\x80"):
            raise CorruptError(f"{window}: is no file of torch.save. {_CUT}")
        if start or length is not None:
            raise FormatError(f"{window}: not a zip archive of torch.save")
    return _load_legacy(path, name)


def parse(window: Window, name: str) -> TorchFile:
    """What the torch.save archive that fills `window` holds."""
    members = zips.read_members(window)
    prefix = _prefix(members, window)
    order = _text(window, members.get(f"{prefix}/byteorder"), "little")
    if order not in ("little", "big"):
        raise CorruptError(f"{window}: byteorder is {order!r:.20}. {_CUT}")
    if order == "big":
        raise FormatError(f"{window}: holds big-endian tensors; save it on a little-endian machine")
    spans = {
        member.name[len(prefix) + 6 :]: (member.offset, member.size)
        for member in members.values()
        if member.name.startswith(f"{prefix}/data/")
    }

    def persist(pid: object) -> object:
        ref = pickles.storage(pid)
        span = spans.get(ref.key)
        if span is None:
            raise CorruptError(f"storage {ref.key!r:.60} is not in the archive. {_CUT}")
        if span[1] != ref.nbytes:
            raise CorruptError(f"storage {ref.key} has {span[1]} bytes, not {ref.nbytes}. {_CUT}")
        return ref

    data = _member(window, members[f"{prefix}/data.pkl"])
    obj = pickles.loads(data, str(window), persist)
    return TorchFile(window.path, name, obj, spans, order, members)


def _prefix(members: Mapping[str, Member], window: Window) -> str:
    """The archive's own name, the first part of every member's."""
    tops = {name.partition("/")[0] for name in members}
    if len(tops) != 1:
        raise CorruptError(f"{window}: is a zip archive, but not one of torch.save")
    prefix = tops.pop()
    if f"{prefix}/constants.pkl" in members:
        raise FormatError(f"{window}: is a TorchScript archive, which holds a program; not read")
    if f"{prefix}/data.pkl" not in members:
        raise CorruptError(f"{window}: the archive has no data.pkl. {_CUT}")
    return prefix


def _member(window: Window, member: Member) -> bytes:
    return window.read(member.offset - window.start, member.size)


def _text(window: Window, member: Member | None, default: str) -> str:
    if member is None or member.size > 64:
        return default
    return _member(window, member).decode("ascii", "replace").strip()


def _load_legacy(path: Path, name: str) -> TorchFile:
    """A file of torch < 1.6, or of `_use_new_zipfile_serialization=False`.

    torch 2.13 serialization.py, _legacy_save: pickles of a magic number, the protocol, the
    machine's byte order, the object, the storage keys; then each storage as an int64 count of
    elements and its bytes.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        size = len(data)
        at = 0

        def take(persist: pickles.Persist | None = None) -> object:
            nonlocal at
            try:
                end = pickles.scan(data, at)
            except CorruptError as error:
                raise CorruptError(f"{path}: {error}") from None
            obj = pickles.loads(data[at:end], str(path), persist)
            at = end
            return obj

        if take() != _LEGACY_MAGIC:
            raise CorruptError(f"{path}: is a pickle, but no file of torch.save")
        if (protocol := take()) != 1001:
            raise FormatError(f"{path}: torch.save protocol {protocol!r:.40} is not known")
        system = take()
        if not isinstance(system, dict) or system.get("little_endian") is not True:
            raise FormatError(f"{path}: was saved on a big-endian machine; save it on another")
        refs: dict[str, StorageRef] = {}

        def persist(pid: object) -> object:
            ref = pickles.storage(pid)
            if refs.setdefault(ref.key, ref) != ref:
                raise CorruptError(f"storage {ref.key:.60} is described in two ways")
            return ref

        root, keys = take(persist), take()
        if not isinstance(keys, list) or sorted(map(str, keys)) != sorted(refs):
            raise CorruptError(f"{path}: its list of storages is not that of its tensors. {_CUT}")
        spans: dict[str, tuple[int, int]] = {}
        for key in keys:
            ref = refs[key]
            count = int.from_bytes(data[at : at + 8], "little")
            nbytes = count * (ref.dtype.itemsize if ref.dtype else 1)
            if nbytes != ref.nbytes or at + 8 + nbytes > size:
                raise CorruptError(
                    f"{path}: storage {key} needs bytes {at + 8} to {at + 8 + ref.nbytes} of {size}"
                    f", and says {nbytes}. {_CUT}"
                )
            spans[key] = (at + 8, nbytes)
            at += 8 + nbytes
    if at != size:
        raise CorruptError(f"{path}: has {size - at} bytes after its last storage. {_CUT}")
    return TorchFile(path, name, root, spans)


# ---------------------------------------------------------------------- writing


class Blob(NamedTuple):
    """A torch.save archive laid out at byte `start` of a file; all offsets are the file's."""

    length: int
    literals: list[tuple[int, bytes]]
    arrays: dict[str, StoredArray]  # storage key -> where its bytes go
    checksums: list[Checksum]


def blob(
    obj: object,
    *,
    file: str,
    start: int = 0,
    allow: Container[str] = (),
    archive: str = "archive",
    values: Mapping[str, bytes] | None = None,
    key: str = "",
    holder: str = "",
) -> Blob:
    """The archive torch.save would write for `obj`, to be filled, at byte `start` of `file`.

    Storages in `values` are written at once; the others become arrays, shaped as the tensor that
    is all of the storage, else flat. An array's key is `key`, or the storage's own. `allow` holds
    the "module.name" globals that may be written beside torch's own.
    """
    values = values or {}
    sizes: dict[str, int] = {}
    pickled = dumps(obj, allow, sizes)
    for storage, raw in values.items():
        if sizes.get(storage) != len(raw):
            raise LayoutError(
                f"{file}: {len(raw)} bytes are given for storage {storage}, whose tensors need "
                f"{sizes.get(storage)}"
            )
    serial = int.from_bytes(hashlib.sha256(pickled).digest()[:16], "little") % 10**40
    members: list[tuple[str, bytes | int]] = [
        ("data.pkl", pickled),
        (".format_version", b"1"),
        (".storage_alignment", b"64"),
        ("byteorder", b"little"),
        *((f"data/{storage}", values.get(storage, n)) for storage, n in sizes.items()),
        ("version", b"3\n"),
        (".data/serialization_id", b"%040d" % serial),
    ]
    length, literals, slots = zips.lay_out((f"{archive}/{name}", body) for name, body in members)
    shapes = _shapes(obj)
    arrays: dict[str, StoredArray] = {}
    checksums: list[Checksum] = []
    for slot in slots:
        storage = slot.name[len(archive) + 6 :]
        shape, dtype = shapes[storage]
        array = StoredArray(file, start + slot.offset, shape, dtype, key or storage, holder)
        arrays[storage] = array
        if slot.size:
            checksums.append(Checksum(array, tuple(start + at for at in slot.crc_at)))
    return Blob(length, [(start + at, raw) for at, raw in literals], arrays, checksums)


def _shapes(obj: object) -> dict[str, tuple[tuple[int, ...], DType]]:
    """The shape and dtype each storage is filled in."""
    out: dict[str, tuple[tuple[int, ...], DType]] = {}
    whole: set[str] = set()
    for item in walk(obj):
        if isinstance(item, StorageRef):
            dtype = item.dtype or dtypes.named("uint8")
            out.setdefault(item.key, ((item.nbytes // dtype.itemsize,), dtype))
        if not isinstance(item, TensorRef) or item.key in whole:
            continue
        size = item.dtype.itemsize
        if item.contiguous and prod(item.shape) * size == item.storage_nbytes:
            whole.add(item.key)
            out[item.key] = (item.shape, item.dtype)
        elif item.storage_nbytes % size == 0:
            out.setdefault(item.key, ((item.storage_nbytes // size,), item.dtype))
        else:
            flat = ((item.storage_nbytes,), dtypes.named("uint8"))
            out.setdefault(item.key, flat)
    return out


def draft(
    name: str,
    obj: object,
    *,
    allow: Container[str] = (),
    archive: str = "archive",
    values: Mapping[str, bytes] | None = None,
    holder: str = "",
) -> tuple[Draft, dict[str, StoredArray]]:
    """The file torch.save would write for `obj`, and the array to fill for each storage key.

    Storages without bytes are in the dict but not in the draft: there is nothing to fill.
    """
    made = blob(obj, file=name, allow=allow, archive=archive, values=values, holder=holder)
    arrays = [array for array in made.arrays.values() if array.numel]
    return Draft(name, made.length, made.literals, arrays, made.checksums), made.arrays
