"""Cuts for another topology: tensor-parallel shards, pipeline stages, experts on ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod

from reshard.box import row_major
from reshard.errors import LayoutError, UsageError

from . import autotp
from .cuts import Affine, Shard, paired, same
from .names import expert_parts
from .native import Experts, Group, Pipeline
from .values import plain

Shapes = Callable[[str], tuple[int, ...]]  # the logical shape of a tensor by its name


def affine(
    cuts: Mapping[str, Affine], tp: int, unchanged: bool, heads: int | None
) -> dict[str, Affine]:
    """Every parameter's cut over `tp` ranks. Raises LayoutError for one that cannot be cut so.

    `heads` are the model's key-value heads, where they are known.
    """
    if tp == 1 or not cuts:
        return {}
    if unchanged:
        return dict(cuts)
    return {
        n: autotp.cut(n, c.shape, cut_axis(n, c), tp, heads, len(c.shards)) for n, c in cuts.items()
    }


def whole_axis(name: str, cut: Affine) -> int | None:
    """The axis a parameter is cut on, also where each shard holds parts of two tensors."""
    return 0 if is_pair(cut) else cut_axis(name, cut)


def is_pair(cut: Affine) -> bool:
    """Whether a parameter is two tensors, one above the other, and each shard a part of both."""
    shards = [cut.shards[r] for r in sorted(cut.shards)]
    two = len(shards) > 1 and all(len(s.parts) == 2 for s in shards)
    return two and cut == paired([s.shape for s in shards])


def cut_axis(name: str, cut: Affine) -> int | None:
    """The axis a parameter is cut on; None where every rank holds all of it.

    Raises LayoutError for shards of several parts (a fused projection).
    """
    shards = [cut.shards[r] for r in sorted(cut.shards)]
    if all(s.shape == cut.shape for s in shards):
        return None
    if any(len(s.parts) != 1 for s in shards):
        raise LayoutError(
            f"{name}: its shards are of several parts (a fused projection); give --like DIR of the "
            "topology that is wanted"
        )
    axes = {i for s in shards for i, n in enumerate(cut.shape) if s.shape[i] != n}
    if len(axes) != 1:
        raise LayoutError(f"{name}: is cut on axes {sorted(axes)}; only one is re-cut")
    return axes.pop()


def affine_map(cuts: Mapping[str, Affine]) -> dict[str, object]:
    """The affine map of these cuts, as DeepSpeed 0.19.8 writes it."""
    params: dict[str, object] = {}
    for name, cut in cuts.items():
        ranks: dict[int, object] = {}
        for rank, shard in cut.shards.items():
            twins = [r for r, s in cut.shards.items() if s == shard]
            pieces = [
                {
                    "shape": list(p.box.shape),
                    "source": _strided(p.box.start, row_major(cut.shape)),
                    "dest": _strided(p.at, row_major(shard.shape)),
                    "locations": twins,
                }
                for p in shard.parts
            ]
            ranks[rank] = {"shard_shape": list(shard.shape), "pieces": pieces}
        params[f"^{re.escape(name)}$"] = {"logical_shape": list(cut.shape), "ranks": ranks}
    return {"version": 1, "params": params}


def _strided(start: tuple[int, ...], steps: tuple[int, ...]) -> list[object]:
    return [sum(a * s for a, s in zip(start, steps, strict=True)), list(steps)]


def shard_of(cuts: Mapping[str, Affine], name: str, shape: tuple[int, ...], tp: int) -> Shard:
    """One tensor-parallel rank's shard of a tensor."""
    cut = cuts.get(name)
    return same(shape) if cut is None else cut.shards[tp]


# --- pipeline ------------------------------------------------------------------------------------


def stages(pipeline: Pipeline | None, pp: int, split: str | None) -> tuple[frozenset[str], ...]:
    """The optimizer's names by stage: the source's, one stage, or as `split=` counts layers.

    The files do not say how a PipelineModule of another size would cut its layers
    (partition_method), so another count is asked for.
    """
    if pipeline is None:
        if pp > 1:
            raise LayoutError(f"pp={pp}: the source is no PipelineModule, which has layer files")
        if split is not None:
            raise UsageError("split= is for a PipelineModule, which the source is not")
        return (frozenset(),)
    every = frozenset(n for s in pipeline.stages for n in s)
    if pp == 1:
        return (every,)
    if split is None:
        if pp == len(pipeline.stages):
            return pipeline.stages
        raise LayoutError(
            f"pp={pp}: the files do not say how layers are put on {pp} stages. Say how many of the "
            f"{max(pipeline.layers) + 1} layers each has, as split=4-3, or give --like DIR."
        )
    return _split(pipeline, pp, split, every)


