"""Rebuilds fp32 masters of which only the low 16 bits are stored beside bf16 weights.

With --use-precision-aware-optimizer FusedAdam keeps a remainder: the master is the weight's bits,
less one if the remainder is negative (the weight was rounded up), before the remainder's.
torch_dist in model or bucket space stores it as int16; forms that gather on one rank (dp_zero,
fully_reshardable, distrib_optim.pt) copy it into fp32, as a whole number.
Source: TransformerEngine common/multi_tensor/adam.cu (the functor over p_remainder),
pytorch/optimizers/fused_adam.py get_unscaled_state @ d0067d0d; megatron/core/optimizer/
distrib_optimizer.py _get_main_param_and_optimizer_states @ core_v0.16.1. No fixture: Transformer
Engine needs a GPU; tests put remainders, by the kernel's rule, into files of the frameworks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from reshard.box import Box
from reshard.dtypes import FLOAT32, named
from reshard.errors import CorruptError, FormatError
from reshard.files import Files
from reshard.layout import Piece, Read
from reshard.tensor import MASTER, PARAM, LogicalTensor, TensorId

Array = npt.NDArray[Any]
PiecesOf = Callable[[TensorId], Sequence[Piece]]
Tensors = Mapping[TensorId, LogicalTensor]

_INT16, _BF16 = named("int16"), named("bfloat16")
_SAMPLED, _ELEMENTS = 16, 1024  # tensors looked at, elements of each


@dataclass(frozen=True, slots=True)
class Remainder:
    """Stored remainders of a box of a master, and the weight's pieces, in the same space.

    `held` is the piece as the checkpoint has it: a piece cut, permuted or counted in finer shapes
    later is led back to it by where its elements lie in the array.
    """

    held: Piece
    weights: tuple[Piece, ...]

    def decode(self, read: Read, piece: Piece, box: Box) -> Array:
        """The fp32 masters of a box of the piece."""
        stored = read(replace(piece, codec=None), box)
        return masters(self._weights(read, piece, box), stored)

    def _weights(self, read: Read, piece: Piece, box: Box) -> Array:
        held = self.held
        same = piece.strides == held.strides and box in held.box
        if same and held.base_of(box) == piece.base_of(box):
            return self._read(read, box)
        index = self._index(piece, box)
        start = tuple(int(i.min()) for i in index)
        whole = Box(start, tuple(int(i.max()) + 1 for i in index))
        values = self._read(read, whole)
        return values[tuple(i - a for i, a in zip(index, start, strict=True))]

    def _index(self, piece: Piece, box: Box) -> list[npt.NDArray[np.int64]]:
        """The held piece's index, axis by axis, of every element of a box of another piece."""
        at = np.full(box.shape, piece.base_of(box) - self.held.base, np.int64)
        for axis, (n, stride) in enumerate(zip(box.shape, piece.strides, strict=True)):
            steps = np.arange(n, dtype=np.int64) * stride
            at += steps.reshape([-1 if k == axis else 1 for k in range(len(box.shape))])
        index = [np.full(box.shape, a, np.int64) for a in self.held.box.start]
        axes = range(len(self.held.strides))
        for axis in sorted(axes, key=lambda k: -self.held.strides[k]):
            if self.held.box.shape[axis] > 1:
                index[axis] += at // self.held.strides[axis]
                at = at % self.held.strides[axis]
        return index

    def _read(self, read: Read, box: Box) -> Array:
        """The weights of a box."""
        out = np.empty(box.shape, _BF16.numpy)
        left = np.ones(box.shape, np.bool_)
        for piece in self.weights:
            common = piece.box & box
            if common is not None:
                at = tuple(
                    slice(a - o, b - o)
                    for a, b, o in zip(common.start, common.stop, box.start, strict=True)
                )
                if left[at].any():
                    out[at] = read(piece, common)
                    left[at] = False
        if left.any():
            raise CorruptError(f"{self.held.array.key}: the weight of {box} is not all there")
        return out


def masters(weights: Array, remainders: Array) -> Array:
    """fp32 masters of bf16 weights and remainders, int16 or whole numbers in fp32.

    Raises CorruptError for a remainder that is no 16-bit integer.
    """
    low = np.ascontiguousarray(remainders)
    if low.dtype != np.int16:
        if not _whole(low):
            raise CorruptError("a stored remainder of a master is not a 16-bit whole number")
        low = low.astype(np.int16)
    high = np.ascontiguousarray(weights).view(np.uint16).astype(np.uint32)
    high = (high - (low < 0)) & np.uint32(0xFFFF)
    bits = (high.astype(np.uint32) << np.uint32(16)) | low.view(np.uint16)
    return bits.astype(np.uint32).view(np.float32)


