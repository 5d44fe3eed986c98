"""The optimizer beside the weights, in a folder of its own that no loader looks into: `optimizer/`.

`optimizer.json` says param groups, step counters and what has been consumed; the tensors lie in
`optimizer.safetensors`, or in shards, as `SLOT/NAME` under the weights' names: moments, and masters
where they are wider than the weights. A loader that takes every *.safetensors of the model's folder
(vLLM without an index) finds none of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from reshard.checkpoint import Checkpoint, ParamGroup, consumed_samples
from reshard.containers import safetensors
from reshard.containers.safetensors import Item
from reshard.containers.small import read_object
from reshard.containers.state_json import kept_groups, loose, read_groups, strict
from reshard.errors import CorruptError, FormatError, LossError, UnsafeError
from reshard.layout import Draft, Layout, StoredArray, whole
from reshard.tensor import EXP_AVG, MASTER, PARAM, STEP, LogicalTensor, TensorId

FOLDER = "optimizer"
STATE = f"{FOLDER}/optimizer.json"
#: The version of what `state_draft` writes.
VERSION = 1
SAMPLES = "consumed_train_samples"
_FILE = re.compile(r"optimizer(-\d{5}-of-\d{5})?\.safetensors")


# --- writing -------------------------------------------------------------------------------------


def kept(
    source: Checkpoint, weights: Mapping[TensorId, LogicalTensor]
) -> dict[TensorId, LogicalTensor]:
    """What is kept of the source's optimizer beside these weights.

    A master whose values the written weight's type has is the weight. A lone weight that was
    trained and is written in a type that lacks some has its master made of it. Raises LossError
    for no optimizer.
    """
    held = source.layout.tensors
    out: dict[TensorId, LogicalTensor] = {}
    for weight, written in weights.items():
        master = TensorId(weight.name, MASTER)
        wide = held.get(master) or held.get(weight)
        trained = master in held or TensorId(weight.name, EXP_AVG) in held
        if trained and wide is not None and not written.dtype.holds(wide.dtype):
            out[master] = LogicalTensor(master, wide.shape, wide.dtype)
    for tensor, logical in held.items():
        if tensor.slot not in (PARAM, MASTER, STEP):
            out[tensor] = LogicalTensor(tensor, logical.shape, logical.dtype)
    if not any(t.slot != MASTER for t in out):
        raise LossError(f"{source.path}: optimizer=yes, and the source holds no optimizer")
    return out


def items(tensors: Mapping[TensorId, LogicalTensor]) -> list[Item]:
    """The tensors as they are named in the files: slot by slot."""
    by_slot = sorted(tensors, key=lambda t: t.slot)
    return [Item(f"{t.slot}/{t.name}", tensors[t].shape, tensors[t].dtype) for t in by_slot]


def drafts(
    source: Checkpoint, shards: Sequence[Sequence[Item]], names: set[str]
) -> tuple[list[Draft], dict[TensorId, StoredArray]]:
    """The files of the folder, and the array of every tensor in them."""
    n = len(shards)
    files = ["optimizer.safetensors"]
    if n > 1:
        files = [f"optimizer-{i + 1:05d}-of-{n:05d}.safetensors" for i in range(n)]
    made = [safetensors.draft(f"{FOLDER}/{f}", s) for f, s in zip(files, shards, strict=True)]
    arrays = {_tensor(a.key): a for d in made for a in d.arrays}
    state = {
        "version": VERSION,
        "files": files,
        "iteration": source.iteration,
        SAMPLES: consumed_samples(source),
        "ordered": source.ordered,
        "groups": None
        if source.groups is None
        else kept_groups([(g.options, g.members) for g in source.groups], names),
        "steps": strict({name: step for name, step in source.steps.items() if name in names}),
    }
    raw = (json.dumps(state, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()
    return [*made, Draft(STATE, len(raw), [(0, raw)])], arrays


def _tensor(key: str) -> TensorId:
    slot, _, name = key.partition("/")
    return TensorId(name, slot)


# --- reading -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Held:
    """What the folder holds, checked."""

    arrays: Mapping[TensorId, StoredArray]
    files: tuple[str, ...]
    state: Mapping[str, Any]


def with_optimizer(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with the optimizer beside its weights, if there is one.

    Raises CorruptError for one that is not of these weights, or not whole.
    """
    folder = checkpoint.path
    if not (folder / STATE).is_file():
        left = _files(folder)
        if left:
            raise CorruptError(
                f"{folder / STATE}: is missing, and {left[0]} lies beside it. Copy the folder "
                f"again, or move {FOLDER}/ away for the weights alone."
            )
        return checkpoint
    where = folder / STATE
    held = _read(folder, read_object(where))
    _check(checkpoint, held, where)
    tensors = dict(checkpoint.layout.tensors)
    for tensor, array in held.arrays.items():
        tensors[tensor] = LogicalTensor(tensor, array.shape, array.dtype)
    own = checkpoint.layout.pieces_of
    try:
        listed = held.state["groups"]
        read = None if listed is None else read_groups(listed, where)
        steps = loose(held.state["steps"], where)
    except (KeyError, TypeError, AttributeError) as error:
        raise CorruptError(f"{where}: not what reshard writes ({error!r})") from None
    samples = held.state.get(SAMPLES)
    said = {} if samples is None else {SAMPLES: samples}
    return replace(
        checkpoint,
        layout=Layout(
            tensors,
            lambda t: [whole(held.arrays[t])] if t in held.arrays else own(t),
            checkpoint.layout.naming,
        ),
        files=(*checkpoint.files, *held.files, STATE),
        groups=None if read is None else tuple(ParamGroup(o, m) for o, m in read),
        ordered=bool(held.state.get("ordered")),
        steps=steps,
        iteration=held.state.get("iteration"),
        extras={**checkpoint.extras, **said},
    )


