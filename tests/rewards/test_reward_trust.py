"""Trust in a local reward: it trains weights only if it is better than chance on inputs that it did not see."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from compound import Function, Input, System
from compound.evaluation.statistics import binomial_tail
from compound.metrics import custom
from compound.optimizers.search.rewarding import RunRewards
from compound.rewards.alignment import Accuracy, Evidence, evidence
from compound.rewards.buffer import PairBuffer
from compound.rewards.candidates import Candidate
from compound.rewards.features import FeatureMap, NoBackbone, Template
from compound.rewards.fit import FittedRewards
from compound.rewards.heads import Head, fit
from compound.rewards.model import LocalReward, RewardModel
from compound.rewards.pairs import Draw
from compound.rewards.settings import BackboneSettings, RewardLearning, RewardSettings

LEVEL = RewardSettings().trust_level
METRIC = custom(lambda outputs, example: 0.0)


def outputs(rng: np.random.Generator, inputs: int, skill: float, columns: int) -> Any:
    """Return pairs of three outputs for each input; their order depends on the features by `skill`."""
    chosen, rejected, names = [], [], []
    for i in range(inputs):
        rows = rng.normal(size=columns) + rng.normal(size=(3, columns))
        values = skill * rows[:, 0] + rng.normal(size=3)
        for a in range(3):
            for b in range(a):
                better, worse = (a, b) if values[a] > values[b] else (b, a)
                chosen.append(rows[better])
                rejected.append(rows[worse])
                names.append(f"e{i}")
    return np.array(chosen), np.array(rejected), names


def passes(inputs: int, skill: float, columns: int, seed: int) -> bool:
    """Return whether a reward of such outputs is trusted."""
    chosen, rejected, names = outputs(
        np.random.default_rng((inputs, columns, seed)), inputs, skill, columns
    )
    found = evidence(fit(chosen, rejected, names, tested=True, seed=seed).forward, names)
    return found.lower_limit(LEVEL) > 0.5


class TestGate:
    """Regression tests: useless rewards steered in a third to two thirds of cases with 4 to 12 inputs."""

    @pytest.mark.slow
    @pytest.mark.parametrize(("inputs", "columns"), [(8, 1), (12, 10)])
    def test_features_without_information_pass_at_most_at_the_level(
        self, inputs: int, columns: int
    ) -> None:
        cases = 100
        passed = sum(passes(inputs, 0.0, columns, seed) for seed in range(cases))
        assert binomial_tail(passed, cases, LEVEL) > 0.01  # no more than chance allows at the level


def written(text: str) -> str:
    return text


SYSTEM = System("one", outputs={"y": Function("a", written)(text=Input("text", str))})


def filled(inputs: int, *, informative: bool) -> PairBuffer:
    """Return one pair per input; the longer output is better, or as often the shorter one."""
    buffer = PairBuffer(SYSTEM.identity)
    for i in range(inputs):
        texts = ("word " * 9, "word") if informative or i % 2 else ("word", "word " * 9)
        found = tuple(
            Candidate({"output": text}, (float(n == 0),), certain=True)
            for n, text in enumerate(texts)
        )
        buffer.add([Draw("a", "a", f"e{i}", "digest", {"text": f"text {i}"}, found)], 1)
    return buffer


class TestTrust:
    """When weights are trained by a local reward, and what is recorded if they are not."""

    def rewards(self, job: Any, **settings: Any) -> RunRewards:
        backbone = BackboneSettings(model="none")
        learning = RewardLearning(backbone=backbone, reward=RewardSettings(**settings))
        return RunRewards.load(job(SYSTEM, METRIC, []).task, learning)

    def learned(self, accuracy: float, found: Evidence | None) -> FittedRewards:
        features = FeatureMap(Template("a", frozenset(), {}), (), (), 0)
        head = Head(np.zeros(0), np.ones(0), np.ones(0))
        reward = LocalReward(
            features, head, 1.0, Accuracy(accuracy, 0.5, 1.0, 9, 9), evidence=found
        )
        return FittedRewards(RewardModel("none", NoBackbone(), {"a": reward}))

    @pytest.mark.parametrize(
        ("accuracy", "found", "reason"),
        [
            (0.8, Evidence(12, 4), ""),
            (
                0.8,
                Evidence(11, 5),
                "not significantly better than chance: it orders 11 of 16 held-out inputs",
            ),
            (
                1.0,
                Evidence(4, 0),
                "not significantly better than chance: it orders 4 of 4 held-out inputs",
            ),
            (0.59, Evidence(12, 4), "orders only 59% of held-out pairs correctly"),
            (1.0, None, "not significantly better than chance"),
        ],
    )
    def test_it_needs_significance_and_accuracy(
        self, job: Any, accuracy: float, found: Evidence | None, reason: str
    ) -> None:
        rewards, learned = self.rewards(job), self.learned(accuracy, found)
        assert reason in rewards.untrusted_reason(learned, "a")
        assert bool(rewards.untrusted_reason(learned, "a")) == bool(reason)

    def test_a_missing_reward_is_not_trusted_and_the_reason_is_recorded(self, job: Any) -> None:
        none = FittedRewards(RewardModel("none", NoBackbone(), {}), {"a": "it was never called"})
        rewards = self.rewards(job)
        assert rewards.untrusted_reason(none, "a") == "it was never called"

    @pytest.mark.parametrize(("inputs", "informative"), [(20, True), (6, True), (40, False)])
    def test_weights_are_guided_by_rewards_that_pass(
        self, job: Any, inputs: int, informative: bool
    ) -> None:
        """The guide of weight training fits and tests the reward on the pairs of the run."""
        rewards = self.rewards(job)
        rewards.buffer.add(
            [entry.draw for entry in filled(inputs, informative=informative).entries], 1
        )
        guidance = asyncio.run(rewards.guidance("a"))
        assert (guidance.untrusted == "") == (inputs == 20)
