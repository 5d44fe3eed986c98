"""The leaves of one torch.distributed.checkpoint folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from math import prod
from pathlib import Path as Folder

from reshard.box import Box, uncovered
from reshard.containers import dcp, torchfile
from reshard.containers.carried import Carried, carry
from reshard.containers.dcp import Chunk, Metadata, Place, TensorEntry
from reshard.containers.torchfile import TorchFile
from reshard.containers.zips import Window
from reshard.errors import CorruptError, FormatError
from reshard.layout import Piece, StoredArray

from .leaves import Leaf, TensorLeaf
from .pickles import by_rank
from .recognise import OPTIMIZER_FOLDER
from .safe_stores import is_safe, located
from .values import Path

_BATCH = 256  # tensors located together
_SMALL = 64 << 10  # bytes: blobs up to this size are read whole, equal ones parsed once


@dataclass
class Store:
    """A DCP folder below the checkpoint's: finds the pieces of its tensors.

    `under` is the folder relative to the checkpoint's ("" for itself).
    """

    folder: Folder
    under: str
    metadata: Metadata
    names: tuple[str, ...]  # of the metadata's files
    _found: dict[str, Sequence[Piece]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._blobs = dcp.Blobs(self.folder)

    def pieces(self, key: str) -> Sequence[Piece]:
        """All pieces of the tensor under a key, in the order of the metadata."""
        found = self._found.get(key)
        return self.locate([key])[key] if found is None else found

    def locate(self, keys: Iterable[str], *, keep: bool = False) -> dict[str, Sequence[Piece]]:
        """The pieces of several tensors, their files read front to back."""
        keys = [key for key in keys if key not in self._found]
        items = [
            (k, c, e.dtype) for k in keys for e in [self.metadata.tensors[k]] for c in e.chunks
        ]
        out: dict[str, list[Piece]] = {key: [] for key in keys}
        for (key, _, _), piece in zip(items, self._blobs.pieces(items), strict=True):
            out[key].append(
                replace(piece, array=self._lifted(piece.array)) if self.under else piece
            )
        if keep:
            self._found.update(out)
        return dict(out)

    def give(self, pieces: Mapping[str, Sequence[Piece]]) -> None:
        """Take in pieces that were located otherwise."""
        for key, found in pieces.items():
            self._found[key] = [replace(p, array=self._lifted(p.array)) for p in found]

    def _lifted(self, array: StoredArray) -> StoredArray:
        if not self.under:
            return array
        return replace(
            array, file=f"{self.under}/{array.file}", holder=f"{self.under}/{array.file}"
        )

    def first(self, key: str) -> tuple[str, int] | None:
        """Where the first chunk of a tensor lies."""
        found = next((c.place for c in self.metadata.tensors[key].chunks), None)
        return None if found is None else (f"{self.under}/{found.file}", found.offset)

    def finder(self, key: str) -> Callable[[], Sequence[Piece]]:
        """What locates one tensor when asked."""
        return lambda: self.pieces(key)


def open_store(root: Folder, under: str) -> tuple[Store, list[Leaf]]:
    """A DCP folder and its leaves, in the order of the state dict that was saved.

    Raises CorruptError for a save that is incomplete or contradicts itself.
    """
    folder = root / under if under else root
    parts = _parts(folder)
    metadata = _joined(folder, list(parts.values()))
    for key, entry in metadata.tensors.items():
        _check_cover(folder, key, entry, replicas=len(parts) > 1)
    store = Store(folder, under, metadata, tuple(parts))
    if metadata.objects and not metadata.tensors and under != OPTIMIZER_FOLDER:
        raise FormatError(
            f"{folder}: the metadata names no tensor, only objects ({_some(metadata.objects)}): "
            "nothing of a model, or saved whole by a planner with flatten_state_dict=False. Save "
            "it flattened, as torch does unless told otherwise."
        )
    paths = _paths(folder, metadata)
    if is_safe(folder, metadata):
        store.give(located(folder, metadata))
    single = [k for k, e in metadata.tensors.items() if prod(e.shape) == 1]
    store.locate(single, keep=True)
    by_key: dict[str, Sequence[Leaf]] = {
        key: [TensorLeaf(paths[key], entry.shape, entry.dtype, store.finder(key), store.first(key))]
        for key, entry in metadata.tensors.items()
    }
    values: dict[str, dict[int, Carried]] = {}
    for rank, part in enumerate(parts.values()):
        for key, value in _objects(folder, part.objects.items()):
            values.setdefault(key, {})[rank] = value
    by_key |= {key: by_rank(paths[key], held) for key, held in values.items()}
    return store, [leaf for key in paths for leaf in by_key[key]]


def _some(keys: Iterable[str]) -> str:
    first = [*islice(keys, 4)]
    return ", ".join(first[:3]) + (", …" if first[3:] else "")


def _parts(folder: Folder) -> dict[str, Metadata]:
    """The metadata files of a folder: one for all ranks, or each rank's own."""
    alone = not (folder / dcp.METADATA).exists() and folder.is_dir()
    names = (dcp.rank_metadata(folder) if alone else []) or [dcp.METADATA]
    return {name: dcp.read_metadata(folder, name) for name in names}


