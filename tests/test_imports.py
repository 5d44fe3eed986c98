"""Imports go one way; the core knows no framework, prints nothing and unpickles in one place."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from support import ROOT

#: From the ground up; a module imports its own row or rows above it, never one below.
#: `reshard` itself is the public face, `reshard.__init__`.
ORDER = (
    {"errors", "values", "version"},
    {"box", "checksums", "digests", "dtypes", "options", "scaler", "tensor", "topology"},
    {"fingerprints"},
    {"device"},
    {"layout", "codec"},
    {"files", "workers"},
    {"expression", "schemas"},
    {"tables"},
    {"namings"},
    {"schema", "dialect", "splice"},
    {"containers", "plugins"},
    {"format", "checkpoint"},
    {"families", "translate", "spelling"},
    {"join", "migrate", "rounding", "families", "translate", "crossing", "renaming", "proof"},
    {"archives", "engine", "readback", "recorded"},
    {"commit", "manifest"},
    {"opening", "planning"},
    {"report"},
    {"verification", "differences", "inspect", "conversion"},
    {"api"},
    {"__init__"},
    {"cli", "__main__"},
)
ROW = {name: row for row, names in enumerate(ORDER) for name in names}
FRAMEWORKS = {"torch", "megatron", "deepspeed", "transformers", "accelerate", "lightning"}


def module_name(path: Path) -> str:
    """The dotted name under which the wheel installs a file of this repository."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[0] in ("converters", "schemas"):
        parts.insert(0, "reshard")
    return ".".join(parts)


SOURCES = {
    module_name(path): path
    for top in ("reshard", "converters", "schemas")
    for path in sorted((ROOT / top).rglob("*.py"))
}


def package_of(module: str) -> list[str]:
    """The package that relative imports of a module start from."""
    return module.split(".")[:-1]


