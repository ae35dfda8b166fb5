"""Weight training by local rewards (OPTIMAS): resample one component's answers and score them locally.

Downstream components do not run, so a step costs only calls of the trained component. The inputs
come from runs of the incumbent, most of which are cached. GRPO compares the answers to one input;
PPO uses a critic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from compound.core.example import Example
from compound.core.threads import compute
from compound.execution.executor import gather_ordered
from compound.execution.trace import Call, Trace
from compound.graph.system import System
from compound.optimization.method import JobContext
from compound.optimization.scorer import TRAIN_SAMPLE
from compound.optimization.settings.base import OneOf, or_name
from compound.optimizers.search.proposers.demos import is_whole
from compound.optimizers.weights.credit import advantages, call_samples
from compound.optimizers.weights.recipes.mmgrpo import GRPOSettings
from compound.optimizers.weights.recipes.ppo import (
    LocalPPOSettings,
    PPOSettings,
    estimate_advantages,
)
from compound.optimizers.weights.recipes.recipe import CreditedSamples, PolicyRecipe, RecipeContext
from compound.optimizers.weights.recipes.rollouts import is_lost
from compound.rewards.model import ScoreCalls

Place = tuple[Trace, Call, int]  # a recorded call, and the index of the sample to draw

FAILURE_MARGIN = 1.0  # a failed answer scores this much less than the worst of the other answers


class LocalTrainingChoice(OneOf):
    """The algorithm that trains the weights of one component by its local reward; `ppo` by default."""

    ppo: LocalPPOSettings | None = None
    """PPO: a critic estimates the advantages of answers."""
    grpo: GRPOSettings | None = None
    """GRPO: the answers to one input are compared with each other."""

    @property
    def settings(self) -> PPOSettings | GRPOSettings:
        """The settings of the selected algorithm."""
        if self.grpo is not None:
            return self.grpo
        return LocalPPOSettings() if self.ppo is None else self.ppo


if TYPE_CHECKING:
    LocalTrainingField = LocalTrainingChoice
else:
    LocalTrainingField = or_name(LocalTrainingChoice)


@dataclass(frozen=True)
class LocalDraws(PolicyRecipe):
    """Recipe that samples answers of one component and scores them by its local reward."""

    local: ClassVar[bool] = True

    settings: PPOSettings | GRPOSettings
    scores: ScoreCalls
    share: float = 1.0

    def cost(self, examples: int, components: int) -> float:
        """Return the cost of the runs that supply inputs, most of which are cached, and of the answers."""
        return examples * (1.0 + self.settings.rollouts.runs * self.share)

    def evaluation_cost(self, examples: int) -> float:
        """Return the cost of the runs that supply inputs, most of which are cached, and one answer each."""
        return examples * (1.0 + self.share)

    async def evaluate(
        self, context: RecipeContext, values: Mapping[str, Any], examples: Sequence[Example]
    ) -> list[float]:
        """Return the local reward of one answer to each input of the component on held-out examples."""
        (component,) = context.trained
        traces = await context.task.scorer.traces({}, examples)
        jobs = [
            ((*at, TRAIN_SAMPLE), values_of(context, component)) for at in _calls(traces, component)
        ]
        answered = await run_alone(context.task.context, context.task.system, jobs)
        completed = [call for call in answered if not is_lost(call.failure)]
        return await compute(self._rewards, component, completed)

    async def collect(self, context: RecipeContext, examples: Sequence[Example]) -> CreditedSamples:
        """Sample answers to the inputs of the component in the incumbent's runs, and assign credit."""
        (component,) = context.trained
        traces = await context.task.scorer.traces({}, examples)
        context.sampler.count(
            [trace.failure if is_lost(trace.failure) else None for trace in traces]
        )
        rules = context.sampler.rules.settings.get(component, {})
        jobs: list[tuple[Place, dict[str, Any]]] = [
            ((*at, context.sampler.index(number)), {**rules, **values_of(context, component)})
            for at in _calls(traces, component)
            for number in range(self.settings.rollouts.runs)
        ]
        answered = await run_alone(context.task.context, context.task.system, jobs)
        context.sampler.count([call.failure for call in answered])
        answers = [
            (trace.example, number, call)
            for ((trace, _, number), _), call in zip(jobs, answered, strict=True)
            if not is_lost(call.failure)
        ]
        rewards = await compute(self._rewards, component, [call for *_, call in answers])
        samples = [
            sample
            for (name, number, call), reward in zip(answers, rewards, strict=True)
            for sample in call_samples(
                call, name, reward, rollout=number, group=(name, call.address)
            )
        ]
        if isinstance(self.settings, PPOSettings):
            valued, value_facts = await estimate_advantages(context, self.settings.critic, samples)
            return CreditedSamples(valued, rewards, value_facts)
        trained, facts = advantages(samples, self.settings.scale)
        return CreditedSamples(trained, rewards, facts, samples)

    def _rewards(self, component: str, calls: Sequence[Call]) -> list[float]:
        """Return the local reward of each call; failed calls get less than the worst of the others."""
        good = [(call.inputs, call.outputs) for call in calls if call.failure is None]
        rewards = self.scores(component, good).tolist() if good else []
        worst = min(rewards, default=0.0) - FAILURE_MARGIN
        remaining = iter(rewards)
        return [next(remaining) if call.failure is None else worst for call in calls]


def _calls(traces: Sequence[Trace], component: str) -> list[tuple[Trace, Call]]:
    return [
        (trace, call) for trace in filter(is_whole, traces) for call in trace.calls_of(component)
    ]


def values_of(context: RecipeContext, component: str) -> dict[str, Any]:
    """Return the current weights of a component, as a setting of its calls."""
    return {"weights": context.sampler.system.configuration[f"{component}.weights"]}


async def run_alone(
    context: JobContext, system: System, jobs: Sequence[tuple[Place, Mapping[str, object]]]
) -> list[Call]:
    """Repeat recorded calls with other settings, concurrently; return the new calls in order."""
    executor = context.executor

    async def one(place: Place, settings: Mapping[str, object]) -> Call:
        trace, call, sample = place
        return await executor.resample_call(
            system, trace, call.address, settings=settings, sample=sample
        )

    return await gather_ordered(
        executor,
        [partial(one, *job) for job in jobs],
        lambda number, call: executor.settle_call(call, jobs[number][0][0]),
        context.rules.concurrency,
        [trace.run_fraction(call) for (trace, call, _), _ in jobs],
    )
