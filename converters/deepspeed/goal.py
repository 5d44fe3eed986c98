"""What a target of DeepSpeed's own formats is to hold: groups, order, cuts, values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from reshard.checkpoint import Checkpoint, ParamGroup, ties
from reshard.containers.carried import Carried
from reshard.dtypes import named
from reshard.errors import FormatError, LayoutError, LossError, UsageError
from reshard.format import WriteOptions
from reshard.options import in_torch
from reshard.scaler import loss_scale
from reshard.tensor import EXP_AVG, MASTER, PARAM, STEP, TensorId
from reshard.topology import Target, Topology, topology

from . import autotp, recut
from .cuts import Affine
from .native import Experts, Group, Model, Native, Pipeline
from .values import plain

#: sub_group_size of a config that does not say. Source: runtime/zero/config.py @ 0.19.8.
SUB_GROUP_SIZE = 1_000_000_000


@dataclass(frozen=True)
class Goal:
    """A target, decided."""

    topology: Topology
    stage: int
    groups: tuple[Group, ...]
    model: Model
    stages: tuple[frozenset[str], ...]  # of the pipeline: optimizer names by stage
    settings: Carried
    top: Carried
    client: Carried
    config: Mapping[object, object]
    iteration: int
    tag: str
    pipeline: Pipeline | None = None
    experts: Experts | None = None
    affine: Mapping[str, Affine] = field(default_factory=dict)
    round_robin: bool = False
    aligned: bool = False
    elastic: bool = False  # the source records no options
    sub_group_size: int = SUB_GROUP_SIZE
    cuts: Mapping[str, int | None] = field(default_factory=dict)  # axis of tensor-parallel cuts
    vocabulary: frozenset[str] = frozenset()
    pairs: frozenset[str] = frozenset()  # gate above up: each rank has a part of both
    notes: tuple[str, ...] = ()

    @property
    def dp(self) -> int:
        """Data-parallel ranks."""
        return self.topology.dp or 1

    @property
    def mp(self) -> int:
        """Model-parallel ranks: pipeline stages times tensor-parallel ranks."""
        return self.topology.tp * self.topology.pp

    def kind(self, name: str) -> str:
        """The dtype of a weight in the module."""
        return self.model.kinds.get(name, "bfloat16")


def goal(source: Checkpoint, target: Target, options: WriteOptions, stage: int | None) -> Goal:
    """Decide a target from what was asked, the source, and `--like`.

    `stage` None: as asked, else the source's. Raises UsageError, FormatError or LayoutError for
    what cannot be.
    """
    asked = target.take("sub_group_size", "tag", "split")
    own = source.native if isinstance(source.native, Native) else None
    like = options.like.native if options.like else None
    like = like if isinstance(like, Native) else None
    notes: list[str] = []
    place = _topology(source, own, like, target, notes)
    wanted = stage if stage is not None else _stage(target, own, like, notes)
    place = replace(place, zero=wanted)
    shape = like or own
    groups = _groups(source, own, like)
    if options.like is not None and own is not None and own.elastic:
        notes.append(
            "options (rate, betas, decay) are those of --like at its step "
            f"{options.like.iteration}: the elastic source recorded none"
        )
    experts = _experts(shape, place)
    shapes = _shapes(source)
    if shape is not None and shape.experts is not None:
        assert experts is not None
        if experts.ep != shape.experts.ep:
            recut.check_expert_groups(groups, shapes.__getitem__, experts)
        groups = tuple(recut.expert_group(g, shape.experts, experts) for g in groups)
    if wanted == 3 and like is None and any(map(recut.is_muon, groups)):
        _check_muon(own)
    groups = tuple(recut.muon_group(g, wanted, shapes.__getitem__) for g in groups)
    affine, axes = _cuts(source, shape, shapes, options, place.tp)
    pipeline = shape.pipeline if shape else None
    model = _model(source, shape, options, groups)
    return Goal(
        topology=place,
        stage=wanted,
        groups=groups,
        model=model,
        stages=recut.stages(pipeline, place.pp, asked.get("split")),
        settings=own.settings if own else Carried(_scaling(source, model, groups)),
        top=own.top if own else Carried({}),
        client=own.client if own else Carried({}),
        config=shape.config if shape else {},
        iteration=source.iteration or 0,
        tag=_tag(source, own, asked.get("tag")),
        pipeline=pipeline,
        experts=experts,
        affine=affine,
        round_robin=shape.round_robin if shape and wanted in (1, 2) else False,
        aligned=shape.aligned if shape and wanted in (1, 2) else False,
        elastic=any(g.options is None for g in groups),
        sub_group_size=_sub_group_size(asked.get("sub_group_size"), shape),
        cuts=axes,
        vocabulary=_vocabulary(shape, axes),
        pairs=frozenset(n for n, c in (shape.affine if shape else {}).items() if recut.is_pair(c)),
        notes=tuple(notes),
    )


def _shapes(source: Checkpoint) -> dict[str, tuple[int, ...]]:
    """The logical shape of every tensor of the module and the optimizer."""
    tensors = source.layout.tensors
    return {t.name: v.shape for t, v in tensors.items() if t.slot in (PARAM, MASTER)}


def _check_muon(own: Native | None) -> None:
    """Raises FormatError for Muon's groups of another stage under ZeRO 3."""
    if own is None or own.stage != 3:
        raise FormatError(
            "Muon lists its matrices by shape, unless the job makes its model under zero.Init: the "
            "source does not say which, and ZeRO 3's partitions follow it. Give --like DIR, a "
            "ZeRO-3 checkpoint of the job that will resume (step 0 will do), or write zero1 or "
            "zero2."
        )


