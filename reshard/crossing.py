"""A source made ready for a target: dequantised where asked, translated where namings differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from reshard import translate as translation
from reshard.checkpoint import Checkpoint
from reshard.dtypes import named
from reshard.errors import CoverageError, LossError, UsageError
from reshard.families import ARGS, CONFIG, read_config, recognised
from reshard.format import Format, Loss
from reshard.schema import dialects
from reshard.topology import Target

#: The item of a TARGET that names a dialect: `dcp:names=hf`.
NAMES = "names"


@dataclass(frozen=True, slots=True)
class Choice:
    """What a user says about the model: --schema, --config, --dtype."""

    schema: str | None = None
    config: str | None = None
    dtype: str | None = None


@dataclass(frozen=True)
class Crossed:
    """A source as its target wants to see it, and what the way there leaves behind."""

    checkpoint: Checkpoint
    losses: tuple[Loss, ...] = ()
    notes: tuple[str, ...] = ()


def dialect_of(form: Format, target: Target, spoken: str | None = None) -> str | None:
    """The dialect a target is written in; None: whatever the source speaks.

    The item `names=` says; so may a format (`dialect(target)`) or a variant (`dcp.torchtitan`).
    A format of one `naming` that is not that of the source (`spoken`) takes the usual dialect.
    """
    named = target.options.get(NAMES)
    if named is not None and named not in dialects():
        raise UsageError(f"{NAMES}={named}: choose one of {', '.join(dialects())}")
    asked = getattr(form, "dialect", None)
    if asked is not None:
        written = str(asked(target))
        if named not in (None, written):
            raise UsageError(f"{form.name} is written with {written} names, not {named}")
        return written
    if named is not None or target.variant in dialects():
        return named or target.variant
    naming = getattr(form, "naming", None)
    return None if spoken is None or naming in (None, spoken) else translation.WRITTEN[naming]


def unnamed(target: Target) -> Target:
    """The target without the item that says whose names are wanted."""
    options = {k: v for k, v in target.options.items() if k != NAMES}
    return replace(target, options=options)


def cross(
    checkpoint: Checkpoint, dialect: str | None, choice: Choice, like: Checkpoint | None = None
) -> Crossed:
    """The checkpoint in this dialect, or in that of the `like` reference where none is said.

    Raises CoverageError where no family joins the namings, LossError for quantised tensors that
    would have to be cut or cast and that nobody asked to dequantise.
    """
    if dialect is None and like is not None and like.layout.naming != checkpoint.layout.naming:
        dialect = _of_reference(checkpoint, like, choice)
    plain = dequantised(checkpoint, dialect, choice)
    if dialect is None or choice.schema == "none":
        return Crossed(plain)
    naming = dialects()[dialect].naming
    same = plain.layout.naming == naming
    if same and (naming == "megatron" or plain.quantised is not None):
        return Crossed(plain)
    known = recognised(plain, schema=choice.schema, config=choice.config)
    if known is None:
        if same:
            return Crossed(plain)
        raise CoverageError(_unknown(plain, naming, choice.config))
    found = translation.translate(plain, known, dialect)
    notes = list(found.notes)
    if known.made:
        kind = known.config.get("model_type")
        notes.append(f"the family is taken from the arguments: {found.family.name} ({kind})")
    return Crossed(found.checkpoint, found.losses, tuple(notes))


def _of_reference(checkpoint: Checkpoint, like: Checkpoint, choice: Choice) -> str:
    known = recognised(checkpoint, schema=choice.schema, config=choice.config)
    if known is None:
        raise CoverageError(_unknown(checkpoint, like.layout.naming))
    return translation.spoken(like, known)


def dequantised(checkpoint: Checkpoint, dialect: str | None, choice: Choice) -> Checkpoint:
    """The checkpoint with quantised tensors read as --dtype asks; as it is if nothing asks."""
    if checkpoint.quantised is None:
        return checkpoint
    if choice.dtype is not None:
        return checkpoint.quantised(named(choice.dtype))
    if dialect is not None and dialects()[dialect].naming != checkpoint.layout.naming:
        raise LossError(
            f"{checkpoint.path} is quantised in blocks (fp8 or MXFP4), and the target cuts and "
            "fuses its tensors elsewhere than at blocks. Dequantise it with --dtype bf16."
        )
    return checkpoint


def _unknown(checkpoint: Checkpoint, naming: str, given: str | None = None) -> str:
    config = read_config(given) if given is not None else checkpoint.extras.get(CONFIG)
    kind = config.get("model_type") if isinstance(config, Mapping) else None
    said = "nothing says what model it is"
    if kind is not None:
        said = f"model_type {kind!r} is in no family"
    elif any(k.startswith(ARGS) for k in checkpoint.extras):
        said = "its arguments describe no known family"
    return (
        f"{checkpoint.path}: its tensors are named as {checkpoint.layout.naming!r}, the target's "
        f"as {naming!r}, and {said}. Give the model's config with --config DIR, or a family with "
        "--schema NAME|FILE (reshard schemas lists them)."
    )


def in_naming_of(left: Checkpoint, right: Checkpoint, choice: Choice) -> Checkpoint:
    """`right` with its tensors named as those of `left`, where a family joins the two."""
    if left.layout.naming == right.layout.naming:
        return right
    known = recognised(right, schema=choice.schema, config=choice.config) or recognised(
        left, schema=choice.schema, config=choice.config
    )
    if known is None:
        raise CoverageError(_unknown(right, left.layout.naming))
    spoken = translation.spoken(left, known)
    return translation.translate(right, known, spoken).checkpoint


def canonical(checkpoint: Checkpoint, choice: Choice) -> Checkpoint:
    """The checkpoint under its family's own names: the hub's, whatever container it lies in."""
    known = recognised(checkpoint, schema=choice.schema, config=choice.config)
    if known is None:
        raise CoverageError(_unknown(checkpoint, "torch"))
    return translation.translate(checkpoint, known, "hf").checkpoint
