"""Local optimization: rewards learned in a run, candidates scored alone, fallbacks, and schedulers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from scipy import stats

from benchmarks.simulated.systems import SHAPES, Simulated
from compound import LLM, Choice, Demos, Example, Executor, Function, Input, Port, System, Text
from compound.core.errors import DataError, TooManyFailures
from compound.core.narrowing import entry
from compound.execution.cache import MemoryCache
from compound.ext import CallContext, Metric, Operation
from compound.metrics import custom
from compound.optimizers.optimas.local import Collecting, boltzmann, collect_pairs
from compound.optimizers.optimas.methods import OptimasSettings
from compound.optimizers.search.rewarding import RewardMemory, RunRewards
from compound.optimizers.search.sources import CandidateSources
from compound.rewards.alignment import Accuracy
from compound.rewards.candidates import Candidate, Sampling
from compound.rewards.features import FeatureMap, NoBackbone, Template
from compound.rewards.fit import FittedRewards
from compound.rewards.heads import MIN_INPUTS, Head
from compound.rewards.model import LocalReward, RewardModel
from compound.rewards.pairs import Draw, collect, expected_cost
from compound.testing import ScriptedLM
from optimas_settings import guided_search, learning, offline_rewards, optimas

REWARDS = optimas(model="none", min_rollouts=1, max_rollouts=2, level=1)
EDITS = CandidateSources(("edits",))


def keys_of(component: str, system: System) -> tuple[str, ...]:
    return tuple(key for key in system.parameters if key.startswith(f"{component}."))


class Slow(Operation):
    """Says its option and its input, after a while that has nothing to do with either."""

    inputs: Mapping[str, Port] = {"x": Port(int)}
    outputs = {"y": Port(str)}  # noqa: RUF012
    version = "1"
    settings = {"option": Choice(*range(6))}  # noqa: RUF012
    cacheable = True

    def __init__(self, name: str = "slow") -> None:
        self.name = name

    async def run(
        self, inputs: Mapping[str, Any], values: Mapping[str, Any], call: CallContext
    ) -> Any:
        await asyncio.sleep(float(np.random.default_rng().random()) * 0.005)
        return {"y": f"{values['option']} {inputs['x']}"}


class Broken(Slow):
    async def run(
        self, inputs: Mapping[str, Any], values: Mapping[str, Any], call: CallContext
    ) -> Any:
        if values["option"] == 0:
            raise RuntimeError("as it was")
        return await super().run(inputs, values, call)


class TestBoltzmann:
    def test_it_draws_in_proportion(self) -> None:
        """Thousands of draws against softmax of reward / temperature."""
        rewards, temperature = [0.0, 0.5, 1.0], 0.7
        rng = np.random.default_rng(0)
        counts = Counter(boltzmann(rewards, temperature, rng) for _ in range(3000))
        weights = np.exp(np.array(rewards) / temperature)
        expected = 3000 * weights / weights.sum()
        assert stats.chisquare([counts[i] for i in range(3)], expected).pvalue > 1e-3

    def test_without_temperature_it_is_the_best(self) -> None:
        assert boltzmann([1.0, 3.0, 2.0], 0.0, np.random.default_rng(0)) == 1


class TestGuidedSearch:
    @pytest.mark.slow
    @pytest.mark.parametrize("shape", SHAPES)
    def test_every_component_finds_its_best_option(self, job: Any, shape: str) -> None:
        """Noise-free and without interaction: what is best locally is best."""
        world = Simulated(shape, noise=0.0, options=4, seed=1)
        system = world.system()
        best, _ = world.optimum()
        for name in world.names:
            made = job(system, world, world.examples(40), keys=keys_of(name, system))
            _, proposal = made.run(guided_search(REWARDS, EDITS))
            wanted = {} if best[name] == 0 else {f"{name}.option": best[name]}
            assert proposal.values == wanted

    @pytest.mark.parametrize(
        ("metric", "reason"),
        [
            (custom(lambda o, e: 0.5), "all its outputs led to the same score"),
            (
                custom(lambda o, e: 0.5 if e.id == "none" else 0.25),
                "all its outputs led to the same score",
            ),
        ],
    )
    def test_a_constant_metric_is_said_to_be_one(
        self, job: Any, metric: Metric, reason: str
    ) -> None:
        system = System("slow", outputs={"y": Slow()(x=Input("x", int))})
        made = job(system, metric, [Example(f"e{i}", {"x": i}) for i in range(20)])
        _, proposal = made.run(offline_rewards(REWARDS, EDITS))
        assert reason in proposal.note
        assert proposal.values == {}

    def test_another_systems_buffer_is_refused_and_nothing_is_spent(self, job: Any) -> None:
        world = Simulated("chain", noise=0.0)
        made = job(world.system(), world, world.examples(20), keys=("a.option",))
        made.task.context.memory.append({"system": "another", "iteration": 1, "draw": draw_json()})
        with pytest.raises(DataError, match="belongs to another system"):
            made.run(guided_search(REWARDS, EDITS))
        assert made.spent == 0

    def test_prompts_are_searched_by_the_local_reward_of_what_they_make(self, job: Any) -> None:
        """A model that is brief when told so; the metric likes brevity, further down the line."""

        def answers(message: str) -> str:
            brief = any(word in message.lower() for word in ("brief", "few words", "short"))
            return "yes" if brief else "well that is a long story to tell"

        def shout(text: str) -> str:
            return text.upper()

        talker = LLM("talker", prompt=Text("Answer."), demos=Demos(max=0), lm="lm")
        system = System(
            "talk", outputs={"y": Function("shout", shout)(text=talker(q=Input("q", str)))}
        )
        brief = custom(lambda o, e: 1.0 / len(o["y"].split()))
        rows = [Example(f"e{i}", {"q": f"question {i}"}) for i in range(40)]
        made = job(
            system, brief, rows, lambda: ScriptedLM(answers), keys=("talker.prompt", "talker.demos")
        )
        _, proposal = made.run(guided_search(REWARDS, EDITS))
        assert answers(proposal.values["talker.prompt"]) == "yes"

    def test_an_incumbent_that_always_fails_is_replaced(self, job: Any) -> None:
        system = System("broken", outputs={"y": Broken()(x=Input("x", int))})
        rows = [Example(f"e{i}", {"x": i}) for i in range(20)]
        made = job(system, custom(lambda o, e: int(o["y"][0]) / 5), rows, share=200)
        _, proposal = made.run(guided_search(REWARDS, EDITS))
        assert proposal.values == {"slow.option": 5}

    @pytest.mark.parametrize("share", [10.0, 30.0, 60.0, 120.0])
    def test_it_keeps_to_its_share(self, job: Any, share: float) -> None:
        world = Simulated("five", noise=0.2, options=12, common=False)
        for name in ("a", "e"):
            made = job(
                world.system(),
                world,
                world.examples(80),
                keys=keys_of(name, world.system()),
                share=share,
            )
            made.run(guided_search(REWARDS, EDITS))
            assert made.spent <= share + 1e-6


class TestWaves:
    def made(self, job: Any, share: float) -> Any:
        """What `rare` says matters for one input of ten; what `often` says always does."""
        x = Input("x", int)
        rare, often = Slow("rare")(x=x), Slow("often")(x=x)
        system = System("two", outputs={"rare": rare, "often": often})

        def score(outputs: Mapping[str, Any], example: Example) -> float:
            known = float(outputs["rare"][0]) if entry(example.inputs, "x", int) % 10 == 0 else 0.0
            return (float(outputs["often"][0]) + known) / 10

        return job(
            system, custom(score), [Example(f"e{i}", {"x": i}) for i in range(60)], share=share
        )

    def inputs(self, job: Any, share: float) -> dict[str, int]:
        made = self.made(job, share)
        made.run(offline_rewards(replace_settings(sufficient_accuracy=1.01), EDITS))
        entries = RunRewards.load(made.task, learning(REWARDS)).buffer.entries
        assert made.spent <= share
        return {
            name: len({e.draw.example for e in entries if e.draw.component == name})
            for name in ("rare", "often")
        }

    def test_one_whose_pairs_cost_more_than_is_left_gets_no_more(self, job: Any) -> None:
        assert self.inputs(job, 60.0) == {"rare": MIN_INPUTS, "often": 20}

    def test_with_enough_runs_all_go_on(self, job: Any) -> None:
        assert self.inputs(job, 500.0) == {"rare": 20, "often": 20}

    def test_with_few_runs_the_cheapest_come_first(self, job: Any) -> None:
        world = Simulated(
            "chain", noise=0.0, options=6
        )  # three draws each, and what follows: 1, 7 / 3, 11 / 3
        made = job(world.system(), world, world.examples(60), share=12)
        made.run(offline_rewards(REWARDS, EDITS))
        entries = RunRewards.load(made.task, learning(REWARDS)).buffer.entries
        assert {entry.draw.component for entry in entries} == {"c"}


def test_the_offline_phase_goes_on_in_waves_that_double(job: Any) -> None:
    """One more time as many inputs while a reward is not surely good, up to the settings' number."""
    world = Simulated("chain", noise=0.3, options=12, common=False)
    made = job(world.system(), world, world.examples(60))
    states, _ = made.run(
        offline_rewards(replace_settings(inputs=30, sufficient_accuracy=1.01), EDITS)
    )
    assert [state["inputs"] for state in states] == [0, 4, 8, 16, 30]
    surely = job(world.system(), world, world.examples(60))
    states, _ = surely.run(
        offline_rewards(replace_settings(inputs=30, sufficient_accuracy=0.5), EDITS)
    )
    assert states[-1]["inputs"] < 30


