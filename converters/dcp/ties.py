"""Tied weights: names of one tensor, told by their storage, else by their bytes and optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path as Folder

import numpy as np

from reshard.box import Box
from reshard.containers.small import object_beside
from reshard.files import Array, Files
from reshard.layout import Piece

from .leaves import TensorLeaf
from .pickles import Given, start
from .roles import Roles

_SAMPLES = 16  # blocks of rows that are compared when a checkpoint is opened, of
_BLOCK = 64 << 10  # bytes each; converting compares the rest, as with every replica
#: Where a trainer keeps the model's config. Source: fixture verl_fsdp2_w4; transformers Trainer.
_CONFIGS = ("config.json", "huggingface/config.json")


def take_ties(root: Folder, roles: Roles, *, sure_only: bool = False) -> dict[str, str]:
    """Alias -> name of tied parameters; the aliases leave `roles`, their copies become replicas.

    Names of one storage are tied. A DCP keeps a copy under each name, and the optimizer's state
    under the first (torch 2.13 distributed/checkpoint/state_dict.py; fixture fsdp2_w2_bf16_tied):
    so a matrix in no param group with the bytes of one that the optimizer has trained is its
    alias. An untrained optimizer tells nothing; then the config's tie_word_embeddings has to say
    it, and where that is false nothing is tied. `sure_only`: by storage alone.
    """
    out = dict(_of_one_storage(roles))
    if not sure_only and roles.groups:
        out |= _of_equal_bytes(root, roles, out)
    for alias, name in out.items():
        if not _same(roles, alias, name):
            mine = roles.parameters[name]
            both = Given([*mine.pieces(), *roles.parameters[alias].pieces()])
            roles.parameters[name] = replace(mine, pieces=both)
        del roles.parameters[alias]
    return out


def _members(roles: Roles) -> set[str]:
    """The names that optimizers hold."""
    held = {m for g in roles.groups for m in g.members} | {e.parameter for e in roles.state}
    return {roles.spelling.canonical(m) for m in held if isinstance(m, str)}


def _trained(roles: Roles) -> set[str]:
    return {roles.spelling.canonical(str(e.parameter)) for e in roles.state}


def _own(roles: Roles) -> Iterator[tuple[str, TensorLeaf]]:
    """The model's parameters that an optimizer may hold."""
    for name, leaf in roles.parameters.items():
        if name not in roles.others and leaf.dtype.floating and all(leaf.shape):
            yield name, leaf


# ---------------------------------------------------------------------- by storage


def _of_one_storage(roles: Roles) -> Iterator[tuple[str, str]]:
    """Pairs that lie in the same bytes, as torch.save keeps tied tensors, and we in a DCP."""
    held = _members(roles)
    by_first: dict[tuple[object, ...], list[str]] = {}
    for name, leaf in _own(roles):
        if leaf.first is not None:
            by_first.setdefault((leaf.first, leaf.shape, leaf.dtype), []).append(name)
    for names in by_first.values():
        owner = next((n for n in names if n in held), names[0])
        for name in names:
            if name != owner and name not in held and _same(roles, name, owner):
                yield name, owner


def _same(roles: Roles, *names: str) -> bool:
    """Whether tensors lie in the same bytes in the same order."""
    placed = [
        tuple((p.box, start(p), p.strides) for p in roles.parameters[n].pieces()) for n in names
    ]
    return len(set(placed)) == 1


# ---------------------------------------------------------------------- by bytes


def _of_equal_bytes(root: Folder, roles: Roles, known: Mapping[str, str]) -> dict[str, str]:
    """Pairs of a matrix without optimizer state and one that has it, with the same bytes."""
    said = _config_says(root)
    held = _members(roles)
    trained = _trained(roles)
    if said is False or not held or (not trained and not said):
        return {}
    owners: dict[tuple[object, ...], list[str]] = {}
    lone: dict[tuple[object, ...], list[str]] = {}
    for name, leaf in _own(roles):
        if len(leaf.shape) < 2 or name in known:
            continue
        kind: tuple[object, ...] = (leaf.shape, leaf.dtype)
        if name not in held:
            lone.setdefault(kind, []).append(name)
        elif name in trained or said:
            owners.setdefault(kind, []).append(name)
    out: dict[str, str] = {}
    with Files(root) as files:
        for kind, names in lone.items():
            first = {n: _sample(files, roles.parameters[n], 1) for n in owners.get(kind, ())}
            for name in names if first else ():
                mine = _sample(files, roles.parameters[name], 1)
                equal = [n for n, bits in first.items() if bits == mine]
                whole = _sample(files, roles.parameters[name], _SAMPLES) if equal else b""
                same = [n for n in equal if _sample(files, roles.parameters[n], _SAMPLES) == whole]
                if len(same) == 1:
                    out[name] = same[0]
    return out


def _sample(files: Files, leaf: TensorLeaf, blocks: int) -> bytes:
    """The bytes of some rows, spread over the tensor. Raises CorruptError for rows not there."""
    rows = leaf.shape[0]
    row = leaf.dtype.itemsize
    for n in leaf.shape[1:]:
        row *= n
    each = max(1, min(rows, _BLOCK // row))
    starts = sorted({min(i * rows // blocks, rows - each) for i in range(blocks)})
    pieces = leaf.pieces()
    return b"".join(_rows(files, leaf, pieces, at, at + each).tobytes() for at in starts)


def _rows(files: Files, leaf: TensorLeaf, pieces: Sequence[Piece], start: int, stop: int) -> Array:
    wanted = Box((start, *(0 for _ in leaf.shape[1:])), (stop, *leaf.shape[1:]))
    out = np.zeros(wanted.shape, leaf.dtype.numpy)
    for piece in pieces:
        part = wanted & piece.box
        if part is not None:
            at = tuple(
                slice(a - w, b - w)
                for a, b, w in zip(part.start, part.stop, wanted.start, strict=True)
            )
            out[at] = files.read(piece, part)
    return out


def _config_says(root: Folder) -> bool | None:
    """tie_word_embeddings of the config beside the checkpoint, if there is one that says it."""
    for name in _CONFIGS:
        config = object_beside(root / name) or {}
        for part in (config, config.get("text_config")):
            said = part.get("tie_word_embeddings") if isinstance(part, dict) else None
            if isinstance(said, bool):
                return said
    return None