def imports(module: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything a module imports, also inside functions.

    `from reshard import box` gives reshard.box, where that is a module.
    """
    for node in ast.walk(ast.parse(SOURCES[module].read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            package = package_of(module)
            base = package[: len(package) + 1 - node.level] if node.level else []
            source = ".".join(base + ([node.module] if node.module else []))
            for alias in node.names:
                inner = f"{source}.{alias.name}"
                known = inner in SOURCES or f"{inner}.__init__" in SOURCES
                yield node.lineno, inner if known else source


def room(name: str) -> str:
    """The room of a reshard module: its first part below `reshard`."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def is_converter(name: str) -> bool:
    return name.startswith("reshard.converters")


def edges() -> Iterator[tuple[str, int, str]]:
    for module in SOURCES:
        for line, imported in imports(module):
            if imported.split(".")[0] == "reshard":
                yield module, line, imported


def test_every_module_of_the_core_has_a_place_in_the_order():
    unplaced = {room(name) for name in SOURCES if not is_converter(name)} - ROW.keys()
    assert not unplaced, "give each its row in ORDER"


def test_the_core_imports_upwards_only():
    wrong = [
        f"{module}:{line} imports {imported}"
        for module, line, imported in edges()
        if not is_converter(module)
        and (is_converter(imported) or ROW[room(imported)] > ROW[room(module)])
    ]
    assert not wrong


def test_no_module_imports_itself_by_a_detour():
    graph: dict[str, set[str]] = {}
    for module, _, imported in edges():
        target = imported if imported in SOURCES else f"{imported}.__init__"
        if target != module:
            graph.setdefault(module, set()).add(target)
    TopologicalSorter(graph).prepare()  # raises CycleError and names the circle


def test_a_converter_imports_the_core_up_to_format_and_no_other_converter():
    wrong = []
    for module, line, imported in edges():
        if not is_converter(module):
            continue
        if is_converter(imported):
            allowed = imported.split(".")[2:3] == module.split(".")[2:3]
        else:
            allowed = ROW[room(imported)] <= ROW["format"]
        if not allowed:
            wrong.append(f"{module}:{line} imports {imported}")
    assert not wrong


def test_converters_import_their_neighbours_relatively():
    """An absolute import works in the wheel, but mypy reads converters/ under another name."""
    wrong = [
        f"{module}:{node.lineno}"
        for module in SOURCES
        if is_converter(module)
        for node in ast.walk(ast.parse(SOURCES[module].read_text()))
        if isinstance(node, ast.ImportFrom)
        and not node.level
        and (node.module or "").startswith("reshard.converters")
    ]
    assert not wrong


def test_only_device_imports_a_framework():
    wrong = [
        f"{module}:{line} imports {imported}"
        for module in SOURCES
        for line, imported in imports(module)
        if imported.split(".")[0] in FRAMEWORKS and module != "reshard.device"
    ]
    assert not wrong


def calls(module: str) -> Iterator[tuple[int, str]]:
    """(line, dotted text) of every name that a module calls or reads an attribute of."""
    for node in ast.walk(ast.parse(SOURCES[module].read_text())):
        if isinstance(node, ast.Call):
            yield node.lineno, ast.unparse(node.func)
        elif isinstance(node, ast.Attribute):
            yield node.lineno, ast.unparse(node)


@pytest.mark.parametrize(
    ("only", "names"),
    [
        ("reshard.cli", {"print", "os.environ", "os.getenv", "sys.stdout", "sys.stderr"}),
        (
            "reshard.containers.pickles",
            {"pickle.load", "pickle.loads", "pickle.Unpickler", "_pickle.loads"},
        ),
    ],
)
def test_one_room_alone_may(only: str, names: set[str]):
    wrong = [
        f"{module}:{line} uses {name}"
        for module in SOURCES
        if module not in (only, "reshard.__main__")
        for line, name in calls(module)
        if name in names
    ]
    assert not wrong


def test_importing_everything_imports_no_framework():
    """In a fresh process: seconds and 200 MiB of torch are not for moving bytes."""
    modules = [name.removesuffix(".__init__") for name in SOURCES if "__main__" not in name]
    program = (
        "import importlib, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        f"print(*sorted({FRAMEWORKS!r} & sys.modules.keys()))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == []


def test_the_command_line_imports_no_framework():
    program = "import sys, reshard.cli; print('torch' in sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stdout.strip()) == (0, "False"), run.stderr


# --- what a command imports ----------------------------------------------------------------------


def imported_by(*args: object) -> set[str]:
    """The modules of a process that ran a command of ours."""
    program = (
        "import sys\nfrom reshard.cli import main\n"
        "try: main(args=sys.argv[1:])\n"
        "except SystemExit as end: assert not end.code\n"
        "print('\\n' + ' '.join(sys.modules))"
    )
    command = [sys.executable, "-c", program, *map(str, args)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    return set(run.stdout.splitlines()[-1].split())


def of_formats(modules: set[str]) -> set[str]:
    """Converters whose readers or writers were imported, and not just what recognises a folder."""
    inner = (m.split(".")[2:] for m in modules if is_converter(m))
    light = ("recognise", "listing", "nemo")
    return {m[0] for m in inner if len(m) > 1 and m[1] not in light}


@pytest.mark.parametrize("args", [("--help",), ("convert", "--help"), ("--version",)])
def test_help_needs_no_numpy_and_no_format(args: tuple[str, ...]):
    found = imported_by(*args)
    assert not found & {"numpy", "ml_dtypes", "json.tool", "importlib.metadata", "reshard.format"}
    assert not any(is_converter(m) for m in found)


SOURCES_OF = {
    "dcp": "dcp/tp_only_w2/checkpoint",
    "deepspeed": "deepspeed/z3_dp2_bf16/ckpt",
    "huggingface": "hf/gpt2/plain",
    "megatron": "megatron/a-tp4pp2/dist",
}


@pytest.mark.parametrize("name", SOURCES_OF)
def test_inspect_imports_readers_of_one_format_and_no_writer(name: str, unpacked):
    archive, _, inner = SOURCES_OF[name].rpartition("/")
    found = imported_by("inspect", unpacked(archive) / inner)
    assert of_formats(found) <= {name}
    writers = {m for m in found if is_converter(m) and "write" in m.rpartition(".")[2]}
    assert not writers
    unneeded = {"engine", "readback", "conversion", "commit", "translate", "schema", "migrate"}
    assert not found & {f"reshard.{m}" for m in unneeded}
    assert not found & {"importlib.metadata", "concurrent.futures", "tempfile", "logging"}


def test_a_plan_within_one_format_imports_no_other_and_no_family(unpacked):
    source = unpacked("dcp/tp_only_w2") / "checkpoint"
    found = imported_by("plan", source, "--to", "dcp:dp4")
    assert of_formats(found) == {"dcp"}
    assert not found & {"reshard.schema", "reshard.translate", "reshard.migrate", "reshard.engine"}


def test_the_public_names_are_there_and_are_no_modules():
    program = (
        "import sys, reshard\n"
        "assert set(dir(reshard)) == set(reshard.__all__)\n"
        "assert 'numpy' not in sys.modules\n"
        "import reshard.cli, reshard.join\n"
        "found = [getattr(reshard, n) for n in reshard.__all__ if n != '__version__']\n"
        "assert all(map(callable, found)), found\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
