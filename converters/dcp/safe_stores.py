"""The leaves of DCP checkpoints whose files are safetensors: Hugging Face storage, torch's own."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path as Folder

from reshard.box import Box
from reshard.containers import dcp
from reshard.containers.dcp import Metadata
from reshard.containers.safetensors import read_header
from reshard.containers.small import object_beside, read_object
from reshard.errors import CorruptError
from reshard.layout import Piece, StoredArray, place

from .leaves import Leaf, TensorLeaf
from .recognise import SHARD, shard_names

_INFO = "DCP_SHARDING_INFO"
#: What consolidation leaves. Source: torch 2.13 distributed/checkpoint/hf_storage.py.
_INDEX, _SHARDED = "model.safetensors.index.json", "sharded"


@dataclass(frozen=True, slots=True)
class Safe:
    """What such a folder gives: leaves, files, how many ranks wrote them, what to know of them."""

    leaves: tuple[Leaf, ...]
    files: tuple[str, ...]
    ranks: int
    problems: tuple[str, ...] = ()


def open_shards(folder: Folder) -> Safe:
    """A folder of `shard-*` files, which have no metadata: shapes are what the shards make up.

    Raises CorruptError for a rank's file that is missing or of another save.
    """
    names = shard_names(folder)
    found = [m for n in names if (m := re.fullmatch(SHARD, n))]
    totals = {m[3] for m in found}
    if len(totals) > 1:
        raise CorruptError(f"{folder}: files of saves in {sorted(totals)} parts lie together")
    ranks = max(int(m[1]) for m in found)
    missing = sorted(set(range(1, ranks + 1)) - {int(m[1]) for m in found})
    if missing:
        raise CorruptError(f"{folder}: the shards of ranks {missing[:8]} (from 1) are missing")
    boxes: dict[str, list[tuple[Box, StoredArray]]] = {}
    for name in names:
        for key, box, array in _pieces(folder, name):
            boxes.setdefault(key, []).append((box, array))
    leaves: list[Leaf] = []
    for key, held in boxes.items():
        shape = tuple(max(b.stop[i] for b, _ in held) for i in range(len(held[0][0].start)))
        leaves.append(_leaf((key,), shape, held))
    _check_vocabulary(folder, leaves)
    if _check_index(folder, leaves):
        return Safe(tuple(leaves), tuple(names), ranks)
    said = (
        f"{folder.name}: the files do not say how many ranks wrote them or how long tensors are; "
        f"{ranks} ranks are there, and a shard lost at the end would not show",
    )
    return Safe(tuple(leaves), tuple(names), ranks, said)


def _check_index(folder: Folder, leaves: Sequence[Leaf]) -> bool:
    """Whether an index says what there should be: beside the shards, or beside the folder
    `sharded` that consolidation leaves.

    Raises CorruptError if the shards hold other tensors than it names, or fewer bytes.
    """
    places = [folder / _INDEX] + ([folder.parent / _INDEX] if folder.name == _SHARDED else [])
    path = next((p for p in places if p.is_file()), None)
    if path is None:
        return False
    index = read_object(path)
    try:
        size, listed = index["metadata"]["total_size"], set(index["weight_map"])
    except (KeyError, TypeError):
        return False  # some other tool's
    held = {str(leaf.path[-1]): leaf for leaf in leaves if isinstance(leaf, TensorLeaf)}
    missing = sorted(listed - held.keys())
    found = sum(prod(leaf.shape) * leaf.dtype.itemsize for leaf in held.values())
    if missing or found < size:
        lacks = f"{missing[0]} is missing" if missing else f"{found} of {size} bytes are there"
        raise CorruptError(
            f"{folder}: {lacks} by {path}: the last ranks' shards are lost. Copy them again."
        )
    return True


def _pieces(folder: Folder, name: str) -> list[tuple[str, Box, StoredArray]]:
    """The boxes of whole tensors that one file holds."""
    header = read_header(folder, name)
    path = folder / name
    try:
        info = json.loads(header.metadata.get(_INFO, ""))
    except ValueError:
        raise CorruptError(f"{path}: no {_INFO} in its header: no shard of torch's") from None
    out: list[tuple[str, Box, StoredArray]] = []
    for key, array in header.arrays.items():
        row = info.get(key) if isinstance(info, dict) else None
        offsets = row.get("saved_offsets") if isinstance(row, dict) else None
        if (
            not isinstance(offsets, list)
            or not all(type(n) is int and n >= 0 for n in offsets)
            or len(offsets) != len(array.shape)
        ):
            raise CorruptError(f"{path}: {key}: saved_offsets is {offsets!r:.60}")
        if array.numel:
            out.append((key, Box.at(offsets, array.shape), array))
    return out


def _leaf(
    path: tuple[str | int, ...], shape: tuple[int, ...], held: Sequence[tuple[Box, StoredArray]]
) -> TensorLeaf:
    dtypes = {a.dtype for _, a in held}
    if len(dtypes) > 1:
        raise CorruptError(f"{path[-1]}: stored as {', '.join(sorted(d.name for d in dtypes))}")
    pieces = [place(box, array) for box, array in held]
    return TensorLeaf(path, shape, dtypes.pop(), lambda: pieces)


def _check_vocabulary(folder: Folder, leaves: Sequence[Leaf]) -> None:
    """Raises CorruptError if the config beside the shards knows of more rows than there are."""
    rows = (object_beside(folder / "config.json") or {}).get("vocab_size")
    for leaf in leaves:
        name = str(leaf.path[-1])
        if not isinstance(leaf, TensorLeaf) or not name.endswith("embed_tokens.weight"):
            continue
        if isinstance(rows, int) and leaf.shape[0] < rows:
            raise CorruptError(
                f"{folder}: {name} has {leaf.shape[0]} rows in its shards, config.json says "
                f"{rows}: the last ranks' shards are missing"
            )


# ---------------------------------------------------------------------- beside .metadata


def is_safe(folder: Folder, metadata: Metadata) -> bool:
    """Whether the `.distcp` files are safetensors (SerializationFormat.SAFETENSORS)."""
    chunk = next((c for e in metadata.tensors.values() for c in e.chunks), None)
    if chunk is None:
        return False
    with dcp.inside(folder, chunk.place.file).open("rb") as file:
        return file.read(10)[8:] == b'{"'


def located(folder: Folder, metadata: Metadata) -> Mapping[str, Sequence[Piece]]:
    """The pieces of every tensor, by the files' own headers.

    The metadata's offsets are of no use: 0 for all (torch 2.13 cannot load such a checkpoint
    itself). Raises CorruptError where headers and metadata disagree.
    """
    there: dict[str, list[tuple[Box, StoredArray]]] = {}
    for name in sorted({c.place.file for e in metadata.tensors.values() for c in e.chunks}):
        dcp.inside(folder, name)
        for key, box, array in _pieces(folder, name):
            there.setdefault(key, []).append((box, array))
    out: dict[str, Sequence[Piece]] = {}
    for key, entry in metadata.tensors.items():
        wanted = {Box.at(c.offsets, c.sizes) for c in entry.chunks}
        held = there.pop(key, [])
        if wanted != {box for box, _ in held} or any(a.dtype != entry.dtype for _, a in held):
            raise CorruptError(
                f"{folder}: {key}: the files hold {[str(b) for b, _ in held][:4]}, {dcp.METADATA} "
                f"says {[str(b) for b in sorted(wanted)][:4]} of {entry.dtype}"
            )
        out[key] = [place(box, array) for box, array in held]
    if there:
        raise CorruptError(f"{folder}: the files hold {next(iter(there))}, {dcp.METADATA} does not")
    return out
