"""Declares a model folder: tensors dealt out to shards, the index, the files beside them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import ceil, prod

from reshard.checkpoint import TIES, Checkpoint, Json, is_samples, ties
from reshard.containers import safetensors
from reshard.containers.safetensors import Item
from reshard.dtypes import DType, named
from reshard.errors import CoverageError, FormatError, UsageError
from reshard.format import Declaration, Fate, Loss, WriteOptions
from reshard.layout import Draft, Layout, StoredArray, whole
from reshard.tensor import MASTER, PARAM, LogicalTensor, TensorId
from reshard.topology import Target, Topology

from . import optimizer
from .beside import Beside, beside
from .recognise import SAFE, SAFE_INDEX

#: Bytes of tensors in one file, unless --max-shard-size says otherwise. transformers 4 has 5 GB,
#: transformers 5 has 50 GB; engines that read shards in parallel are better off with several.
SHARD = 5_000_000_000
OPTIONS = ("max_shard_size", "balanced", "optimizer")
_YES, _NO = ("1", "true", "yes"), ("0", "false", "no")


def declare_folder(source: Checkpoint, target: Target, options: WriteOptions) -> Declaration:
    """Lay out a model folder with the source's weights.

    Raises FormatError for a source whose tensors are not named as a module's, UsageError for a
    topology, which a model folder does not have.
    """
    if source.layout.naming != "torch":
        raise FormatError(
            f"{source.path}: tensors named as {source.layout.naming!r} have no place in a model "
            "folder without a family (--schema NAME, --config DIR)"
        )
    if {k: n for k, n in target.degrees.items() if n != 1}:
        raise UsageError(f"{target.text}: a model folder has no topology")
    chosen = target.take(*OPTIONS)
    weights = _weights(source, options)
    copies = _tied(source, weights)
    weights |= {copy: replace(weights[first], id=copy) for copy, first in copies.items()}
    limit, balanced = _limit(chosen, options), _said_yes(chosen, "balanced")
    listed = [Item(t.name, v.shape, v.dtype) for t, v in weights.items()]
    drafts, arrays = _files(deal(listed, limit, balanced=balanced))
    others = beside(source, weights, options)
    drafts += others.drafts
    beyond: dict[TensorId, LogicalTensor] = {}
    theirs: dict[TensorId, StoredArray] = {}
    if _said_yes(chosen, "optimizer"):
        if options.weights_only:
            raise UsageError("optimizer=yes and --weights-only contradict each other")
        beyond = optimizer.kept(source, weights)
        shards = deal(optimizer.items(beyond), limit, balanced=balanced)
        more, theirs = optimizer.drafts(source, shards, {t.name for t in weights})
        drafts = [*drafts, *more]
    return Declaration(
        format="hf",
        topology=Topology(),
        folder="",
        layout=Layout(
            {**weights, **beyond},
            lambda t: [whole(arrays[t.name] if t.slot == PARAM else theirs[t])],
            "torch",
        ),
        drafts=drafts,
        losses=(*_left(source, bool(beyond)), *others.losses),
        notes=others.notes,
        fates=(*others.fates, *_fates(source, bool(beyond))),
        recipe=_recipe(weights, others, bool(beyond)),
        explained=frozenset(
            t for t in source.layout.tensors if t.slot != PARAM and t not in beyond
        ),
        feeds=copies,
    )


def _said_yes(chosen: Mapping[str, str], option: str) -> bool:
    text = chosen.get(option, _NO[0])
    if text not in (*_YES, *_NO):
        raise UsageError(f"{option}={text}: write {option}=yes or {option}=no")
    return text in _YES


# --- which tensors, in which dtype ---------------------------------------------------------------


def _weights(source: Checkpoint, options: WriteOptions) -> dict[TensorId, LogicalTensor]:
    """The target's weights in name order."""
    present = source.layout.tensors
    asked = named(options.dtype) if options.dtype else None
    out: dict[TensorId, LogicalTensor] = {}
    best = (
        t
        for t in present
        if t.slot == PARAM or (t.slot == MASTER and TensorId(t.name) not in present)
    )
    for held in sorted(best, key=lambda t: natural(t.name)):
        own, dtype, weight = present[held], present[held].dtype, held
        if held.slot == MASTER:
            dtype = _said(source) or source.kinds.get(held.name, dtype)
            weight = TensorId(held.name)
        if asked is not None and own.dtype.floating and not _kept(own, asked):
            dtype = asked
        out[weight] = LogicalTensor(weight, own.shape, dtype, fixed=own.fixed)
    if not out:
        raise CoverageError(f"{source.path} holds no weights")
    return out


def _left(source: Checkpoint, optimizer_kept: bool) -> list[Loss]:
    """What of the source's state stays behind."""
    left: dict[str, int] = {}
    for tensor in source.layout.tensors:
        if tensor.slot != PARAM and not optimizer_kept:
            left[tensor.slot] = left.get(tensor.slot, 0) + 1
    return [
        Loss("weights-only", slot, f"{n} tensors left behind: a model folder holds weights only")
        for slot, n in sorted(left.items())
    ]


