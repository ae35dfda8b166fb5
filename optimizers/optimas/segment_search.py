"""Joint search of the choices and numbers of a segment, with a local reward as a control variate.

The search is that of `compound.optimizers.search.joint`: a balanced first design, a model of gains over
configurations, and Thompson sampling. Once the local reward of the segment predicts the global one, each step
divides its runs between global evaluations and the cheaper local ones, such that the variance of the
estimates is least, and the observations of the model are control variates with their variances
(`compound.rewards.gains.estimates`). They are not weighted by the use of the correction, as the model pools
the candidates itself. As long as the local reward predicts nothing, all evaluations are global ones.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from compound.concurrency.threads import compute
from compound.errors import DataError
from compound.example import Example
from compound.execution.rng import generator
from compound.formatting import plural
from compound.graph.configuration import components_of
from compound.optimization.bounds import JobBound, Outlook
from compound.optimization.method import Progress, Proposal, Task
from compound.optimizers.optimas.evaluation_table import Cell, Conditions, EvaluationTable, FitCritic
from compound.optimizers.optimas.guided import conditions_of, guide_facts, savings_of
from compound.optimizers.optimas.guided_race import ENOUGH, GuidedRace, RaceMemory
from compound.optimizers.optimas.part import Part, part_of
from compound.optimizers.optimas.rewarding import RunRewards, tunable
from compound.optimizers.search.gain_model import GainModel, Observation
from compound.optimizers.search.joint import (
    balanced_design,
    changed_values,
    combinations,
    incumbent_values,
    next_field,
)
from compound.optimizers.search.levels import starting_levels
from compound.optimizers.search.prompts import PromptSearch, split
from compound.optimizers.search.racing import Track
from compound.rewards.buffer import Entry, PairBuffer
from compound.rewards.gains.critic import fit_critic
from compound.rewards.gains.estimates import Evaluations, Gains, estimate_unbiased
from compound.rewards.pairs import Draw
from compound.rewards.settings import RewardLearning
from compound.storage.state import State

SEGMENT = "draw of a segment"  # kind of a record in a run's memory
STEPS = 16  # planned number of steps, at most
MOST_STEPS = 64  # candidates that cost less than predicted leave runs for further steps
EXPLORATION = 0.85  # of the runs, after which no new candidates are added
LEAST_SD = 1e-3  # of an estimate, as the scores of few examples may be equal by chance

Values = dict[str, object]


class SegmentProgress(State):
    """Progress of `SegmentSearch`.

    Attributes:
        iteration: the iteration of the draws that the job adds.
        levels: values of each parameter to combine, other than the incumbent's.
        runs: system runs of the job; ``None`` without a limit.
        candidates: the values of all candidates so far.
        race: the evaluations and the statistics of the last step; ``alive`` holds the numbers of the
            candidates of the next step.
    """

    iteration: int
    levels: dict[str, list[object]]
    runs: float | None
    candidates: list[Values]
    race: GuidedRace


@dataclass(frozen=True)
class SegmentSearch:
    """Optimizer that searches the choices and numbers of a segment, guided by its local reward.

    Attributes:
        learning: settings of the reward.
        gold: whether the local reward may read the gold answers of train examples.
        fit: fits the local reward to draws.
    """

    learning: RewardLearning
    gold: bool = True
    fit: FitCritic = fit_critic

    def bound(self, outlook: Outlook) -> JobBound:
        """Declare that no requests are sent except those of the system, and what the reward may save."""
        return JobBound(savings=savings_of(outlook.system, components_of(outlook.keys), outlook.prices))

    async def propose(self, task: Task) -> AsyncIterator[Progress | Proposal]:
        """Evaluate combinations of values in steps, and propose the one with the highest expected gain."""
        part, price = part_of(task.system, tunable(task), task.prices), task.prices.keys(task.keys)
        rewards = RunRewards.open(task, self.learning)
        examples = split(task)[1]
        if task.resume is not None:
            state = SegmentProgress.from_json(task.resume)
        else:
            state = await self._start(task, price, len(examples), rewards.iteration + 1)
            yield Progress(state.to_json(), plural(len(state.candidates), "candidate"))
        given = conditions_of(
            task, self.learning, part, price, gold=self.gold, estimate=estimate_unbiased, fit=self.fit
        )
        draws = SegmentDraws(rewards, part.name)
        steps = Steps(task, given, state.candidates, examples, draws.entries(), state.iteration)
        await steps.table.restore(state.race.evaluations)
        while plan := steps.plan(state):
            await steps.make(state, plan)
            yield Progress(state.to_json(), _note(state))
        draws.add(steps.table.draws(), state.iteration)
        yield self._proposal(task, part, price, rewards, state)

    async def _start(self, task: Task, price: float, examples: int, iteration: int) -> SegmentProgress:
        """Combine values of each parameter into the first candidates."""
        runs, free = task.scorer.runs_left, task.scorer.has_free_repeats
        count = Track(task.minibatch, examples, price, free_repeats=free).entrants(task.candidates, runs)
        levels = await starting_levels(task, PromptSearch(()), {}, count)
        candidates = balanced_design(task, levels, count)
        race = GuidedRace(alive=list(range(len(candidates))))
        limit = runs if math.isfinite(runs) else None
        return SegmentProgress(
            iteration=iteration, levels=levels, runs=limit, candidates=candidates, race=race
        )

    def _proposal(
        self, task: Task, part: Part, price: float, rewards: RunRewards, state: SegmentProgress
    ) -> Proposal:
        race, before = state.race, state.race.before
        gains = [-math.inf if gain is None else gain for gain in race.gains]
        best = int(np.argmax(gains)) if gains and max(gains) > 0 else None
        memory = RaceMemory.of(task.context.memory)
        memory.races[part.name] = race.statistics()
        memory.store(task.context.memory)
        values = {} if best is None else changed_values(task, state.candidates[best])
        gain = 0.0 if best is None else gains[best]
        facts = {**rewards.facts(None), **guide_facts(part, price, race)}
        after = None if before is None else before + gain
        tried = sum(each is not None for each in race.gains)
        note = "" if values else "no candidate is expected to gain"
        return Proposal(values, before, after, tried, note, facts)


@dataclass(frozen=True)
class Plan:
    """Evaluations of a step: global ones, and local ones on further examples."""

    globally: Sequence[Cell]
    locally: Sequence[Cell] = ()


@dataclass
class Steps:
    """Plans and makes the steps of a search.

    Attributes:
        task: the job.
        given: its conditions.
        candidates: all candidates so far.
        examples: the examples, in the order of use.
        earlier: draws of the segment from earlier jobs.
        iteration: the iteration of the draws of this job.
    """

    task: Task
    given: Conditions
    candidates: Sequence[Values]
    examples: Sequence[Example]
    earlier: Sequence[Entry]
    iteration: int
    table: EvaluationTable = field(init=False)

    def __post_init__(self) -> None:
        self.table = EvaluationTable(self.task, self.given, self.candidates, self.examples)

    # -- plan --------------------------------------------------------------------------------------------

    def plan(self, state: SegmentProgress) -> Plan | None:
        """Return the evaluations of the next step; ``None`` if there are none within the runs left."""
        if not state.race.alive or state.race.done >= (STEPS if state.runs is None else MOST_STEPS):
            return None
        width = self.task.candidates * self.given.price + 1
        fewest = Track(self.task.minibatch, len(self.examples)).fewest
        size = max(fewest, math.ceil((state.runs or 0.0) / (STEPS * width)))
        full = self._global_cells(state.race.alive, self.task.minibatch if state.runs is None else size)
        plan = Plan(self._within_runs(full))
        if state.race.slope and plan.globally:
            plan = self._divided(state.race, plan.globally)
        return plan if plan.globally or plan.locally else None

    def _global_cells(self, numbers: Sequence[int], size: int) -> list[Cell]:
        """Return the next ``size`` examples of each candidate, and the incumbent on the same ones."""
        cells: dict[Cell, None] = {}
        for number in numbers:
            columns = np.flatnonzero(~self.table.scored[number + 1])[:size].tolist()
            cells |= {(row, column): None for column in columns for row in (0, number + 1)}
        return [cell for cell in cells if not self.table.scored[cell]]

    def _within_runs(self, cells: Sequence[Cell]) -> list[Cell]:
        """Return the first candidates' evaluations that the runs left cover."""
        left, found = self.task.scorer.runs_left + 1e-9, list[Cell]()
        for row in dict.fromkeys(row for row, _ in cells if row):
            columns = {column for r, column in cells if r == row}
            own = [cell for cell in cells if cell[1] in columns and cell[0] in (0, row) and cell not in found]
            if self.table.cost([], [*found, *own], 0) <= left:
                found += own
        return found

    def _divided(self, race: GuidedRace, cells: Sequence[Cell]) -> Plan:
        """Return the division of the runs of some global evaluations with the least mean variance."""
        runs = self.table.cost([], cells, 0)
        rows = list(dict.fromkeys(row for row, _ in cells if row))
        most = max(sum(r == row for r, _ in cells) for row in rows)
        n = float(self.table.scored[rows].sum(1).mean())
        n_local = float(np.mean([len(self.table.local_columns(row)) for row in rows]))
        best, least = Plan(cells), math.inf
        for size in range(most + 1):
            kept = self._global_cells([row - 1 for row in rows], size)
            local = self._local_cells(rows, kept, runs - self.table.cost([], kept, 0))
            added = size + len(local) / len(rows)
            variance = race.variance(n + size, n_local + added)
            if variance < least:
                best, least = Plan(kept, local), variance
        return best

    def _local_cells(self, rows: Sequence[int], made: Sequence[Cell], runs: float) -> list[Cell]:
        """Return local evaluations of all rows on as many further examples as the runs cover."""
        part = self.given.part
        each = part.price * len(rows) + part.weight  # the incumbent's, on new examples
        count = int((runs + 1e-9) / each) if each else len(self.examples)
        cells: list[Cell] = []
        for row in rows:
            known = {*self.table.local_columns(row), *(column for r, column in made if r == row)}
            missing = [column for column in range(len(self.examples)) if column not in known]
            cells += [(row, column) for column in missing[:count]]
        return cells

    # -- make --------------------------------------------------------------------------------------------

    async def make(self, state: SegmentProgress, plan: Plan) -> None:
        """Make the evaluations of a step, estimate the gains, and choose the candidates of the next step."""
        before = self.task.scorer.runs_left
        await self.table.evaluate([], plan.globally, 0)
        await self.table.evaluate_locally(plan.locally)
        spent = before - self.task.scorer.runs_left if math.isfinite(before) else 0.0
        given = self.given
        entries = [*self.earlier, *(Entry(draw, self.iteration) for draw in self.table.draws())]
        if len({entry.draw.example for entry in entries}) < ENOUGH:
            entries = []
        critic = await compute(
            lambda: given.fit(entries, given.template, given.backbone, certain=given.certain)
        )
        data = self.table.gains(critic)
        gains = given.estimate(data)
        model = self._model(gains, data)
        race = state.race.with_statistics(gains, data, critic, self.table)
        n_global = int(self.table.scored.any(0).sum())
        update = {"done": race.done + 1, "spent": race.spent + spent, "n_global": n_global}
        state.race = race.model_copy(update=update)
        self._choose(state, model)

    def _model(self, gains: Gains, data: Evaluations) -> GainModel:
        """Return the model of gains, given the estimates of all candidates that were evaluated."""
        observations = []
        for i in np.flatnonzero(np.isfinite(gains.mean)).tolist():
            differences = data.globally[i][~np.isnan(data.globally[i])]
            squares = float(((differences - differences.mean()) ** 2).sum()) if len(differences) else 0.0
            own = Observation(self.candidates[i], float(gains.mean[i]), squares, max(1, len(differences)))
            if gains.slope and math.isfinite(gains.sd[i]):
                own = replace(own, variance=max(float(gains.sd[i]), LEAST_SD) ** 2)
            elif not len(differences):
                continue  # an estimate of infinite variance, from local evaluations alone, says nothing
            observations.append(own)
        spaces = {key: self.task.system.parameters[key] for key in self.task.keys}
        scores = self.table.scores[~np.isnan(self.table.scores)]
        return GainModel(spaces, incumbent_values(self.task), observations, float(np.var(scores)))

    def _choose(self, state: SegmentProgress, model: GainModel) -> None:
        """Rank the candidates by expected gain, and draw those of the next step."""
        known = [number for number, gain in enumerate(state.race.gains) if gain is not None]
        if not known:
            state.race.alive = []
            return
        means = model.means([self.candidates[number] for number in known])
        state.race.gains = [None] * len(self.candidates)
        for number, mean in zip(known, means, strict=True):
            state.race.gains[number] = mean
        rng = generator(self.task.seed, "step", state.race.done)
        leader = self.candidates[known[means.index(max(means))]]
        new: list[Values] = []
        if self._explores(state):
            new = combinations(self.task, self.candidates, state.levels, leader, rng)
        drawn = model.draw([*(self.candidates[number] for number in known), *new], rng)
        complete = [number for number in known if self.table.scored[number + 1].all()]
        field, added = next_field(self.task.candidates, drawn, known, complete, len(state.candidates))
        entrants = [new[i] for i in added]
        self.table.extend(entrants)
        self.candidates = state.candidates = [*state.candidates, *entrants]
        state.race = state.race.model_copy(update={"alive": field})

    def _explores(self, state: SegmentProgress) -> bool:
        """Return whether new candidates may still be added."""
        if state.runs is None:
            return state.race.done < EXPLORATION * STEPS
        return self.task.scorer.runs_left > (1 - EXPLORATION) * state.runs


