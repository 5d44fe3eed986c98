"""Real frameworks as judges: one process imports a framework, and forks the ranks of each case."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronCase:
    """A checkpoint that megatron-core loads at a topology, compares with a truth and trains on.

    Folders are run folders (with a tracker) or iteration folders, `torch_dist` or legacy.
    """

    name: str
    checkpoint: Path
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int | None = None  # Megatron's default: tp
    dp: int | None = None  # the smallest that the expert degrees allow
    first_stage: int | None = None  # layers on the first stage, where stages are uneven
    last_stage: int | None = None
    #: Rows of the vocabulary. Megatron rounds up by its own rule, which depends on tp; the rows
    #: that this adds take part in the softmax, so a loss moves with them.
    padded_vocab: int | None = None
    #: How the optimizer is sharded: "none", "fully_reshardable", "dp_reshardable"; None: as the
    #: file says.
    distributed: str | None = None
    #: Elements in a bucket of the distributed optimizer, which then overlaps the reduction of
    #: gradients, as Megatron cuts buckets only there. None: one bucket.
    bucket_size: int | None = None
    weights_only: bool = False
    #: A fixture with truth.safetensors, or a checkpoint of the same state that Megatron wrote.
    #: None: the checkpoint's own file.
    truth: Path | None = None
    #: A checkpoint of the same state that Megatron wrote. It is trained at this case's topology
    #: and at its own: how far these two part is the noise floor that this case is held to.
    native: Path | None = None
    #: Where Megatron itself cannot load `native` at this topology: the checkpoint and the degrees
    #: at which it can reload one of the same model, for the noise floor.
    floor_native: Path | None = None
    floor_at: tuple[tuple[str, int], ...] = ()
    #: Samples in a micro-batch. Sizes the matrix products, and where sums are rounded to bf16.
    micro_batch: int = 1
    #: Where Megatron cannot load `native` at this topology: the floor is how far it ends from
    #: itself at its own topology when only micro-batches grow to these sizes. For experts that is
    #: what a change of EP does: more or fewer tokens in a product.
    floor_micro_batches: tuple[int, ...] = ()
    #: A checkpoint whose args are the job's command line, where the case's own lack how it trains.
    args: Path | None = None
    override_schedule: bool = False  # --override-opt_param-scheduler
    steps: int = 4
    probes: tuple[int, ...] = ()  # steps after which weights and moments are held to the floor too
    #: Spoil the live state after loading, to see that the judge notices: "step", "decay", "beta",
    #: "moment", "lr".
    spoil: str | None = None
    seconds: float = 240.0  # a rank that runs longer fails the case

    def __post_init__(self) -> None:
        if self.world % (self.pp * self.ep * (self.etp or self.tp)):
            raise ValueError(f"{self.name}: ep and etp do not divide the {self.world} ranks")

    @property
    def data_parallel(self) -> int:
        return self.dp or max(1, self.ep * (self.etp or self.tp) // self.tp)

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.data_parallel


def judge(cases: Sequence[MegatronCase], tmp_path: Path) -> list[dict[str, Any]]:
    """What megatron-core says of each case; a case that fails does not stop the others.

    Keys of a result: name, error (None, or the tracebacks of the ranks), ok; tensors (how many
    were compared), slots, different (what is not equal to the truth, bit for bit), unrounded
    (weights that are not their rounded master), adam_steps, groups, schedule, rng, losses,
    grad_norms, lrs; with a truth.json also loss_difference and grad_norm_difference, which depend
    on the kernels of the CPU that wrote it (up to 6e-4 on another one); with `native` also floor,
    distance and beyond_floor.
    """
    tmp_path.mkdir(parents=True, exist_ok=True)
    wanted, found = tmp_path / "cases.json", tmp_path / "results.jsonl"
    wanted.write_text(json.dumps([asdict(case) for case in cases], default=str))
    run_module("peers.megatron_judge", str(wanted), str(found))
    return [json.loads(line) for line in found.read_text().splitlines()]


def run_module(module: str, *arguments: str) -> None:
    """Run one of the peers' programs with the environment that they need."""
    environment = os.environ | {
        "PYTHONPATH": str(TESTS),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        # megatron.core.jit compiles small functions at import, and would need a C++ compiler
        "TORCHDYNAMO_DISABLE": "1",
        "PYTHONWARNINGS": "ignore",  # Megatron and torch warn of each other by the hundred
    }
    run = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode:
        raise RuntimeError(f"{module} itself failed:\n{run.stderr[-8000:]}")
