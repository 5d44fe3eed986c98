"""The parameter groups of a target, with every option that torch's loader asks for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from reshard.checkpoint import Checkpoint, Json, ParamGroup
from reshard.containers.carried import Carried
from reshard.containers.inert import TensorRef
from reshard.errors import LossError
from reshard.format import Fate, Loss
from reshard.options import in_torch
from reshard.tensor import EXP_AVG

from .state import State
from .values import Path, plain

#: What torch 2.13's Adam and AdamW keep in a group beside lr, betas, eps and weight_decay, with
#: their defaults; a key that is missing stops dcp.load (pytorch#146157).
#: `decoupled_weight_decay`: AdamW sets it on every load (optim/adamw.py, __setstate__), so the
#: default of Adam is right for both. Source: torch 2.13 optim/adam.py.
_ADAM: Mapping[str, object] = {
    "amsgrad": False,
    "foreach": None,
    "maximize": False,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": False,
}


@dataclass(frozen=True, slots=True)
class TargetGroup:
    """A group to be written: raw options, members by canonical name, which optimizer's."""

    options: Mapping[str, Carried]
    members: tuple[str, ...]
    home: int = 0


def target_groups(
    source: Checkpoint, like: Checkpoint | None, base_lrs: list[float] | None
) -> tuple[list[TargetGroup], list[Fate]]:
    """The groups to write, and what was filled in.

    `base_lrs` are the scheduler's, by group: what torch keeps as `initial_lr`.
    """
    groups = _own(source)
    fates = [Fate(f"param_groups[{i}]", "keep") for i in range(len(groups))]
    if like is not None and like.groups is not None:
        groups, fates = _as_like(groups, like)
    adam = any(t.slot == EXP_AVG for t in source.layout.tensors)
    own = isinstance(source.native, State)
    filled: dict[str, object] = {}
    out: list[TargetGroup] = []
    for i, group in enumerate(groups):
        options = dict(group.options)
        # torch's Adam has had amsgrad since 0.4; NAdam, RAdam, Adamax and Lion never
        if adam and "betas" in options and ("amsgrad" in options or not own):
            for name, default in _ADAM.items():
                if name not in options:
                    options[name] = Carried(default)
                    filled[name] = default
        if "initial_lr" not in options:
            first = _first_rate(options, base_lrs, i, foreign=not own)
            if first is not None:
                options["initial_lr"] = first
                filled["initial_lr"] = first.obj
        out.append(replace(group, options=options))
    fates += [
        Fate(f"param_groups.{name}", "derive", f"the source has none; torch's default {value!r}")
        for name, value in filled.items()
    ]
    return out, fates


def _first_rate(
    options: Mapping[str, Carried], base_lrs: list[float] | None, group: int, *, foreign: bool
) -> Carried | None:
    """`initial_lr`, which a scheduler's reload asks for: of the scheduler, or the one known."""
    if base_lrs is not None and group < len(base_lrs):
        return Carried(base_lrs[group])
    return options.get("lr") if foreign else None


def _own(source: Checkpoint) -> list[TargetGroup]:
    """The source's groups with options as torch has them."""
    native = source.native
    if isinstance(native, State):
        return [
            TargetGroup(options, group.members, home)
            for options, group, home in zip(
                native.options, source.groups or (), native.homes, strict=True
            )
        ]
    return [
        TargetGroup({k: Carried(_value(k, v)) for k, v in options.items()}, g.members)
        for i, g in enumerate(source.groups or ())
        for options, _ in [in_torch(g.options, f"param_groups[{i}]")]
    ]


def options_left(source: Checkpoint) -> list[Loss]:
    """Options of another framework's groups that torch's have no place for."""
    if isinstance(source.native, State):
        return []
    names = dict.fromkeys(n for g in source.groups or () for n in in_torch(g.options, "")[1])
    return [
        Loss("option-dropped", f"param_groups.{name}", f"an option of {source.format} alone")
        for name in names
    ]


def _value(name: str, value: Json) -> object:
    if name == "betas" and isinstance(value, list | tuple):
        return tuple(value)
    return value


def _as_like(groups: list[TargetGroup], like: Checkpoint) -> tuple[list[TargetGroup], list[Fate]]:
    """The reference's groups, each with the options its members have in the source.

    Raises LossError where members of one group differ in the source.
    """
    by_member = {name: group for group in groups for name in group.members}
    theirs = like.native if isinstance(like.native, State) else None
    out: list[TargetGroup] = []
    for i, group in enumerate(like.groups or ()):
        found = [by_member[m] for m in group.members if m in by_member]
        base = theirs.options[i] if theirs is not None else {}
        if not found:
            out.append(TargetGroup(base, group.members))
            continue
        for other in found[1:]:
            _check_equal(found[0], other, i)
        home = theirs.homes[i] if theirs is not None else 0
        out.append(TargetGroup({**base, **found[0].options}, group.members, home))
    return out, [
        Fate("param_groups", "remap", f"{len(groups)} groups as the reference's {len(out)}")
    ]


def _check_equal(one: TargetGroup, other: TargetGroup, group: int) -> None:
    for name in sorted(one.options.keys() & other.options.keys() - {"param_names"}):
        a, b = plain(one.options[name]), plain(other.options[name])
        if a != b:
            raise LossError(
                f"the reference's group {group} holds parameters whose {name} differs in the "
                f"source ({a} and {b}); make the job's groups as the source's, or convert without "
                "--like"
            )


def spread(value: object, path: Path = ()) -> Iterator[tuple[Path, object]]:
    """The leaves of a value as torch's loader asks for them; an empty dict is one.

    Source: torch 2.13 distributed/checkpoint/_traverse.py, traverse_state_dict.
    """
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from spread(inner, (*path, str(key)))
    elif isinstance(value, list) and not _terminal(value):
        for i, inner in enumerate(value):
            yield from spread(inner, (*path, i))
    else:
        yield path, value


def _terminal(value: object) -> bool:
    if isinstance(value, list):
        return not any(
            isinstance(v, TensorRef) or (isinstance(v, Mapping | list) and not _terminal(v))
            for v in value
        )
    return not isinstance(value, Mapping)


def as_json(groups: list[TargetGroup]) -> list[ParamGroup]:
    """The groups as reports show them."""
    return [
        ParamGroup({k: plain(v) for k, v in g.options.items() if k != "param_names"}, g.members)
        for g in groups
    ]
