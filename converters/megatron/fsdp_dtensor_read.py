"""Reads Megatron-FSDP's fsdp_dtensor checkpoints: plain DCP of per-layer DTensors.

Keys are `model.module.` + the module's own names with global layers and experts; a gated
linear_fc1 is two tensors, `…weight_w` (gate) and `…weight_v` (up). The weights are the fp32 main
ones, of which the model's own are roundings. `optimizer.state.module.NAME.exp_avg` and the like are
beside `optimizer.param_to_group_meta.module.NAME.OPTION`, each parameter's own copy of its group.
args, iteration and the scheduler are objects.
Source: megatron/training/checkpointing.py generate_state_dict, preprocess_fsdp_dtensor_state_dict,
core/transformer/fsdp_dtensor_checkpoint.py, core/optimizer/distrib_optimizer.py
sharded_param_state_fsdp_dtensor @ core_v0.16.1 (read, never run: it needs a GPU); no fixture.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from reshard.box import Box
from reshard.checkpoint import Checkpoint
from reshard.containers import dcp
from reshard.containers.dcp import Metadata
from reshard.containers.inert import Global, TensorRef
from reshard.dtypes import FLOAT32, DType, named
from reshard.errors import CorruptError, FormatError
from reshard.format import OpenOptions
from reshard.layout import Layout, Piece, Read, place
from reshard.tensor import EXP_AVG, MASTER, PARAM, LogicalTensor, TensorId
from reshard.topology import Topology, topology

from . import names, old_args, run
from .carry import fields_of, plain
from .dist_read import true_shape
from .legacy_held import own_name
from .legacy_ranks import said_degrees
from .run import Optimizer, Options, Run
from .sizes import Sizes, sizes
from .stages import pipeline_of_args

_MODEL = re.compile(r"model\d*\.(.+)")
_STATE = re.compile(r"optimizer\.state\.(.+)\.(\w+)")
_META = re.compile(r"optimizer\.param_to_group_meta\.(.+)\.(\w+)")
_HALF = re.compile(r"(.*\blinear_fc1\.(?:weight|bias)\d*)_([wv])")
_SCHEDULE = "opt_param_scheduler."
_LAYERS = range(1 << 20)  # layer numbers are global already


@dataclass(frozen=True, slots=True)
class Rounded:
    """fp32 main weights as the model has them: rounded to its own dtype."""

    dtype: DType

    def decode(self, read: Read, piece: Piece, box: Box) -> npt.NDArray[np.generic]:
        """The weights of a box of the piece."""
        return np.asarray(read(replace(piece, codec=None), box).astype(self.dtype.numpy))


@dataclass(frozen=True, slots=True)
class Held:
    """A stored tensor and the rows of the logical one that it holds from `row` on."""

    key: str
    row: int = 0


@dataclass
class Found:
    """The model's tensors, and where each one's elements lie."""

    folder: Path
    metadata: Metadata
    tensors: dict[TensorId, LogicalTensor] = field(default_factory=dict)
    held: dict[TensorId, tuple[Held, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._blobs = dcp.Blobs(self.folder)

    def pieces(self, tensor: TensorId) -> Sequence[Piece]:
        """All pieces of a tensor."""
        logical = self.tensors[tensor]
        out = []
        for part in self.held[tensor]:
            entry = self.metadata.tensors[part.key]
            arrays = self._blobs.arrays((part.key, c, entry.dtype) for c in entry.chunks)
            for chunk, array in zip(entry.chunks, arrays, strict=True):
                box = Box.at(chunk.offsets, chunk.sizes)
                if part.row:
                    box = box.shift((part.row, *(0 for _ in chunk.sizes[1:])))
                codec = None if entry.dtype == logical.dtype else Rounded(logical.dtype)
                out.append(replace(place(box, array), codec=codec))
        return out

    def split_weights(self, dtype: DType) -> None:
        """Make masters of the fp32 weights that are trained, and of those the model's weights."""
        for tensor, logical in list(self.tensors.items()):
            master = TensorId(tensor.name, MASTER)
            trained = TensorId(tensor.name, EXP_AVG) in self.tensors
            if tensor.slot == PARAM and trained and logical.dtype == FLOAT32 != dtype:
                self.tensors.setdefault(master, replace(logical, id=master))
                self.held.setdefault(master, self.held[tensor])
                self.tensors[tensor] = replace(logical, dtype=dtype)


