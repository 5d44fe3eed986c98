"""Reads legacy checkpoints: one torch.save file per (tp, pp[, ep]) rank, joined by rule."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from reshard.checkpoint import Checkpoint
from reshard.containers import torchfile
from reshard.containers.carried import Carried, carry
from reshard.containers.inert import TensorRef
from reshard.containers.torchfile import TorchFile
from reshard.errors import CorruptError, FormatError, ReshardError
from reshard.format import OpenOptions
from reshard.layout import Layout, Piece
from reshard.tensor import PARAM, TensorId
from reshard.topology import Topology

from . import module_order, names, nested_names, old_args, precision_aware, run, run_rng
from .carry import fields_of, mapping, plain
from .legacy_held import Entry, Experts, Holdings, Param, Spot, spots_of
from .legacy_optim import OptimizerReader
from .legacy_ranks import (
    MODEL,
    RankFile,
    checked_files,
    degrees_of,
    found_folders,
    refuse_swapped,
    said_degrees,
)
from .run import Run
from .sizes import LEGACY_GROUPED, LOCAL, SEQUENTIAL, TE, TE_GROUPED, Sizes, need, sizes
from .stages import Chunk, pipeline_of_args

NAME = "megatron-legacy"
_KNOWN = {*run.KEPT, "args", "optimizer", "lr_scheduler", "rng_state", "total_iters"}
_MODEL = re.compile(r"model\d*")


def open_legacy(folder: Path, options: OpenOptions) -> Checkpoint:
    """Read a legacy checkpoint's pickles, one rank file at a time; no tensor bytes.

    Raises FormatError for a form that is not read or degrees that nothing says, CorruptError for
    rank files that are missing, too many, or of different runs.
    """
    native, holdings = _start(folder, options)
    files = checked_files(folder, native.topology)
    reader = OptimizerReader(folder, native, holdings, options.weights_only)
    head = Head.of(native, options)
    rng: dict[tuple[int, ...], Carried] = {}
    grid = run_rng.rng_grid(native.topology)
    ranks: dict[RankFile, object] = {}
    for rank in files:
        file = torchfile.load(folder / rank.model, rank.model)
        root = mapping(file.root, rank.model)
        head.check(root, folder / rank.model)
        ranks[rank] = _args(root, folder / rank.model).get("rank")
        params = list(_params(native, rank, file, root))
        native = _shown(native, [p.key for p in params])
        holdings.add(rank, rank.model, [_weight(file, root, p, s) for p in params for s in p.spots])
        reader.read(rank, file, root, params)
        if root.get("rng_state") is not None:
            position = (rank.stage, rank.place.tp, rank.place.dp)[: len(grid)]
            rng[position] = _rng(file, root, position)
    refuse_swapped(folder, native.topology, ranks)
    common = {**native.common, "checkpoint_version": 3.0}  # what is read is in today's order
    native = replace(native, common=common, optimizer=reader.optimizer(), rng=rng, rng_grid=grid)
    tensors = dict(holdings.tensors)
    pieces: Callable[[TensorId], Sequence[Piece]] = holdings.pieces
    notes: tuple[str, ...] = ()
    if not options.weights_only:
        tensors, pieces, notes = precision_aware.rebuilt(folder, tensors, pieces, native.args)
    groups, steps = run.param_groups(native, tensors)
    return Checkpoint(
        path=folder,
        format=NAME,
        version=f"torch, checkpoint_version {holdings.version}",
        topology=native.topology,
        layout=Layout(tensors, pieces, "megatron"),
        files=tuple(f for rank in files for f in (rank.model, *reader.buffers(rank))),
        groups=groups if native.optimizer is not None else None,
        steps={**steps, **reader.steps},
        iteration=_iteration(folder, native),
        extras=run.extras(native),
        rows_left=run.rows_left(native),
        optimizer_left=reader.left,
        problems=(*_problems(native, holdings), *notes),
        native=native,
    )


# --- what the first file says --------------------------------------------------------------------


def _start(folder: Path, options: OpenOptions) -> tuple[Run, Holdings]:
    """Args, sizes, topology and pipeline, from the first rank file."""
    first = next((n for n in found_folders(folder) if (folder / n / MODEL).is_file()), None)
    if first is None:
        raise CorruptError(f"{folder}: no mp_rank folder holds {MODEL}")
    where = folder / first / MODEL
    file = torchfile.load(where, f"{first}/{where.name}")
    root = mapping(file.root, str(where))
    found = old_args.given(_args(root, where), options)
    args, deduced = _told(folder, first, found, root, options)
    model = sizes(args)
    if options.vocab_size is not None:
        model = replace(model, vocab=options.vocab_size)
    degrees = degrees_of(args, model, options)
    pipe = pipeline_of_args({**args, "pipeline_model_parallel_size": degrees.pp})
    vpp = options.given.degrees.get("vpp", pipe.vpp)
    if vpp != pipe.vpp:
        raise FormatError(f"--from says vpp={vpp}, the checkpoint's args say vpp={pipe.vpp}")
    degrees = replace(degrees, vpp=pipe.vpp)
    keys = [str(k) for m in _chunks(root, where) for k in m]
    spec = _spec(keys) if any(".layers." in k for k in keys) else model.spec
    model = replace(model, spec=spec)
    native = Run(
        args=args,
        model=model,
        topology=degrees,
        pipeline=pipe,
        common=_common(root, folder),
        optimizer=None,
        spec=spec,
        mla_down=_mla_down(root, where, model, degrees),
        legacy_extra=True,
        unread=_unread(root, where),
        deduced=deduced,
    )
    return native, Holdings(model, degrees, native.mla_down, _version(root, where))


def _args(root: Mapping[object, object], where: Path) -> dict[str, object]:
    """The fields of the args; a model from before megatron-core becomes one of megatron-core."""
    args = fields_of(root["args"], str(where)) if root.get("args") is not None else {}
    return {**args, "use_legacy_models": False} if args.get("use_legacy_models") else args


def _told(
    folder: Path,
    first: str,
    args: dict[str, object],
    root: Mapping[object, object],
    options: OpenOptions,
) -> tuple[dict[str, object], frozenset[str]]:
    """The args with what only the stored tensors and folder names tell; and which those are."""
    names_ = found_folders(folder)
    told: dict[str, object] = {}
    if all(re.fullmatch(r"mp_rank_\d\d", n) for n in names_):  # neither stages nor experts' ranks
        told["pipeline_model_parallel_size"] = 1
    last = names_[-1]
    head: Mapping[object, object] = root
    if last != first and (folder / last / MODEL).is_file():
        head = mapping(torchfile.load(folder / last / MODEL, f"{last}/{MODEL}").root, last)
    tp = {**said_degrees(args, sizes(args)), **options.given.degrees}.get("tp")
    told |= old_args.told(args, _shapes(root, folder / first), _shapes(head, folder / last), tp)
    missing = {k: v for k, v in told.items() if args.get(k) is None}
    return {**args, **missing}, frozenset(missing)


def _shapes(root: Mapping[object, object], where: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of a rank file's tensors, by megatron-core's names and by their own."""
    out: dict[str, tuple[int, ...]] = {}
    for chunk in _chunks(root, where):
        for key, ref in chunk.items():
            if isinstance(ref, TensorRef):
                out[str(key)] = ref.shape
                out[nested_names.current(str(key))] = ref.shape
    return out


