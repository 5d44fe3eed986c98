"""Which files a tag folder holds, by the coordinates in their names; run folders and trackers."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from reshard.containers.small import read_tracker
from reshard.errors import CorruptError, FormatError, UnsafeError

LATEST = "latest"
LATEST_UNIVERSAL = "latest_universal"

# Source: runtime/engine.py _get_ckpt_name, _get_zero_ckpt_name, _get_expert_ckpt_name,
# _get_optimizer_ckpt_name; runtime/pipe/module.py ckpt_layer_path @ 0.19.8. The optimizer files of
# old releases have no underscore before optim_states (engine.py _get_all_zero_checkpoint_names).
_PATTERNS = {
    "model": re.compile(r"mp_rank_(?P<mp>\d+)_model_states\.pt"),
    "model3": re.compile(r"zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)_model_states\.pt"),
    "optim": re.compile(
        r"(?P<prefix>|bf16_|fp16_)zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)_?optim_states\.pt"
    ),
    "layer": re.compile(r"layer_(?P<layer>\d+)-model_states\.pt"),
    "layer_tp": re.compile(r"layer_(?P<layer>\d+)-model_(?P<tp>\d+)-model_states\.pt"),
    "expert": re.compile(
        r"(?:layer_(?P<layer>\d+)_)?expert_(?P<expert>\d+)_mp_rank_(?P<mp>\d+)_model_states\.pt"
    ),
    "expert_optim": re.compile(r"expp_rank_(?P<ep>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt"),
}


@dataclass(frozen=True)
class TagFiles:
    """The files of one tag folder by coordinates: ranks are numbers, so 10 follows 9."""

    folder: Path
    model: Mapping[int, str] = field(default_factory=dict)  # mp -> file, ZeRO 0 to 2
    model3: Mapping[tuple[int, int], str] = field(default_factory=dict)  # (mp, dp), ZeRO 3
    optim: Mapping[tuple[int, int], str] = field(default_factory=dict)  # (mp, dp)
    prefixes: frozenset[str] = frozenset()  # of the optimizer files: "", "bf16_", "fp16_"
    layers: Mapping[int, str] = field(default_factory=dict)  # layer -> file
    layers_tp: Mapping[tuple[int, int], str] = field(default_factory=dict)  # (layer, tp)
    experts: Mapping[tuple[int, int, int], str] = field(default_factory=dict)  # layer, expert, mp
    expert_optim: Mapping[tuple[int, int], str] = field(default_factory=dict)  # (mp, ep)
    others: tuple[str, ...] = ()
    under: str = ""  # the tag folder below `folder`; names begin with it

    @property
    def place(self) -> Path:
        """The tag folder."""
        return self.folder / self.under

    @property
    def names(self) -> tuple[str, ...]:
        """Every file that belongs to the checkpoint, sorted."""
        tables = (self.model, self.model3, self.optim, self.layers, self.layers_tp, self.experts)
        found = {name for table in tables for name in table.values()}
        return tuple(sorted(found | set(self.expert_optim.values())))


def tag_files(folder: Path, under: str = "") -> TagFiles:
    """What the tag folder `under` a folder holds. Raises CorruptError for two files of one rank."""
    tables: dict[str, dict[object, str]] = {kind: {} for kind in _PATTERNS}
    prefixes: set[str] = set()
    others: list[str] = []
    for name in sorted(os.listdir(folder / under)):
        for kind, pattern in _PATTERNS.items():
            found = pattern.fullmatch(name)
            if found is None:
                continue
            at = _coordinates(kind, found)
            if at in tables[kind]:
                raise CorruptError(
                    f"{folder}: {tables[kind][at]} and {name} are files of the same rank; one is "
                    "left from another save. Remove it."
                )
            tables[kind][at] = f"{under}/{name}" if under else name
            if kind == "optim":
                prefixes.add(found["prefix"])
            break
        else:
            others.append(name)
    t: dict[str, dict] = tables  # type: ignore[type-arg]  # keys by kind, as TagFiles says
    return TagFiles(
        folder, t["model"], t["model3"], t["optim"], frozenset(prefixes), t["layer"],
        t["layer_tp"], t["expert"], t["expert_optim"], tuple(others),
        under,
    )  # fmt: skip


def _coordinates(kind: str, found: re.Match[str]) -> object:
    at = {k: int(v) for k, v in found.groupdict().items() if v is not None and k != "prefix"}
    match kind:
        case "model":
            return at["mp"]
        case "layer":
            return at["layer"]
        case "layer_tp":
            return at["layer"], at["tp"]
        case "expert":
            return at.get("layer", -1), at["expert"], at["mp"]
        case "expert_optim":
            return at["mp"], at["ep"]
    return at["mp"], at["dp"]


def recognise_native(folder: Path) -> str | None:
    """Why a folder is a DeepSpeed tag folder, or None. A universal folder is not one."""
    if not folder.is_dir() or (folder / "zero").is_dir():
        return None
    names = os.listdir(folder)
    for kind, what in (("model", "mp_rank_*_model_states.pt"), ("model3", "zero_pp_rank_*")):
        if any(_PATTERNS[kind].fullmatch(name) for name in names):
            return f"holds {what} of DeepSpeed"
    if any(_PATTERNS["optim"].fullmatch(name) for name in names):
        return "holds optimizer files of DeepSpeed"
    return None


def recognise_universal(folder: Path) -> str | None:
    """Why a folder is a DeepSpeed universal checkpoint, or None."""
    if not (folder / "zero").is_dir():
        return None
    names = os.listdir(folder)
    for kind in ("model", "model3"):
        if any(_PATTERNS[kind].fullmatch(name) for name in names):
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
    if Path(tag).name != tag or tag in (".", ".."):
        raise UnsafeError(
            f"{path} names {tag[:60]!r}, which is not a folder beside it. Give the tag folder."
        )
    inner = run / tag
    if inner.is_symlink() and run.resolve() not in Path(os.path.realpath(inner)).parents:
        raise UnsafeError(f"{path} names {tag[:60]!r}, a link that leads out of {run}")
    if not inner.is_dir():
        if tracker == LATEST and tag.startswith("iter_"):
            return None  # another framework's tracker
        there = ", ".join(sorted(p.name for p in run.iterdir() if recognise(p))) or "none"
        raise CorruptError(
            f"{path} names {tag[:60]!r}, and {run} has no such folder. Tags there: {there}."
        )
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
    return found[0] if found else None
