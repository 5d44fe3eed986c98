"""Fixtures that every test may ask for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import matrix
import support


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--write-matrix` records what the tests are marked to prove."""
    parser.addoption("--write-matrix", action="store_true", help="write README's support matrix")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Record the support matrix, if asked to."""
    if session.config.getoption("--write-matrix"):
        matrix.write(matrix.cells_of(session.items))


@pytest.fixture(scope="session")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Gives the folder of an archive, as in `unpacked("megatron/a-tp4pp2")`; each is unpacked once.

    The files are read-only and shared by all tests: copy what a test wants to change.
    """
    root = tmp_path_factory.mktemp("fixtures")

    def unpack(name: str) -> Path:
        folder = root / name
        if not folder.exists():
            support.unpack(support.archive_of(name), folder.parent)
            for file in folder.parent.rglob("*"):
                if file.is_file():
                    file.chmod(0o444)
        return folder

    return unpack