def open_fsdp(folder: Path, options: OpenOptions) -> Checkpoint:
    """Read the headers of an fsdp_dtensor checkpoint and the small values in it."""
    metadata = dcp.read_metadata(folder)
    held = metadata.objects.get("args")
    args = fields_of(dcp.read_object(folder, held, "args"), str(folder)) if held else {}
    args = old_args.given(args, options)
    model = sizes(args)
    if options.vocab_size is not None:
        model = replace(model, vocab=options.vocab_size)
    found = _found(folder, metadata, model)
    found.split_weights(_params_dtype(args))
    degrees = _topology(args, model, options)
    native = Run(
        args=args,
        model=model,
        topology=degrees,
        pipeline=pipeline_of_args({**args, "pipeline_model_parallel_size": degrees.pp}),
        common=_common(folder, metadata),
        optimizer=None if options.weights_only else _optimizer(folder, metadata, found),
        spec=model.spec,
        legacy_extra=True,
        unread=tuple(k for k in metadata.objects if k.startswith(("rng_state", "rerun_state"))),
    )
    groups, steps = run.param_groups(native, found.tensors)
    iteration = native.common.get("iteration")
    return Checkpoint(
        path=folder,
        format="megatron",
        version="fsdp_dtensor",
        topology=degrees,
        layout=Layout(found.tensors, found.pieces, "megatron"),
        files=_files(metadata),
        groups=groups if native.optimizer is not None else None,
        steps=steps,
        iteration=iteration if isinstance(iteration, int) else None,
        extras=run.extras(native),
        rows_left=run.rows_left(native),
        native=native,
    )


def _params_dtype(args: Mapping[str, object]) -> DType:
    """The dtype of the model's own weights."""
    said = args.get("params_dtype")
    if isinstance(said, Global) and said.module == "torch":
        return named(said.name)
    return named("bfloat16" if args.get("bf16") else "float16" if args.get("fp16") else "float32")


def _files(metadata: Metadata) -> tuple[str, ...]:
    held = {c.place.file for e in metadata.tensors.values() for c in e.chunks}
    return tuple(sorted(held | {p.file for p in metadata.objects.values()} | {dcp.METADATA}))


def _topology(args: Mapping[str, object], model: Sizes, options: OpenOptions) -> Topology:
    said = said_degrees(args, model)
    given = {k: v for k, v in options.given.degrees.items() if k != "zero"}
    for degree, n in given.items():
        if said.get(degree, n) != n:
            raise FormatError(f"--from says {degree}={n}, the args say {degree}={said[degree]}")
    return topology({**said, **given})


def _found(folder: Path, metadata: Metadata, model: Sizes) -> Found:
    """Every tensor under its canonical name, halves of a gated linear_fc1 joined."""
    out = Found(folder, metadata)
    halves: dict[TensorId, dict[str, str]] = {}
    for key in metadata.tensors:
        slot, own = _slot(key)
        if slot == run.STEP:
            continue
        m = _HALF.fullmatch(own)
        canonical = _canonical(m[1] if m else own)
        tensor = TensorId(canonical, slot)
        if m is None:
            if tensor in out.held:
                raise CorruptError(f"{tensor} is stored under {out.held[tensor][0].key} and {key}")
            entry = metadata.tensors[key]
            out.held[tensor] = (Held(key),)
            out.tensors[tensor] = _logical(tensor, entry.shape, entry.dtype, model, own)
        else:
            halves.setdefault(tensor, {})[m[2]] = key
    for tensor, parts in halves.items():
        gate, up = (metadata.tensors.get(parts.get(h, "")) for h in "wv")
        if gate is None or up is None or (gate.shape, gate.dtype) != (up.shape, up.dtype):
            raise CorruptError(
                f"{tensor}: {sorted(parts.values())} are no gate and up of one shape"
            )
        rows = gate.shape[0]
        shape = (2 * rows, *gate.shape[1:])
        out.held[tensor] = (Held(parts["w"]), Held(parts["v"], rows))
        out.tensors[tensor] = _logical(tensor, shape, gate.dtype, model, tensor.name)
    return out


