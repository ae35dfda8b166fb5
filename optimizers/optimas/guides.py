"""Guides of local searches: scoring policies based on learned local rewards or on a baseline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from compound.example import Example
from compound.execution.trace import Call, Trace
from compound.optimization.method import Proposal, Task
from compound.optimizers.optimas.local_scoring import RecordedCalls, Scores
from compound.optimizers.optimas.rewarding import RunRewards
from compound.optimizers.search.prompts import is_whole, split


@dataclass(frozen=True)
class Guidance:
    """Scoring of one component's calls in one job.

    Attributes:
        scores: scores the component's calls.
        facts: numbers for the job's record.
        untrusted_reason: why the scores must not be used; ``""`` if they may be used.
        untrusted: all components whose scores must not be used.
        accuracy: the share of held-out pairs that the scores order correctly; ``None`` if unknown.
    """

    scores: Scores
    facts: Mapping[str, object] = field(default_factory=dict)
    untrusted_reason: str = ""
    untrusted: Sequence[str] = ()
    accuracy: float | None = None


class Guide(Protocol):
    """Provides the scores of local searches."""

    @property
    def collects_online(self) -> bool:
        """Whether jobs after the offline phase collect pairs from fresh inputs."""
        ...

    async def needing_pairs(self, rewards: RunRewards, components: Sequence[str]) -> list[str]:
        """Return the components for which the offline phase should collect more pairs."""
        ...

    async def finish_offline(self, rewards: RunRewards, components: Sequence[str]) -> Proposal:
        """Process the pairs of the offline phase; return a proposal that only reports them."""
        ...

    async def guidance(self, rewards: RunRewards, component: str) -> Guidance:
        """Return the current scoring of a component's calls."""
        ...

    async def recorded_calls(
        self, rewards: RunRewards, component: str, among: Sequence[str] | None = None
    ) -> RecordedCalls:
        """Return the recorded calls that candidates are scored on.

        Args:
            rewards: the rewards of the run.
            component: the component.
            among: the names of the examples to use, if given. A resumed job passes those it used before, so
                that failed runs are not repeated.
        """
        ...


@dataclass(frozen=True)
class LearnedRewards:
    """Guide based on local rewards, fitted to the pairs collected so far (OPTIMAS)."""

    collects_online: bool = True

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
        """Fit the rewards to all pairs in the buffer, and return the component's scoring."""
        learned = await rewards.learn()
        untrusted = [name for name in rewards.components if not rewards.is_trusted(learned, name)]
        distrust = rewards.untrusted_reason(learned, component) if component in untrusted else ""
        reward = learned.model.rewards_of.get(component)
        accuracy = None if reward is None else reward.accuracy.mean
        return Guidance(learned.model, rewards.facts(learned), distrust, untrusted, accuracy)

    async def recorded_calls(
        self, rewards: RunRewards, component: str, among: Sequence[str] | None = None
    ) -> RecordedCalls:
        """Return the incumbent's calls on the inputs last collected from, most of which are cached."""
        task = rewards.task
        latest = rewards.latest(split(task)[1], task.minibatch)
        examples = [example for example in latest if among is None or example.id in among]
        return RecordedCalls(task.system, await successful_calls(task, {}, examples, component))


async def successful_calls(
    task: Task, values: Mapping[str, object], examples: Sequence[Example], component: str
) -> list[tuple[Trace, Call]]:
    """Return a component's calls in runs without any failed call; such runs are cached from then on."""
    traces = await task.scorer.traces(values, examples) if examples else []
    return [(t, call) for t in traces if is_whole(t) for call in t.calls_of(component)]