def _version(root: Mapping[object, object], where: Path) -> float:
    """The checkpoint_version; the oldest checkpoints do not say theirs, which is 0.

    Source: megatron/training/checkpointing.py load_checkpoint @ core_v0.16.1.
    """
    version = root.get("checkpoint_version", 0)
    if isinstance(version, bool) or version not in (0, 1, 2, 3):
        raise FormatError(f"{where}: checkpoint_version {plain(version)} is not known")
    return float(version)


def _chunks(root: Mapping[object, object], where: Path) -> list[Mapping[object, object]]:
    """The model dicts: `model`, or model0 … of a virtual pipeline."""
    found = [str(k) for k in root if _MODEL.fullmatch(str(k))]
    wanted = ["model"] if "model" in found else [f"model{i}" for i in range(len(found))]
    if not found or sorted(found) != sorted(wanted):
        raise CorruptError(f"{where}: holds the models {found}, not model or model0, model1, …")
    models = [mapping(root[k], f"{where}: {k}") for k in wanted]
    odd = next((k for m in models for k in m if not isinstance(k, str)), None)
    if odd is not None:
        raise CorruptError(f"{where}: {odd!r:.60} is no name of a tensor")
    return [nested_names.flat(m) if nested_names.is_nested(m) else m for m in models]


