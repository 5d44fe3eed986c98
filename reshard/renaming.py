"""A source under the names of another framework, by way of its family."""

from __future__ import annotations

from collections.abc import Mapping

from reshard import spelling
from reshard import translate as translation
from reshard.checkpoint import Checkpoint
from reshard.containers.small import read_config
from reshard.errors import CoverageError
from reshard.families import ARGS, CONFIG, recognised
from reshard.format import Loss
from reshard.namings import Choice, dialects


def renamed(
    plain: Checkpoint, dialect: str, choice: Choice
) -> tuple[Checkpoint, tuple[Loss, ...], tuple[str, ...]]:
    """The checkpoint in this dialect, what that loses, and what a person should know.

    It is as it was where it is in the dialect already, and nothing says its family.

    Raises CoverageError where no family joins the namings.
    """
    naming = dialects()[dialect].naming
    same = plain.layout.naming == naming
    known = recognised(plain, schema=choice.schema, config=choice.config)
    if known is None:
        if same:
            names = dict.fromkeys(t.name for t in plain.layout.tensors)
            said = choice.config is not None or CONFIG in plain.extras
            spelling.check(names, dialect, str(plain.path), config=said)
            return plain, (), ()
        raise CoverageError(_unknown(plain, naming, choice.config))
    found = translation.translate(plain, known, dialect)
    notes = list(found.notes)
    if known.made:
        kind = known.config.get("model_type")
        notes.append(f"the family is taken from the arguments: {found.family.name} ({kind})")
    return found.checkpoint, found.losses, tuple(notes)


def of_reference(checkpoint: Checkpoint, like: Checkpoint, choice: Choice) -> str:
    """The dialect that a reference is in, of the family of a checkpoint."""
    known = recognised(checkpoint, schema=choice.schema, config=choice.config)
    if known is None:
        raise CoverageError(_unknown(checkpoint, like.layout.naming))
    return translation.spoken(like, known)


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
