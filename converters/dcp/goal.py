"""What a target is to be: its dialect, its ranks, its tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from reshard.checkpoint import Checkpoint
from reshard.dtypes import DType, named
from reshard.errors import FormatError, UsageError
from reshard.format import WriteOptions
from reshard.tensor import MASTER, PARAM, LogicalTensor, TensorId
from reshard.topology import Target, Topology

from .sources import MODEL_FOLDER, OPTIMIZER_FOLDER
from .state import Dialect, State

#: Spellings of `dcp.VARIANT`. Source: fixtures fsdp2_w2_fp32, torchtitan_w2, accelerate_fsdp2_w2.
VARIANTS = {
    "plain": Dialect(),
    "torchtitan": Dialect("torchtitan", (), (("optimizer",),), flat=True),
    "accelerate": Dialect(
        "accelerate",
        ("model",),
        (("optimizer",),),
        model_folder=MODEL_FOLDER,
        optimizer_folder=OPTIMIZER_FOLDER,
    ),
}
_OPTIONS = ("chunk", "model", "optim", "flat", "data")
_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


@dataclass(frozen=True, slots=True)
class Goal:
    """A target: who will write which boxes under which keys.

    `chunk` is the most bytes of a chunk, or None: cut as `ranks` ranks of FSDP cut. `same_kind`:
    side files and unknown values have a place. `data` is what becomes of per-rank data loaders.
    """

    dialect: Dialect
    ranks: int
    chunk: int | None
    same_kind: bool
    weights_only: bool
    data: str | None = None
    dp_given: bool = False

    @property
    def topology(self) -> Topology:
        """As it is printed."""
        return Topology(dp=self.ranks)


def goal(source: Checkpoint, target: Target, options: WriteOptions) -> Goal:
    """What a TARGET asks for, the rest as the source has it.

    Raises UsageError for a variant or option that is not known.
    """
    asked = target.take(*_OPTIONS)
    native = source.native if isinstance(source.native, State) else None
    like = options.like.native if options.like else None
    weights = options.weights_only or source.groups is None
    if isinstance(like, State):
        dialect = like.dialect
    elif target.variant is not None:
        dialect = _variant(target.variant)
    elif native is not None and source.format == "dcp":
        dialect = native.dialect
    else:
        dialect = VARIANTS["plain"]
    if options.weights_only and dialect.kind == "lightning":
        dialect = VARIANTS["plain"]
    dialect = _respelled(dialect, asked)
    return Goal(
        dialect=dialect,
        ranks=_ranks(source, target, options),
        chunk=_bytes(asked["chunk"]) if "chunk" in asked else None,
        same_kind=native is not None and native.dialect.kind == dialect.kind,
        weights_only=weights,
        data=_data(asked.get("data")),
        dp_given=bool(target.degrees),
    )


def _variant(name: str) -> Dialect:
    found = VARIANTS.get(name)
    if found is None:
        raise UsageError(f"dcp.{name} is not known; known: {', '.join(VARIANTS)}")
    return found


def _respelled(dialect: Dialect, asked: Mapping[str, str]) -> Dialect:
    model, optim, flat = asked.get("model"), asked.get("optim"), asked.get("flat")
    if model is not None:
        dialect = replace(dialect, model=tuple(filter(None, model.split("/"))))
    if optim is not None:
        if len(dialect.optimizers) > 1:
            raise UsageError("optim= renames one optimizer; the source has several")
        dialect = replace(dialect, optimizers=(tuple(filter(None, optim.split("/"))),))
    if flat is not None:
        if flat not in ("yes", "no"):
            raise UsageError(f"flat={flat}: say yes or no")
        dialect = replace(dialect, flat=flat == "yes")
    return dialect


def _ranks(source: Checkpoint, target: Target, options: WriteOptions) -> int:
    """How many files to cut for: the degrees of TARGET multiplied, else the source's ranks."""
    if not target.degrees:
        like = options.like.topology.dp if options.like else None
        return like or source.topology.dp or 1
    ranks = 1
    for name, n in target.degrees.items():
        if name not in ("dp", "tp", "pp", "cp"):
            raise UsageError(f"{target.text!r}: a DCP target has no degree {name}")
        ranks *= n
    return ranks


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+)(|KiB|MiB|GiB)", text)
    if match is None or int(match[1]) == 0:
        raise UsageError(f"chunk={text}: write a size as 256MiB")
    return int(match[1]) * _UNITS[match[2]]


