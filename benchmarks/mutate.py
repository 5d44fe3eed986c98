"""Mutation testing: one thing of a module changed, the tests run; a mutant that passes is printed.

    python -m benchmarks.mutate [box layout join fingerprints] [--seconds 900]
                                [--tests FILE ...] [--then FILE ...]

Comparisons, arithmetic, integers, truth values, `and`/`or`/`not`, min/max, all/any and the sides of
bisect are swapped; statements that call, raise or add up are left out. Each mutant runs in a forked
process, on the tests of --tests (test_layout, test_box and test_laws of tests/), until one fails;
those that pass are tried on --then, slower tests of which none is needed for most.
The order is by chance of --seed, so that a run that --seconds ends has looked everywhere.
"""

from __future__ import annotations

import argparse
import ast
import importlib.abc
import importlib.util
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType

ROOT = Path(__file__).resolve().parent.parent
MODULES = ("box", "layout", "join", "fingerprints")
TESTS = ("tests/test_layout.py", "tests/test_box.py", "tests/test_laws.py")
LIMIT = 120  # seconds of CPU time for the tests of one mutant: one that loops is found, too

_COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitAnd,
    ast.RShift: ast.LShift, ast.LShift: ast.RShift, ast.Pow: ast.Mult,
}  # fmt: skip
_NAMES = {
    "min": "max", "max": "min", "all": "any", "any": "all", "bisect_left": "bisect_right",
    "bisect_right": "bisect_left", "sorted": "list",
}  # fmt: skip
#: Keywords that assert something of our own, and change no result.
_ASSERTING = ("strict", "frozen", "slots", "repr")


@dataclass(frozen=True, slots=True)
class Mutant:
    """A module with one thing changed."""

    module: str
    line: int
    where: str  # the function
    what: str
    code: CodeType

    def __str__(self) -> str:
        return f"{self.module}.{self.where}, line {self.line}: {self.what}"


def mutants(module: str) -> Iterator[Mutant]:
    """Every mutant of a module of reshard."""
    path = ROOT / "reshard" / f"{module}.py"
    tree = ast.parse(path.read_text())
    for scope, parent, field, index, node in list(_places(tree, "module")):
        for new in _instead(node):
            put = _putter(parent, field, index)
            put(new)
            what = f"`{_text(node)}` became `{_text(new)}`"
            code = compile(ast.fix_missing_locations(tree), str(path), "exec")
            put(node)
            yield Mutant(module, getattr(node, "lineno", 0), scope, what, code)


def _text(node: ast.AST) -> str:
    return " ".join(ast.unparse(node).split())[:80]


def _putter(parent: ast.AST, field: str, index: int | None) -> Callable[[ast.AST], None]:
    def put(node: ast.AST) -> None:
        if index is None:
            setattr(parent, field, node)
        else:
            getattr(parent, field)[index] = node

    return put


