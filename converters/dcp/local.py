"""FSDP1's LOCAL_STATE_DICT: flat parameters of each rank, unflattened by a reference's shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path as Folder

from reshard.containers.carried import Carried, carry
from reshard.containers.inert import TensorRef, tensors_in
from reshard.containers.small import read_object
from reshard.containers.torchfile import TorchFile
from reshard.dialect import expand
from reshard.dtypes import DType
from reshard.errors import CorruptError, FormatError
from reshard.format import open_checkpoint
from reshard.layout import Piece, StoredArray, place_flat
from reshard.namings import module_order
from reshard.schema import Scope, families, model_types
from reshard.tensor import PARAM

from .leaves import Leaf, ObjectLeaf, TensorLeaf
from .names import Spelling
from .order import names_by_number
from .pickles import FLAT, Given, load
from .shards import sharded
from .state import STEP

Shape = tuple[int, ...]
#: FSDP1 with use_orig_params pads between parameters to this many bytes.
#: Source: torch 2.13 distributed/fsdp/_flat_param.py, _init_flat_param_and_metadata.
_ALIGN = 16


@dataclass
class _Run:
    """Elements [start, stop) of a flat tensor, lying at element `base` of an array."""

    start: int
    stop: int
    array: StoredArray
    base: int


@dataclass
class _Flat:
    """A flat tensor: which parameters lie where in it, and the runs of it that ranks hold."""

    members: Sequence[tuple[str, Shape, int]]  # name, shape, first element
    total: int
    runs: dict[str, list[_Run]] = field(default_factory=dict)  # by slot
    dtypes: dict[str, DType] = field(default_factory=dict)

    def add(self, slot: str, file: TorchFile, ref: TensorRef, start: int) -> None:
        """Take in a rank's shard; what lies beyond the end is padding."""
        array, base, _ = file.strided(ref, slot, file.name)
        stop = min(start + prod(ref.shape), self.total)
        if stop > start:
            self.runs.setdefault(slot, []).append(_Run(start, stop, array, base))
        self.dtypes[slot] = ref.dtype

    def pieces(self, slot: str, shape: Shape, first: int) -> list[Piece]:
        """The pieces of one parameter."""
        out: list[Piece] = []
        for run in self.runs.get(slot, ()):
            a, b = max(run.start, first), min(run.stop, first + prod(shape))
            if a < b:
                base = run.base + a - run.start
                out += place_flat(shape, a - first, b - first, run.array, base)
        return out


def reference_shapes(folder: str) -> dict[str, Shape]:
    """The parameters of a checkpoint of the same model, or of a config.json alone, in order."""
    try:
        found = open_checkpoint(folder).layout.tensors
    except FormatError:
        if not (Folder(folder) / "config.json").is_file():
            raise
        return _config_shapes(Folder(folder) / "config.json")
    return {t.name: v.shape for t, v in found.items() if t.slot == PARAM and v.dtype.floating}


def _config_shapes(path: Folder) -> dict[str, Shape]:
    """The parameters of the model of a config. Raises FormatError for a model that is not known."""
    config = read_object(path)
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise FormatError(f"{path}: no config of a model: its model_type is {kind!r:.60}")
    named = next((n for n, kinds in model_types().items() if kind in kinds), None)
    if named is None:
        raise FormatError(
            f"{path}: model_type {kind!r} is in no family; name a checkpoint of the same model"
        )
    stored = {
        n: s for n, s in expand(Scope(families()[named], config), "hf").items() if not s.spare
    }
    order = module_order(stored, "hf", kind)
    if order is None:
        raise FormatError(
            f"{path}: the order of the modules of {kind!r} is not known; name a checkpoint of the "
            "same model"
        )
    return {name: stored[name].shape for name in order}


def local_leaves(
    root: Folder, models: Sequence[str], optimizers: Sequence[str], shapes: Mapping[str, Shape]
) -> list[Leaf]:
    """The leaves of every rank's files, unflattened.

    Raises FormatError where the reference's parameters do not fill the flat ones.
    """
    files = [load(root, name) for name in models]
    flats = _flats(files, shapes)
    leaves: list[Leaf] = []
    states = [load(root, name) for name in optimizers]
    if states:
        leaves += _optimizer(states, flats, root)
    for flat in flats:
        for slot, dtype in flat.dtypes.items():
            for name, shape, first in flat.members:
                path = ("model", name) if slot == PARAM else ("optim", "state", name, slot)
                pieces = flat.pieces(slot, shape, first)
                leaves.append(TensorLeaf(path, shape, dtype, Given(pieces)))
    return leaves


def _flats(files: Sequence[TorchFile], shapes: Mapping[str, Shape]) -> list[_Flat]:
    """The flat tensors of the model: FlatParameters, or with use_orig_params slices by name."""
    roots = [f.root for f in files if isinstance(f.root, Mapping)]
    if len(roots) != len(files):
        raise CorruptError(f"{files[0].path}: a rank's file holds no state dict")
    bare = Spelling()
    named = [k for k, v in roots[0].items() if isinstance(v, TensorRef) and _last(k) not in FLAT]
    flats: dict[str, _Flat] = {}
    if any(bare.canonical(str(k)) in shapes for k in named):
        for key in named:
            name = bare.canonical(str(key))
            if name not in shapes:
                raise FormatError(f"{files[0].path}: {name} is not in the reference")
            flats[str(key)] = _Flat([(name, shapes[name], 0)], prod(shapes[name]))
    else:
        keys = [str(k) for k in roots[0] if _last(k) in FLAT]
        prefixes = {k: bare.canonical(k.rpartition(".")[0]) for k in keys}
        for key in keys:
            total = _total(files[0], key, roots[0][key])
            members = _members(prefixes[key], set(prefixes.values()), shapes)
            flats[key] = _Flat(_placed(files[0], key, members, total, len(files)), total)
    at = dict.fromkeys(flats, 0)
    for file, root in zip(files, roots, strict=True):
        for key, flat in flats.items():
            at[key] += _take(file, key, root.get(key), flat, at[key])
    return list(flats.values())


