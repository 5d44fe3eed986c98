"""The random states of a run's ranks: kept for the same rank set, else derived for the new one."""

from __future__ import annotations

from collections.abc import Sequence

from reshard.containers.carried import Carried
from reshard.format import Fate, Loss
from reshard.topology import Topology

from .carry import tensor_of
from .rng import RankOfRng, derive
from .run import Run, data_parallel


def rng_grid(topology: Topology) -> tuple[int, ...]:
    """The grid of torch_dist's rng_state objects: (pp, tp), with expert parallelism (pp, tp, dp).

    Source: megatron/training/checkpointing.py get_rng_state @ core_v0.16.1; fixtures a-tp4pp2,
    c-pp2ep2.
    """
    if topology.ep > 1:
        return (topology.pp, topology.tp, topology.cp * data_parallel(topology))
    return (topology.pp, topology.tp)


def rng_copies(run: Run, topology: Topology) -> int:
    """How many ranks' states lie at one position: every data-parallel rank's if each has its own.

    Source: --data-parallel-random-init in megatron/training/checkpointing.py get_rng_state, whose
    load takes the state of its rank from the list @ core_v0.16.1.
    """
    return topology.cp * data_parallel(topology) if _own_states(run, topology) else 1


def _own_states(run: Run, topology: Topology) -> bool:
    return bool(run.args.get("data_parallel_random_init")) and topology.ep == 1


def keeps_rng(
    run: Run, topology: Topology, grid: tuple[int, ...], wanted: Sequence[tuple[int, ...]]
) -> bool:
    """Whether the run's random states at these positions are those of the same ranks."""
    if run.rng_grid != grid or not all(p in run.rng for p in wanted):
        return False
    if not _own_states(run, topology):
        return True
    held = [run.rng[p].obj for p in wanted]
    return all(isinstance(x, list) and len(x) == rng_copies(run, topology) for x in held)


def rng_states(
    run: Run, topology: Topology, grid: tuple[int, ...]
) -> tuple[dict[tuple[int, ...], Carried], list[Fate], list[Loss]]:
    """The random state of every position of a grid: kept for the same rank set, else derived."""
    wanted = positions(grid)
    if run.rng and keeps_rng(run, topology, grid, wanted):
        return (
            {p: run.rng[p] for p in wanted},
            [Fate("rng_state", "keep", "the rank set is the same")],
            [],
        )
    if not run.rng:
        return {}, [], []
    seed = run.args.get("seed")
    step = run.common.get("iteration")
    if not isinstance(seed, int) or not isinstance(step, int):
        why = "args say no seed" if not isinstance(seed, int) else "no iteration is recorded"
        return {}, [Fate("rng_state", "drop", why)], [Loss("rng-dropped", "rng_state", why)]
    detail = f"from seed {seed}, iteration {step}, rank and stream, for another rank set"
    made = {}
    for p in wanted:
        ranks = [p[2]] if len(p) > 2 else range(rng_copies(run, topology))
        one = [
            _derived(seed, step, RankOfRng(p[0], p[1], dp), f"rng/{'/'.join(map(str, p))}/{dp}")
            for dp in ranks
        ]
        values = {key: data for state in one for key, data in state.values.items()}
        made[p] = Carried([state.obj for state in one], values)
    return (
        made,
        [Fate("rng_state", "derive", detail)],
        [Loss("rng-derived", "rng_state", detail)],
    )


def _derived(seed: int, step: int, rank: RankOfRng, key: str) -> Carried:
    found = derive(seed, step, rank)
    values: dict[str, bytes] = {}

    def put(name: str, data: bytes) -> object:
        made = tensor_of(data, "uint8", f"{key}/{name}")
        values.update(made.values)
        return made.obj

    state = {
        "random_rng_state": found.python,
        "np_rng_state": found.numpy,
        "torch_rng_state": put("torch", found.torch),
        "cuda_rng_state": put("cuda", found.cuda),
        "rng_tracker_states": {k: put(k, v) for k, v in found.tracker.items()},
    }
    return Carried(state, values)


def positions(grid: Sequence[int]) -> list[tuple[int, ...]]:
    """Every position of a grid, the last axis fastest."""
    out: list[tuple[int, ...]] = [()]
    for n in grid:
        out = [(*p, i) for p in out for i in range(n)]
    return out
