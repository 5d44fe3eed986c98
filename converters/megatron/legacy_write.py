"""Declares a legacy checkpoint: one torch.save file per rank, as Megatron 0.16.1 writes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from reshard.checkpoint import Checkpoint, Json
from reshard.containers import torchfile
from reshard.containers.carried import Carried
from reshard.containers.inert import Ordered, Record, TensorRef, new_tensor
from reshard.dtypes import DType, named
from reshard.errors import CoverageError, FormatError
from reshard.format import Declaration, Fate, Loss, WriteOptions
from reshard.layout import Draft, Layout
from reshard.tensor import MASTER, PARAM, LogicalTensor, TensorId
from reshard.topology import Target

from . import module_order, names, run, run_rng
from .carry import numbered
from .dist_write import dropped, from_masters, native_run, run_folder, vocab_of
from .from_family import foreign_fates, foreign_notes, foreign_recipe
from .goal import Goal, goal
from .legacy_held import Entry, Experts, Holdings, Param, spots_of
from .legacy_ranks import RankFile, rank_files
from .run import Options, Run
from .shards import shard
from .sizes import LEGACY_GROUPED, LOCAL, SEQUENTIAL, TE_GROUPED, Sizes
from .stages import Chunk

NAME = "megatron-legacy"
_VOCAB = ("embedding.word_embeddings.weight", "output_layer.weight")
#: Adam's state as Megatron saves it again after a load (fixture a-tp2pp4), other slots after it.
_FIRST = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Shape:
    """What the target's files are made from."""

    source: Checkpoint
    native: Run
    aim: Goal
    model: Sizes  # as the target's spec spells it
    groups: tuple[Options, ...]  # of the target's optimizers, dense first; () for weights only
    slots: Mapping[str, tuple[str, ...]]  # optimizer slots of the source, by tensor
    dtype: DType | None  # asked for with --dtype

    def logical(self, name: str) -> LogicalTensor:
        """A weight of the source, or its master. Raises CoverageError if it has neither."""
        for slot in (PARAM, MASTER):
            found = self.source.layout.tensors.get(TensorId(name, slot))
            if found is not None:
                return found
        raise CoverageError(
            f"{name}: a {self.aim.spec} model of these sizes has it, and the source does not hold "
            "it. A legacy checkpoint is whole: leave --include and --exclude away."
        )

    def weight_dtype(self, name: str) -> DType:
        """The type a weight is written in."""
        found = self.logical(name)
        if found.id.slot == MASTER:
            return self.dtype or named("bfloat16")
        fixed = found.fixed or names.is_buffer(name) or not found.dtype.floating
        if self.dtype is None or fixed:
            return found.dtype
        return self.dtype

    def extent(self, name: str) -> tuple[int, ...]:
        """The padded shape in the target."""
        found = self.logical(name)
        return self.aim.padded(found, name in _VOCAB) or found.shape

    @property
    def foreign(self) -> bool:
        """Whether the source is another framework's."""
        return self.native is not self.source.native

    def state_dtype(self, name: str, slot: str) -> DType:
        """The type of an optimizer slot: fp32 for what Megatron did not write itself."""
        found = self.source.layout.tensors.get(TensorId(name, slot))
        return named("float32") if found is None or self.foreign else found.dtype


def declare_legacy(source: Checkpoint, target: Target, options: WriteOptions) -> Declaration:
    """Lay out a legacy checkpoint of the source at the target's topology.

    A source whose optimizer is distributed gets Float16Optimizer's form, per parameter.
    Raises FormatError for optim=…: distrib_optim.pt is not written.
    """
    native = native_run(source, target, options)
    aim = goal(source, native, target, options)
    if aim.optim not in (None, "non_distributed"):
        raise FormatError(
            f"optim={aim.optim}: distrib_optim.pt is not written, its buffers depend on bucket "
            "sizes that the job chooses. Write torch_dist (megatron:…), or leave optim away."
        )
    shape, losses = _shape(source, native, aim, options)
    holdings = Holdings(shape.model, aim.topology, _mla_down(native, aim))
    args, fates, more = _args(native, aim, shape)
    losses += more
    rng, rng_fates, more = _rng(native, aim)
    losses += more
    drafts = [
        _file(shape, rank, holdings, args, rng.get(_position(rank, aim)))
        for rank in rank_files(aim.topology)
    ]
    made = Layout(holdings.tensors, holdings.pieces, "megatron")
    _check_like(options, drafts, made)
    folder, tracker = run_folder(native)
    fates += [*_state_fates(native, shape), *rng_fates, *dropped(native)]
    recipe = _recipe(native, aim, shape, rng_fates)
    if shape.foreign:
        told, more = foreign_fates(source, native)
        fates, losses = [*fates, *told], [*losses, *more]
        recipe = {**recipe, **foreign_recipe(native)}
    feeds, explained = from_masters(source, holdings.tensors) if shape.groups else ({}, frozenset())
    return Declaration(
        format=NAME,
        topology=aim.topology,
        folder=folder,
        layout=made,
        drafts=drafts,
        trackers={"latest_checkpointed_iteration.txt": tracker.encode()},
        losses=tuple(losses),
        notes=(*aim.notes, *_notes(native, shape), *foreign_notes(source, native)),
        fates=tuple(fates),
        recipe=recipe,
        explained=explained,
        feeds=feeds,
        vocab_size=vocab_of(holdings.tensors),
    )


