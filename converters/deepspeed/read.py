"""Reads a tag folder: every rank's files joined into one checkpoint."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path

from reshard.checkpoint import Checkpoint, Json, ParamGroup
from reshard.containers.carried import Carried, carry
from reshard.errors import CorruptError, FormatError
from reshard.format import OpenOptions
from reshard.layout import Layout, StoredArray
from reshard.tensor import MASTER, STEP, TensorId
from reshard.topology import Topology

from . import flat
from .flat import FlatGroup
from .folder import tag_files
from .grid import Grid, read_grid
from .join import merged, set_stages
from .model_read import OWN, ModelFile
from .names import Names, names_of, vocabulary_of
from .native import Group, Model, Native
from .optim_read import RankState
from .pipeline import read_layers
from .plain_read import plain_groups, settings_of
from .table import FlatHolder, FragmentHolder, MatrixHolder, Table, WholeHolder, add_state
from .values import plain, strange_names

NAME = "deepspeed"
NAMING = "torch"


def open_native(folder: Path, options: OpenOptions) -> Checkpoint:
    """Read a tag folder's headers."""
    return read_native(folder, options)[0]


def read_native(folder: Path, options: OpenOptions, under: str = "") -> tuple[Checkpoint, Table]:
    """The checkpoint in the tag folder `under` a folder, and the table its layout is made from.

    Raises FormatError for a form that is refused by name, CorruptError for files that are missing,
    of another save, or contradict themselves.
    """
    files = tag_files(folder, under)
    grid = read_grid(files, options)
    names = names_of(grid)
    if files.layers or files.layers_tp:
        read_layers(grid, names)
    table = Table()
    if grid.stage == 0 and not grid.ranks:
        groups, form = plain_groups(table, grid, names)
        grid = replace(grid, form=form)
    else:
        groups = zero_groups(table, grid, names)
    model = module_tensors(table, grid, names, groups)
    native = native_run(grid, names, groups, model)
    steps = {n: g.numbers[STEP] for g in groups for n in g.members if STEP in g.numbers}
    steps |= names.steps
    checkpoint = Checkpoint(
        path=folder,
        format=NAME,
        version=f"DeepSpeed {native.version or 'of unknown version'}, {form_text(native)}",
        topology=topology_of(grid, names),
        layout=Layout(table.tensors, table.pieces, NAMING),
        files=files.names,
        groups=tuple(
            ParamGroup({k: plain(v) for k, v in (g.options or {}).items()}, g.members)
            for g in groups
        )
        or None,
        steps=steps,
        iteration=grid.first.steps,
        extras=extras_of(grid, native),
        problems=tuple(names.problems),
        optimizer_left=options.weights_only and _has_optimizer(grid),
        kinds={n: k for n, k in names.kinds.items() if TensorId(n) not in table.tensors},
        native=native,
    )
    return checkpoint, table


def _has_optimizer(grid: Grid) -> bool:
    files = grid.files
    within = any(model.top.get("optimizer") is not None for model in grid.models)
    return bool(files.optim or files.expert_optim) or within


def form_text(native: Native) -> str:
    """The optimizer's form, in words."""
    if native.stage == 0:
        kinds = {"bf16": "BF16_Optimizer", "unfused": "FP16_UnfusedOptimizer"}
        return {**kinds, "fused": "FP16_Optimizer"}.get(native.form, "no ZeRO")
    said = f"ZeRO-{native.stage}"
    if native.form == "bf16":
        said += " (BF16_Optimizer)"
    return said + (", elastic" if native.elastic else "")


def topology_of(grid: Grid, names: Names) -> Topology:
    """The degrees, as the files say."""
    return Topology(
        tp=grid.tp, pp=grid.pp, ep=names.experts.ep if names.experts else 1, dp=grid.dp,
        zero=grid.stage,
    )  # fmt: skip


# --- the optimizer's tensors ---------------------------------------------------------------------


def zero_groups(table: Table, grid: Grid, names: Names) -> tuple[Group, ...]:
    """Masters, moments and other states of ZeRO 1, 2, 3 and BF16_Optimizer.

    None where weights alone are asked for, which the module's files have.
    """
    if not grid.ranks:
        return ()
    per_mp: list[list[Group]] = []
    for mp, ranks in enumerate(grid.ranks):
        model = grid.models[mp]
        if model.shapes is None:
            raise CorruptError(f"{model.name}: has no param_shapes, but optimizer files lie beside")
        if len(model.shapes) != len(ranks[0].states):
            raise CorruptError(
                f"{model.name}: shapes of {len(model.shapes)} groups, {ranks[0].file} holds "
                f"{len(ranks[0].states)}: the files are of different saves"
            )
        made = []
        for i, shapes in enumerate(model.shapes):
            if grid.stage == 3:
                made.append(_sub_group(table, grid, names, mp, i, dict(shapes)))
            else:
                made.append(_flat_group(table, grid, names, mp, i, dict(shapes)))
        per_mp.append(_joined(ranks[0], made))
    set_stages(grid, names, per_mp)
    return merged(per_mp)


