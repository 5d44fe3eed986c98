"""Makes a torch_dist checkpoint with optimizer of about SIZE.

    python -m benchmarks.make_megatron 512MB OUT [tp4pp2] [--sparse]

The layout is what `reshard` writes and megatron-core loads; the numbers follow from each element's
index, so that masters round to weights and every tensor is different. --sparse: every number is
zero, and the arrays are holes that take no room on the disk.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from reshard.checkpoint import Checkpoint
from reshard.cli import parse_size
from reshard.dtypes import BFLOAT16, FLOAT32
from reshard.files import Files, blocks
from reshard.format import Declaration, WriteOptions
from reshard.layout import Layout
from reshard.tensor import LogicalTensor, TensorId
from reshard.topology import Topology, parse_degrees, parse_target, topology

Array = npt.NDArray[Any]
VOCAB = 4001
SLOTS = {"param": BFLOAT16, "master": FLOAT32, "exp_avg": FLOAT32, "exp_avg_sq": FLOAT32}


def sizes_for(nbytes: int) -> dict[str, int]:
    """Layers and widths of a Llama-like model whose four slots take about `nbytes`."""
    hidden, widest = 256, 2048 if nbytes < 32 << 30 else 8192
    while 14 * parameters(hidden, 8) < nbytes and hidden < widest:
        hidden += 256
    layers = 8
    while 14 * parameters(hidden, layers) < nbytes:
        layers += 8
    return {"hidden": hidden, "layers": layers}


def shapes(hidden: int, layers: int) -> dict[str, tuple[int, ...]]:
    """Canonical tensors of the model."""
    ffn, head = hidden * 5 // 2 // 64 * 64, 64
    heads = hidden // head
    groups = max(g for g in (4, 8) if heads % g == 0) if heads % 4 == 0 else heads
    out: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (VOCAB, hidden)}
    for i in range(layers):
        at = f"decoder.layers.{i}"
        out[f"{at}.input_layernorm.weight"] = (hidden,)
        out[f"{at}.self_attention.linear_proj.weight"] = (hidden, heads * head)
        out[f"{at}.self_attention.linear_qkv.weight"] = ((heads + 2 * groups) * head, hidden)
        out[f"{at}.pre_mlp_layernorm.weight"] = (hidden,)
        out[f"{at}.mlp.linear_fc1.weight"] = (2 * ffn, hidden)
        out[f"{at}.mlp.linear_fc2.weight"] = (hidden, ffn)
    out["decoder.final_layernorm.weight"] = (hidden,)
    out["output_layer.weight"] = (VOCAB, hidden)
    return out


def parameters(hidden: int, layers: int) -> int:
    """Elements of the model."""
    return sum(prod(s) for s in shapes(hidden, layers).values())


def args_of(hidden: int, layers: int, at: Topology) -> dict[str, object]:
    """The args Megatron would have saved."""
    made = shapes(hidden, layers)
    rows = made["decoder.layers.0.self_attention.linear_qkv.weight"][0] // 64
    heads = hidden // 64
    return {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": (rows - heads) // 2,
        "group_query_attention": True,
        "kv_channels": 64,
        "ffn_hidden_size": made["decoder.layers.0.mlp.linear_fc2.weight"][1],
        "swiglu": True,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "untie_embeddings_and_output_weights": True,
        "position_embedding_type": "rope",
        "transformer_impl": "local",
        "vocab_size": VOCAB,
        "make_vocab_size_divisible_by": 128,
        "seed": 1,
        "global_batch_size": 8,
        "micro_batch_size": 1,
        "bf16": True,
        "tensor_model_parallel_size": at.tp,
        "pipeline_model_parallel_size": at.pp,
        "data_parallel_size": 1,
    }


def transformers_config(hidden: int, layers: int) -> dict[str, object]:
    """The config.json of the same model."""
    args = args_of(hidden, layers, topology({"dp": 1}))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": args["ffn_hidden_size"],
        "num_hidden_layers": layers,
        "num_attention_heads": args["num_attention_heads"],
        "num_key_value_heads": args["num_query_groups"],
        "head_dim": 64,
        "vocab_size": VOCAB,
        "tie_word_embeddings": False,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "bfloat16",
    }


def source_of(hidden: int, layers: int, at: Topology) -> Checkpoint:
    """A checkpoint without files, to be declared."""
    from reshard.containers.carried import Carried
    from reshard.converters.megatron.run import Optimizer, Options, Run
    from reshard.converters.megatron.sizes import sizes
    from reshard.converters.megatron.stages import pipeline

    args = args_of(hidden, layers, at)
    options = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "lr_mult": 1.0}
    more = {"is_expert_parallel": False, "is_decoupled_lr": False}
    groups = tuple(
        Options({**options, **more, "wd_mult": w, "weight_decay": 0.1 * w}) for w in (1.0, 0.0)
    )
    run = Run(
        args=args,
        model=sizes(args),
        topology=at,
        pipeline=pipeline(layers, at.pp),
        common={"checkpoint_version": 3.0, "iteration": 100},
        optimizer=Optimizer(groups, 100.0, False, False),
        spec="local",
        rng={(): Carried(None)},
    )
    tensors = {}
    for name, shape in shapes(hidden, layers).items():
        for slot, dtype in SLOTS.items():
            t = TensorId(name, slot)
            tensors[t] = LogicalTensor(t, shape, dtype)
    layout = Layout(tensors, lambda _: (), "megatron")
    return Checkpoint(Path(), "megatron", "", at, layout, (), iteration=100, native=run)


def values_of(tensor: TensorId, start: int, count: int) -> Array:
    """The numbers of `count` elements from flat index `start` on, in the slot's dtype."""
    seed = int.from_bytes(hashlib.blake2b(tensor.name.encode(), digest_size=4).digest(), "little")
    index = np.arange(start, start + count, dtype=np.uint32)
    mixed = (index ^ np.uint32(seed)) * np.uint32(2654435761)
    mixed ^= mixed >> np.uint32(15)
    master = (mixed >> np.uint32(8)).astype(np.float32) * np.float32(2**-24) - np.float32(0.5)
    if tensor.slot == "param":
        return master.astype(BFLOAT16.numpy)
    if tensor.slot == "exp_avg":
        return master * np.float32(0.01)
    return master * master if tensor.slot == "exp_avg_sq" else master


