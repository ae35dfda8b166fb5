"""Keys in environment variables are in no record of a run, whoever writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

import compound as cp
from compound.core.security import sanitize
from compound.execution.cache import DiskCache
from compound.execution.trace import as_text
from compound.testing import ScriptedLM

KEY = "value-of-a-key-in-the-environment"


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitize, "_SECRETS", set())
    monkeypatch.setenv("SOME_SERVICE_API_KEY", KEY)


def reveal(question: str) -> list[str]:
    return [question, KEY]


def system() -> cp.System:
    question = cp.Input("question")
    answer = cp.LLM("answerer", prompt=cp.Text("Answer."))(question=question)
    revealed = cp.Function("reveal", reveal)(question=question)
    return cp.System("s", {"answer": answer, "revealed": revealed}, lm="lm")


def engines() -> dict[str, ScriptedLM]:
    return {"lm": ScriptedLM(lambda message: f"It is {KEY}.", stable_name=True)}


ROWS = [{"question": f"{i}", "answer": "x"} for i in range(12)]


def holds_key(folder: Path) -> list[str]:
    return [p.name for p in folder.rglob("*") if p.is_file() and KEY.encode() in p.read_bytes()]


def test_a_run_shows_no_key() -> None:
    trace = cp.run(system(), {"question": f"What about {KEY}?"}, engines=engines())
    assert trace.outputs["answer"] == "It is [key removed]."
    assert trace.outputs["revealed"] == [f"What about {KEY}?", KEY]  # the function's own value
    for shown in (repr(trace), trace._repr_html_(), as_text(trace), repr(trace.calls)):
        assert KEY not in shown


@pytest.mark.parametrize("gold", ["x", KEY])
def test_an_optimization_records_no_key(tmp_path: Path, gold: str) -> None:
    folder = tmp_path / "run"
    rows = [{**row, "answer": gold} for row in ROWS]
    cp.optimize(
        system(),
        {"train": rows[:4], "valid": rows[4:]},
        cp.metrics.exact_match("answer"),
        method="random",
        budget=30,
        engines=engines(),
        run_dir=folder,
        progress=False,
    )
    assert "[key removed]" in (folder / "traces.jsonl").read_text()
    assert not holds_key(folder)


def test_a_cache_repeats_without_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = engines()
    monkeypatch.setenv("COMPOUND_CACHE", str(tmp_path))
    scores = [
        cp.evaluate(system(), ROWS, cp.metrics.exact_match("answer"), engines=lm) for _ in range(2)
    ]
    assert len(lm["lm"].requests) == len(
        ROWS
    )  # the completions of the second evaluation come from the cache
    assert scores[0].scores == scores[1].scores
    assert list(tmp_path.rglob("*.sqlite"))
    assert not holds_key(tmp_path)


def test_a_result_with_a_key_is_not_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sanitize.remember_environment()
    cache = DiskCache(tmp_path / "cache.sqlite")
    cache.put("k", {"outputs": {"a": KEY}})
    monkeypatch.setattr(sanitize, "_SECRETS", {'pass"word'})
    cache.put("l", {"outputs": {"a": ['pass"word']}})
    assert (cache.get("k"), cache.get("l")) == (None, None)
    cache.close()
