"""Opens a universal store: every node's JSON; shards' indexes when a tensor is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import prod
from pathlib import Path
from typing import Any

from reshard.checkpoint import Checkpoint
from reshard.containers import zarr3
from reshard.containers.state_json import loose
from reshard.errors import CorruptError, FormatError
from reshard.format import OpenOptions, unpack
from reshard.layout import Layout, Piece, StoredArray
from reshard.tensor import LogicalTensor, TensorId
from reshard.topology import Topology

from . import state
from .nodes import NATIVE, PACKED, one_node, read_bytes, read_group, unsealed
from .recognise import NAME

_INDEXES = 4096  # shards whose indexes are kept


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor and where it lies: all of an array, or a run of a shared one."""

    logical: LogicalTensor
    position: int  # among the source's tensors
    array: zarr3.Array
    start: int | None = None


def open_universal(folder: Path, options: OpenOptions) -> Checkpoint:
    """Read a store's JSON, and see that every file of it is there.

    Raises CorruptError for a node or shard that is lost or damaged.
    """
    try:
        return _opened(folder, options)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptError(
            f"{folder}: its JSON is not what reshard writes ({error!r}). Copy the store again."
        ) from None


def _opened(folder: Path, options: OpenOptions) -> Checkpoint:
    where = folder / zarr3.DOCUMENT
    found = read_group(folder, "")
    state.check_version(found, where)
    place_ = state.topology_of(found, where)
    _check_given(folder, options, place_)
    arrays = list(_arrays(folder, found))
    held = sorted((h for a in arrays for h in _held(folder, a)), key=lambda h: h.position)
    by_id = {h.logical.id: h for h in held}
    if len(by_id) != len(held):
        raise CorruptError(f"{folder}: a tensor is in the store twice")
    _check_vocabulary(folder, options, by_id)
    source = found["source"]
    checkpoint = Checkpoint(
        path=folder,
        format=NAME,
        version=f"{found['store']}, from {source['format']} ({source['version']})",
        topology=place_,
        layout=Layout(
            {t: h.logical for t, h in by_id.items()}, _finder(folder, by_id), found["naming"]
        ),
        files=_files(folder, found, arrays),
        groups=state.groups_of(found, where),
        steps=loose(found["steps"], where),
        iteration=found["iteration"],
        extras=loose(found["extras"], where),
        family=found["family"],
    )  # fmt: skip
    return _with_native(checkpoint, found)


def _arrays(folder: Path, found: Mapping[str, Any]) -> Iterator[zarr3.Array]:
    for above in map(one_node, found["arrays"]):
        for own in map(one_node, read_group(folder, above)["arrays"]):
            node = f"{above}/{own}"
            where = folder / node / zarr3.DOCUMENT
            yield zarr3.parse(read_bytes(where), node, where)


def _held(folder: Path, array: zarr3.Array) -> Iterator[Held]:
    """The tensors that an array holds."""
    where = folder / array.node / zarr3.DOCUMENT
    body = unsealed(array.attributes, where)
    shared = array.node.startswith(f"{PACKED}/")
    for row in body["tensors"] if shared else [body]:
        position, logical = state.logical_of(row, array.dtype)
        start = int(row["start"]) if shared else None
        if start is None and logical.extent != array.shape:
            raise CorruptError(
                f"{where}: shape {list(array.shape)} for a tensor of {list(logical.extent)}"
            )
        if start is not None and start + prod(logical.extent) > array.shape[0]:
            raise CorruptError(f"{where}: {logical.id} ends after the array's last element")
        yield Held(logical, position, array, start)


def _finder(folder: Path, by_id: Mapping[TensorId, Held]) -> Callable[[TensorId], list[Piece]]:
    """Gives a tensor's pieces from the indexes of its shards, of which the last are kept."""
    arrays = {h.array.node: h.array for h in by_id.values()}

    @lru_cache(maxsize=_INDEXES)
    def shard(node: str, at: tuple[int, ...]) -> list[tuple[zarr3.Chunk, StoredArray]]:
        return zarr3.read_shard(folder, arrays[node], at)

    def pieces(tensor: TensorId) -> list[Piece]:
        held = by_id[tensor]
        stored = partial(shard, held.array.node)
        if held.start is None:
            return zarr3.pieces(held.array, stored)
        return zarr3.run_pieces(held.array, stored, held.logical.extent, held.start)

    return pieces


def _files(
    folder: Path, found: Mapping[str, Any], arrays: Sequence[zarr3.Array]
) -> tuple[str, ...]:
    """Every file of the store. Raises CorruptError for a shard that is not there."""
    groups = ["", *found["arrays"], *([NATIVE] if "native" in found else [])]
    out = [f"{g}/{zarr3.DOCUMENT}" if g else zarr3.DOCUMENT for g in groups]
    for array in arrays:
        out.append(f"{array.node}/{zarr3.DOCUMENT}")
        for at in array.shards():
            name = array.file(at)
            if not (folder / name).is_file():
                raise CorruptError(
                    f"{folder / name}: {array.node}: shard {list(at)} is lost. zarr readers take "
                    "a lost shard for zeros; copy the store again."
                )
            out.append(name)
    return tuple(out)


def _with_native(checkpoint: Checkpoint, found: Mapping[str, Any]) -> Checkpoint:
    """The checkpoint with what the writers of its source's format use."""
    if "native" not in found:
        return checkpoint
    body = read_group(checkpoint.path, NATIVE)
    try:
        native = unpack(body["format"], body["state"], checkpoint)
    except FormatError as error:
        return replace(checkpoint, problems=(*checkpoint.problems, f"native state: {error}"))
    return replace(checkpoint, native=native)


def _check_given(folder: Path, options: OpenOptions, place_: Topology) -> None:
    options.given.take()
    for degree, n in options.given.degrees.items():
        said = getattr(place_, degree)
        if said is not None and said != n:
            raise FormatError(
                f"--from says {degree}={n}; {folder} was made from {degree}={said}"
            )  # fmt: skip


def _check_vocabulary(folder: Path, options: OpenOptions, by_id: Mapping[TensorId, Held]) -> None:
    """Raises FormatError for a --vocab-size that no tensor of the store has."""
    n = options.vocab_size
    if n is not None and not any(n in h.logical.shape[:1] for h in by_id.values()):
        raise FormatError(
            f"--vocab-size {n}: no tensor of {folder} has so many rows; a universal store says its "
            "true shapes"
        )
