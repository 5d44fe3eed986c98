"""Declares the files that a trainer keeps beside the tag folder, for another number of ranks."""

from __future__ import annotations

from collections.abc import Mapping

from reshard.containers import safetensors
from reshard.containers.carried import Carried
from reshard.containers.safetensors import Item
from reshard.dtypes import named
from reshard.format import Fate
from reshard.layout import Draft
from reshard.tensor import MASTER, TensorId

from .cuts import same
from .goal import Goal
from .native import Native, Wrapper
from .recognise import LATEST
from .rng import derived
from .sheet import Sheet
from .table import Table, WholeHolder
from .wrapper import carried_safely


def side_drafts(
    wrapper: Wrapper, own: Native, aim: Goal, table: Table
) -> tuple[list[Draft], list[Fate]]:
    """The drafts beside the tag folder, and what becomes of each file of the source."""
    world = aim.dp * aim.mp
    drafts = [literal(LATEST, aim.tag.encode())]
    drafts += [literal(name, data) for name, data in wrapper.copies.items()]
    fates = [Fate(name, "keep") for name in wrapper.copies]
    fates += [Fate(shown, "keep") for shown in ("wrapper", "trainer_state")]
    if wrapper.scheduler is not None:
        name, held = wrapper.scheduler
        changed, detail = rescaled(wrapper, held, aim.iteration, (len(wrapper.rng), world))
        drafts.append(_file(name, changed))
        fates += [Fate(n, "remap" if detail else "keep", detail) for n in (name, "scheduler")]
    for rank, state in random_states(wrapper, world, aim.iteration).items():
        drafts.append(_file(rng_name(wrapper.kind, rank, world), state))
    if wrapper.rng:
        kept = "keep" if sorted(wrapper.rng) == list(range(world)) else "derive"
        detail = (
            "" if kept == "keep" else f"kept where both have the rank, made for others of {world}"
        )
        fates += [Fate(shown, kept, detail) for shown in ("rng", "rng_ranks")]
    drafts += _weights(wrapper, own, table)
    return drafts, fates


def literal(name: str, data: bytes) -> Draft:
    """A file of known bytes."""
    return Draft(name, len(data), [(0, data)] if data else [])


def _file(name: str, carried: Carried) -> Draft:
    sheet = Sheet(name)
    return sheet.draft(sheet.put(carried) if carried_safely(carried) else {})[0]


def rng_name(kind: str, rank: int, world: int) -> str:
    """What a rank's file is called. Source: transformers 5.24 trainer.py _save_rng_state."""
    if kind == "accelerate":
        return f"random_states_{rank}.pkl"
    return f"rng_state_{rank}.pth" if world > 1 else "rng_state.pth"


def random_states(wrapper: Wrapper, world: int, step: int) -> Mapping[int, Carried]:
    """Every rank's random state: kept where the source has the rank, else derived."""
    if not wrapper.rng:
        return {}
    like = wrapper.rng[min(wrapper.rng)]
    return {
        rank: wrapper.rng[rank] if rank in wrapper.rng else derived(like, step, rank)
        for rank in range(world)
    }


def rescaled(
    wrapper: Wrapper, held: Carried, steps: int, worlds: tuple[int, int]
) -> tuple[Carried, str]:
    """The scheduler for another number of processes.

    A scheduler that accelerate prepared steps once for each process, so its counters are in steps
    times processes. Source: accelerate 1.15 scheduler.py; fixtures/wrappers/README.
    """
    before, after = worlds
    obj = held.obj
    if wrapper.kind != "accelerate" or before == after or not isinstance(obj, dict):
        return held, ""
    if obj.get("last_epoch") != steps * before:
        return held, ""
    last = steps * after
    changed = {**obj, "last_epoch": last, "_step_count": last + 1}
    return Carried(changed, held.values), f"last_epoch {steps * before} -> {last}: one a process"


def _weights(wrapper: Wrapper, own: Native, table: Table) -> list[Draft]:
    """The safetensors copies of the weights, file by file as the source has them."""
    drafts = []
    for name, held in wrapper.weights.items():
        items: list[Item] = []
        owners: dict[str, str] = {}
        for key, shape, dtype in held:
            owner = own.model.aliases.get(key, key)
            known = table.tensors.get(TensorId(owner)) or table.tensors.get(TensorId(owner, MASTER))
            if known is not None and known.shape == shape:
                items.append(Item(key, shape, named(dtype)))
                owners[key] = owner
        draft = safetensors.draft(name, items)
        drafts.append(draft)
        for array in draft.arrays:
            holder = WholeHolder(same(array.shape), array)
            table.add(TensorId(owners[array.key]), array.shape, array.dtype, holder, name)
    return drafts