def _last(key: object) -> str:
    return str(key).rpartition(".")[2]


def _total(file: TorchFile, key: str, value: object) -> int:
    found = sharded(value, f"{file.path}: {key}")
    if found is None or len(found.shape) != 1:
        raise FormatError(f"{file.path}: {key} is no flat ShardedTensor of FSDP1")
    return found.shape[0]


def _take(file: TorchFile, key: str, value: object, flat: _Flat, at: int) -> int:
    """Take in a rank's part of a flat tensor; how many elements it has."""
    if isinstance(value, TensorRef):
        flat.add(PARAM, file, value, at)
        return prod(value.shape)
    found = sharded(value, f"{file.path}: {key}")
    for box, ref in found.parts if found else ():
        flat.add(PARAM, file, ref, box.start[0])
    return 0


def _members(
    prefix: str, prefixes: set[str], shapes: Mapping[str, Shape]
) -> list[tuple[str, Shape]]:
    """The reference's parameters whose innermost flat parameter is that of `prefix`."""
    out = []
    for name, shape in shapes.items():
        inside = [p for p in prefixes if not p or name.startswith(f"{p}.")]
        if inside and max(inside, key=len) == prefix:
            out.append((name, shape))
    return out


def _placed(
    file: TorchFile, key: str, members: Sequence[tuple[str, Shape]], total: int, world: int
) -> list[tuple[str, Shape, int]]:
    """Where each parameter starts: one after the other, or aligned and the end padded for the
    ranks; whichever fits."""
    dtype = next((ref.dtype for ref in tensors_in(file.root) if ref.dtype.floating), None)
    aligned = _ALIGN // dtype.itemsize if dtype is not None else 1
    for step, spare in ((1, 1), (aligned, world)):
        at, out = 0, []
        for name, shape in members:
            at = -(-at // step) * step
            out.append((name, shape, at))
            at += prod(shape)
        if at <= total < at + spare:
            return out
    numel = sum(prod(s) for _, s in members)
    raise FormatError(
        f"{file.path}: {key} has {total} elements; the reference's {len(members)} parameters there "
        f"have {numel}. It is another model's, or was wrapped otherwise."
    )


# ---------------------------------------------------------------------- the optimizer


def _optimizer(states: Sequence[TorchFile], flats: Sequence[_Flat], root: Folder) -> list[Leaf]:
    """Moments go to the flats; steps and groups come back as leaves."""
    by_rank = [_entries(f) for f in states]
    first = states[0].root
    assert isinstance(first, Mapping)
    groups = first["param_groups"]
    members = [list(g["params"]) for g in groups]
    numbers = sorted({i for entries in by_rank for i in entries})
    order = _order(by_rank, members, flats, root)
    steps: dict[str, Carried] = {}
    for number in numbers:
        flat = flats[order[number]]
        at: dict[str, int] = {}
        for rank, (file, entries) in enumerate(zip(states, by_rank, strict=True)):
            for slot, value in entries.get(number, {}).items():
                if slot == STEP:
                    steps |= {name: carry(file, value) for name, _, _ in flat.members}
                elif isinstance(value, TensorRef):
                    whole = len(flats) == len(numbers) and len(flat.members) > 1
                    start = rank * prod(value.shape) if whole else at.get(slot, 0)
                    flat.add(slot, file, value, start)
                    at[slot] = at.get(slot, 0) + prod(value.shape)
    leaves: list[Leaf] = [
        ObjectLeaf(("optim", "state", name, STEP), step) for name, step in steps.items()
    ]
    for i, group in enumerate(groups):
        names = [name for m in group["params"] for name, _, _ in flats[order[m]].members]
        for option, value in {**group, "params": names}.items():
            leaves.append(ObjectLeaf(("optim", "param_groups", i, option), carry(states[0], value)))
    return leaves


def _entries(file: TorchFile) -> dict[int, Mapping[str, object]]:
    found = file.root
    if not isinstance(found, Mapping) or not isinstance(found.get("state"), Mapping):
        raise CorruptError(f"{file.path}: holds no optimizer's state dict")
    return {k: v for k, v in found["state"].items() if isinstance(k, int)}


def _order(
    by_rank: Sequence[Mapping[int, Mapping[str, object]]],
    members: Sequence[Sequence[int]],
    flats: Sequence[_Flat],
    root: Folder,
) -> dict[int, int]:
    """The flat tensor that each number of the optimizer means."""
    sizes: dict[int, int] = {}
    for entries in by_rank:
        for number, slots in entries.items():
            refs = [v for s, v in slots.items() if s != STEP and isinstance(v, TensorRef)]
            if refs:
                sizes[number] = sizes.get(number, 0) + prod(refs[0].shape)
    world = len(by_rank)
    padded = [-(-f.total // world) * world if len(f.members) > 1 else f.total for f in flats]
    model = [(str(i), (n,)) for i, n in enumerate(padded)]
    found, _ = names_by_number(
        model, members, {i: (n,) for i, n in sizes.items()}, f"{root}: optimizer"
    )
    return {number: int(name) for number, name in found.items()}
