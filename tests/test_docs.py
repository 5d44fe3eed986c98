"""What the pages say can be typed, followed and found: command lines, links, tests, the example."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest

import reshard
from reshard.cli import main
from reshard.errors import ReshardError, UsageError
from reshard.topology import parse_target
from support import ROOT

Unpack = Callable[[str], Path]
PAGES = ("README.md", *sorted(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md")))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\[[^\]\n]*\]\(([^)\s]+)\)")
#: The format of the example in docs/adding-a-framework.md.
EXAMPLE = "rows"
#: A checkpoint to plan each format's TARGETs with.
SOURCES = {
    "megatron": "megatron/h-llama-tp2pp2/dist",
    "megatron-legacy": "megatron/h-llama-tp2pp2/dist",
    "hf": "megatron/h-llama-tp2pp2/dist",
    "universal": "megatron/h-llama-tp2pp2/dist",
    "dcp": "dcp/fsdp2_w2_fp32/checkpoint",
    "torch": "dcp/fsdp2_w2_fp32/checkpoint",
    "deepspeed": "deepspeed/z1_dp4_bf16/ckpt",
    "deepspeed-universal": "deepspeed/z1_dp4_bf16/ckpt",
}


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def without_fences(text: str) -> str:
    return FENCE.sub("", text)


def command_lines(page: str) -> Iterator[list[str]]:
    """Every `reshard …` of a page, as words: blocks, steps of a pipeline, and spans of code."""
    text = text_of(page)
    lines = []
    for _, body in FENCE.findall(text):
        lines += re.sub(r"\n\s+(?=--)", " ", body).splitlines()
    plain = without_fences(text)
    lines += [line for line in plain.splitlines() if line.startswith("    ")]
    lines += SPAN.findall(plain)
    for line in lines:
        found = re.match(r"\s*(?:- |\$ )?(reshard [^>#]*)", line.replace("\\|", "|"))
        if found is not None:
            yield shlex.split(found[1])


LINES = [(page, words) for page in PAGES for words in command_lines(page)]


def options_in(words: list[str]) -> dict[str, Any]:
    """Parse a command line as click does, nothing run; gives the parameters."""
    command: click.Command = main
    rest = words[1:]
    while isinstance(command, click.Group) and rest and rest[0] in command.commands:
        command, rest = command.commands[rest[0]], rest[1:]
    assert command is not main, f"{words[1]} is no command"
    if not rest:
        return {}  # a command that is spoken of
    if rest[0].startswith("--"):  # an option that is
        rest = ["X" for p in command.params if isinstance(p, click.Argument)] + rest
    return dict(command.make_context(words[1], list(rest)).params)


@pytest.mark.parametrize(("page", "words"), LINES, ids=[" ".join(w) for _, w in LINES])
def test_command_lines_parse(page: str, words: list[str]) -> None:
    found = options_in(words)
    for name in ("to", "given"):
        if found.get(name):
            parse_target(found[name])


def test_the_pages_show_enough_command_lines() -> None:
    assert len([words for page, words in LINES if page == "README.md"]) >= 10
    assert {words[1] for _, words in LINES} >= set(main.commands)


# --- TARGETs -------------------------------------------------------------------------------------


def listed_items(page: str) -> Iterator[tuple[str, str]]:
    """(format, TARGET) for the items in a page's table of them."""
    text = text_of(page)
    form = Path(page).stem
    form = {"huggingface": "hf"}.get(form, form)
    for table in re.findall(r"^\| item of TARGET.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE):
        for row in table.splitlines():
            first = row.replace("\\|", "\0").split("|")[1].replace("\0", "|")
            for span in SPAN.findall(first):
                item = re.sub(r"=N$", "=1", span)
                if "=" in item or re.search(r"\d", item):
                    yield form, f"{form}:{item}"
                elif item.split(".")[0] == form:
                    yield form, item


def targets() -> list[tuple[str, str]]:
    """Every TARGET that a page shows, with its format."""
    found = set()
    for page in PAGES:
        found |= set(listed_items(page))
        for words in command_lines(page):
            try:
                to = options_in(words).get("to")
            except click.UsageError:  # what test_command_lines_parse is about
                continue
            if to and to != "TARGET" and parse_target(to).format != EXAMPLE:
                found.add((parse_target(to).format or "megatron", to))
    return sorted(found)


@pytest.mark.parametrize(("form", "target"), targets())
def test_targets_are_known_to_their_converters(unpacked: Unpack, form: str, target: str) -> None:
    """Whether they fit this source is another matter: any refusal will do but a usage error."""
    archive, name, inner = SOURCES[form].split("/")
    said = ""
    try:
        reshard.plan(unpacked(f"{archive}/{name}") / inner, target)
    except UsageError as error:
        said = str(error)
    except ReshardError:
        return
    assert said == "" or "the source is" in said  # known, and for sources of another kind


# --- links and names -----------------------------------------------------------------------------


def slugs(text: str) -> set[str]:
    """The anchors of a page's headings."""
    heads = re.findall(r"^#+ (.*)$", without_fences(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in heads}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    wrong = []
    for link in LINK.findall(without_fences(text_of(page))):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        there = (ROOT / page).parent / path if path else ROOT / page
        if not there.exists() or (anchor and anchor not in slugs(there.read_text())):
            wrong.append(link)
    assert wrong == []


def test_every_page_is_listed() -> None:
    listed = {Path(link.partition("#")[0]).name for link in LINK.findall(text_of("docs/README.md"))}
    assert {Path(p).name for p in PAGES} - {"README.md"} <= listed


@pytest.mark.parametrize("page", PAGES)
def test_named_tests_exist(page: str) -> None:
    """`tests/…` paths, and `test_file::test_name` as the table of issues has them."""
    text = text_of(page)
    wrong = [p for p in re.findall(r"\btests/[\w/]+(?:\.py)?", text) if not (ROOT / p).exists()]
    files = {p.stem: p for p in (ROOT / "tests").rglob("test_*.py")}
    for stem, name in re.findall(r"\b(test_\w+?)(?:\.py)?::(test_\w+)", text):
        if stem not in files or f"def {name}(" not in files[stem].read_text():
            wrong.append(f"{stem}::{name}")
    assert wrong == []


def test_every_option_is_described() -> None:
    text = text_of("docs/cli.md")
    missing = [
        f"{name} {option}"
        for name, command in main.commands.items()
        for parameter in command.params
        for option in parameter.opts
        if option.startswith("--") and option not in text
    ]
    assert missing == []


def test_every_loss_is_described() -> None:
    source = "\n".join(
        p.read_text() for top in ("reshard", "converters") for p in (ROOT / top).rglob("*.py")
    )
    codes = set(re.findall(r"""\bLoss\(\s*["']([a-z-]+)["']""", source))
    assert len(codes) >= 10
    assert {c for c in codes if f"`{c}`" not in text_of("docs/idea.md")} == set()


def test_both_commands_of_the_readme_can_be_run() -> None:
    for script in ("demo.sh", "test.sh"):
        assert f"./{script}" in text_of("README.md")
        assert os.access(ROOT / script, os.X_OK)


# --- code ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES)
def test_python_blocks_are_python(page: str) -> None:
    for kind, body in FENCE.findall(text_of(page)):
        if kind == "python" and "..." not in body:
            ast.parse(body)


def test_the_example_of_a_framework_runs(unpacked: Unpack, tmp_path: Path) -> None:
    """Installed as a distribution with its entry point, and used by the page's command lines."""
    page = "docs/adding-a-framework.md"
    code = next(b for k, b in FENCE.findall(text_of(page)) if k == "python")
    site = tmp_path / "site"
    info = site / f"{EXAMPLE}-1.0.dist-info"
    info.mkdir(parents=True)
    (site / f"{EXAMPLE}.py").write_text(code)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {EXAMPLE}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[reshard.formats]\n{EXAMPLE} = {EXAMPLE}:FORMAT\n")
    run = unpacked("dcp/fsdp2_w2_fp32") / "checkpoint"

    def done(*words: str, code: int = 0) -> dict[str, Any]:
        places = {"RUN": str(run), "OUT": str(tmp_path / "out"), "BACK": str(tmp_path / "back")}
        ran = subprocess.run(
            [sys.executable, "-m", *(places.get(w, w) for w in words), "--json"],
            env={**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{ROOT}"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == code, ran.stderr
        found: dict[str, Any] = json.loads(ran.stdout)
        return found

    reports = [
        done(*words) for words in command_lines(page) if EXAMPLE in str(words) or "BACK" in words
    ]
    assert [r["status"] for r in reports] == ["ok", "ok", "equal"]
    assert reports[0]["verified"] == {"tensors": 21, "of": 21, "files": 3}
    with open(tmp_path / "out" / "rank-1.rows", "r+b") as file:
        file.truncate(8)
    assert done("reshard", "inspect", "OUT", code=1)["error"] == "CorruptError"
