"""Has torch write checkpoints of about SIZE for the peers, by 4 ranks: one of them, or all.

    torchrun --nproc-per-node 4 -m benchmarks.make_dcp SIZE OUT

OUT/dcp: model and Adam state of an FSDP2 job, fp32. OUT/accelerate: the same bytes as one model, as
accelerate's folder of sharded weights. OUT/shards: again, as safetensors of the ranks' shards.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from reshard.cli import parse_size

from .make_megatron import sizes_for, transformers_config

SLOTS = ("exp_avg", "exp_avg_sq")


def shapes(hidden: int, layers: int) -> dict[str, tuple[int, ...]]:
    """The tensors of a Llama model by the hub's names; their first axes divide by 4."""
    config: Any = transformers_config(hidden, layers)
    vocab, ffn = config["vocab_size"] // 4 * 4, config["intermediate_size"]
    groups = config["num_key_value_heads"] * config["head_dim"]
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for i in range(layers):
        at = f"model.layers.{i}"
        out[f"{at}.self_attn.q_proj.weight"] = (hidden, hidden)
        out[f"{at}.self_attn.k_proj.weight"] = (groups, hidden)
        out[f"{at}.self_attn.v_proj.weight"] = (groups, hidden)
        out[f"{at}.self_attn.o_proj.weight"] = (hidden, hidden)
        out[f"{at}.mlp.gate_proj.weight"] = (ffn, hidden)
        out[f"{at}.mlp.up_proj.weight"] = (ffn, hidden)
        out[f"{at}.mlp.down_proj.weight"] = (hidden, ffn)
        out[f"{at}.input_layernorm.weight"] = (hidden,)
        out[f"{at}.post_attention_layernorm.weight"] = (hidden,)
    out["model.norm.weight"] = (hidden,)
    out["lm_head.weight"] = (vocab, hidden)
    return out


def main() -> None:
    """One rank of four."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    size, out = parse_size(sys.argv[1]), Path(sys.argv[2])
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(dist.get_rank())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def sharded(shape: tuple[int, ...]) -> DTensor:
        local = torch.randn(shape[0] // mesh.size(), *shape[1:])
        return DTensor.from_local(local, mesh, [Shard(0)], run_check=False)

    wanted = shapes(**sizes_for(size * 14 // 12))
    model = {name: sharded(shape) for name, shape in wanted.items()}
    moments = {n: {s: sharded(shape) for s in SLOTS} for n, shape in wanted.items()}
    optim = {
        "state": {n: {**slots, "step": torch.tensor(4.0)} for n, slots in moments.items()},
        "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.95), "params": list(wanted)}],
    }
    save({"model": model, "optim": optim}, storage_writer=_files(out / "dcp"))
    flat = dict(model)
    for name, slots in moments.items():
        flat |= {f"{name}.{slot}": value for slot, value in slots.items()}
    accelerated = out / "accelerate" / "pytorch_model_fsdp_0"
    save({"model": flat}, storage_writer=_files(accelerated))
    files = {name: 1 + i * 4 // len(flat) for i, name in enumerate(flat)}
    save(
        flat,
        storage_writer=HuggingFaceStorageWriter(
            str(out / "shards"), save_distributed=True, fqn_to_index_mapping=files
        ),
    )
    if dist.get_rank() == 0:
        (out / "files.json").write_text(json.dumps(files))
    dist.barrier()
    dist.destroy_process_group()


def _files(place: Path) -> FileSystemWriter:
    return FileSystemWriter(str(place), sync_files=False)


if __name__ == "__main__":
    main()