def _places(node: ast.AST, scope: str) -> Iterator[tuple[str, ast.AST, str, int | None, ast.AST]]:
    """Every node with its place, but for annotations, decorators and text."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        scope = node.name if scope == "module" else f"{scope}.{node.name}"
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        several = value if isinstance(value, list) else [value]
        for i, child in enumerate(several):
            if not isinstance(child, ast.AST) or isinstance(child, ast.JoinedStr):
                continue
            if isinstance(child, ast.keyword) and child.arg in _ASSERTING:
                continue
            yield scope, node, field, i if isinstance(value, list) else None, child
            if not (isinstance(child, ast.Raise)):  # what an error says is not mutated
                yield from _places(child, scope)


def _instead(node: ast.AST) -> Iterator[ast.AST]:
    """What a node is replaced by."""
    match node:
        case ast.Compare(left, [op], comparators) if type(op) in _COMPARED:
            yield _at(node, ast.Compare(left, [_COMPARED[type(op)]()], comparators))
        case ast.BinOp(left, op, right) if type(op) in _COMPUTED:
            yield _at(node, ast.BinOp(left, _COMPUTED[type(op)](), right))
        case ast.BoolOp(op, values):
            other = ast.Or() if isinstance(op, ast.And) else ast.And()
            yield _at(node, ast.BoolOp(other, values))
        case ast.UnaryOp(ast.Not() | ast.USub(), operand):
            yield operand
        case ast.Constant(bool() as value):
            yield _at(node, ast.Constant(not value))
        case ast.Constant(int() as value):
            yield _at(node, ast.Constant(value + 1))
        case ast.Name(name, ast.Load()) if name in _NAMES:
            yield _at(node, ast.Name(_NAMES[name], ast.Load()))
        case ast.AugAssign(target, op, value) if type(op) in _COMPUTED:
            yield _at(node, ast.AugAssign(target, _COMPUTED[type(op)](), value))
            yield _at(node, ast.Pass())
        case ast.Expr(ast.Call()) | ast.Raise() | ast.Break() | ast.Continue():
            yield _at(node, ast.Pass())
        case ast.IfExp(_, body, orelse):
            yield body
            yield orelse


def _at(old: ast.AST, new: ast.AST) -> ast.AST:
    return ast.copy_location(new, old)


class Mutated(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives the mutant where its module is imported."""

    def __init__(self, mutant: Mutant) -> None:
        self.mutant = mutant

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """The spec of the mutant's module; None for any other."""
        if name != f"reshard.{self.mutant.module}":
            return None
        file = str(ROOT / "reshard" / f"{self.mutant.module}.py")
        return importlib.util.spec_from_file_location(name, file, loader=self)

    def create_module(self, spec: object) -> None:
        """The usual one."""

    def exec_module(self, module: ModuleType) -> None:
        """Run the mutant's code."""
        exec(self.mutant.code, module.__dict__)


def survives(mutant: Mutant | None, tests: Sequence[str]) -> bool:
    """Whether all tests pass, in a process of their own."""
    pid = os.fork()
    if pid == 0:
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (LIMIT, LIMIT + 1))
            os._exit(_passes(mutant, tests))
        finally:
            os._exit(9)
    stop = time.monotonic() + 10 * LIMIT  # one that waits; the machine may be busy
    while time.monotonic() < stop:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False


def _passes(mutant: Mutant | None, tests: Sequence[str]) -> int:
    """In the child: the tests' exit code; 0 is that all pass."""
    import hypothesis
    import pytest

    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)  # a failure is not made small
    hypothesis.settings.register_profile("mutants", phases=phases, database=None)
    hypothesis.settings.load_profile("mutants")
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    os.chdir(ROOT)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # no warning of what is imported already
    if mutant is not None:
        sys.meta_path.insert(0, Mutated(mutant))
    return int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests]))


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("modules", nargs="*", default=MODULES)
    parser.add_argument("--seconds", type=int, default=900)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tests", nargs="+", default=TESTS)
    parser.add_argument("--then", nargs="+", default=(), metavar="FILE")
    parser.add_argument("--only", default="", help="functions whose name holds this")
    asked = parser.parse_args()
    import hypothesis  # noqa: F401  # once, for all forks
    import numpy  # noqa: F401  # the same

    if not survives(None, [*asked.tests, *asked.then]):
        raise SystemExit("the tests fail as they are")
    everything = [m for name in asked.modules for m in mutants(name) if asked.only in m.where]
    random.Random(asked.seed).shuffle(everything)
    stop = time.monotonic() + asked.seconds
    ran = alive = late = 0
    for mutant in everything:
        if time.monotonic() > stop:
            break
        ran += 1
        if not survives(mutant, asked.tests):
            continue
        if asked.then and not survives(mutant, asked.then):
            late += 1
            print(f"(killed by --then) {mutant}", flush=True)
        else:
            alive += 1
            print(mutant, flush=True)
    killed = f"{ran - alive} killed" + (f", {late} of them by --then" if late else "")
    print(f"{ran} of {len(everything)} mutants, {killed}, {alive} survive")


if __name__ == "__main__":
    main()
