"""HTML of objects in notebooks: bounded, escaped, and shown by a real kernel."""

from __future__ import annotations

import html.parser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import compound as cp
from compound.api.progress import Course, NotebookCell
from compound.core.notebook import escape, table
from compound.evaluation.evaluate import Evaluation, ScoredRun
from compound.execution.trace import Call, Failure, Trace

HOSTILE = "<script>alert('x')</script><img src=x onerror=alert(1)>\"'&]]>--><!-- $x$ \x1b[31m\ud800"
LIMIT = 60_000  # characters of HTML
ALLOWED = {
    *["div", "b", "table", "thead", "tbody", "tr", "th", "td", "pre", "br", "progress", "p", "span"]
}


class Elements(html.parser.HTMLParser):
    """Collects the names of elements and attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.attributes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.attributes |= {name for name, _ in attrs}


def check(shown: str) -> None:
    elements = Elements()
    elements.feed(shown)
    assert elements.names <= ALLOWED
    assert elements.attributes <= {"class", "style", "colspan", "value", "max"}
    assert len(shown) < LIMIT
    assert "mathjax_ignore" in shown
    shown.encode()  # a notebook file cannot hold lone surrogates


def hostile_trace(text: str, calls: int = 1) -> Trace:
    made = tuple(
        Call(
            text,
            "n",
            "c",
            (),
            {text: text * 100},
            {"y": [text] * 50},
            Failure("error", text) if i % 2 else None,
        )
        for i in range(calls)
    )
    return Trace(text, "", 0, 0, {text: text}, made, {text: text * 1000}, score=0.5)


@settings(max_examples=50)
@given(st.text(max_size=40), st.integers(1, 200))
def test_no_text_of_a_trace_becomes_markup(text: str, calls: int) -> None:
    check(hostile_trace(text, calls)._repr_html_())


def test_hostile_texts_stay_text_everywhere() -> None:
    trace = hostile_trace(HOSTILE, 1000)
    check(trace._repr_html_())
    assert "… 980 more" in trace._repr_html_()
    configuration = cp.Configuration({f"n{i}.prompt": HOSTILE * 500 for i in range(200)})
    check(configuration._repr_html_())
    rows = tuple(ScoredRun(HOSTILE, i, 0.0, Failure("error", HOSTILE + str(i))) for i in range(500))
    check(Evaluation(HOSTILE, rows, violation=HOSTILE)._repr_html_())
    check(Evaluation("", ())._repr_html_())
    cell = NotebookCell(Course({"system_runs": 10}))
    cell.listen({"event": "note", "note": HOSTILE * 100, "spent": {}})
    cell.listen({"event": "progress", "job": 0, "note": HOSTILE, "step": 1, "of": 2, "spent": {}})
    check(cell._repr_html_())
    assert escape("<b>") == "&lt;b&gt;"
    assert "… 5 more" in table(["a"], ([i] for i in range(25)))


@pytest.mark.parametrize("nodes", [1, 61])
def test_a_system_is_drawn_or_shown_as_text(nodes: int) -> None:
    """A graph of many nodes is shown as text."""
    asked = {
        f"answerer{i}": cp.LLM(f"answerer{i}", prompt=cp.Text(HOSTILE[:20])) for i in range(nodes)
    }
    outputs = {name: llm(question=cp.Input("question")) for name, llm in asked.items()}
    system = cp.System("qa", outputs=outputs, lm="lm")
    svg, shown = system._repr_svg_(), system._repr_html_()
    if nodes == 1:
        assert svg is not None
        assert shown is None
        assert "<svg" in svg
        assert "<script" not in svg
    else:
        assert svg is None
        assert shown is not None
        check(shown)
        assert "answerer0: llm(" in shown


def test_a_result_shows_scores_and_the_best_values(tmp_path: Path) -> None:
    phrase = cp.Choice("bad", "good")

    def say(x: int, phrase: str) -> str:
        return phrase

    node = cp.Function("say", say, phrase=phrase)(x=cp.Input("x", int))
    system = cp.System("s", outputs={"answer": node})
    rows = [{"id": str(i), "x": i, "answer": "good"} for i in range(30)]
    found = cp.optimize(
        system,
        {"train": rows[:10], "valid": rows[10:20], "test": rows[20:]},
        "exact_match",
        budget=100,
        run_dir=tmp_path / "run",
        progress=False,
    )
    shown = found._repr_html_()
    check(shown)
    assert "say.phrase" in shown
    assert "test" in shown


def test_redraws_for_calls_are_thinned_out() -> None:
    now, drawn = [0.0], list[Any]()
    cell = NotebookCell(Course({}, clock=lambda: now[0]))
    cell.redraw = drawn.append
    for _ in range(100):
        now[0] += 0.01
        cell.listen({"event": "call", "component": "a", "spent": {}})
    assert 1 <= len(drawn) <= 3
    cell.listen({"event": "note", "note": "done", "spent": {}})
    assert "note" in repr(cell)


CELL = """
import compound as cp

def say(x: int, phrase: str) -> str:
    return phrase

node = cp.Function("say", say, phrase=cp.Choice("bad", "good"))(x=cp.Input("x", int))
rows = [{"id": str(i), "x": i, "answer": "good"} for i in range(30)]
data = {"train": rows[:10], "valid": rows[10:]}
cp.optimize(cp.System("s", outputs={"answer": node}), data, "exact_match", budget=100)
"""


def test_a_kernel_shows_progress_in_one_place_and_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", str(Path(cp.__file__).parents[1]))
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    client = nbclient.NotebookClient(
        notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    outputs = notebook.cells[0].outputs
    assert [output.output_type for output in outputs] == ["display_data", "execute_result"]
    progress, result = (output.data["text/html"] for output in outputs)
    assert "Progress: ended" in progress
    assert "decision" in progress
    assert "say.phrase" in result
    check(progress)
