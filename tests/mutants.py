"""Make random mutants of the package, and count those that the tests catch.

``python tests/mutants.py compound/execution --tests tests/execution`` changes one operator,
constant, condition or returned value at a time, in a copy of the repository. The tests run once on
the unchanged copy, which records the tests that reach each mutant; a mutant is then run with those
tests only, at most ``--most`` of them. The same seed chooses the same mutants of the same code. A
mutant is caught if a test fails or takes longer than ``--limit`` seconds. Survivors are printed
with their places; some are equivalent to the code.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGES = ("compound/graph", "compound/execution", "compound/evaluation", "compound/optimization")
COPIED = ("compound", "components", "rewards", "optimizers", "benchmarks", "tests")
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
# A module of the copy. Notes the test that reaches a mutant, also in processes that the test
# starts.
PROBE = """
import os

known = set()


def reach(number):
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    if test and (test, number) not in known:
        known.add((test, number))
        with open({log!r}, "a") as file:
            file.write(f"{{test}}\\t{{number}}\\n")
"""


class Mutant(NamedTuple):
    """A change of one node: the ``site``-th place that can change of a file."""

    path: Path
    site: int
    line: int
    before: str
    after: str


class Site(NamedTuple):
    """A node that can be changed, the statement that contains it, and the change."""

    node: ast.expr | ast.stmt
    block: list[ast.stmt]
    statement: ast.stmt
    change: Callable[[], None]


def sites(tree: ast.Module) -> Iterator[Site]:
    """Yield the sites in the bodies of functions, in a fixed order."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _sites_of(function.body)


def _sites_of(block: list[ast.stmt]) -> Iterator[Site]:
    for statement in list(block):
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if isinstance(statement, ast.Return) and statement.value is not None:
            yield Site(statement, block, statement, _setter(statement, "value", None))
        inner = [
            value
            for name, value in ast.iter_fields(statement)
            if name in ("body", "orelse", "finalbody")
        ]
        for node in _expressions(statement):
            if (change := _change(node)) is not None:
                yield Site(node, block, statement, change)
        for body in inner + [handler.body for handler in getattr(statement, "handlers", [])]:
            yield from _sites_of(body)


def _expressions(statement: ast.stmt) -> Iterator[ast.expr]:
    """Yield the expressions of a statement, without those of the statements in it."""
    for child in ast.iter_child_nodes(statement):
        if isinstance(child, ast.expr):
            yield from (node for node in ast.walk(child) if isinstance(node, ast.expr))


def _change(node: ast.expr) -> Callable[[], None] | None:
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
        return _setter(node, "ops", [SWAPS[type(node.ops[0])](), *node.ops[1:]])
    if isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in SWAPS:
        return _setter(node, "op", SWAPS[type(node.op)]())
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return _setter(node, "operand", ast.UnaryOp(ast.Not(), node.operand))
    if isinstance(node, ast.IfExp):
        return _setter(node, "test", ast.UnaryOp(ast.Not(), node.test))
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        return _setter(node, "value", not node.value)
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return _setter(node, "value", node.value + 1)
    return None


def _setter(node: ast.AST, field: str, value: object) -> Callable[[], None]:
    return lambda: setattr(node, field, value)


def mutated(path: Path, index: int) -> tuple[str, Mutant]:
    """Return the text of a file with one change, and the change."""
    tree = ast.parse(path.read_text("utf-8"))
    site = list(sites(tree))[index]
    before = ast.unparse(site.node)
    site.change()
    mutant = Mutant(path, index, site.node.lineno, before, ast.unparse(site.node))
    return ast.unparse(ast.fix_missing_locations(tree)), mutant


def choose(packages: list[str], count: int, seed: int) -> list[Mutant]:
    """Draw mutants from all sites of the modules of some packages."""
    files = [
        file
        for package in packages
        for file in (
            [ROOT / package] if package.endswith(".py") else (ROOT / package).rglob("*.py")
        )
    ]
    every = [
        (file, index)
        for file in sorted(files)
        for index in range(sum(1 for _ in sites(ast.parse(file.read_text("utf-8")))))
    ]
    drawn = random.Random(seed).sample(every, min(count, len(every)))
    return [mutated(file, index)[1] for file, index in sorted(drawn)]