# --- what is written -----------------------------------------------------------------------------


def _shape(
    source: Checkpoint, native: Run, aim: Goal, options: WriteOptions
) -> tuple[Shape, list[Loss]]:
    slots: dict[str, list[str]] = {}
    for tensor in source.layout.tensors:
        if tensor.slot not in (PARAM, MASTER, run.STEP):
            slots.setdefault(tensor.name, []).append(tensor.slot)
    ordered = {name: tuple(sorted(found, key=_rank_of_slot)) for name, found in slots.items()}
    groups: tuple[Options, ...] = ()
    losses: list[Loss] = []
    held = bool(ordered) or any(t.slot == MASTER for t in source.layout.tensors)
    if native.optimizer is not None and held and not options.weights_only:
        found, losses = run.regrouped(native, aim.topology.ep)
        # 0.16.1 builds decayed groups first and reads groups by position
        groups = tuple(sorted(found, key=lambda g: (g.expert, not g.decays)))
        _check_all_trained(source)
    form = _experts_form(native, aim, options)
    vocab = vocab_of(source.layout.tensors)
    model = replace(native.model, spec=aim.spec, experts_form=form, vocab=vocab)
    dtype = named(options.dtype) if options.dtype else None
    return Shape(source, native, aim, model, groups, ordered, dtype), losses


def _check_all_trained(source: Checkpoint) -> None:
    """Raises FormatError for frozen weights, which leave no trace in a file that numbers the rest.

    Source: optimizer/__init__.py _get_param_groups @ core_v0.16.1.
    """
    held = source.layout.tensors
    trained = {t.name for t in held if t.slot != PARAM}
    weights = {t.name for t in held if not names.is_buffer(t.name)}
    frozen = sorted(weights - trained)
    if trained and frozen:
        raise FormatError(
            f"{frozen[0]} and {len(frozen) - 1} more weights have no optimizer state: the run "
            "froze them. A legacy file numbers what is trained and does not say which that is. "
            "Write torch_dist (megatron:…), which names them, or convert with --weights-only."
        )


def _rank_of_slot(slot: str) -> tuple[int, str]:
    return (_FIRST.index(slot) if slot in _FIRST else len(_FIRST), slot)


def _experts_form(native: Run, aim: Goal, options: WriteOptions) -> str:
    """The experts' module: the reference's, else the source's where the spec has it."""
    like = options.like.native if options.like else None
    if isinstance(like, Run) and like.spec == aim.spec:
        return like.model.experts_form
    form = native.model.experts_form
    return SEQUENTIAL if form == TE_GROUPED and aim.spec == LOCAL else form


def _mla_down(native: Run, aim: Goal) -> bool | None:
    """Whether MLA's down projections are cut, where the source shows it for the same spec."""
    known = native.mla_down
    return known if isinstance(known, bool) and aim.spec == native.spec else None


def _args(native: Run, aim: Goal, shape: Shape) -> tuple[Record | None, list[Fate], list[Loss]]:
    if not native.args:
        return None, [], []
    changes: dict[str, object] = {**aim.flags, **aim.precision, "ckpt_format": "torch"}
    changes["use_dist_ckpt"] = False
    if shape.groups:
        changes["use_distributed_optimizer"] = False
    if aim.rows is not None:
        changes["padded_vocab_size"] = aim.rows
    if aim.spec is not None:
        changes["transformer_impl"] = aim.spec
    if native.model.experts is not None:
        changes["moe_grouped_gemm"] = shape.model.experts_form != SEQUENTIAL
    return run.target_args(native, aim.topology, changes)