def test_a_few_inputs_that_fail_do_not_end_the_run(job: Any) -> None:
    """Fresh inputs are few, one perhaps: all may fail by chance. When a minibatch fails, something is broken."""
    rows = [Example(f"e{i}", {"x": i}) for i in range(20)]
    made = job(
        System("broken", outputs={"y": Broken()(x=Input("x", int))}), custom(lambda o, e: 1.0), rows
    )
    state = Collecting(iteration=1, proposals={})
    rewards = RunRewards.load(made.task, learning(REWARDS))
    assert asyncio.run(collect_pairs(rewards, ["slow"], state, rows[:2])) == "0 pairs from 2 inputs"
    with pytest.raises(TooManyFailures, match="as it was"):
        asyncio.run(collect_pairs(rewards, ["slow"], state, rows[:8]))


def test_d2_fresh_inputs_are_fresh(job: Any) -> None:
    """D2: one seed for every iteration drew the same examples each time."""
    world = Simulated("chain")
    examples = world.examples(10)
    rewards = RunRewards.load(job(world.system(), world, examples).task, learning(REWARDS))
    drawn: list[str] = []
    for count in (4, 3, 3):
        drawn += [example.id for example in rewards.fresh(examples, count)]
        RewardMemory(inputs=len(drawn)).store(rewards.memory)
    assert sorted(drawn) == sorted(example.id for example in examples)
    assert [example.id for example in rewards.fresh(examples, 4)] == drawn[
        :4
    ]  # then from the start again