def _data(text: str | None) -> str | None:
    if text not in (None, "reset", "rank0"):
        raise UsageError(f"data={text}: say reset or rank0")
    return text


def tensors(
    source: Checkpoint, aim: Goal, options: WriteOptions
) -> tuple[dict[TensorId, LogicalTensor], frozenset[TensorId]]:
    """The target's tensors, and the source's that something else stands for.

    torch keeps one copy of a weight: where a source of another kind has a master, the master is it.
    """
    held = source.layout.tensors
    if options.like is not None:
        return _as_like(source, options.like), frozenset()
    asked = named(options.dtype) if options.dtype else None
    own = isinstance(source.native, State)
    out: dict[TensorId, LogicalTensor] = {}
    replaced: set[TensorId] = set()
    for tensor, logical in held.items():
        if aim.weights_only and tensor.slot != PARAM:
            continue
        if tensor.slot == MASTER and not own:
            lone = TensorId(tensor.name)
            out[lone] = _tensor(lone, logical, _cast(asked, logical.dtype))
            if lone in held:
                replaced.add(lone)
        elif tensor not in out and not (tensor.slot == PARAM and _mastered(held, tensor, own, aim)):
            cast = _cast(asked, logical.dtype) if tensor.slot == PARAM else logical.dtype
            out[tensor] = _tensor(tensor, logical, cast)
    return out, frozenset(replaced)


def tied_copies(
    source: Checkpoint, held: Mapping[TensorId, LogicalTensor]
) -> tuple[dict[TensorId, LogicalTensor], dict[TensorId, TensorId]]:
    """The second names of tied weights, and what fills them: torch's state dict has both.

    Sources that keep one copy say the others in their extras, as `ties`: alias to name.
    Source: fixture fsdp2_w2_bf16_tied; a key that is missing stops dcp.load.
    """
    ties = source.extras.get("ties")
    out: dict[TensorId, LogicalTensor] = {}
    feeds: dict[TensorId, TensorId] = {}
    for alias, name in ties.items() if isinstance(ties, Mapping) else ():
        weight, copy = TensorId(str(name)), TensorId(alias)
        if weight not in held or copy in held:
            continue
        out[copy] = _tensor(copy, held[weight], held[weight].dtype)
        master = TensorId(str(name), MASTER)
        wide = source.layout.tensors.get(weight, held[weight]).dtype != held[weight].dtype
        lone = weight not in source.layout.tensors
        feeds[copy] = master if (wide or lone) and master in source.layout.tensors else weight
    return out, feeds


def _mastered(
    held: Mapping[TensorId, LogicalTensor], tensor: TensorId, own: bool, aim: Goal
) -> bool:
    return not own and not aim.weights_only and TensorId(tensor.name, MASTER) in held


def _cast(asked: DType | None, dtype: DType) -> DType:
    return asked if asked is not None and dtype.floating else dtype


def _tensor(tensor: TensorId, logical: LogicalTensor, dtype: DType) -> LogicalTensor:
    return LogicalTensor(tensor, logical.shape, dtype)


def _as_like(source: Checkpoint, like: Checkpoint) -> dict[TensorId, LogicalTensor]:
    """The reference's tensors. Raises FormatError if it is of another naming."""
    if like.layout.naming != source.layout.naming:
        raise FormatError(
            f"{like.path} names tensors as {like.layout.naming!r}, the source as "
            f"{source.layout.naming!r}"
        )
    return {t: LogicalTensor(t, v.shape, v.dtype) for t, v in like.layout.tensors.items()}