def _slot(key: str) -> tuple[str, str]:
    """(slot, the parameter's name) of a tensor's key."""
    if m := _STATE.fullmatch(key):
        return ("master" if m[2] in ("param", "master_param") else m[2]), m[1]
    if m := _MODEL.fullmatch(key):
        return PARAM, m[1]
    raise FormatError(
        f"{key}: a tensor that is neither the model's nor the optimizer's is not read"
    )


def _canonical(own: str) -> str:
    name = names.from_legacy(own, _LAYERS)
    if name.canonical is None or name.kind != "tensor":
        raise FormatError(f"{own}: a tensor of this kind is not read from fsdp_dtensor")
    return name.canonical


def _logical(
    tensor: TensorId, shape: tuple[int, ...], dtype: DType, model: Sizes, own: str
) -> LogicalTensor:
    true, padded = true_shape(tensor.name, shape, model)
    return LogicalTensor(tensor, true, dtype, padded, own_name(own, tensor.name))


def _common(folder: Path, metadata: Metadata) -> dict[str, object]:
    """iteration, checkpoint_version and the scheduler, under Megatron's own names."""
    out: dict[str, object] = {}
    schedule: dict[object, object] = {}
    for key, held in metadata.objects.items():
        if key in run.KEPT:
            out[key] = dcp.read_object(folder, held, key)
        elif key.startswith(_SCHEDULE):
            schedule[key.removeprefix(_SCHEDULE)] = dcp.read_object(folder, held, key)
    if schedule:
        out["opt_param_scheduler"] = schedule
    return out


def _optimizer(folder: Path, metadata: Metadata, found: Found) -> Optimizer | None:
    """The groups that the parameters' copies make, decayed first, and the one step."""
    if not any(t.slot != PARAM for t in found.tensors):
        return None
    by_name: dict[str, dict[str, object]] = {}
    for key, name, option in _metas(metadata):
        by_name.setdefault(name, {})[option] = dcp.read_object(folder, metadata.objects[key], key)
    groups: list[Options] = []
    for values in by_name.values():
        if not any(plain(g.values) == plain(values) for g in groups):
            groups.append(Options(values))
    groups.sort(key=lambda g: (g.expert, not g.decays))
    steps = [float(s) for g in groups if isinstance(s := g.values.get(run.STEP), int | float)]
    steps += _steps(folder, metadata)
    in_groups = any(run.STEP in g.values for g in groups)
    return Optimizer(tuple(groups), run.common_step(steps), in_groups, True)


def _metas(metadata: Metadata) -> Iterator[tuple[str, str, str]]:
    """(key, parameter, option) of every recorded option."""
    for key in metadata.objects:
        if m := _META.fullmatch(key):
            yield key, m[1], m[2]


def _steps(folder: Path, metadata: Metadata) -> Iterator[float]:
    """The parameters' own step counters, 0-d tensors or numbers."""
    for key, held in metadata.objects.items():
        if (m := _STATE.fullmatch(key)) and m[2] == run.STEP:
            value = dcp.read_object(folder, held, key)
            if isinstance(value, int | float):
                yield float(value)
    for key, entry in metadata.tensors.items():
        if (m := _STATE.fullmatch(key)) and m[2] == run.STEP:
            for chunk in entry.chunks:
                file = dcp.load_object(folder, chunk.place, key)
                if isinstance(file.root, TensorRef):
                    yield float(file.read(file.root).reshape(-1).astype(np.float64)[0])