@dataclass(frozen=True)
class SegmentDraws:
    """Draws of a segment in the memory of a run, apart from the buffer, which is about single components.

    Attributes:
        rewards: the rewards of the run.
        segment: the name of the segment.
    """

    rewards: RunRewards
    segment: str

    def entries(self) -> Sequence[Entry]:
        """Return the draws, oldest first."""
        stored = []
        for record in self.rewards.memory.records():
            if record.get("kind") == SEGMENT:
                if not isinstance(draw := record.get("record"), dict):
                    raise DataError(
                        "a draw of a segment in the run's memory is damaged", hint="start a new run"
                    )
                stored.append(draw)
        sampling = self.rewards.buffer.sampling
        return PairBuffer.read(stored, self.rewards.task.system, sampling).of(self.segment)

    def add(self, draws: Sequence[Draw], iteration: int) -> None:
        """Add the draws of an iteration."""
        self.rewards.add([], iteration)  # counts the iteration
        for record in PairBuffer(self.rewards.buffer.system).add(draws, iteration):
            self.rewards.memory.append({"kind": SEGMENT, "record": record})


def _note(state: SegmentProgress) -> str:
    known = [gain for gain in state.race.gains if gain is not None]
    best = max(known, default=0.0)
    size = plural(state.race.n_global, "example")
    return f"{plural(len(known), 'candidate')}, on up to {size}: expected gain {best:+.3f}"
