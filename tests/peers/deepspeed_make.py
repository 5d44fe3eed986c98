"""Real DeepSpeed trains and saves small checkpoints of forms that no fixture has.

`python -m peers.deepspeed_make RECIPES OUT`: OUT/NAME gets ckpt/, truth.safetensors, truth.json and
recipe.json of each recipe, as fixtures/deepspeed have them, and `error` where DeepSpeed failed.
A recipe with `to_universal` also gets universal/ by ds_to_universal.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from peers.deepspeed_judge import preimport, state_of
from peers.fork_ranks import fork_job

BEFORE, AFTER = 5, 4  # steps


def run_rank(recipe: dict[str, Any], out: Path, rank: int) -> None:
    """One rank: train, save, show the state, go on."""
    import torch
    import torch.distributed as dist
    from safetensors.torch import save_file

    from peers.deepspeed_training import engine_of, train_step

    engine = engine_of(recipe)
    for step in range(BEFORE):
        train_step(engine, recipe, step)
    client: dict[str, Any] = {"iteration": BEFORE, "torch_rng_state": torch.get_rng_state()}
    if recipe.get("kind") == "pipe3d":
        from peers.deepspeed_3d import INFO

        client["universal_checkpoint_info"] = INFO
    engine.save_checkpoint(
        out / "ckpt", tag=recipe.get("tag"), client_state=client,
        exclude_frozen_parameters=recipe.get("exclude_frozen", False),
    )  # fmt: skip
    truth = state_of(engine, recipe)
    after = [train_step(engine, recipe, BEFORE + i) for i in range(AFTER)]
    every: list[Any] = [None] * recipe["world"]
    dist.all_gather_object(every, truth)
    if rank == 0:
        by_rank = recipe.get("tp", 1) > 1 or recipe.get("kind") in ("pipe", "pipe3d", "moe")
        rows = {
            f"rank{r}/{n}" if by_rank else n: v.clone().contiguous()
            for r, held in enumerate(every)
            for n, v in held.items()
            if by_rank or not r
        }
        save_file(rows, out / "truth.safetensors")
        (out / "truth.json").write_text(json.dumps({"post_losses": after}))
        (out / "recipe.json").write_text(json.dumps(recipe))
    dist.barrier()
    dist.destroy_process_group()


def to_universal(folder: Path) -> None:
    """What DeepSpeed's own tool makes of a checkpoint, in FOLDER/universal."""
    from deepspeed.checkpoint import ds_to_universal

    tag = (folder / "ckpt" / "latest").read_text().strip()
    out = folder / "universal" / f"{tag}_universal"
    out.parent.mkdir()
    ds_to_universal.main(
        argparse.Namespace(
            input_folder=str(folder / "ckpt" / tag), output_folder=str(out), strict=True,
            num_extract_workers=1, num_merge_workers=1, keep_temp_folder=False,
            inject_missing_state=True,
        )
    )  # fmt: skip


def main() -> None:
    """Make every recipe's checkpoint."""
    recipes, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    preimport()
    for recipe in recipes:
        folder = out / recipe["name"]
        folder.mkdir(parents=True)
        start = partial(run_rank, recipe, folder)
        error = fork_job(start, recipe["world"], folder / "logs", 120.0)
        if error is not None:
            (folder / "error").write_text(error)
        elif recipe.get("to_universal"):
            to_universal(folder)


if __name__ == "__main__":
    main()
