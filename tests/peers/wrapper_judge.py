"""Real Trainer, accelerate and Lightning resume under DeepSpeed: one process for many cases.

`python -m peers.wrapper_judge CASES RESULTS`: cases as JSON, one result a line.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from peers.deepspeed_judge import same_bits, spoil, state_of
from peers.fork_ranks import fork_job

os.environ.update(CUDA_VISIBLE_DEVICES="")


def preimport() -> None:
    """Everything the ranks need, once."""
    import accelerate  # noqa: F401  # all of these are imported for the forks
    import deepspeed
    import lightning  # noqa: F401
    import transformers.models.llama.modeling_llama
    from transformers import Trainer

    assert deepspeed.__version__
    assert Trainer
    assert transformers.models.llama.modeling_llama


def run_rank(case: dict[str, Any], rank: int, folder: Path) -> None:
    """One rank of a case; rank 0 writes the result."""
    os.chdir(folder)
    import warnings

    import torch.distributed as dist
    from safetensors.torch import load_file

    from peers.wrapper_training import run

    warnings.filterwarnings("ignore")
    fixture, found = Path(case["fixture"]), dict[str, Any]()

    def loaded(engine: Any) -> None:
        held = state_of(engine, {})
        truth = load_file(fixture / "truth.safetensors")
        found["different"] = [n for n in truth if n not in held or not same_bits(truth[n], held[n])]
        found["compared"] = len(truth)
        states = engine.optimizer.optimizer.state.values()
        found["adam_steps"] = sorted({float(s["step"]) for s in states})
        found["decays"] = [g["weight_decay"] for g in engine.optimizer.param_groups]
        if case["spoil"]:
            spoil(engine, case["spoil"])

    resume = Path(case["checkpoint"]) if case["checkpoint"] else None
    ran = run(case["recipe"], case["world"], resume, case["steps"], loaded)
    if rank == 0:
        found |= {"name": case["name"], "error": None, "losses": ran.losses, "rates": ran.rates}
        (folder / "result.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def judged(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The result of one case; its failure is part of it."""
    folder.mkdir(parents=True)
    error = fork_job(
        lambda rank: run_rank(case, rank, folder), case["world"], folder, case["seconds"]
    )
    out = folder / "result.json"
    if error is not None or not out.exists():
        return {"name": case["name"], "error": error or "no result"}
    result: dict[str, Any] = json.loads(out.read_text())
    wanted = json.loads((Path(case["fixture"]) / "truth.json").read_text())
    pairs = zip(result["losses"], wanted["post_losses"][: case["steps"]], strict=True)
    result["distance"] = max(abs(a - b) for a, b in pairs)
    result["wanted_rate"] = wanted["lr_after"]
    return result


def main() -> None:
    """Judge every case of a file."""
    wanted, found = Path(sys.argv[1]), Path(sys.argv[2])
    preimport()
    with found.open("w") as out:
        for i, case in enumerate(json.loads(wanted.read_text())):
            out.write(json.dumps(judged(case, found.parent / f"case-{i}")) + "\n")
            out.flush()


if __name__ == "__main__":
    main()
