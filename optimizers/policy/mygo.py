"""MyGO: attempts that are good enough are imitated, by plain maximum likelihood, and the bar rises.

An attempt is a whole run; where it is kept, everything that trained components said in it is imitated,
planner and workers alike. Attempts go on until enough of an example's are kept, or the most are made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from compound.contracts import Example
from compound.optimizers.policy.grouping import trajectory_samples
from compound.optimizers.policy.recipe import Credited, Recipe, Work, scores_of
from compound.optimizers.policy.rollouts import Rollout
from compound.optimizers.policy.threshold import Selection, raise_threshold, select
from compound.settings import WeightSettings
from compound.system import System


@dataclass(frozen=True)
class MyGO(Recipe):
    """Progressive rejection fine-tuning."""

    @property
    def likelihood(self) -> bool:
        """It does nothing else."""
        return True

    def cost(self, work_on: int, components: int, settings: WeightSettings) -> float:
        """Return the most: every attempt at every example."""
        return work_on * settings.attempts

    async def collect(self, work: Work, examples: Sequence[Example]) -> Credited:
        """Attempt the examples; keep the attempts that reach the threshold."""
        settings, kept = work.settings, work.kept
        warming = kept.get("warmed", 0) < settings.warm_up
        system = None if settings.online else self._first(work)
        attempts = await self._first_pass(work, examples, system)
        first = scores_of([rollouts[0] for rollouts in attempts.values()])
        bar = settings.best if warming else self._raised(work, first)
        await self._more(work, attempts, system, bar)
        numbers = self._selected(work, attempts, bar).kept
        chosen = [attempts[example][number] for example in attempts for number in numbers[example]]
        samples = [
            sample.with_advantage(1.0)
            for rollout in chosen
            for sample in trajectory_samples(rollout.trace, work.trained, rollout=rollout.number)
            if rollout.trace.call(sample.address).failure is None  # what nobody read is not to be imitated
        ]
        if warming:
            kept["warmed"] = kept.get("warmed", 0) + len(chosen)
            kept.pop("policy", None)
        else:
            kept["threshold"] = bar
        made = sum(map(len, attempts.values()))
        facts = {"threshold": bar, "attempts": made, "kept": len(chosen), "warming": warming}
        return Credited(samples, first, facts)

    @staticmethod
    async def _first_pass(
        work: Work, examples: Sequence[Example], system: System | None
    ) -> dict[str, list[Rollout]]:
        """Return the first attempt at each example: what the step's threshold is raised by."""
        made = await work.sampler.attempts([(example, 0) for example in examples], system)
        return {rollout.example.id: [rollout] for rollout in made}

    def _raised(self, work: Work, first: Sequence[float]) -> float:
        """Return the threshold that the step's own attempts must reach.

        That of the step before, raised by what this step's first attempts earned. It stays where all of them
        were lost.
        """
        settings = work.settings
        before: float = work.kept.get("threshold", settings.threshold)
        if not first:
            return before
        goal = raise_threshold(before, first, supremum=settings.best, rule=self._rule(work))
        return before + settings.pace * (goal - before)

    async def _more(
        self, work: Work, attempts: dict[str, list[Rollout]], system: System | None, bar: float
    ) -> None:
        """Attempt the examples again until enough attempts of each are kept, or the most are made.

        An example that lacks some kept ones makes as many attempts at once: never one more than if it had
        made one after the other.
        """
        while lacking := self._lacking(work, attempts, bar):
            wanted = [
                (rollouts[0].example, len(rollouts) + number)
                for example, rollouts in attempts.items()
                for number in range(lacking.get(example, 0))
            ]
            for rollout in await work.sampler.attempts(wanted, system):
                attempts[rollout.example.id].append(rollout)

    def _lacking(self, work: Work, attempts: Mapping[str, Sequence[Rollout]], bar: float) -> dict[str, int]:
        """Return how many attempts each example may need, and make, to have enough of them kept."""
        selection, settings = self._selected(work, attempts, bar), work.settings
        return {
            example: min(
                settings.keep - len(selection.kept[example]), settings.attempts - len(attempts[example])
            )
            for example in selection.wanting
        }

    def _selected(self, work: Work, attempts: Mapping[str, Sequence[Rollout]], bar: float) -> Selection:
        """Return which attempts are kept, and which examples need more; a failed run is never kept."""
        rewards = {
            example: [r.score if r.trace.failure is None else -math.inf for r in rollouts]
            for example, rollouts in attempts.items()
        }
        most, keep = work.settings.attempts, work.settings.keep
        return select(rewards, bar, keep=keep, most=most, rule=self._rule(work))

    @staticmethod
    def _first(work: Work) -> System:
        """Return what attempts are made with offline: the policy after the warm-up, or the job's first."""
        keys = [f"{component}.weights" for component in work.trained]
        present = work.sampler.system.configuration
        first = work.kept.setdefault("policy", {key: present[key] for key in keys})
        return work.sampler.system.bind({**present, **first})

    @staticmethod
    def _rule(work: Work) -> str:
        """Return how the threshold rises: not at all where attempts are those of one policy."""
        return work.settings.rule if work.settings.online else "fixed"
