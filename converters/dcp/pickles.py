"""The leaves of torch.save files: one for the whole job, or one for each rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path as Folder

from reshard.box import Box
from reshard.containers import rank_names
from reshard.containers.carried import Carried, carry
from reshard.containers.inert import TensorRef, tensors_in
from reshard.containers.torchfile import TorchFile
from reshard.dtypes import DType
from reshard.errors import CorruptError, FormatError
from reshard.layout import Piece

from .leaves import Leaf, ObjectLeaf, TensorLeaf, dotted
from .listing import RANK
from .shards import Sharded, sharded
from .values import Path, plain

GROUPS = "param_groups"
FLAT = ("_flat_param", "flat_param")


@dataclass
class _Whole:
    """A tensor whose pieces come rank by rank."""

    shape: tuple[int, ...]
    dtype: DType
    pieces: list[Piece] = field(default_factory=list)
    plain: bool = True  # no rank said that it holds a shard


def load(root: Folder, name: str) -> TorchFile:
    """The torch.save file `name` below the checkpoint's folder, of the rank that it says."""
    return rank_names.load(root, name, (RANK,))


def tree(value: object, path: Path = ()) -> Iterator[tuple[Path, object]]:
    """The leaves of nested dicts and lists; lists of plain values stay whole, as in DCP.

    The options of a parameter group stay whole, too: here a dict's keys are not always texts.
    Source: torch 2.13 distributed/checkpoint/_traverse.py.
    """
    if len(path) > 2 and path[-3] == GROUPS:
        yield path, value
    elif isinstance(value, Mapping) and value and all(type(k) in (str, int) for k in value):
        for key, inner in value.items():
            yield from tree(inner, (*path, key))
    elif isinstance(value, list) and any(
        isinstance(v, Mapping | TensorRef) or sharded(v, dotted(path)) is not None for v in value
    ):
        for i, inner in enumerate(value):
            yield from tree(inner, (*path, i))
    else:
        yield path, value


def leaves_of(root: Folder, files: Sequence[tuple[str, Path]]) -> list[Leaf]:
    """The leaves of the files of all ranks, in rank order; each file's under its path.

    Tensors that ranks hold whole are replicas; shards are boxes. Values that differ between ranks
    are kept by rank.
    """
    whole: dict[Path, _Whole] = {}
    values: dict[Path, dict[int, Carried]] = {}
    order: dict[Path, None] = {}
    seen: Counter[Path] = Counter()
    for name, under in files:
        file = load(root, name)
        rank = seen[under]
        seen[under] += 1
        for path, value in tree(file.root, under):
            _refuse_flat(root / name, path)
            order.setdefault(path)
            if not _take(file, name, path, value, whole):
                values.setdefault(path, {})[rank] = carry(file, value)
    out: list[Leaf] = []
    for path in order:
        if path in whole:
            found = whole[path]
            first = start(found.pieces[0]) if found.pieces else None
            out.append(TensorLeaf(path, found.shape, found.dtype, Given(found.pieces), first))
        if path in values:
            out += by_rank(path, values[path])
    return out


def start(piece: Piece) -> tuple[str, int]:
    """The file and byte at which a piece's first element lies."""
    array = piece.array
    return array.file, array.offset + piece.base * array.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Given:
    """Pieces that are known already, given when asked for."""

    pieces: Sequence[Piece]

    def __call__(self) -> Sequence[Piece]:
        return self.pieces


def _refuse_flat(file: Folder, path: Path) -> None:
    if path and isinstance(path[-1], str) and path[-1].split(".")[-1] in FLAT:
        raise FormatError(
            f"{file}: {dotted(path)} is a flat parameter of FSDP1 (LOCAL_STATE_DICT): neither "
            "names nor shapes of what it holds are in the file. Name a checkpoint of the same "
            "model that has them, or a folder with its config.json: --from torch:reference=DIR."
        )


def _take(file: TorchFile, name: str, path: Path, value: object, whole: dict[Path, _Whole]) -> bool:
    """Take in a tensor or a rank's shard of one; False for another value."""
    where = f"{file.path}: {dotted(path)}"
    found = sharded(value, where)
    if isinstance(value, TensorRef):
        found = Sharded(value.shape, ((Box.whole(value.shape), value),))
    if found is None:
        return False
    dtypes = {ref.dtype for _, ref in found.parts}
    known = whole.get(path)
    if known is None:
        dtype = next(iter(dtypes)) if dtypes else _local_dtype(value, where)
        known = whole[path] = _Whole(found.shape, dtype, plain=isinstance(value, TensorRef))
    if known.shape != found.shape or known.plain != isinstance(value, TensorRef):
        raise FormatError(
            f"{where}: shape {list(found.shape)}, but {list(known.shape)} on the ranks before. A "
            "tensor without a device mesh cannot be put together (FSDP1 LOCAL_STATE_DICT with "
            "use_orig_params). Name a checkpoint of the same model: --from torch:reference=DIR."
        )
    for box, ref in found.parts:
        if ref.dtype != known.dtype:
            raise CorruptError(f"{where}: {ref.dtype}, but {known.dtype} on the ranks before")
        array, base, strides = file.strided(ref, dotted(path), name)
        if box.numel:
            known.pieces.append(Piece(box, array, base, strides))
    return True


def _local_dtype(value: object, where: str) -> DType:
    """The dtype of a shard without elements."""
    for ref in tensors_in(value):
        if ref.dtype.floating:
            return ref.dtype
    raise CorruptError(f"{where}: a shard without a tensor")


def by_rank(path: Path, values: Mapping[int, Carried]) -> list[ObjectLeaf]:
    """A value that all ranks share, or each rank's under its number."""
    first, *rest = values.values()
    if not rest or len({repr(plain(value)) for value in values.values()}) == 1:
        return [ObjectLeaf(path, first)]
    return [ObjectLeaf((*path, f"rank{rank}"), value) for rank, value in values.items()]
