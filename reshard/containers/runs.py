"""The checkpoints of a run folder, by the names that trainers give them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from reshard.errors import FormatError

#: step-1000 (torchtitan), step1000 (OLMo-core), checkpoint-1000 (HF Trainer), checkpoint_3
#: (accelerate), epoch=1-step=6.ckpt (Lightning), global_step_100/actor (verl), iter_100, ep0-ba100
#: (Composer). All of these trainers resume from the largest.
_NAME = (
    r"(?:step|checkpoint|global_step|iter|epoch)[-_]?(\d+)|"
    r".*step=(\d+)(?:-v\d+)?\.ckpt|ep\d+-ba(\d+)"
)
_INNER = ("", "actor", "model_and_optim", "checkpoint")


def checkpoint_folder(
    run: Path, iteration: int | None, recognise: Callable[[Path], str | None]
) -> Path | None:
    """The checkpoint of a run folder: `iteration`, else the largest.

    Raises FormatError for an iteration that is not there.
    """
    if not run.is_dir():
        return None
    found: dict[int, Path] = {}
    for entry in sorted(run.iterdir()):  # Lightning's are files where one rank writes
        match = re.fullmatch(_NAME, entry.name)
        if match is None:
            continue
        number = int(next(g for g in match.groups() if g is not None))
        places = [entry / i if i else entry for i in (_INNER if entry.is_dir() else ("",))]
        place = next((p for p in places if recognise(p)), None)
        if place is not None:
            found[number] = place
    if not found:
        return None
    if iteration is None:
        return found[max(found)]
    if iteration not in found:
        raise FormatError(f"{run}: no iteration {iteration}; there: {sorted(found)}")
    return found[iteration]
