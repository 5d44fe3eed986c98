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
    family: str | None = None
    #: Where tensors are quantised: the same checkpoint with their values in this dtype.
    quantised: Callable[[DType], Checkpoint] | None = field(default=None, repr=False)
    native: object = field(default=None, repr=False)


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
