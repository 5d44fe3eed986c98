"""A source made ready for a target: dequantised where asked, translated where namings differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from reshard.checkpoint import TIES, Checkpoint, ties
from reshard.containers.small import object_beside
from reshard.dtypes import named
from reshard.errors import LossError, UsageError
from reshard.format import Format, Loss
from reshard.namings import WRITTEN, Choice, dialects
from reshard.topology import Target

#: The item of a TARGET that names a dialect: `dcp:names=hf`.
NAMES = "names"


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
    if named is not None:
        return named
    if target.variant is not None and target.variant in dialects():
        return target.variant
    naming = getattr(form, "naming", None)
    return None if spoken is None or naming in (None, spoken) else WRITTEN[naming]


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
        from reshard.renaming import of_reference

        dialect = of_reference(checkpoint, like, choice)
    plain = dequantised(checkpoint, dialect, choice)
    if dialect is None or choice.schema == "none":
        return Crossed(plain)
    naming = dialects()[dialect].naming
    if plain.layout.naming == naming and (naming == "megatron" or plain.quantised is not None):
        return Crossed(plain)
    from reshard.renaming import renamed

    return Crossed(*renamed(plain, dialect, choice))


def with_second_names(crossed: Crossed, form: Format) -> Crossed:
    """The source with the names of tied weights that its files leave out and its model has.

    The hub and Megatron keep one name; the state dicts of torch's frameworks have all, and their
    loaders ask for all. A note, where no family knows the name.
    """
    checkpoint = crossed.checkpoint
    if {getattr(form, "naming", None), checkpoint.layout.naming} != {"torch"}:
        return crossed
    config = checkpoint.extras.get("config") or object_beside(checkpoint.path / "config.json")
    if not isinstance(config, Mapping):
        return crossed
    from reshard.families import CONFIG, recognised
    from reshard.translate import second_names

    known = recognised(replace(checkpoint, extras={CONFIG: config}))
    told, tied = ties(checkpoint), config.get("tie_word_embeddings") is True
    if known is None and tied and not told:
        note = (
            f"the config ties the embeddings of a {config.get('model_type')!r}, which is in no "
            "family: if the source leaves out the name of the head, so does the target, and a "
            "loader has to allow that (allow_partial_load, strict=False)"
        )
        return replace(crossed, notes=(*crossed.notes, note))
    found = {} if known is None else second_names(checkpoint, known)
    if not found:
        return crossed
    extras = {**checkpoint.extras, TIES: {**found, **told}}
    return replace(crossed, checkpoint=replace(checkpoint, extras=extras))


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
