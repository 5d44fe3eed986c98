"""CPU seconds of the commands that read headers only, and how planning grows."""

from __future__ import annotations

import json
import os
import statistics
import sys
import tarfile
import time
from pathlib import Path

from reshard.join import Plan
from reshard.planning import Options, make_plan
from reshard.report import peak_rss
from reshard.topology import parse_degrees

from .make_megatron import make
from .measuring import MIB, RESHARD, bar, empty, machine, run, table

ROOT = Path(__file__).resolve().parent.parent
#: Fixtures: archive, checkpoint in it, what it is planned to.
FIXTURES = (
    ("megatron/a", "megatron/a-tp4pp2/dist", "tp2pp4"),
    ("megatron/a", "megatron/a-tp4pp2/dist", "dcp:dp2,names=hf"),
    ("dcp/tp_only_w2", "dcp/tp_only_w2/checkpoint", "dcp:dp4"),
    ("deepspeed/z3_dp2_bf16", "deepspeed/z3_dp2_bf16/ckpt", "deepspeed:zero1dp3"),
    ("hf/gpt2", "hf/gpt2/plain", "hf"),
)


def startup(folder: Path, rounds: int) -> list[str]:
    """The table of CPU seconds of `--help`, `inspect` and `plan`."""
    commands: dict[str, list[str]] = {"--help": ["--help"], "convert --help": ["convert", "--help"]}
    for archive, inner, to in FIXTURES:
        if not (folder / inner).exists():
            with tarfile.open(_archive(archive)) as packed:
                packed.extractall((folder / archive).parent, filter="data")
        commands[f"inspect {inner}"] = ["inspect", str(folder / inner)]
        commands[f"plan {inner} --to {to}"] = ["plan", str(folder / inner), "--to", to]
    rows = []
    for name, command in commands.items():
        seen = [run([*RESHARD, *command], folder / "log") for _ in range(rounds + 1)][1:]
        cpu = statistics.median(c.cpu for c in seen)
        peak = max(c.peak for c in seen) / MIB
        rows.append([f"`{name}`", f"{cpu:.2f} s", f"{peak:.0f} MiB", bar(cpu, 0.4)])
    head = ("command", "CPU", "peak RSS", "bar")
    return [f"medians of {rounds}; {machine()}", "", *table(head, rows)]


def _archive(name: str) -> Path:
    """The archive of a fixture: its own, or the one that its folder shares."""
    found = ROOT / "fixtures" / f"{name}.tar.xz"
    return found if found.exists() else found.with_name("shared.tar.xz")


def lay_out(plan: Plan, folder: Path) -> None:
    """Write the target of a plan without moving anything: headers, and arrays that are holes."""
    place = folder / plan.target.folder
    for draft in plan.target.drafts:
        path = place / draft.name
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as out:
            os.truncate(path, draft.size)
            for offset, data in draft.literals:
                out.seek(offset)
                out.write(data)
    for name, data in plan.target.trackers.items():
        (folder / name).write_bytes(data)


def scale(folder: Path, tensors: int, ranks: int) -> list[str]:
    """The table of planning: half of `tensors`, then all of them, over `ranks` rank files."""
    rows = []
    for n in (tensors // 2, tensors):
        layers = max(1, n // 24 // (ranks // 8)) * (ranks // 8)  # 24 tensors a layer, slots counted
        at = f"tp8pp{ranks // 8}"
        source = make(0, folder / "megatron", parse_degrees(at), sparse=True, layers=layers)
        rows.append(_planned(f"torch_dist {at}", source.parent, "tp4pp2", 120, 1024))
        one = make_plan(source.parent, Options(to="dcp:dp8,names=hf"))
        lay_out(one, folder / "dcp")
        empty(source.parent)
        rows.append(_planned("DCP of the HF model, dp8", folder / "dcp", "dcp:dp16", 120, 1024))
        empty(folder / "dcp")
    for layers, dp in ((16, ranks // 4), (16, ranks // 2), (16, ranks)):
        source = make(0, folder / "megatron", {}, sparse=True, layers=layers)
        lay_out(make_plan(source.parent, Options(to="dcp:dp1,names=hf")), folder / "dcp")
        to = f"deepspeed:zero3dp{dp}"
        lay_out(make_plan(folder / "dcp", Options(to=to)), folder / "zero")
        empty(source.parent)
        empty(folder / "dcp")
        rows.append(_planned(to, folder / "zero", f"deepspeed:zero3dp{dp // 2}", None, None))
        empty(folder / "zero")
    head = ("source", "files", "to", "tensors", "copies", "CPU", "peak RSS", "bar")
    return [machine(), "", *table(head, rows)]


def _planned(name: str, source: Path, to: str, seconds: int | None, mib: int | None) -> list[str]:
    """One row; the plan is made in a process of its own."""
    log = source.with_name("log")
    cost = run([sys.executable, "-m", "benchmarks.planning", str(source), to], log)
    seen = json.loads(log.read_text().splitlines()[-1])
    bars = ""
    if seconds is not None and mib is not None:
        bars = f"{bar(cost.cpu, seconds)}; MiB {bar(seen['peak'] / MIB, mib)}"
    return [
        name, str(sum(1 for p in source.rglob("*") if p.is_file())), to, str(seen["tensors"]),
        str(seen["copies"]), f"{cost.cpu:.1f} s", f"{seen['peak'] / MIB:.0f} MiB", bars,
    ]  # fmt: skip


def main() -> None:
    """Plan one conversion; what it took, as JSON."""
    started = time.process_time()
    plan = make_plan(sys.argv[1], Options(to=sys.argv[2]))
    shown = {
        "tensors": len(plan.target.layout.tensors),
        "copies": plan.copies,
        "peak": peak_rss(),
        "seconds": time.process_time() - started,
    }
    print(json.dumps(shown))


if __name__ == "__main__":
    main()
