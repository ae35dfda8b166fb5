"""Requests for proposals: counted by outcome, told to the user, and stopped when a model only fails."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compound import LLM, Choice, Dataset, Input, Result, System, Text
from compound.api.optimize import run_optimization
from compound.api.progress import format_event
from compound.core.errors import CallError
from compound.execution.budget import Budget, Meter
from compound.ext import Usage
from compound.metrics import exact_match
from compound.optimization.proposals import NotAsked, Proposals
from compound.optimization.settings.optimize import make_settings
from compound.report import summarize, terminal_summary
from compound.testing import ScriptedLM
from optimas_settings import proposals

WRITES = (
    "write a new instruction",
    "between <prompt> and </prompt>",
    "What is wrong with",
    "Is the step",
    "have in common",
    "Condense them",
    "Describe the ",
)
REFUSED = CallError("401 wrong key", hint="set THE_KEY to a key that may use lm")


def asks(message: str) -> bool:
    return any(mark in message for mark in WRITES)


def system() -> System:
    answer = LLM("answerer", prompt=Text("Answer."), lm=Choice("lm", "other"))(
        question=Input("question")
    )
    return System("asked", outputs={"answer": answer}, lm="lm")


def data() -> Dataset:
    def rows(name: str, n: int) -> list[dict[str, str]]:
        return [{"id": f"{name}{i}", "question": f"{name} {i}?", "answer": "yes"} for i in range(n)]

    return Dataset.of(train=rows("t", 40), valid=rows("v", 20), test=rows("x", 5))


def run(
    method: str, reply: Callable[[str], Any], folder: Path, listener: Any = None, **settings: Any
) -> tuple[Result, list[str]]:
    """Run a method; returns the result and what was asked besides running the system."""
    lm = ScriptedLM(lambda message: reply(message) if asks(message) else "no")
    resolved = make_settings(
        {
            "method": method,
            "valid_size": 20,
            "budget": {"system_runs": 160},
            **proposals("opro"),
            **settings,
        }
    )
    result = run_optimization(
        system(),
        data(),
        exact_match("answer"),
        resolved,
        run_dir=folder / "run",
        engines={"lm": lm, "other": lm},
        listener=listener,
    )
    texts = [request.messages[-1].text for request in lm.requests]
    return result, [text for text in texts if asks(text)]


def proposals_of(run: Path) -> dict[str, Any]:
    return dict(summarize(run)["proposals"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", ["gepa", "opro", "textgrad", "mipro", "search", "llm_selector_diagnoser"]
)
def test_a_model_refusing_every_request_is_asked_five_times(method: str, tmp_path: Path) -> None:
    result, sent = run(method, lambda _: REFUSED, tmp_path)
    assert len(sent) == 5
    told = terminal_summary(result.path)
    assert (
        "5 of 5 calls to 'lm' failed (401 wrong key; set THE_KEY to a key that may use lm)" in told
    )
    assert "were stopped: 5 consecutive calls failed" in told
    assert proposals_of(result.path)["models"]["lm"]["failed"] == 5
    assert "401 wrong key" in result.report


@pytest.mark.usefixtures("without_reports")
def test_failures_between_answers_do_not_end_it(tmp_path: Path) -> None:
    count = iter(range(10_000))

    def sometimes(_: str) -> Any:
        return REFUSED if next(count) % 4 else f"```\nAnswer number {next(count)}.\n```"

    result, sent = run("gepa", sometimes, tmp_path)
    assert len(sent) > 10
    tally = proposals_of(result.path)["models"]["lm"]
    assert tally["failed"] > 5
    assert tally["proposed"] > 2
    assert tally["asked"] == len(sent) == tally["failed"] + tally["proposed"]
    assert "Some proposals failed" in terminal_summary(result.path)


def test_replies_without_a_proposal_count_as_unusable_and_end_it_later(tmp_path: Path) -> None:
    result, sent = run("opro", lambda _: "I would rather not.", tmp_path)
    assert len(sent) == 20
    assert proposals_of(result.path)["models"]["lm"]["unusable"] == 20
    assert "20 calls to 'lm': 20 unusable" in terminal_summary(result.path)


def test_progress_events_and_the_job_say_what_came_of_proposals(tmp_path: Path) -> None:
    seen: list[Any] = []
    result, _ = run("gepa", lambda _: REFUSED, tmp_path, seen.append)
    (stop,) = [event for event in seen if event["event"] == "proposals"]
    assert (
        "stopped proposal requests to 'lm' in this job: 5 consecutive calls failed"
        in format_event(stop)
    )
    first = next(event for event in seen if event["event"] == "job")
    assert first["proposals"]["lm"]["failed"] == 5
    assert "proposals: 5 of 5 calls to 'lm' failed" in format_event(first)
    events = [json.loads(line) for line in (result.path / "events.jsonl").read_text().splitlines()]
    assert any(event["event"] == "proposals" for event in events)


@pytest.mark.usefixtures("without_reports")
class TestSharesOfALimit:
    @pytest.mark.parametrize("limit", [{"calls": 260}, {"tokens": 60_000}, {"cost": 60.0}])
    def test_proposals_leave_runs_a_decision_needs(self, limit: Any, tmp_path: Path) -> None:
        """Reflections that cost much more than a run used to take all that was left before the decision."""
        counter = iter(range(10_000))
        good = "Answer with yes."

        def reply(message: str) -> Any:
            if asks(message):
                words = " ".join(["word"] * 300)
                return f"{words}\n```\n{good} {next(counter)}\n```"
            return "yes" if good in message else "no"

        lm = ScriptedLM(reply, price=0.001)
        resolved = make_settings(
            {"method": "gepa", "valid_size": 20, "budget": limit, "iterations": 1}
        )
        result = run_optimization(
            system(),
            data(),
            exact_match("answer"),
            resolved,
            run_dir=tmp_path / "run",
            engines={"lm": lm, "other": lm},
        )
        facts = summarize(result.path)
        assert [decision["accepted"] for decision in facts["decisions"]] == [True]
        (name, most), spent = next(iter(limit.items())), result.to_json()
        assert spent[name] <= most


class TestLedger:
    def test_a_request_beyond_what_was_planned_is_not_sent(self) -> None:
        ledger = Proposals(Meter(), left=3)
        ledger.start_job(2)
        assert [asyncio.run(self.sent(ledger)) for _ in range(3)] == [True, True, False]
        ledger.start_job(2)
        assert [asyncio.run(self.sent(ledger)) for _ in range(2)] == [True, False]

    def test_requests_stay_within_their_part_of_a_limit(self) -> None:
        ledger = Proposals(Meter(Budget(calls=10)))
        ledger.start_job(None)
        ledger.limit(lambda usage: usage.calls <= 1)
        assert [asyncio.run(self.sent(ledger)) for _ in range(2)] == [True, False]

    async def test_only_the_first_of_many_requests_find_out_that_a_model_is_down(
        self,
    ) -> None:
        tried: list[int] = []

        async def down() -> None:
            await asyncio.sleep(0)
            raise CallError("down")

        async def one(ledger: Proposals, number: int) -> None:
            try:
                async with ledger.request("lm", Usage(1)):
                    tried.append(number)
                    await down()
            except CallError:
                return

        ledger = Proposals(Meter(), give_up=3)
        await asyncio.gather(*(one(ledger, number) for number in range(50)))
        assert tried == [0, 1, 2]

    @staticmethod
    async def sent(ledger: Proposals) -> bool:
        try:
            async with ledger.request("lm", Usage(1)):
                ledger._meter.usage += Usage(1)
                return True
        except NotAsked:
            return False
