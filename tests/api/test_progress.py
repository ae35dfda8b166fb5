"""What terminals, logs and notebooks show of a run: its events, how far it is, and the time left."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

import compound as cp
from compound.api.progress import Course, Lines, Screen, format_event

SCORE = {"mean": 0.25, "low": 0.1, "high": 0.4, "n": 40}
DECISION = {
    "event": "decision",
    "verdict": "supported",
    "accepted": True,
    "before": {"mean": 0.25},
    "after": {"mean": 0.5},
    "level": 0.05,
}
KEYS = ["a.prompt", "a.demos", "b.k", "b.prompt"]
JOB = {"event": "job", "optimizer": "joint", "keys": KEYS, "note": "nothing", "values": {}}


@pytest.mark.parametrize(
    ("event", "text"),
    [
        ({"event": "outlook", "duplicates": ["one"], "told": ["two"]}, "note: one\nnote: two"),
        ({"event": "proposals", "note": "stopped"}, "note: stopped"),
        (
            {"event": "test_before", **SCORE},
            "test score of the start: 0.250 [0.100, 0.400] on 40 examples",
        ),
        (
            {"event": "test_after", **SCORE},
            "test score of the result: 0.250 [0.100, 0.400] on 40 examples",
        ),
        (
            {**DECISION, "p": 0.00071},
            "decision: supported, validation score 0.250 → 0.500, p = 0.00071 at level 0.05",
        ),
        (
            {**DECISION, "p": 1e-9},
            "decision: supported, validation score 0.250 → 0.500, p < 0.0001 at level 0.05",
        ),
        (
            {
                **DECISION,
                "p": 0.2,
                "verdict": "rejected",
                "looks": 2,
                "after": {"mean": 0.5, "n": 58},
            },
            "decision: rejected, validation score 0.250 → 0.500 on 58 examples, with those of a "
            "second look, p = 0.2 at level 0.05",
        ),
        (JOB, "joint proposes no change of 4 parameters: nothing"),
        (
            {**JOB, "values": {"b.k": 1}, "train_before": 0.1, "train_after": 0.25},
            "joint proposes new values of b.k: train score 0.100 → 0.250",
        ),
        ({"event": "done"}, ""),
    ],
)
def test_an_event_is_one_line_for_each_thing_it_says(event: Mapping[str, Any], text: str) -> None:
    assert format_event(event) == text


class Run:
    """Events of a run by a clock that the test turns."""

    def __init__(self, limits: Mapping[str, Any] | None = None) -> None:
        self.now = 100.0
        self.course = Course(limits or {"system_runs": 200}, lambda: self.now)

    def tell(self, seconds: float, event: str, runs: float = 0.0, **facts: Any) -> list[str]:
        """Let an event happen after some seconds, when some system runs are spent."""
        self.now += seconds
        spent = {"system_runs": runs, **facts.pop("spent", {})}
        return self.course.follow({"event": event, "spent": spent, **facts})


def test_the_time_left_is_told_once_it_is_known() -> None:
    run = Run()
    run.tell(0, "phase", name="searching", total=240, best=0.25, loads=True)
    assert (run.course.phase, run.course.summary) == ("loading the model", "best so far 0.250")
    run.tell(10, "call", runs=0)  # of a retriever
    assert run.course.phase == "loading the model"
    run.tell(40, "call", runs=0, spent={"calls": 1})  # loading says nothing about the speed
    assert run.course.phase == "searching"
    run.tell(4, "call", runs=24, spent={"calls": 2})
    assert run.course.seconds_left is None  # too early
    run.tell(56, "call", runs=40)
    run.tell(50, "call", runs=80)
    assert run.course.position == "33%"
    assert run.course.summary == "about 4 min left · best so far 0.250"  # 80 runs in 110 s


def test_a_resumed_run_counts_its_own_time_only() -> None:
    run = Run()
    run.tell(0, "phase", runs=180, name="testing", total=220)
    run.tell(10, "call", runs=180, spent={"test_runs": 10})
    assert run.course.seconds_left == pytest.approx(30)
    assert run.course.position == "86%"
    run.tell(990, "call", runs=180, spent={"test_runs": 10})
    assert run.course.seconds_left == pytest.approx(3000)  # it has waited since


def test_the_limit_that_is_reached_first_counts() -> None:
    run = Run({"system_runs": 1000, "tokens": 100})
    run.tell(0, "phase", name="searching", total=1000)
    run.tell(100, "call", runs=10, spent={"prompt_tokens": 40, "completion_tokens": 10})
    assert run.course.position == "50%"
    assert run.course.summary == "about 2 min left"


def test_without_limits_nothing_is_said_about_the_end() -> None:
    run = Run({"seed": 0})
    run.tell(0, "phase", name="searching", total=None)
    run.tell(100, "call", runs=10)
    assert (run.course.share, run.course.seconds_left, run.course.position) == (None, None, "")


def test_steps_of_the_last_job_end_before_the_budget() -> None:
    run = Run({"system_runs": 10_000})
    run.tell(0, "phase", name="searching", total=10_000, rest=40.0)
    run.tell(0, "progress", note="a", step=0, of=10)
    run.tell(60, "progress", runs=20, note="mean reward 0.5", step=5, of=10)
    assert run.course.position == "step 5 of 10"
    assert run.course.seconds_left == pytest.approx(60 + 120)
    run.tell(0, "phase", runs=20, name="searching", total=10_000)  # another job may follow
    run.tell(0, "progress", runs=20, note="a", step=5, of=10)
    run.tell(60, "progress", runs=520, note="a", step=9, of=10)
    assert run.course.seconds_left == pytest.approx((10_000 - 520) / 520 * 120)


@given(
    st.lists(st.tuples(st.floats(0, 1e4), st.floats(0, 1e4), st.sampled_from("cps")), max_size=30)
)
def test_the_time_left_is_never_negative(steps: list[tuple[float, float, str]]) -> None:
    run = Run({"system_runs": 100, "minutes": 5, "cost": 0.5, "tokens": 0})
    for seconds, amount, kind in steps:
        name = {"c": "call", "p": "phase", "s": "progress"}[kind]
        facts = {"name": "testing", "total": amount, "note": "", "step": amount, "of": 7, "rest": 3}
        run.tell(seconds, name, runs=amount, **facts)
        left, share = run.course.seconds_left, run.course.share
        assert left is None or left >= 0
        assert share is None or share >= 0


def test_a_log_has_few_lines_and_no_note_twice(capsys: pytest.CaptureFixture[str]) -> None:
    run = Run()
    lines = Lines(run.course)

    def tell(event: str, **facts: Any) -> None:
        lines.listen({"event": event, "spent": {}, **facts})

    told = {"duplicates": [], "told": ["with 40 examples, a gain of 0.1 is found"]}
    tell("outlook", **told)
    tell("phase", name="searching", total=100)
    for second in range(3600):
        run.now += 1
        tell("progress", note=f"{second} candidates", spent={"system_runs": second / 40})
    tell("outlook", **told)
    tell("phase", name="evaluating the start", total=100)
    printed = capsys.readouterr().err.splitlines()
    assert printed[:2] == ["note: with 40 examples, a gain of 0.1 is found", "searching"]
    assert printed[-1] == "evaluating the start"
    assert 10 < len(printed) < 25
    assert printed[2] == "  9 candidates" or printed[2].endswith(" · 9 candidates")
    assert "min left" in printed[-2]


@pytest.mark.parametrize("width", [20, 40, 80])
@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_what_stands_below_fits_a_terminal(width: int, encoding: str) -> None:
    run = Run()
    raw = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=raw, width=width, force_terminal=True)
    screen = Screen(console, run.course)
    screen.listen({"event": "phase", "name": "evaluating the start", "total": 100, "best": 0.5})
    run.now += 60
    note = "the best 名前 → \x1b[31m on 8 examples: expected gain +0.070, and much more to read"
    screen.listen({"event": "progress", "note": note, "spent": {"system_runs": 40}})
    console.print(screen.render())
    raw.flush()
    shown = raw.buffer.getvalue().decode(encoding)
    plain = Console(file=io.StringIO(), width=500)
    plain.print(screen.render())
    lines = plain.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert len(lines) == 4
    assert all(cell_len(line.rstrip()) < width for line in lines)
    assert len(shown.splitlines()) == 4
    assert "\x1b[31m" not in shown
    if width == 80:
        assert lines[0].startswith("evaluating the start")
        assert lines[0].rstrip().endswith("40%")
        assert lines[1].startswith("about 2 min left")
        assert lines[3].startswith("40 of 200 system runs")


def test_every_phase_of_a_run_and_an_evaluation_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def say(x: int, phrase: str) -> str:
        return phrase

    node = cp.Function("say", say, phrase=cp.Choice("bad", "good"))(x=cp.Input("x", int))
    system = cp.System("s", outputs={"answer": node})
    rows = [{"id": str(i), "x": i, "answer": "good"} for i in range(40)]
    data = {"train": rows[:10], "valid": rows[10:25], "test": rows[25:]}
    given: Any = {"budget": 100, "run_dir": tmp_path / "run"}
    cp.optimize(system, data, "exact_match", **given)
    lines = capsys.readouterr().err.splitlines()
    phases = ["evaluating the start", "searching", "deciding", "testing"]
    assert [line for line in lines if line in phases] == phases
    found = cp.evaluate(system, data, "exact_match", progress=True)
    assert capsys.readouterr().err == "evaluating\n"
    assert found == cp.evaluate(system, data, "exact_match")
    assert capsys.readouterr().err == ""
