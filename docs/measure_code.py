"""Measure the size of the package, and check it against budgets.

``python docs/measure_code.py [ROOT]`` prints a table; with ``--check`` it fails if a measure
exceeds its budget; with ``--journeys`` it also prints the stack frames and files of a run and of an
optimization (``docs/journeys.py``). The package is `compound`, `components`, `rewards` and
`optimizers`; benchmarks, tests and documentation are measured apart. Definitions:

- tokens: those of Python's tokenizer, without comments, docstrings, line ends and indentation;
- modules: Python files, except those that hold at most a docstring and imports of the future;
- layers: those of the import contract of `compound` in ``pyproject.toml``;
- top-level names: functions, classes and variables of modules;
- public names: the names of ``compound.__all__``, which are those of ``compound/__init__.pyi``,
  without its namespaces;
- settings: distinct names of fields of classes that are derived from a settings model;
- commands: commands and groups of commands that follow ``compound``;
- repeated class names: names of classes that are defined more than once;
- repeated file names: names of modules that occur more than three times;
- imports per module: modules of the package that a module imports, on average;
- words of the user's documentation: of README and of pages in ``docs`` outside of ``adr``, ``evidence`` and
  ``reference``.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, median

ROOTS = ("compound", "components", "rewards", "optimizers")
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
# Upper limits, lowered with the code. What exceeds one replaces something, or argues for a higher
# limit here.
BUDGETS = {
    "lines": 86_300,
    "modules": 331,
    "layers": 10,
    "public names": 44,
    "settings": 137,
    "commands": 12,
    "repeated class names": 0,
    "repeated file names": 0,
    "imports per module": 7.7,  # grows while modules are merged, although fewer imports remain in all
}


def sources(root: Path, *folders: str) -> Iterator[Path]:
    """Yield the Python files of some folders; the links in ``compound`` to other folders are not followed."""
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            parents = [root / parent for parent in path.relative_to(root).parents]
            if not any(parent.is_symlink() for parent in (path, *parents)):
                yield path


class Sizes:
    """Counts over the package."""

    def __init__(self, root: Path) -> None:
        self.lines: list[int] = []
        self.modules: list[int] = []
        self.functions: list[int] = []
        self.tokens = self.names = self.commands = 0
        self.imports: list[int] = []
        self.classes: Counter[str] = Counter()
        self.files: Counter[str] = Counter()
        self._bases: dict[str, set[str]] = {}
        self._fields: dict[str, set[str]] = {}
        for path in sources(root, *ROOTS):
            self._add(path, path.read_text(encoding="utf-8"))

    def _add(self, path: Path, text: str) -> None:
        tree = ast.parse(text)
        self.lines.append(text.count("\n"))
        self.tokens += _tokens(text, tree)
        if not all(_is_header(node) for node in tree.body):
            self.modules.append(text.count("\n"))
            self.imports.append(len(_imported(tree)))
            self.files[path.name] += path.name != "__init__.py"
        self.names += sum(_names(node) for node in tree.body)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self.functions.append((node.end_lineno or node.lineno) - node.lineno + 1)
                self.commands += any(
                    ast.unparse(d).startswith("app.command") for d in node.decorator_list
                )
            elif isinstance(node, ast.Call):
                self.commands += ast.unparse(node.func) == "app.add_typer"
            elif isinstance(node, ast.ClassDef):
                self.classes[node.name] += 1
                self._bases[node.name] = {ast.unparse(base).split(".")[-1] for base in node.bases}
                self._fields[node.name] = {
                    item.target.id
                    for item in node.body
                    if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
                }

    def settings(self) -> set[str]:
        """Return the distinct names of settings."""

        def derived(name: str, seen: frozenset[str] = frozenset()) -> bool:
            bases = self._bases.get(name, set()) - seen
            return any(
                base in ("Settings", "_Settings") or derived(base, seen | {name}) for base in bases
            )

        return {field for name in self._bases if derived(name) for field in self._fields[name]}


def _tokens(text: str, tree: ast.Module) -> int:
    documented = (ast.Module, *DEFINITIONS)
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            lines |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    found = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(token.type not in LAYOUT and token.start[0] not in lines for token in found)


def _is_header(node: ast.stmt) -> bool:
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_text or (isinstance(node, ast.ImportFrom) and node.module == "__future__")


def _imported(tree: ast.Module) -> set[str]:
    modules = {
        node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module
    }
    modules |= {
        name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names
    }
    return {name for name in modules if name.split(".")[0] == "compound"}


def _names(node: ast.stmt) -> int:
    if isinstance(node, DEFINITIONS):
        return 1
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return sum(isinstance(target, ast.Name) for target in targets)


def _public_names(root: Path) -> int:
    tree = ast.parse((root / "compound" / "__init__.pyi").read_text(encoding="utf-8"))
    imported = [
        item
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module != "compound"
        for item in node.names
    ]
    assigned = sum(isinstance(node, ast.Assign) for node in tree.body)
    return assigned + sum(item.asname is not None for item in imported)


def _words(root: Path) -> int:
    docs = root / "docs"
    others = ("adr", "evidence", "reference")
    pages = [path for path in docs.rglob("*.md") if path.relative_to(docs).parts[0] not in others]
    pages.append(root / "README.md")
    return sum(len(page.read_text(encoding="utf-8").split()) for page in pages)


def measure(root: Path) -> dict[str, float]:
    """Return all measures by name."""
    found = Sizes(root)
    contracts = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"][
        "importlinter"
    ]
    (layers,) = (c["layers"] for c in contracts["contracts"] if c.get("containers") == ["compound"])
    tests = [path.read_text(encoding="utf-8").count("\n") for path in sources(root, "tests")]
    return {
        "lines": sum(found.lines),
        "tokens": found.tokens,
        "modules": len(found.modules),
        "lines of the median module": median(found.modules),
        "modules below 60 lines": sum(lines < 60 for lines in found.modules),
        "lines of the longest function": max(found.functions),
        "layers": len(layers),
        "top-level names": found.names,
        "public names": _public_names(root),
        "settings": len(found.settings()),
        "commands": found.commands,
        "repeated class names": sum(count > 1 for count in found.classes.values()),
        "repeated file names": sum(count > 3 for count in found.files.values()),
        "imports per module": round(fmean(found.imports), 1),
        "lines of tests": sum(tests),
        "words of the user's documentation": _words(root),
    }


def main() -> None:
    """Print the measures; with ``--check``, fail if one exceeds its budget."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("root", type=Path, nargs="?", default=Path(__file__).parents[1])
    parser.add_argument("--check", action="store_true", help="fail if a measure exceeds its budget")
    parser.add_argument("--journeys", action="store_true", help="also count frames and files")
    args = parser.parse_args()
    found = measure(args.root)
    over = [name for name, most in BUDGETS.items() if found[name] > most]
    if not args.check:
        for name, value in found.items():
            print(
                f"{name:35} {value:>9,.10g}"
                + (f"  of {BUDGETS[name]:,g}" if name in BUDGETS else "")
            )
    if args.journeys:
        subprocess.run(
            [sys.executable, Path(__file__).with_name("journeys.py"), args.root], check=True
        )
    for name in over:
        print(
            f"{name}: {found[name]:,.10g} exceed the budget of {BUDGETS[name]:,g} (docs/measure_code.py)"
        )
    sys.exit(bool(args.check and over))


if __name__ == "__main__":
    main()
