"""Weight training of single components by their local rewards, where these can be trusted."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import ClassVar

from compound.optimization.method import JobPlan, PlannedJob, Progress, Proposal, Task
from compound.optimizers.search.rewarding import RunRewards, tunable
from compound.optimizers.weights.learner.samples import SECTION
from compound.optimizers.weights.recipes.local_draws import LocalDraws, LocalTrainingChoice
from compound.optimizers.weights.recipes.mmgrpo import MMGRPO
from compound.optimizers.weights.recipes.ppo import PPO, PPOSettings
from compound.optimizers.weights.recipes.recipe import PolicyRecipe
from compound.optimizers.weights.training import WeightTraining
from compound.rewards.settings import RewardLearning


@dataclass(frozen=True)
class LocalTraining:
    """Optimizer that trains the weights of one component by its local reward, if that can be trusted.

    Otherwise the component is trained by the global reward.

    Attributes:
        learning: settings of pair collection and reward learning.
        training: the algorithm and its settings.
        scoring: scores the calls of the component.
        section: the path of the training settings, for error messages.
    """

    requires: ClassVar[tuple[str, ...]] = ("torch", "transformers", "peft")

    learning: RewardLearning
    training: LocalTrainingChoice
    scoring: type[RunRewards] = RunRewards
    section: str = SECTION

    def plan(self, job: PlannedJob) -> JobPlan:
        """Return no requests: the job sends none except the calls of the system."""
        return JobPlan()

    async def propose(self, task: Task) -> AsyncIterator[Progress | Proposal]:
        """Train until all steps are made or the job's share of the budget is used up."""
        (component,) = tunable(task)
        guidance = await self.scoring.load(task, self.learning).guidance(component)
        settings = self.training.settings
        counted = sum(c.cacheable for c in task.system.components.values())
        recipe: PolicyRecipe = LocalDraws(settings, guidance.scores, 1 / max(1, counted))
        if guidance.untrusted:
            recipe = PPO(settings) if isinstance(settings, PPOSettings) else MMGRPO(settings)
        facts = {**guidance.facts, "component": component, "steered": not guidance.untrusted}
        facts["why"] = guidance.untrusted
        async for event in WeightTraining(recipe, section=self.section).propose(task):
            yield (
                replace(event, facts={**facts, **event.facts})
                if isinstance(event, Proposal)
                else event
            )
