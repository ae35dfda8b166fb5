"""The cost of importing, and the identity of the four root packages with those in ``compound``."""

from __future__ import annotations

import ast
import importlib
import re
import socket
import sys
from pathlib import Path

import pytest

import compound
from compound.core.errors import LIBRARIES
from processes import python

ROOT = Path(__file__).parents[2]
PACKAGES = ("components", "rewards", "optimizers")
HEAVY = {
    "accelerate",
    "bm25s",
    "datasets",
    "gepa",
    "gguf",
    "litellm",
    "mlflow",
    "opentelemetry",
    "wandb",
    "matplotlib",
    "optuna",
    "peft",
    "safetensors",
    "sentence_transformers",
    "sklearn",
    "torch",
    "transformers",
    "trl",
    "vllm",
}
# modules that are nothing without their library, and are themselves imported where they are used
ALLOWED = {
    "compound/engines/adapter_files.py",
    "compound/engines/local/adapters.py",
    "compound/engines/local/decoding.py",
    "compound/engines/local/kernels.py",
    "compound/engines/local/prefill.py",
    "compound/engines/local/engine.py",
    "compound/engines/litellm.py",
    "compound/engines/vllm/engine.py",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        "import compound",
        "import compound; [getattr(compound, name) for name in compound.__all__]",
        "from compound import cli",
        "import compound; compound.load_system('benchmarks/atlas.yaml')",
    ],
    ids=["import compound", "every public name", "the commands", "a file"],
)
def test_importing_loads_no_heavy_library(code: str) -> None:
    optional = HEAVY | set(LIBRARIES)
    ran = python("-c", f"{code}\nimport sys; print(sorted({optional!r} & set(sys.modules)))")
    assert (ran.stdout, ran.stderr) == ("[]\n", "")


@pytest.mark.slow
def test_the_demo_needs_no_library_that_it_does_not_install(tmp_path: Path) -> None:
    """The libraries of other extras are blocked, as if they were not installed."""
    (named,) = re.findall(
        r"demo\.stamp:(?:.|\n)*?-e '\.\[([\w,]+)\]'", (ROOT / "Makefile").read_text("utf-8")
    )
    installed = set(named.split(","))
    blocked = [module for module, (_, extra) in LIBRARIES.items() if extra not in installed]
    assert {"litellm", "mlflow"} <= set(blocked)
    run = [
        "optimize",
        str(ROOT / "benchmarks" / "atlas.yaml"),
        "--dry-run",
        "--run-dir",
        str(tmp_path / "run"),
    ]
    ran = python(
        "-c",
        f"import sys; sys.modules.update(dict.fromkeys({blocked!r}))\n"
        f"from compound.cli.entry_point import main; sys.argv = {['compound', *run]!r}; main()",
    )
    assert ran.returncode == 0, ran.stderr
    assert "no requests are sent" in ran.stdout


def test_import_compound_loads_next_to_nothing() -> None:
    ran = python(
        "-c",
        "import sys; before = set(sys.modules); import compound; print(sorted(set(sys.modules) - before))",
    )
    loaded = ast.literal_eval(ran.stdout)
    assert [name for name in loaded if name.partition(".")[0] not in sys.stdlib_module_names] == [
        "compound",
        "compound.core",
        "compound.core.lazy",
    ]


@pytest.mark.parametrize("package", PACKAGES)
def test_a_root_package_cannot_be_imported_by_its_bare_name(package: str) -> None:
    ran = python("-c", f"import {package}")
    assert ran.returncode == 1
    assert f"ImportError: import compound.{package}, not {package}" in ran.stderr
    assert python("-c", f"import compound.{package}").returncode == 0


def test_every_public_name_exists_and_an_unknown_one_is_refused() -> None:
    compound = importlib.import_module("compound")
    assert [name for name in compound.__all__ if getattr(compound, name, None) is None] == []
    assert set(compound.__all__) <= set(dir(compound))
    with pytest.raises(AttributeError, match="module 'compound' has no attribute 'Sytem'"):
        _ = compound.Sytem


