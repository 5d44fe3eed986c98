"""Reads the folders that transformers' Trainer and accelerate put around a tag folder."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from reshard.checkpoint import Checkpoint, Json
from reshard.containers import safetensors, torchfile
from reshard.containers.carried import Carried, carry
from reshard.errors import CorruptError
from reshard.format import OpenOptions
from reshard.tensor import MASTER, PARAM, TensorId

from .cuts import same
from .folder import LATEST, recognise_native, tagged_folder
from .native import Native, Wrapper
from .read import read_native
from .table import Table, WholeHolder
from .values import plain, strange_names

#: Files beside the tag folder. Source: transformers 5.24 trainer.py, accelerate 1.15
#: checkpointing.py; fixtures/wrappers.
_TRAINER = re.compile(r"rng_state(?:_(\d+))?\.pth")
_ACCELERATE = re.compile(r"random_states_(\d+)\.pkl")
_SCHEDULERS = ("scheduler.pt", "scheduler.bin")
_COPIED = re.compile(r".*\.(json|txt|model|jinja)")
_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
_LIMIT = 64 << 20  # bytes of a small file


def recognise_wrapper(folder: Path) -> str | None:
    """Why a folder is a trainer's around a DeepSpeed tag folder, or None."""
    if not folder.is_dir() or recognise_native(folder) or not (folder / LATEST).is_file():
        return None
    names = {p.name for p in folder.iterdir() if p.is_file()}
    if not names & {"trainer_state.json", *_SCHEDULERS} and not any(
        _TRAINER.fullmatch(n) or _ACCELERATE.fullmatch(n) for n in names
    ):
        return None
    tag = tagged_folder(folder, None, LATEST)
    return None if tag is None or not recognise_native(tag) else f"holds {tag.name} of DeepSpeed"


def open_wrapped(folder: Path, options: OpenOptions) -> Checkpoint:
    """Read the tag folder and what lies beside it as one checkpoint."""
    tag = tagged_folder(folder, None, LATEST)
    if tag is None:
        raise CorruptError(f"{folder / LATEST}: is missing")
    checkpoint, table = read_native(folder, options, tag.name)
    native = checkpoint.native
    assert isinstance(native, Native)
    wrapper = _wrapper(folder, tag.name)
    problems = [p for name in wrapper.weights for p in _weights(folder, name, table, native)]
    side = [*wrapper.copies, *wrapper.weights, *_rng_names(folder), *wrapper.opaque, LATEST]
    if wrapper.scheduler is not None:
        side.append(wrapper.scheduler[0])
    return replace(
        checkpoint,
        version=f"{checkpoint.version}, in a folder of {_MAKERS[wrapper.kind]}",
        files=tuple(sorted({*checkpoint.files, *side})),
        extras={**checkpoint.extras, **_extras(wrapper)},
        problems=(*checkpoint.problems, *problems),
        native=replace(native, wrapper=wrapper),
    )


_MAKERS = {"trainer": "transformers' Trainer", "accelerate": "accelerate"}


def _rng_names(folder: Path) -> list[str]:
    return [
        p.name
        for p in folder.iterdir()
        if _TRAINER.fullmatch(p.name) or _ACCELERATE.fullmatch(p.name)
    ]


def _wrapper(folder: Path, tag: str) -> Wrapper:
    rng: dict[int, Carried] = {}
    copies: dict[str, bytes] = {}
    weights: list[str] = []
    opaque: list[str] = []
    scheduler: tuple[str, Carried] | None = None
    kind = "trainer" if (folder / "trainer_state.json").is_file() else "accelerate"
    for path in sorted(p for p in folder.iterdir() if p.is_file() and not p.is_symlink()):
        name = path.name
        found = _TRAINER.fullmatch(name) or _ACCELERATE.fullmatch(name)
        if found is not None:
            carried = _load(path)
            rng[int(found[1] or 0)] = carried
        elif name in _SCHEDULERS:
            scheduler = (name, _load(path))
        elif _WEIGHTS.fullmatch(name):
            weights.append(name)
        elif _COPIED.fullmatch(name) and path.stat().st_size <= _LIMIT and name != "reshard.json":
            copies[name] = path.read_bytes()
        elif name not in (LATEST, "reshard.json") and not name.endswith((".py", ".jsonl")):
            opaque.append(name)
    return Wrapper(kind, tag, scheduler, rng, copies, tuple(weights), tuple(opaque))


def _load(path: Path) -> Carried:
    if path.stat().st_size > _LIMIT:
        raise CorruptError(f"{path}: {path.stat().st_size:,} bytes where small state is expected")
    file = torchfile.load(path, path.name)
    return carry(file, file.root, f"{path.name}/")


def _weights(folder: Path, name: str, table: Table, native: Native) -> list[str]:
    """Put a safetensors file's tensors into the table: copies of the module's weights."""
    strange = []
    for key, array in safetensors.read_header(folder, name).arrays.items():
        owner = native.model.aliases.get(key, key)
        known = table.tensors.get(TensorId(owner)) or table.tensors.get(TensorId(owner, MASTER))
        fits = known is not None and known.shape == array.shape
        if fits and TensorId(owner) in table.tensors:
            fits = table.tensors[TensorId(owner)].dtype == array.dtype
        if not fits:
            strange.append(key)
            continue
        holder = WholeHolder(same(array.shape), array)
        table.add(TensorId(owner, PARAM), array.shape, array.dtype, holder, name)
    if not strange:
        return []
    return [f"{name}: {strange[0]} and {len(strange) - 1} more are not the module's; not read"]


def _extras(wrapper: Wrapper) -> dict[str, Json]:
    out: dict[str, Json] = {"wrapper": _MAKERS[wrapper.kind]}
    if wrapper.scheduler is not None:
        obj = wrapper.scheduler[1].obj
        for key, value in obj.items() if isinstance(obj, Mapping) else ():
            out[f"scheduler.{key}"] = plain(value)
    state = wrapper.copies.get("trainer_state.json")
    if state is not None:
        found = _json(state)
        for key in ("global_step", "epoch", "max_steps", "train_batch_size", "num_train_epochs"):
            if key in found:
                out[f"trainer_state.{key}"] = found[key]
    out["rng_ranks"] = sorted(wrapper.rng)
    if wrapper.opaque:
        out["opaque"] = list(wrapper.opaque)
    return out


def _json(raw: bytes) -> dict[str, Json]:
    try:
        found = json.loads(raw)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def carried_safely(carried: Carried) -> bool:
    """Whether an object may be written again."""
    return not strange_names(carried.obj)
