"""Scoring candidates by a local reward: gains, halving, failures, and who is put to the test."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from compound.benchmarks.simulated.systems import Simulated
from compound.components.function import Function
from compound.components.llm import LLM
from compound.evaluation.metrics.custom import custom
from compound.example import CallValues, Example
from compound.graph.component import Input
from compound.graph.space import Choice, Text
from compound.graph.system import System
from compound.narrowing import entry
from compound.optimizers.optimas.local_scoring import (
    REPEATS,
    Gain,
    LocalScorer,
    RecordedCalls,
    Scoring,
    finalists,
)
from compound.rewards.model import Vector
from compound.testing import ScriptedLM

ROWS = [Example(f"e{i}", {"x": float(i)}) for i in range(8)]
METRIC = custom(lambda outputs, example: 0.0)


def scale(x: float, by: int, plus: int) -> float:
    if by == 13:
        raise RuntimeError("unlucky")
    return by * x + plus


SYSTEM = System(
    "s",
    outputs={
        "y": Function("f", scale, by=Choice(*range(20)), plus=Choice(0, 100))(x=Input("x", float)),
    },
)


class Seen:
    """The reward of an output is the output; remembers how many were asked for each time."""

    def __init__(self, output: str = "output") -> None:
        self.output = output
        self.asked: list[int] = []

    def rewards(self, component: str, calls: Sequence[CallValues]) -> Vector:
        self.asked.append(len(calls))
        return np.array([entry(outputs, self.output, (int, float)) for _, outputs in calls])


def gains(job: Any, values: Sequence[Any], task_system: System = SYSTEM) -> tuple[list[float], list[int]]:
    """Candidates for an incumbent, on calls that `SYSTEM` made."""
    made = job(task_system, METRIC, ROWS, keys=("f.by", "f.plus"), minibatch=8)
    seen = Seen()
    scorer = LocalScorer(made.task, "f", seen, 3, 1.0)

    async def run() -> list[float]:
        start = SYSTEM.configuration.to_json()
        traces = await made.scorer.traces(start, ROWS)
        recorded = RecordedCalls(SYSTEM, [(trace, trace.calls[0]) for trace in traces])
        return await scorer.gains(values, SYSTEM, scorer._places(recorded))

    return asyncio.run(run()), seen.asked


def test_gains_are_means_over_the_incumbent_and_the_better_half_goes_on(job: Any) -> None:
    """Of x = 0…7: the first two have mean 0.5, the first four 1.5, all 3.5."""
    found, asked = gains(job, [{"f.by": b} for b in (1, 2, 3, 4)])
    assert found == pytest.approx([1 * 0.5, 2 * 0.5, 3 * 1.5, 4 * 3.5])
    assert asked == [5 * 2, 3 * 4, 2 * 8]


def test_a_candidate_that_fails_counts_as_less_than_the_worst(job: Any) -> None:
    found, _ = gains(job, [{"f.by": 13}, {"f.plus": 100}])
    assert found[0] == pytest.approx(-1.0)  # the worst of all is 0
    assert found[1] == pytest.approx(100.0)


def test_what_the_incumbent_changed_since_the_calls_were_recorded_is_kept(job: Any) -> None:
    found, _ = gains(job, [{"f.by": 2}], SYSTEM.bind({"f.plus": 100, "f.by": 5}))
    assert found == pytest.approx([(2 - 5) * 3.5])


class TestPlaces:
    """Where candidates are scored."""

    def places(self, job: Any, temperature: float) -> list[Any]:
        llm = LLM("f", prompt=Text("Say."), temperature=temperature)
        system = System("t", outputs={"y": llm(x=Input("x", float))}, lm="lm")
        made = job(system, METRIC, ROWS[:3], lambda: ScriptedLM(lambda message: "word"), keys=("f.prompt",))
        scorer = LocalScorer(made.task, "f", Seen(), 3, 1.0)
        traces = asyncio.run(made.scorer.traces({}, ROWS[:3]))
        return scorer._places(RecordedCalls(system, [(trace, trace.calls[0]) for trace in traces]))

    def test_calls_left_to_chance_are_drawn_several_times(self, job: Any) -> None:
        certain, left_to_chance = self.places(job, 0.0), self.places(job, 0.9)
        assert [trace.example for trace, _, _ in certain] == ["e0", "e1", "e2"]
        assert [trace.example for trace, _, _ in left_to_chance] == ["e0", "e1", "e2"] * REPEATS
        assert len({(trace.example, sample) for trace, _, sample in left_to_chance}) == 3 * REPEATS


class TestRounds:
    """How many rounds of local search there are."""

    def rounds(self, job: Any, part: float, share: float = 100.0, steps: int = 5) -> list[int]:
        """Four candidates for the last of three components, on eight calls."""
        world = Simulated("chain", noise=0.0, options=64)
        examples = world.examples(8)
        made = job(world.system(), world, examples, keys=("c.option",), share=share, candidates=4)
        scorer = LocalScorer(made.task, "c", Seen("y"), steps, part)
        asked: list[int] = []

        async def more(task: Any, scored: Any) -> list[dict[str, Any]]:
            asked.append(len(scored))
            return [{"c.option": len(scored) + i} for i in range(4)]

        async def run() -> None:
            traces = await made.scorer.traces({}, examples)
            recorded = RecordedCalls(made.task.system, [(trace, trace.call("c")) for trace in traces])
            state = Scoring(share=share, candidates=[{"c.option": i} for i in range(1, 5)])
            async for _ in scorer.rounds(state, recorded, more):
                pass

        asyncio.run(run())
        return asked

    def test_as_many_as_the_settings_say(self, job: Any) -> None:
        assert self.rounds(job, 1.0, share=1000.0) == [5, 9, 13, 17]
        assert self.rounds(job, 1.0, share=1000.0, steps=1) == []

    def test_another_one_only_if_its_part_of_the_share_holds_it(self, job: Any) -> None:
        """Recording took 8 runs, a round may take 32 / 3 and takes 16 / 3: 4 × 2 calls, 2 × 2, and 1 × 4."""
        assert len(self.rounds(job, 0.23)) == 0
        assert len(self.rounds(job, 0.25)) == 1
        assert len(self.rounds(job, 0.30)) == 2


def gained(scored: Any) -> list[Gain]:
    return [Gain(values=values, gain=gain) for values, gain in scored]


class TestFinalists:
    def texts(self, job: Any, scored: Any) -> Any:
        llm = LLM("llm", prompt=Text("Say."))
        system = System("t", outputs={"y": llm(q=Input("q", str))}, lm="lm")
        rows = [Example("e", {"q": "?"})]
        task = job(system, METRIC, rows, lambda: ScriptedLM([]), keys=("llm.prompt",)).task
        return [found.values for found in finalists(task, gained(scored), 0.0)]

    def test_of_prompts_the_best_two_that_beat_the_incumbent(self, job: Any) -> None:
        scored = [[{}, 0.0], [{"p": "a"}, 0.1], [{"p": "b"}, -0.2], [{"p": "c"}, 0.3], [{"p": "d"}, 0.2]]
        assert self.texts(job, scored) == [{"p": "c"}, {"p": "d"}]
        assert self.texts(job, [[{}, 0.0], [{"p": "a"}, 0.0], [{"p": "b"}, -1.0]]) == []

    def test_of_settings_none_that_comes_after_the_incumbent(self, job: Any) -> None:
        task = job(SYSTEM, METRIC, ROWS).task
        scored = [[{}, 0.0], [{"k": 1}, 0.5], [{"k": 2}, -0.5], [{"k": 3}, -0.1]]
        assert [found.values for found in finalists(task, gained(scored), 0.0)] == [{"k": 1}]
