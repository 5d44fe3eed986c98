"""Builds a checkpoint from the leaves of a state dict."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as Folder

import numpy as np

from reshard.checkpoint import TIES, Checkpoint, Json, ParamGroup
from reshard.containers.carried import Carried
from reshard.errors import CorruptError, FormatError, ReplicaError
from reshard.files import Files
from reshard.layout import Layout, Piece
from reshard.tensor import EXP_AVG, LogicalTensor, TensorId
from reshard.topology import Topology

from .leaves import Leaf, ObjectLeaf, TensorLeaf, dotted
from .names import Spelling
from .order import names_by_number
from .roles import Group, Roles, StateEntry, is_option, sort_leaves
from .state import STEP, Dialect, State
from .ties import take_ties
from .values import flattened, plain, scalar, tensor

NAMING = "torch"
#: Adafactor's rows and columns of a second moment, which have not their parameter's shape.
#: Source: transformers 5.24 optimization.py, Adafactor; torch 2.13 optim/_adafactor.py.
_FACTOR = re.compile(r"(?:^|_)(?:row|col)(?:_|$)")
_NUMBER = re.compile(r"(?:^|[-_=])(\d+)(?:\.ckpt)?$")


@dataclass(frozen=True, slots=True)
class Found:
    """What a kind of source gives: its leaves, the files they lie in, who wrote them."""

    root: Folder
    format: str
    version: str
    kind: str
    leaves: Sequence[Leaf]
    files: tuple[str, ...]
    ranks: int | None = None
    folders: tuple[str, str] = ("", "")  # of the model and of the optimizer
    problems: tuple[str, ...] = ()
    weights_only: bool = False
    ties: bool = True  # whether equal bytes may show tied weights


#: Pickles of a trainer's own classes. Source: transformers 5.24 trainer.py, _save.
_OPAQUE = ("training_args.bin",)


def build(found: Found) -> Checkpoint:
    """The checkpoint that these leaves are.

    Raises CorruptError or FormatError for what contradicts itself or cannot be told.
    """
    roles = sort_leaves(_with_options(found), lightning=found.kind == "lightning")
    ties = take_ties(found.root, roles, sure_only=not found.ties)
    if found.weights_only:
        roles.state, roles.groups = [], []
    numbers, note = _numbers(found, roles)
    tensors, leaves = _tensors(roles, numbers)
    steps = _steps(found.root, roles, numbers)
    groups = tuple(_group(g, roles.spelling, numbers) for g in roles.groups)
    extras = _extras(found.root, roles)

    def pieces_of(tensor: TensorId) -> Sequence[Piece]:
        return leaves[tensor].pieces()

    shown: dict[str, Json] = {}
    for extra in extras:
        shown |= flattened(extra.value, dotted(extra.path))
    if ties:
        shown[TIES] = dict(ties)
    native = _native(found, roles, extras)
    kind = native.dialect.kind
    return Checkpoint(
        path=found.root,
        format=found.format,
        version=found.version + (f", {kind}" if kind not in ("plain", "files") else ""),
        topology=Topology(dp=found.ranks),
        layout=Layout(tensors, pieces_of, NAMING),
        files=found.files,
        groups=groups if roles.containers and not found.weights_only else None,
        steps=steps,
        iteration=_iteration(found, shown, steps),
        extras=shown,
        problems=(*found.problems, *([note] if note else [])),
        optimizer_left=found.weights_only and bool(roles.containers),
        native=native,
        opaque=tuple(n for n in _OPAQUE if (found.root / n).is_file() and n not in found.files),
    )


def _with_options(found: Found) -> list[Leaf]:
    """The leaves, with options of groups that are tensors (a learning rate may be one) read."""
    with Files(found.root) as files:
        return [
            ObjectLeaf(leaf.path, _read(files, leaf))
            if isinstance(leaf, TensorLeaf) and is_option(leaf)
            else leaf
            for leaf in found.leaves
        ]


def _native(found: Found, roles: Roles, extras: Sequence[ObjectLeaf]) -> State:
    """What the writers of this converter use."""
    containers = roles.containers or (("optim",),)
    dialect = Dialect(
        kind="torchtitan" if _is_torchtitan(found, roles) else found.kind,
        model=roles.model,
        optimizers=containers,
        flat=roles.flat,
        numbered=any(isinstance(m, int) for g in roles.groups for m in g.members),
        attribute=roles.spelling.attribute,
        model_folder=found.folders[0],
        optimizer_folder=found.folders[1],
    )
    homes = tuple(containers.index(g.container) for g in roles.groups)
    options = tuple(g.options for g in roles.groups)
    return State(dialect, options, homes, tuple(extras), roles.others, found.ranks, found.format)


def _is_torchtitan(found: Found, roles: Roles) -> bool:
    """Parameters at the top level beside a flat optimizer: torchtitan alone saves them so.

    Source: torchtitan 0.3.0 components/checkpoint.py, _flattened_model_states_sd.
    """
    return found.kind == "plain" and roles.model == () and roles.flat


def _numbers(found: Found, roles: Roles) -> tuple[dict[int, str], str | None]:
    """The names behind an optimizer's numbers; empty where it has names."""
    if not any(isinstance(m, int) for g in roles.groups for m in g.members):
        return {}, None
    where = f"{found.root}: {dotted(roles.containers[0]) or 'the optimizer'}"
    given = _given_names(roles)
    if given is not None:
        return given, None
    if len(roles.containers) > 1:
        raise FormatError(
            f"{where}: several optimizers that number their parameters are not read. Save them "
            "with names (torch.distributed.checkpoint.state_dict.get_state_dict)."
        )
    shapes = {
        e.parameter: e.leaf.shape
        for e in roles.state
        if isinstance(e.parameter, int)
        and isinstance(e.leaf, TensorLeaf)
        and e.name != STEP
        and not _FACTOR.search(e.name)
        and (e.leaf.shape or e.name == EXP_AVG)
    }
    groups = [[m for m in g.members if isinstance(m, int)] for g in roles.groups]
    return names_by_number(_own_parameters(roles), groups, shapes, where)


