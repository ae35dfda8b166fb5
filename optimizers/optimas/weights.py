"""Weights by local rewards (OPTIMAS): a component's answers are drawn again and scored by its own reward.

Nothing that depends on the component runs: a step costs calls of this component alone. The inputs are those
of the incumbent's runs, most of which are in the cache. GRPO compares the answers to one input; PPO has a
critic.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from compound.concurrency.threads import compute
from compound.example import Example
from compound.execution.trace import Call, Trace
from compound.optimization.bounds import JobBound, Outlook
from compound.optimization.method import Progress, Proposal, Task
from compound.optimization.scorer import TRAIN_SAMPLE
from compound.optimizers.optimas.guides import Guide, LearnedRewards
from compound.optimizers.optimas.local_scoring import Scores, run_alone
from compound.optimizers.optimas.rewarding import RunRewards, tunable
from compound.optimizers.search.prompts import is_whole
from compound.optimizers.weights.credit.advantages import advantages
from compound.optimizers.weights.credit.grouping import call_samples
from compound.optimizers.weights.learner.values import CriticSettings
from compound.optimizers.weights.recipes.mmgrpo import MMGRPO, GRPOSettings
from compound.optimizers.weights.recipes.ppo import PPO, PPOSettings, estimated
from compound.optimizers.weights.recipes.recipe import Credited, PolicyRecipe, RecipeContext
from compound.optimizers.weights.recipes.rollouts import is_lost
from compound.optimizers.weights.training import WeightTraining
from compound.rewards.settings import RewardLearning
from compound.settings.choices import OneOf, or_name

WORSE = 1.0  # a failed answer scores as much less than the worst of the others


class LocalTrainingChoice(OneOf):
    """How the weights of one component are trained by its local reward; `ppo` by default."""

    ppo: PPOSettings | None = None
    """A critic estimates the advantages of answers."""
    grpo: GRPOSettings | None = None
    """The answers to one input are compared with each other."""

    @property
    def settings(self) -> PPOSettings | GRPOSettings:
        """The settings of the algorithm that was chosen."""
        if self.grpo is not None:
            return self.grpo
        return PPOSettings() if self.ppo is None else self.ppo


if TYPE_CHECKING:
    LocalTrainingField = LocalTrainingChoice
else:
    LocalTrainingField = or_name(LocalTrainingChoice)


@dataclass(frozen=True)
class LocalDraws(PolicyRecipe):
    """Answers of one component, scored by its local reward.

    Attributes:
        settings: GRPO compares the answers to one input, PPO has a critic.
        scores: the local rewards.
        share: what part of a system run one answer is, about.
    """

    settings: PPOSettings | GRPOSettings
    scores: Scores
    share: float = 1.0

    @property
    def critic(self) -> CriticSettings | None:
        """The settings of the value head, where there is one."""
        return self.settings.critic if isinstance(self.settings, PPOSettings) else None

    @property
    def local(self) -> bool:
        """They are this component's."""
        return True

    def cost(self, examples: int, components: int) -> float:
        """Return the runs whose inputs are read, of which most are in the cache, and the answers."""
        return examples * (1.0 + self.settings.rollouts.runs * self.share)

    def evaluation_cost(self, examples: int) -> float:
        """Return the runs whose inputs are read, of which most are in the cache, and an answer to each."""
        return examples * (1.0 + self.share)

    async def evaluate(
        self, context: RecipeContext, values: Mapping[str, Any], examples: Sequence[Example]
    ) -> list[float]:
        """Return the local reward of an answer to each input that the component has on held-out examples."""
        (component,) = context.trained
        recorded = self._calls(await context.task.scorer.traces({}, examples), component)
        jobs = [((trace, call, TRAIN_SAMPLE), values_of(context, component)) for trace, call in recorded]
        answered = await run_alone(context.task.context, context.task.system, jobs)
        found = [call for call in answered if not is_lost(call.failure)]
        return await compute(self._rewards, component, found)

    @staticmethod
    def _calls(traces: Sequence[Trace], component: str) -> list[tuple[Trace, Call]]:
        """Return the component's calls in the incumbent's runs."""
        return [(trace, call) for trace in traces if is_whole(trace) for call in trace.calls_of(component)]

    async def collect(self, context: RecipeContext, examples: Sequence[Example]) -> Credited:
        """Draw answers to the inputs that the component has in the incumbent's runs.

        Raises:
            TooManyFailures: too many of the runs and the answers were lost.
        """
        (component,) = context.trained
        traces = await context.task.scorer.traces({}, examples)
        context.sampler.count([trace.failure if is_lost(trace.failure) else None for trace in traces])
        recorded = self._calls(traces, component)
        settings = {**context.sampler.rules.settings.get(component, {}), **values_of(context, component)}
        jobs = [
            ((trace, call, context.sampler.index(number)), settings)
            for trace, call in recorded
            for number in range(self.settings.rollouts.runs)
        ]
        answered = await run_alone(context.task.context, context.task.system, jobs)
        context.sampler.count([call.failure for call in answered])
        made = [(job, call) for job, call in zip(jobs, answered, strict=True) if not is_lost(call.failure)]
        rewards = await compute(self._rewards, component, [call for _, call in made])
        samples = [
            sample
            for (((trace, _, number), _), call), reward in zip(made, rewards, strict=True)
            for sample in call_samples(
                call, trace.example, reward, rollout=number, group=(trace.example, call.address)
            )
        ]
        if isinstance(self.settings, PPOSettings):
            valued, expected = await estimated(context, self.settings.critic, samples)
            return Credited(valued, rewards, expected)
        trained, facts = advantages(samples, self.settings.scale)
        return Credited(trained, rewards, asdict(facts))

    def _rewards(self, component: str, calls: Sequence[Call]) -> list[float]:
        """Return the local reward of each call."""
        good = [call for call in calls if call.failure is None]
        found = self.scores.rewards(component, [(c.inputs, c.outputs) for c in good]).tolist() if good else []
        worst = min(found, default=0.0) - WORSE
        given = iter(found)
        return [next(given) if call.failure is None else worst for call in calls]


def values_of(context: RecipeContext, component: str) -> dict[str, Any]:
    """Return the present weights of a component, as a setting of its calls."""
    return {"weights": context.sampler.system.configuration[f"{component}.weights"]}


@dataclass(frozen=True)
class LocalTraining:
    """Trains one component's weights by its local reward, or by the global one where that may not steer.

    Attributes:
        learning: how pairs are collected and rewards learned.
        training: how weights are trained.
        guide: what scores calls.
    """

    learning: RewardLearning
    training: LocalTrainingChoice
    guide: Guide = field(default_factory=LearnedRewards)

    def bound(self, outlook: Outlook) -> JobBound:
        """Declare that no model is asked besides running the system."""
        return JobBound()

    async def propose(self, task: Task) -> AsyncIterator[Progress | Proposal]:
        """Train as long as the job's share lasts."""
        (component,) = tunable(task)
        guidance = await self.guide.guidance(RunRewards.open(task, self.learning), component)
        settings = self.training.settings
        counted = sum(c.cacheable for c in task.system.components.values())
        recipe: PolicyRecipe = LocalDraws(settings, guidance.scores, 1 / max(1, counted))
        if guidance.distrust:
            recipe = PPO(settings) if isinstance(settings, PPOSettings) else MMGRPO(settings)
        facts = {**guidance.facts, "component": component, "steered": not guidance.distrust}
        facts["why"] = guidance.distrust
        async for event in WeightTraining(recipe).propose(task):
            yield replace(event, facts={**facts, **event.facts}) if isinstance(event, Proposal) else event
