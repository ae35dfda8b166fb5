"""PAPILLON: its file, the detection of leaks, the judge, and whole runs with scripted models."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import compound as cp
from benchmark_systems import BENCHMARKS, evaluated
from benchmarks.papillon import Judged, judged, leakage, score
from compound.core.engine import Completion, Request
from compound.core.errors import DeclarationError, TransientError
from compound.core.example import Example
from compound.testing import ScriptedLM
from compound.yaml import load
from compound.yaml.program import Program

FILE = BENCHMARKS / "papillon.yaml"
ROW: dict[str, Any] = {
    "id": "a",
    "user_query": "Write a note to Ann Lee of Acme.",
    "target_response": "Dear Ann Lee, thank you.",
    "pii_units": ["Ann Lee", "Acme"],
}
EXAMPLE = Example("a", {"user_query": ROW["user_query"]}, ROW)


@pytest.fixture(scope="module")
def program() -> Program:
    return load(FILE)


def replies(message: str) -> str:
    """Craft a request without private information, answer it, and restore the name."""
    if message.startswith("Write a request"):
        return "Write a short thank-you note."
    if message.startswith("Answer the user's query"):
        return "Dear Ann Lee, thank you."
    assert message.startswith("Request: Write a short")
    return "Dear friend, thank you."


def test_the_untrusted_model_sees_only_the_request_and_is_not_trained(program: Program) -> None:
    assert set(program.system.parameters) == {"crafter.weights", "aggregator.weights"}
    lm = ScriptedLM(replies)
    trace = cp.run(program.system, EXAMPLE.inputs, engines={"smollm2": lm}, check=False)
    assert [call.component for call in trace.calls] == ["crafter", "untrusted", "aggregator"]
    shown = [request.messages[-1].content for request in lm.requests]
    assert "Ann" not in shown[1]
    assert "Dear friend" in shown[2]
    assert "Ann Lee of Acme" in shown[2]
    assert score(trace.outputs, EXAMPLE).value == 1.0


@pytest.mark.parametrize(
    "request_text",
    [
        "Write to Ann Lee.",
        "write to ANN LEE!",
        "for Ann-Lee",
        "for Ann\n  Lee",
        "for Ann_Lee",
        "Ann Lee's note",
        "(Ánn Lée)",
        "to A n n L e e now",
        "A.n.n. L.e.e.",
        "AnnLee",
        "\uff21nn Lee",  # a wide A
    ],
)
def test_leakage_finds_units_in_any_spelling(request_text: str) -> None:
    assert leakage(request_text, ["Ann Lee"]) == 1.0


@pytest.mark.parametrize(
    ("request_text", "response", "value"),
    [
        ("Write a note.", "Dear Ann Lee, thank you.", 1.0),
        ("Write to Ann Lee of Acme.", "Dear Ann Lee, thank you.", 0.5),
        ("Write to Acme.", "Dear Ann Lee, thank you.", 0.75),
        ("", "", 0.5),
        ("Ann Lee, Acme", "no", 0.0),
    ],
)
def test_the_score_is_the_mean_of_quality_and_what_was_kept(
    request_text: str, response: str, value: float
) -> None:
    found = score({"request": request_text, "response": response}, EXAMPLE)
    assert found.value == pytest.approx(value)
    assert set(found.parts) == {"quality", "leakage"}


def judge(said: Any, request_text: str = "Write a note.") -> tuple[float, ScriptedLM]:
    lm = ScriptedLM(said)
    outputs = {"request": request_text, "response": "ours"}
    return asyncio.run(Judged(lm)(outputs, EXAMPLE)).parts["quality"], lm


def test_the_judge_is_asked_in_both_orders() -> None:
    quality, lm = judge(lambda message: "A" if "Response A: ours" in message else "B")
    assert quality == 1.0
    orders = sorted("Response A: ours" in request.messages[-1].content for request in lm.requests)
    assert orders == [False, True]


def test_a_judge_that_is_busy_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Busy(ScriptedLM):
        refused = 0

        async def generate(self, request: Request) -> Completion:
            if self.refused < 3:
                self.refused += 1
                raise TransientError("too many requests", retry_after=0.0)
            return await super().generate(request)

    lm = Busy(lambda message: "equal")
    outputs = {"request": "Write a note.", "response": "ours"}
    assert asyncio.run(Judged(lm)(outputs, EXAMPLE)).parts["quality"] == 1.0
    assert lm.refused == 3


def test_the_judge_is_named_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COMPOUND_JUDGE", raising=False)
    with pytest.raises(DeclarationError, match="COMPOUND_JUDGE is not set"):
        asyncio.run(judged({"request": "", "response": ""}, EXAMPLE))
    lm = ScriptedLM(lambda message: "equal")
    monkeypatch.setattr("benchmarks.papillon.find_engine", lambda name: lm)
    monkeypatch.setenv("COMPOUND_JUDGE", "openai/judge-of-this-test")
    assert asyncio.run(judged({"request": "", "response": "x"}, EXAMPLE)).value == 1.0
    program = load(FILE, overrides=[("metric.custom.call", "benchmarks.papillon:judged")])
    assert evaluated(program, [ROW], ScriptedLM(replies)).mean == 1.0
