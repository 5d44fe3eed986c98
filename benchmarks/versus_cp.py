"""What a conversion costs beside `cp` of the same source, by how the cuts lie."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from reshard.topology import parse_degrees

from .make_megatron import make, sizes_for, transformers_config
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
    size_of,
    table,
)

#: The bars, for a conversion without and with verification: times the wall of cp.
CONTIGUOUS, COLUMNS = (1.25, 1.7), (1.6, 2.2)


@dataclass(frozen=True, slots=True)
class Case:
    """One conversion that is measured."""

    name: str
    source: str  # of `sources`
    to: str
    bars: tuple[float, float]
    new: bool = False  # names of another model code: needs the config, weights get their dtype


CASES = (
    Case("PP: torch_dist tp1pp2 to pp4", "torch_dist tp1pp2", "tp1pp4", CONTIGUOUS),
    Case("TP: torch_dist tp4pp2 to tp2pp4", "torch_dist tp4pp2", "tp2pp4", COLUMNS),
    Case("QKV, gate/up: torch_dist tp4pp2 to DCP dp4 of the HF model", "torch_dist tp4pp2",
         "dcp:dp4,names=hf", COLUMNS),
    Case("DCP to DCP: dp4 to dp8", "DCP dp4", "dcp:dp8", CONTIGUOUS),
    Case("QKV, gate/up: DCP dp4 of the HF model to torch_dist tp2pp2", "DCP dp4",
         "megatron:tp2pp2,samples=800", COLUMNS, new=True),
    Case("ZeRO to ZeRO: zero1dp4 to zero1dp8", "ZeRO-1 dp4", "deepspeed:zero1dp8", CONTIGUOUS),
    Case("ZeRO to ZeRO: zero1dp4 to zero3dp8", "ZeRO-1 dp4", "deepspeed:zero3dp8", CONTIGUOUS),
)  # fmt: skip


def sources(folder: Path, size: int) -> Iterator[tuple[str, Path]]:
    """Every source in turn; each is removed once it is no longer needed."""
    made_at: dict[str, Callable[[Path], Path]] = {
        "torch_dist tp1pp2": lambda p: make(size, p, parse_degrees("pp2")).parent,
        "torch_dist tp4pp2": lambda p: make(size, p, parse_degrees("tp4pp2")).parent,
        "DCP dp4": lambda p: made(folder / "torch_dist tp4pp2", p, "dcp:dp4,names=hf"),
        "ZeRO-1 dp4": lambda p: made(folder / "DCP dp4", p, "deepspeed:zero1dp4"),
    }
    before: Path | None = None
    for name, maker in made_at.items():
        place = maker(folder / name)
        if before is not None:
            empty(before)
        before = place
        yield name, place


def commands(
    source: Path, target: Path, to: str, options: list[str], *, synced: bool
) -> dict[str, list[str]]:
    """The commands of one case, by the name they have in the table."""
    ours = convert(source, target, to, *options)
    copy = ["cp", "-r", str(source), str(target)]
    if synced:
        script = 'cp -r "$0" "$1" && find "$1" -type f -exec sync {} +'
        copy = ["sh", "-c", script, str(source), str(target)]
    else:
        ours = [*LAUNCH, "--no-fsync", "--", *ours[len(RESHARD) :]]
    return {"cp": copy, "--no-verify": [*ours, "--no-verify"], "verified": ours}


HEAD = (
    "case", "command", "wall", "user + sys", "peak RSS", "read + written", "wall of cp",
    "CPU of cp", "bar",
)  # fmt: skip


def measure(
    folder: Path, size: int, rounds: int, memory: str, *, synced: bool, cold: bool, only: str = ""
) -> list[str]:
    """The lines of the table."""
    target, log = folder / "target", folder / "log"
    (folder / "config").mkdir()
    config = transformers_config(**sizes_for(size))
    (folder / "config" / "config.json").write_text(json.dumps(config))
    rows: list[list[str]] = []
    nbytes = 0
    last = max(i for i, c in enumerate(CASES) if only in c.name)
    for name, source in sources(folder, size):
        if name not in {c.source for c in CASES[: last + 1]}:
            break
        nbytes = max(nbytes, size_of(source))
        for case in (c for c in CASES if c.source == name and only in c.name):
            options = ["--memory", memory]
            if case.new:
                options += ["--config", str(folder / "config"), "--dtype", "bf16"]
            rows += _rows(case, source, target, options, rounds, log, synced=synced, cold=cold)
    return [
        f"{nbytes / 1e9:.2f} GB of state at most, --memory {memory}, medians of {rounds} rounds, "
        f"every command once a round; "
        + ("all fsynced" if synced else "nothing fsynced")
        + (", source not in the page cache" if cold else ", source in the page cache")
        + f"; {machine()}",
        "",
        *table(HEAD, rows),
    ]


def _rows(
    case: Case,
    source: Path,
    target: Path,
    options: list[str],
    rounds: int,
    log: Path,
    *,
    synced: bool,
    cold: bool,
) -> list[list[str]]:
    written: set[int] = set()

    costs = in_turn(
        commands(source, target, case.to, options, synced=synced),
        rounds,
        log,
        source,
        target,
        cold=cold,
        made=lambda: written.add(size_of(target)),
    )
    base = costs["cp"]
    least = {"cp": 2 * size_of(source)}
    rows = []
    for command, seen in costs.items():
        minimum = least.get(command, size_of(source) + max(written))
        moved = (median(seen, "read") + median(seen, "written")) / minimum
        wall = paired(seen, base, "wall")
        limit = dict(zip(("--no-verify", "verified"), case.bars, strict=True)).get(command)
        rows.append([
            case.name, command, f"{median(seen, 'wall'):.2f} s",
            f"{median(seen, 'user'):.2f} + {median(seen, 'system'):.2f} s",
            f"{median(seen, 'peak') / MIB:.0f} MiB", f"{moved:.2f} x", f"{wall:.2f} x",
            f"{paired(seen, base, 'cpu'):.2f} x", bar(wall, limit) if limit else "",
        ])  # fmt: skip
    return rows


def workers(
    folder: Path, size: int, rounds: int, *, synced: bool = True, only: str = ""
) -> list[str]:
    """One worker and two, on casts and on a re-layout; and two runs that share but the machine.

    Two processes of one worker, each with a target of its own, show what a second core adds where
    nothing is in common: no interpreter, no plan, no file. The casts read less than a third of a
    checkpoint, so theirs is three times as big.
    """
    target, log = folder / "target", folder / "log"
    cast = ("--weights-only", "--dtype")
    rows = []
    before = 0
    for name, times, to, more in (
        ("re-layout: tp4pp2 to DCP dp4 of the HF model", 1, "dcp:dp4,names=hf", ()),
        ("re-layout: tp4pp2 to tp2pp4", 1, "tp2pp4", ()),
        ("casts: masters to fp16 weights, tp4pp2 to tp2pp4", 3, "tp2pp4", (*cast, "fp16")),
        ("casts: fp32 weights to bf16, HF", 3, "hf", (*cast, "bf16", "--max-shard-size", "500MB")),
    ):
        if only not in name:
            continue
        if times != before:
            empty(folder / "source")
            source = make(times * size, folder / "source", parse_degrees("tp4pp2")).parent
            before = times
        if to == "hf":
            made(source, folder / "fp32", "hf", *cast, "fp32")
            empty(source)
            source = folder / "fp32"
        for verified in (["--no-verify"], []):
            options = [to, *more, *verified]
            ours = {n: _ours(source, target, n, options, synced=synced) for n in ("1", "2")}
            apart = [_ours(source, target / p, "1", options, synced=synced) for p in "ab"]
            costs = in_turn({**ours, "apart": both(target, *apart)}, rounds, log, source, target)
            gained = 1 / paired(costs["2"], costs["1"], "wall")
            rows.append([
                name, f"{size_of(source) / 1e9:.1f} GB", "--no-verify" if verified else "verified",
                *(f"{median(costs[n], 'wall'):.2f} s ({median(costs[n], 'cpu'):.2f} s CPU)"
                  for n in ("1", "2", "apart")),
                f"{2 / paired(costs['apart'], costs['1'], 'wall'):.2f} x",
                f"{gained:.2f} x", bar(gained, 1.7, least=True),
            ])  # fmt: skip
    head = (
        "conversion", "source", "command", "1 worker", "2 workers", "2 runs at once",
        "the machine gives", "faster", "bar",
    )  # fmt: skip
    return [f"medians of {rounds}; {machine()}", "", *table(head, rows)]


def _ours(
    source: Path, target: Path, workers: str, options: list[str], *, synced: bool
) -> list[str]:
    """The command of a conversion by so many workers."""
    ours = convert(source, target, *options, "--workers", workers)
    return ours if synced else [*LAUNCH, "--no-fsync", "--", *ours[len(RESHARD) :]]


def both(folder: Path, one: list[str], other: list[str]) -> list[str]:
    """A command that runs two at once, in a folder that it makes for their targets."""
    made = shlex.join(["mkdir", str(folder)])
    return ["sh", "-c", f"{made} && {{ {shlex.join(one)} & {shlex.join(other)} && wait $!; }}"]
