"""What a target is to be: its dialect, its ranks, its tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from reshard.checkpoint import Checkpoint, ties
from reshard.dtypes import DType, named
from reshard.errors import FormatError, UsageError
from reshard.format import WriteOptions
from reshard.tensor import MASTER, PARAM, LogicalTensor, TensorId
from reshard.topology import Target, Topology

from .recognise import DCP, MODEL_FOLDER, OPTIMIZER_FOLDER
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
_OPTIONS = ("chunk", "model", "optim", "flat", "numbered")
_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


@dataclass(frozen=True, slots=True)
class Goal:
    """A target: who will write which boxes under which keys.

    `chunk` is the most bytes of a chunk, or None: cut as `ranks` ranks of FSDP cut. `same_kind`:
    side files and unknown values have a place. `data`: one of format.CURSORS.
    """

    dialect: Dialect
    ranks: int
    chunk: int | None
    same_kind: bool
    weights_only: bool  # asked for, or there is no optimizer
    asked_weights: bool
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
    elif native is not None and native.format == DCP:
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
        asked_weights=options.weights_only,
        data=options.data_cursor,
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
    for name in ("flat", "numbered"):
        said = asked.get(name)
        if said not in (None, "yes", "no"):
            raise UsageError(f"{name}={said}: say yes or no")
    if flat is not None:
        dialect = replace(dialect, flat=flat == "yes")
    if "numbered" in asked:
        dialect = replace(dialect, numbered=asked["numbered"] == "yes")
    if dialect.flat and dialect.numbered:
        raise UsageError("flat keys have no numbers: flat=yes and numbered=yes contradict")
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


def other_names(
    source: Checkpoint, like: Checkpoint | None, held: Mapping[TensorId, LogicalTensor]
) -> dict[str, str]:
    """Second names of tied weights: torch's state dict has both, and dcp.load asks for both.

    Source: fixture fsdp2_w2_bf16_tied; a key that is missing stops dcp.load.
    """
    said = ties(source) | (ties(like) if like is not None else {})
    return {
        alias: name
        for alias, name in said.items()
        if TensorId(name) in held and TensorId(alias) not in held
    }


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
