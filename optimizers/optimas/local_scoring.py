"""Rounds of candidates scored by a local reward: the component runs alone, on recorded inputs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from compound.example import CallValues
from compound.execution.ordered import gather_ordered
from compound.execution.rng import derive_seed, generator
from compound.execution.schedule import setting_values
from compound.execution.trace import Call, Trace
from compound.graph.configuration import canonical_json
from compound.graph.system import System
from compound.optimization.method import JobContext, Task
from compound.optimizers.search.prompts import demo_keys, text_keys
from compound.rewards.model import Vector
from compound.settings.base import Settings
from compound.storage.state import State

FINALISTS = 2
REPEATS = 2  # samples of each call of a stochastic component
REPEAT_OFFSET = 100_000_000  # offset between the sample indices of repeats, disjoint from all other indices
Place = tuple[Trace, Call, int]  # a recorded call, and the index of the sample to draw


class Gain(State):
    """A candidate's values with its gain: its mean local reward minus the incumbent's."""

    values: dict[str, object]
    gain: float


NextCandidates = Callable[[Task, Sequence[Gain]], Awaitable[list[dict[str, object]]]]


class Scoring(State):
    """Progress of a search by the local reward.

    Attributes:
        share: the job's share of the budget at its start, in system runs; ``None`` without a limit.
        candidates: the candidates of the first round.
        rounds: the number of completed rounds.
        scored: the scored candidates; the first one is the incumbent.
        recorded: the names of the examples whose calls candidates are scored on; ``None`` until they are
            chosen.
    """

    share: float | None
    candidates: list[dict[str, object]]
    rounds: int = 0
    scored: list[Gain] = Field(default_factory=lambda: [Gain(values={}, gain=0.0)])
    recorded: list[str] | None = None

    @property
    def tried(self) -> int:
        """Number of scored candidates, without the incumbent."""
        return len(self.scored) - 1


class LocalSearchSettings(Settings):
    """Local search over the parameters of a component, by its local reward."""

    rounds: int = Field(default=3, ge=1)
    """Maximum number of rounds per job. Limits the distance from the incumbent (a trust region)."""
    temperature: float = Field(default=0.0, ge=0)
    """Temperature of the selection of choices and numbers: finalists are drawn with probability proportional
    to exp(reward / temperature); 0 selects the best. Of prompts, the best are always selected."""


class Scores(Protocol):
    """Scores calls of a component: `compound.rewards.model.RewardModel`, or a baseline."""

    def rewards(self, component: str, calls: Sequence[CallValues]) -> Vector:
        """Return one number per (inputs, outputs); higher is better."""
        ...


@dataclass(frozen=True)
class RecordedCalls:
    """Recorded calls to repeat with other settings.

    Attributes:
        system: the system that the traces were recorded with.
        calls: the calls with their traces.
    """

    system: System
    calls: Sequence[tuple[Trace, Call]]


@dataclass(frozen=True)
class LocalScorer:
    """Local search of one component.

    Attributes:
        task: the job.
        component: the component whose parameters are searched.
        model: scores the component's calls.
        max_rounds: the maximum number of rounds.
        part: the fraction of the job's share that may be spent by the end of the last round.
    """

    task: Task
    component: str
    model: Scores
    max_rounds: int
    part: float

    async def rounds(
        self, state: Scoring, recorded: RecordedCalls, next_candidates: NextCandidates
    ) -> AsyncIterator[str]:
        """Score the first candidates, then further rounds; yield a progress note after each round.

        Args:
            state: the progress, updated in place.
            recorded: the calls to repeat with the candidates' values.
            next_candidates: returns the candidates of another round.
        """
        places = self._places(recorded)
        while places and state.rounds < self.max_rounds and self._is_affordable(state, places):
            fresh = await self._next_round(state, next_candidates) if state.tried else state.candidates
            if not fresh:
                break
            gains = await self.gains(fresh, recorded.system, places)
            state.scored += [Gain(values=v, gain=gain) for v, gain in zip(fresh, gains, strict=True)]
            state.rounds += 1
            best = max(scored.gain for scored in state.scored)
            yield f"local round {state.rounds}: best gain {best:+.2f}"

    def _places(self, recorded: RecordedCalls) -> list[Place]:
        """Return the calls to make; several samples of each if the component is stochastic."""
        component = self.task.system.components[self.component]
        is_stochastic = not component.deterministic(setting_values(component, self.task.system))
        return [
            (trace, call, call.sample + REPEAT_OFFSET * repeat)
            for repeat in range(REPEATS if is_stochastic else 1)
            for trace, call in recorded.calls
        ]

    async def _next_round(self, state: Scoring, next_candidates: NextCandidates) -> list[dict[str, object]]:
        """Return candidates that were not scored yet."""
        seen = {canonical_json(scored.values) for scored in state.scored}
        task = replace(self.task, seed=derive_seed(self.task.seed, "round", state.rounds))
        candidates = await next_candidates(task, state.scored)
        return [values for values in candidates if canonical_json(values) not in seen]

    def _is_affordable(self, state: Scoring, places: Sequence[Place]) -> bool:
        """Return whether the budget covers another round; the first round is always run."""
        if not state.tried or state.share is None:
            return True
        spent = state.share - self.task.scorer.runs_left
        trace, call, _ = places[0]
        counted = max(1, sum(other.counted for other in trace.calls))
        cost = self.task.candidates * len(places) / counted if call.counted else 0.0
        return spent + cost <= self.part * state.share

    async def gains(
        self, candidates: Sequence[Mapping[str, object]], system: System, places: Sequence[Place]
    ) -> list[float]:
        """Return each candidate's mean local reward minus the incumbent's at the same places.

        All candidates are scored at a few places, the better half at twice as many, and so on (successive
        halving). A failed call scores less than the worst of the others.

        Args:
            candidates: values by key.
            system: the system that the calls were recorded with.
            places: the calls to make.
        """
        alive = list(range(len(candidates)))
        gains = [0.0] * len(candidates)
        size = min(len(places), max(2, self.task.minibatch // 4))
        while True:
            rows = await self._rewards([{}, *(candidates[i] for i in alive)], system, places[:size])
            for i, row in zip(alive, rows[1:], strict=True):
                gains[i] = float((row - rows[0]).mean())
            if size == len(places) or not alive:
                return gains
            alive = sorted(alive, key=lambda i: -gains[i])[: max(1, len(alive) // 2)]
            size = min(len(places), 2 * size)

    async def _rewards(
        self, candidates: Sequence[Mapping[str, object]], system: System, places: Sequence[Place]
    ) -> NDArray[np.float64]:
        """Return the local rewards of each candidate (rows) at each place (columns)."""
        prefix = f"{self.component}."
        changes = system.configuration.diff(self.task.system.configuration)
        # changes to this component that were accepted since the calls were recorded
        own = {c.key: c.after for c in changes if c.key.startswith(prefix)}
        jobs = [
            (place, {key.removeprefix(prefix): value for key, value in {**own, **values}.items()})
            for values in candidates
            for place in places
        ]
        calls = await run_alone(self.task.context, system, jobs)
        succeeded = [(call.inputs, call.outputs) for call in calls if call.failure is None]
        remaining = iter(self.model.rewards(self.component, succeeded).tolist())
        rewards = np.array([np.nan if call.failure else next(remaining) for call in calls])
        worst = min(rewards[~np.isnan(rewards)], default=0.0)
        return np.where(np.isnan(rewards), worst - 1.0, rewards).reshape(len(candidates), len(places))


async def run_alone(
    context: JobContext, system: System, jobs: Sequence[tuple[Place, Mapping[str, object]]]
) -> list[Call]:
    """Repeat recorded calls with other settings, concurrently; return the new calls in order.

    Raises:
        BudgetExhausted: the budget was used up before all calls were made.
    """
    executor = context.executor

    async def one(place: Place, settings: Mapping[str, object]) -> Call:
        trace, call, sample = place
        return await executor.resample_call(system, trace, call.address, settings=settings, sample=sample)

    return await gather_ordered(
        executor,
        [partial(one, *job) for job in jobs],
        lambda number, call: executor.settle_call(call, jobs[number][0][0]),
        context.rules.concurrency,
        [trace.run_fraction(call) for (trace, call, _), _ in jobs],
    )


def finalists(task: Task, scored: Sequence[Gain], temperature: float) -> list[Gain]:
    """Return the candidates to test by the global reward.

    For prompts, these are the best few that beat the incumbent; choices and numbers are drawn by reward.

    Args:
        task: the job.
        scored: the scored candidates; the first one is the incumbent.
        temperature: the temperature of the draw.
    """
    count = FINALISTS if task.scorer.runs_left >= 5 * task.minibatch else 1
    if text_keys(task) or demo_keys(task):
        better = [candidate for candidate in scored if candidate.gain > 0]
        return sorted(better, key=lambda candidate: -candidate.gain)[:count]
    rng = generator(task.seed, "boltzmann")
    drawn = boltzmann([candidate.gain for candidate in scored], temperature, count, rng)
    chosen = drawn[: drawn.index(0)] if 0 in drawn else drawn  # candidates after the incumbent rank below it
    return [scored[i] for i in chosen]


def boltzmann(
    rewards: Sequence[float], temperature: float, count: int, rng: np.random.Generator
) -> list[int]:
    """Draw indices without replacement, with probability proportional to ``exp(reward / temperature)``.

    Uses the Gumbel-max trick (Gumbel 1954): the indices of the largest rewards plus Gumbel noise are such a
    draw. At temperature 0, the best are selected.

    >>> boltzmann([0.0, 9.0, 0.0], 0.1, 1, np.random.default_rng(0))
    [1]
    """
    noisy = np.asarray(rewards, float)
    if temperature:
        noisy = noisy / temperature + rng.gumbel(size=len(rewards))
    return [int(i) for i in np.argsort(-noisy, kind="stable")[:count]]