def _joined(rank: RankState, made: list[Group]) -> list[Group]:
    """Sub-groups put together as param groups, with their options."""
    out = []
    for k, ids in enumerate(rank.subgroups):
        parts = [made[i] for i in ids]
        first = parts[0] if parts else Group(None, ())
        if any(p.numbers != first.numbers for p in parts):
            raise CorruptError(f"{rank.file}: sub-groups of group {k} count steps differently")
        out.append(
            Group(
                rank.options[k] if rank.options is not None else None,
                tuple(n for p in parts for n in p.members),
                first.states,
                first.whole,
                first.numbers,
                first.step_tensor,
                first.expert,
            )
        )
    return out


def _sub_group(
    table: Table, grid: Grid, names: Names, mp: int, i: int, shapes: dict[str, tuple[int, ...]]
) -> Group:
    ranks = grid.ranks[mp]
    states = [r.states[i] for r in ranks]
    if ranks[0].counts[i] != len(ranks):
        raise FormatError(
            f"{ranks[0].file}: sub-group {i} is cut over {ranks[0].counts[i]} ranks of "
            f"{len(ranks)} (MiCS or AutoEP partition groups), which is not read"
        )
    space = flat.sub_group(shapes, len(ranks))
    for rank in ranks:
        for slot, array in rank.states[i].tensors.items():
            if array.shape != (space.size,):
                raise CorruptError(
                    f"{rank.file}: sub-group {i}: {slot} has {array.numel} elements, its "
                    f"parameters need {space.size} on each of {len(ranks)} ranks"
                )
    members = []
    for name in shapes:
        spot = names.place(name, shapes[name], mp, 0)
        members.append(spot.name)
        for slot in states[0].tensors:
            arrays = [s.tensors[slot] for s in states]
            holder = FlatHolder(spot.shard, space, name, arrays)
            add_state(
                table,
                names.kind(spot.name),
                spot.name,
                slot,
                spot.shape,
                arrays[0].dtype,
                holder,
                ranks[0].file,
            )
    return Group(
        None, tuple(members), tuple(s for s in states[0].tensors if s != MASTER), frozenset(),
        states[0].numbers, states[0].step_tensor,
    )  # fmt: skip


def _flat_group(
    table: Table, grid: Grid, names: Names, mp: int, i: int, shapes: dict[str, tuple[int, ...]]
) -> Group:
    every = grid.ranks[mp]
    count = every[0].counts[i]
    ep = len(every) // count if count else 0
    if count == 0 or ep * count != len(every):
        raise CorruptError(
            f"{every[0].file}: group {i} has {count} partitions on {len(every)} ranks"
        )
    moe = bool((every[0].options or ({},) * (i + 1))[i].get("moe"))
    if ep > 1 and not moe:
        raise FormatError(
            f"{every[0].file}: group {i} has {count} partitions on {len(every)} ranks and is no "
            "expert group; this partitioning is not read"
        )
    members: list[str] = []
    states: tuple[str, ...] = ()
    matrices: set[str] = set()
    for e in range(ep):
        ranks = every[e::ep]  # expert-parallel ranks are neighbours
        space = _space(grid, mp, i, shapes, ranks)
        states = tuple(s for s in ranks[0].states[i].tensors if s != MASTER)
        for slot in ranks[0].states[i].tensors:
            arrays = [r.states[i].tensors[slot] for r in ranks]
            form = _state_form(space, arrays, i, slot)
            if form is MatrixHolder:
                matrices.add(slot)
            for name, shape in shapes.items():
                spot = names.place(name, shape, mp, e if moe else None)
                holder = form(spot.shard, space, name, arrays)
                kind, dtype = names.kind(spot.name), arrays[0].dtype
                add_state(table, kind, spot.name, slot, spot.shape, dtype, holder, ranks[0].file)
        members += [names.place(n, s, mp, e if moe else None).name for n, s in shapes.items()]
    first = every[0].states[i]
    if grid.round_robin and not moe:
        members = flat.declared(members, count)
    return Group(
        None, tuple(members), states, frozenset(matrices), first.numbers, first.step_tensor,
        ep if moe else 1,
    )  # fmt: skip


