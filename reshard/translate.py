"""A checkpoint seen in another naming: the target's tensors, made of the source's stored arrays."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from reshard.checkpoint import Checkpoint, ParamGroup
from reshard.codec import Add, shifted
from reshard.dialect import Held, Stored, View, expand
from reshard.dtypes import DType
from reshard.errors import CoverageError, FormatError, LayoutError, LossError
from reshard.expression import names_in
from reshard.families import Known
from reshard.format import Loss
from reshard.layout import Layout, Piece
from reshard.namings import dialects, module_order
from reshard.schema import Family, Scope
from reshard.splice import Link, Splice, splice
from reshard.tensor import MASTER, PARAM, LogicalTensor, TensorId


@dataclass(frozen=True)
class Translation:
    """A checkpoint in another naming, and what the way there leaves behind."""

    checkpoint: Checkpoint
    family: Family
    spoken: str  # the source's dialect
    losses: tuple[Loss, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Maker:
    """Makes the pieces of target tensors out of those of the source."""

    source: Checkpoint
    made: Mapping[str, Sequence[tuple[Stored, Splice | None]]]  # target name -> its sources
    add: Mapping[str, float]
    dtypes: Mapping[TensorId, DType]

    def pieces(self, tensor: TensorId) -> list[Piece]:
        """The pieces of one target tensor in one slot."""
        out: list[Piece] = []
        for stored, cut in self.made[tensor.name]:
            held = TensorId(stored.name, tensor.slot)
            logical = self.source.layout.tensors.get(held)
            if logical is None:
                continue
            pieces = self.source.layout.pieces(held)
            found = pieces if cut is None else cut.pieces(pieces, logical.space)
            add = self.add[tensor.name] - stored.add if tensor.slot in (PARAM, MASTER) else 0.0
            out += shifted(found, Add(add, self.dtypes[tensor])) if add else found
        return out


def translate(checkpoint: Checkpoint, known: Known, to: str) -> Translation:
    """The checkpoint with the tensors of dialect `to`, every slot, groups and steps alike.

    Raises CoverageError for a tensor that the model has and the source lacks, or the other way
    round, LayoutError for shapes that are not the config's.
    """
    scope = known.scope()
    said, theirs, scope, notes = _spoken(checkpoint, scope)
    mine = {n: s for n, s in expand(scope, to).items() if not s.spare}
    order = module_order(mine, to, known.config.get("model_type"))
    mine = {n: mine[n] for n in order or mine}
    holders = _holders(checkpoint, theirs)
    made, shapes = _join(mine, holders, checkpoint)
    tensors, add = _tensors(checkpoint, mine, made, shapes)
    dtypes = {t: v.dtype for t, v in tensors.items()}
    maker = _Maker(checkpoint, made, add, dtypes)
    members = {n: [s.name for s, _ in m] for n, m in made.items() if mine[n].slots != "weight"}
    translated = replace(
        checkpoint,
        layout=Layout(tensors, maker.pieces, dialects()[to].naming),
        groups=_groups(checkpoint.groups, members),
        steps=_steps(checkpoint.steps, members),
        ordered=order is not None,
        family=known.family.name,
        extras={**checkpoint.extras, **known.extras(to, scope)},
        native=None,
    )
    if said != to:
        notes += [r.why for r in known.family.tell.get(to, ()) if scope.holds(r.when)]
    dropped = _dropped(checkpoint, theirs)
    losses = [Loss("buffer-dropped", n, "made anew from the config") for n in dropped]
    losses += _rounded(maker)
    return Translation(translated, known.family, said, tuple(losses), tuple(notes))


def _rounded(maker: _Maker) -> list[Loss]:
    """What adding a constant costs: bits, wherever the dtype rounds the sum."""
    out = []
    for tensor, dtype in maker.dtypes.items():
        added = {maker.add[tensor.name] - s.add for s, _ in maker.made[tensor.name]} - {0.0}
        if added and tensor.slot in (PARAM, MASTER) and dtype.itemsize < 8:
            detail = f"{added.pop():+g} is added and the sum rounded to {dtype.name}"
            out.append(Loss("rounded", str(tensor), detail))
    return out


def second_names(checkpoint: Checkpoint, known: Known) -> dict[str, str]:
    """Names of tied weights that the model has and the checkpoint leaves out: alias -> name.

    None of a part of a model, or under names that are not the family's.
    """
    layout = checkpoint.layout
    weights = {t: v for t, v in layout.tensors.items() if t.slot in (PARAM, MASTER)}
    bare = replace(checkpoint, layout=Layout(weights, layout.pieces, layout.naming))
    try:
        theirs = _spoken(bare, known.scope())[1]
    except (CoverageError, FormatError):
        return {}
    there = {t.name for t in weights}
    whole = {n: s.held[0].name for n, s in theirs.items() if len(s.held) == 1}
    owners = {whole[n]: n for n in whole if n in there and not theirs[n].spare}
    left = (n for n in whole if n not in there and theirs[n].spare)
    return {n: owners[whole[n]] for n in left if whole[n] in owners}


def spoken(checkpoint: Checkpoint, known: Known) -> str:
    """The dialect of the family that a checkpoint's names are."""
    return _spoken(checkpoint, known.scope())[0]


