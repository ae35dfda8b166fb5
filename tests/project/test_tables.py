"""The tables of the documentation are those of the committed results."""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
MODULES = sorted(path.stem for path in (DOCS / "tables").glob("[!_]*.py"))


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return imported("pages", monkeypatch)


def imported(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import a module of the tables as `python docs/make_tables.py` does."""
    monkeypatch.syspath_prepend(str(DOCS))
    return importlib.import_module(f"tables.{name}")


@pytest.mark.parametrize(
    ("page", "least"),
    [
        ("evidence/local_rewards.md", 4),
        ("evidence/training.md", 4),
        ("adr/0004-acceptance.md", 2),
        ("guides/nothing_found.md", 1),
        ("evidence/reliability.md", 4),
        ("evidence/README.md", 1),
        ("evidence/benchmarks.md", 3),
        ("evidence/acceptance.md", 6),
    ],
)
def test_the_tables_of_a_page_are_current(pages: ModuleType, page: str, least: int) -> None:
    text = (DOCS / page).read_text("utf-8")
    assert DOCS / page in pages.PAGES
    assert text.count("<!-- table ") >= least
    assert pages.with_tables(text) == text, "run: make docs"


def test_all_pages_with_tables_are_generated(pages: ModuleType) -> None:
    written = [DOCS.parent / "README.md", *DOCS.rglob("*.md")]
    found = {page for page in written if "<!-- table " in page.read_text("utf-8")}
    assert found == set(pages.PAGES)


def test_every_table_has_a_name_of_its_own_and_a_page(pages: ModuleType) -> None:
    names = [table.__name__ for module in pages.MODULES for table in module.TABLES]
    assert sorted(names) == sorted(pages.TABLES)
    used = {
        kind
        for page in pages.PAGES
        for kind in re.findall(r"<!-- table (\w+)", page.read_text(encoding="utf-8"))
    }
    assert used == set(names)


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_docstrings_hold(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctest.testmod(imported(name, monkeypatch)).failed == 0
