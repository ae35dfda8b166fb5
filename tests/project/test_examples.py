"""The examples in docstrings run and print the documented output."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("compound", "components", "optimizers", "rewards")


def modules() -> list[str]:
    names = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if path.name != "__init__.py":
                dotted = ".".join(path.relative_to(ROOT).with_suffix("").parts)
                names.append(dotted if package == "compound" else f"compound.{dotted}")
    return [name for name in names if ">>>" in source(name)]


def source(name: str) -> str:
    parts = name.split(".")
    inside = parts if parts[1] not in PACKAGES else parts[1:]
    return (ROOT / Path(*inside)).with_suffix(".py").read_text("utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("name", modules())
def test_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    results = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert results.attempted > 0
    assert results.failed == 0
