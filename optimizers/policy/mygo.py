"""MyGO: attempts that are good enough are imitated, by plain maximum likelihood, and the bar rises.

An attempt is a whole run; where it is kept, everything that trained components said in it is imitated,
planner and workers alike. Attempts go on until enough of an example's are kept, or the most are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from compound.contracts import Example
from compound.optimizers.policy.grouping import trajectory_samples
from compound.optimizers.policy.recipe import Credited, Work
from compound.optimizers.policy.rollouts import Rollout, Sampler
from compound.optimizers.policy.threshold import raised
from compound.settings import WeightSettings


@dataclass(frozen=True)
class MyGO:
    """Progressive rejection fine-tuning."""

    critic: bool = False
    likelihood: bool = True

    def cost(self, work_on: int, components: int, settings: WeightSettings) -> float:
        """Return the most: every attempt at every example."""
        return work_on * settings.attempts

    async def collect(self, work: Work, examples: Sequence[Example]) -> Credited:
        """Attempt the examples; keep the attempts that reach the threshold."""
        settings, kept = work.settings, work.kept
        warming = kept.get("warmed", 0) < settings.warm_up
        bar = settings.best if warming else kept.get("threshold", settings.threshold)
        attempts = await self._attempts(work, examples, bar)
        first = [rollouts[0].score for rollouts in attempts]
        chosen = [r for rollouts in attempts for r in [r for r in rollouts if good(r, bar)][: settings.keep]]
        samples = [
            sample.with_advantage(1.0)
            for rollout in chosen
            for sample in trajectory_samples(rollout.trace, work.trained, rollout=rollout.number)
        ]
        if warming:
            kept["warmed"] = kept.get("warmed", 0) + len(chosen)
        elif settings.online:
            kept["threshold"] = raised(bar, first, settings.best)
        made = [rollout for rollouts in attempts for rollout in rollouts]
        facts = {"threshold": bar, "attempts": len(made), "kept": len(chosen), "warming": warming}
        return Credited(samples, first, facts)

    async def _attempts(self, work: Work, examples: Sequence[Example], bar: float) -> list[list[Rollout]]:
        """Return each example's attempts: one at first, then as many at once as still lack."""
        settings, sampler = work.settings, self._sampler(work)
        found: list[list[Rollout]] = [[r] for r in await sampler.runs(examples, [0])]
        for number in range(1, settings.attempts):
            lacking = [i for i, made in enumerate(found) if sum(good(r, bar) for r in made) < settings.keep]
            if not lacking:
                break
            more = await sampler.runs([examples[i] for i in lacking], [number])
            for i, rollout in zip(lacking, more, strict=True):
                found[i].append(rollout)
        return found

    @staticmethod
    def _sampler(work: Work) -> Sampler:
        """Return who attempts: the present weights, or offline those the job began with."""
        return work.sampler if work.settings.online else replace(work.sampler, system=work.task.system)


def good(rollout: Rollout, bar: float) -> bool:
    """Return whether an attempt is worth imitating."""
    return rollout.trace.failure is None and rollout.score >= bar
