"""Measure the source code: sizes, types, comments, and the width of settings classes.

``python docs/measure_code.py [ROOT]`` prints one line per measure; tests and documentation are excluded.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles

ROOTS = ("compound", "components", "rewards", "optimizers", "benchmarks")


@dataclass
class Source:
    """Counts over all modules.

    Attributes:
        modules: number of lines by path.
        functions: number of lines of every function.
        any_names: number of uses of the name ``Any`` by top folder, without imports.
        state_keys: number of subscripts of a name ``state`` by a string.
        comments: number of lines that contain only a comment.
        settings: number of fields of every class derived from a settings model.
    """

    modules: dict[Path, int] = field(default_factory=dict)
    functions: list[int] = field(default_factory=list)
    any_names: Counter[str] = field(default_factory=Counter)
    state_keys: int = 0
    comments: int = 0
    settings: dict[str, int] = field(default_factory=dict)

    @property
    def lines(self) -> int:
        """Total number of lines."""
        return sum(self.modules.values())


def modules(root: Path) -> Iterator[Path]:
    """Yield the modules of the package; the links in ``compound`` to the other folders are not followed."""
    for name in ROOTS:
        for path in sorted((root / name).rglob("*.py")):
            if not any(parent.is_symlink() for parent in (path, *path.relative_to(root).parents)):
                yield path


def measure(root: Path) -> Source:
    """Count over all modules of the package."""
    found = Source()
    bases: dict[str, list[str]] = {}
    fields: dict[str, int] = {}
    for path in modules(root):
        place = path.relative_to(root)
        if any((root / parent).is_symlink() for parent in place.parents):
            continue
        text = path.read_text(encoding="utf-8")
        found.modules[place] = text.count("\n")
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        lines = text.splitlines()
        found.comments += sum(
            token.type == tokenize.COMMENT and lines[token.start[0] - 1].lstrip().startswith("#")
            for token in tokens
        )
        for node in ast.walk(ast.parse(text)):
            match node:
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    found.functions.append((node.end_lineno or node.lineno) - node.lineno + 1)
                case ast.Name(id="Any"):
                    found.any_names[place.parts[0]] += 1
                case ast.Subscript(value=ast.Name(id="state"), slice=ast.Constant(value=str())):
                    found.state_keys += 1
                case ast.ClassDef():
                    bases[node.name] = [ast.unparse(base).split(".")[-1] for base in node.bases]
                    fields[node.name] = sum(isinstance(item, ast.AnnAssign) for item in node.body)
    found.settings = {name: fields[name] for name in bases if _is_settings(name, bases)}
    return found


def _is_settings(name: str, bases: dict[str, list[str]]) -> bool:
    return any(
        base in ("Settings", "_Settings") or (base != name and _is_settings(base, bases))
        for base in bases.get(name, ())
    )


def main(root: Path) -> None:
    """Print the measures."""
    found = measure(root)
    folders = Counter(str(path.parent) for path in found.modules)
    folder, most = folders.most_common(1)[0]
    p95 = quantiles(found.functions, n=100)[94]
    each = 1000 / found.lines
    widest = max(found.settings.items(), key=lambda item: item[1], default=("none", 0))
    print(f"lines: {found.lines}")
    print(f"modules: {len(found.modules)}, median {median(found.modules.values()):g} lines")
    print(f"largest folder: {folder}, {most} modules")
    print(f"functions: 95 % have at most {p95:g} lines, the longest {max(found.functions)}")
    print(f"Any per 1,000 lines: {found.any_names.total() * each:.1f}")
    for name, count in sorted(found.any_names.items()):
        size = sum(lines for path, lines in found.modules.items() if path.parts[0] == name)
        print(f"  {name}: {count * 1000 / size:.1f}")
    print(f'state["…"]: {found.state_keys}')
    print(f"settings classes: {len(found.settings)}, the largest {widest[0]} with {widest[1]} fields")
    print(f"comment lines per 1,000: {found.comments * each:.1f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1])
