"""Names of parameters as torch's own state dict calls give them, wrappers stripped."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

#: Modules that FSDP1, activation checkpointing and torch.compile put around another one.
#: Source: torch 2.13 distributed/checkpoint/state_dict.py, _get_fqns; fixture fsdp1_w2_getsd.
WRAPPERS = frozenset(
    {"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod", "_fpw_module"}
)
_PARALLEL = "module"  # DistributedDataParallel, DataParallel


@dataclass(frozen=True, slots=True)
class Spelling:
    """How a model's names differ from the canonical ones: components before each, wrappers within.

    `attribute` is where a LightningModule keeps the model ("model" in `model.lm_head.weight`).
    """

    parallel: bool = False
    attribute: str = ""

    def canonical(self, name: str) -> str:
        """The name without wrappers."""
        parts = [p for p in name.split(".") if p not in WRAPPERS]
        if self.parallel and len(parts) > 1 and parts[0] == _PARALLEL:
            parts = parts[1:]
        if self.attribute and len(parts) > 1 and parts[0] == self.attribute:
            parts = parts[1:]
        return ".".join(parts)

    def stored(self, name: str) -> str:
        """The name with its attribute put back, wrappers left out as torch leaves them out."""
        return f"{self.attribute}.{name}" if self.attribute else name


def spelling(names: Iterable[str], *, lightning: bool = False) -> Spelling:
    """The spelling of a model whose parameters have these names.

    `module` is stripped only where every name has it: a model may own a part of that name.
    """
    firsts = {_first(name) for name in names}
    if firsts == {_PARALLEL}:
        inner = {_first(Spelling(parallel=True).canonical(name)) for name in names}
        return Spelling(True, _only(inner) if lightning else "")
    return Spelling(False, _only(firsts) if lightning else "")


def _first(name: str) -> str:
    parts = [p for p in name.split(".") if p not in WRAPPERS]
    return parts[0] if len(parts) > 1 else ""


def _only(firsts: set[str]) -> str:
    return next(iter(firsts)) if len(firsts) == 1 else ""