def _tied(
    source: Checkpoint, tensors: Mapping[TensorId, LogicalTensor]
) -> dict[TensorId, TensorId]:
    """Second names of tied weights, and the first ones; none where the config says that they are
    tied, as save_pretrained leaves them out then."""
    config = source.extras.get("config")
    if isinstance(config, Mapping) and config.get("tie_word_embeddings") is True:
        return {}
    pairs = {TensorId(alias): TensorId(name) for alias, name in ties(source).items()}
    return {copy: name for copy, name in pairs.items() if name in tensors and copy not in tensors}


def _kept(own: LogicalTensor, asked: DType) -> bool:
    """Whether a tensor keeps its dtype: a router or its correction bias is never narrowed."""
    return own.fixed and asked.itemsize < own.dtype.itemsize


def _said(source: Checkpoint) -> DType | None:
    """The dtype that the model's config names."""
    config = source.extras.get("config")
    found = (
        config.get("dtype") or config.get("torch_dtype") if isinstance(config, Mapping) else None
    )
    return named(found) if isinstance(found, str) else None


_NUMBER = re.compile(r"(\d+)")


def natural(name: str) -> tuple[str | int, ...]:
    """The order of names in which numbers count: layer 10 after layer 9."""
    parts: list[str | int] = [*_NUMBER.split(name)]  # text and numbers in turn
    parts[1::2] = map(int, parts[1::2])
    return tuple(parts)


def _fates(source: Checkpoint, optimizer_kept: bool) -> Iterator[Fate]:
    why = "a model folder holds weights only"
    for name in source.extras:
        if name == TIES:
            yield Fate(name, "keep", "both names, or the config's tie_word_embeddings")
        elif optimizer_kept and is_samples(name):
            yield Fate(name, "remap", f"{optimizer.STATE}: {optimizer.SAMPLES}")
        elif name != "config" and not name.startswith("args."):
            yield Fate(name, "drop", why)
    for i, _ in enumerate(source.groups or ()):
        fate = ("keep", optimizer.STATE) if optimizer_kept else ("drop", why)
        yield Fate(f"optimizer.param_groups[{i}]", *fate)


# --- shards --------------------------------------------------------------------------------------


def _limit(chosen: Mapping[str, str], options: WriteOptions) -> int:
    text = chosen.get("max_shard_size")
    if text is None:
        return options.max_shard_size or SHARD
    if options.max_shard_size is not None:
        raise UsageError("--max-shard-size and max_shard_size= of the target: give one")
    return decimal_size(text)


def decimal_size(text: str) -> int:
    """`5GB` as 5_000_000_000, `64KiB` as 65_536, as the hub's tools count."""
    m = re.fullmatch(r"(\d+)\s*(?:([kmgt])(i?)b?|b)?", text.strip().lower())
    if m is None or not int(m[1]):
        raise UsageError(f"max_shard_size={text}: write 5GB or 500MB")
    power = " kmgt".index(m[2]) if m[2] else 0
    return int(m[1]) * int((1024 if m[3] else 1000) ** power)


def deal(items: Sequence[Item], limit: int, *, balanced: bool = False) -> list[list[Item]]:
    """The tensors in order, a new shard where the next one would not fit into `limit` bytes.

    A tensor larger than the limit has a shard of its own. `balanced`: shards of about one size.
    """
    total = sum(i.nbytes for i in items)
    each = ceil(total / max(1, ceil(total / limit))) if balanced else limit
    shards: list[list[Item]] = [[]]
    size = done = 0
    for item in items:
        nbytes = item.nbytes
        full = size + nbytes > limit or (balanced and done >= each * len(shards))
        if shards[-1] and full:
            shards.append([])
            size = 0
        shards[-1].append(item)
        size += nbytes
        done += nbytes
    return shards


def _files(shards: Sequence[Sequence[Item]]) -> tuple[list[Draft], dict[str, StoredArray]]:
    """The weight files and the index built from what they hold; their arrays by name."""
    n = len(shards)
    names = [SAFE] if n == 1 else [f"model-{i + 1:05d}-of-{n:05d}.safetensors" for i in range(n)]
    drafts = [safetensors.draft(f, s) for f, s in zip(names, shards, strict=True)]
    arrays = {a.key: a for d in drafts for a in d.arrays}
    if n > 1:
        drafts.append(_index(drafts))
    return drafts, arrays


def _index(drafts: Sequence[Draft]) -> Draft:
    held = [a for d in drafts for a in d.arrays]
    table = {
        "metadata": {
            "total_parameters": sum(prod(a.shape) for a in held),
            "total_size": sum(a.nbytes for a in held),
        },
        "weight_map": {a.key: a.file for a in sorted(held, key=lambda a: a.key)},
    }
    raw = (json.dumps(table, indent=2, sort_keys=True) + "\n").encode()
    return Draft(SAFE_INDEX, len(raw), [(0, raw)])


def _recipe(
    tensors: Mapping[TensorId, LogicalTensor], others: Beside, optimizer_kept: bool
) -> dict[str, Json]:
    kinds: dict[str, int] = {}
    for logical in tensors.values():
        kinds[logical.dtype.name] = kinds.get(logical.dtype.name, 0) + prod(logical.shape)
    return {
        "verdict": "archive" if optimizer_kept else "weights only",
        "parameters": sum(kinds.values()),
        "dtypes": dict(sorted(kinds.items())),
        "copied": list(others.copied),
    }
