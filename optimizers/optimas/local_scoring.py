"""Scoring candidates by a local reward: the component alone, on recorded inputs, a few rounds."""

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
from compound.execution.schedule import values_of
from compound.execution.trace import Call, Trace
from compound.graph.configuration import canonical
from compound.graph.system import System
from compound.optimization.method import JobContext, Task
from compound.optimizers.search.prompts import demo_keys, text_keys
from compound.rewards.model import Vector
from compound.settings.base import Settings
from compound.storage.state import State

FINALISTS = 2
REPEATS = 2  # samples of a call that is left to chance
AGAIN = 100_000_000  # between their indices
Place = tuple[Trace, Call, int]  # a recorded call, and the sample to draw it with


class Gain(State):
    """A candidate's values, and by how much its mean local reward exceeds the incumbent's."""

    values: dict[str, object]
    gain: float


More = Callable[[Task, Sequence[Gain]], Awaitable[list[dict[str, object]]]]


class Scoring(State):
    """The progress of a search of one component by its local reward.

    Attributes:
        share: the system runs that the job might spend when it began; ``None`` without a limit.
        candidates: the values to score in the first round.
        rounds: how many rounds are completed.
        scored: the candidates that were scored; the first one is the incumbent.
        recorded: the names of the examples whose calls candidates are scored on; ``None`` before the first
            round is completed.
    """

    share: float | None
    candidates: list[dict[str, object]]
    rounds: int = 0
    scored: list[Gain] = Field(default_factory=lambda: [Gain(values={}, gain=0.0)])
    recorded: list[str] | None = None

    @property
    def tried(self) -> int:
        """How many candidates were scored besides the incumbent."""
        return len(self.scored) - 1


class LocalSearchSettings(Settings):
    """How the settings of a component are searched by its local reward."""

    rounds: int = Field(default=3, ge=1)
    """Rounds of local search in one iteration: a trust region."""
    temperature: float = Field(default=0.0, ge=0)
    """Candidates are drawn with probability proportional to exp(reward / temperature); 0 takes the best."""


class Scores(Protocol):
    """Scores (inputs, outputs) of a component: `compound.rewards.model.RewardModel`, or a baseline."""

    def rewards(self, component: str, calls: Sequence[CallValues]) -> Vector:
        """Return one number for each call, higher for better outputs."""
        ...


@dataclass(frozen=True)
class Recorded:
    """Calls to make again with other settings, and the system whose traces they are in."""

    system: System
    calls: Sequence[tuple[Trace, Call]]