def _given_names(roles: Roles) -> dict[int, str] | None:
    """The names that groups keep beside numbers (torch >= 2.6: `param_names`), or None."""
    out: dict[int, str] = {}
    for group in roles.groups:
        listed = group.options.get("param_names", Carried(None)).obj
        if not isinstance(listed, list) or len(listed) != len(group.members):
            return None
        for number, name in zip(group.members, listed, strict=True):
            if not isinstance(number, int) or not isinstance(name, str):
                return None
            out[number] = roles.spelling.canonical(name)
    return out


def _own_parameters(roles: Roles) -> list[tuple[str, tuple[int, ...]]]:
    """The model's parameters that an optimizer may hold, in order: no buffers of numbers."""
    return [
        (name, leaf.shape)
        for name, leaf in roles.parameters.items()
        if name not in roles.others and leaf.dtype.floating
    ]


def _name(parameter: str | int, spelling: Spelling, numbers: Mapping[int, str]) -> str:
    if isinstance(parameter, int):
        name = numbers.get(parameter)
        if name is None:
            raise CorruptError(f"optimizer state {parameter} belongs to no parameter group")
        return name
    return spelling.canonical(parameter)


def _tensors(
    roles: Roles, numbers: Mapping[int, str]
) -> tuple[dict[TensorId, LogicalTensor], dict[TensorId, TensorLeaf]]:
    """Parameters and optimizer state as logical tensors; state that is no tensor stays an extra."""
    tensors: dict[TensorId, LogicalTensor] = {}
    leaves: dict[TensorId, TensorLeaf] = {}

    def add(tensor: TensorId, leaf: TensorLeaf, own: str) -> None:
        if tensor in leaves:
            raise FormatError(
                f"{tensor} is held twice: {dotted(leaves[tensor].path)} and {dotted(leaf.path)}. "
                "Of two models that name their parameters alike, save each by itself, with its "
                "optimizer."
            )
        stored = own if own != tensor.name else None
        tensors[tensor] = LogicalTensor(tensor, leaf.shape, leaf.dtype, stored_name=stored)
        leaves[tensor] = leaf

    for name, leaf in roles.parameters.items():
        add(TensorId(name), leaf, name if name in roles.others else str(leaf.path[-1]))
    for entry in roles.state:
        if entry.name == STEP:
            continue
        if isinstance(entry.leaf, TensorLeaf):
            name = _name(entry.parameter, roles.spelling, numbers)
            own = tensors.get(TensorId(name))
            stored = entry.parameter if own is None else own.stored_name
            add(TensorId(name, entry.name), entry.leaf, str(stored or name))
        else:
            roles.extras.append(entry.leaf)
    return tensors, leaves


