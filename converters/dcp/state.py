"""What a PyTorch checkpoint holds beside tensors, and how its keys are spelled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from reshard.containers.carried import Carried

from .leaves import ObjectLeaf
from .values import Path

#: The state entry that is Adam's counter, kept apart from the tensors.
STEP = "step"


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a state dict is laid out: where the model and the optimizers are, how keys are joined.

    `flat`: optimizer keys are `state.<name>.<slot>` in one component. `numbered`: parameters go by
    numbers there, as in torch.optim's own state dict. `model_folder` and `optimizer_folder` are
    DCP folders below the checkpoint's ("" for itself).
    """

    kind: str = "plain"  # plain | torchtitan | accelerate | lightning | files
    model: Path = ("model",)
    optimizers: tuple[Path, ...] = (("optim",),)
    flat: bool = False
    numbered: bool = False
    attribute: str = ""
    model_folder: str = ""
    optimizer_folder: str = ""

    def named(self, name: str) -> str:
        """A parameter's name as this dialect's keys have it."""
        return f"{self.attribute}.{name}" if self.attribute else name

    def parameter(self, name: str) -> Path:
        """Where a parameter lies."""
        return (*self.model, self.named(name))

    def state(self, name: str, slot: str, optimizer: int = 0, number: int | None = None) -> Path:
        """Where an entry of a parameter's optimizer state lies; its number, where it goes by one.

        DCP spells numbers in dicts as text (torch 2.13 distributed/checkpoint/_traverse.py).
        """
        container = self.optimizers[optimizer]
        if self.flat:
            return (*container, f"state.{self.named(name)}.{slot}")
        return (*container, "state", self.named(name) if number is None else str(number), slot)

    def option(self, group: int | str, option: str, optimizer: int = 0) -> Path:
        """Where an option of a group lies: by its number, or by a member where keys are flat."""
        container = self.optimizers[optimizer]
        if self.flat:
            return (*container, f"param_groups.{group}.{option}")
        return (*container, "param_groups", group, option)


@dataclass(frozen=True, slots=True)
class State:
    """What the writers of this converter use of a source of theirs.

    `options` and `homes` (which optimizer) go with Checkpoint.groups, in order. `others` are
    tensors outside the model, at their own paths. `ranks` is how many wrote the checkpoint,
    `format` which of ours it is.
    """

    dialect: Dialect
    options: tuple[Mapping[str, Carried], ...] = ()
    homes: tuple[int, ...] = ()
    extras: tuple[ObjectLeaf, ...] = ()
    others: Mapping[str, Path] = field(default_factory=dict)
    ranks: int | None = None
    format: str = ""