# --- which dialect the source speaks -------------------------------------------------------------


def _spoken(
    checkpoint: Checkpoint, scope: Scope
) -> tuple[str, dict[str, Stored], Scope, list[str]]:
    """The dialect whose names the source has, whole; else the error of the closest one."""
    naming = checkpoint.layout.naming
    names = {t.name for t in checkpoint.layout.tensors}
    tried: list[tuple[int, str, CoverageError | FormatError]] = []
    for dialect in dialects().values():
        if dialect.naming != naming or not scope.family.speaks(dialect.name):
            continue
        expected: dict[str, Stored] = {}
        try:
            here, notes = _without_optional(scope, dialect.name, names)
            expected = expand(here, dialect.name)
            _complete(checkpoint, expected, dialect.name, scope.family)
            return dialect.name, expected, here, notes
        except (CoverageError, FormatError) as error:
            tried.append((len(names & expected.keys()), dialect.name, error))
    if not tried:
        raise CoverageError(
            f"{scope.family.title} has no names of its own for {naming!r} checkpoints"
        )
    raise max(tried, key=lambda t: t[0])[2]


def _without_optional(scope: Scope, dialect: str, names: Iterable[str]) -> tuple[Scope, list[str]]:
    """The scope without the runs (MTP layers) of which the source has nothing at all."""
    there = set(names)
    notes = []
    for run in scope.family.runs:
        if run.optional is None or not scope[run.optional]:
            continue
        rest = expand(scope.fix({run.optional: 0}), dialect)
        mine = [
            n
            for n, s in expand(scope, dialect).items()
            if s.optional == run.optional and n not in rest
        ]
        if not there & set(mine):
            scope = scope.fix({run.optional: 0})
            asked = names_in(scope.family.dims.get(run.optional, run.optional))
            if any(scope.config.get(key) for key in asked):
                notes.append(f"the config names MTP layers ({run.name}) and the source has none")
    return scope, notes


def _complete(
    checkpoint: Checkpoint, expected: Mapping[str, Stored], dialect: str, family: Family
) -> None:
    """Every tensor that the model has is there, in its shape, and no other."""
    there = {t.name for t in checkpoint.layout.tensors}
    missing = [n for n, s in expected.items() if n not in there and not s.spare and s.takes(PARAM)]
    drop = dialects()[dialect].drop
    extra = [
        n
        for n in sorted(there - expected.keys())
        if not any(fnmatch.fnmatchcase(n, g) for g in drop)
    ]
    for tensor, logical in checkpoint.layout.tensors.items():
        stored = expected.get(tensor.name)
        if stored is not None and not _fits(logical, stored):
            raise CoverageError(
                f"{tensor}: shape {list(logical.shape)} in {checkpoint.path}; a {family.title} "
                f"model of this config has {list(stored.shape)}. It is another model's config "
                "(--config DIR) or family (--schema NAME)."
            )
    if missing or extra:
        said = [f"lacks {_few(missing)}" if missing else "", f"has {_few(extra)}" if extra else ""]
        raise CoverageError(
            f"{checkpoint.path} {', and '.join(filter(None, said))}: not a whole {family.title} "
            f"model of its config ({dialect} names). Nothing was converted; a missing tensor would "
            "be left to chance, an extra one lost (--exclude GLOB leaves one out)."
        )


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more


def _fits(logical: LogicalTensor, stored: Stored) -> bool:
    if logical.shape == stored.shape:
        return True
    # rows of a vocabulary: the true number may lie between what is called true and what is stored
    return (
        logical.shape[1:] == stored.shape[1:]
        and len(logical.shape) == len(stored.shape) > 0
        and logical.padded is not None
        and logical.shape[0] <= stored.shape[0] <= logical.padded[0]
    ) or _padded(logical, stored)


def _padded(logical: LogicalTensor, stored: Stored) -> bool:
    """Whether more rows are stored than the config's vocabulary has, and nothing says why."""
    return (
        logical.padded is None
        and len(logical.shape) == len(stored.shape) == 2
        and logical.shape[1] == stored.shape[1]
        and logical.shape[0] > stored.shape[0]
        and logical.id.name in _VOCABULARY
    )


#: Tensors whose rows a trainer pads. Source: vocab_parallel tensors of core_v0.16.1.
_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")


def _dropped(checkpoint: Checkpoint, expected: Mapping[str, Stored]) -> list[str]:
    return sorted({t.name for t in checkpoint.layout.tensors} - expected.keys())


# --- joining the two dialects --------------------------------------------------------------------


def _holders(
    checkpoint: Checkpoint, theirs: Mapping[str, Stored]
) -> dict[str, list[tuple[Stored, Held]]]:
    """Logical tensor -> the stored ones of the source that hold it, the first one first."""
    there = {t.name for t in checkpoint.layout.tensors}
    out: dict[str, list[tuple[Stored, Held]]] = {}
    for stored in sorted(theirs.values(), key=lambda s: s.spare):
        if stored.name in there:
            for held in stored.held:
                out.setdefault(held.name, []).append((stored, held))
    return out


