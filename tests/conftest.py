"""Fixtures that every test may ask for."""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from support import FIXTURES


@pytest.fixture(scope="session")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Gives the folder of an archive, as in `unpacked("megatron/a-tp4pp2")`; each is unpacked once.

    The files are read-only and shared by all tests: copy what a test wants to change.
    """
    root = tmp_path_factory.mktemp("fixtures")

    def unpack(name: str) -> Path:
        folder = root / name
        if not folder.exists():
            with tarfile.open(FIXTURES / f"{name}.tar.xz") as archive:
                archive.extractall(folder.parent, filter="data")
            for file in folder.rglob("*"):
                if file.is_file():
                    file.chmod(0o444)
        return folder

    return unpack
