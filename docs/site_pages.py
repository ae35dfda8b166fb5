"""Pages of the documentation site that are made while it is built, by the plugin gen-files of MkDocs.

These are the home page (README.md), the pages of the other Markdown files at the root of the repository, one
page for each package of the Python API, and one for each example of the gallery.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import mkdocs_gen_files

import compound

ROOT = Path(__file__).parents[1]
ROOT_PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security_policy.md",
}
API = {
    "graph": ("Graphs", "compound.graph"),
    "components": ("Components", "compound.components compound.components.declaration"),
    "imports": ("Imports and exports", "compound.components.imports compound.exports"),
    "agents": ("Agents and tools", "compound.components.agents compound.components.tools"),
    "engines": (
        "Engines",
        "compound.engine compound.image compound.components.engines compound.components.engines.local "
        "compound.components.engines.vllm compound.components.engines.openai "
        "compound.components.engines.fleet",
    ),
    "evaluation": (
        "Data, metrics and evaluation",
        "compound.example compound.evaluation compound.evaluation.metrics compound.evaluation.metrics.judges",
    ),
    "execution": ("Execution", "compound.execution compound.execution.observers"),
    "entry_points": ("Optimizing, evaluating and running", "compound.api compound.api.sweeps"),
    "optimization": ("Optimization", "compound.optimization"),
    "optimizers": (
        "Optimizers",
        "compound.optimizers compound.optimizers.search compound.optimizers.search.proposers "
        "compound.optimizers.scheduling compound.optimizers.baselines compound.optimizers.baselines.mipro "
        "compound.optimizers.baselines.opro",
    ),
    "optimas": ("OPTIMAS", "compound.optimizers.optimas"),
    "weights": (
        "Training of weights",
        "compound.optimizers.weights compound.optimizers.weights.interchange "
        "compound.optimizers.weights.learner",
    ),
    "recipes": (
        "Training recipes",
        "compound.optimizers.weights.recipes compound.optimizers.weights.credit",
    ),
    "loss": ("Losses", "compound.optimizers.weights.loss"),
    "rewards": (
        "Local rewards",
        "compound.rewards compound.rewards.gains compound.rewards.sampling compound.rewards.credit",
    ),
    "inspection": ("Inspection of rewards", "compound.rewards.inspection"),
    "runs": ("Runs and reports", "compound.runs compound.report"),
    "tracing": ("Tracing and trackers", "compound.tracing compound.trackers"),
    "serving": ("Serving", "compound.serving compound.serving.routes compound.web"),
    "gateway": ("Gateway", "compound.gateway"),
    "settings": ("Settings and state", "compound.settings compound.storage.state"),
    "testing": ("Testing", "compound.testing"),
    "errors": ("Errors", "compound.errors"),
}


def main() -> None:
    """Make the pages."""
    for source, page in ROOT_PAGES.items():
        _write(page, _moved((ROOT / source).read_text(encoding="utf-8")))
    for name, (title, packages) in API.items():
        _write(f"reference/api/{name}.md", _package_page(title, packages.split()))
    for example in sorted((ROOT / "docs" / "examples").glob("*.py")):
        _write(f"examples/{example.stem}.md", _example_page(example))


def _write(page: str, text: str) -> None:
    with mkdocs_gen_files.open(page, "w") as file:
        file.write(text)


def _moved(text: str) -> str:
    """Return the text of a page at the root, with its links as they are from within docs/."""
    text = re.sub(r"(\]\(|src=\")docs/", r"\1", text)
    for source, page in ROOT_PAGES.items():
        text = text.replace(f"]({source}", f"]({page}")
    return text


def _package_page(title: str, packages: list[str]) -> str:
    parts = [f"# {title}"]
    modules = (module for package in packages for module in _modules(package))
    parts += [f"## `{module}`\n\n::: {module}" for module in modules]
    return "\n\n".join(parts) + "\n"


def _modules(name: str) -> Iterator[str]:
    """Yield a module, or the modules directly in a package, that have public names; the best known first."""
    package = importlib.import_module(name)
    inside = pkgutil.iter_modules(getattr(package, "__path__", []))
    names = [name, *(f"{name}.{found.name}" for found in inside if not found.ispkg)]
    exported = Counter(getattr(getattr(compound, known), "__module__", "") for known in compound.__all__)
    found = [found for found in names if not found.endswith(".__main__") and _has_public(found)]
    yield from sorted(found, key=lambda module: -exported[module])


def _has_public(name: str) -> bool:
    """Return whether a module defines public classes or functions."""
    source = inspect.getsource(importlib.import_module(name))
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return any(isinstance(node, kinds) and not node.name.startswith("_") for node in ast.parse(source).body)


def _example_page(path: Path) -> str:
    """Return the page of an example: its docstring as the introduction, then its code."""
    source = path.read_text(encoding="utf-8")
    docstring = ast.get_docstring(ast.parse(source)) or path.stem
    title, _, about = docstring.partition("\n\n")
    about, code = about.partition("\nRun:")[0], source.split('"""\n', 1)[-1].lstrip()
    command = f"```sh\npython docs/examples/{path.name}\n```"
    return f'# {title.rstrip(".")}\n\n{about}\n\n{command}\n\n```python title="{path.name}"\n{code}```\n'


main()