class TestSettled:
    """When the offline phase has enough pairs of a component."""

    def settled(
        self, job: Any, learned: FittedRewards, candidates: Any = None, configuration: str = ""
    ) -> bool:
        world = Simulated("chain")
        made = job(world.system(), world, world.examples(4), keys=("a.option",))
        rewards = RunRewards.load(made.task, learning(REWARDS))
        if candidates is not None:
            configuration = configuration or made.task.system.configuration.digest
            draw = Draw("a", "a", "e", configuration, {"x": 1.0}, candidates)
            rewards.buffer.add([draw], 1)
        return rewards.is_settled(learned, "a")

    def with_accuracy(self, mean: float, low: float | None) -> FittedRewards:
        features = FeatureMap(Template("a", frozenset(), {}), (), (), 0)
        head = Head(np.zeros(0), np.ones(0), np.ones(0))
        reward = LocalReward(features, head, 1.0, Accuracy(mean, low, 1.0, 9, 9))
        return FittedRewards(RewardModel("none", NoBackbone(), {"a": reward}))

    @pytest.mark.parametrize(
        ("low", "settled"),
        [
            (REWARDS.reward.sufficient_accuracy, True),
            (REWARDS.reward.sufficient_accuracy - 0.01, False),  # perhaps not that good
            (None, False),  # of one input
        ],
    )
    def test_a_reward_is_settled_when_surely_good(
        self, job: Any, low: float | None, settled: bool
    ) -> None:
        assert self.settled(job, self.with_accuracy(0.97, low)) is settled

    def test_without_a_reward_it_is_settled_when_it_always_says_the_same(self, job: Any) -> None:
        none = FittedRewards(RewardModel("none", NoBackbone(), {}), {"a": "why"})
        one, other = Candidate({"y": 1.0}, (1.0,)), Candidate({"y": 2.0}, (1.0,))
        assert self.settled(job, none) is False  # nothing was drawn yet
        assert self.settled(job, none, (one,)) is True
        assert (
            self.settled(job, none, (one,), "another") is False
        )  # here it might read other things
        assert self.settled(job, none, (one, other)) is False  # another input may tell them apart


def replace_settings(**changes: Any) -> OptimasSettings:
    return optimas(REWARDS, **changes)


def draw_json() -> dict[str, Any]:
    return {
        "component": "a",
        "address": "a",
        "example": "e",
        "configuration": "c",
        "inputs": {"x": 1.0},
        "candidates": [[{"y": 1.0}, [1.0], {}]],
    }


@pytest.mark.parametrize("shape", SHAPES)
def test_the_expected_cost_of_pairs_is_what_they_cost(shape: str) -> None:
    """With one rollout each and the first one part of the draw: S + (S + 1)(n - k), less what comes along."""
    world = Simulated(shape, noise=0.2, common=False)
    system = world.system()
    for name in world.names:
        executor = Executor(cache=MemoryCache())
        example = world.examples(1)[0]
        trace = executor.settle(
            asyncio.run(executor.run(system, example.inputs, example=example.id))
        )
        sampling = Sampling(samples=3, rollouts=1, max_rollouts=1)
        found = asyncio.run(
            collect(executor, system, [(example, trace)], [name], world, sampling=sampling)
        )
        assert found.system_runs == pytest.approx(
            expected_cost(system, name, sampling), abs=1 / 5 + 1e-9
        )
