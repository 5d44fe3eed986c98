"""The global name and the shard of each tensor of a rank: tensor parallel, pipeline, experts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from reshard.dtypes import DType
from reshard.errors import CorruptError, FormatError

from .cuts import Affine, Shard, affine, joined, paired, same
from .grid import Grid
from .model_read import Held, ModelFile, layer_tensors
from .native import Experts, Pipeline
from .values import mapping, sequence, texts, whole

#: An expert's parameter: module path, expert, the rest.
#: Source: deepspeed/moe/experts.py, layer.py @ 0.19.8; fixtures moe_*.
_EXPERT = re.compile(r"(.*?\.?)(deepspeed_moe\.experts\.deepspeed_experts)\.(\d+)\.(.+)")


@dataclass(frozen=True, slots=True)
class Spot:
    """The logical tensor that a rank's tensor is (a part of)."""

    name: str
    shape: tuple[int, ...]
    shard: Shard


@dataclass
class Names:
    """How local names and shapes become logical ones; what only names show.

    `files` are tensors of layer and expert files. `steps` are set where they differ by tensor.
    """

    prefix: str = ""
    affine: Mapping[str, Affine] = field(default_factory=dict)
    experts: Experts | None = None
    local_experts: Mapping[str, int] = field(default_factory=dict)  # module path -> on one rank
    pipeline: Pipeline | None = None
    aliases: dict[str, str] = field(default_factory=dict)
    kinds: dict[str, DType] = field(default_factory=dict)
    order: tuple[str, ...] = ()
    files: list[tuple[Spot, Held, str]] = field(default_factory=list)
    steps: dict[str, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    tp: int = 1

    def place(self, name: str, shape: tuple[int, ...], mp: int, ep: int | None) -> Spot:
        """The logical tensor of a local one on model-parallel rank `mp`.

        `ep` is the expert-parallel rank, for parameters of expert groups.
        """
        if self.prefix:
            name = name.removeprefix(self.prefix)
        if ep is not None:
            name = self.expert_name(name, ep)
        tp = mp % self.tp
        cut = self.affine.get(name)
        if cut is None:
            return Spot(name, tuple(shape), same(shape))
        shard = cut.shards.get(tp)
        if shard is None or shard.shape != tuple(shape):
            raise CorruptError(
                f"{name}: shape {list(shape)} on tensor-parallel rank {tp}, its affine map says "
                f"{list(shard.shape) if shard else 'nothing'}"
            )
        return Spot(name, cut.shape, shard)

    def expert_name(self, name: str, ep: int) -> str:
        """The name with the expert's global number."""
        found = _EXPERT.fullmatch(name)
        if found is None or found[1] not in self.local_experts:
            return name
        number = ep * self.local_experts[found[1]] + int(found[3])
        return f"{found[1]}{found[2]}.{number}.{found[4]}"

    def kind(self, name: str) -> DType | None:
        """The dtype of a weight in the module, where the files show it."""
        return self.kinds.get(name)


def expert_parts(name: str) -> tuple[str, str, int, str] | None:
    """(module path, middle, number, rest) of an expert's parameter, or None."""
    found = _EXPERT.fullmatch(name)
    return None if found is None else (found[1], found[2], int(found[3]), found[4])


def names_of(grid: Grid) -> Names:
    """Everything that names and small tables of the files show."""
    names = Names(tp=grid.tp)
    names.prefix = _prefix(grid)
    names.affine = _affine_maps(grid)
    names.aliases = _aliases(grid, names.prefix)
    if grid.files.layers_tp and grid.tp > 1 and not grid.ranks:
        raise FormatError(
            f"{grid.files.folder}: a pipeline with a tensor axis and no optimizer files: which "
            "parameters its optimizer holds is not told. Convert with --weights-only."
            if not grid.weights_only
            else f"{grid.files.folder}: layer files of a tensor axis without param_shapes"
        )
    _experts(grid, names)
    for model in grid.models:
        for name, held in (model.module or {}).items():
            names.kinds.setdefault(name.removeprefix(names.prefix), held.array.dtype)
        for name, kind in model.placeholders.items():
            names.kinds.setdefault(name.removeprefix(names.prefix), kind)
    first = grid.first
    if not names.order:
        names.order = tuple(n.removeprefix(names.prefix) for n in first.order)
    return names


def _prefix(grid: Grid) -> str:
    """`module.` where every name of the files begins with it."""
    every = [n for m in grid.models for n in m.order]
    every += [n for m in grid.models for s in m.shapes or () for n in s]
    return "module." if every and all(n.startswith("module.") for n in every) else ""


def _aliases(grid: Grid, prefix: str) -> dict[str, str]:
    """Tied names: alias -> the name that has the optimizer's state.

    DeepSpeed records them (ZeRO), else two names of one storage are tied.
    """
    out: dict[str, str] = {}
    for model in grid.models:
        shared = dict(model.shared)
        trained = {n for s in model.shapes or () for n in s}
        seen: dict[object, str] = {}
        for name, held in (model.module or {}).items():
            key = (held.storage, held.array.shape, held.array.dtype)
            owner = seen.setdefault(key, name)
            if owner != name and held.array.numel and name not in trained:
                shared.setdefault(name, owner)
        for alias, owner in shared.items():
            owner = shared.get(owner, owner)
            out[alias.removeprefix(prefix)] = owner.removeprefix(prefix)
    return out


def _affine_maps(grid: Grid) -> dict[str, Affine]:
    """Every parameter's cut over tensor-parallel ranks."""
    if grid.tp == 1:
        return {}
    info = grid.first.top.get("universal_checkpoint_info")
    if not isinstance(info, Mapping):
        raise FormatError(
            f"{grid.first.name}: tensor parallel over {grid.tp} ranks, but no "
            "universal_checkpoint_info says how tensors are cut; it cannot be read"
        )
    maps = info.get("affine_map")
    if not isinstance(maps, Mapping):
        return _by_patterns(grid, info)
    out: dict[str, Affine] = {}
    for pattern, found in mapping(maps.get("params"), "affine_map").items():
        out[_literal(str(pattern))] = affine(found, str(pattern))
    return out


def _literal(pattern: str) -> str:
    r"""The name that `^re\.escape\(name\)$` matches. Raises FormatError for any other pattern."""
    name = re.sub(r"\\(.)", r"\1", pattern.removeprefix("^").removesuffix("$"))
    if f"^{re.escape(name)}$" != pattern:
        raise FormatError(f"affine map: {pattern!r} is not the pattern of one name")
    return name


def vocabulary_of(grid: Grid) -> frozenset[str]:
    """The parameters that AutoTP cuts along the vocabulary."""
    info = grid.first.top.get("universal_checkpoint_info")
    if grid.tp == 1 or not isinstance(info, Mapping):
        return frozenset()
    patterns = list(texts(info.get("vocabulary_parameter_patterns")))
    every = {n for m in grid.models for s in m.shapes or () for n in s}
    return frozenset(n for n in every if any(re.match(p, n) for p in patterns))


def _by_patterns(grid: Grid, info: Mapping[object, object]) -> dict[str, Affine]:
    """Cuts as the older tables of patterns give them: rows, columns, or replicated.

    Source: checkpoint/ds_to_universal.py merge_tp_slices @ 0.19.8.
    """
    for key in ("parameter_with_sub_params", "parameter_to_average_patterns",
                "expert_parameter_patterns"):  # fmt: skip
        if info.get(key):
            raise FormatError(f"{grid.first.name}: {key} cuts tensors in a way that is not read")
    rows = list(texts(info.get("parameter_with_row_parallelism_patterns")))
    same_ = list(texts(info.get("tp_replicated_parameter_patterns")))
    halves = list(texts(info.get("parameter_with_2_sub_params_cat_dim_0")))
    shapes: dict[str, dict[int, tuple[int, ...]]] = {}
    for mp, model in enumerate(grid.models):
        for row in model.shapes or ():
            for name, shape in row.items():
                shapes.setdefault(name, {})[mp % grid.tp] = shape
    out: dict[str, Affine] = {}
    for name, by_rank in shapes.items():
        local = [by_rank[r] for r in sorted(by_rank)]
        if len(local) != grid.tp:
            raise CorruptError(f"{name}: is on {len(local)} of {grid.tp} tensor-parallel ranks")
        if any(re.match(p, name) for p in same_):
            out[name] = Affine(local[0], {r: same(local[0]) for r in range(grid.tp)})
        elif any(re.match(p, name) for p in halves):
            out[name] = paired(local)
        else:
            out[name] = joined(local, 1 if any(re.match(p, name) for p in rows) else 0)
    return out


# --- experts -------------------------------------------------------------------------------------


def _experts(grid: Grid, names: Names) -> None:
    """The experts of each MoE layer: how many there are, how many a rank holds, their files."""
    if not grid.files.experts:
        return
    if grid.first.top.get("ds_autoep_layers") or grid.first.top.get("autoep_layers"):
        raise FormatError(f"{grid.first.name}: AutoEP experts, which are not read yet")
    if grid.stage == 3:
        raise FormatError(f"{grid.files.folder}: DeepSpeed-MoE under ZeRO 3 is not read")
    counts: dict[str, int] = {}
    held: dict[tuple[str, int], list[tuple[str, Held, str]]] = {}
    for (_, expert, mp), file in sorted(grid.files.experts.items()):
        _, tensors = layer_tensors(grid.files.folder, file)
        for name, tensor in tensors.items():
            found = expert_parts(name)
            if found is None or found[2] != expert:
                raise CorruptError(f"{file}: holds {name}, which is no parameter of its expert")
            counts[found[0]] = max(counts.get(found[0], 0), expert + 1)
            held.setdefault((found[0], expert), []).append((name, tensor, file))
            spot = names.place(name, tensor.array.shape, mp, None)
            names.files.append((spot, tensor, file))
            names.kinds.setdefault(spot.name, tensor.array.dtype)
    _all_experts(grid, counts, held)
    local: dict[str, set[int]] = {}
    for row in _expert_shapes(grid):
        found = expert_parts(row)
        if found is not None:
            local.setdefault(found[0], set()).add(found[2])
    ep = _expert_ranks(grid, counts, local)
    names.local_experts = {path: n // ep for path, n in counts.items()}
    names.experts = Experts(counts, ep)


def _all_experts(
    grid: Grid, counts: Mapping[str, int], held: Mapping[tuple[str, int], object]
) -> None:
    said = grid.first.top.get("num_experts")
    if isinstance(said, (list, tuple)):
        numbers = sorted(whole(n, "num_experts") for n in sequence(said, "num_experts"))
        if numbers != sorted(counts.values()):
            raise CorruptError(
                f"{grid.files.folder}: experts of {len(counts)} layers are there, in numbers "
                f"{sorted(counts.values())}; {grid.first.name} says {numbers}. A file "
                "layer_*_expert_*_model_states.pt is missing or left over."
            )
    for path, n in counts.items():
        for expert in range(n):
            if (path, expert) not in held:
                raise CorruptError(
                    f"{grid.files.folder}: the file of expert {expert} of {path} is missing "
                    "(layer_*_expert_*_model_states.pt)"
                )


def _expert_shapes(grid: Grid) -> list[str]:
    return [n for m in grid.models for s in m.shapes or () for n in s]


def _expert_ranks(grid: Grid, counts: Mapping[str, int], local: Mapping[str, set[int]]) -> int:
    """Expert-parallel ranks: global experts over those that one rank's optimizer names."""
    degrees = {counts[p] // len(ids) for p, ids in local.items() if p in counts}
    if not degrees and grid.files.expert_optim:
        degrees = {max(e for _, e in grid.files.expert_optim) + 1}
    elif not degrees and not grid.ranks:
        return 1  # weights alone, which are the same at any degree
    if len(degrees) != 1:
        raise FormatError(
            f"{grid.files.folder}: MoE layers with different expert-parallel degrees "
            f"{sorted(degrees)}, which are not read"
        )
    return degrees.pop()


def model_names(model: ModelFile) -> list[str]:
    """Names of the module's weights in order: no buffers."""
    own = set(model.buffers)
    return [n for n in model.order if n not in own]
