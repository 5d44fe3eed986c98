"""Every rank's files of a tag folder, parsed and compared: of one save, and none missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from reshard.containers.carried import Carried
from reshard.errors import CorruptError, FormatError
from reshard.format import OpenOptions
from reshard.layout import StoredArray

from .folder import TagFiles
from .model_read import ModelFile, read_model
from .optim_read import RankState, check_alike, read_rank
from .slices import with_shapes
from .values import whole


@dataclass(frozen=True)
class Grid:
    """The files by model-parallel rank, then by data-parallel rank.

    `models` are those of data-parallel rank 0. Under ZeRO 3 `fragments[mp][dp]` are the frozen
    parameters' fragments and `replicas[mp]` the whole tensors that dp ranks 1, 2, … also hold.
    `form` is "zero", "bf16" (BF16_Optimizer), or of ZeRO 0 "plain", "unfused", "fused".
    """

    files: TagFiles
    stage: int
    form: str
    tp: int
    pp: int
    dp: int
    models: tuple[ModelFile, ...]
    ranks: tuple[tuple[RankState, ...], ...]
    fragments: tuple[tuple[Mapping[str, StoredArray], ...], ...] = ()
    replicas: tuple[tuple[Mapping[str, StoredArray], ...], ...] = ()
    round_robin: bool = False
    weights_only: bool = False
    settings: Carried = field(default_factory=lambda: Carried({}))

    @property
    def first(self) -> ModelFile:
        """The model states of the first rank."""
        return self.models[0]


def read_grid(files: TagFiles, options: OpenOptions) -> Grid:
    """Parse a tag folder's files.

    Raises CorruptError naming a file that is missing, left over, or of another save; FormatError
    for a form that is refused by name.
    """
    folder = files.place
    zero3 = _is_zero3(files)
    _no_offload(folder)
    if not files.model and not files.model3:
        raise CorruptError(
            f"{folder}: no model-states file (mp_rank_00_model_states.pt, or under ZeRO 3 "
            "zero_pp_rank_0_mp_rank_00_model_states.pt) is there; the checkpoint is incomplete"
        )
    models = model_files(files, zero3)
    first = models[0]
    fragments, replicas = replicas_of(files, models) if zero3 else ((), ())
    ranks = () if options.weights_only and not zero3 else _ranks(files, first)
    tp, pp = degrees_of(files, first)
    if ranks and ranks[0][0].stage is None and first.shapes is None:
        models = with_shapes(files, models, ranks)
        first = models[0]
    config_stage = first.zero_config.get("stage", 0)
    stage = ranks[0][0].stage if ranks else None
    form = "zero"
    if ranks and stage is None:
        form, stage = "bf16", whole(config_stage, f"{first.name}: zero stage")
    if stage is None:
        stage = 3 if zero3 else (whole(config_stage, first.name) if options.weights_only else 0)
        form = "plain" if stage == 0 else "zero"
    check_given(options, {"tp": tp, "pp": pp, "dp": first.dp, "zero": stage})
    return Grid(
        files, stage, form, tp, pp, first.dp, models, ranks, fragments, replicas,
        round_robin=bool(first.zero_config.get("round_robin_gradients")) and stage in (1, 2),
        weights_only=options.weights_only,
    )  # fmt: skip


def _is_zero3(files: TagFiles) -> bool:
    if files.model and files.model3:
        a, b = next(iter(files.model.values())), next(iter(files.model3.values()))
        raise CorruptError(
            f"{files.folder}: {a} is of ZeRO 0 to 2 and {b} of ZeRO 3: two saves in one folder. "
            "Remove the files of the older one."
        )
    if len(files.prefixes) > 1:
        a_, b_ = sorted(files.prefixes)[:2]
        raise CorruptError(
            f"{files.folder}: optimizer files begin with {a_ or 'zero_'!r} and {b_!r}: two saves "
            "in one folder. Remove the files of the older one."
        )
    return bool(files.model3)


def _no_offload(folder: Path) -> None:
    if (folder / "offloaded_tensors").is_dir():
        raise FormatError(
            f"{folder / 'offloaded_tensors'}: the optimizer was offloaded to NVMe, and its state "
            "lies in raw swap files, which are not read. Save once with offload_optimizer device "
            "cpu or none."
        )


def model_files(files: TagFiles, zero3: bool) -> tuple[ModelFile, ...]:
    table = {mp: n for (mp, dp), n in files.model3.items() if dp == 0} if zero3 else files.model
    name = "zero_pp_rank_0_mp_rank_{:02d}_model_states.pt" if zero3 else _MODEL
    if 0 not in table:
        raise CorruptError(f"{files.place / name.format(0)}: is missing")
    first = read_model(files.folder, table[0])
    if first.dp == 0 or first.mp == 0:
        raise CorruptError(f"{first.name}: says dp_world_size {first.dp}, mp_world_size {first.mp}")
    _check_ranks(files, sorted(table), first.mp, name, "mp_world_size", first.name)
    models = [first]
    for mp in range(1, first.mp):
        other = read_model(files.folder, table[mp])
        _check_save(first, other)
        models.append(other)
    return tuple(models)


_MODEL = "mp_rank_{:02d}_model_states.pt"


def _check_ranks(
    files: TagFiles, found: Sequence[int], size: int, pattern: str, field_: str, says: str
) -> None:
    """Raises CorruptError naming a rank's file that is missing or too many."""
    there = set(found)
    missing = [r for r in range(size) if r not in there]
    if missing:
        raise CorruptError(
            f"{files.place / pattern.format(missing[0])}: is missing ({len(missing)} of {size} "
            f"ranks' files are; {says} says {field_} {size}). Copy the checkpoint again."
        )
    extra = [r for r in found if r >= size]
    if extra:
        raise CorruptError(
            f"{files.place / pattern.format(extra[0])}: is a file of rank {extra[0]}, and {says} "
            f"says {field_} {size}: it is left from another save. Remove it."
        )


