"""The import graph has no cycles and follows the declared layers; folders stay small; the page shows them."""

from __future__ import annotations

import importlib.util
from collections import Counter
from pathlib import Path
from types import ModuleType

import networkx as nx
import pytest

ROOT = Path(__file__).parents[2]
MOST_MODULES = 20  # flat folders of whole ideas, rather than folders of fragments


@pytest.fixture(scope="module")
def graphs() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "package_graph", ROOT / "docs" / "package_graph.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_modules_do_not_import_each_other_in_cycles(graphs: ModuleType) -> None:
    graph = graphs.import_graph()
    assert [found for found in nx.strongly_connected_components(graph) if len(found) > 1] == []
    assert graph.number_of_nodes() > 300
    assert graph.has_edge("compound.graph.system", "compound.graph.component")


@pytest.mark.slow
def test_imports_lead_downward_in_every_package(graphs: ModuleType) -> None:
    graph = graphs.import_graph()
    upward = []
    for container, rows in graphs.layers().items():
        place = {name: number for number, row in enumerate(rows) for name in row}
        for source, target in graph.edges:
            if source.startswith(f"{container}.") and target.startswith(f"{container}."):
                a, b = (place.get(graphs.package_of(each, container)) for each in (source, target))
                if a is not None and b is not None and a > b:
                    upward.append((source, target))
    assert upward == []


def test_the_contracts_name_every_package(graphs: ModuleType) -> None:
    packages = {graphs.package_of(name) for name in graphs.modules()} - {"compound", "__main__"}
    assert {name for row in graphs.layers()["compound"] for name in row} == packages


def test_an_import_for_types_alone_is_seen(graphs: ModuleType, tmp_path: Path) -> None:
    for name, text in {"a": "from compound.b import B", "b": ""}.items():
        (tmp_path / "compound").mkdir(exist_ok=True)
        body = (
            f"from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    {text}\n"
            if text
            else "B = 1\n"
        )
        (tmp_path / "compound" / f"{name}.py").write_text(body)
    assert list(graphs.import_graph(tmp_path).edges) == [("compound.a", "compound.b")]


def test_a_folder_holds_few_modules(graphs: ModuleType) -> None:
    source = Counter(path.parent for path in graphs.modules().values())
    tests = Counter(path.parent for path in (ROOT / "tests").rglob("*.py"))
    assert {str(folder): c for folder, c in (source + tests).items() if c > MOST_MODULES} == {}


def test_tests_mirror_the_packages(graphs: ModuleType) -> None:
    packages = {graphs.package_of(name) for name in graphs.modules()}
    others = {
        "benchmarks",
        "chaos",
        "files",
        "project",
        "real_browser",
        "real_ray",
        "real_stores",
        "real_vllm",
        "reference",
        "support",
    }
    folders = {p.name for p in (ROOT / "tests").iterdir() if p.is_dir() and p.name != "__pycache__"}
    assert folders - others <= packages


@pytest.mark.slow
def test_the_page_shows_the_packages_as_they_are(graphs: ModuleType) -> None:
    text = graphs.PAGE.read_text("utf-8")
    assert text == graphs.page(text), "run `make docs`"