@pytest.mark.parametrize("package", ["compound", *PACKAGES])
def test_a_folder_with_modules_is_a_package(package: str) -> None:
    folders = {path.parent for path in (ROOT / package).rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_the_link_inside_compound_leads_to_the_root_folder(package: str) -> None:
    assert (ROOT / "compound" / package).resolve() == ROOT / package


def modules() -> list[Path]:
    return sorted(path for f in ("compound", *PACKAGES) for path in _python_files(ROOT / f))


def _python_files(folder: Path) -> list[Path]:
    own = [p for p in folder.rglob("*.py") if not (ROOT / "compound" in p.parents and _linked(p))]
    return [path for path in own if "__pycache__" not in path.parts]


def _linked(path: Path) -> bool:
    return path.relative_to(ROOT).parts[1] in PACKAGES


def imported_at_module_level(tree: ast.Module) -> set[str]:
    """The libraries that importing the module would load; a block under TYPE_CHECKING does not count."""
    found: set[str] = set()
    pending: list[ast.stmt] = list(tree.body)
    while pending:
        statement = pending.pop()
        if isinstance(statement, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in statement.names}
        elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            found.add(statement.module.partition(".")[0])
        elif isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test):
            pending.extend(statement.orelse)
        elif not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            inside = [*ast.iter_child_nodes(statement)]
            held = [node for node in inside if isinstance(node, ast.ExceptHandler | ast.match_case)]
            inside += [child for node in held for child in node.body]
            pending.extend(child for child in inside if isinstance(child, ast.stmt))
    return found


def test_heavy_libraries_are_imported_where_they_are_used() -> None:
    wrong = {
        str(path.relative_to(ROOT)): sorted(heavy)
        for path in modules()
        if (heavy := imported_at_module_level(ast.parse(path.read_text(encoding="utf-8"))) & HEAVY)
    }
    assert set(wrong) <= ALLOWED, wrong


def test_the_search_for_heavy_imports_would_find_one() -> None:
    source = (
        "import os\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\nelse:\n    import peft\n"
        "try:\n    from trl.trainer import x\nexcept ImportError:\n    import optuna.samplers\n"
        "class A:\n    import gguf\n    def g(self):\n        import vllm\ndef f():\n    import litellm\n"
    )
    assert imported_at_module_level(ast.parse(source)) & HEAVY == {"peft", "trl", "optuna", "gguf"}
    assert len(modules()) > 30


def test_a_test_that_reaches_for_the_network_fails() -> None:
    with socket.socket() as door, pytest.raises(RuntimeError, match="tests run without a network"):
        door.connect(("192.0.2.1", 80))
    with socket.socket() as listener, socket.socket() as door:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        door.connect(listener.getsockname())


def test_the_test_doubles_need_no_import_of_their_own() -> None:
    ran = python("-c", "import compound as cp; print(cp.testing.ScriptedLM(['yes']).name)")
    assert ran.returncode == 0, ran.stderr


NAMESPACES = ("components", "engines", "ext", "interchange", "metrics", "testing")


def test_each_public_name_is_that_of_its_module() -> None:
    for package in (compound, *(getattr(compound, name) for name in NAMESPACES)):
        for name, place in package._HOME.items():
            module, _, attribute = place.partition(":")
            assert getattr(package, name) is getattr(importlib.import_module(module), attribute)


def test_a_name_of_a_namespace_is_found_from_the_package() -> None:
    assert {*NAMESPACES} <= set(dir(compound))
    with pytest.raises(AttributeError, match=r"use compound\.engines\.Fleet"):
        _ = compound.Fleet  # type: ignore[attr-defined]


def homes() -> dict[str, str]:
    return {name: place.partition(":")[0] for name, place in compound._HOME.items()}


def test_the_first_line_of_a_module_is_no_riddle() -> None:
    """The first line is a noun phrase or states the module's purpose, and is not a question."""
    opening = re.compile(r"(What|Where|How|From|Which|Whether|Why|By)\b")
    first = {
        str(path.relative_to(ROOT)): (
            ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
        ).split("\n")[0]
        for path in modules()
    }
    assert {path: line for path, line in first.items() if opening.match(line) or not line} == {}
