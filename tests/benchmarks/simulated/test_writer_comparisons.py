"""Comparisons on scripted writers: the mixed world, other packages on the same program, and the finished cells."""

from __future__ import annotations

from itertools import product

import pytest

import compound as cp
from benchmarks.simulated.tickets import RIGHT, START
from benchmarks.simulated.writer import STEPS
from benchmarks.simulated.writers import worlds
from benchmarks.simulated.writers.packages import METHODS, run, valid_size
from benchmarks.simulated.writers.programs import PlainProgram
from benchmarks.simulated.writers.worlds import LAYOUTS, ORDERS, World, kept

RIGHT_PROMPTS = {
    "writer": {
        name: " ".join([step.start, *(convention.statements[0] for convention in step.conventions)])
        for name, step in zip(("reader", "finisher"), STEPS, strict=True)
    },
    "tickets": {"sorter": " ".join([START, *RIGHT.values()])},
}
RIGHT_PROMPTS["mixed"] = RIGHT_PROMPTS["writer"]
BEST = {"printer.layout": "lined", "printer.order": "last", "printer.level": 7}


@pytest.fixture(autouse=True)
def few_test_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worlds, "TEST", dict.fromkeys(worlds.TEST, 100))


def prompts_of(values: dict[str, str]) -> dict[str, str]:
    return {f"{name}.prompt": text for name, text in values.items()}


def test_the_choices_and_the_number_of_the_mixed_world_multiply_the_score() -> None:
    shares = {values: kept(*values) for values in product(LAYOUTS, ORDERS, range(11))}
    assert [values for values, share in shares.items() if share == 1] == [("lined", "last", 7)]
    assert shares["plain", "first", 2] == pytest.approx(0.8 * 0.85 * 0.75)
    right = prompts_of(RIGHT_PROMPTS["writer"])
    mixed, writer = World("mixed"), World("writer")
    assert mixed.score({**right, **BEST}) == writer.score(right) > 0.9
    assert mixed.score(right) == pytest.approx(0.51 * writer.score(right), abs=0.05)


@pytest.mark.parametrize("name", ["tickets", "writer", "mixed"])
def test_the_steps_without_the_system_score_what_the_system_scores(name: str) -> None:
    world = World(name)
    rows, first = [dict(row) for row in world.test_rows], world.steps[0]
    run = world.outputs(RIGHT_PROMPTS[name], {}, rows[0])
    demos = [
        {"inputs": {first.input: run[first.input]}, "outputs": {first.output: run[first.output]}}
    ]
    for values in ({}, prompts_of(RIGHT_PROMPTS[name]), {f"{first.name}.demos": demos}):
        system = world.program.system.bind(values)
        metric = world.program.metric
        assert metric is not None
        found = cp.evaluate(
            system, rows, metric, "test", engines={"writer": world.engine()}, cache=False
        )
        assert world.score(values) == pytest.approx(found.mean)


@pytest.mark.parametrize("method", METHODS)
def test_the_packages_are_understood_and_keep_to_the_runs(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, replies, world = 150, list[tuple[str, str]](), World("writer", skill=1.0)
    ask = PlainProgram.ask

    def watch(program: PlainProgram, message: str) -> str:
        reply = ask(program, message)
        if (
            "nstruction" in message[-400:]
        ):  # of `proposed_instruction`, `new_instruction` and "instructions"
            replies.append((message, reply))
        return reply

    monkeypatch.setattr(PlainProgram, "ask", watch)
    found = run(method, world, runs, seed=0)
    start = world.score({})
    assert runs - 60 < found.runs <= runs + valid_size(runs) + 6  # GEPA ends after the iteration
    assert (found.requests == 0) == ("bootstrap" in method)
    assert found.returned > start + (0.02 if "bootstrap" in method else 0.2)
    assert all(any(step.start in reply for step in STEPS) for _, reply in replies)
    assert bool(replies) == bool(found.requests)
