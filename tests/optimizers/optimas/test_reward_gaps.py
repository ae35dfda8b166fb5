"""Reward gaps for the scheduler: by hand, and for components that random ones follow."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest

from compound.benchmarks.simulated.ablations import fit_nothing
from compound.benchmarks.simulated.relays import Relay, RelayStep, answer_of
from compound.components.function import Function
from compound.evaluation.metrics.custom import custom
from compound.example import Example
from compound.execution.rng import generator
from compound.graph.component import CallContext, Input, Output
from compound.graph.space import Choice
from compound.graph.system import System
from compound.narrowing import entry
from compound.optimization.method import Job, JobRecord
from compound.optimization.prices import estimate_prices
from compound.optimizers.optimas.evaluation_table import Conditions, EvaluationTable
from compound.optimizers.optimas.guided import GuidedSearch
from compound.optimizers.optimas.guided_race import GuidedRace, RaceMemory
from compound.optimizers.optimas.part import part_of
from compound.optimizers.optimas.rewarding import RunRewards
from compound.optimizers.scheduling.scheduler import RewardGapScheduler
from compound.optimizers.search.prompts import PromptSearch
from compound.rewards.buffer import PairBuffer
from compound.rewards.gains.critic import Critic, fit_critic
from compound.rewards.gains.estimates import Evaluations
from compound.rewards.model import make_backbone
from compound.rewards.pairs import Draw
from compound.rewards.sampling.candidates import Candidate
from compound.rewards.template import Reading, Template
from optimas_settings import learning, optimas

LEARNING = learning(optimas(model="none"))
NAN = np.nan


def emit(x: int, option: int) -> str:
    """Return p, q, q or r by option for most inputs; p for any option if x is 1."""
    return "p" if x == 1 else "pqqr"[option]


def emitting(job: Any) -> EvaluationTable:
    """A table of three candidates on four inputs; the last one has no local evaluations."""
    node = Function("emitter", emit, option=Choice(0, 1, 2, 3))(x=Input("x", int))
    system = System("emitting", outputs={"y": node})
    rows = [Example(f"e{i}", {"x": i}) for i in range(4)]
    assignment = job(system, custom(lambda outputs, example: 0.0), rows, keys=("emitter.option",))
    part = part_of(system, ["emitter"], estimate_prices(system))
    template = Template.of(system.components["emitter"])
    conditions = Conditions(part, 1.0, template, make_backbone("none", 8))
    candidates = [{"emitter.option": option} for option in (1, 2, 3)]
    table = EvaluationTable(assignment.task, conditions, candidates, rows)
    asyncio.run(table.evaluate([0, 1, 2], [], 2))
    asyncio.run(table.evaluate([0], [], 3))
    return table


class TestByHand:
    def test_the_gap_is_the_mean_difference_of_distinct_outputs(self, job: Any) -> None:
        """Of the first input p is 0, q 0.5 and r -1: differences of 0.5, 1 and 1.5, at 0.2 each 0.2.

        The second has one output, the third p and q: 0.1. The mean of 0.2, 0 and 0.1 is 0.1.
        """
        local = np.array([[0.5, 0.0, 0.5, NAN], [0.5, 0.0, NAN, NAN], [-1.0, 0.0, NAN, NAN]])
        data = Evaluations(np.full((3, 4), NAN), local)
        assert emitting(job).gap(data, 0.2) == pytest.approx(0.1)

    def test_a_reward_that_tells_nothing_measures_no_gap(self, job: Any) -> None:
        data = Evaluations(np.full((3, 4), NAN), np.full((3, 4), NAN))
        assert emitting(job).gap(data, 0.0) is None
        assert emitting(job).gap(data, 0.2) is None

    def test_certain_differences_come_before_estimated_ones(self, job: Any) -> None:
        """Of component a the scores decide: 0.4; of b one run each before random components decides nothing."""
        assignment = job(Relay(2, 2).system(), Relay(2, 2), Relay(2, 2).examples(4))
        rewards = RunRewards(
            LEARNING, assignment.task, assignment.memory, PairBuffer("s", LEARNING.pairs.sampling)
        )
        for name, certain in (("a", True), ("b", False), ("c", False)):
            outputs = [Candidate({"y": y}, (y,), certain=certain) for y in (0.2, 0.6)]
            rewards.buffer.add([Draw(name, name, "e", "d", {}, tuple(outputs))], 1)
        races = {
            "a": GuidedRace(alive=[], rungs=1, gap=0.7),
            "b": GuidedRace(alive=[], rungs=1, gap=0.3),
            "c": GuidedRace(alive=[], rungs=1),
        }
        RaceMemory(races=races).store(assignment.memory)
        assert rewards.gaps() == {"a": pytest.approx(0.4), "b": 0.3}
        records = [
            JobRecord(job=i, optimizer="local", keys=(f"{name}.option",), facts={"gaps": rewards.gaps()})
            for i, name in enumerate("abc")
        ]
        jobs = [Job("local", (f"{name}.option",)) for name in "abc"]
        chosen = [RewardGapScheduler().choose(jobs, records, seed) for seed in range(60)]
        gaps = {job.keys[0][0]: job.reason["gap"] for job in chosen}
        assert gaps == {
            "a": pytest.approx(0.4),
            "b": 0.3,
            "c": pytest.approx(0.35),
        }  # c: the mean of the others


@dataclass(frozen=True)
class Reader:
    """A local reward that is large for inputs that are large, whatever the output; implements `Critic`."""

    def rewards(self, readings: Sequence[Reading], examples: Sequence[str]) -> np.ndarray:
        read = [(int(each.inputs.split()[-1]), int(each.output.split()[-1])) for each in readings]
        return np.array([10.0 * x + y for x, y in read])


def add(x: int, option: int) -> int:
    """Add a number, except to 2: then the call fails with option 3."""
    if x == 2 and option == 3:
        raise ValueError("cannot add")
    return x + option


def repeated(job: Any) -> EvaluationTable:
    """A table of three candidates of a component that is called twice, the second time on its own output."""
    step = Function("adder", add, option=Choice(1, 2, 3, 0, value=1))
    system = System("repeated", outputs={"y": step(x=step(x=Input("x", int)), name="again")})
    rows = [Example(f"e{i}", {"x": i}) for i in range(2)]
    assignment = job(system, custom(lambda outputs, example: 0.0), rows, keys=("adder.option",))
    part = part_of(system, ["adder"], estimate_prices(system))
    template = Template.of(system.components["adder"])
    conditions = Conditions(part, 1.0, template, make_backbone("none", 8))
    table = EvaluationTable(assignment.task, conditions, [{"adder.option": o} for o in (2, 3, 0)], rows)
    asyncio.run(table.evaluate([0, 1, 2], [], 2))
    return table


def test_local_gains_compare_calls_on_the_same_inputs(job: Any) -> None:
    """The second call reads the first one's output: only the first calls have the inputs of the incumbent's.

    The incumbent adds 1, so the first outputs are larger by 1, 2 and -1. Regression test: the incumbent's mean
    was that of both of its calls, so that all candidates lost what the reward gives to larger inputs.
    """
    gains = repeated(job).gains(cast("Critic", Reader())).locally
    assert gains.tolist() == [[1.0, 1.0], [2.0, 2.0], [-1.0, -1.0]]


def test_a_failed_call_is_the_worst_of_its_example(job: Any) -> None:
    """Of the third input, option 3 fails, and loses as much as the worst of the others."""
    step = Function("adder", add, option=Choice(1, 2, 3, 0, value=1))
    system = System("single", outputs={"y": step(x=Input("x", int))})
    rows = [Example("e", {"x": 2})]
    part = part_of(system, ["adder"], estimate_prices(system))
    conditions = Conditions(part, 1.0, Template.of(system.components["adder"]), make_backbone("none", 8))

    def gains(start: int, *options: int) -> list[list[float]]:
        bound = system.bind({"adder.option": start})
        task = job(bound, custom(lambda outputs, example: 0.0), rows, keys=("adder.option",)).task
        table = EvaluationTable(task, conditions, [{"adder.option": o} for o in options], rows)
        asyncio.run(table.evaluate(range(len(options)), [], 1))
        found: list[list[float]] = table.gains(cast("Critic", Reader())).locally.tolist()
        return found

    assert gains(1, 2, 3, 0) == [[1.0], [-1.0], [-1.0]]
    assert gains(3, 1, 2, 0) == [[1.0], [2.0], [0.0]]
    assert gains(3, 3) == [[pytest.approx(np.nan, nan_ok=True)]]


class Noisy(RelayStep):
    """A step that writes any symbol in a tenth of its runs."""

    def deterministic(self, values: Mapping[str, object]) -> bool:
        return False

    async def run(
        self, inputs: Mapping[str, object], values: Mapping[str, object], call: CallContext
    ) -> Mapping[str, object]:
        made = await super().run(inputs, values, call)
        if generator(call.seed, "noise").random() < 0.1:
            return {"found": f"noise {answer_of(entry(inputs, 'question', str), 7)}"}
        return made


def noisy_tail() -> System:
    question = Input("question", str)
    found = RelayStep("a", True, (0.3, 0.9, 0.5, 0.6, 0.4, 0.7), 0.05, 0)(question=question)
    for name in "bcd":
        found = Noisy(name, False, (0.9,), 0.05, 0)(question=question, found=found)
    assert isinstance(found, Output)
    return System("noisy", outputs={"answer": found})


@pytest.mark.parametrize(("fit", "is_measured"), [(fit_critic, True), (fit_nothing, False)])
def test_random_descendants_leave_the_gap_to_the_guided_race(job: Any, fit: Any, is_measured: bool) -> None:
    """Single runs before random components decide no order, so that the component had no gap at all."""
    world = Relay(4, 1)
    assignment = job(noisy_tail(), world, world.examples(80), keys=("a.option",), share=100, minibatch=8)
    _, proposal = assignment.run(GuidedSearch(LEARNING, PromptSearch(()), fit=fit))
    rewards = RunRewards.open(assignment.task, LEARNING)
    assert rewards.buffer.of("a")
    assert rewards.buffer.gap("a") is None
    if is_measured:
        # an answer or another symbol: the score follows it in 0.9 of the runs of each of three steps
        assert 0.05 < proposal.facts["gaps"]["a"] < 1
        assert proposal.facts["gaps"]["a"] == proposal.facts["guided"]["gap"]
    else:
        assert "a" not in proposal.facts["gaps"]
