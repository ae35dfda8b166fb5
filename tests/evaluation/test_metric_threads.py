"""Where synchronous metrics run: on the event loop, or in threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import compound as cp
from compound.core import threads
from compound.core.errors import CallError, DeclarationError
from compound.evaluation.metrics.scoring import apply_metric
from compound.yaml import load

WAIT = 120.0  # seconds until a test that should not wait fails
EXAMPLE = cp.Example("e", {}, {"answer": "4"})


def place(outputs: Mapping[str, Any], example: cp.Example) -> float:
    return float(threading.get_ident())


async def score_twice(metric: Any) -> list[float]:
    """Return the threads of the event loop and of two applications."""
    found = [(await apply_metric(metric, {}, EXAMPLE)).value for _ in range(2)]
    return [float(threading.get_ident()), *found]


def test_a_fast_metric_runs_on_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "SLOW", WAIT)
    loop, first, second = asyncio.run(score_twice(cp.metrics.custom(place)))
    assert first == second == loop


def test_a_metric_that_was_slow_once_runs_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "SLOW", -1.0)
    loop, first, second = asyncio.run(score_twice(cp.metrics.custom(place)))
    assert first == loop != second


@pytest.mark.parametrize(("thread", "inline"), [("always", False), ("never", True)])
def test_thread_says_where_a_metric_runs(
    thread: Any, inline: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "SLOW", -1.0)
    loop, first, second = asyncio.run(score_twice(cp.metrics.custom(place, thread=thread)))
    assert (first == loop) is (second == loop) is inline


def test_slow_metrics_of_an_evaluation_overlap() -> None:
    together = threading.Barrier(4)

    def score(outputs: Mapping[str, Any], example: cp.Example) -> float:
        together.wait(WAIT)  # raises unless four calls wait at the same time
        return float(outputs["y"] == example.gold["y"])

    def same(x: int) -> int:
        return x

    system = cp.System("s", {"y": cp.Function("f", same)(x=cp.Input("x", int))})
    rows = [cp.Example(str(x), {"x": x}, {"y": x}) for x in range(8)]
    found = cp.evaluate(system, rows, cp.metrics.custom(score, thread="always"), concurrency=4)
    assert found.scores == (1.0,) * 8


def test_a_metric_that_exits_in_a_thread_fails() -> None:
    def leave(outputs: Mapping[str, Any], example: cp.Example) -> float:
        raise SystemExit(3)

    with pytest.raises(CallError, match=r"leave called sys\.exit\(3\)"):
        asyncio.run(apply_metric(cp.metrics.custom(leave, thread="always"), {}, EXAMPLE))


def test_an_async_metric_runs_on_the_event_loop() -> None:
    async def later(outputs: Mapping[str, Any], example: cp.Example) -> float:
        return place(outputs, example)

    loop, first, second = asyncio.run(score_twice(cp.metrics.custom(later, thread="always")))
    assert first == second == loop


def test_another_value_of_thread_is_rejected() -> None:
    with pytest.raises(DeclarationError, match="thread must be one of"):
        cp.metrics.custom(place, thread="sometimes")  # type: ignore[arg-type]


def test_a_file_says_where_a_metric_runs(tmp_path: Path) -> None:
    text = """
    system: s
    inputs: {x: str}
    components:
      f: {function: {call: "own:same"}, in: {x: $x}}
    outputs: {y: $f}
    metric: {custom: {call: "own:score", thread: never}}
    """
    (tmp_path / "own.py").write_text(
        "def score(outputs, example):\n    return 1.0\n\ndef same(x: str) -> str:\n    return x\n",
        encoding="utf-8",
    )
    (tmp_path / "system.yaml").write_text(text, encoding="utf-8")
    metric: Any = load(tmp_path / "system.yaml").metric
    assert metric.thread == "never"