def _steps(root: Folder, roles: Roles, numbers: Mapping[int, str]) -> dict[str, float]:
    """Adam's counters by name; kept as tensors of one element, or as numbers."""
    steps: dict[str, float] = {}
    with Files(root) as files:
        for entry in roles.state:
            if entry.name != STEP:
                continue
            name = _name(entry.parameter, roles.spelling, numbers)
            value = scalar(_small(files, entry))
            if value is None:
                raise CorruptError(f"{dotted(entry.leaf.path)}: the step counter is no number")
            steps[name] = value
    return steps


def _small(files: Files, entry: StateEntry) -> Carried:
    if isinstance(entry.leaf, ObjectLeaf):
        return entry.leaf.value
    return _read(files, entry.leaf)


def _read(files: Files, leaf: TensorLeaf) -> Carried:
    """The bytes of a small tensor, from whichever pieces hold it; copies must agree."""
    pieces = leaf.pieces()
    whole = LogicalTensor(TensorId(dotted(leaf.path)), leaf.shape, leaf.dtype)
    Layout({whole.id: whole}, lambda _: pieces, NAMING).check(whole.id)
    out = np.zeros(leaf.shape, leaf.dtype.numpy)
    filled = np.zeros(leaf.shape, np.bool_)
    for piece in pieces:
        at = tuple(slice(a, b) for a, b in zip(piece.box.start, piece.box.stop, strict=True))
        values = files.read(piece, piece.box)
        if values[filled[at]].tobytes() != out[at][filled[at]].tobytes():
            raise ReplicaError(
                f"{whole.id}: {piece.array.holder or piece.array.file} holds another value than "
                "the ranks before it; replicas must agree"
            )
        out[at], filled[at] = values, True
    return tensor(out.tobytes(), leaf.shape, leaf.dtype)


def _extras(root: Folder, roles: Roles) -> list[ObjectLeaf]:
    """What is neither tensor, group nor step, tensors among it read."""
    out: list[ObjectLeaf] = []
    with Files(root) as files:
        for leaf in roles.extras:
            if isinstance(leaf, TensorLeaf):
                leaf = ObjectLeaf(leaf.path, _read(files, leaf))
            out.append(leaf)
    return out


def _group(group: Group, spelling: Spelling, numbers: Mapping[int, str]) -> ParamGroup:
    members = tuple(_name(m, spelling, numbers) for m in group.members)
    options = {k: plain(v) for k, v in group.options.items() if k != "param_names"}
    return ParamGroup(options, members)


#: Where training loops keep their step, likeliest first.
#: Source: fixtures torchtitan_w2, lightning_fabric_w2, fsdp1_w2_getsd, wrappers/trainer_fsdp2.
_STEPS = (
    "trainer_state.json.global_step",
    "meta.pt.global_step",
    "global_step",
    "train_state.step",
)


def _iteration(found: Found, shown: Mapping[str, Json], steps: Mapping[str, float]) -> int | None:
    """The training step: as the loop says, else the folder's name, else the optimizer's counter."""
    for path in (*_STEPS, *(p for p in shown if p.rpartition(".")[2] == "step")):
        value = shown.get(path)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    for folder in (found.root, found.root.parent):
        match = _NUMBER.search(folder.name)
        if match is not None and int(match[1]) > 0 and not folder.name.startswith("tmp"):
            return int(match[1])
    counted = set(steps.values())
    return int(next(iter(counted))) if len(counted) == 1 else None