def _joined(folder: Folder, parts: Sequence[Metadata]) -> Metadata:
    """One metadata for all ranks: what several hold whole, each of them has a copy of."""
    if len(parts) == 1:
        return parts[0]
    tensors: dict[str, TensorEntry] = {}
    objects: dict[str, Place] = {}
    paths: dict[object, object] = {}
    for part in parts:
        for key, entry in part.tensors.items():
            held = tensors.get(key, replace(entry, chunks=()))
            if (held.shape, held.dtype) != (entry.shape, entry.dtype):
                raise CorruptError(
                    f"{folder}: {key} is {held.dtype.name} {list(held.shape)} for one rank and "
                    f"{entry.dtype.name} {list(entry.shape)} for another: files of two saves"
                )
            tensors[key] = replace(held, chunks=(*held.chunks, *entry.chunks))
        for key, spot in part.objects.items():
            objects.setdefault(key, spot)
        paths |= part.planner_data if isinstance(part.planner_data, dict) else {}
    return Metadata(tensors, objects, paths or None, parts[0].version)


def _check_cover(folder: Folder, key: str, entry: TensorEntry, *, replicas: bool) -> None:
    """Raises CorruptError naming the boxes of a tensor that two chunks hold.

    torch never writes overlapping chunks (default_planner.py, _validate_global_plan) but for the
    `replicas` of ranks that save without collectives; gaps are `Layout.check`'s.
    """
    if len(entry.chunks) < 2:
        return
    held = [Box.at(c.offsets, c.sizes) for c in entry.chunks]
    if replicas:
        held = list(dict.fromkeys(held))
    gaps = uncovered(Box.whole(entry.shape), held)
    if sum(b.numel for b in (*held, *gaps)) == prod(entry.shape):
        return
    boxes: list[tuple[Box, Chunk]] = []
    for chunk in entry.chunks:
        box = Box.at(chunk.offsets, chunk.sizes)
        for other, holder in boxes:
            if box & other is not None and not (replicas and box == other):
                raise CorruptError(
                    f"{folder}: {key}: chunk {box} in {chunk.place.file} overlaps chunk {other} in "
                    f"{holder.place.file}. The checkpoint contradicts itself; save it again."
                )
        boxes.append((box, chunk))


def _paths(folder: Folder, metadata: Metadata) -> dict[str, Path]:
    """The path of every key: only planner_data gives it, as keys hold dots themselves.

    In the order of planner_data, which is the state dict's; the metadata's own is that of the
    ranks that were chosen to write.
    """
    known = metadata.planner_data
    keys = [*metadata.tensors, *metadata.objects]
    if known is None:
        return _split_paths(keys)
    if not isinstance(known, dict):
        raise CorruptError(f"{folder}: planner_data is {known!r:.80}, not a dict")
    out: dict[str, Path] = {}
    there = set(keys)
    for key in dict.fromkeys((*(k for k in known if k in there), *keys)):
        path = known.get(key, (key,))
        if not isinstance(path, tuple) or not all(type(p) in (str, int) for p in path) or not path:
            raise CorruptError(f"{folder}: planner_data of {key} is {path!r:.80}, not a path")
        out[key] = path
    return out


def _split_paths(keys: Sequence[str]) -> dict[str, Path]:
    """Paths of keys that were saved flat: an optimizer shows itself by its param_groups."""
    prefixes = {k[: k.index("param_groups.")] for k in keys if "param_groups." in k}
    out: dict[str, Path] = {}
    for key in keys:
        found = next(
            (p for p in prefixes if key.startswith((f"{p}param_groups.", f"{p}state."))), None
        )
        if not found:
            out[key] = (key,)
        else:
            out[key] = (found.rstrip("."), key[len(found) :])
    return out


def _objects(folder: Folder, objects: Iterable[tuple[str, Place]]) -> list[tuple[str, Carried]]:
    """The values of object entries, in the order given; files are read front to back.

    Equal blobs are parsed once: a flattened optimizer stores a dozen per parameter.
    """
    wanted = list(objects)
    order = sorted(range(len(wanted)), key=lambda i: wanted[i][1][:2])
    found: dict[int, Carried] = {}
    parsed: dict[bytes, Carried] = {}
    window: Window | None = None
    try:
        for i in order:
            key, spot = wanted[i]
            if spot.transform or spot.length > _SMALL:
                file = dcp.load_object(folder, spot, key)
                found[i] = _carried(file, key)
                continue
            path = folder / spot.file
            if window is None or window.path != path:
                if window is not None:
                    window.close()
                window = Window(dcp.inside(folder, spot.file))
            window.move(spot.offset, spot.length)
            window.hold(0, spot.length)
            raw = window.read(0, spot.length)
            known = parsed.get(raw)
            if known is None:
                known = parsed[raw] = _parse(window, spot, key)
            found[i] = known
    finally:
        if window is not None:
            window.close()
    return [(wanted[i][0], found[i]) for i in range(len(wanted))]


def _parse(window: Window, spot: Place, key: str) -> Carried:
    try:
        return _carried(torchfile.parse(window, spot.file), key)
    except (CorruptError, FormatError) as error:
        raise type(error)(f"{key}: {error}") from None


def _carried(file: TorchFile, key: str) -> Carried:
    try:
        return carry(file, file.root)
    except CorruptError as error:
        raise CorruptError(f"{key}: {error}") from None
