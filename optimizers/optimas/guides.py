"""Scoring policies of one component's calls: learned local rewards, or a baseline's scores."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from compound.example import CallValues
from compound.optimization.method import Proposal
from compound.optimizers.optimas.rewarding import RunRewards
from compound.rewards.model import Vector


class Scores(Protocol):
    """Scores calls of a component: `compound.rewards.model.RewardModel`, or a baseline."""

    def rewards(self, component: str, calls: Sequence[CallValues]) -> Vector:
        """Return one number per (inputs, outputs); higher is better."""
        ...


@dataclass(frozen=True)
class Guidance:
    """Scoring of one component's calls in one job.

    Attributes:
        scores: scores the component's calls.
        facts: numbers for the job's record.
        unusable: why there are no scores; ``""`` if there are.
        examples: the ids of the examples whose calls have scores; ``None`` for all examples.
        untrusted: why the scores must not replace the global reward in training; ``""`` if they may.
    """

    scores: Scores
    facts: Mapping[str, object] = field(default_factory=dict)
    unusable: str = ""
    untrusted: str = ""
    examples: Collection[str] | None = None


class Guide(Protocol):
    """Provides the scores of calls, from the pairs collected so far."""

    async def needing_pairs(self, rewards: RunRewards, components: Sequence[str]) -> list[str]:
        """Return the components for which the offline phase should collect more pairs."""
        ...

    async def finish_offline(self, rewards: RunRewards, components: Sequence[str]) -> Proposal:
        """Process the pairs of the offline phase; return a proposal that only reports them."""
        ...

    async def guidance(self, rewards: RunRewards, component: str) -> Guidance:
        """Return the current scoring of a component's calls."""
        ...

    def configuration(self, rewards: RunRewards) -> Mapping[str, object]:
        """Return the configuration of the other components, under which the scores apply."""
        ...


@dataclass(frozen=True)
class LearnedRewards:
    """Guide based on local rewards, fitted to the pairs collected so far (OPTIMAS)."""

    async def needing_pairs(self, rewards: RunRewards, components: Sequence[str]) -> list[str]:
        """Return the components whose reward is not settled yet."""
        learned = await rewards.learn(components)
        return [name for name in components if not rewards.is_settled(learned, name)]

    async def finish_offline(self, rewards: RunRewards, components: Sequence[str]) -> Proposal:
        """Fit the rewards, and report their ranking accuracy."""
        learned = await rewards.learn(components)
        accuracies = [f"{name} {r.accuracy.mean:.2f}" for name, r in learned.model.rewards_of.items()]
        missing = [f"{name}: {reason}" for name, reason in learned.missing.items()]
        ranking = [f"ranking accuracy {', '.join(accuracies)}"] if accuracies else []
        return Proposal({}, note="; ".join([*ranking, *missing]), facts=rewards.facts(learned))

    async def guidance(self, rewards: RunRewards, component: str) -> Guidance:
        """Fit the rewards to all pairs in the buffer, and test that the component's may be trusted."""
        learned = await rewards.learn(tested=True)
        missing = "" if component in learned.model.rewards_of else learned.missing.get(component, "no pairs")
        untrusted = rewards.untrusted_reason(learned, component)
        return Guidance(learned.model, rewards.facts(learned), missing, untrusted)

    def configuration(self, rewards: RunRewards) -> Mapping[str, object]:
        """Return the current configuration."""
        return rewards.task.system.configuration.to_json()