#: What a person who resumes has to know.
NOTE = (
    "fp32 masters are rebuilt from bf16 weights and their stored 16-bit remainders; a target holds "
    "them whole, so resume without --use-precision-aware-optimizer, or with store_param_remainders "
    "off"
)


def rebuilt(
    folder: Path, tensors: Tensors, pieces_of: PiecesOf, args: Mapping[str, object]
) -> tuple[dict[TensorId, LogicalTensor], PiecesOf, tuple[str, ...]]:
    """The same tensors with whole masters, those of remainders rebuilt on reading; and notes.

    Raises FormatError where nothing tells remainders from masters.
    """
    pairs = [
        t for t, v in tensors.items() if t.slot == MASTER and v.dtype in (_INT16, FLOAT32)
        and (w := tensors.get(TensorId(t.name, PARAM))) is not None and w.dtype == _BF16
    ]  # fmt: skip
    alone = [t for t, v in tensors.items() if t.slot == MASTER and v.dtype == _INT16]
    odd = next((t for t in alone if t not in pairs), None)
    if odd is not None:
        raise FormatError(
            f"{odd}: stored as int16, the low half of a master, beside no bf16 weight"
        )
    if not alone and not _are_remainders(folder, tensors, pieces_of, args, pairs):
        return dict(tensors), pieces_of, ()
    held = frozenset(pairs)

    def pieces(tensor: TensorId) -> Sequence[Piece]:
        found = pieces_of(tensor)
        if tensor not in held:
            return found
        weights = tuple(pieces_of(TensorId(tensor.name, PARAM)))
        return [replace(p, codec=Remainder(p, weights)) for p in found]

    whole = {t: replace(v, dtype=FLOAT32) if t in held else v for t, v in tensors.items()}
    return whole, pieces, (NOTE,)


def _are_remainders(
    folder: Path,
    tensors: Tensors,
    pieces_of: PiecesOf,
    args: Mapping[str, object],
    pairs: Sequence[TensorId],
) -> bool:
    """Whether fp32 values in the place of masters are remainders, by a sample of them.

    The args alone do not tell: the option keeps whole masters too (store_param_remainders).
    """
    said = args.get("use_precision_aware_optimizer")
    if not pairs:
        return False
    step = max(1, len(pairs) // _SAMPLED)
    votes: dict[bool, TensorId] = {}
    with Files(folder) as files:
        for tensor in pairs[::step]:
            vote = _vote(files, pieces_of(tensor), pieces_of(TensorId(tensor.name, PARAM)))
            if vote is not None:
                votes.setdefault(vote, tensor)
    if len(votes) == 2:
        raise FormatError(
            f"{folder}: what is stored for {votes[True]} are 16-bit remainders of masters, for "
            f"{votes[False]} whole masters; one run stores one kind. Convert with --weights-only."
        )
    if not votes and said and args.get("store_param_remainders", True):
        raise FormatError(
            f"{folder}: args.use_precision_aware_optimizer is set, and the stored values tell "
            "neither whole masters nor their low 16 bits. Convert with --weights-only."
        )
    return True in votes


def _vote(files: Files, masters_: Sequence[Piece], weights: Sequence[Piece]) -> bool | None:
    """True: remainders. False: masters. None: these elements could be both."""
    for box, held, weight in _overlaps(masters_, weights):
        found = files.read(held, box).reshape(-1)
        if not _whole(found):
            return False
        beside = files.read(weight, box).reshape(-1)
        unlike = found.astype(_BF16.numpy).view(np.uint16) != beside.view(np.uint16)
        if np.count_nonzero(unlike & (found != 0)) * 2 > found.size:
            return True
    return None


def _overlaps(
    held: Sequence[Piece], weights: Sequence[Piece]
) -> Iterator[tuple[Box, Piece, Piece]]:
    """A few elements that a piece of each holds: the first rows of the first overlap."""
    for piece in held[:4]:
        for weight in weights:
            common = piece.box & weight.box
            if common is None:
                continue
            stop, left = list(common.stop), _ELEMENTS
            for axis in reversed(range(len(stop))):
                n = min(common.shape[axis], max(1, left))
                stop[axis], left = common.start[axis] + n, left // n
            yield Box(common.start, tuple(stop)), piece, weight
            break


def _whole(values: Array) -> bool:
    """Whether all values are whole numbers of 16 bits."""
    with np.errstate(invalid="ignore"):
        inside = (values >= -0x8000) & (values <= 0x7FFF) & (values == np.trunc(values))
    return bool(inside.all())
