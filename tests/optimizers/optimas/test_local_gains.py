"""Local rewards in the joint search: differences by hand, trust, what is evaluated, and what is stored."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest

from benchmarks.simulated.ablations import FitToShuffled
from benchmarks.simulated.relays import Relay
from compound import Choice, Example, Input, Port, System
from compound.ext import CallContext, Operation
from compound.metrics import custom
from compound.optimizers.search.candidates import GlobalRuns, LocalCell
from compound.optimizers.search.joint import Search
from compound.optimizers.search.local_gains import LocalGains, RewardGuide
from compound.optimizers.search.rewarding import RunRewards
from compound.optimizers.search.sources import CandidateSources
from compound.rewards.features import Reading
from compound.rewards.gains import Critic
from optimas_settings import guided_search, learning, optimas

REWARDS = optimas(model="none")
OPTIONS = {
    1: 0.3,
    2: 0.6,
    3: 0.9,
    0: 0.1,
}  # score of the runs with each option; the current one is 1


@dataclass(frozen=True)
class Reader:
    """A local reward that is large for inputs that are large, and for outputs; implements `Critic`."""

    def rewards(self, readings: Sequence[Reading], examples: Sequence[str]) -> np.ndarray:
        read = [(int(each.inputs.split()[-1]), int(each.output.split()[-1])) for each in readings]
        return np.array([10.0 * x + y for x, y in read])


def read(*_: Any, **__: Any) -> Critic:
    return cast("Critic", Reader())


class Adder(Operation):
    """Adds a number, except to 7: then the call fails with option 3."""

    name, kind, cacheable, version = "adder", "adder", True, "1"
    inputs: Mapping[str, Port] = {"x": Port(int)}
    outputs = {"y": Port(int)}  # noqa: RUF012
    settings = {"option": Choice(1, 2, 3, 0, value=1)}  # noqa: RUF012

    async def run(
        self, inputs: Mapping[str, Any], values: Mapping[str, Any], call: CallContext
    ) -> Any:
        if inputs["x"] == 7 and values["option"] == 3:
            raise ValueError("cannot add")
        return {"y": inputs["x"] + values["option"]}


class Tail(Adder):
    name, kind = "tail", "tail"
    settings = {}  # noqa: RUF012

    async def run(
        self, inputs: Mapping[str, Any], values: Mapping[str, Any], call: CallContext
    ) -> Any:
        return {"y": inputs["x"]}


def gains(job: Any, *, repeated: bool = False, **guide: Any) -> LocalGains:
    """Local evaluations of a component whose output goes through another one; called twice if repeated."""
    step = Adder()
    made = step(x=Input("x", int))
    made = step(x=made, name="again") if repeated else made
    system = System("adding", outputs={"y": Tail()(x=made)})
    rows = [Example(f"e{i}", {"x": i}) for i in range(10)]
    task = job(system, custom(lambda outputs, example: 0.0), rows, keys=("adder.option",)).task
    found = RewardGuide(learning(REWARDS), **{"fit": read, **guide}).prepare(task, rows)
    assert isinstance(found, LocalGains)
    return found


def learn(local: LocalGains, scores: Mapping[int, float] = OPTIONS) -> None:
    rows = [row for row in range(10) if row != 7]
    runs: list[GlobalRuns] = [
        ({"adder.option": o}, dict.fromkeys(rows, s)) for o, s in scores.items()
    ]
    asyncio.run(local.learn(runs))


def cell(option: int, *rows: int, failed: Sequence[int] = ()) -> LocalCell:
    values: dict[str, object] = {"adder.option": option}
    return LocalCell(component="adder", values=values, context={}, rows=[*rows], failed=[*failed])


class TestByHand:
    def test_calls_are_compared_with_the_calls_for_the_same_inputs(self, job: Any) -> None:
        """The second call reads the first one's output, so that only first calls have equal inputs.

        The incumbent adds 1, so the first outputs are larger by 1, 2 and -1. Regression test: the
        incumbent's mean was that of both calls, so that all candidates lost what the reward gives
        to larger inputs.
        """
        local = gains(job, repeated=True)
        learn(local)
        cells = [cell(option, 0, 1) for option in (1, 2, 3, 0)]
        asyncio.run(local.restore(cells))
        found = {each.values["adder.option"]: each.gain for each in local.observations(cells)}
        assert found == {2: 1.0, 3: 2.0, 0: -1.0}

    def test_a_failed_call_is_the_worst_of_its_example(self, job: Any) -> None:
        """Option 3 fails for 7 and loses as much as option 0, the worst of the others: -1; for 5 it adds 2."""
        local = gains(job)
        learn(local)
        cells = [cell(1, 5, 7), cell(0, 5, 7), cell(3, 5, 7, failed=[7])]
        asyncio.run(local.restore(cells))
        found = {each.values["adder.option"]: each.gain for each in local.observations(cells)}
        assert found == {0: -1.0, 3: pytest.approx((2 - 1) / 2)}

    def test_the_slope_is_the_gain_of_the_score_per_unit_of_the_reward(self, job: Any) -> None:
        """Per unit of the output, the scores differ by 0.27 on average; there is hardly any noise."""
        local = gains(job)
        learn(local)
        slope, variance = local.slopes["adder"]
        x, y = np.array([1, 2, 3, 0]), np.array([0.3, 0.6, 0.9, 0.1])
        assert slope == pytest.approx(np.polyfit(x, y, 1)[0], rel=0.05)
        assert variance < 1e-3
        assert local.trust > 0.99


class TestTrust:
    def test_none_in_a_reward_that_scores_contradict(self, job: Any) -> None:
        local = gains(job)
        learn(local, {option: 1 - score for option, score in OPTIONS.items()})
        assert local.slopes == {}
        assert local.trust == 0

    def test_none_before_several_outputs_of_eight_examples(self, job: Any) -> None:
        local = gains(job)
        runs: list[GlobalRuns] = [
            ({"adder.option": o}, dict.fromkeys(range(7), s)) for o, s in OPTIONS.items()
        ]
        asyncio.run(local.learn(runs))
        assert local.trust == 0

    def test_none_where_nothing_follows(self, job: Any) -> None:
        """The last component costs as much alone as the run from there on."""
        system = System("alone", outputs={"y": Adder()(x=Input("x", int))})
        task = job(system, custom(lambda outputs, example: 0.0), [Example("e", {"x": 1})]).task
        assert RewardGuide(learning(REWARDS)).prepare(task, task.train) is None


@pytest.mark.parametrize(
    ("fit", "is_used"), [(None, True), (lambda *_, **__: None, False), (FitToShuffled(), None)]
)
def test_a_relay_is_searched_with_local_evaluations_where_rewards_tell_something(
    job: Any, fit: Any, is_used: bool | None
) -> None:
    """A reward that was fitted to shuffled scores may be used a little; it must not cost the result."""
    world = Relay(4, 1)
    made = job(
        world.system(), world, world.examples(80), keys=("a.option",), share=100, minibatch=8
    )
    how = {} if fit is None else {"fit": fit}
    _, proposal = made.run(guided_search(REWARDS, CandidateSources(()), **how))
    facts = proposal.facts["local"]["a"]
    assert facts["price"] < facts["global_price"]
    if is_used is not None:
        assert (facts["evaluations"] > 0) is is_used
        assert (facts["trust"] > 0.5) is is_used
    entries = RunRewards.load(made.task, learning(REWARDS)).buffer.of("a")
    assert entries  # the draws of the search are kept for later jobs
    assert made.spent <= 100


@pytest.mark.slow
def test_beside_a_writer_a_step_takes_at_most_as_many_local_runs_as_whole_ones(
    job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer reads whole runs; without one, a step of trusted rewards takes more local ones."""
    world, steps = Relay(4, 2), list[tuple[float, float]]()
    evaluate = Search.evaluate_locally

    async def watched(search: Search) -> None:
        before = search.task.scorer.runs_left
        await evaluate(search)
        steps.append((before - search.task.scorer.runs_left, search.spent))

    monkeypatch.setattr(Search, "evaluate_locally", watched)
    most = {}
    for name, sources in (
        ("none", CandidateSources(())),
        ("writer", CandidateSources(("reflect",))),
    ):
        steps.clear()
        made = job(world.system(), world, world.examples(80), share=200, minibatch=8)
        made.run(guided_search(REWARDS, sources))
        most[name] = max(local / whole for local, whole in steps)
    assert 0 < most["writer"] <= 1 < most["none"]
