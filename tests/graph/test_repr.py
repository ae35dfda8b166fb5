"""How values show themselves: short, whatever they hold, and copied or pickled in linear size."""

from __future__ import annotations

import asyncio
import copy
import pickle
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

import compound as cp
from compound.api.result import Result
from compound.evaluation.evaluate import Evaluation, ScoredRun
from compound.testing import ScriptedLM

LONG = "word " * 1500


def pair(a: str, b: str) -> str:
    return a + b


def diamonds(n: int) -> cp.System:
    """Return a chain of nodes that each read the one before twice: 2^n paths lead through it."""
    source: Any = cp.Input("q")
    for i in range(n):
        source = cp.Function(f"f{i}", pair)(a=source, b=source)
    return cp.System("diamonds", outputs={"y": source})


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), min_size=1, max_size=40))
def test_the_repr_of_a_system_and_parts_is_linear_in_nodes(
    edges: list[tuple[int, int]],
) -> None:
    sources: list[Any] = [cp.Input("q")]
    for i, (a, b) in enumerate(edges):
        wires = {"a": sources[a % len(sources)], "b": sources[b % len(sources)]}
        sources.append(cp.Function(f"f{i}", pair)(**wires))
    system = cp.System("graph", outputs={f"y{i}": source for i, source in enumerate(sources)})
    assert len(repr(system)) < 200 + 40 * len(system.nodes)
    for node in system.nodes.values():
        assert len(repr(node)) < 300
        assert len(repr(node.component)) < 300
    assert all(len(repr(source)) < 100 for source in sources)


def test_the_repr_of_a_system_names_what_a_reader_looks_for() -> None:
    llm = cp.LLM("answerer", prompt=cp.Text("Answer."), output={"answer": str, "sure": bool})
    node = llm(question=cp.Input("question"))
    system = cp.System("qa", outputs={"answer": node.answer}, lm="smollm2")
    assert repr(system) == (
        "System('qa', inputs=[question], nodes=[answerer], outputs=[answer], "
        "parameters=[answerer.prompt], lm='smollm2')"
    )
    assert repr(llm) == "LLM('answerer', outputs=[answer, sure], parameters=[prompt])"
    assert repr(system.nodes["answerer"]) == "Node('answerer', LLM 'answerer', question=$question)"
    assert repr(node) == "Outputs(answerer: answer, sure)"
    assert repr(node.answer) == "Output($answerer.answer: str)"
    assert repr(node.sure.equals(True)) == "Condition($answerer.sure == True)"


def test_a_trace_shows_its_outputs_its_calls_and_its_failure() -> None:
    system = diamonds(2)
    trace = asyncio.run(cp.Executor().run(system, {"q": "x"}))
    assert repr(trace) == "Trace(outputs={'y': 'xxxx'}, calls=[f0, f1])"
    failed = cp.LLM("a", output=int, reasks=0)(q=cp.Input("q"))
    system = cp.System("s", outputs={"y": failed}, lm="lm")
    trace = asyncio.run(
        cp.Executor({"lm": ScriptedLM(["none"])}).run(system, {"q": "x"}, example="e7")
    )
    assert repr(trace).startswith(
        "Trace(example='e7', failure=\"parse: 'output': 'none' holds no number"
    )
    assert repr(trace.calls[0]).startswith("Call('a', failure=\"parse: ")


def test_an_evaluation_and_a_result_show_their_figures(tmp_path: Path) -> None:
    rows = tuple(ScoredRun(str(i), 0, i % 2) for i in range(400))
    evaluation = Evaluation("c" * 64, rows, cp.ext.Usage(calls=400, prompt_tokens=4000), 400.0)
    assert repr(evaluation).startswith("Evaluation(mean=0.5, ")
    assert "n=400, failed=0" in repr(evaluation)
    assert len(repr(evaluation)) < 200
    best = cp.Configuration({"a.prompt": LONG})
    result = Result(
        best,
        evaluation,
        evaluation,
        None,
        evaluation,
        "promising",
        best,
        best,
        1,
        {"system_runs": 400.0},
        tmp_path,
    )
    shown = repr(result)
    assert "after=0.5" in shown
    assert "verdict=promising" in shown
    assert len(shown) < 300 + len(str(tmp_path))


def test_a_copy_of_a_system_is_the_system() -> None:
    system = diamonds(1000)
    assert copy.deepcopy(system) is system
    assert copy.copy(system) is system


def test_a_pickled_system_keeps_its_configuration_its_model_and_its_conditions() -> None:
    choose = cp.LLM("choose", prompt=cp.Text("Choose."), output=bool)(q=cp.Input("q"))
    answer = cp.LLM("answer", prompt=cp.Text("Answer."))(q=cp.Input("q"), when=choose)
    system = cp.System("s", outputs={"y": answer, "q": cp.Input("q")}, lm="lm").bind(
        {"answer.prompt": "Now."}
    )
    again = pickle.loads(pickle.dumps(system))
    assert again.configuration == system.configuration
    assert again.identity == system.identity
    trace = asyncio.run(cp.Executor({"lm": ScriptedLM(["no"])}).run(again, {"q": "x"}))
    assert [call.address for call in trace.calls] == ["choose"]