def _check_save(first: ModelFile, other: ModelFile) -> None:
    for what, a, b in (
        ("global_steps", first.steps, other.steps),
        ("dp_world_size", first.dp, other.dp),
        ("mp_world_size", first.mp, other.mp),
        ("ds_version", first.top.get("ds_version"), other.top.get("ds_version")),
    ):
        if a != b:
            raise CorruptError(
                f"{other.name}: {what} {b}, in {first.name} {a}: the files are of different saves. "
                "Copy the checkpoint again, or remove files left by an older run."
            )


def replicas_of(
    files: TagFiles, models: Sequence[ModelFile]
) -> tuple[
    tuple[tuple[Mapping[str, StoredArray], ...], ...],
    tuple[tuple[Mapping[str, StoredArray], ...], ...],
]:
    """What the other data-parallel ranks' model files hold under ZeRO 3; their trees are let go."""
    first = models[0]
    fragments, replicas = [], []
    for mp, model in enumerate(models):
        found = sorted(dp for m, dp in files.model3 if m == mp)
        pattern = f"zero_pp_rank_{{}}_mp_rank_{mp:02d}_model_states.pt"
        _check_ranks(files, found, first.dp, pattern, "dp_world_size", first.name)
        parts: list[Mapping[str, StoredArray]] = [model.fragments]
        whole_: list[Mapping[str, StoredArray]] = []
        for dp in range(1, first.dp):
            other = read_model(files.folder, files.model3[mp, dp])
            _check_save(first, other)
            if other.shapes != model.shapes or other.frozen != model.frozen:
                raise CorruptError(
                    f"{other.name}: its parameter shapes are not those of {model.name}: the files "
                    "are of different saves"
                )
            parts.append(other.fragments)
            whole_.append({n: h.array for n, h in (other.module or {}).items()})
        fragments.append(tuple(parts))
        replicas.append(tuple(whole_))
    return tuple(fragments), tuple(replicas)


def _ranks(files: TagFiles, first: ModelFile) -> tuple[tuple[RankState, ...], ...]:
    """Every rank's optimizer file; () where the optimizer is in the model states (ZeRO 0)."""
    if not files.optim:
        if first.shapes is not None:
            raise CorruptError(
                f"{files.folder}: {first.name} is of a ZeRO run, and no optimizer file "
                "(*zero_pp_rank_*_optim_states.pt) is there. Copy the checkpoint again, or convert "
                "--weights-only."
            )
        return ()
    prefix = next(iter(files.prefixes))
    out: list[tuple[RankState, ...]] = []
    for mp in range(first.mp):
        found = sorted(dp for m, dp in files.optim if m == mp)
        pattern = f"{prefix}zero_pp_rank_{{}}_mp_rank_{mp:02d}_optim_states.pt"
        _check_ranks(files, found, first.dp, pattern, "dp_world_size", first.name)
        row: list[RankState] = []
        for dp in range(first.dp):
            rank = read_rank(files.folder, files.optim[mp, dp], slices=first.shapes is None)
            if row:
                check_alike(row[0], rank)
            row.append(rank)
        out.append(tuple(row))
    extra = sorted((mp, dp) for mp, dp in files.optim if mp >= first.mp)
    if extra:
        raise CorruptError(
            f"{files.folder / files.optim[extra[0]]}: is of model-parallel rank {extra[0][0]}, and "
            f"{first.name} says mp_world_size {first.mp}: it is left from another save. Remove it."
        )
    version = str(first.top.get("ds_version") or "")
    if version and out[0][0].version and version != out[0][0].version:
        raise CorruptError(
            f"{out[0][0].file}: written by DeepSpeed {out[0][0].version}, {first.name} by "
            f"{version}: the files are of different saves"
        )
    return tuple(out)


def degrees_of(files: TagFiles, first: ModelFile) -> tuple[int, int]:
    """(tp, pp). Older files do not say: a pipeline shows by its layer files.

    Source: checkpoint/reshape_3d_utils.py @ 0.19.8.
    """
    said = first.top.get("checkpoint_parallel_dimensions")
    if isinstance(said, Mapping):
        tp = whole(said.get("tp_degree", 1), f"{first.name}: tp_degree")
        pp = whole(said.get("pp_degree", 1), f"{first.name}: pp_degree")
        if tp * pp == first.mp:
            return tp, pp
        raise CorruptError(f"{first.name}: tp {tp} x pp {pp}, but mp_world_size {first.mp}")
    if files.layers_tp:
        tp = max(t for _, t in files.layers_tp) + 1
        return tp, first.mp // tp
    return (1, first.mp) if files.layers else (first.mp, 1)


def check_given(options: OpenOptions, found: Mapping[str, int]) -> None:
    options.given.take()
    for degree, n in options.given.degrees.items():
        if found.get(degree, n) != n:
            raise FormatError(f"--from says {degree}={n}, the files say {degree}={found[degree]}")
