"""Fast-slow training: train weights under a population of prompts that is renewed by reflection.

"Fast-Slow Training", arXiv 2605.12484: every few steps of GRPO, a short GEPA search starts from the
best prompts and gives a population, the candidates on its frontier. The rollouts of each example
use all prompts of the population in turn, and are one group: an advantage compares runs with
different prompts. The published method has no public code; see `docs/adr/0032` for the choices made
here.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from pydantic import Field

from compound.core.errors import BudgetExhausted, DeclarationError
from compound.core.narrowing import entry
from compound.core.storage.state import State
from compound.core.threads import compute
from compound.execution.rng import derive_seed
from compound.graph.configuration import components_of
from compound.graph.space import Text, Weights
from compound.graph.system import System
from compound.optimization.method import (
    Job,
    JobPlan,
    Method,
    PlannedJob,
    Progress,
    Proposal,
    Task,
)
from compound.optimization.settings.base import Settings
from compound.optimizers.baselines.gepa import GEPA, Evolution
from compound.optimizers.scheduling import keys_of
from compound.optimizers.weights.learner.trainer import Saved
from compound.optimizers.weights.recipes.mmgrpo import MMGRPO, PromptR1
from compound.optimizers.weights.recipes.recipe import RecipeContext
from compound.optimizers.weights.recipes.rollouts import Population
from compound.optimizers.weights.steps import TrainingState, format_step
from compound.optimizers.weights.training import TrainingSession, WeightTraining


class InterleaveSettings(Settings):
    """Rounds of prompt search between training steps. A round is a search by the settings of `gepa`."""

    every: int = Field(default=5, ge=1)
    """Training steps between two rounds."""
    share: float = Field(default=0.25, gt=0)
    """System runs of a round, relative to those of the training steps between two rounds."""
    population: int = Field(default=4, ge=1)
    """Maximum number of versions of the prompts: the best one of a round and others on its frontier."""


class FastSlowState(State):
    """Progress of `FastSlow`.

    Attributes:
        training: the progress of the training.
        rounds: the number of completed rounds.
        prompts: the population: the texts that differ from the incumbent's, the best of the last
            round first.
        rewards: by version, the sum and the number of the rewards of rollouts since the last round.
        best: the prompts at the best evaluated step.
        reflection: the progress of the round.
        started: the system runs on the meter when the round began.
    """

    training: TrainingState = Field(default_factory=TrainingState)
    rounds: int = 0
    prompts: list[dict[str, str]] = Field(default_factory=lambda: [dict[str, str]()])
    rewards: list[tuple[float, int]] = Field(default_factory=lambda: [(0.0, 0)])
    best: dict[str, str] = Field(default_factory=dict)
    reflection: dict[str, object] | None = None
    started: float = 0.0

    @property
    def chosen(self) -> dict[str, str]:
        """The prompts with the highest mean reward of rollouts since the last round.

        Versions that no rollout has used come last: rewards may be negative. Without rollouts,
        these are the best prompts of the last round.
        """
        means = [total / count if count else -math.inf for total, count in self.rewards]
        return self.prompts[means.index(max(means))]


@dataclass(frozen=True)
class FastSlow:
    """Optimizer that trains weights under a population of prompts, with rounds of reflection in between."""

    requires: ClassVar[tuple[str, ...]] = ("torch", "transformers", "peft")

    training: WeightTraining
    reflection: GEPA
    settings: InterleaveSettings = field(default_factory=InterleaveSettings)

    def plan(self, job: PlannedJob) -> JobPlan:
        """Return the reflections of all rounds."""
        recipe = self.training.recipe
        weights = [key for key in job.keys if isinstance(job.system.parameters[key], Weights)]
        step = recipe.cost(recipe.sampling.examples, len(components_of(weights)))
        one = self.reflection.plan(replace(job, keys=job.texts, runs=self._round_cost(step)))
        rounds = (recipe.settings.steps - 1) // self.settings.every
        return JobPlan([replace(each, count=each.count * rounds) for each in one.requests])

    def _round_cost(self, step: float) -> float:
        return self.settings.share * self.settings.every * step

    async def propose(self, task: Task) -> AsyncIterator[Progress | Proposal]:
        """Train, search prompts, checkpoint after each step of either, and propose weights with prompts."""
        weights = tuple(
            key for key in task.keys if isinstance(task.system.parameters[key], Weights)
        )
        training, steps = self.training, self.training.recipe.settings.steps
        session = _Session(
            replace(task, keys=weights), training.recipe, training.adapters, training.section
        )
        try:
            state = FastSlowState() if task.resume is None else FastSlowState.from_json(task.resume)
            await session.begin(state.training)
            while True:
                session.prompts, session.chosen = state.prompts, state.chosen
                evaluates = session.plan.is_evaluation_due(state.training)
                if not (evaluates or session.plan.has_next_step(state.training)):
                    break
                facts: dict[str, Any] = {}
                try:
                    if evaluates:
                        state.training = await session.evaluate(state.training)
                        best, outcome = state.training.best, session.outcome(state.training)
                        if best is not None and best.step == state.training.step:
                            state.best = state.chosen
                        note, facts = (
                            outcome.format_evaluation(),
                            {"evaluation": outcome.evaluation()},
                        )
                    elif state.training.step // self.settings.every > state.rounds:
                        async for event in self._round(task, session, state):
                            yield event
                        continue
                    else:
                        state.training = await session.step(state.training)
                        state.rewards = _added(state.rewards, session.rewards)
                        note = format_step(state.training.curve[-1])
                except BudgetExhausted:
                    break
                session.delete_unused(state.training)
                yield Progress(state.to_json(), note, facts, step=state.training.step, of=steps)
            yield self._proposal(task, session, state)
        except asyncio.CancelledError:
            session.interrupt()  # else `close` would wait for a step in other processes
            raise
        finally:
            await compute(session.close)

    async def _round(
        self, task: Task, session: _Session, state: FastSlowState
    ) -> AsyncIterator[Progress]:
        """Search prompts with the current weights, and replace the population by the frontier."""
        meter, steps = task.context.executor.meter, self.training.recipe.settings.steps
        if state.reflection is None:
            state.started = meter.system_runs
        texts = keys_of(task.system, Text)
        start: dict[str, str] = {
            key: entry(task.system.configuration, key, str) for key in texts
        } | state.chosen
        values = {**session.values(state.training.saved), **start}
        reserved = session.plan.cost + bool(state.training.evaluated) * session.plan.evaluation_cost

        def left() -> float:
            used = meter.system_runs - state.started
            return max(
                0.0,
                min(self._round_cost(session.plan.cost) - used, task.scorer.runs_left - reserved),
            )

        reflecting = replace(
            task,
            system=task.system.bind({**task.system.configuration, **values}),
            keys=texts,
            train=session.plan.trained,
            scorer=task.scorer.within(values, left),
            seed=derive_seed(task.seed, "reflection", state.rounds),
            resume=state.reflection,
            tried=(),
        )
        note = "no budget for reflection"
        async for event in self.reflection.propose(reflecting):
            note = event.note or note
            if isinstance(event, Progress):
                state.reflection = dict(event.state)
                yield Progress(
                    state.to_json(), f"reflection: {note}", step=state.training.step, of=steps
                )
        if state.reflection is not None:
            front = Evolution.from_json(state.reflection).front
            own = {
                key: text for key, text in start.items() if text != task.system.configuration[key]
            }
            state.prompts = [{**own, **texts} for texts in front][: self.settings.population]
        state.rewards = [(0.0, 0)] * len(state.prompts)
        state.rounds, state.reflection = state.rounds + 1, None
        note = f"round {state.rounds}: {len(state.prompts)} versions of the prompts"
        yield Progress(state.to_json(), note, step=state.training.step, of=steps)

    def _proposal(self, task: Task, session: _Session, state: FastSlowState) -> Proposal:
        """Propose the weights of the best step with the prompts at that step, or the last ones."""
        evaluated = len(state.training.evaluated) > 1 and state.training.best is not None
        session.chosen = state.best if evaluated else state.chosen
        found = session.proposal(state.training)
        facts = {**found.facts, "rounds": state.rounds, "prompts": len(state.prompts)}
        return replace(found, facts=facts)


@dataclass
class _Session(TrainingSession):
    """Training session whose rollouts use a population of prompts."""

    prompts: Sequence[dict[str, str]] = ()
    chosen: dict[str, str] = field(default_factory=dict)
    _population: Population | None = None

    @property
    def rewards(self) -> Sequence[tuple[float, int]]:
        """By version of the prompts, the sum and the number of rewards in the last step."""
        return self._population.rewards if self._population else []

    def values(self, saved: Saved | None) -> Mapping[str, object]:
        """Return the weights of a checkpoint and the chosen prompts, by key of the configuration."""
        return {**super().values(saved), **self.chosen}

    async def _context(
        self, state: TrainingState, number: int, kept: dict[str, object]
    ) -> RecipeContext:
        context = await super()._context(state, number, kept)
        self._population = None
        if len(self.prompts) > 1:
            own = {
                key: entry(self.task.system.configuration, key, str)
                for key in keys_of(self.task.system, Text)
            }
            versions = [{**own, **texts} for texts in self.prompts]
            context.sampler.population = self._population = Population(
                versions, context.sampler.step
            )
        return context


def _added(
    some: Sequence[tuple[float, int]], others: Sequence[tuple[float, int]]
) -> list[tuple[float, int]]:
    if not others:
        return [*some]
    return [(a + b, m + n) for (a, m), (b, n) in zip(some, others, strict=True)]


def interleaved(
    made: Method, system: System, settings: InterleaveSettings, reflection: GEPA, stage: str
) -> Method:
    """Return a method that trains weights with rounds of prompt search in between."""
    texts = keys_of(system, Text)
    optimizers = {}
    for name, optimizer in made.optimizers.items():
        assert isinstance(optimizer, WeightTraining)  # see `can_interleave`
        if optimizer.recipe.sampling.max_staleness:
            raise DeclarationError(
                f"better_together.interleave needs samples of the current prompts, but {stage} samples ahead",
                hint=f"set {optimizer.section}.rollouts.max_staleness to 0",
            )
        optimizers[name] = FastSlow(optimizer, reflection, settings)
    jobs = [_with_rounds(job, texts, settings) for job in made.jobs]
    return replace(made, optimizers=optimizers, jobs=jobs)


def _with_rounds(job: Job, texts: Sequence[str], settings: InterleaveSettings) -> Job:
    """Return a job that also has the texts, with the cost of rounds added to that of its steps."""
    step = None if job.step is None else job.step * (1 + settings.share)
    return replace(job, keys=(*job.keys, *texts), step=step)


def can_interleave(made: Method) -> bool:
    """Return whether a method trains weights on groups of whole runs, whose prompts may differ."""
    return all(
        isinstance(optimizer, WeightTraining) and isinstance(optimizer.recipe, MMGRPO | PromptR1)
        for optimizer in made.optimizers.values()
    )
