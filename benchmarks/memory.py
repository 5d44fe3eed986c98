"""The most memory a conversion holds, by the size of the state and by `--memory`.

The sources are sparse: real headers, arrays that are holes. The results are too (see launch): all
is read, joined and compared, and nothing but headers lies on the disk. So 256 GB fit anywhere.
"""

from __future__ import annotations

from pathlib import Path

from reshard.topology import parse_degrees

from .make_megatron import make
from .measuring import LAUNCH, MIB, RESHARD, bar, convert, empty, machine, run, size_of, table

GIB = 1 << 30
SIZES = (1 * GIB, 4 * GIB, 16 * GIB, 256 * GIB)
#: MiB of peak RSS allowed at a budget.
BARS = {"256MiB": 400, "64MiB": 200}
#: Above this size the result is not compared: that reads all of it again.
_COMPARED = 16 * GIB


def measure(folder: Path, most: int, *, only: str = "") -> list[str]:
    """The lines of the table: sizes up to `most` bytes, those whose name (16GiB) holds `only`."""
    rows = []
    target = folder / "target"
    for size in (s for s in SIZES if s <= most and only in f"{s // GIB}GiB"):
        source = make(size, folder / "source", parse_degrees("tp4pp2"), sparse=True).parent
        for budget, limit in BARS.items():
            plain = [] if size <= _COMPARED else ["--no-verify"]
            ours = convert(source, target, "tp2pp4", "--memory", budget, *plain)
            cost = run([*LAUNCH, "--holes", "--", *ours[len(RESHARD) :]], folder / "log")
            on_disk = sum(p.stat().st_blocks * 512 for p in target.rglob("*"))
            if on_disk > size // 20:
                raise SystemExit(f"{target} takes {on_disk} bytes on the disk: zeros were written")
            rows.append([
                f"{size_of(source) / 1e9:.1f} GB", budget, plain[0] if plain else "verified",
                f"{cost.peak / MIB:.0f} MiB", f"{cost.wall:.1f} s", f"{cost.cpu:.1f} s",
                bar(cost.peak / MIB, limit),
            ])  # fmt: skip
            empty(target)
        empty(source)
    head = ("state", "--memory", "command", "peak RSS", "wall", "CPU", "bar")
    return [f"torch_dist tp4pp2 to tp2pp4, one run each; {machine()}", "", *table(head, rows)]
