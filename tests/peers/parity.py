"""The same tiny llama in two frameworks: cases for real FSDP2 and DeepSpeed, and what they say."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from peers import run_module

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
#: The rate of each step: warm-up, then decay, no two alike.
RATES = tuple(0.004 * min(1.0, (n + 1) / 4) * 0.97**n for n in range(64))


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityCase:
    """A run of one framework: from a seed or from `load`, `before` steps, `save`, `steps` more.

    `state` is where the live state goes (slot.name, whole tensors): that at the save, else that
    after the load. `dtype` bf16: computes in it, fp32 masters. `spoil`: "step", "decay", "beta",
    "moment" or "schedule" of the loaded state. `weights`: a safetensors file to start from.
    """

    name: str
    framework: str  # fsdp2 | deepspeed
    world: int = 2
    stage: int = 3  # of ZeRO
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
    first_batch: int = 0  # the batch of step 0
    rates: Sequence[float] = RATES
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    clip: float = 1.0
    batch: int = 8
    length: int = 16
    seconds: float = 150.0


def judge(cases: Sequence[ParityCase], folder: Path) -> dict[str, dict[str, Any]]:
    """What the frameworks say of each case, by name; one that fails does not stop the others.

    Keys: error (None, or the ranks' tracebacks), first (the step after the load or save), steps
    (the counters that occur), options (decay, betas and eps of each group), and of the `steps` at
    the end losses, norms and lrs; `before` has losses and norms of the steps before the save.
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