def _files(folder: Path) -> list[str]:
    """The files of an optimizer's tensors that lie in a model's folder."""
    return sorted(p.name for p in (folder / FOLDER).glob("*") if _FILE.fullmatch(p.name))


def is_beside(folder: Path) -> bool:
    """Whether an optimizer lies beside the weights."""
    return (folder / STATE).is_file() or bool(_files(folder))


def refuse_beside_blocks(folder: Path) -> None:
    """Raises FormatError for an optimizer beside quantised weights, whose it cannot be."""
    if is_beside(folder):
        raise FormatError(
            f"{folder / FOLDER}: an optimizer lies beside weights that are quantised in blocks, "
            "and steps none of them. Convert with --weights-only, or move it away."
        )


def _read(folder: Path, state: Mapping[str, Any]) -> _Held:
    where = folder / STATE
    if state.get("version") != VERSION:
        raise FormatError(
            f"{where}: version {state.get('version')!r}; this reshard reads {VERSION}. Update it."
        )
    listed = state.get("files")
    if not isinstance(listed, list) or not listed:
        raise CorruptError(f"{where}: names no files")
    arrays: dict[TensorId, StoredArray] = {}
    for file in listed:
        if not isinstance(file, str) or not _FILE.fullmatch(file):
            raise UnsafeError(f"{where}: names {file!r:.80}, which is no file of an optimizer")
        for key, array in safetensors.read_header(folder, f"{FOLDER}/{file}").arrays.items():
            if _tensor(key) in arrays:
                raise CorruptError(f"{folder / FOLDER}: {key} lies in two files")
            arrays[_tensor(key)] = array
    return _Held(arrays, tuple(f"{FOLDER}/{f}" for f in listed), state)


def _check(checkpoint: Checkpoint, held: _Held, where: Path) -> None:
    weights = checkpoint.layout.tensors
    for tensor, array in held.arrays.items():
        weight = weights.get(TensorId(tensor.name))
        if weight is None or tensor.slot in ("", PARAM):
            raise CorruptError(
                f"{where.parent}: holds {tensor}, and the model has no such weight. The optimizer "
                "is another model's; move its folder away."
            )
        if weight.shape != array.shape:
            raise CorruptError(
                f"{where.parent}: {tensor} has shape {list(array.shape)}, the weight "
                f"{list(weight.shape)}: the optimizer is another model's"
            )
    told = held.state.get("steps")
    unknown = [n for n in told if TensorId(n) not in weights] if isinstance(told, dict) else []
    if unknown:
        raise CorruptError(f"{where}: a step counter of {unknown[0]}, which the model has not")
