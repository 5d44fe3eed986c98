"""The same tiny llama in three frameworks: cases for the real ones, and what they say."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from peers import run_module

Array = NDArray[Any]

#: Sizes that differ pairwise, heads that are not key-value heads; ZeRO and FSDP need padding.
CONFIG: Mapping[str, Any] = {
    "vocab_size": 107,
    "hidden_size": 40,
    "intermediate_size": 52,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
LEARNING_RATE, BATCH = 4e-3, 8
#: Steps without an overflow after which the loss scale of fp16 grows; at first it is 512.
WINDOW = 8


def rate(samples: int) -> float:
    """Megatron's schedule in `megatron_make`: warm-up over 2 steps, a cosine over 20."""
    if samples <= 2 * BATCH:
        return LEARNING_RATE * samples / (2 * BATCH)
    done = min(1.0, (samples - 2 * BATCH) / (18 * BATCH))
    least = LEARNING_RATE / 10
    return least + 0.5 * (math.cos(math.pi * done) + 1.0) * (LEARNING_RATE - least)


#: The rate of each step, for frameworks that are given a table.
RATES = tuple(rate(BATCH * n) for n in range(64))


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityCase:
    """A run of one framework: from `weights` or `load`, `before` steps, `save`, `steps` more.

    `state`-N is where the live state goes (slot.name, whole tensors, the framework's own names)
    N steps after the save or load: 0, and each of `probes`. `dtype` bf16: computes in it, fp32
    masters; so fp16, but under FSDP2. `spoil`: "step", "decay", "beta", "moment" or
    "schedule" of the loaded state.
    `weights`: a safetensors file to start from, or a Megatron checkpoint.
    """

    name: str
    framework: str  # fsdp2 | deepspeed | megatron
    world: int = 2
    stage: int = 3  # of ZeRO
    tp: int = 1  # of Megatron, as the three below
    pp: int = 1
    first_stage: int | None = None
    distributed: str = "none"
    probes: tuple[int, ...] = ()
    dtype: str = "fp32"
    load: Path | None = None
    before: int = 0
    save: Path | None = None
    steps: int = 4
    back: Path | None = None  # saved at the very end
    state: Path | None = None
    spoil: str | None = None
    weights: Path | None = None
    seed: int = 7
    config: Mapping[str, Any] = field(default_factory=lambda: CONFIG)
    rates: Sequence[float] = RATES
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    clip: float = 1.0
    batch: int = BATCH
    length: int = 16
    seconds: float = 150.0


def judge(cases: Sequence[ParityCase], folder: Path) -> dict[str, dict[str, Any]]:
    """What the frameworks say of each case, by name; one that fails does not stop the others.

    Keys: error (None, or the ranks' tracebacks), first (the step after the load or save), steps
    (the counters that occur), options (decay, betas and eps of each group), and of the `steps` at
    the end losses, norms, lrs and scales of the loss; `before` has those before the save.
    """
    folder.mkdir(parents=True, exist_ok=True)
    wanted, found = folder / "cases.json", folder / "results.jsonl"
    wanted.write_text(json.dumps([asdict(case) for case in cases], default=str))
    run_module("peers.parity_judge", str(wanted), str(found))
    results = [json.loads(line) for line in found.read_text().splitlines()]
    return {result["name"]: result for result in results}


def apart(a: Mapping[str, Any], b: Mapping[str, Any], what: str = "losses") -> float:
    """The largest difference of two runs over the steps that both did."""
    return max(abs(x - y) for x, y in zip(a[what], b[what], strict=False))


def first_weights(folder: Path, config: Mapping[str, Any] = CONFIG) -> None:
    """A hub folder of the model: config.json, and weights that are no two alike."""
    c = config
    hidden, ffn, head = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    queries, keys = head * c["num_attention_heads"], head * c["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (c["vocab_size"], hidden),
        "lm_head.weight": (c["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    for i in range(c["num_hidden_layers"]):
        lead = f"model.layers.{i}."
        shapes |= {
            f"{lead}self_attn.q_proj.weight": (queries, hidden),
            f"{lead}self_attn.k_proj.weight": (keys, hidden),
            f"{lead}self_attn.v_proj.weight": (keys, hidden),
            f"{lead}self_attn.o_proj.weight": (hidden, queries),
            f"{lead}mlp.gate_proj.weight": (ffn, hidden),
            f"{lead}mlp.up_proj.weight": (ffn, hidden),
            f"{lead}mlp.down_proj.weight": (hidden, ffn),
            f"{lead}input_layernorm.weight": (hidden,),
            f"{lead}post_attention_layernorm.weight": (hidden,),
        }
    folder.mkdir(parents=True)
    noise = np.random.default_rng(7)
    weights = {
        name: (0.06 * noise.standard_normal(shape) + (len(shape) < 2)).astype(np.float32)
        for name, shape in shapes.items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    said = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps({**c, **said}))


def split(name: str, value: Array) -> Iterator[tuple[str, Array]]:
    """A tensor of Megatron as transformers names and cuts it; written out by hand, as a check.

    Layers are stacked. QKV: for each query group its heads of q, one of k, one of v.
    """
    heads, groups, head = (
        CONFIG[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    lead, _, rest = name.partition("decoder.layers.")
    if rest:
        assert not lead
        for i, layer in enumerate(value):
            yield from _split_layer(
                f"model.layers.{i}.", rest, layer, (heads // groups, groups, head)
            )
        return
    theirs = {
        "embedding.word_embeddings.weight": "model.embed_tokens.weight",
        "output_layer.weight": "lm_head.weight",
        "decoder.final_layernorm.weight": "model.norm.weight",
    }
    yield theirs[name], value


def _split_layer(
    lead: str, rest: str, value: Array, sizes: tuple[int, int, int]
) -> Iterator[tuple[str, Array]]:
    each, groups, head = sizes
    if rest == "self_attention.linear_qkv.weight":
        rows = value.reshape(groups, each + 2, head, -1)
        for part, at in (("q", rows[:, :each]), ("k", rows[:, each]), ("v", rows[:, each + 1])):
            yield f"{lead}self_attn.{part}_proj.weight", at.reshape(-1, value.shape[1])
    elif rest == "mlp.linear_fc1.weight":
        half = len(value) // 2
        yield f"{lead}mlp.gate_proj.weight", value[:half]
        yield f"{lead}mlp.up_proj.weight", value[half:]
    else:
        theirs = {
            "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
            "mlp.linear_fc2.weight": "mlp.down_proj.weight",
            "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
            "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
            "input_layernorm.weight": "input_layernorm.weight",
            "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
        }
        yield lead + theirs[rest], value


def live_state(stem: Path, after: int) -> dict[str, Array]:
    """slot.name -> tensor that a case showed `after` steps, in the hub's names."""
    out: dict[str, Array] = {}
    for key, value in load_file(f"{stem}-{after}").items():
        slot, _, name = key.partition(".")
        parts = split(name, value) if name.startswith(_MEGATRONS) else ((name, value),)
        out |= {f"{slot}.{n}": np.ascontiguousarray(v) for n, v in parts}
    return out


_MEGATRONS = ("embedding.", "decoder.", "output_layer.")


def states_apart(a: Mapping[str, Array], b: Mapping[str, Array]) -> dict[str, float]:
    """{slot: largest difference of any element}. Raises AssertionError for other names."""
    assert a.keys() == b.keys()
    out: dict[str, float] = {}
    for key, value in a.items():
        slot = key.partition(".")[0]
        gap = np.abs(value.astype(np.float64) - b[key].astype(np.float64)).max()
        out[slot] = max(out.get(slot, 0.0), float(gap))
    return out
