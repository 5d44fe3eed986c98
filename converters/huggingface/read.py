"""Reads a model folder: every tensor where its file says, quantised ones as they are stored."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from reshard.box import Box
from reshard.checkpoint import Checkpoint, Json
from reshard.containers import safetensors, torchfile
from reshard.containers.small import object_beside
from reshard.containers.torchfile import TensorRef
from reshard.errors import CorruptError, FormatError
from reshard.format import OpenOptions
from reshard.layout import Layout, Piece, whole
from reshard.tensor import LogicalTensor, TensorId
from reshard.topology import Topology

from .beside import opaque_in
from .folder import Weights, quantisation, refuse_packed, weights
from .optimizer import is_beside, refuse_beside_blocks, with_optimizer
from .quantised import dequantised, is_quantised

T = TypeVar("T")

NAME = "hf"


def open_folder(folder: Path, options: OpenOptions) -> Checkpoint:
    """Read a model folder's headers.

    Raises FormatError for what is refused by name, CorruptError for an index and files that
    contradict each other.
    """
    options.given.take()
    given = options.given.degrees
    if given:
        raise FormatError(f"--from: a model folder has no topology, and {dict(given)} is given")
    config = object_beside(folder / "config.json") or {}
    scheme = quantisation(config)
    found = weights(folder)
    tensors, pieces_of = _safe(folder, found) if found.safe else _torch(folder, found)
    refuse_packed((t.name for t in tensors), folder)
    index = "one file" if found.where is None else f"{len(found.files)} shards"
    checkpoint = Checkpoint(
        path=folder,
        format=NAME,
        version=f"{'safetensors' if found.safe else 'pytorch_model.bin'}, {index}",
        topology=Topology(),
        layout=Layout(tensors, pieces_of, "torch"),
        files=found.files,
        extras=_extras(config),
        problems=found.problems,
        opaque=opaque_in(folder, found.files),
        optimizer_left=options.weights_only and is_beside(folder),
    )
    if not is_quantised(tensors):
        return checkpoint if options.weights_only else with_optimizer(checkpoint)
    if not options.weights_only:
        refuse_beside_blocks(folder)
    return replace(checkpoint, quantised=lambda dtype: dequantised(checkpoint, scheme, dtype))


def _extras(config: Mapping[str, Json]) -> dict[str, Json]:
    return {"config": config} if config else {}


#: Tensors, and what makes the pieces of one.
_Held = tuple[dict[TensorId, LogicalTensor], Callable[[TensorId], Sequence[Piece]]]


def _safe(folder: Path, found: Weights) -> _Held:
    held = (
        (file, name, array)
        for file in found.files
        for name, array in safetensors.read_header(folder, file).arrays.items()
    )
    arrays = _gathered(folder, found, held)
    tensors = {(t := TensorId(n)): LogicalTensor(t, a.shape, a.dtype) for n, a in arrays.items()}
    return tensors, lambda t: [whole(arrays[t.name])]


def _torch(folder: Path, found: Weights) -> _Held:
    def held() -> Iterable[tuple[str, str, Piece]]:
        for file in found.files:
            read = torchfile.load(folder / file, file)
            if not isinstance(read.root, Mapping):
                raise CorruptError(f"{folder / file}: no table of tensors in it")
            for name, ref in read.root.items():
                if not isinstance(name, str) or not isinstance(ref, TensorRef):
                    raise CorruptError(f"{folder / file}: {name!r} is no tensor")
                array, base, strides = read.strided(ref, name)
                yield file, name, Piece(Box.whole(ref.shape), array, base, strides)

    pieces = _gathered(folder, found, held())
    tensors = {
        (t := TensorId(n)): LogicalTensor(t, p.box.shape, p.array.dtype) for n, p in pieces.items()
    }
    return tensors, lambda t: [pieces[t.name]]


def _gathered(folder: Path, found: Weights, held: Iterable[tuple[str, str, T]]) -> dict[str, T]:
    """Every tensor once, where the index says it is. `held`: file, name, tensor."""
    out: dict[str, T] = {}
    for file, name, tensor in held:
        said = file if found.where is None else found.where.get(name)
        if said is None:
            raise CorruptError(
                f"{folder / file} holds {name}, which the index does not name: the files are of "
                "two saves. Copy the folder again."
            )
        if name in out:
            raise CorruptError(f"{folder}: {name} lies in {said} and in {file}")
        if said != file:
            raise CorruptError(f"{folder / file} holds {name}; the index says it lies in {said}")
        out[name] = tensor
    ghosts = [n for n in found.where or () if n not in out]
    if ghosts:
        raise CorruptError(
            f"{folder}: the index names {ghosts[0]}"
            + (f" and {len(ghosts) - 1} more" if len(ghosts) > 1 else "")
            + ", which no file holds. A loader would fail, or leave it to chance."
        )
    return out
