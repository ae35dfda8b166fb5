"""Race of one component's candidates by global evaluations on a few examples and local ones on many.

Successive halving as in `compound.optimizers.search.racing`, but candidates are ranked by the estimates of
`compound.rewards.gains`: the local reward of the component is a control variate of the global one. Every
global evaluation also becomes preference pairs, to which the reward of the next rung is fitted; its estimate
on an example never uses the pairs of that example. Each rung divides its runs between global and local
evaluations such that the estimates have the least variance.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
from pydantic import Field

from compound.concurrency.threads import compute
from compound.example import Example
from compound.execution.rng import generator
from compound.optimization.method import Task
from compound.optimizers.optimas.evaluation_table import Cell, Conditions, EvaluationTable, StoredEvaluations
from compound.optimizers.search.memory_part import MemoryPart
from compound.optimizers.search.racing import Track, rungs_of
from compound.rewards.buffer import Entry
from compound.rewards.gains.critic import Critic
from compound.rewards.gains.estimates import Evaluations, Gains
from compound.rewards.pairs import Draw
from compound.storage.state import State

SCAN = 20  # numbers of global evaluations that a plan compares
LEAST_DISCOUNT = 0.5  # of predicted costs: candidates with equal outputs share what follows
PROBED = 2  # candidates on each example of a probe
PROBES = 3  # at most, if the reward cannot be learned from fewer
PROBE_SHARE = 0.4  # of a job's runs, for all probes
ENOUGH = 8  # examples with pairs from which a reward is learned


class GuidedRace(State):
    """Progress of a guided race.

    Attributes:
        alive: the numbers of the candidates still in the race, best first.
        rungs: the number of rungs; 0 in the search of a segment, which has none.
        done: the number of completed rungs.
        probes: the number of probes left, at most; see `GuidedRacer`.
        n_global: the number of examples with a global evaluation, the first ones in order.
        n_local: the number of examples with local evaluations of all candidates in the race.
        gains: the estimated gain of each candidate; ``None`` before its first evaluation.
        sds: the standard deviations of the gains.
        local_gains: the calibrated local gain of each candidate.
        global_gains: the mean global gain of each candidate.
        counts: the number of global evaluations of each candidate.
        slope: as in `compound.rewards.gains.estimates.Gains`, like the next four.
        noise: as there.
        spread: as there.
        doubt: as there.
        ratio: as there.
        accuracy: the share of pairs that the local reward orders correctly on examples it was not fitted to.
        local_sd: standard deviation of the calibrated local gain of a candidate over examples.
        gap: the mean calibrated gap between two outputs for the same input (see `EvaluationTable.gap`);
            ``None`` without a local reward.
        evaluations: the evaluations so far.
        predicted: system runs that the completed rungs were expected to take.
        spent: system runs that they took.
    """

    alive: list[int]
    rungs: int = 0
    done: int = 0
    probes: int = 0
    n_global: int = 0
    n_local: int = 0
    gains: list[float | None] = Field(default_factory=list)
    sds: list[float | None] = Field(default_factory=list)
    local_gains: list[float | None] = Field(default_factory=list)
    global_gains: list[float | None] = Field(default_factory=list)
    counts: list[int] = Field(default_factory=list)
    slope: float = 0.0
    noise: float = 0.0
    spread: float = math.inf
    doubt: float = 0.0
    ratio: float = 1.0
    accuracy: float | None = None
    local_sd: float = 0.0
    gap: float | None = None
    evaluations: StoredEvaluations = Field(default_factory=StoredEvaluations)
    predicted: float = 0.0
    spent: float = 0.0

    @property
    def best(self) -> int | None:
        """Number of the candidate left with the highest estimated gain; ``None`` if none gains."""
        for number in self.alive:
            gain = self.gains[number]
            if gain is not None and gain > 0:
                return number
        return None

    @property
    def before(self) -> float | None:
        """The incumbent's mean global score; ``None`` without one."""
        scores = self.evaluations.scores
        known = [score for score in scores[0].values() if score is not None] if scores else []
        return sum(known) / len(known) if known else None

    def statistics(self) -> GuidedRace:
        """Return the race without its evaluations."""
        return self.model_copy(update={"evaluations": StoredEvaluations()})

    def variance(self, n_global: float, n_local: float) -> float:
        """Return the variance of an estimate with these numbers of evaluations.

        The spread is taken at its estimate. Adding the doubt about it would spend global evaluations on
        correcting a reward only because few evaluations have tested it yet; the next rung, whose global
        evaluations show whether it errs, plans with a new estimate.
        """
        noise2, spread2 = self.noise**2, self.spread**2
        correction = noise2 / n_global if n_global else math.inf
        if math.isfinite(spread2):
            correction = spread2 * noise2 / (spread2 * n_global + noise2) if noise2 else 0.0
        return correction + (self.local_sd**2 / n_local if n_local else math.inf)

    def with_statistics(
        self, gains: Gains, data: Evaluations, critic: Critic | None, table: EvaluationTable
    ) -> GuidedRace:
        """Return the race with the evaluations of a table, and the statistics of their estimates."""
        local = data.locally * gains.slope
        return self.model_copy(
            update={
                "evaluations": table.stored(),
                "gains": [_or_none(x) for x in gains.mean],
                "sds": [_or_none(x) for x in gains.sd],
                "local_gains": [_or_none(x) for x in gains.locally],
                "global_gains": [_or_none(x) for x in gains.globally],
                "counts": gains.counts.tolist(),
                "slope": gains.slope,
                "noise": gains.noise if math.isfinite(gains.noise) else 0.0,
                "spread": gains.spread,
                "doubt": gains.doubt,
                "ratio": gains.ratio,
                "accuracy": _accuracy(critic),
                "local_sd": float(np.nanstd(local)) if gains.slope else 0.0,
                "gap": table.gap(data, gains.slope),
            }
        )

    def note(self) -> str:
        """Return the progress note of the last completed rung."""
        best = max((gain for gain in self.gains if gain is not None), default=0.0)
        return f"{self.n_global} global and {self.n_local} local examples: best gain {best:+.3f}"