def _spec(keys: Sequence[str]) -> str:
    """The layer spec that names show: what only Transformer Engine's modules have."""
    te = any("layer_norm_" in k or k.endswith("core_attention._extra_state") for k in keys)
    return TE if te else LOCAL


def _shown(native: Run, keys: Sequence[str]) -> Run:
    """The run, with what the keys of a rank show: the experts' module, the name of MTP's layer."""
    for form, part in (
        (SEQUENTIAL, r"\.experts\.local_experts\."),
        (TE_GROUPED, r"\.experts\.linear_fc[12]\.weight\d+$"),
        (LEGACY_GROUPED, r"\.experts\.weight[12]$"),
    ):
        if native.model.experts_form != form and any(re.search(part, k) for k in keys):
            native = replace(native, model=replace(native.model, experts_form=form))
    if any(".mtp_model_layer." in k for k in keys):
        native = replace(native, mtp_inner="mtp_model_layer.")
    return native


def _mla_down(
    root: Mapping[object, object], where: Path, model: Sizes, degrees: Topology
) -> bool | None:
    """Whether MLA's down projections are cut, by their rows; None if nothing tells."""
    if not model.mla or degrees.tp == 1:
        return None
    for chunk in _chunks(root, where):
        for key, ref in chunk.items():
            if not isinstance(ref, TensorRef) or "_down_proj.weight" not in str(key):
                continue
            whole = need(model.kv_rank, "kv_rank") + need(model.qk_rope_dim, "qk_rope_dim")
            if "linear_q_down_proj" in str(key):
                whole = need(model.q_rank, "q_rank")
            if ref.shape[0] == whole:
                return False
            if ref.shape[0] * degrees.tp == whole:
                return True
            raise CorruptError(
                f"{where}: {key} has {ref.shape[0]} rows; the args make {whole}, or "
                f"{whole // degrees.tp} on each of tp={degrees.tp} ranks"
            )
    return None


def _common(root: Mapping[object, object], folder: Path) -> dict[str, object]:
    """What is equal on all ranks, under today's names."""
    old = {"opt_param_scheduler": "lr_scheduler", "iteration": "total_iters"}
    found = {k: root.get(k, root.get(old.get(k, k))) for k in run.KEPT}
    common = {k: v for k, v in found.items() if v is not None}
    if folder.name == "release":
        common.pop("iteration", None)
    return common


def _unread(root: Mapping[object, object], where: Path) -> tuple[str, ...]:
    odd = [str(k) for k in root if k not in _KNOWN and not _MODEL.fullmatch(str(k))]
    for chunk in _chunks(root, where):
        states = (v for k, v in chunk.items() if str(k).endswith(names.EXTRA_STATE))
        if any(v is not None and not (isinstance(v, TensorRef) and 0 in v.shape) for v in states):
            return (*odd, "model._extra_state")
    return tuple(odd)


def _iteration(folder: Path, native: Run) -> int | None:
    value = native.common.get("iteration")
    m = re.fullmatch(r"iter_(\d+)", folder.name)
    if m and isinstance(value, int) and int(m[1]) != value:
        raise CorruptError(
            f"{folder} holds files of iteration {value}: folder or files were renamed"
        )
    return value if isinstance(value, int) else None


