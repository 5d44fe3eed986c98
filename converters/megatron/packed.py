"""A run's state as typed JSON for stores of other kinds, and back: what writers need of a Run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, replace
from typing import TypeVar

from reshard.checkpoint import Checkpoint, Json
from reshard.containers.carried import Carried
from reshard.containers.inert import tensors_in
from reshard.containers.inert_json import Reader, to_json
from reshard.errors import CorruptError, FormatError
from reshard.format import Loss, Packed
from reshard.tensor import PARAM
from reshard.topology import Topology

from . import names
from .run import ALLOWED, TORCH_DTYPES, Optimizer, Options, Run, unknown_globals
from .sizes import Sizes
from .stages import Chunk, Pipeline

_T = TypeVar("_T")
#: The version of what `pack` gives.
VERSION = 1
#: Fields of a Run that JSON shows as they are, under their own names.
_PLAIN = ("spec", "rng_grid", "mla_down", "legacy_extra", "mtp_inner", "unread")
_NAMES = ALLOWED | TORCH_DTYPES


def pack(source: Checkpoint) -> Packed | None:
    """The source's Run as JSON, without what Megatron's loader could not name; None for no Run."""
    native = source.native
    if not isinstance(native, Run):
        return None
    losses: list[Loss] = []
    trained = any(t.slot != PARAM for t in source.layout.tensors)
    optimizer = native.optimizer if trained else None
    state: dict[str, Json] = {
        "version": VERSION,
        "args": _mapping("args", native.args, losses),
        "common": _mapping("", native.common, losses),
        "model": _record(native.model),
        "topology": _record(native.topology),
        "pipeline": None if native.pipeline is None else _pipeline(native.pipeline),
        "style": None if native.style is None else _record(native.style),
        "extra_states": list(native.extra_states),
        "rng": [[list(at), _carried(f"rng_state{at}", c, losses)] for at, c in native.rng.items()],
        "optimizer": None if optimizer is None else _optimizer(optimizer, losses),
        **{name: to_json(getattr(native, name)) for name in _PLAIN},
    }
    return Packed(state, tuple(losses))


def _mapping(where: str, values: Mapping[str, object], losses: list[Loss]) -> Json:
    """Each value that may be written again; the others are losses."""
    out: dict[str, Json] = {}
    for name, value in values.items():
        path = f"{where}.{name}" if where else name
        unknown = unknown_globals(value)
        if unknown:
            losses.append(Loss("arg-dropped", path, f"names {', '.join(unknown)}"))
        else:
            try:
                out[name] = to_json(value)
            except FormatError as error:
                losses.append(Loss("arg-dropped", path, str(error)))
    return out


def _carried(where: str, carried: Carried, losses: list[Loss]) -> Json:
    unknown = unknown_globals(carried.obj)
    if unknown:
        losses.append(Loss("extra-dropped", where, f"names {', '.join(unknown)}"))
        return None
    return to_json(carried.obj, carried.values)


def _record(value: object) -> Json:
    """A dataclass of plain values, field by field."""
    return {f.name: to_json(getattr(value, f.name)) for f in fields(value)}  # type: ignore[arg-type]  # all are


def _pipeline(pipeline: Pipeline) -> Json:
    return [[_record(chunk) for chunk in row] for row in pipeline.chunks]


def _optimizer(optimizer: Optimizer, losses: list[Loss]) -> Json:
    groups: list[Json] = []
    for i, group in enumerate(optimizer.groups):
        # a step that is a tensor is in `step`, as the writers take it
        held = {k: v for k, v in group.values.items() if not (k == "step" and tensors_in(v))}
        groups.append(_mapping(f"optimizer.param_groups[{i}]", held, losses))
    scaler = optimizer.scaler
    return {
        "groups": groups,
        "scaler": None if scaler is None else [_carried("grad_scaler", scaler, losses)],
        "step": optimizer.step,
        "step_in_groups": optimizer.step_in_groups,
        "distributed": optimizer.distributed,
        "chained": optimizer.chained,
    }


# ---------------------------------------------------------------------- and back


def unpack(state: Json, source: Checkpoint) -> Run:
    """The Run that `pack` was given.

    Raises CorruptError for another form, UnsafeError for a name that Megatron's loader has no
    need of.
    """
    where = f"{source.path}: the state kept for Megatron"
    body = _object(state, where)
    if body.get("version") != VERSION:
        raise CorruptError(f"{where} has version {body.get('version')!r}, not {VERSION}")
    try:
        return _run(body, where)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptError(f"{where} is damaged ({error!r})") from None


def _run(body: Mapping[str, object], where: str) -> Run:
    read = Reader(_NAMES, where).read
    optimizer, style, pipe = body["optimizer"], body["style"], body["pipeline"]
    plain = {name: read(body[name]) for name in _PLAIN}
    made = Run(
        args=_object(read(body["args"]), where),
        model=_made(Sizes, body["model"], where),
        topology=_made(Topology, body["topology"], where),
        pipeline=None if pipe is None else _pipeline_of(pipe, where),
        common=_object(read(body["common"]), where),
        optimizer=None if optimizer is None else _optimizer_of(_object(optimizer, where), where),
        spec=None,
        style=None if style is None else _made(names.Style, style, where),
        extra_states=dict.fromkeys(map(str, _list(body["extra_states"], where))),
        rng=_rng(body["rng"], where),
    )
    for f in fields(Run):
        if f.name in plain and not _fits(plain[f.name], str(f.type)):
            raise CorruptError(f"{where}: {f.name} is {plain[f.name]!r:.60}")
    return replace(made, **plain)  # type: ignore[arg-type]  # checked in the loop above


def _rng(value: object, where: str) -> dict[tuple[int, ...], Carried]:
    out = {}
    for pair in _list(value, where):
        at, state = _list(pair, where)
        position = tuple(int(str(n)) for n in _list(at, where))
        if state is not None:
            out[position] = _carried_of(state, where, f"rng/{'.'.join(map(str, position))}/")
    return out


def _carried_of(value: object, where: str, prefix: str) -> Carried:
    reader = Reader(_NAMES, where, prefix)
    return Carried(reader.read(value), reader.values)


def _pipeline_of(value: object, where: str) -> Pipeline:
    rows = [[_made(Chunk, c, where) for c in _list(r, where)] for r in _list(value, where)]
    return Pipeline(tuple(map(tuple, rows)))


def _optimizer_of(body: Mapping[str, object], where: str) -> Optimizer:
    read = Reader(_NAMES, where).read
    groups = [Options(_object(read(g), where)) for g in _list(body["groups"], where)]
    scaler = body["scaler"]
    found = None
    if scaler is not None:
        found = _carried_of(_list(scaler, where)[0], where, "scaler/")
    rest = {k: v for k, v in body.items() if k not in ("groups", "scaler")}
    for f in fields(Optimizer):
        if f.name in rest and not _fits(rest[f.name], str(f.type)):
            raise CorruptError(f"{where}: optimizer.{f.name} is {rest[f.name]!r:.60}")
    return Optimizer(tuple(groups), scaler=found, **rest)  # type: ignore[arg-type]  # checked above


def _made(kind: Callable[..., _T], value: object, where: str) -> _T:
    """A dataclass of plain values from its fields; fields that are newer than the state are unset.

    Raises CorruptError for a field that is missing, unknown or of another type.
    """
    body = {k: Reader((), where).read(v) for k, v in _object(value, where).items()}
    known = {f.name: f for f in fields(kind)}  # type: ignore[arg-type]  # only dataclasses come here
    for name in body.keys() | known.keys():
        f = known.get(name)
        if f is None or (name in body and not _fits(body[name], str(f.type))):
            raise CorruptError(f"{where}: {name} is {body.get(name)!r:.60}")
        if name not in body and f.default is MISSING and f.default_factory is MISSING:
            raise CorruptError(f"{where}: {name} is missing")
    return kind(**body)


_KINDS = {"bool": bool, "str": str, "None": type(None), "tuple": tuple, "frozenset": frozenset}


def _fits(value: object, annotation: str) -> bool:
    """Whether a value is of an annotated type: "int | None", "tuple[bool, ...]"."""
    return any(_one(value, part.strip()) for part in annotation.split("|"))


def _one(value: object, annotation: str) -> bool:
    head, _, inner = annotation.partition("[")
    if head in ("int", "float"):
        wanted = int if head == "int" else int | float
        return isinstance(value, wanted) and not isinstance(value, bool)
    if not isinstance(value, _KINDS[head]):
        return False
    of = inner.rstrip("]").split(",")[0]
    return not isinstance(value, tuple | frozenset) or all(_fits(v, of) for v in value)


def _object(value: object, where: str) -> dict[str, object]:
    if isinstance(value, dict):
        return value
    raise CorruptError(f"{where}: {value!r:.60} where an object belongs")


def _list(value: object, where: str) -> Sequence[object]:
    if isinstance(value, list):
        return value
    raise CorruptError(f"{where}: {value!r:.60} where a list belongs")
