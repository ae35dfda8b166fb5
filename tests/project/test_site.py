"""The documentation site: it builds strictly, and documents every public name."""

from __future__ import annotations

import html
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import compound as cp
from compound import testing

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a strict build, in which a broken link or an unknown parameter is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, str(ROOT / "docs" / "make_site.py"), str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    built = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


@pytest.mark.slow
def test_every_link_leads_to_a_page_and_an_anchor_of_the_site(site: Path) -> None:
    pages = {p: p.read_text("utf-8") for p in site.rglob("*.html") if p.name != "404.html"}
    anchors = {page: set(re.findall(r'\s(?:id|name)="([^"]+)"', t)) for page, t in pages.items()}
    assert len(pages) > 100
    dead = set()
    for page, text in pages.items():
        for link in map(
            html.unescape, re.findall(r'<(?:a|link|img|script)\s[^>]*?(?:href|src)="([^"]*)"', text)
        ):
            address = urlsplit(link)
            if address.scheme or address.netloc:
                continue
            start = site if address.path.startswith("/") else page.parent
            target = (
                Path(os.path.normpath(start / unquote(address.path).lstrip("/")))
                if address.path
                else page
            )
            target = target / "index.html" if target.is_dir() else target
            found = target.is_file() and target.is_relative_to(site)
            if not found or (
                address.fragment and unquote(address.fragment) not in anchors.get(target, ())
            ):
                dead.add((str(page.relative_to(site)), link))
    assert not dead


def test_every_public_name_has_an_entry(site: Path) -> None:
    index = (site / "reference" / "python" / "index.html").read_text("utf-8")
    for name in cp.__all__:
        assert f"cp.{name}<" in index, name
    linked = re.findall(r'href="\.\./api/([\w/]*)#([\w.]+)"', index)
    assert len(linked) >= len(cp.__all__) - 5  # protocols and functions; a few names are values
    kits = (site / "reference" / "api" / "testing" / "index.html").read_text("utf-8")
    for name in testing.__all__:
        assert name in kits, name


def test_signatures_show_parameters_with_types_and_defaults(site: Path) -> None:
    page = (site / "reference" / "api" / "entry_points" / "index.html").read_text("utf-8")
    text = re.sub(r"<[^>]+>", "", page)
    assert re.search(
        r"optimize\(\s*system: System,\s*data: GivenData,\s*metric: GivenMetric,\s*\*,", text
    )


def test_nothing_is_fetched_from_third_parties(site: Path) -> None:
    for page in (site / "index.html", site / "start" / "index.html"):
        fetched = re.findall(
            r'<(?:script|link|img)[^>]+(?:src|href)="(https?:[^"]+)"', page.read_text("utf-8")
        )
        assert fetched == []


def test_every_example_has_a_page_with_its_code(site: Path) -> None:
    examples = sorted((ROOT / "docs" / "examples").glob("*.py"))
    assert len(examples) >= 10
    for example in examples:
        page = (site / "examples" / example.stem / "index.html").read_text("utf-8")
        assert "compound" in page
        assert example.name in page
