"""Comparisons on scripted writers: the mixed world, other packages on the same program, and the finished cells."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import compound as cp
from compound.benchmarks.simulated.tickets import RIGHT, START, SorterLM
from compound.benchmarks.simulated.writer import CONVENTIONS, STEPS, WriterLM
from compound.benchmarks.simulated.writers import worlds
from compound.benchmarks.simulated.writers.cells import add_missing, compare_with_best
from compound.benchmarks.simulated.writers.packages import METHODS, run, valid_size
from compound.benchmarks.simulated.writers.programs import PlainProgram
from compound.benchmarks.simulated.writers.worlds import LAYOUTS, ORDERS, Found, World, kept
from compound.execution.rng import generator

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
    demos = [{"inputs": {first.input: run[first.input]}, "outputs": {first.output: run[first.output]}}]
    for values in ({}, prompts_of(RIGHT_PROMPTS[name]), {f"{first.name}.demos": demos}):
        system = world.program.system.bind(values)
        metric = world.program.metric
        assert metric is not None
        found = cp.evaluate(system, rows, metric, "test", engines={"writer": world.engine()}, cache=False)
        assert world.score(values) == pytest.approx(found.mean)


@pytest.mark.parametrize("method", METHODS)
def test_the_packages_are_understood_and_keep_to_the_runs(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, replies, world = 150, list[tuple[str, str]](), World("writer", skill=1.0)
    ask = PlainProgram.ask

    def watch(program: PlainProgram, message: str) -> str:
        reply = ask(program, message)
        if "nstruction" in message[-400:]:  # of `proposed_instruction`, `new_instruction` and "instructions"
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


@pytest.mark.parametrize(
    ("ending", "before", "after"),
    [
        (
            "starting with the field `[[ ## new_instruction ## ]]`, and ending with `[[ ## completed ## ]]`.",
            "[[ ## new_instruction ## ]]\n",
            "\n\n[[ ## completed ## ]]",
        ),
        ("Respond with a JSON object: `prompt`.", '{"prompt": "', '"}'),
    ],
)
def test_a_named_field_holds_a_prompt_if_it_is_named_so(ending: str, before: str, after: str) -> None:
    for lm, start in ((WriterLM(1.0), STEPS[0].start), (SorterLM(1.0), START)):
        prompt = lm._reply_to(f"{start}\n\n{ending}", generator("test"))
        assert prompt.startswith(f"{before}{start}")
        assert prompt.endswith(after)
        other = ending.replace("new_instruction", "summary").replace("`prompt`", "`summary`")
        summary = lm._reply_to(f"{start}\n\n{CONVENTIONS[0].statements[0]}\n\n{other}", generator("test"))
        assert start not in summary
        assert summary.startswith(before.replace("new_instruction", "summary").replace("prompt", "summary"))


def test_finished_cells_are_kept_and_others_are_added(tmp_path: Path) -> None:
    calls: list[tuple[Any, ...]] = []

    def measure(method: str, world: World, runs: int, seed: int) -> Found:
        calls.append((method, world.name, runs, seed))
        return Found(seed / 10, 0.5, runs, seed)

    path = tmp_path / "cells.json"
    add_missing(path, ["a"], [(World("writer"), 100)], measure, versions={"a": "1"})
    assert calls == [("a", "writer", 100, seed) for seed in range(10)]
    calls.clear()
    add_missing(path, ["a", "b"], [(World("writer"), 100), (World("writer"), 200)], measure)
    assert {call[:3] for call in calls} == {("a", "writer", 200), ("b", "writer", 100), ("b", "writer", 200)}
    cell = json.loads(path.read_text(encoding="utf-8"))["methods"]["b"]["writer 0.7"]["200"]
    assert cell["returned"] == [seed / 10 for seed in range(10)]
    assert cell["runs"] == [200] * 10


def test_no_method_is_compared_on_the_seeds_that_it_was_chosen_by() -> None:
    ours = [0.6, 0.6, 0.6, 0.6]
    lucky = {"even": [0.9, 0.1, 0.9, 0.1], "odd": [0.1, 0.9, 0.1, 0.9]}
    interval, names = compare_with_best(ours, lucky)
    assert names == ["odd", "even"]  # chosen on odd seeds for even ones, and vice versa
    assert interval.mean == pytest.approx(0.5)
