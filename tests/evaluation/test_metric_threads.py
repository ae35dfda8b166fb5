"""Where synchronous metrics run: on the event loop, or in threads."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import compound as cp
from compound.yaml import load

WAIT = 120.0  # seconds until a test that should not wait fails
EXAMPLE = cp.Example("e", {}, {"answer": "4"})


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
