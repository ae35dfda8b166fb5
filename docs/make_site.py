"""Build the documentation site with Zensical; run by ``make site``.

``python docs/make_site.py [FOLDER]`` writes the site to FOLDER, by default ``site``. A broken link
fails it. Zensical reads ``mkdocs.yml``, but has neither hooks nor pages that are made while it
builds. The pages are therefore first collected in a temporary folder: those of ``docs``, the home
page (README.md) and other Markdown files at the root of the repository, one page for each package
of the Python API, and one for each example of the gallery. Links to an example lead to its page,
and those of public names (`cp.run`) to their documentation. Other files are named without a link,
since the site has no copy of them.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import compound

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
NO_PAGES = shutil.ignore_patterns(
    "*.py", "plugin", "serving", "external_agents", "notebooks", "expected"
)
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s#:]+)(#[^)\s]*)?\)")
ROOT_PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security_policy.md",
}
API = {
    "graph": ("Graphs", "compound.graph"),
    "components": ("Components", "compound.components"),
    "imports": ("Imports and exports", "compound.interchange"),
    "agents": ("Agents and tools", "compound.components.agents compound.components.tools"),
    "engines": (
        "Engines",
        "compound.core.engine compound.core.image compound.engines "
        "compound.engines.local "
        "compound.engines.vllm  ",
    ),
    "evaluation": (
        "Data, metrics and evaluation",
        "compound.core.example compound.evaluation compound.evaluation.metrics "
        "compound.evaluation.metrics.judges",
    ),
    "execution": ("Execution", "compound.execution"),
    "entry_points": ("Optimizing, evaluating and running", "compound.api compound.api.sweeps"),
    "optimization": ("Optimization", "compound.optimization"),
    "optimizers": (
        "Optimizers",
        "compound.optimizers compound.optimizers.search compound.optimizers.search.proposers "
        "compound.optimizers.scheduling compound.optimizers.baselines",
    ),
    "optimas": ("OPTIMAS", "compound.optimizers.optimas"),
    "weights": (
        "Training of weights",
        "compound.optimizers.weights compound.optimizers.weights.learner",
    ),
    "recipes": (
        "Training recipes",
        "compound.optimizers.weights.recipes compound.optimizers.weights.credit",
    ),
    "rewards": (
        "Local rewards",
        "compound.rewards compound.rewards.gains",
    ),
    "inspection": ("Inspection of rewards", "compound.rewards.inspection"),
    "runs": ("Runs and reports", "compound.optimization.runs compound.report"),
    "tracing": ("Tracing and trackers", "compound.execution.tracing compound.report.trackers"),
    "serving": ("Serving", "compound.api.serving compound.api.serving.routes compound.core.web"),
    "gateway": ("Gateway", "compound.components.gateway"),
    "settings": (
        "Settings and state",
        "compound.optimization.settings compound.core.storage.state",
    ),
    "testing": ("Testing", "compound.testing"),
    "errors": ("Errors", "compound.core.errors"),
}


def main(site: Path) -> int:
    """Collect the pages and build the site; return the exit status of Zensical."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        collect(work / "pages")
        settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
        settings = settings.replace("docs_dir: docs", "docs_dir: pages\nsite_dir: site")
        settings = settings.replace("[docs/site_docstrings.py]", f"[{DOCS / 'site_docstrings.py'}]")
        (work / "mkdocs.yml").write_text(settings, encoding="utf-8")
        command = [sys.executable, "-m", "zensical", "build", "--strict", "-f", work / "mkdocs.yml"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        status = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
        if status == 0:
            shutil.rmtree(site, ignore_errors=True)
            shutil.copytree(work / "site", site)
        return status


def collect(pages: Path) -> None:
    """Write all pages of the site to a folder."""
    shutil.copytree(DOCS, pages, ignore=NO_PAGES)
    made = {page: _moved((ROOT / name).read_text("utf-8")) for name, page in ROOT_PAGES.items()}
    for name, (title, packages) in API.items():
        made[f"reference/api/{name}.md"] = _package_page(title, packages.split())
    for example in sorted((DOCS / "examples").glob("*.py")):
        made[f"examples/{example.stem}.md"] = _example_page(example)
    for page, text in made.items():
        (pages / page).parent.mkdir(parents=True, exist_ok=True)
        (pages / page).write_text(text, encoding="utf-8")
    for path in pages.rglob("*.md"):
        name = path.relative_to(pages).as_posix()
        path.write_text(with_links(path.read_text("utf-8"), name, pages), encoding="utf-8")


def with_links(markdown: str, page: str, pages: Path) -> str:
    """Return the text of a page with links that work on the site."""

    def replaced(match: re.Match[str]) -> str:
        text, target = match[1], match[2]
        name = text.strip("`").removeprefix("cp.")
        value = getattr(compound, name, None) if text.startswith("`cp.") else None
        if inspect.isclass(value) or inspect.isfunction(value):
            return f"[{text}][{value.__module__}.{value.__qualname__}]"
        source = os.path.normpath(os.path.join(os.path.dirname(page), target))
        inside = not source.startswith("..")
        if inside and (pages / source).exists():
            return match[0]
        if inside and source.endswith(".py") and (pages / source).with_suffix(".md").exists():
            return f"[{text}]({target.removesuffix('.py')}.md)"
        folders = (DOCS, ROOT) if "/" not in page else (DOCS,)  # pages from the root have no folder
        return text if any((folder / source).exists() for folder in folders) else match[0]

    return LINK.sub(replaced, markdown)


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
    exported = Counter(
        getattr(getattr(compound, known), "__module__", "") for known in compound.__all__
    )
    found = [found for found in names if not found.endswith(".__main__") and _has_public(found)]
    yield from sorted(found, key=lambda module: -exported[module])


def _has_public(name: str) -> bool:
    """Return whether a module defines public classes or functions."""
    source = inspect.getsource(importlib.import_module(name))
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return any(
        isinstance(node, kinds) and not node.name.startswith("_") for node in ast.parse(source).body
    )


def _example_page(path: Path) -> str:
    """Return the page of an example: what it prints, its docstring, then its code."""
    source = path.read_text(encoding="utf-8")
    docstring = ast.get_docstring(ast.parse(source)) or path.stem
    title, _, about = docstring.partition("\n\n")
    about, code = about.partition("\nRun:")[0], source.split('"""\n', 1)[-1].lstrip()
    printed = (path.parent / "expected" / f"{path.stem}.txt").read_text(encoding="utf-8")
    result = f"```text\n$ python docs/examples/{path.name}\n{printed}```"
    return f'# {title.rstrip(".")}\n\n{result}\n\n{about}\n\n```python title="{path.name}"\n{code}```\n'


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if sys.argv[1:] else ROOT / "site"))