class Copy:
    """A copy of the repository in a temporary folder, in which mutants are tested."""

    def __init__(self, folder: Path, tests: list[str]) -> None:
        self.folder = folder
        self.tests = tests
        for name in COPIED:
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
        for path in (*ROOT.glob("*.toml"), *ROOT.glob("*.md"), ROOT / "Makefile", ROOT / "docs"):
            (folder / path.name).symlink_to(path)

    def reached(self, mutants: list[Mutant]) -> dict[Mutant, list[str]]:
        """Run the tests without a change, and return those that reach each mutant."""
        log = self.folder / "reached.txt"
        log.touch()
        (self.folder / "mutant_probe.py").write_text(PROBE.format(log=str(log)))
        for path in {mutant.path for mutant in mutants}:
            tree = ast.parse(path.read_text("utf-8"))
            found = list(sites(tree))
            for number, mutant in enumerate(mutants):
                if mutant.path == path:
                    site = found[mutant.site]
                    probe = ast.parse(f"__import__('mutant_probe').reach({number})").body[0]
                    site.block.insert(site.block.index(site.statement), probe)
            self._write(path, ast.unparse(ast.fix_missing_locations(tree)))
        if self._run(self.tests, limit=None) != 0:
            sys.exit(f"a test fails without a mutant:\n{(self.folder / 'output.txt').read_text()}")
        for path in {mutant.path for mutant in mutants}:
            self._write(path, path.read_text("utf-8"))
        tests: dict[int, dict[str, None]] = {}
        for line in log.read_text("utf-8").splitlines():
            test, _, reached = line.rpartition("\t")
            tests.setdefault(int(reached), {})[test] = None
        return {mutant: list(tests.get(i, ())) for i, mutant in enumerate(mutants)}

    def catches(self, mutant: Mutant, tests: list[str], limit: float) -> bool:
        """Return whether one of the tests fails with a mutant."""
        self._write(mutant.path, mutated(mutant.path, mutant.site)[0])
        try:
            return self._run(["-x", *tests], limit) != 0
        finally:
            self._write(mutant.path, mutant.path.read_text("utf-8"))

    def _write(self, path: Path, text: str) -> None:
        (self.folder / path.relative_to(ROOT)).write_text(text, encoding="utf-8")

    def _run(self, arguments: list[str], limit: float | None) -> int:
        environment = {
            **os.environ,
            "PYTHONPATH": str(self.folder),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTEST_ADDOPTS": "",
        }
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
        output = (self.folder / "output.txt").open("w")
        try:
            return subprocess.run(
                command,
                cwd=self.folder,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=limit,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            return 1


def main() -> None:
    """Print how many mutants the tests catch, and those that survive."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("packages", nargs="*", default=list(PACKAGES), help="folders or modules")
    parser.add_argument("--tests", nargs="+", default=["tests"], help="folders or files of tests")
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most", type=int, default=40, help="tests that run for a mutant")
    parser.add_argument("--limit", type=float, default=120, help="seconds for a mutant")
    args = parser.parse_args()
    mutants = choose(args.packages, args.count, args.seed)
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(Path(folder), args.tests)
        reached = copy.reached(mutants)
        survivors = []
        for mutant, tests in reached.items():
            some = random.Random(args.seed).sample(tests, min(args.most, len(tests)))
            if not some or not copy.catches(mutant, some, args.limit):
                survivors.append((mutant, len(some)))
    for mutant, count in survivors:
        place = f"{mutant.path.relative_to(ROOT)}:{mutant.line}"
        print(f"{place}: {mutant.before!r} -> {mutant.after!r} survives {count} tests")
    unreached = sum(not tests for tests in reached.values())
    print(
        f"caught {len(mutants) - len(survivors)} of {len(mutants)} mutants; "
        f"{unreached} were reached by no test"
    )


if __name__ == "__main__":
    main()
