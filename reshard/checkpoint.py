"""What a reader gives: a checkpoint as layout, files and typed extras."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from reshard.dtypes import DType
from reshard.layout import Layout
from reshard.topology import Topology
from reshard.values import Json as Json


@dataclass(frozen=True, slots=True)
class ParamGroup:
    """One parameter group of the optimizer: its options and the tensors it holds, by name."""

    options: Mapping[str, Json]
    members: tuple[str, ...]


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint, headers read, no tensor bytes.

    `path` is the folder that stored arrays' files are relative to. `groups` None: no optimizer.
    `steps` gives Adam's step counter by tensor name. `extras` holds everything that is neither
    tensor, group nor step, by dotted path, as plain values. `native` is what only the writers of
    the same converter use.
    """

    path: Path
    format: str
    version: str
    topology: Topology
    layout: Layout
    files: tuple[str, ...]
    groups: tuple[ParamGroup, ...] | None = None
    #: Whether a group's members stand as the job's optimizer lists them, not in an order of ours.
    ordered: bool = True
    steps: Mapping[str, float] = field(default_factory=dict)
    iteration: int | None = None
    extras: Mapping[str, Json] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    #: True rows of the vocabulary that are left out on opening, as --vocab-size asks; in words.
    rows_left: str | None = None
    #: Whether an optimizer is there and was not read, as --weights-only asks.
    optimizer_left: bool = False
    family: str | None = None
    #: The dtype in which the model holds a weight of which the master alone is stored.
    kinds: Mapping[str, DType] = field(default_factory=dict)
    #: Side files that are pickles of a trainer's own classes: not read, below `path`.
    opaque: tuple[str, ...] = ()
    #: Where tensors are quantised: the same checkpoint with their values in this dtype.
    quantised: Callable[[DType], Checkpoint] | None = field(default=None, repr=False)
    native: object = field(default=None, repr=False)


#: The extra that says other names of tensors that are held under one: alias -> name.
TIES = "ties"


def ties(checkpoint: Checkpoint) -> dict[str, str]:
    """Other names of the checkpoint's tensors (tied weights): alias -> name."""
    found = checkpoint.extras.get(TIES)
    return {k: str(v) for k, v in found.items()} if isinstance(found, Mapping) else {}


#: Where checkpoints say how many samples they have trained on. Source: megatron/training
#: checkpointing.py @ core_v0.16.1; deepspeed 0.19.8 engine.py; ours of a torch target.
_SAMPLES = (
    "args.consumed_train_samples",
    "consumed_train_samples",
    "global_samples",
    "train_state.consumed_train_samples",
    "client.consumed_train_samples",
)


def consumed_samples(checkpoint: Checkpoint) -> int | None:
    """How many samples a checkpoint has trained on, where it says so."""
    for path in _SAMPLES:
        found = checkpoint.extras.get(path)
        if isinstance(found, int) and (found or not checkpoint.iteration):
            return found
    return None


def is_samples(path: str) -> bool:
    """Whether a field of extras counts consumed samples."""
    return path in _SAMPLES
