"""Limits on what a run of the system may take: no change that exceeds one is returned, by any method."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import compound as cp
from compound.core.errors import DeclarationError
from compound.optimization.runs.recorder import read_events
from compound.report import terminal_summary
from compound.testing import ScriptedLM

pytestmark = pytest.mark.usefixtures("without_reports")

PRICE = 0.001  # dollars per word
SHARES = {"short": 3, "long": 6, "huge": 9}  # of 10 questions that each style answers right
PADDING = {"short": 0, "long": 20, "huge": 90}  # words
METHODS = ("search", "random")


def pad(question: str, style: str) -> str:
    return f"{question} {style} {'word ' * PADDING[style]}"


def script(message: str) -> str:
    number, style = re.findall(r"number (\d+) (\w+)", message)[-1]
    return "right" if int(number) % 10 < SHARES[style] else "wrong"


def run(
    folder: Path,
    limits: dict[str, Any],
    *,
    method: str = "random",
    start: str = "short",
    priced: bool = True,
    **more: Any,
) -> cp.Result:
    style = cp.Choice("short", "long", "huge", value=start)
    padded = cp.Function("pad", pad, style=style)(question=cp.Input("question"))
    answered = cp.LLM("answerer", prompt="Answer.")(question=padded)
    system = cp.System("padded", outputs={"answer": answered}, lm="lm")
    data = {
        split: [
            {"id": f"{split}{i}", "question": f"number {i}", "answer": "right"} for i in range(n)
        ]
        for split, n in (("train", 40), ("valid", 20))
    }
    settings = {
        "method": method,
        "budget": {"system_runs": 200},
        "objective": {"limits": limits},
        **more,
    }
    lm = ScriptedLM(script, price=PRICE, priced=priced)
    return cp.optimize(
        system,
        data,
        "exact_match",
        settings=settings,
        run_dir=folder,
        engines={"lm": lm},
        progress=False,
    )


def tokens(result: cp.Result, style: str) -> float:
    digests = {candidate.values.get("pad.style"): candidate for candidate in result.candidates}
    return digests[style].tokens


@pytest.mark.parametrize("method", METHODS)
def test_a_change_that_exceeds_a_limit_is_never_returned(method: str, tmp_path: Path) -> None:
    free = run(tmp_path / "free", {}, method=method)
    assert free.best["pad.style"] == "huge"
    assert free.cost_notes[0].startswith("Input tokens per run: ")

    limited = run(tmp_path / "limited", {"tokens_per_run": 50}, method=method)
    assert limited.best["pad.style"] == "long"
    over = [candidate for candidate in limited.candidates if candidate.broken_limits]
    assert [candidate.values for candidate in over] == [{"pad.style": "huge"}]
    assert re.fullmatch(r"tokens_per_run 9\d(\.\d+)? > 50", over[0].broken_limits[0])
    assert "1 candidate exceeded a limit and could not become the result." in limited.cost_notes


def test_a_change_that_only_a_decision_runs_is_checked_there(tmp_path: Path) -> None:
    """The method chooses by a local score, and has no runs of its proposal."""
    assert run(tmp_path / "free", {}, method="hbc").best["pad.style"] == "huge"
    result = run(tmp_path / "limited", {"tokens_per_run": 50}, method="hbc")
    assert result.best["pad.style"] == "short"
    assert {"pad.style": "huge"} in [c.values for c in result.candidates if c.fate == "over limit"]


@pytest.mark.parametrize(("method", "accept"), [("search", "best"), ("random", "supported")])
def test_a_configuration_within_the_limits_replaces_a_start_that_is_not(
    method: str, accept: str, tmp_path: Path
) -> None:
    """Although its score is lower; of those within the limits, the one with the highest score is returned."""
    result = run(
        tmp_path / "run", {"usd_per_run": 50 * PRICE}, method=method, start="huge", accept=accept
    )
    assert result.best["pad.style"] == "long"
    assert result.verdict == "feasible"
    assert result.after.mean < result.before.mean
    start, chosen = result.candidates[0], next(c for c in result.candidates if c.chosen)
    assert start.broken_limits
    assert (chosen.fate, chosen.broken_limits) == ("feasible", ())
    assert result.cost_notes[0].startswith(
        "The initial configuration exceeds a limit (usd_per_run 0.09"
    )
    assert "the result meets all limits" in terminal_summary(result.path)
    (decision,) = (event for event in read_events(result.path) if event["event"] == "decision")
    assert decision["verdict"] == "feasible"


def test_a_limit_that_nothing_meets_returns_the_start_and_says_so(tmp_path: Path) -> None:
    result = run(tmp_path / "run", {"tokens_per_run": 2})
    assert result.best["pad.style"] == "short"
    assert result.verdict == "unchanged"
    line = result.cost_notes[0]
    assert line.startswith(
        "No evaluated configuration meets the limits; the result is the initial one (tok"
    )
    assert line in terminal_summary(result.path)
    assert result.to_json()["cost_notes"] == [line]


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        ({"limits": {"usd_per_run": -1}}, r"objective\.limits\.usd_per_run: .*greater than 0"),
        ({"limits": {"tokens_per_run": 0}}, r"objective\.limits\.tokens_per_run: .*greater than 0"),
        (
            {"limits": {"usd_per_token": 1}},
            r"objective\.limits\.usd_per_token.*did you mean.*usd_per_run",
        ),
        ({"maximize": "speed"}, r"objective\.maximize: .*'score'"),
    ],
)
def test_nonsense_is_refused(objective: dict[str, Any], message: str) -> None:
    with pytest.raises(DeclarationError) as error:
        cp.OptimizeSettings(objective=objective)
    assert re.search(message, str(error.value)), str(error.value)


def test_a_limit_of_dollars_needs_prices(tmp_path: Path) -> None:
    with pytest.raises(DeclarationError, match=r"usd_per_run is set, but the price of 'lm' is"):
        run(tmp_path / "run", {"usd_per_run": 1.0}, priced=False)
    assert not (tmp_path / "run").exists()
    result = run(tmp_path / "run", {"tokens_per_run": 50}, priced=False)
    assert {candidate.usd for candidate in result.candidates} == {None}
    assert result.best["pad.style"] == "long"
