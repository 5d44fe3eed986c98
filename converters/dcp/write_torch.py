"""Declares a plain state dict: one file that torch.load gives back as a nested dict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from reshard.box import Box
from reshard.checkpoint import Checkpoint
from reshard.containers import torchfile
from reshard.containers.carried import Carried
from reshard.containers.inert import Ordered, new_tensor
from reshard.dtypes import FLOAT32
from reshard.errors import FormatError, UsageError
from reshard.format import Declaration, Fate, WriteOptions
from reshard.layout import Layout, Piece, place
from reshard.tensor import PARAM, LogicalTensor, TensorId
from reshard.topology import Target, Topology

from .extras import Kept, keep_extras
from .goal import Goal, other_names, tensors
from .groups import TargetGroup, options_left, target_groups
from .leaves import dotted
from .read import NAMING
from .recognise import TORCH
from .state import STEP, Dialect, State
from .values import ALLOWED, Path, renamed, tensor
from .write import base_lrs, notes, recipe, step_fates, steps_of

_FILE = "checkpoint.pt"


@dataclass
class Root:
    """A nested dict in the making, and the storages of its tensors."""

    root: dict[object, object] = field(default_factory=dict)
    values: dict[str, bytes] = field(default_factory=dict)
    keys: dict[TensorId, str] = field(default_factory=dict)  # of storages to be filled

    def put(self, path: Path, value: object) -> None:
        """Set a value. Raises FormatError if the place is taken."""
        at = self.root
        for part in path[:-1]:
            inner = at.setdefault(part, {})
            if not isinstance(inner, dict):
                raise FormatError(f"the target would have a value and a dict at {dotted(path)}")
            at = inner
        if path[-1] in at:
            raise FormatError(f"two entries of the target would lie at {dotted(path)}")
        at[path[-1]] = value

    def put_tensor(self, path: Path, logical: LogicalTensor) -> None:
        """Set a tensor that is filled later; tied ones share a storage."""
        key = self.keys.get(logical.id)
        if key is None:
            key = self.keys[logical.id] = str(len(self.values) + len(self.keys))
        self.put(path, new_tensor(logical.shape, logical.dtype, key))

    def put_value(self, path: Path, value: Carried) -> None:
        """Set a value with its bytes."""
        first = len(self.values) + len(self.keys)
        self.put(path, renamed(value, first, self.values))


def declare_torch(source: Checkpoint, target: Target, options: WriteOptions) -> Declaration:
    """Lay out a plain state dict of the source."""
    aim = _goal(source, target, options)
    logical, explained = tensors(source, aim, options)
    aliases = other_names(source, options.like, logical)
    kept = keep_extras(source, aim)
    groups: list[TargetGroup] = []
    fates: list[Fate] = []
    if not aim.weights_only:
        groups, fates = target_groups(source, options.like, base_lrs(source))
        kept.losses += options_left(source)
    root = _root(source, aim, logical, groups, kept, aliases)
    for name in kept.files:
        kept.drop(name, "a plain state dict is one file")
    name = target.options.get("file", _FILE)
    draft, arrays = torchfile.draft(name, root.root, allow=ALLOWED, values=root.values)
    pieces: dict[TensorId, list[Piece]] = {
        tensor_: [place(Box.whole(logical[tensor_].shape), arrays[key])]
        for tensor_, key in root.keys.items()
    }
    return Declaration(
        format=TORCH,
        topology=Topology(),
        folder="",
        layout=Layout(logical, pieces.__getitem__, NAMING),
        drafts=[draft],
        losses=tuple(kept.losses),
        notes=notes(replace(aim, dp_given=True), explained),
        fates=(*fates, *kept.fates, *step_fates(source, aim)),
        recipe={**recipe(source, aim, groups), "load": f"torch.load({name!r})"},
        explained=explained,
    )


def _goal(source: Checkpoint, target: Target, options: WriteOptions) -> Goal:
    """A plain state dict. Raises UsageError for degrees: it is whole."""
    asked = target.take("model", "optim", "file")
    if target.degrees or target.variant is not None:
        raise UsageError(f"{target.text!r}: a plain state dict has no degrees and no variant")
    if "/" in asked.get("file", "") or not asked.get("file", _FILE).endswith(
        (".pt", ".pth", ".bin")
    ):
        raise UsageError(f"file={asked['file']}: name a file ending in .pt, .pth or .bin")
    like = options.like.native if options.like else None
    dialect = Dialect(optimizers=(("optimizer",),))
    if isinstance(like, State):
        dialect = replace(
            like.dialect, flat=False, numbered=False, model_folder="", optimizer_folder=""
        )
    if "model" in asked:
        dialect = replace(dialect, model=tuple(filter(None, asked["model"].split("/"))))
    if "optim" in asked:
        dialect = replace(dialect, optimizers=(tuple(filter(None, asked["optim"].split("/"))),))
    native = source.native
    return Goal(
        dialect=dialect,
        ranks=1,
        chunk=None,
        same_kind=isinstance(native, State) and native.dialect.kind == dialect.kind,
        weights_only=options.weights_only or source.groups is None,
        asked_weights=options.weights_only,
    )


def _root(
    source: Checkpoint,
    aim: Goal,
    logical: Mapping[TensorId, LogicalTensor],
    groups: Sequence[TargetGroup],
    kept: Kept,
    aliases: Mapping[str, str],
) -> Root:
    """The nested dict: model, optimizer as torch.optim has it but keyed by name, extras."""
    root, dialect = Root(), aim.dialect
    native = source.native if isinstance(source.native, State) else State(dialect)
    homes = {n: min(g.home, len(dialect.optimizers) - 1) for g in groups for n in g.members}
    for tensor_, held in logical.items():
        name = tensor_.name
        if tensor_.slot != PARAM:
            root.put_tensor(dialect.state(name, tensor_.slot, homes.get(name, 0)), held)
        elif name in native.others:
            root.put_tensor(native.others[name], held)
        else:
            root.put_tensor(dialect.parameter(name), held)
    for alias, name in aliases.items():
        root.put_tensor(dialect.parameter(alias), logical[TensorId(name)])
    if not aim.weights_only:
        for name, step in steps_of(source, logical).items():
            value = tensor(np.float32(step).tobytes(), (), FLOAT32)
            root.put_value(dialect.state(name, STEP, homes.get(name, 0)), value)
        for home, container in enumerate(dialect.optimizers):
            listed = [_listed(g, dialect, root) for g in groups if homes_of(g, dialect) == home]
            root.put((*container, "param_groups"), listed)
    for path, value in kept.entries:
        root.put_value(path, value)
    if dialect.model:
        _ordered(root, dialect.model)
    return root


def homes_of(group: TargetGroup, dialect: Dialect) -> int:
    """Which of the target's optimizers a group is in."""
    return min(group.home, len(dialect.optimizers) - 1)


def _listed(group: TargetGroup, dialect: Dialect, root: Root) -> dict[str, object]:
    """A group as torch.optim lists it."""
    out: dict[str, object] = {}
    for option, value in group.options.items():
        first = len(root.values) + len(root.keys)
        out[option] = renamed(value, first, root.values)
    out["params"] = [dialect.named(name) for name in group.members]
    return out


def _ordered(root: Root, model: Path) -> None:
    """Make the model's dict the OrderedDict that Module.state_dict returns."""
    at = root.root
    for part in model[:-1]:
        inner = at[part]
        assert isinstance(inner, dict)
        at = inner
    held = at.get(model[-1])
    if isinstance(held, dict):
        at[model[-1]] = Ordered(held.items())