def _split(
    pipeline: Pipeline, pp: int, split: str, every: frozenset[str]
) -> tuple[frozenset[str], ...]:
    try:
        counts = [int(n) for n in split.split("-")]
    except ValueError:
        raise UsageError(f"split={split}: counts of layers are expected, as 4-3") from None
    layers = max(pipeline.layers) + 1
    if len(counts) != pp or sum(counts) < layers or min(counts) < 1:
        raise LayoutError(
            f"split={split}: {len(counts)} stages of {sum(counts)} layers; pp={pp} and at least "
            f"{layers} layers (those with files) are needed"
        )
    if any(n.startswith("tied_modules.") for n in every):
        raise LayoutError(
            "split=: the model ties layers, and the files do not say on which stages; give --like"
        )
    ends = [sum(counts[: i + 1]) for i in range(pp)]
    rows: list[set[str]] = [set() for _ in range(pp)]
    for layer, table in pipeline.layers.items():
        stage = next(i for i, end in enumerate(ends) if layer < end)
        rows[stage] |= {n for n in table.values() if n in every}
    return tuple(frozenset(r) for r in rows)


# --- experts -------------------------------------------------------------------------------------


def expert_group(group: Group, before: Experts, after: Experts) -> Group:
    """An expert group's members in the order that ranks of another degree declare them."""
    if group.expert == 1 and not _is_expert(group):
        return group
    paths: dict[str, int] = {}
    rests: dict[tuple[str, str], int] = {}
    for name in group.members:
        parts = expert_parts(name)
        if parts is not None:
            paths.setdefault(parts[0], len(paths))
            rests.setdefault((parts[0], parts[3]), len(rests))

    def key(name: str) -> tuple[int, int, int, int]:
        parts = expert_parts(name)
        if parts is None:
            return (0, 0, 0, 0)
        path, _, number, rest = parts
        rank = number // (before.counts[path] // after.ep)
        return (rank, paths[path], number, rests[path, rest])

    options = group.options
    if options is not None and isinstance(options.get("name"), str):
        # Source: deepspeed/moe/utils.py split_params_into_different_moe_groups_for_optimizer
        options = {**options, "name": f"ep_size_{after.ep}"}
    members = tuple(sorted(group.members, key=key))
    return replace(group, members=members, options=options, expert=after.ep)


def check_expert_groups(groups: Sequence[Group], shapes: Shapes, after: Experts) -> None:
    """Raises LayoutError where ranks of another degree would part experts into other groups.

    Source: deepspeed/moe/utils.py split_params_into_different_moe_groups_for_optimizer @ 0.19.8,
    which starts a new group at max_group_size elements of one rank.
    """
    seen: list[object] = []
    for group in groups:
        if not _is_expert(group):
            continue
        options = plain(group.options)
        local = sum(prod(shapes(n)) for n in group.members) // after.ep
        if options in seen or local > GROUP_SIZE:
            raise LayoutError(
                f"ep={after.ep}: the experts' param group is parted by size (max_group_size), and "
                "where ranks of another expert-parallel degree part it is not known. Keep ep, or "
                "give --like DIR."
            )
        seen.append(options)


def _is_expert(group: Group) -> bool:
    return bool((group.options or {}).get("moe"))


#: max_group_size of a job that does not say. Source: deepspeed/moe/utils.py @ 0.19.8.
GROUP_SIZE = 178_956_971


# --- Muon ----------------------------------------------------------------------------------------

MOMENTUM = "momentum_buffer"


def is_muon(group: Group) -> bool:
    """Whether Muon's own rule moves a group's members; others of its groups are Adam's."""
    return bool((group.options or {}).get("use_muon")) and MOMENTUM in group.states


def muon_group(group: Group, stage: int, shapes: Shapes) -> Group:
    """A Muon group as a ZeRO stage keeps it.

    Below ZeRO 3 the optimizer lists its matrices by falling shape, and keeps their momentum whole.
    Source: runtime/zero/muon/original_muon.py MuonWithAuxAdam, stage_1_and_2.py
    _muon_momentum_buffer, stage3.py _create_momentum_buffer @ 0.19.8.
    """
    if not is_muon(group):
        return group
    if stage == 3:
        return replace(group, whole=frozenset())
    members = tuple(sorted(group.members, key=shapes, reverse=True))
    return replace(group, members=members, whole=frozenset({MOMENTUM}))