def _file(
    shape: Shape, rank: RankFile, holdings: Holdings, args: Record | None, rng: Carried | None
) -> Draft:
    """One rank's model_optim_rng.pt.

    Keys and their order: generate_state_dict in megatron/training/checkpointing.py @ core_v0.16.1;
    fixtures a-*, c-*, d-*.
    """
    common, optimizer = shape.native.common, shape.native.optimizer
    writer = _Writer(shape, rank, holdings)
    root: dict[str, object] = {}
    if args is not None:
        root["args"] = _of_rank(args, rank, shape)
    root["checkpoint_version"] = 3.0
    if "iteration" in common:
        root["iteration"] = common["iteration"]
    root |= writer.models()
    if shape.groups:
        members = [writer.member(groups) for groups in _members(shape.groups)]
        root["optimizer"] = members if len(members) > 1 else members[0]
        if optimizer is not None and optimizer.scaler is not None:
            writer.values |= optimizer.scaler.values
        if "opt_param_scheduler" in common:
            root["opt_param_scheduler"] = common["opt_param_scheduler"]
    if rng is not None:
        root["rng_state"] = rng.obj
        writer.values |= rng.values
    if "num_floating_point_operations_so_far" in common:
        root["num_floating_point_operations_so_far"] = common[
            "num_floating_point_operations_so_far"
        ]
    return writer.draft(root)


def _of_rank(args: Record, rank: RankFile, shape: Shape) -> Record:
    """The args with the global rank that writes the file."""
    each = len(run.places(shape.aim.topology))
    made = Record(args.type)
    made.state = {**args.fields, "rank": rank.stage * each + rank.place.rank}
    return made


def _members(groups: Sequence[Options]) -> list[list[int]]:
    """The optimizers of the chain, as indices of their groups: dense, then experts' if any."""
    dense = [i for i, g in enumerate(groups) if not g.expert]
    experts = [i for i, g in enumerate(groups) if g.expert]
    return [dense, experts] if experts else [dense]


