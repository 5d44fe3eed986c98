"""By what DeepSpeed's folders are known, and a trainer's around one; run folders and trackers."""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath

from reshard.containers.runs import checkpoint_folder
from reshard.containers.small import read_tracker
from reshard.errors import CorruptError, FormatError, UnsafeError

LATEST = "latest"
LATEST_UNIVERSAL = "latest_universal"

# Source: runtime/engine.py _get_ckpt_name, _get_zero_ckpt_name, _get_expert_ckpt_name,
# _get_optimizer_ckpt_name; runtime/pipe/module.py ckpt_layer_path @ 0.19.8. The optimizer files of
# old releases have no underscore before optim_states (engine.py _get_all_zero_checkpoint_names).
PATTERNS = {
    "model": r"mp_rank_(?P<mp>\d+)_model_states\.pt",
    "model3": r"zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)_model_states\.pt",
    "optim": (
        r"(?P<prefix>|bf16_|fp16_)zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)_?optim_states\.pt"
    ),
    "layer": r"layer_(?P<layer>\d+)-model_states\.pt",
    "layer_tp": r"layer_(?P<layer>\d+)-model_(?P<tp>\d+)-model_states\.pt",
    "expert": (
        r"(?:layer_(?P<layer>\d+)_)?expert_(?P<expert>\d+)_mp_rank_(?P<mp>\d+)_model_states\.pt"
    ),
    "expert_optim": r"expp_rank_(?P<ep>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt",
}
#: Files beside the tag folder. Source: transformers 5.24 trainer.py, accelerate 1.15
#: checkpointing.py; fixtures/wrappers.
TRAINER = r"rng_state(?:_(?P<rank>\d+))?\.pth"
ACCELERATE = r"random_states_(?P<rank>\d+)\.pkl"
SCHEDULERS = ("scheduler.pt", "scheduler.bin")


def _states(folder: Path) -> list[str]:
    """The names in a folder that may be DeepSpeed's."""
    return [n for n in os.listdir(folder) if n.endswith("states.pt")]


def recognise_native(folder: Path) -> str | None:
    """Why a folder is a DeepSpeed tag folder, or None. A universal folder is not one."""
    if not folder.is_dir() or (folder / "zero").is_dir():
        return None
    names = _states(folder)
    for kind, what in (("model", "mp_rank_*_model_states.pt"), ("model3", "zero_pp_rank_*")):
        if any(re.fullmatch(PATTERNS[kind], name) for name in names):
            return f"holds {what} of DeepSpeed"
    if any(re.fullmatch(PATTERNS["optim"], name) for name in names):
        return "holds optimizer files of DeepSpeed"
    return None


def recognise_universal(folder: Path) -> str | None:
    """Why a folder is a DeepSpeed universal checkpoint, or None."""
    if not (folder / "zero").is_dir():
        return None
    names = _states(folder)
    for kind in ("model", "model3"):
        if any(re.fullmatch(PATTERNS[kind], name) for name in names):
            return "holds zero/ and model states of DeepSpeed"
    return None


def tagged_folder(run: Path, iteration: int | None, tracker: str) -> Path | None:
    """The tag folder of a run folder: `iteration`, else what its tracker names, else None.

    Raises CorruptError for a tracker that names nothing there, UnsafeError for one that points
    outside, FormatError for an iteration that is not there.
    """
    recognise = recognise_native if tracker == LATEST else recognise_universal
    if iteration is not None:
        return _of_iteration(run, iteration, recognise_native if tracker == LATEST else recognise)
    path = run / tracker
    if not path.is_file():
        return None
    tag = read_tracker(path)
    if not tag:
        raise CorruptError(f"{path} is empty; write the tag's name into it, or give the tag folder")
    if tag.startswith("/") or ".." in (parts := PurePosixPath(tag).parts) or not parts:
        raise UnsafeError(
            f"{path} names {tag[:60]!r}, which is not a folder below it. Give the tag folder."
        )
    inner = run / tag  # DeepSpeed takes a tag of several folders as it is
    if not inner.is_dir():
        if tracker == LATEST and tag.startswith("iter_"):
            return None  # another framework's tracker
        there = ", ".join(sorted(p.name for p in run.iterdir() if recognise(p))) or "none"
        raise CorruptError(
            f"{path} names {tag[:60]!r}, and {run} has no such folder. Tags there: {there}."
        )
    if run.resolve() not in Path(os.path.realpath(inner)).parents:
        raise UnsafeError(f"{path} names {tag[:60]!r}, a link that leads out of {run}")
    return inner


def _of_iteration(run: Path, iteration: int, recognise: object) -> Path | None:
    assert callable(recognise)
    if not run.is_dir():
        return None
    found = [
        p
        for p in sorted(run.iterdir())
        if p.is_dir()
        and re.fullmatch(rf"(?:global_step|step_?|checkpoint-){iteration}(?:_universal)?", p.name)
        and recognise(p)
    ]
    if len(found) > 1:
        raise FormatError(f"{run}: {', '.join(p.name for p in found)} are all of {iteration}")
    if found:
        return found[0]
    numbered = {p.name: re.findall(r"\d+", p.name) for p in run.iterdir() if p.is_dir()}
    tags = sorted(name for name in numbered if recognise(run / name))
    if tags and not any(str(iteration) in numbers for numbers in numbered.values()):
        raise FormatError(f"{run}: no iteration {iteration}; there: {', '.join(tags)}")
    return None


def recognise_wrapper(folder: Path) -> str | None:
    """Why a folder is a trainer's around a DeepSpeed tag folder, or None."""
    if not folder.is_dir() or recognise_native(folder) or not (folder / LATEST).is_file():
        return None
    names = {p.name for p in folder.iterdir() if p.is_file()}
    if not names & {"trainer_state.json", *SCHEDULERS} and not any(
        re.fullmatch(TRAINER, n) or re.fullmatch(ACCELERATE, n) for n in names
    ):
        return None
    tag = tagged_folder(folder, None, LATEST)
    return None if tag is None or not recognise_native(tag) else f"holds {tag.name} of DeepSpeed"


def newest(run: Path, iteration: int | None) -> Path | None:
    """Of a trainer's run folder, the checkpoint of an iteration, else the newest.

    Trainer and accelerate put state beside the tag folder; Lightning's folder holds the tag alone.
    """
    found = checkpoint_folder(run, iteration, _holds_tag)
    return tagged_folder(found, None, LATEST) if found and not recognise_wrapper(found) else found


def _holds_tag(folder: Path) -> str | None:
    tag = tagged_folder(folder, None, LATEST)
    return None if tag is None else recognise_native(tag)
