"""Guides of a local search: learned local rewards, or the scores of a baseline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from compound.example import Example
from compound.execution.trace import Call, Trace
from compound.optimization.method import Proposal, Task
from compound.optimizers.optimas.local_scoring import Recorded, Scores
from compound.optimizers.optimas.rewarding import RunRewards
from compound.optimizers.search.prompts import is_whole, split


@dataclass(frozen=True)
class Guidance:
    """What scores the calls of one component in one job.

    Attributes:
        scores: scores its calls.
        facts: numbers for the job's record.
        distrust: why the scores may not steer; ``""`` when they may.
        distrusted: all components whose scores may not steer, this one among them or not.
        accuracy: the part of held-out pairs that the scores order right; ``None`` where it is not known.
    """

    scores: Scores
    facts: Mapping[str, object] = field(default_factory=dict)
    distrust: str = ""
    distrusted: Sequence[str] = ()
    accuracy: float | None = None


class Guide(Protocol):
    """Where the scores of local searches come from."""

    @property
    def adapts(self) -> bool:
        """Whether every job collects pairs of fresh inputs."""
        ...

    async def unsettled(self, rewards: RunRewards, components: Sequence[str]) -> list[str]:
        """Return the components that more pairs of the offline phase would help."""
        ...

    async def opened(self, rewards: RunRewards, components: Sequence[str]) -> Proposal:
        """Take up the pairs of the offline phase; the proposal holds no values, but says what was found."""
        ...

    async def guidance(self, rewards: RunRewards, component: str) -> Guidance:
        """Return what scores the calls of a component now."""
        ...

    async def recorded(
        self, rewards: RunRewards, component: str, among: Sequence[str] | None = None
    ) -> Recorded:
        """Return the calls that candidates are scored on.

        Args:
            rewards: the run's.
            component: whose calls.
            among: names of examples. A job that was interrupted asks again for those it had: what failed is
                not run once more.
        """
        ...


@dataclass(frozen=True)
class LearnedRewards:
    """Local rewards, fitted to the pairs collected so far (OPTIMAS)."""

    adapts: bool = True

    async def unsettled(self, rewards: RunRewards, components: Sequence[str]) -> list[str]:
        """Return those whose reward is neither surely good nor has nothing to learn."""
        learned = await rewards.learn(components)
        return [name for name in components if not rewards.is_settled(learned, name)]

    async def opened(self, rewards: RunRewards, components: Sequence[str]) -> Proposal:
        """Fit and judge the rewards."""
        learned = await rewards.learn(components)
        found = [f"{name} {r.accuracy.mean:.2f}" for name, r in learned.model.rewards_of.items()]
        lacking = [f"{name}: {reason}" for name, reason in learned.missing.items()]
        ranking = [f"ranking accuracy {', '.join(found)}"] if found else []
        return Proposal({}, note="; ".join([*ranking, *lacking]), facts=rewards.facts(learned))

    async def guidance(self, rewards: RunRewards, component: str) -> Guidance:
        """Fit the rewards to what the buffer holds by now."""
        learned = await rewards.learn()
        distrusted = [name for name in rewards.components if not rewards.is_trusted(learned, name)]
        distrust = rewards.distrust(learned, component) if component in distrusted else ""
        reward = learned.model.rewards_of.get(component)
        accuracy = None if reward is None else reward.accuracy.mean
        return Guidance(learned.model, rewards.facts(learned), distrust, distrusted, accuracy)

    async def recorded(
        self, rewards: RunRewards, component: str, among: Sequence[str] | None = None
    ) -> Recorded:
        """Return the incumbent's calls on the inputs last collected from: most are in the cache."""
        task = rewards.task
        latest = rewards.latest(split(task)[1], task.minibatch)
        wanted = [example for example in latest if among is None or example.id in among]
        return Recorded(task.system, await whole_calls(task, {}, wanted, component))


async def whole_calls(
    task: Task, values: Mapping[str, object], examples: Sequence[Example], component: str
) -> list[tuple[Trace, Call]]:
    """Return a component's calls in runs without any failed call, which the cache holds from then on."""
    traces = await task.scorer.traces(values, examples) if examples else []
    return [(t, call) for t in traces if is_whole(t) for call in t.calls_of(component)]