def _cuts(
    source: Checkpoint,
    shape: Native | None,
    shapes: Mapping[str, tuple[int, ...]],
    options: WriteOptions,
    tp: int,
) -> tuple[dict[str, Affine], dict[str, int | None]]:
    """Tensor-parallel shards, and the axis that each tensor is cut on.

    As the source or `--like` has them; else, for a model that is known, as AutoTP cuts it.
    """
    if shape is not None and shape.affine:
        if shape.pipeline is not None and tp not in (1, _tp(shape)):
            raise LayoutError(
                f"tp={tp}: where a pipeline's tensors may be cut is not told beyond tp={_tp(shape)}"
                " and tp=1. Give --like DIR, a checkpoint of the job that will resume."
            )
        axes = {n: recut.whole_axis(n, c) for n, c in shape.affine.items()}
        heads = autotp.kv_heads(autotp.model_config(source, options))
        return recut.affine(shape.affine, tp, tp == _tp(shape), heads), axes
    if tp == 1:
        return {}, {}
    shapes = {
        t.name: v.shape for t, v in source.layout.tensors.items() if t.slot in (PARAM, MASTER)
    }
    affine = autotp.cuts(shapes.items(), autotp.model_config(source, options), tp)
    return affine, {n: autotp.rule_axis(n) for n in affine}


def _vocabulary(shape: Native | None, names: Iterable[str]) -> frozenset[str]:
    """The tensors that are cut along the vocabulary."""
    if shape is not None and shape.affine:
        return shape.vocabulary
    return frozenset(n for n in names if autotp.is_vocabulary(n))


def _scaling(source: Checkpoint, model: Model, groups: Sequence[Group]) -> dict[object, object]:
    """The counters of another framework's dynamic loss scale, for weights of fp16."""
    fp16 = any(model.kinds.get(n) == "float16" for g in groups for n in g.members)
    scale = loss_scale(source.extras) if fp16 else None
    counters = scale.for_deepspeed(source.iteration or 0) if scale is not None else {}
    return dict[object, object](counters.items())


def _tp(shape: Native | None) -> int:
    cuts = shape.affine if shape else {}
    return max((len(c.shards) for c in cuts.values()), default=1)