def fill(declaration: Declaration, folder: Path, *, sparse: bool) -> None:
    """Write every file of a declaration, block by block."""
    for draft in declaration.drafts:
        path = folder / draft.name
        with open(path, "wb") as out:
            os.truncate(path, draft.size)
            for offset, data in draft.literals:
                out.seek(offset)
                out.write(data)
    if sparse:
        return
    with Files(folder, writable=True) as files:
        for tensor, logical in declaration.layout.tensors.items():
            for piece in declaration.layout.pieces(tensor):
                for part in blocks(piece.box.shape, 1 << 20):
                    box = part.shift(piece.box.start)
                    files.write(piece, box, _box_values(tensor, logical, box))


def _box_values(tensor: TensorId, logical: LogicalTensor, box: Any) -> Array:
    width = logical.shape[-1]
    if len(box.shape) == 1:
        return values_of(tensor, box.start[0], box.shape[0])
    first = box.start[0] * width
    whole = values_of(tensor, first, box.shape[0] * width).reshape(box.shape[0], width)
    return whole[:, box.start[1] : box.stop[1]]


def make(
    nbytes: int,
    out: Path,
    degrees: Mapping[str, int],
    *,
    sparse: bool = False,
    layers: int | None = None,
) -> Path:
    """Write the checkpoint below the run folder `out`; its own folder.

    `layers`: that many narrow ones, whatever `nbytes` says.
    """
    from reshard.converters.megatron.dist_write import declare_dist

    at = topology({"dp": 1, **degrees})
    sizes = sizes_for(nbytes) if layers is None else {"hidden": 512, "layers": layers}
    source = source_of(**sizes, at=at)
    text = f"tp{at.tp}pp{at.pp}"
    declaration = declare_dist(source, parse_target(text), WriteOptions())
    folder: Path = out / declaration.folder
    folder.mkdir(parents=True)
    fill(declaration, folder, sparse=sparse)
    for name, data in declaration.trackers.items():
        (out / name).write_bytes(data)
    return folder


if __name__ == "__main__":
    size, target, *rest = (a for a in sys.argv[1:] if a != "--sparse")
    degrees = parse_degrees(rest[0] if rest else "tp4pp2")
    print(make(parse_size(size), Path(target), degrees, sparse="--sparse" in sys.argv))