class RaceMemory(MemoryPart):
    """Memory of guided races.

    Attributes:
        races: the last race of each component, without its evaluations.
    """

    NAME = "guided races"
    races: dict[str, GuidedRace] = Field(default_factory=dict)


class DrawStore(Protocol):
    """Draws of one component from earlier jobs."""

    def entries(self) -> Sequence[Entry]:
        """Return the draws, oldest first."""
        ...


class GuidedRacer:
    """Runs a guided race.

    Args:
        task: the job.
        conditions: the conditions.
        candidates: the values that each candidate changes.
        examples: the examples, in the order of use.
        draws: the draws of the component from earlier jobs.
        iteration: the iteration of the draws of this race.
    """

    def __init__(
        self,
        task: Task,
        conditions: Conditions,
        candidates: Sequence[Mapping[str, object]],
        examples: Sequence[Example],
        draws: DrawStore,
        iteration: int,
    ) -> None:
        self._task = task
        self._given = conditions
        self._count = len(candidates)
        self._examples = examples
        self._earlier = draws
        self._iteration = iteration
        self._table = EvaluationTable(task, conditions, candidates, examples)

    async def run(self, state: GuidedRace | None, known: GuidedRace | None) -> AsyncIterator[GuidedRace]:
        """Run the race from a state; yield the progress after each rung.

        Args:
            state: the state of an interrupted race; ``None`` starts a new one.
            known: an earlier race of the component, whose statistics plan the first rung.
        """
        if state is None:
            state = self._start(known)
        else:
            await self._table.restore(state.evaluations)
        while state.done < state.rungs:
            before = self._task.scorer.runs_left
            cells, n_local = self._plan(state)
            if not cells and n_local == state.n_local:
                if not state.probes:
                    return
                state = await self._rank(state)  # no further probe fits
                continue
            predicted = self._table.cost(state.alive, cells, n_local)
            await self._table.evaluate(state.alive, cells, n_local)
            spent = before - self._task.scorer.runs_left if math.isfinite(before) else predicted
            evaluated = {
                "n_global": max([state.n_global, *(column + 1 for _, column in cells)]),
                "n_local": max(n_local, state.n_local),
                "predicted": state.predicted + predicted,
                "spent": state.spent + spent,
            }
            state = await self._rank(state.model_copy(update=evaluated))
            yield state

    def draws(self) -> list[Draw]:
        """Return the draws of the component that the global evaluations gave."""
        return self._table.draws()

    def _start(self, known: GuidedRace | None) -> GuidedRace:
        count = self._count
        if known is None or not known.slope:
            return GuidedRace(alive=list(range(count)), rungs=rungs_of(count), probes=PROBES)
        names = ("slope", "noise", "spread", "doubt", "ratio", "accuracy", "local_sd")
        state = GuidedRace(alive=list(range(count)), rungs=rungs_of(count))
        return state.model_copy(update={name: getattr(known, name) for name in names})

    # -- plan --------------------------------------------------------------------------------------------

    def _plan(self, state: GuidedRace) -> tuple[list[Cell], int]:
        """Return the global evaluations of a rung, and the number of examples with local ones after it.

        The race of a component without a reward starts with probes: a few candidates on each example, so that
        a reward can be learned from many examples. Rungs evaluate every candidate in the race, and divide
        their runs such that the variance of the estimates is least.
        """
        left = self._task.scorer.runs_left
        if state.probes:
            return self._probe(state, PROBE_SHARE * (state.spent + left) / PROBES), state.n_local
        discount = min(1.0, max(LEAST_DISCOUNT, state.spent / state.predicted)) if state.predicted else 1.0
        most, runs = len(self._examples), min(left, left / (state.rungs - state.done) / discount)
        if not math.isfinite(runs):
            size = min(most, self._task.minibatch << state.done)
            return self._table.missing(state.alive, size), size
        top = self._largest(
            lambda n: self._table.cost(state.alive, self._table.missing(state.alive, n), n), runs
        )
        if not state.slope:
            return self._table.missing(state.alive, top), top
        best, least = (self._table.missing(state.alive, 0), state.n_local), math.inf
        for n_global in sorted({round(x) for x in np.linspace(0, top, SCAN)}):
            cells = self._table.missing(state.alive, n_global)
            n_local = self._largest(lambda n, cells=cells: self._table.cost(state.alive, cells, n), runs)  # type: ignore[misc]
            counts = self._table.scored[[i + 1 for i in state.alive]].sum(1)
            added = sum(row > 0 for row, _ in cells) / len(state.alive)  # without the incumbent's evaluations
            variance = state.variance(float(counts.mean()) + added, n_local)
            if variance < least:
                best, least = (cells, n_local), variance
        return best

    def _probe(self, state: GuidedRace, runs: float) -> list[Cell]:
        """Return global evaluations of the incumbent and a few candidates on each of some examples."""
        rows = [number + 1 for number in state.alive]
        width = min(PROBED, len(rows))
        each = 1 + width * self._given.price
        left = self._task.scorer.runs_left
        more = self._task.minibatch
        if math.isfinite(left):
            more = max(int((runs + 1e-9) / each), int(left + 1e-9 >= each))
        columns = range(state.n_global, min(len(self._examples), state.n_global + more))
        order = generator(self._task.seed, "probe", state.n_global).permutation(len(rows)).tolist()
        turns = itertools.cycle(rows[i] for i in order)
        return [(row, column) for column in columns for row in (0, *itertools.islice(turns, width))]

    def _largest(self, cost: Callable[[int], float], runs: float) -> int:
        """Return the largest number of examples whose cost is within the runs."""
        low, high = 0, len(self._examples)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if cost(middle) <= runs + 1e-9 else (low, middle - 1)
        return low

    # -- rank --------------------------------------------------------------------------------------------

    async def _rank(self, state: GuidedRace) -> GuidedRace:
        """Fit the local reward to all draws, estimate the gains, and keep the better half."""
        given = self._given
        entries = [*self._earlier.entries(), *(Entry(draw, self._iteration) for draw in self.draws())]
        critic = await compute(
            lambda: given.fit(entries, given.template, given.backbone, certain=given.certain)
        )
        data = self._table.gains(critic)
        gains = given.estimate(data)
        ranked = sorted(state.alive, key=lambda number: (-_or_low(float(gains.mean[number])), number))
        best = gains.mean[ranked[0]]
        hopeless = len(ranked) == 1 and not best > 0
        state = state.with_statistics(gains, data, critic, self._table)
        return state.model_copy(update=self._next(state, ranked, gains, hopeless=hopeless))

    def _next(
        self, state: GuidedRace, ranked: list[int], gains: Gains, *, hopeless: bool
    ) -> dict[str, object]:
        """Return the candidates in the next rung, and the number of rungs and probes.

        Probes end when the reward is learned from enough examples. If it still tells nothing after the last
        probe, the race continues with as many candidates as the global reward can compare.
        """
        if not state.probes:
            done = state.rungs if hopeless else state.done + 1
            return {"alive": ranked[: max(1, math.ceil(len(ranked) / 2))], "done": done}
        learned = gains.slope > 0 and state.n_global >= ENOUGH
        probes = 0 if learned else state.probes - 1
        if probes or gains.slope:
            return {"probes": probes}
        track = Track(self._task.minibatch, len(self._examples), self._given.price)
        count = max(1, track.entrants(len(ranked), self._task.scorer.runs_left))
        return {"probes": 0, "alive": ranked[:count], "rungs": rungs_of(count)}


def _or_low(value: float) -> float:
    return -math.inf if math.isnan(value) else float(value)


def _or_none(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _accuracy(critic: Critic | None) -> float | None:
    if critic is None or not len(critic.margins):
        return None
    return float(np.mean(np.where(critic.margins == 0, 0.5, critic.margins > 0)))
