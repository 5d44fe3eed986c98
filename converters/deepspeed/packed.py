"""A checkpoint's own state as typed JSON for stores of other kinds, and back."""

from __future__ import annotations

from dataclasses import replace

from reshard.checkpoint import Checkpoint, Json
from reshard.containers.carried import Carried
from reshard.containers.typed_json import decode, encode
from reshard.errors import CorruptError
from reshard.format import Loss, Packed

from .carry import lost_entries
from .clients import recorded
from .native import Native, Wrapper
from .values import Writable, strange_names
from .wrapper import carried_safely

#: The version of what `pack` gives.
VERSION = 1


def pack(source: Checkpoint) -> Packed | None:
    """The source's Native as JSON, without what may not be written again; None for no Native."""
    own = source.native
    if not isinstance(own, Native):
        return None
    losses = lost_entries(own)
    if strange_names(dict(own.config)):
        losses.append(Loss("extra-dropped", "ds_config", "names types that are not written again"))
        own = replace(own, config={})
    if own.wrapper is not None:
        own = replace(own, wrapper=_safe(own.wrapper, losses))
    own = replace(own, clients=_clients(source, own))
    return Packed({"version": VERSION, "native": encode(own)}, tuple(losses))


def _safe(wrapper: Wrapper, losses: list[Loss]) -> Wrapper:
    """A trainer's folder without files that may not be written again."""
    held: list[tuple[str, Carried]] = [(f"rng of rank {r}", c) for r, c in wrapper.rng.items()]
    held += [wrapper.scheduler] if wrapper.scheduler is not None else []
    for name, carried in held:
        if not carried_safely(carried):
            losses.append(Loss("extra-dropped", name, "names types that are not written again"))
    scheduler = wrapper.scheduler
    if scheduler is not None and not carried_safely(scheduler[1]):
        scheduler = None
    rng = {rank: carried for rank, carried in wrapper.rng.items() if carried_safely(carried)}
    return replace(wrapper, scheduler=scheduler, rng=rng)


def _clients(source: Checkpoint, own: Native) -> dict[tuple[int, int], Carried]:
    """Every rank's own entries of the client's state: random states, above all."""
    mps = source.topology.tp * source.topology.pp
    dps = own.dp if own.stage == 3 else 1
    found = {(mp, dp): recorded(source, own, mp, dp) for mp in range(mps) for dp in range(dps)}
    return {at: held for at, held in found.items() if held is not None and at != (0, 0)}


def unpack(state: Json, source: Checkpoint) -> Native:
    """The Native that `pack` was given.

    Raises CorruptError for another form, UnsafeError for a name that DeepSpeed's loaders have no
    need of.
    """
    where = f"{source.path}: the state kept for DeepSpeed"
    if not isinstance(state, dict) or state.get("version") != VERSION:
        raise CorruptError(f"{where} has another form than version {VERSION}")
    made = decode(Native, state.get("native"), Writable(), where)
    assert isinstance(made, Native)
    return made