def _state_form(
    space: FlatGroup, arrays: Sequence[StoredArray], i: int, slot: str
) -> type[FlatHolder] | type[MatrixHolder]:
    """How one state of a group is stored: by partitions, or (Muon) as whole matrices."""

    def fits(size: Callable[[int], int]) -> bool:
        return all(a.shape == (size(k),) for k, a in enumerate(arrays))

    if all(a.shape in ((space.size,), (space.valid(k),)) for k, a in enumerate(arrays)):
        return FlatHolder
    if fits(lambda k: flat.whole_size(space, k)):
        return MatrixHolder
    sizes = [list(a.shape) for a in arrays[:4]]
    raise FormatError(
        f"{arrays[0].file}: group {i}: state {slot!r} has shapes {sizes} on the ranks, partitions "
        f"have {space.size} elements: a layout that is not read"
    )


def _space(
    grid: Grid, mp: int, i: int, shapes: dict[str, tuple[int, ...]], ranks: Sequence[RankState]
) -> FlatGroup:
    """The flat space of a group. Raises CorruptError unless every recorded length fits it."""
    pads = ranks[0].aligned[i] if ranks[0].aligned is not None else None
    if pads is not None and len(pads) != len(shapes):
        raise CorruptError(
            f"{ranks[0].file}: group {i}: paddings of {len(pads)} parameters, "
            f"{grid.models[mp].name} lists {len(shapes)}"
        )
    for alignment in (flat.ALIGNMENT, 1):
        space = flat.flat_group(shapes, len(ranks), pads, alignment)
        if all(
            r.states[i].tensors[MASTER].numel in (space.size, space.valid(k))
            for k, r in enumerate(ranks)
        ):
            break
    else:
        space = flat.flat_group(shapes, len(ranks), pads)
        bad = next(
            (r, r.states[i].tensors[MASTER].numel)
            for k, r in enumerate(ranks)
            if r.states[i].tensors[MASTER].numel not in (space.size, space.valid(k))
        )
        raise CorruptError(
            f"{bad[0].file}: group {i}: {bad[1]} elements of fp32 weights, the parameters of "
            f"{grid.models[mp].name} over {len(ranks)} ranks need {space.size}: the files are of "
            "different saves"
        )
    _check_views(grid.models[mp], space, i)
    return space


def _check_views(model: ModelFile, space: FlatGroup, i: int) -> None:
    """The module's tensors are views of the flat buffer: their offsets show the flat order."""
    held = model.module or {}
    views = {n: held[n].storage for n in space.members if n in held and held[n].view}
    if len(views) < len(space.members) or len({key for key, _ in views.values()}) != 1:
        return  # cloned, or on several buffers
    for name, (_, offset) in views.items():
        if offset != space.members[name].offset:
            raise CorruptError(
                f"{model.name}: {name} begins at element {offset} of the flat weights of group "
                f"{i}, and param_shapes puts it at {space.members[name].offset}: not in order"
            )


# --- the module's tensors ------------------------------------------------------------------------


def module_tensors(table: Table, grid: Grid, names: Names, groups: Sequence[Group]) -> Model:
    """Weights, buffers and frozen parameters as the module files hold them."""
    trained = {n for g in groups for n in g.members}
    frozen: dict[str, None] = {}
    buffers: dict[str, None] = {}
    aliases: dict[str, str] = dict(names.aliases)
    for mp, model in enumerate(grid.models):
        own_buffers = set(model.buffers)
        for name, held in (model.module or {}).items():
            if name in names.aliases:
                continue
            spot = names.place(name, held.array.shape, mp, None)
            holder = WholeHolder(spot.shard, held.array)
            table.add(TensorId(spot.name), spot.shape, held.array.dtype, holder, model.name)
            if name in own_buffers:
                buffers[spot.name] = None
            elif spot.name not in trained:
                frozen[spot.name] = None
        _fragments(table, grid, names, mp, frozen)
    for spot_, held_, where in names.files:
        table.add(TensorId(spot_.name), spot_.shape, held_.array.dtype,
                  WholeHolder(spot_.shard, held_.array), where)  # fmt: skip
        if spot_.name not in trained and spot_.name not in buffers:
            frozen[spot_.name] = None
    kinds = {n: k.name for n, k in names.kinds.items()}
    return Model(names.order, tuple(buffers), tuple(frozen), aliases, kinds, names.prefix)


