"""The notebook of a search: it runs, and it is committed with its outputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "docs" / "notebooks" / "optimize_by_search.ipynb"
SCRIPTED = """
import sys

sys.path.insert(0, {tests!r})

import compound.graph.registry.engines
from compound.testing import ScriptedLM
from reference.atlas import reply

compound.graph.registry.engines.open_engine = lambda *_, **__: ScriptedLM(reply)
"""


def read() -> Any:  # nbformat has no types
    return nbformat.read(NOTEBOOK, as_version=4)  # type: ignore[no-untyped-call]


def texts(notebook: Any, kind: str = "text/plain") -> str:
    """Return all results of a notebook of a MIME type."""
    found = [
        output["data"][kind]
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if kind in output.get("data", {})
    ]
    return "\n".join(map(str, found))


@pytest.mark.slow
def test_it_runs_with_a_scripted_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = NOTEBOOK.parents[2]
    monkeypatch.setenv("PYTHONPATH", str(root))
    notebook = read()
    settings = next(cell for cell in notebook.cells if "SYSTEM_RUNS =" in cell.source)
    settings.source = f"DATA = {str(root / 'benchmarks/data/atlas')!r}; RUN = {str(tmp_path / 'run')!r}; SYSTEM_RUNS = 150"
    scripted = nbformat.v4.new_code_cell(SCRIPTED.format(tests=str(root / "tests")))  # type: ignore[no-untyped-call]
    notebook.cells.insert(0, scripted)
    place = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=300, resources=place).execute()
    assert json.loads((tmp_path / "run" / "best.json").read_text(encoding="utf-8"))
    assert "svg" in texts(notebook, "text/html") + texts(notebook, "image/svg+xml")
    assert "## Decisions" in texts(notebook, "text/markdown")


def test_it_is_committed_with_the_outputs_of_one_run() -> None:
    code = [cell for cell in read().cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not any(output.output_type == "error" for cell in code for output in cell.outputs)
    stored = json.dumps([cell.outputs for cell in code])
    assert not [place for place in ("/home/", "/root/", "/tmp/", "/Users/") if place in stored]
    assert len(stored) < 400_000