_Made = dict[str, list[tuple[Stored, Splice | None]]]


def _join(
    mine: Mapping[str, Stored],
    holders: Mapping[str, Sequence[tuple[Stored, Held]]],
    checkpoint: Checkpoint,
) -> tuple[_Made, dict[str, tuple[int, ...] | None]]:
    """For each target tensor its sources with the splices, and its finer shape."""
    made: _Made = {}
    factors: dict[str, tuple[int, ...] | None] = {}
    used: set[str] = set()
    finest = {t.name: v.factors for t, v in checkpoint.layout.tensors.items()}
    for name, stored in mine.items():
        pairs: list[tuple[Stored, Link]] = []
        for held in stored.held:
            if held.name not in holders:
                raise CoverageError(f"{name}: the source holds nothing of {held.name}")
            used.add(held.name)
            pairs += [
                (s, Link(held.view, h.view, finest.get(s.name) or s.shape))
                for s, h in holders[held.name]
            ]
        if all(_same(stored, s, link) for s, link in pairs):
            made[name] = [(s, None) for s, _ in pairs]
            factors[name] = None
            continue
        try:
            factors[name], cuts = splice(stored.shape, tuple(link for _, link in pairs))
        except LayoutError as error:
            raise LayoutError(f"{name}: {error}") from error
        made[name] = [(s, cut) for (s, _), cut in zip(pairs, cuts, strict=True)]
    left = sorted(holders.keys() - used)
    if left:
        raise CoverageError(
            f"{checkpoint.path} holds {_few(left)}, and the target's dialect has no place for it"
        )
    return made, factors


def _same(mine: Stored, theirs: Stored, link: Link) -> bool:
    """Whether the two stored tensors are the same one under two names."""
    return (
        mine.shape == theirs.shape
        and link.target == View.whole(mine.shape)
        and link.source == View.whole(theirs.shape)
    )


def _tensors(
    checkpoint: Checkpoint,
    mine: Mapping[str, Stored],
    made: _Made,
    factors: Mapping[str, tuple[int, ...] | None],
) -> tuple[dict[TensorId, LogicalTensor], dict[str, float]]:
    """The target's logical tensors: a slot of one is there if all its sources have it."""
    theirs = checkpoint.layout.tensors
    slots: dict[str, list[str]] = {}
    for tensor in theirs:
        slots.setdefault(tensor.name, []).append(tensor.slot)
    out: dict[TensorId, LogicalTensor] = {}
    for name, stored in mine.items():
        first = made[name][0][0]
        wanted = dict.fromkeys(s for part, _ in made[name] for s in slots.get(part.name, ()))
        for slot in filter(stored.takes, wanted):
            parts = [theirs[t] for s, _ in made[name] if (t := TensorId(s.name, slot)) in theirs]
            kinds = {p.dtype for p in parts}
            if len(kinds) > 1:
                raise LayoutError(
                    f"{name}: made of tensors of {', '.join(sorted(k.name for k in kinds))}; one "
                    f"tensor has one dtype ({', '.join(p.id.name for p in parts[:4])})"
                )
            tensor = TensorId(name, slot)
            like = theirs.get(TensorId(first.name, slot)) or parts[0]
            padded = like.extent if factors[name] is None and like.extent != stored.shape else None
            fine = like.factors if factors[name] is None else factors[name]
            keep = all(h.keep for h in stored.held)
            out[tensor] = LogicalTensor(
                tensor, stored.shape, like.dtype, padded, None, fine, fixed=keep
            )
    return out, {n: s.add for n, s in mine.items()}


# --- what goes with the tensors ------------------------------------------------------------------


def _groups(
    groups: Sequence[ParamGroup] | None, members: Mapping[str, Sequence[str]]
) -> tuple[ParamGroup, ...] | None:
    """The param groups with the target's names. Raises LossError where one tensor is in two."""
    if groups is None:
        return None
    group_of = {m: i for i, g in enumerate(groups) for m in g.members}
    listed: list[list[str]] = [[] for _ in groups]
    for name, parts in members.items():
        found = {group_of[p] for p in parts if p in group_of}
        if len(found) > 1:
            raise LossError(
                f"{name} is made of {', '.join(parts)}, which are in different param groups; "
                "one tensor has one set of options. Convert with --weights-only."
            )
        for i in found:
            listed[i].append(name)
    return tuple(ParamGroup(g.options, tuple(m)) for g, m in zip(groups, listed, strict=True))


def _steps(steps: Mapping[str, float], members: Mapping[str, Sequence[str]]) -> dict[str, float]:
    out: dict[str, float] = {}
    for name, parts in members.items():
        found = {steps[p] for p in parts if p in steps}
        if len(found) > 1:
            raise LossError(
                f"{name} is made of {', '.join(parts)}, whose step counters are {sorted(found)}; "
                "one tensor has one. Convert with --weights-only."
            )
        if found:
            out[name] = found.pop()
    return out