def _fragments(table: Table, grid: Grid, names: Names, mp: int, frozen: dict[str, None]) -> None:
    model = grid.models[mp]
    for name, shape in (model.frozen or {}).items() if grid.stage == 3 else ():
        arrays: list[StoredArray | None] = []
        for dp, fragments in enumerate(grid.fragments[mp]):
            found = fragments.get(name)
            if found is None or found.numel != flat.share(prod(shape), grid.dp):
                raise CorruptError(
                    f"{grid.files.model3[mp, dp]}: the fragment of frozen {name} "
                    + ("is missing" if found is None else f"has {found.numel} elements")
                    + f"; shape {list(shape)} over {grid.dp} ranks"
                )
            arrays.append(found)
        spot = names.place(name, shape, mp, None)
        dtype = model.fragments[name].dtype
        table.add(TensorId(spot.name), spot.shape, dtype, FragmentHolder(spot.shard, arrays),
                  model.name)  # fmt: skip
        frozen[spot.name] = None
    for dp, held in enumerate(grid.replicas[mp]) if grid.stage == 3 else ():
        for name, array in held.items():
            spot = names.place(name, array.shape, mp, None)
            where = grid.files.model3[mp, dp + 1]
            table.add(TensorId(spot.name), spot.shape, array.dtype,
                      WholeHolder(spot.shard, array), where)  # fmt: skip


# --- what is not a tensor ------------------------------------------------------------------------

_DS_OWN = (
    "lr_scheduler", "data_sampler", "random_ltd", "skipped_steps", "global_steps",
    "global_samples", "ds_version", "num_experts", "ds_autoep_layers", "sparse_tensor_module_names",
)  # fmt: skip


def native_run(
    grid: Grid,
    names: Names,
    groups: tuple[Group, ...],
    model: Model,
    settings: Carried | None = None,
) -> Native:
    """What the writers of this package use."""
    first = grid.first
    client = {k: v for k, v in first.top.items() if k not in OWN}
    refused = tuple(str(k) for k, v in client.items() if strange_names(v))
    client = {k: v for k, v in client.items() if str(k) not in refused}
    own = {k: first.top[k] for k in _DS_OWN if k in first.top}
    rank = grid.ranks[0][0] if grid.ranks else None
    return Native(
        stage=grid.stage,
        form=grid.form,
        groups=groups,
        model=model,
        settings=settings or (rank.settings if rank else plain_settings(grid)),
        top=carry(first.file, own, "own/"),
        client=carry(first.file, client, "client/"),
        config=first.config,
        version=str(first.top.get("ds_version") or (rank.version if rank else "")),
        dp=grid.dp,
        round_robin=grid.round_robin,
        aligned=any(any(row) for row in (rank.aligned or ()) if row) if rank else False,
        elastic=rank.elastic if rank else False,
        pipeline=names.pipeline,
        experts=names.experts,
        affine=names.affine,
        vocabulary=vocabulary_of(grid),
        sub_group_size=_limit(first.zero_config.get("sub_group_size")),
        tag=grid.files.place.name,
        refused=refused,
        unread=rank.unread if rank else (),
    )


def _limit(found: object) -> int | None:
    """sub_group_size as configs spell it: 1e9, 1000000000, or "auto"."""
    return int(found) if isinstance(found, (int, float)) and found >= 1 else None


def extras_of(grid: Grid, native: Native) -> dict[str, Json]:
    """Everything that is neither tensor, group nor step, by dotted path."""
    out: dict[str, Json] = {}
    for part, carried in (("", native.top), ("client.", native.client)):
        assert isinstance(carried.obj, dict)
        for key, value in carried.obj.items():
            if value is not None:
                out[f"{part}{key}"] = _brief(plain(value))
    for key in native.refused:
        out[f"client.{key}"] = f"names {', '.join(strange_names(grid.first.top[key]))}; not carried"
    for key in native.unread:
        out[f"optimizer.{key}"] = "not DeepSpeed's own; not carried"
    settings = native.settings.obj
    for key, value in settings.items() if isinstance(settings, Mapping) else ():
        out[f"optimizer.{key}"] = plain(value)
    out["ds_config"] = plain(native.config)
    if native.model.aliases:
        out["ties"] = dict(native.model.aliases)
    return out


def _brief(value: Json) -> Json:
    """A long list (an RNG state) named by its length and digest, so that extras stay small."""
    if isinstance(value, list) and len(value) > 64:
        return f"list of {len(value)}, digest {digest(value)}"
    if isinstance(value, list):
        return [_brief(v) for v in value]
    if isinstance(value, dict):
        return {k: _brief(v) for k, v in value.items()}
    return value


def digest(value: Json) -> str:
    """Sixteen hex digits that tell equal values from others."""
    return hashlib.blake2b(json.dumps(value, default=str).encode(), digest_size=8).hexdigest()


def plain_settings(grid: Grid) -> Carried:
    """The loss scaler's settings of ZeRO 0."""
    return Carried(settings_of(grid))