def _topology(
    source: Checkpoint, own: Native | None, like: Native | None, target: Target, notes: list[str]
) -> Topology:
    known = {k: v for k, v in target.degrees.items() if k not in ("zero",)}
    odd = [k for k in known if k in ("vpp", "etp", "cp") and known[k] != 1]
    if odd:
        raise UsageError(f"{target.text!r}: DeepSpeed has no degree {odd[0]}")
    place = topology({k: v for k, v in known.items()})
    if "dp" not in known:
        dp = like.dp if like else source.topology.dp
        place = replace(place, dp=dp or 1)
        where = "the --like checkpoint's" if like else "the source's"
        notes.append(f"dp={dp or 1}: " + (where if dp else "not said, and the source has none"))
    if like is not None and not known:
        place = replace(
            place,
            tp=_tp(like),
            pp=len(like.pipeline.stages) if like.pipeline else 1,
            ep=like.experts.ep if like.experts else 1,
        )
    return place


def _stage(target: Target, own: Native | None, like: Native | None, notes: list[str]) -> int:
    asked = target.degrees.get("zero")
    if asked is not None:
        if asked not in (1, 2, 3):
            raise FormatError(
                f"{target.text!r}: ZeRO {asked} is not written; zero1, zero2 and zero3 are. A job "
                "without ZeRO loads weights: convert --to torch or hf."
            )
        return asked
    base = like or own
    if base is not None and base.stage in (1, 2, 3):
        return base.stage
    notes.append("zero=1: not said, and the source is not of ZeRO 1 to 3")
    return 1


def _tag(source: Checkpoint, own: Native | None, asked: str | None) -> str:
    if asked is not None:
        if not asked or "/" in asked or asked in (".", ".."):
            raise UsageError(f"tag={asked!r} is no folder name")
        return asked
    if own is not None and own.wrapper is not None:
        return own.wrapper.tag
    if own is not None and own.tag:
        return own.tag.removesuffix("_universal")
    return f"global_step{source.iteration or 0}"


def _sub_group_size(asked: str | None, shape: Native | None) -> int:
    if asked is None:
        return (shape.sub_group_size if shape else None) or SUB_GROUP_SIZE
    try:
        n = int(float(asked))
    except (ValueError, OverflowError):
        n = 0
    if n < 1:
        raise UsageError(f"sub_group_size={asked}: a number of elements is expected, as 1e9")
    return n


# --- groups --------------------------------------------------------------------------------------


def _groups(source: Checkpoint, own: Native | None, like: Native | None) -> tuple[Group, ...]:
    """The target's param groups: structure from `--like` where given, values from the source."""
    if not any(t.slot not in (PARAM,) for t in source.layout.tensors):
        return ()
    if not source.ordered and like is None:
        raise FormatError(
            f"{source.path}: in which order a DeepSpeed job lists this model's parameters is not "
            "known, and ZeRO's flat partitions follow it. Give --like DIR, a checkpoint of the job "
            "that will resume (step 0 will do), or convert --weights-only."
        )
    if own is not None:
        mine = own.groups
    else:
        mine = tuple(_neutral(source, g) for g in source.groups or ())
    mine = tuple(_present(source, g) for g in mine)
    if not mine:
        raise FormatError(
            f"{source.path}: says nothing of param groups, so the optimizer's order is not known. "
            "Give --like DIR, or convert --weights-only."
        )
    return mine if like is None else tuple(_alike(g, mine, source) for g in like.groups)


def _present(source: Checkpoint, group: Group) -> Group:
    """The group without members that --include or --exclude left out.

    Raises LossError if its members have counted different steps.
    """
    steps = {source.steps[n] for n in group.members if n in source.steps}
    if len(steps) > 1:
        raise LossError(
            f"a param group counts steps {sorted(steps)[:4]} for its members; a ZeRO partition has "
            "one counter"
        )
    kept = tuple(n for n in group.members if _held(source, n))
    return group if len(kept) == len(group.members) else replace(group, members=kept)


def _held(source: Checkpoint, name: str) -> bool:
    tensors = source.layout.tensors
    return TensorId(name) in tensors or TensorId(name, MASTER) in tensors


