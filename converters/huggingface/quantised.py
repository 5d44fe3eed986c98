"""fp8 with block scales, and MXFP4: which tensors they are, and how they are read as plain ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import ceil

from reshard.box import Box, row_major
from reshard.checkpoint import Checkpoint, Json
from reshard.codec import BlockScaled, MicroScaled
from reshard.dtypes import DType
from reshard.errors import CorruptError, FormatError
from reshard.layout import Layout, Piece, StoredArray
from reshard.tensor import LogicalTensor, TensorId

_SCALE, _BLOCKS, _SCALES = "_scale_inv", "_blocks", "_scales"


def is_quantised(tensors: Mapping[TensorId, LogicalTensor]) -> bool:
    """Whether any tensor's values are not what its elements say."""
    return any(
        v.dtype.name.startswith("float8")
        or (
            t.name.endswith(_BLOCKS) and TensorId(t.name.removesuffix(_BLOCKS) + _SCALES) in tensors
        )
        for t, v in tensors.items()
    )


def dequantised(
    checkpoint: Checkpoint, scheme: Mapping[str, Json] | None, dtype: DType
) -> Checkpoint:
    """The checkpoint with every quantised tensor read as `dtype`, its scales used up.

    Raises CorruptError for an fp8 tensor without scales, FormatError for blocks nobody tells.
    """
    layout = checkpoint.layout
    pieces = {t.name: piece for t in layout.tensors for piece in layout.pieces(t)}
    out: dict[str, Piece] = {}
    used: set[str] = set()
    for name, piece in pieces.items():
        if name.endswith(_BLOCKS) and (scales := name.removesuffix(_BLOCKS) + _SCALES) in pieces:
            out[name.removesuffix(_BLOCKS)] = _micro(piece, pieces[scales], dtype)
            used |= {name, scales}
        elif piece.array.dtype.name.startswith("float8"):
            scale = pieces.get(name + _SCALE)
            if scale is None:
                raise CorruptError(
                    f"{checkpoint.path}: {name} is {piece.array.dtype.name} and no {name + _SCALE} "
                    "is there; its values are unknown"
                )
            out[name] = _blocked(piece, scale, scheme, dtype)
            used.add(name + _SCALE)
    plain = {n: p for n, p in pieces.items() if n not in used and n not in out} | out
    tensors = {
        TensorId(n): LogicalTensor(TensorId(n), p.box.shape, dtype if n in out else p.array.dtype)
        for n, p in plain.items()
    }
    config = checkpoint.extras.get("config")
    extras = dict(checkpoint.extras)
    if isinstance(config, Mapping):
        extras["config"] = {k: v for k, v in config.items() if k != "quantization_config"}
    return replace(
        checkpoint,
        layout=Layout(tensors, lambda t: [plain[t.name]], layout.naming),
        extras=extras,
        quantised=None,
    )


def _blocked(piece: Piece, scale: Piece, scheme: Mapping[str, Json] | None, dtype: DType) -> Piece:
    said = (scheme or {}).get("weight_block_size")
    shape, scales = piece.array.shape, scale.array.shape
    block = _pair(said)
    if block is None:
        raise FormatError(
            f"{piece.array.key}: the config's quantization_config names no weight_block_size"
        )
    wanted = tuple(ceil(n / b) for n, b in zip(shape, block, strict=False))
    if len(shape) != 2 or scales != wanted:
        raise CorruptError(
            f"{piece.array.key}: shape {list(shape)} in blocks of {list(block)} has scales of "
            f"shape {list(wanted)}; stored are {list(scales)}"
        )
    return replace(piece, codec=BlockScaled(scale.array, block, dtype))


def _pair(value: Json) -> tuple[int, int] | None:
    if isinstance(value, list) and len(value) == 2:
        a, b = value
        if isinstance(a, int) and isinstance(b, int) and a > 0 and b > 0:
            return a, b
    return None


def _micro(blocks: Piece, scales: Piece, dtype: DType) -> Piece:
    """[E, out, in] packed along `in`, read as transformers gives it: [E, in, out]."""
    *lead, groups, half = blocks.array.shape
    if half != 16 or len(lead) != 2 or scales.array.shape != (*lead, groups):
        raise CorruptError(
            f"{blocks.array.key}: blocks of shape {list(blocks.array.shape)} and scales of shape "
            f"{list(scales.array.shape)} are no MXFP4"
        )
    experts, rows = lead
    columns = groups * half * 2
    packed = (experts, rows, columns)
    virtual = StoredArray(blocks.array.file, blocks.array.offset, packed, dtype, blocks.array.key)
    e, r, c = row_major(packed)
    box = Box.whole((experts, columns, rows))
    return Piece(box, virtual, 0, (e, c, r), MicroScaled(blocks.array, scales.array, dtype))