@dataclass(frozen=True, slots=True)
class Head:
    """What every rank file must agree on."""

    args: Mapping[str, object]
    common: Mapping[str, object]
    model: Sizes
    said: Mapping[str, int]  # degrees
    options: OpenOptions

    @staticmethod
    def of(native: Run, options: OpenOptions) -> Head:
        """What the first file says, and --from."""
        args = {k: v for k, v in native.args.items() if k not in native.deduced}
        model = sizes(args)
        return Head(args, native.common, model, said_degrees(args, model), options)

    def check(self, root: Mapping[object, object], where: Path) -> None:
        """Raises CorruptError if another rank file is of another run or iteration."""
        for key, value in self.common.items():
            other = root.get(key)
            if key in root and plain(other) != plain(value):
                raise CorruptError(
                    f"{where}: {key} is {plain(other)}, {plain(value)} in the first rank file. "
                    "Two checkpoints are mixed in this folder."
                )
        args = old_args.given(_args(root, where), self.options)
        if bool(args) != bool(self.args) or sizes(args) != self.model:
            raise CorruptError(f"{where}: its args describe another model than the first file's")
        if args:
            said = said_degrees(args, self.model)
            if said != self.said:
                raise CorruptError(
                    f"{where}: its args say {said}, those of the first rank file {self.said}. "
                    "Two checkpoints are mixed in this folder."
                )


# --- one rank file -------------------------------------------------------------------------------


def _params(
    native: Run, rank: RankFile, file: TorchFile, root: Mapping[object, object]
) -> Iterator[Param]:
    """The tensors of a rank's model chunks in order, which is that of named_parameters()."""
    assert native.pipeline is not None
    chunks = native.pipeline.chunks[rank.stage]
    models = _chunks(root, file.path)
    if len(models) != len(chunks):
        raise FormatError(
            f"{file.path}: holds {len(models)} model chunks; the args describe vpp={len(chunks)}"
        )
    each = (native.model.experts or 0) // native.topology.ep
    experts = Experts(rank.place.ep * each, each)
    for v, (chunk, model) in enumerate(zip(chunks, models, strict=True)):
        tied = bool(native.model.tied) and chunk.head
        for key, ref in model.items():
            name = names.from_legacy(
                str(key), chunk.layers, experts.first, tied, min(chunk.mtp, default=0)
            )
            if name.canonical is None:
                continue
            if not isinstance(ref, TensorRef) or ref.kind not in ("Tensor", "Parameter"):
                raise FormatError(f"{file.path}: {key} is {plain(ref)}, not a plain tensor")
            spots = tuple(spots_of(str(key), name, ref.shape, experts))
            yield Param(str(key), v, ref.shape, ref.dtype, spots)
        _check_layers(chunk, model, file.path)


def _check_layers(chunk: Chunk, model: Mapping[object, object], where: Path) -> None:
    """Raises CorruptError if a layer of the chunk has no tensor."""
    found = (re.search(r"decoder\.layers\.(\d+)\.", nested_names.current(str(k))) for k in model)
    held = {m[1] for m in found if m is not None}
    for local, layer in enumerate(chunk.layers):
        if str(local) not in held:
            raise CorruptError(
                f"{where}: holds no tensor of decoder layer {layer}, which the args place there"
            )


def _weight(
    file: TorchFile, root: Mapping[object, object], param: Param, spot: Spot
) -> tuple[Entry, int]:
    """A weight's entry and its byte offset."""
    ref = _chunks(root, file.path)[param.chunk][param.key]
    assert isinstance(ref, TensorRef)
    array = file.array(ref, param.key)
    entry = Entry(TensorId(spot.name, PARAM), spot, param.key, array.shape, array.dtype)
    return entry, array.offset


def _rng(file: TorchFile, root: Mapping[object, object], position: tuple[int, ...]) -> Carried:
    prefix = "rng/" + "/".join(map(str, position)) + "/"
    return carry(file, root["rng_state"], prefix)


def _problems(native: Run, holdings: Holdings) -> Iterator[str]:
    """Tensors that a model of these sizes has and the files do not hold."""
    assert native.pipeline is not None
    missing: list[str] = []
    try:
        for chunk in (c for row in native.pipeline.chunks for c in row):
            for _, name in module_order.legacy_entries(native.model, chunk, spec=native.spec):
                if name and "{expert}" not in name and TensorId(name) not in holdings.tensors:
                    missing.append(name)
    except ReshardError:
        return  # a model whose modules are not known here is read by its own names
    if missing:
        yield f"{len(missing)} tensors that the args describe are not stored: {missing[0]}, …"
