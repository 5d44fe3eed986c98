"""Which torch.save files a folder has, and what each is: whole states, or a rank's."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from reshard.errors import CorruptError, FormatError

_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".tar")
#: model_world_size_4_rank_0.pt (verl, SkyRL, slime), pytorch_model_fsdp_0_rank0.bin (accelerate
#: with use_dcp=False), pytorch_model_fsdp_rank0.bin (FSDP1 LOCAL), rank0.pt.
RANK = r"(?P<stem>.*?)_?(?:world_size_(?P<world>\d+)_)?rank[_-]?(?P<rank>\d+)\.(?:pt|pth|bin)"
#: FULL_STATE_DICT of accelerate and the HF Trainer (utils/fsdp_utils.py, save_fsdp_model).
_FULL_MODEL = r"pytorch_model_fsdp(_\d+)?\.bin"
_FULL_OPTIMIZER = r"optimizer(_\d+)?\.bin"
#: An optimizer in a file of its own, beside one with the model.
_OPTIMIZER = r"optim(izer)?(_states?)?\.(pt|pth|bin|tar)"
#: Other frameworks' files: DeepSpeed's, Hugging Face's, the Trainer's arguments.
_FOREIGN = (
    r".*_(model|optim)_states\.pt|mp_rank_\d+.*|layer_\d+-model.*|pytorch_model(-\d+-of-\d+)?\.bin|"
    r"training_args\.bin|model_optim_rng\.pt|distrib_optim\.pt|common\.pt|optimizer\.pt|"
    r"adapter_model\.bin"
)
#: Small files that trainers keep beside their stores; read, shown and, where a target of the same
#: kind is written, written again. Source: accelerate 1.15 checkpointing.py; transformers 5.24
#: trainer.py; lightning 2.6 strategies/fsdp.py; fixtures.
_SIDE = (
    r"scheduler(_\d+)?\.(bin|pt)|random_states_\d+\.pkl|rng_state(_\d+)?\.pth|"
    r"custom_checkpoint_\d+\.pkl|sampler(_\d+)?\.bin|scaler\.pt|meta\.pt|trainer_state\.json|"
    r"dl_state_dict(_\d+)?\.bin|extra\.pt"
)


@dataclass(frozen=True, slots=True)
class Listed:
    """The state files of a folder, each with the path its contents go under, and side files."""

    states: tuple[tuple[str, tuple[str, ...]], ...]
    ranks: int | None = None
    extras: tuple[str, ...] = ()  # other files of each rank


def is_state_file(path: Path) -> bool:
    """Whether a file is one of torch.save's, by its name and its first bytes."""
    if path.suffix not in _SUFFIXES:
        return False
    with path.open("rb") as file:
        first = file.read(4)
    return first == b"PK\x03\x04" or first[:1] == b"\x80"


def listed(folder: Path) -> Listed | None:
    """The state files of a folder; None if it has none."""
    names = sorted(
        p.name
        for p in folder.iterdir()
        if p.is_file() and p.suffix in _SUFFIXES and not re.fullmatch(_FOREIGN, p.name)
    )
    ranked = {name: m for name in names if (m := re.fullmatch(RANK, name))}
    by_stem: dict[str, dict[int, str]] = {}
    for name, match in ranked.items():
        by_stem.setdefault(match["stem"], {})[int(match["rank"])] = name
    states = {s: files for s, files in by_stem.items() if _is_state_stem(s)}
    if states:
        return _of_ranks(folder, ranked, states, by_stem)
    models = full_models(names)
    if models:
        optimizers = [n for n in names if re.fullmatch(_FULL_OPTIMIZER, n)]
        if len(models) > 1 or len(optimizers) > 1:
            raise FormatError(
                f"{folder}: several models ({', '.join(models)}) are not read together"
            )
        pairs = [(models[0], ("model",)), *((n, ("optim",)) for n in optimizers)]
        return Listed(tuple(pairs))
    left = [n for n in names if not side_name(n) and is_state_file(folder / n)]
    optimizers = sorted(p.name for p in folder.iterdir() if re.fullmatch(_OPTIMIZER, p.name))
    model = [n for n in left if n not in optimizers]
    if len(model) == len(optimizers) == 1:
        return Listed(((model[0], ("model",)), (optimizers[0], ("optim",))))
    return Listed(((left[0], ()),)) if len(left) == 1 else None


def full_models(names: Iterable[str]) -> list[str]:
    """Which of these files hold a model as FSDP's FULL_STATE_DICT."""
    return [n for n in names if re.fullmatch(_FULL_MODEL, n)]


def side_name(name: str) -> bool:
    """Whether a file is one of the small ones beside states."""
    return re.fullmatch(_SIDE, name) is not None


def _is_state_stem(stem: str) -> bool:
    return stem == "" or stem.startswith(("model", "optim", "pytorch_model"))


def _of_ranks(
    folder: Path,
    ranked: dict[str, re.Match[str]],
    states: dict[str, dict[int, str]],
    by_stem: dict[str, dict[int, str]],
) -> Listed:
    """Files of all ranks. Raises CorruptError naming those that are missing or foreign."""
    worlds = {int(m["world"]) for m in ranked.values() if m["world"] is not None}
    if len(worlds) > 1:
        raise CorruptError(
            f"{folder}: files of world sizes {sorted(worlds)} lie together; remove those of "
            "another run"
        )
    world = worlds.pop() if worlds else max(r for files in states.values() for r in files) + 1
    out: list[tuple[str, tuple[str, ...]]] = []
    for stem in sorted(states, key=lambda s: (s.startswith("optim"), s)):
        files = states[stem]
        missing = [r for r in range(world) if r not in files]
        foreign = [files[r] for r in files if r >= world]
        if missing or foreign:
            raise CorruptError(
                f"{folder}: of {world} ranks' {stem or 'state'} files, "
                + (
                    f"those of ranks {missing[:8]} are missing"
                    if missing
                    else f"{foreign[0]} is of none"
                )
            )
        under: tuple[str, ...] = (
            () if not stem else (("optim",) if stem.startswith("optim") else ("model",))
        )
        out += [(files[r], under) for r in range(world)]
    extras = [n for s, files in by_stem.items() if s not in states for n in files.values()]
    return Listed(tuple(out), world, tuple(sorted(extras)))