class _Writer:
    """Builds one rank's file: inert tensors now, their places when the file is laid out."""

    def __init__(self, shape: Shape, rank: RankFile, holdings: Holdings) -> None:
        self.shape, self.rank, self.holdings = shape, rank, holdings
        each = (shape.model.experts or 0) // shape.aim.topology.ep
        self.experts = Experts(rank.place.ep * each, each)
        self.params: list[Param] = []
        self.values: dict[str, bytes] = {}
        self.found: list[tuple[Entry, str]] = []  # the entry and its storage key

    def models(self) -> dict[str, object]:
        """`model`, or model0 … of a virtual pipeline.

        Every `_extra_state` is None: what the local spec saves (fixtures a-*), and what Transformer
        Engine 1.x and 2.x skip on loading (module/base.py and ops/op.py set_extra_state @ v1.10,
        v2.5), where TE itself saves an empty state. Norms have one as from TE 2.0.
        """
        chunks = self.shape.aim.pipeline.chunks[self.rank.stage]
        models = [self._model(v, chunk) for v, chunk in enumerate(chunks)]
        if len(models) == 1:
            return {"model": models[0]}
        return {f"model{v}": model for v, model in enumerate(models)}

    def _model(self, v: int, chunk: Chunk) -> Ordered:
        shape = self.shape
        entries = module_order.legacy_entries(
            shape.model,
            chunk,
            spec=shape.aim.spec,
            ep=shape.aim.topology.ep,
            ep_rank=self.rank.place.ep,
            mtp_inner=shape.native.mtp_inner,
        )
        made: dict[str, object] = {}
        for key, canonical in entries:
            if canonical is None:
                made[key] = None
                continue
            param = self._param(v, key, canonical)
            self.params.append(param)
            made[key] = self._tensor(param, PARAM, f"model{v}/{key}", param.dtype)
        return Ordered(made)

    def _param(self, v: int, key: str, canonical: str) -> Param:
        name, first = names.LegacyName(canonical), canonical
        if "{expert}" in canonical:
            name = names.LegacyName(canonical, f"grouped_fc{key[-1]}")
            first = canonical.replace("{expert}", str(self.experts.first))
        local = shard(
            first,
            self.shape.extent(first),
            self.holdings.rule(first),
            self.shape.aim.topology,
            self.rank.place,
        ).shape
        if name.kind == "grouped_fc1":
            local = (local[1], local[0] * self.experts.count)
        elif name.kind == "grouped_fc2":
            local = (local[1] * self.experts.count, local[0])
        spots = tuple(spots_of(key, name, local, self.experts))
        return Param(key, v, local, self.shape.weight_dtype(first), spots)

    def _tensor(self, param: Param, slot: str, key: str, dtype: DType) -> TensorRef:
        for spot in param.spots:
            tensor = TensorId(spot.name, slot)
            self.found.append((Entry(tensor, spot, key, param.shape, dtype), key))
        return new_tensor(param.shape, dtype, key)

    def member(self, indices: Sequence[int]) -> dict[str, object]:
        """One optimizer: Float16Optimizer's form, or FP32Optimizer's where no weight is narrower.

        Source: optimizer.py Float16OptimizerWithFloat16Params.state_dict @ core_v0.16.1; fixtures
        a-* (dict), c-* (one of a list).
        """
        shape = self.shape
        assert shape.native.optimizer is not None
        held = self._assigned()
        state: dict[object, object] = {}
        listed: list[object] = []
        masters: list[object] = []
        pid = 0
        for i in indices:
            mine: list[object] = []
            pids = list(range(pid, pid + len(held[i])))
            for param in held[i]:
                entry = self._state(param, f"state{i}/{pid}")
                if entry:
                    state[pid] = entry
                if param.dtype.itemsize < 4:
                    key = f"master{i}/{pid}"
                    mine.append(self._tensor(param, MASTER, key, named("float32")))
                pid += 1
            masters.append(mine)
            listed.append(self._group(shape.groups[i], pids))
        inner = {"state": state, "param_groups": listed}
        if not any(p.dtype.itemsize < 4 for p in self._trained()):
            return dict(inner)
        made: dict[str, object] = {"optimizer": inner}
        if shape.native.optimizer.scaler is not None:
            made["grad_scaler"] = shape.native.optimizer.scaler.obj
        return {**made, "fp32_from_fp16_params": masters}

    def _trained(self) -> Iterator[Param]:
        return (p for p in self.params if not names.is_buffer(p.name))

    def _assigned(self) -> list[list[Param]]:
        """The parameters of every group, in pid order."""
        shape = self.shape
        assert shape.native.optimizer is not None
        regrouped = replace(shape.native.optimizer, groups=shape.groups)
        native = replace(shape.native, optimizer=regrouped)
        held: list[list[Param]] = [[] for _ in shape.groups]
        for param in self._trained():
            at = run.group_of(native, param.name, len(param.shape), shape.aim.topology.ep)
            held[at].append(param)
        return held

    def _state(self, param: Param, key: str) -> dict[str, object]:
        """A parameter's moments, and torch Adam's step."""
        shape = self.shape
        made: dict[str, object] = {}
        for slot in shape.slots.get(param.name, ()):
            dtype = shape.state_dtype(param.name, slot)
            made[slot] = self._tensor(param, slot, f"{key}/{slot}", dtype)
        optimizer = shape.native.optimizer
        if made and optimizer is not None and not optimizer.step_in_groups:
            step = shape.source.steps.get(param.name, optimizer.step)
            if step is None and not shape.source.steps:
                return made  # SGD counts none
            if step is None:
                raise CoverageError(f"{param.name}: the source says no step for its moments")
            counted = run.step_tensor(step, f"{key}/{run.STEP}")
            made[run.STEP] = counted.obj
            self.values |= counted.values
        return made

    def _group(self, options: Options, pids: list[int]) -> dict[str, object]:
        optimizer = self.shape.native.optimizer
        assert optimizer is not None
        values = {k: v for k, v in options.values.items() if k != run.STEP}
        if optimizer.step_in_groups and self.shape.source.steps:
            step = options.values.get(run.STEP, optimizer.step)
            values[run.STEP] = run.whole_step(step if isinstance(step, int | float) else None)
        return {**values, "params": pids}

    def draft(self, root: Mapping[str, object]) -> Draft:
        """The file, laid out; what it holds goes to the holdings."""
        obj, keys = numbered(dict(root))
        values = {keys[k]: raw for k, raw in self.values.items() if k in keys}
        made, arrays = torchfile.draft(
            self.rank.model,
            obj,
            allow=run.ALLOWED,
            archive="model_optim_rng",
            values=values,
            holder=self.rank.folder,
        )
        placed = [(entry, arrays[keys[key]].offset) for entry, key in self.found]
        self.holdings.add(self.rank, self.rank.model, placed)
        return made


# --- random states -------------------------------------------------------------------------------


