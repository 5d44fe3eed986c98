"""The support matrix: what each test proves, as marks; rendered into README and `reshard formats`.

A test carries `@pytest.mark.proves(source, target, what)`, what being "weights", "training state"
or "refused". `pytest --write-matrix` writes what is marked.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from support import ROOT

RECORD = ROOT / "schemas" / "support.json"
README = ROOT / "README.md"
BEGIN, END = "<!-- support matrix -->", "<!-- end of support matrix -->"
ORDER = ("refused", "weights", "training state")

Cell = tuple[str, str, str, str]  # source, target, what, test


def cells_of(items: Iterable[Any]) -> list[Cell]:
    """Every marked cell of the collected tests: the most that is proven, by its first test."""
    best: dict[tuple[str, str], tuple[int, str]] = {}
    for item in items:
        for mark in item.iter_markers("proves"):
            source, target, what = mark.args
            test = item.nodeid.partition("[")[0]
            rank = ORDER.index(what)
            known = best.get((source, target))
            if known is None or rank > known[0]:
                best[source, target] = (rank, test)
    return sorted((s, t, ORDER[rank], test) for (s, t), (rank, test) in best.items())


def rendered(cells: Iterable[Cell]) -> str:
    """The matrix in Markdown: rows are sources, columns targets, cells link to their tests."""
    found = {(s, t): (what, test) for s, t, what, test in cells}
    sources = sorted({s for s, _ in found})
    targets = sorted({t for _, t in found})
    lines = ["| from \\ to | " + " | ".join(targets) + " |", "|---" * (len(targets) + 1) + "|"]
    for source in sources:
        row = []
        for target in targets:
            what, test = found.get((source, target), ("", ""))
            row.append(f"[{what}]({test.partition('::')[0]})" if what else "-")
        lines.append(f"| **{source}** | " + " | ".join(row) + " |")
    return "\n".join(lines)


def recorded() -> list[Cell]:
    """What the package says it supports."""
    if not RECORD.exists():
        return []
    return [(r["from"], r["to"], r["what"], r["test"]) for r in json.loads(RECORD.read_text())]


def write(cells: Iterable[Cell]) -> None:
    """Record the cells, and put the matrix into the README."""
    listed = list(cells)
    rows = [{"from": s, "to": t, "what": w, "test": test} for s, t, w, test in listed]
    RECORD.write_text(json.dumps(rows, indent=1) + "\n")
    README.write_text(with_matrix(README.read_text(), rendered(listed)))


def with_matrix(text: str, matrix: str) -> str:
    """A page with the matrix between its marks."""
    head, _, tail = text.partition(BEGIN)
    tail = tail.partition(END)[2] if END in tail else tail
    return f"{head}{BEGIN}\n\n{matrix}\n\n{END}{tail}"