def _neutral(source: Checkpoint, group: ParamGroup) -> Group:
    """A group of another framework's checkpoint."""
    tensors = source.layout.tensors
    names = set(group.members)
    states = {t.slot for t in tensors if t.name in names} - {PARAM, MASTER}
    ordered = tuple(s for s in (EXP_AVG, "exp_avg_sq") if s in states)
    ordered += tuple(sorted(states - set(ordered)))
    steps = {source.steps[n] for n in group.members if n in source.steps}
    if len(steps) > 1:
        raise LossError(
            f"a param group counts steps {sorted(steps)[:4]} for its members; a ZeRO partition has "
            "one counter"
        )
    numbers = {STEP: steps.pop()} if steps else {}
    kept, _ = in_torch(group.options, f"the param group of {group.members[:1]}")
    options = {k: tuple(v) if isinstance(v, (list, tuple)) else v for k, v in kept.items()}
    return Group(options, group.members, ordered, frozenset(), numbers, True)


def _alike(wanted: Group, mine: Sequence[Group], source: Checkpoint) -> Group:
    """A group as the job that will resume has it, with the source's values."""
    by_name = {n: g for g in mine for n in g.members}
    missing = [n for n in wanted.members if n not in by_name]
    if missing:
        raise LayoutError(
            f"--like optimizes {missing[0]} ({len(missing)} such), and {source.path} has no state "
            "for it"
        )
    from_ = [by_name[n] for n in dict.fromkeys(wanted.members)]
    first = from_[0] if from_ else wanted
    for other in from_:
        if plain(other.options) != plain(first.options) or other.numbers != first.numbers:
            raise LossError(
                f"--like puts {wanted.members[0]} and others in one param group, and the source "
                "counts their steps or sets their options differently"
            )
    numbers, tensor = first.numbers, wanted.step_tensor
    if wanted.step_tensor is None:
        tensor = first.step_tensor
    return replace(
        wanted,
        options=first.options if first.options is not None else wanted.options,
        states=first.states, whole=first.whole, numbers=numbers, step_tensor=tensor,
    )  # fmt: skip


# --- the model -----------------------------------------------------------------------------------


def _model(
    source: Checkpoint, shape: Native | None, options: WriteOptions, groups: Sequence[Group]
) -> Model:
    """The module's names in order, with the dtype each weight has."""
    tensors = source.layout.tensors
    trained = {n for g in groups for n in g.members}
    base = shape.model if shape else None
    names = list(dict.fromkeys(t.name for t in tensors if t.slot in (PARAM, MASTER)))
    kinds: dict[str, str] = {}
    wanted = named(options.dtype).name if options.dtype else None
    buffers = {n for n in (base.buffers if base else ()) if TensorId(n) in tensors}
    for name in names:
        weight = tensors.get(TensorId(name))
        kind = base.kinds.get(name) if base else None
        kind = kind or (weight.dtype.name if weight else "bfloat16")
        if wanted is not None and name not in buffers and named(kind).floating:
            kind = wanted
        kinds[name] = kind
    tied = base.aliases if base else ties(source)
    aliases = {a: o for a, o in tied.items() if o in kinds}
    order = [n for n in (base.order if base else ()) if n in kinds or n in aliases]
    order += [n for n in names if n not in set(order)]
    parted = next((a for a in aliases if a in kinds), None)
    if parted is not None:
        raise LayoutError(
            f"--like ties {parted} to {aliases[parted]}, and {source.path} holds both: one of the "
            "two would be lost. Give --like of a run that does not tie them."
        )
    order += [a for a in aliases if a not in set(order)]
    frozen = tuple(n for n in names if n not in trained and n not in buffers)
    return Model(
        tuple(order), tuple(n for n in order if n in buffers), frozen, aliases, kinds,
        base.prefix if base else "",
    )  # fmt: skip


def _experts(shape: Native | None, place: Topology) -> Experts | None:
    if shape is None or shape.experts is None:
        if place.ep > 1:
            raise LayoutError(f"ep={place.ep}: the source holds no experts of DeepSpeed-MoE")
        return None
    for path, n in shape.experts.counts.items():
        if n % place.ep:
            raise LayoutError(f"{path}: {n} experts do not divide over ep={place.ep}")
    if (place.dp or 1) % place.ep:
        raise LayoutError(f"dp={place.dp} is no multiple of ep={place.ep}: experts lie on dp ranks")
    return Experts(shape.experts.counts, place.ep)
