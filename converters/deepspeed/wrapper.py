"""Reads the folders that transformers' Trainer and accelerate put around a tag folder."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from reshard.checkpoint import Checkpoint, Json
from reshard.containers import rank_names, safetensors
from reshard.containers.carried import Carried, carry
from reshard.errors import CorruptError
from reshard.format import OpenOptions
from reshard.tensor import MASTER, PARAM, TensorId

from .cuts import same
from .native import Native, Wrapper
from .read import read_native
from .recognise import ACCELERATE, LATEST, SCHEDULERS, TRAINER, tagged_folder
from .table import Table, WholeHolder
from .values import plain, strange_names

_COPIED = re.compile(r".*\.(json|txt|model|jinja)")
_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
_OURS = re.compile(r"reshard(-.*)?\.(json|jsonl|xxh128|sha256)")  # the manifest and what it lists
_LIMIT = 64 << 20  # bytes of a small file


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
        opaque=wrapper.opaque,
    )


_MAKERS = {"trainer": "transformers' Trainer", "accelerate": "accelerate"}


def _rng_names(folder: Path) -> list[str]:
    return [
        p.name
        for p in folder.iterdir()
        if re.fullmatch(TRAINER, p.name) or re.fullmatch(ACCELERATE, p.name)
    ]


def _wrapper(folder: Path, tag: str) -> Wrapper:
    rng: dict[int, Carried] = {}
    copies: dict[str, bytes] = {}
    weights: dict[str, tuple[tuple[str, tuple[int, ...], str], ...]] = {}
    opaque: list[str] = []
    scheduler: tuple[str, Carried] | None = None
    kind = "trainer" if (folder / "trainer_state.json").is_file() else "accelerate"
    for path in sorted(p for p in folder.iterdir() if p.is_file() and not p.is_symlink()):
        name = path.name
        found = re.fullmatch(TRAINER, name) or re.fullmatch(ACCELERATE, name)
        if found is not None:
            carried = _load(path)
            rng[int(found[1] or 0)] = carried
        elif name in SCHEDULERS:
            scheduler = (name, _load(path))
        elif _WEIGHTS.fullmatch(name):
            held = safetensors.read_header(folder, name).arrays
            weights[name] = tuple((k, a.shape, a.dtype.name) for k, a in held.items())
        elif _COPIED.fullmatch(name) and path.stat().st_size <= _LIMIT and not _OURS.match(name):
            copies[name] = path.read_bytes()
        elif name != LATEST and not _OURS.match(name) and not name.endswith(".py"):
            opaque.append(name)
    return Wrapper(kind, tag, scheduler, rng, copies, weights, tuple(opaque))


def _load(path: Path) -> Carried:
    if path.stat().st_size > _LIMIT:
        raise CorruptError(f"{path}: {path.stat().st_size:,} bytes where small state is expected")
    file = rank_names.load(path.parent, path.name, (TRAINER, ACCELERATE))
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
