"""Which model family a checkpoint is of, and its config: from config.json, args, or --schema."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from reshard.checkpoint import Checkpoint, Json
from reshard.containers.small import read_config
from reshard.errors import CoverageError, FormatError, UsageError
from reshard.expression import Value, evaluate
from reshard.namings import dialects
from reshard.schema import (
    Family,
    ModelType,
    Scope,
    families,
    model_types,
    parse_family,
)
from reshard.tensor import TensorId

#: Where a checkpoint's extras hold the model's config.json, and a trainer's arguments.
CONFIG, ARGS = "config", "args."


@dataclass(frozen=True)
class Known:
    """A family, and the config of one model of it."""

    family: Family
    config: Mapping[str, Value]
    made: bool = False  # the config was made from the trainer's arguments

    def scope(self) -> Scope:
        """What the family's expressions are worth for this model."""
        return Scope(self.family, self.config)

    def extras(self, dialect: str, scope: Scope) -> dict[str, Json]:
        """What a target in this dialect needs to be told: the config, the trainer's arguments."""
        out: dict[str, Json] = {CONFIG: self.config}
        asked = {**dialects()[dialect].args, **self.family.args} if dialects()[dialect].args else {}
        for name, text in asked.items():
            value = _worth(text, scope)
            if value is not None:
                out[ARGS + name] = value
        return out


_PER_LAYER = {"per_layer", "when", "all", "every"}


def _worth(text: object, scope: Scope) -> Value:
    """An argument's value: an expression, or a list with one per layer.

    `when` it does not hold, the argument is not there; `all` stands for a list that is all true,
    `every` = n for one that is false for each n-th layer alone.
    """
    if isinstance(text, str):
        return scope.value(text)
    if isinstance(text, Mapping) and {"per_layer", "when"} <= set(text) <= _PER_LAYER:
        if not scope.holds(text["when"]):
            return None
        layers = range(scope.count("L", "layers"))
        found = [int(bool(scope.at({"l": i}).value(text["per_layer"]))) for i in layers]
        if "all" in text and all(found):
            return scope.value(text["all"])
        n = scope.count(text["every"], "every") if "every" in text else 0
        return n if n and found == [int((i + 1) % n != 0) for i in layers] else list(found)
    if isinstance(text, bool | int | float | None):
        return text
    raise FormatError(f"{scope.family.name}: args: {text!r} is neither expression nor per_layer")


def named(schema: str) -> Family:
    """The family of this name, or in this file. Raises UsageError naming those that exist."""
    found = families().get(schema)
    if found is not None:
        return found
    path = Path(schema)
    if schema.endswith(".toml") or path.is_file():
        try:
            return parse_family(path.read_text(encoding="utf-8"), schema)
        except OSError as error:
            raise UsageError(f"--schema {schema}: {error}") from error
    raise UsageError(f"--schema {schema}: no such family or file; known: {', '.join(families())}")


def recognised(
    checkpoint: Checkpoint, *, schema: str | None = None, config: str | None = None
) -> Known | None:
    """The family and config of a checkpoint; None if nothing says what model it is.

    --config comes first, then the checkpoint's own config.json, then its trainer's arguments.
    """
    sure = [named(schema)] if schema is not None else None
    own = read_config(config) if config is not None else checkpoint.extras.get(CONFIG)
    if isinstance(own, Mapping):
        kind = own.get("model_type")
        return of_config(own, sure or _with(lambda name, _: name == kind), sure=sure is not None)
    args = {k.removeprefix(ARGS): v for k, v in checkpoint.extras.items() if k.startswith(ARGS)}
    known = None
    if args:
        listed = sure or _with(lambda _, kind: _describe(args, kind))
        known = of_args(args, listed, sure=sure is not None)
    rows = checkpoint.layout.tensors.get(TensorId("embedding.word_embeddings.weight"))
    if known is None or rows is None:
        return known
    # the reader knows of tokens that a trainer's tokenizer adds to what the arguments say
    return replace(known, config={**known.config, "vocab_size": rows.shape[0]})


def _with(fits: Callable[[str, ModelType], bool]) -> list[Family]:
    """The families that have a fitting model type; no other one's file is read further."""
    return [
        families()[name]
        for name, kinds in model_types().items()
        if any(fits(kind, row) for kind, row in kinds.items())
    ]


def _describe(args: Mapping[str, Json], kind: ModelType) -> bool:
    """Whether a trainer's arguments are those of a model type."""
    lookup: Callable[[str], Value] = args.get
    return kind.when is not None and bool(evaluate(kind.when, lookup))


def of_config(
    config: Mapping[str, Json], listed: Sequence[Family], *, sure: bool = False
) -> Known | None:
    """The family whose model_type a config names. `sure`: the only one listed, whatever it says."""
    kind = config.get("model_type")
    for family in listed:
        if (isinstance(kind, str) and kind in family.types) or sure:
            return Known(family, config)
    return None


def of_args(
    args: Mapping[str, Json], listed: Sequence[Family], *, sure: bool = False
) -> Known | None:
    """The family that a trainer's arguments describe, with a config made from them.

    `sure`: the only one listed, whatever the arguments say. Raises CoverageError if several fit.
    """
    lookup: Callable[[str], Value] = args.get
    fits = [
        (family, kind)
        for family in listed
        for kind, row in family.types.items()
        if _describe(args, row)
    ]
    if not fits and sure:
        fits = [(listed[0], next(iter(listed[0].types)))]
    if not fits:
        return None
    if len(fits) > 1:
        raise CoverageError(
            f"the arguments fit {', '.join(k for _, k in fits)}; say which with --schema NAME, or "
            "give the model's config with --config DIR"
        )
    family, kind = fits[0]
    made = _config(family.config, lookup)
    made["model_type"] = kind
    made["architectures"] = [family.types[kind].architecture]
    return Known(family, made, made=True)


def _config(table: Mapping[str, Any], lookup: Callable[[str], Value]) -> dict[str, Value]:
    """The keys of a config; one without a value is left out, unless its expression is in a list."""
    out: dict[str, Value] = {}
    for key, text in table.items():
        value: Value
        if isinstance(text, list):  # null says something else than no key
            out[key] = evaluate(text[0], lookup)
            continue
        if isinstance(text, str):
            value = evaluate(text, lookup)
        elif isinstance(text, Mapping):
            value = _config(text, lookup) or None
        else:
            value = text
        if value is not None:
            out[key] = value
    return out
