"""The support matrix says what the tests prove, no more."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

import matrix
from reshard.format import formats


def test_the_matrix_is_what_the_tests_prove(request: pytest.FixtureRequest) -> None:
    """With every test file collected, equal; with a part of them, nothing that is not recorded."""
    items = request.session.items
    found, recorded = matrix.cells_of(items), matrix.recorded()
    every = {p.name for p in Path(__file__).parent.rglob("test_*.py")}
    if every <= {item.path.name for item in items}:
        assert found == recorded, "run pytest --write-matrix"
        names = {f.name for f in formats()[0]}
        assert {(s, t) for s, t, _, _ in found} == set(itertools.product(names, names))
        assert matrix.rendered(recorded) in matrix.README.read_text()
    else:
        known = {(s, t): matrix.ORDER.index(what) for s, t, what, _ in recorded}
        for source, target, what, _ in found:
            assert matrix.ORDER.index(what) <= known.get((source, target), -1)
