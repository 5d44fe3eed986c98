"""What must hold of the repository as a whole."""

from __future__ import annotations

import re
import tarfile
import tomllib

from support import FIXTURES, ROOT, repository_files

MACHINE_PATH = re.compile(r"/(?:work|farm|root|home|opt|mnt)/")


def is_text(data: bytes) -> bool:
    return b"\0" not in data


def test_no_tracked_text_names_a_path_of_a_machine():
    found = []
    for path in repository_files():
        data = (ROOT / path).read_bytes()
        if not is_text(data):
            continue
        for number, line in enumerate(data.decode("utf-8").splitlines(), 1):
            if MACHINE_PATH.search(line):
                found.append(f"{path}:{number}: {line.strip()}")
    assert not found


def test_scripts_name_no_host():
    for script in (
        "setup.sh",
        "demo.sh",
        "test.sh",
        ".ci/run",
        "constraints.txt",
        "pyproject.toml",
    ):
        assert "://" not in (ROOT / script).read_text(), script


def test_fixtures_stay_within_45_megabytes():
    size = sum(file.stat().st_size for file in FIXTURES.rglob("*") if file.is_file())
    assert size <= 45e6


def test_every_fixture_is_described():
    text = (FIXTURES / "README.md").read_text()
    names = {archive.name.removesuffix(".tar.xz") for archive in FIXTURES.rglob("*.tar.xz")}
    for path in FIXTURES.rglob("shared.tar.xz"):
        with tarfile.open(path) as archive:
            names |= {member.name.partition("/")[0] for member in archive}
    assert names
    assert not {name for name in names if name not in text}


def test_the_wheel_holds_every_package():
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    packages = set()
    for top, name in (("reshard", "reshard"), ("converters", "reshard.converters")):
        for init in (ROOT / top).rglob("__init__.py"):
            inner = init.parent.relative_to(ROOT / top).parts
            packages.add(".".join((name, *inner)))
    assert set(setuptools["packages"]) == packages | {"reshard.schemas"}


def test_every_pinned_peer_has_the_same_version_in_constraints():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    constraints = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in project["optional-dependencies"]["test"] if "==" in line]
    assert not set(pins) - set(constraints)