def _position(rank: RankFile, aim: Goal) -> tuple[int, ...]:
    """Where on the grid of random states the rank that writes a file is."""
    grid = run_rng.rng_grid(aim.topology)
    return (rank.stage, rank.place.tp, rank.place.dp)[: len(grid)]


def _rng(
    native: Run, aim: Goal
) -> tuple[Mapping[tuple[int, ...], Carried], list[Fate], list[Loss]]:
    """The random states: a legacy source of the same ranks has those of the files, not of all."""
    grid = run_rng.rng_grid(aim.topology)
    wanted = [_position(rank, aim) for rank in rank_files(aim.topology)]
    if wanted and run_rng.keeps_rng(native, aim.topology, grid, wanted):
        kept = {p: native.rng[p] for p in wanted}
        return kept, [Fate("rng_state", "keep", "the rank set is the same")], []
    return run_rng.rng_states(native, aim.topology, grid)


# --- what is said of it --------------------------------------------------------------------------


def _state_fates(native: Run, shape: Shape) -> Iterator[Fate]:
    """The fates of the schedule and the optimizer's options."""
    for name in run.KEPT:
        if name in native.common:
            gone = name == "opt_param_scheduler" and not shape.groups
            yield Fate(name, "drop", "weights only") if gone else Fate(name, "keep")
    optimizer = native.optimizer
    if optimizer is None:
        return
    if not shape.groups:
        yield Fate("optimizer", "drop", "weights only")
        return
    for i in range(len(optimizer.groups)):
        same = len(shape.groups) == len(optimizer.groups)
        yield Fate(f"optimizer.param_groups[{i}]", "keep" if same else "remap")
    yield Fate("optimizer.step", "keep")
    if optimizer.scaler is not None:
        yield Fate("optimizer.grad_scaler", "keep")


def _notes(native: Run, shape: Shape) -> Iterator[str]:
    distributed = native.optimizer is not None and native.optimizer.distributed
    if shape.groups and distributed and not shape.foreign:
        yield (
            "the distributed optimizer's state is written per parameter, for a job without "
            "--use-distributed-optimizer"
        )
    yield from run.alike_notes(shape.groups)
    if shape.model.experts_form == LEGACY_GROUPED:
        yield "experts are written as GroupedMLP's weight1 and weight2 (--moe-grouped-gemm)"


def _recipe(native: Run, aim: Goal, shape: Shape, rng_fates: Sequence[Fate]) -> Mapping[str, Json]:
    made = run.recipe(
        native,
        aim.topology,
        shape.groups,
        aim.flags,
        aim.rows,
        aim.rows_before,
        weights_only=not shape.groups,
        rng_kept=any(f.kind == "keep" for f in rng_fates),
        distributed=None,
    )
    made["checkpoint"] = "--ckpt-format torch, without --use-distributed-optimizer"
    return made


def _check_like(options: WriteOptions, drafts: Sequence[Draft], made: Layout) -> None:
    """Raises CoverageError where the files differ from those of a legacy reference."""
    like = options.like
    if like is None or like.format != NAME:
        return
    ours = {draft.name for draft in drafts}
    theirs = {f for f in like.files if f.endswith("model_optim_rng.pt")}
    if ours != theirs:
        odd = sorted(ours ^ theirs)[0]
        raise CoverageError(
            f"{odd}: {'not in' if odd in ours else 'only in'} the reference {like.path}"
        )
    optimizer = isinstance(like.native, Run) and like.native.optimizer
    flat = bool(optimizer and optimizer.distributed)
    for tensor in sorted(like.layout.tensors.keys() | made.tensors.keys()):
        if tensor.slot != PARAM and (flat or options.weights_only or not optimizer):
            continue
        if _stored(made, tensor) != _stored(like.layout, tensor):
            raise CoverageError(
                f"{tensor}: written as {_shown(made, tensor)}, the reference {like.path} has "
                f"{_shown(like.layout, tensor)}"
            )


def _stored(layout: Layout, tensor: TensorId) -> set[tuple[str, tuple[int, ...], str]]:
    """Where and how a tensor is stored: files, shapes, dtypes."""
    if tensor not in layout.tensors:
        return set()
    arrays = (p.array for p in layout.pieces(tensor))
    return {(a.file, a.shape, a.dtype.name) for a in arrays}


def _shown(layout: Layout, tensor: TensorId) -> str:
    found = sorted(_stored(layout, tensor))
    if not found:
        return "nothing"
    file, stored, dtype = found[0]
    return f"{list(stored)} {dtype} in {file} and {len(found) - 1} more"