@dataclass(frozen=True)
class LocalScorer:
    """One component's local search.

    Attributes:
        task: the job.
        component: whose settings are searched.
        model: scores its calls.
        rounds_limit: the most rounds.
        part: of the job's share that may be spent by the end of the last round.
    """

    task: Task
    component: str
    model: Scores
    rounds_limit: int
    part: float

    async def rounds(self, state: Scoring, recorded: Recorded, more: More) -> AsyncIterator[str]:
        """Score the first candidates, then further rounds of them; yield a note after each round.

        Args:
            state: what was scored so far, which each round adds to.
            recorded: the calls to make again with the candidates' values.
            more: makes the candidates of another round.
        """
        places = self._places(recorded)
        while places and state.rounds < self.rounds_limit and self._is_affordable(state, places):
            fresh = await self._another(state, more) if state.tried else state.candidates
            if not fresh:
                break
            gains = await self.gains(fresh, recorded.system, places)
            state.scored += [Gain(values=v, gain=gain) for v, gain in zip(fresh, gains, strict=True)]
            state.rounds += 1
            best = max(scored.gain for scored in state.scored)
            yield f"local round {state.rounds}: best gain {best:+.2f}"

    def _places(self, recorded: Recorded) -> list[Place]:
        """Return the component's calls; those of a component with chance several times, in other samples."""
        component = self.task.system.components[self.component]
        chance = not component.deterministic(values_of(component, self.task.system))
        return [
            (trace, call, call.sample + AGAIN * repeat)
            for repeat in range(REPEATS if chance else 1)
            for trace, call in recorded.calls
        ]

    async def _another(self, state: Scoring, more: More) -> list[dict[str, object]]:
        """Return candidates that were not scored yet."""
        seen = {canonical(scored.values) for scored in state.scored}
        task = replace(self.task, seed=derive_seed(self.task.seed, "round", state.rounds))
        return [values for values in await more(task, state.scored) if canonical(values) not in seen]

    def _is_affordable(self, state: Scoring, places: Sequence[Place]) -> bool:
        """Return whether another round fits; the first always does."""
        if not state.tried or state.share is None:
            return True
        spent = state.share - self.task.scorer.left
        trace, call, _ = places[0]
        counted = max(1, sum(other.counted for other in trace.calls))
        cost = self.task.candidates * len(places) / counted if call.counted else 0.0
        return spent + cost <= self.part * state.share

    async def gains(
        self, candidates: Sequence[Mapping[str, object]], system: System, places: Sequence[Place]
    ) -> list[float]:
        """Return by how much each candidate's mean local reward exceeds the incumbent's at the same places.

        All meet a few, the better half twice as many, and so on (successive halving). A failed call
        counts as less than the worst.

        Args:
            candidates: values by key.
            system: the one that the places were recorded with.
            places: where to make the calls.
        """
        alive = list(range(len(candidates)))
        found = [0.0] * len(candidates)
        size = min(len(places), max(2, self.task.minibatch // 4))
        while True:
            rows = await self._rewards([{}, *(candidates[i] for i in alive)], system, places[:size])
            for i, row in zip(alive, rows[1:], strict=True):
                found[i] = float((row - rows[0]).mean())
            if size == len(places) or not alive:
                return found
            alive = sorted(alive, key=lambda i: -found[i])[: max(1, len(alive) // 2)]
            size = min(len(places), 2 * size)

    async def _rewards(
        self, candidates: Sequence[Mapping[str, object]], system: System, places: Sequence[Place]
    ) -> NDArray[np.float64]:
        """Return the local rewards of each candidate (rows) at each place (columns)."""
        prefix = f"{self.component}."
        changes = system.configuration.diff(self.task.system.configuration)
        own = {c.key: c.after for c in changes if c.key.startswith(prefix)}  # the incumbent's, since then
        jobs = [
            (place, {key.removeprefix(prefix): value for key, value in {**own, **values}.items()})
            for values in candidates
            for place in places
        ]
        made = await run_alone(self.task.context, system, jobs)
        read = [(call.inputs, call.outputs) for call in made if call.failure is None]
        rewards = iter(self.model.rewards(self.component, read).tolist())
        found = np.array([np.nan if call.failure else next(rewards) for call in made])
        worst = min(found[~np.isnan(found)], default=0.0)
        return np.where(np.isnan(found), worst - 1.0, found).reshape(len(candidates), len(places))


async def run_alone(
    context: JobContext, system: System, jobs: Sequence[tuple[Place, Mapping[str, object]]]
) -> list[Call]:
    """Make calls of traces again with other settings, all in flight together; returns them in order.

    Raises:
        BudgetExhausted: the budget ended before all were made.
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
        [trace.share(call) for (trace, call, _), _ in jobs],
    )


def finalists(task: Task, scored: Sequence[Gain], temperature: float) -> list[Gain]:
    """Return the candidates that are put to the test.

    Of prompts, the best few that beat the incumbent; settings are drawn by their rewards.

    Args:
        task: the job.
        scored: candidates; the first one is the incumbent.
        temperature: of the draw.
    """
    count = FINALISTS if task.scorer.left >= 5 * task.minibatch else 1
    if text_keys(task) or demo_keys(task):
        better = [candidate for candidate in scored if candidate.gain > 0]
        return sorted(better, key=lambda candidate: -candidate.gain)[:count]
    rng = generator(task.seed, "boltzmann")
    drawn = boltzmann([candidate.gain for candidate in scored], temperature, count, rng)
    kept = drawn[: drawn.index(0)] if 0 in drawn else drawn  # what comes after the incumbent is worse
    return [scored[i] for i in kept]


def boltzmann(
    rewards: Sequence[float], temperature: float, count: int, rng: np.random.Generator
) -> list[int]:
    """Draw positions without replacement, with probability proportional to ``exp(reward / temperature)``.

    The largest of reward plus Gumbel noise is such a draw (Gumbel 1954), and the next largest the next. At
    temperature 0 the best are taken.

    >>> boltzmann([0.0, 9.0, 0.0], 0.1, 1, np.random.default_rng(0))
    [1]
    """
    noisy = np.asarray(rewards, float)
    if temperature:
        noisy = noisy / temperature + rng.gumbel(size=len(rewards))
    return [int(i) for i in np.argsort(-noisy, kind="stable")[:count]]
