"""The client's state for each model-states file: a rank's own where the source has it."""

from __future__ import annotations

from reshard.checkpoint import Checkpoint
from reshard.containers.carried import Carried, carry

from .goal import Goal
from .model_read import OWN, read_model
from .native import Native
from .rng import derived
from .values import strange_names

#: Entries of a client's state that are random states, by their names: each is of one rank.
_RANDOM = ("rng", "random_state")


def is_random(key: str) -> bool:
    """Whether an entry of the client's state is a random state."""
    return any(part in key for part in _RANDOM)


def client_for(source: Checkpoint, aim: Goal, mp: int, dp: int) -> Carried:
    """The client's entries for the file of a rank.

    A rank that the source has no file of gets rank 0's, with random states made anew from step
    and rank.
    """
    own = source.native if isinstance(source.native, Native) else None
    if own is None or (mp, dp) == (0, 0) or not isinstance(aim.client.obj, dict):
        return aim.client
    same = (source.topology.tp, source.topology.pp) == (aim.topology.tp, aim.topology.pp)
    found = recorded(source, own, mp, dp) if same or mp == 0 else None
    if found is not None:
        return found
    made: dict[object, object] = {}
    values = dict(aim.client.values)
    for key, value in aim.client.obj.items():
        if not is_random(str(key)):
            made[key] = value
            continue
        part = derived(Carried({key: value}, aim.client.values), aim.iteration, mp * aim.dp + dp,
                       f"derived/{len(values)}/")  # fmt: skip
        assert isinstance(part.obj, dict)
        made[key] = part.obj[key]
        values |= part.values
    return Carried(made, values)


def recorded(source: Checkpoint, own: Native, mp: int, dp: int) -> Carried | None:
    """The client's entries of one of the source's model files; None if it has no such file."""
    if (mp, dp) in own.clients:
        return own.clients[mp, dp]
    if own.stage == 3:
        name = f"zero_pp_rank_{dp}_mp_rank_{mp:02d}_model_states.pt"
    elif dp == 0:
        name = f"mp_rank_{mp:02d}_model_states.pt"
    else:
        return None
    if own.wrapper is not None:
        name = f"{own.wrapper.tag}/{name}"
    if source.format != "deepspeed" or not (source.path / name).is_file():
        return None
    file = read_model(source.path, name)
    kept = {
        k: v
        for k, v in file.top.items()
        if k not in OWN and str(k) not in own.refused and not strange_names(v)
    }
    return carry(file.file, kept, "client/")
