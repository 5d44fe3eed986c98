"""Writes a large ZeRO checkpoint of random values with torch alone, in DeepSpeed 0.19.8's layout.

`python -m peers.deepspeed_big OUT STAGE DP ROWS`: one matrix of ROWS x 1024 in each of 8 layers.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch


def main(out: Path, stage: int, dp: int, rows: int) -> None:
    folder = out / "global_step7"
    folder.mkdir(parents=True)
    (out / "latest").write_text("global_step7")
    shapes = OrderedDict((f"layers.{i}.weight", torch.Size((rows, 1024))) for i in range(8))
    numel = 8 * rows * 1024
    assert numel % (2 * dp) == 0
    weights = torch.randn(numel)
    options = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "params": [0]}
    common: dict[str, Any] = {
        "optimizer": None, "param_shapes": [shapes], "frozen_param_shapes": None,
        "frozen_param_fragments": None, "shared_params": {}, "lr_scheduler": None,
        "skipped_steps": 0, "global_steps": 7, "global_samples": 56, "dp_world_size": dp,
        "mp_world_size": 1, "buffer_names": [], "ds_version": "0.19.8",
        "ds_config": {"bf16": {"enabled": True}, "zero_optimization": {"stage": stage}},
    }  # fmt: skip
    narrow = weights.bfloat16().split(rows * 1024)
    module = {n: w.view(s) for (n, s), w in zip(shapes.items(), narrow, strict=True)}
    if stage == 3:
        module = {n: torch.empty(0, dtype=torch.bfloat16) for n in shapes}
    per_rank = weights.view(8, dp, -1).transpose(0, 1) if stage == 3 else weights.view(dp, -1)
    for rank in range(dp):
        mine = per_rank[rank].reshape(-1).clone()
        moments = {"step": torch.tensor(7.0), "exp_avg": mine / 7, "exp_avg_sq": mine.square()}
        base = {"state": {0: moments}, "param_groups": [options]}
        state: dict[str, Any] = {
            "optimizer_state_dict": base, "fp32_flat_groups": [mine], "zero_stage": 3,
            "partition_count": dp,
        } if stage == 3 else {
            "base_optimizer_state": base, "single_partition_of_fp32_groups": [mine],
            "zero_stage": stage, "partition_count": [dp], "group_paddings": [0],
        }  # fmt: skip
        tail = f"zero_pp_rank_{rank}_mp_rank_00"
        torch.save({"optimizer_state_dict": state}, folder / f"bf16_{tail}_optim_states.pt")
        if stage == 3:
            torch.save({"module": module, **common}, folder / f"{tail}_model_states.pt")
    if stage < 3:
        torch.save({"module": module, **common}, folder / "mp_rank_00_model_states.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:5]))
