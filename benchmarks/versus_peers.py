"""The frameworks' own converters beside `reshard`, on the same checkpoint, in the same run."""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

from .make_megatron import sizes_for, transformers_config
from .measuring import (
    LAUNCH,
    MIB,
    RESHARD,
    bar,
    convert,
    empty,
    in_turn,
    machine,
    made,
    median,
    paired,
    run,
    size_of,
    table,
)


@dataclass(frozen=True, slots=True)
class Peer:
    """A converter of a framework, and the conversion that does the same."""

    name: str
    source: Path
    theirs: list[str]  # {} stands for the target
    to: str
    least: float  # how many times faster we mean to be
    more: tuple[str, ...] = ()


_PYTHON = sys.executable
_FORMATS = [_PYTHON, "-m", "torch.distributed.checkpoint.format_utils"]
_CONSOLIDATE = """
import json, os, sys
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
os.makedirs(sys.argv[2])
consolidate_safetensors_files(sys.argv[1], sys.argv[2], json.load(open(sys.argv[3])))
"""
_LOAD_SAVE = """
import sys
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto")
model.save_pretrained(sys.argv[2], max_shard_size="1GB")
"""


def peers(folder: Path, size: int) -> list[Peer]:
    """The sources made, and every peer."""
    log = folder / "log"
    launch = [_PYTHON, "-m", "torch.distributed.run", "--nproc-per-node", "4", "-m"]
    run([*launch, "benchmarks.make_dcp", str(size), str(folder)], log)
    dcp = folder / "dcp"
    whole = made(dcp, folder / "whole", "torch")
    pickle = next(p for p in whole.rglob("*") if p.suffix in (".pt", ".pth", ".bin"))
    zero1 = made(dcp, folder / "zero1", "deepspeed:zero1dp4")
    zero3 = made(dcp, folder / "zero3", "deepspeed:zero3dp4")
    config = folder / "config"
    config.mkdir()
    shown = transformers_config(**sizes_for(size * 14 // 12))
    shown["vocab_size"] = int(str(shown["vocab_size"])) // 4 * 4
    (config / "config.json").write_text(json.dumps(shown))
    model = made(dcp, folder / "hf", "hf", "--weights-only", "--config", str(config))
    tag = next(p for p in zero1.iterdir() if p.is_dir())
    shards = folder / "shards"
    return [
        Peer("ds_to_universal", zero1,
             [_PYTHON, "-m", "deepspeed.checkpoint.ds_to_universal", "--input_folder", str(tag),
              "--output_folder", "{}", "--inject_missing_state"], "deepspeed-universal", 10),
        Peer("zero_to_fp32", zero3,
             [_PYTHON, "-m", "deepspeed.utils.zero_to_fp32", str(zero3), "{}",
              "--safe_serialization"], "hf", 8, ("--dtype", "fp32")),
        Peer("dcp_to_torch", dcp, [*_FORMATS, "dcp_to_torch", str(dcp), "{}"], "torch", 7),
        Peer("torch_to_dcp", pickle, [*_FORMATS, "torch_to_dcp", str(pickle), "{}"], "dcp:dp1", 8),
        Peer("HF consolidation", shards,
             [_PYTHON, "-c", _CONSOLIDATE, str(shards), "{}", str(folder / "files.json")], "hf", 5,
             ("--schema", "none")),
        Peer("accelerate merge-weights", folder / "accelerate" / "pytorch_model_fsdp_0",
             [_PYTHON, "-m", "accelerate.commands.accelerate_cli", "merge-weights",
              str(folder / "accelerate" / "pytorch_model_fsdp_0"), "{}"], "hf", 8,
             ("--schema", "none")),
        Peer("transformers load + save", model,
             [_PYTHON, "-c", _LOAD_SAVE, str(model), "{}"], "hf", 8, ("--max-shard-size", "1GB")),
    ]  # fmt: skip


PHASES = ("start", "plan", "move", "rest")
HEAD = (
    "peer", "state", "theirs", "command", "wall", "user + sys", "peak RSS", "theirs, peak RSS",
    "faster", "bar",
)  # fmt: skip


def measure(folder: Path, size: int, rounds: int, *, only: str = "") -> list[str]:
    """The lines of the table."""
    rows, shares = [], []
    target, kept, log = folder / "target", folder / "kept", folder / "log"
    for peer in (p for p in peers(folder, size) if only in p.name):
        theirs = [a.replace("{}", str(target)) for a in peer.theirs]
        run(theirs, log)
        target.rename(kept)
        ours = convert(peer.source, target, peer.to, *peer.more)
        plain = [*LAUNCH, "--no-fsync", "--", *ours[len(RESHARD) :], "--no-verify"]
        names = {
            "cp": "cp of what they wrote",
            "plain": "--no-verify, not fsynced, as theirs",
            "verified": "verified, fsynced",
        }
        costs = in_turn(
            {
                "theirs": theirs,
                "cp": ["cp", "-r", str(kept), str(target)],
                "plain": plain,
                "verified": ours,
            },
            rounds,
            log,
            peer.source,
            target,
            also=[kept],
        )
        empty(kept)
        shares.append([peer.name, *_phases(plain, rounds, log, peer.source, target)])
        for command, name in names.items():
            seen = costs[command]
            gained = 1 / paired(seen, costs["theirs"], "wall")
            held = bar(gained, peer.least, least=True) if command == "plain" else ""
            rows.append([
                peer.name, f"{size_of(peer.source) / 1e9:.2f} GB",
                f"{median(costs['theirs'], 'wall'):.2f} s", name,
                f"{median(seen, 'wall'):.2f} s",
                f"{median(seen, 'user'):.2f} + {median(seen, 'system'):.2f} s",
                f"{median(seen, 'peak') / MIB:.0f} MiB",
                f"{median(costs['theirs'], 'peak') / MIB:.0f} MiB", f"{gained:.1f} x", held,
            ])  # fmt: skip
    return [
        f"medians of {rounds} rounds, every command once a round; sources in the page cache; "
        f"{machine()}",
        "",
        *table(HEAD, rows),
        "",
        "Of ours, --no-verify and not fsynced, seconds and CPU seconds:",
        "",
        *table(("peer", *PHASES), shares),
    ]


def _phases(plain: list[str], rounds: int, log: Path, source: Path, target: Path) -> list[str]:
    """What each phase of our conversion took, the median of its rounds."""
    file = log.with_name("phases.json")
    timed = [*LAUNCH, "--phases", str(file), *plain[len(LAUNCH) :]]
    seen: list[dict[str, tuple[float, float]]] = []
    in_turn(
        {"ours": timed}, rounds, log, source, target,
        made=lambda: seen.append(json.loads(file.read_text())),
    )  # fmt: skip
    return [
        " / ".join(f"{statistics.median(s[phase][i] for s in seen[1:]):.2f}" for i in (0, 1))
        for phase in PHASES
    ]
