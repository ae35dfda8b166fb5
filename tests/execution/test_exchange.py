"""Messages to models in traces, caches and reports, and the display of unknown costs."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

import compound as cp
from compound.core.engine import Message
from compound.core.errors import DeclarationError
from compound.execution.cache import DiskCache, MemoryCache
from compound.execution.exchange import MAX_CHARACTERS, SWITCH
from compound.report import write
from compound.testing import ScriptedLM

ROWS = [{"id": str(i), "question": f"What is {i}?", "answer": str(i)} for i in range(24)]


def system(**settings: Any) -> cp.System:
    llm = cp.LLM("answerer", prompt="Answer.", system="Be brief.", retries=0, **settings)
    return cp.System("qa", outputs={"answer": llm(question=cp.Input("question"))}, lm="lm")


def run(reply: Any, cache: Any = None, inputs: Any = None, **settings: Any) -> cp.Trace:
    executor = cp.Executor({"lm": ScriptedLM(reply)}, cache=cache)
    return asyncio.run(executor.run(system(**settings), inputs or {"question": "What is 7?"}))


def test_a_call_keeps_the_messages_as_sent_and_the_answer_as_it_came() -> None:
    (call,) = run(["Answer:  It is 7. "]).calls
    assert call.outputs == {"output": "It is 7."}
    (exchange,) = call.exchanges
    assert exchange.model == "lm"
    assert exchange.messages == (
        Message("system", "Be brief."),
        Message("user", "Answer.\n\nQuestion: What is 7?\nAnswer:"),
    )
    assert exchange.completion == "Answer:  It is 7."
    assert exchange.finish_reason == "stop"


def test_a_failed_call_keeps_the_answer_that_could_not_be_read() -> None:
    trace = run(["seven of them"], output=int, max_tokens=2)
    assert trace.failure is not None
    (exchange,) = trace.calls[0].exchanges
    assert (exchange.completion, exchange.finish_reason) == ("seven of", "length")


def test_a_cached_call_keeps_them_too(tmp_path: Path) -> None:
    for cache in (MemoryCache(), DiskCache(tmp_path / "cache.sqlite")):
        first = run(["7"], cache).calls[0]
        again = run([], cache).calls[0]
        assert again.reused
        assert again.exchanges == first.exchanges != ()


def test_long_texts_are_cut_in_the_middle() -> None:
    trace = run(lambda _: "x" * 30_000, inputs={"question": "y" * 100_000})
    (exchange,) = trace.calls[0].exchanges
    for text in (exchange.messages[-1].text, exchange.completion):
        assert MAX_CHARACTERS < len(text) < MAX_CHARACTERS + 100
        assert "characters omitted" in text
    assert exchange.messages[-1].text.endswith("yyy\nAnswer:")
    assert trace.outputs["answer"] == "x" * 30_000


def test_half_characters_do_not_reach_a_file() -> None:
    (exchange,) = run(["a\ud800b"]).calls[0].exchanges
    assert exchange.completion == "a\ufffdb"
    assert json.dumps(exchange.to_json(), ensure_ascii=False).encode()


@pytest.mark.parametrize("value", ["0", "false", "Off", " no "])
def test_recording_can_be_switched_off(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(SWITCH, value)
    cache = MemoryCache()
    assert run(["7"], cache).calls[0].exchanges == ()
    assert "Be brief." not in json.dumps(cache._rows)


def test_an_unknown_value_does_not_record_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "never")
    with pytest.raises(DeclarationError, match=f"{SWITCH}=never is .*; possible: 1, memory, 0"):
        run(["7"])


def test_run_shows_the_messages_of_every_call(
    tmp_path: Path, cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "compound.graph.registry.engines.open_engine", lambda *_, **__: ScriptedLM(["It is 7."])
    )
    (tmp_path / "qa.yaml").write_text(
        "system: qa\nlm: some/model\ninputs: {question: str}\n"
        "components: {answerer: {llm: {prompt: Say it.}, in: {question: $question}}}\noutputs: {answer: $answerer}\n"
    )
    arguments = ("run", str(tmp_path / "qa.yaml"), "question=What is 7?")
    shown = cli(*arguments, "--trace").out
    assert "== answerer (" in shown
    assert (
        "[user]\nSay it.\n\nQuestion: What is 7?\nAnswer:\n[some/model: stop]\nIt is 7.\n" in shown
    )
    assert shown.endswith("\n\nIt is 7.\n")
    assert cli(*arguments).out == "It is 7.\n"
    (call,) = json.loads(cli(*arguments, "--json").out)["calls"]
    assert call["exchanges"][0]["completion"] == "It is 7."


@pytest.fixture
def optimized(tmp_path: Path) -> Any:
    """Return a function that optimizes with a model and returns the result."""

    def optimize(lm: ScriptedLM) -> cp.Result:
        tuned = cp.LLM("answerer", prompt=cp.Text("Answer."), retries=0)(
            question=cp.Input("question")
        )
        found = cp.System("qa", outputs={"answer": tuned}, lm="lm")
        return cp.optimize(
            found,
            {"train": ROWS[:8], "valid": ROWS[8:]},
            "exact_match",
            budget=40,
            method="random",
            valid_size=40,
            engines={"lm": lm},
            run_dir=tmp_path / "run",
            progress=False,
        )

    return optimize


def test_the_report_shows_the_messages_of_the_examples_it_shows(optimized: Any) -> None:
    result = optimized(ScriptedLM(lambda message: "9" if "is 9?" in message else "I say 1"))
    html = (result.path / "report.html").read_text()
    assert "Question: What is 9?\nAnswer:" in html
    assert "I say " in html
    write(result.path)


def test_a_cost_that_is_not_known_is_not_shown_as_nothing(optimized: Any) -> None:
    result = optimized(ScriptedLM(lambda _: "7", priced=False))
    assert "unknown cost" in result.report
    assert "$0" not in result.report
    assert result.spent["unpriced"] == result.spent["calls"] > 0
    assert result.to_json()["unpriced_calls"] > 0
