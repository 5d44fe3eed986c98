"""A State as JSON, for a store of another kind to keep, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace

from reshard.checkpoint import Checkpoint, Json
from reshard.containers.carried import Carried
from reshard.containers.inert_json import Reader, to_json
from reshard.containers.pickler import TORCH
from reshard.errors import CorruptError, FormatError
from reshard.format import Loss, Packed

from .leaves import ObjectLeaf, dotted
from .state import Dialect, State
from .values import ALLOWED, Path, strangers

#: The version of what `pack` gives.
VERSION = 1
_NAMES = TORCH | ALLOWED


def pack(source: Checkpoint) -> Packed | None:
    """The source's State as JSON, without values that name code; None for no State."""
    native = source.native
    if not isinstance(native, State):
        return None
    losses: list[Loss] = []
    extras: list[Json] = []
    for extra in native.extras:
        path = extra.file or dotted(extra.path)
        value = _carried(path, extra.value, losses)
        if value is not None:
            extras.append([to_json(extra.path), value, extra.file])
    options: list[Json] = []
    for i, group in enumerate(native.options):
        held = {k: _carried(f"param_groups[{i}].{k}", v, losses) for k, v in group.items()}
        options.append({k: v for k, v in held.items() if v is not None})
    state: dict[str, Json] = {
        "version": VERSION,
        "dialect": {f.name: to_json(getattr(native.dialect, f.name)) for f in fields(Dialect)},
        "options": options,
        "homes": list(native.homes),
        "extras": extras,
        "others": {name: to_json(path) for name, path in native.others.items()},
        "ranks": native.ranks,
        "format": native.format,
    }
    return Packed(state, tuple(losses))


def _carried(where: str, value: Carried, losses: list[Loss]) -> Json:
    """The value as a list of one; None, and a loss, for what may not be written again."""
    foreign = strangers(value.obj)
    if foreign:
        losses.append(Loss("extra-dropped", where, f"names {', '.join(foreign[:3])}"))
        return None
    try:
        return [to_json(value.obj, value.values)]
    except FormatError as error:
        losses.append(Loss("extra-dropped", where, str(error)))
        return None


def unpack(state: Json, source: Checkpoint) -> State:
    """The State that `pack` was given.

    Raises CorruptError for another form, UnsafeError for a name that torch's loader has no need of.
    """
    where = f"{source.path}: the state kept for torch"
    if not isinstance(state, dict) or state.get("version") != VERSION:
        raise CorruptError(f"{where} is not of version {VERSION}")
    try:
        made = _state(state, where)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptError(f"{where} is damaged ({error!r})") from None
    if source.groups is None:
        return replace(made, options=(), homes=())
    groups = len(source.groups)
    if len(made.options) != groups or len(made.homes) != groups:
        raise CorruptError(f"{where} has options of {len(made.options)} groups, not {groups}")
    return made


def _state(body: Mapping[str, object], where: str) -> State:
    dialect = Reader((), where).read(body["dialect"])
    options, homes = _list(body["options"]), _list(body["homes"])
    others = _mapping(body["others"])
    ranks, form = body["ranks"], body["format"]
    if not isinstance(ranks, int | None) or not isinstance(form, str):
        raise TypeError(f"ranks {ranks!r:.20}, format {form!r:.20}")
    return State(
        dialect=_dialect(_mapping(dialect)),
        options=tuple(
            {k: _value(v, where, f"{k}/") for k, v in _mapping(group).items()} for group in options
        ),
        homes=tuple(int(str(n)) for n in homes),
        extras=tuple(_extra(row, where) for row in _list(body["extras"])),
        others={name: _path(path, where) for name, path in others.items()},
        ranks=ranks,
        format=form,
    )


def _dialect(body: Mapping[str, object]) -> Dialect:
    made = Dialect(**body)  # type: ignore[arg-type]  # checked below
    texts = (made.kind, made.attribute, made.model_folder, made.optimizer_folder)
    paths = (made.model, *made.optimizers)
    if (
        not all(isinstance(t, str) for t in texts)
        or not all(isinstance(b, bool) for b in (made.flat, made.numbered))
        or not all(isinstance(p, tuple) for p in paths)
    ):
        raise TypeError(f"dialect {body!r:.80}")
    return made


def _extra(row: object, where: str) -> ObjectLeaf:
    path, value, file = _list(row)
    if not isinstance(file, str) or "/" in file:
        raise TypeError(f"file {file!r:.40}")
    return ObjectLeaf(_path(path, where), _value(value, where, ""), file)


def _value(value: object, where: str, prefix: str) -> Carried:
    reader = Reader(_NAMES, where, prefix)
    (held,) = _list(value)
    return Carried(reader.read(held), reader.values)


def _path(value: object, where: str) -> Path:
    found = Reader((), where).read(value)
    if not isinstance(found, tuple) or not all(type(p) in (str, int) for p in found):
        raise TypeError(f"path {found!r:.40}")
    return found


def _list(value: object) -> list[object]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r:.40} is no list")
    return value


def _mapping(value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise TypeError(f"{value!r:.40} is no object")
    return value
