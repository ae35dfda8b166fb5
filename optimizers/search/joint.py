"""Joint search of prompts, demonstrations, choices and numbers.

The first candidates form a balanced design, so that the effect of a single value is estimated from
all candidates that share it (`compound.optimizers.search.gain_model`). Each step scores a few
candidates and the incumbent on a few further examples: the leader, new texts that a model wrote
after reading the leader's failing runs, and the candidates that a draw from the model's posterior
ranks highest (Thompson sampling). The last part of the budget goes to known candidates alone.

Parameters that no model call depends on, such as weights of rankings that are merged at the end,
cost no system runs: each step also scores its candidates with other values of these, on examples
that they were scored on.

Where local rewards save runs (`compound.optimizers.search.local_gains`), each step also evaluates
values of single components without the components after them. With a model that writes prompts, or
with local rewards, each step has other examples; otherwise, every candidate starts on the first
ones, so that calls that candidates share come from the cache.
"""

from __future__ import annotations

import math
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from compound.core.example import Example
from compound.core.formatting import plural
from compound.execution.rng import generator
from compound.execution.trace import Trace
from compound.graph.configuration import canonical_json
from compound.graph.space import Choice, Demos, Float, Int
from compound.optimization.method import JobPlan, PlannedJob, Progress, Proposal, RequestCount, Task
from compound.optimizers.scheduling import text_keys
from compound.optimizers.search.candidates import (
    JointProgress,
    SearchCandidate,
    Values,
    balanced_design,
    changed_values,
    combinations,
    failed_on,
    free_keys,
    incumbent_values,
    options_of,
    values_of,
)
from compound.optimizers.search.free import FreeTuning, are_fast
from compound.optimizers.search.gain_model import GainModel, Observation
from compound.optimizers.search.local_gains import LocalGains, RewardGuide
from compound.optimizers.search.proposers.demos import demonstrations, draw_demos
from compound.optimizers.search.proposers.edits import bounded_edit, clauses_for, kind_of, sentences
from compound.optimizers.search.proposers.reflect import CHAIN, SHOWN, describe, reflect
from compound.optimizers.search.ratings import MOST_RATINGS
from compound.optimizers.search.sources import CandidateSources, Rows, divide
from compound.rewards.settings import RewardLearning

MOST_STEPS = 64
EXPLORATION = 0.85  # of the runs, after which no new candidates are added
# share of the first candidates with a new text or demonstrations
CHANGED, CHANGED_BY_WRITER = 0.5, 0.85
NARROWEST = 4  # candidates of a step with a writer: more with more parameters
FINALISTS = 3  # candidates of a step where local rewards are trusted, without a writer
LOCAL = 4.0  # runs of local evaluations for each run of a step, where local rewards are certain
LOCAL_BESIDE_WRITER = 1.0  # the same with a writer, which reads whole runs
MOST_PASSES = 16  # of local evaluations in a step
FEWEST = 0.5  # of a minibatch: examples of a step, at least
EVALUATIONS = 3  # minibatches of a step with a writer: few candidates on more examples
# first texts of each kind for each prompt; reflections also in each step
DESCRIPTIONS, REFLECTIONS = 2, 2
ATTEMPTS = 6  # per new text, since duplicates are dropped
KEPT_GAIN = 0.9  # of the expected gain, which a proposal keeps without its idle edits


@dataclass(frozen=True)
class JointSearch:
    """Optimizer that searches all parameters except weights jointly."""

    sources: CandidateSources
    guide: RewardGuide | None = None  # opens local evaluations; `None` without local rewards

    @property
    def learning(self) -> RewardLearning | None:
        """The settings of local rewards, which name the libraries that these need."""
        return None if self.guide is None else self.guide.learning

    def plan(self, job: PlannedJob) -> JobPlan:
        """Return the requests for new prompts and ratings, and the number of first candidates."""
        texts, price = len(job.texts), job.prices.keys(job.keys)
        width, block = shape_of(self.sources, job, job.runs, price)
        candidates = affordable(width, job.minibatch, job.runs, price)
        requests = []
        if self.guide is not None and self.guide.judge is not None:
            requests.append(RequestCount("ratings", MOST_RATINGS * job.runs, self.guide.judge))
        if texts and self.sources.writes:
            steps = min(MOST_STEPS, job.runs // block + 1)
            count: float = DESCRIPTIONS * CHAIN * texts * ("describe" in self.sources.names)
            if "reflect" in self.sources.names:
                count += REFLECTIONS * (2 * steps + texts)
            requests.append(RequestCount("new prompts", count, self.sources.lm))
        return JobPlan(requests, candidates)

    async def propose(self, task: Task) -> AsyncIterator[Progress | Proposal]:
        """Score combinations of values in steps, and propose the one with the highest expected gain."""
        rows = divide(task, self.sources)
        local = self.guide.prepare(task, rows.scored) if self.guide is not None else None
        if task.resume is not None:
            search = Search(task, self.sources, rows, local, JointProgress.from_json(task.resume))
            await search.restore()
        else:
            state = await start(task, self.sources, rows)
            search = Search(task, self.sources, rows, local, state)
            yield Progress(state.to_json(), plural(len(state.candidates), "candidate"))
        while search.state.field and search.state.steps < MOST_STEPS and await search.score_block():
            await search.tune_free()
            await search.evaluate_locally()
            best = await search.choose_field()
            yield Progress(search.state.to_json(), search.state.note(best))
        yield await search.proposal()


async def start(task: Task, sources: CandidateSources, rows: Rows) -> JointProgress:
    """Propose values of each parameter, and combine them into the first candidates."""
    runs = task.scorer.runs_left
    pools = await demonstrations(task, sources, rows)
    price = task.prices.keys(task.keys) if task.scorer.has_free_repeats else 1.0
    width, block = shape_of(sources, task, runs, price)
    limit = runs if math.isfinite(runs) else None
    state = JointProgress(levels={}, origins={}, runs=limit, width=width, block=block, price=price)
    count = affordable(width, task.minibatch, task.scorer.runs_left, price)
    for key in task.keys:
        space, rng = task.system.parameters[key], generator(task.seed, "levels", key)
        current = task.system.configuration[key]
        if isinstance(space, Demos) and pools.get(key):
            for _ in range((count + 1) // 2):
                state.add_level(key, draw_demos(pools[key], space.max, rng), current, "demos")
        for option in options_of(space, rng) if isinstance(space, Choice | Int | Float) else ():
            state.add_level(key, option, current)
    await Search(task, sources, rows, None, state).first_texts(count)
    changed = CHANGED_BY_WRITER if sources.writes else CHANGED
    first = earlier_values(task, state)
    design = [*first, *balanced_design(task, state.levels, count, changed)]
    distinct = {canonical_json(values): values for values in design}
    state.candidates = [SearchCandidate(values=values) for values in [*distinct.values()][:count]]
    state.field = [*range(len(state.candidates))]
    return state


def earlier_values(task: Task, state: JointProgress) -> list[Values]:
    """Add the values of an earlier run, and return its configurations that differ from the incumbent."""
    current, found = incumbent_values(task), list[Values]()
    for given in task.context.earlier.values:
        known = {key: value for key, value in given.items() if key in current}
        for key, value in known.items():
            state.add_level(key, value, current[key], "earlier run")
        if changed_values(task, {**current, **known}):
            found.append({**current, **known})
    return found


@dataclass
class Search:
    """Search of one job."""

    task: Task
    sources: CandidateSources
    rows: Rows
    local: LocalGains | None
    state: JointProgress
    spent: float = 0.0  # system runs of the last step

    @property
    def guided(self) -> bool:
        """Whether local rewards are used."""
        return self.local is not None and self.local.trust > 0

    async def restore(self) -> None:
        """Learn again what an interrupted search knew."""
        if self.local is not None:
            await self.local.restore(self.state.cells)
            await self.local.learn(self.state.global_runs(len(self.rows.scored)))

    # -- first candidates --------------------------------------------------------------------------------

    async def first_texts(self, candidates: int) -> None:
        """Add texts of all sources to the values to combine."""
        task, names, keys = self.task, self.sources.names, text_keys(self.task)
        current = incumbent_values(task)
        if keys and "describe" in names:
            for key, number in ((key, n) for key in keys for n in range(DESCRIPTIONS)):
                text = await describe(
                    task, key, str(current[key]), self.rows.read, number, lm=self.sources.lm
                )
                self.state.add_level(key, text, current[key], "describe")
        if keys and "reflect" in names and task.scorer.has_free_repeats:
            most = int(min(task.minibatch, task.scorer.runs_left / 3))
            shown = self.rows.pool or self.rows.scored[:most]
            runs = await runs_of(task, {}, shown)
            for number in range(REFLECTIONS * len(keys)):
                await self._reflect(keys[number % len(keys)], current, runs, f"start {number}")
        if "edits" in names:
            for key in keys:
                self._edit(key, current, (candidates + 1) // 2)

    async def _reflect(
        self, key: str, values: Values, runs: Sequence[tuple[Trace, Example]], number: str
    ) -> str | None:
        """Add a text that a model wrote after reading runs with the given values; return it."""
        current = self.task.system.configuration[key]
        known = [str(current), *map(str, self.state.levels.get(key, ()))]
        text = await reflect(
            self.task, key, str(values[key]), runs, number, lm=self.sources.lm, known=known
        )
        return text if self.state.add_level(key, text, current, "reflect") else None

    def _edit(self, key: str, values: Values, count: int) -> None:
        task, state = self.task, self.state
        space, clauses = task.system.parameters[key], clauses_for(task.system, key)
        found = 0
        for attempt in range(ATTEMPTS * count):
            rng = generator(task.seed, "edit", key, state.steps, attempt)
            text = bounded_edit(str(values[key]), rng, space, clauses=clauses)  # type: ignore[arg-type]
            found += state.add_level(key, text, task.system.configuration[key], "edits")
            if found == count:
                break

    # -- scoring -----------------------------------------------------------------------------------------

    async def score_block(self) -> bool:
        """Score the field and the incumbent on further examples; return whether the runs covered any."""
        task, state, runs = self.task, self.state, self.task.scorer.runs_left
        plan = self._plan()
        new, spent, scores, known = 0, 0.0, list[float](), len(state.scores)
        for rows, group in groupby(
            sorted(plan, key=lambda number: (plan[number], number)), plan.__getitem__
        ):
            field = [state.candidates[number] for number in group]
            part = [self.rows.scored[row] for row in rows]
            for candidate in field:
                task.note_origin(candidate.values, *state.origin_of(candidate))
            free = task.scorer.has_free_repeats or not all(str(row) in state.scores for row in rows)
            evaluations = await task.scorer.score(
                [*([{}] if free else []), *(c.values for c in field)], part
            )
            failed = [failed_on(evaluation, rows) for evaluation in evaluations]
            if free:
                state.scores |= dict(zip(map(str, rows), evaluations.pop(0).scores, strict=True))
                state.failed = sorted({*state.failed, *failed.pop(0)})
            for candidate, evaluation in zip(field, evaluations, strict=True):
                state.record(candidate, evaluation, rows)
                scores += evaluation.scores
                spent, new = spent + evaluation.system_runs, new + len(rows)
            scores += [state.scores[str(row)] for row in rows]
        if not plan:
            return False
        state.variance, state.price = float(np.var(scores)), spent / new
        state.steps += 1
        state.paid += new + len(state.scores) - known
        self.spent = runs - task.scorer.runs_left if math.isfinite(runs) else spent
        return True

    def _plan(self) -> dict[int, list[int]]:
        """Return the next examples of each candidate of the field that the runs cover."""
        task, state = self.task, self.state
        runs, total = task.scorer.runs_left, len(self.rows.scored)
        price = (
            max(state.price, task.prices.keys(task.keys)) if task.scorer.has_free_repeats else 1.0
        )
        start = state.steps * state.block if self.sources.writes or self.guided else 0
        plan: dict[int, list[int]] = {}
        paid, known = 0.0, set(map(int, state.scores))
        for number in state.field:
            ahead = ((start + i) % total for i in range(total))
            rows = state.usable(state.candidates[number], ahead)[: state.block]
            if not plan and not set(rows) <= known and math.isfinite(runs):
                rows = rows[
                    : int((runs + 1e-9) / (1 + price))
                ]  # if they do not cover one candidate on all
            cost = price * len(rows) + len(set(rows) - known)
            if rows and paid + cost <= runs + 1e-9:
                paid, known = paid + cost, known | set(rows)
                plan[number] = rows
        return plan

    async def tune_free(self) -> None:
        """Compare values of parameters that cost no system runs, with the calls of the step."""
        state, scorer = self.state, self.task.scorer
        if state.steps == 1 and (free := free_keys(self.task)):
            ran = [self.rows.scored[int(row)] for row in state.scores]
            state.free = free if await are_fast(self.task, ran) else []
            await self._add_pool()
        if state.free and scorer.runs_left >= 1:
            means = self._model().means([state.candidates[n].values for n in state.scored])
            order = sorted(range(len(means)), key=lambda i: -means[i])
            best = [state.scored[i] for i in order if means[i] > 0]
            await FreeTuning(self.task, state, self.rows.every, self._model).step(best)

    async def _add_pool(self) -> None:
        """Score the incumbent on the pool, whose calls are cached, to compare free parameters there.

        Not if it has demonstrations, which may be of the pool.
        """
        state, rows, system = self.state, self.rows, self.task.system
        spaces = system.parameters.items()
        has_demos = any(system.configuration[k] for k, x in spaces if isinstance(x, Demos))
        if state.free and rows.pool and not has_demos:
            (found,) = await self.task.scorer.score([{}], rows.pool)
            numbers = range(len(rows.scored), len(rows.every))
            state.scores |= dict(zip(map(str, numbers), found.scores, strict=True))
            state.failed = sorted({*state.failed, *failed_on(found, numbers)})
            state.paid += len(numbers)

    async def evaluate_locally(self) -> None:
        """Evaluate values of single components, for more runs the more the local rewards are trusted."""
        if self.local is None:
            return
        state, scorer = self.state, self.task.scorer
        await self.local.learn(state.global_runs(len(self.rows.scored)))
        share = LOCAL_BESIDE_WRITER if self.sources.writes else LOCAL
        goal = scorer.runs_left - share * self.local.trust * self.spent
        for turn in range(MOST_PASSES):
            before = scorer.runs_left
            if not self.guided or before <= goal or not self._explores():
                return
            model = self._model()
            options = self._options(turn)
            leader = self._combined(model, self._leader(model), options)
            runs = before - goal if math.isfinite(before) else self.spent
            rng = generator(self.task.seed, "local", state.steps, turn)
            await self.local.evaluate(state.cells, model, leader, options, runs, rng)
            if scorer.runs_left == before:
                return

    def _options(self, turn: int = 0) -> dict[str, list[Values]]:
        rng = generator(self.task.seed, "options", self.state.steps, turn)
        known = [candidate.values for candidate in self.state.candidates]
        names = self.local.slopes if self.local is not None else ()
        return {name: values_of(name, self.task, known, self.state.levels, rng) for name in names}

    # -- candidates of the next step ---------------------------------------------------------------------

    async def choose_field(self) -> float:
        """Choose the candidates of the next step by a draw of all gains; return the highest expected gain."""
        state, task = self.state, self.task
        model, rng = self._model(), generator(task.seed, "step", state.steps)
        scored = state.scored
        known = [state.candidates[number].values for number in scored]
        means = model.means(known)
        leader = int(np.argmax(means))
        new: list[Values] = []
        first = [leader] if self.sources.writes else []
        proposed = 0  # new values that are not random
        if self._explores():
            parent = self._leader(model)
            new = await self._rewritten(parent, scored[leader] if means[leader] > 0 else None)
            new += await self._chosen_for_each_input(parent)
            if self.guided:
                combined = self._combined(model, parent, self._options())
                every = [incumbent_values(task), *(each.values for each in state.candidates)]
                is_known = canonical_json(combined) in map(canonical_json, every)
                new += [] if is_known else [combined]
            proposed = len(new)
            taken = [*(candidate.values for candidate in state.candidates), *new]
            new += combinations(task, taken, state.levels, known[leader], rng)
        drawn = model.draw([*known, *new], rng)
        if proposed:
            first.append(len(known) + int(np.argmax(drawn[len(known) : len(known) + proposed])))
        ranked = np.argsort(-drawn, kind="stable").tolist()
        order = [*first, *(i for i in ranked if i not in first)]
        width = FINALISTS if self.guided and not self.sources.writes else state.width
        state.field = []
        for i in order[:width]:
            if i >= len(known):
                state.candidates.append(
                    SearchCandidate(values=new[i - len(known)], parent=scored[leader])
                )
            state.field.append(scored[i] if i < len(known) else len(state.candidates) - 1)
        return means[leader]

    async def _rewritten(self, parent: Values, leader: int | None) -> list[Values]:
        """Return the parent with new texts: all of them together, and each alone."""
        task, state, keys = self.task, self.state, text_keys(self.task)
        if keys and "edits" in self.sources.names:
            self._edit(keys[state.steps % len(keys)], parent, REFLECTIONS)
        if not keys or "reflect" not in self.sources.names:
            return []
        seen = state.candidates[leader].rows if leader is not None else [*map(int, state.scores)]
        if not task.scorer.has_free_repeats:
            if task.scorer.runs_left < SHOWN + state.block * (state.width + 1):
                return []
            seen = seen[-SHOWN:]
        shown = [self.rows.every[row] for row in seen]
        runs = await runs_of(task, changed_values(task, parent), shown)
        texts: Values = {}
        alone: list[Values] = []
        for number in range(REFLECTIONS):
            key = keys[(state.steps * REFLECTIONS + number) % len(keys)]
            text = await self._reflect(key, parent, runs, f"{state.steps} {number}")
            if text is not None:
                texts[key] = text
                alone.append({**parent, key: text})
        return [*([{**parent, **texts}] if len(texts) > 1 else []), *alone]

    async def _chosen_for_each_input(self, parent: Values) -> list[Values]:
        """Return the parent with choices for each input, learned again from twice as many examples."""
        state = self.state
        last = max((len(rows) for rows in state.fitted.values()), default=0)
        if self.local is None or len(state.scores) < 2 * last:
            return []
        found = await self.local.policies()
        state.fitted |= {
            canonical_json(value): [*map(int, state.scores)] for value in found.values()
        }
        return [{**parent, key: value} for key, value in found.items()]

    def _leader(self, model: GainModel) -> Values:
        known = [self.state.candidates[number].values for number in self.state.scored]
        means = model.means(known)
        return known[int(np.argmax(means))] if max(means) > 0 else incumbent_values(self.task)

    def _combined(
        self, model: GainModel, values: Values, options: Mapping[str, Sequence[Values]]
    ) -> Values:
        """Return values with the best expected gain, changing one component after another."""
        for own in options.values():
            points = [values, *({**values, **each} for each in own)]
            values = points[int(np.argmax(model.means(points)))]
        return values

    def _explores(self) -> bool:
        if self.state.runs is None:
            return self.state.steps < EXPLORATION * MOST_STEPS
        return self.task.scorer.runs_left > (1 - EXPLORATION) * self.state.runs

    def _model(self) -> GainModel:
        scored = (self.state.candidates[number] for number in self.state.scored)
        observations = [Observation.of(each.values, each.differences, each.rows) for each in scored]
        slopes: Mapping[str, tuple[float, float]] = {}
        if self.local is not None:
            observations += self.local.observations(self.state.cells)
            slopes = self.local.slopes
        spaces = {key: self.task.system.parameters[key] for key in self.task.keys}
        return GainModel(
            spaces,
            incumbent_values(self.task),
            observations,
            self.state.variance,
            slopes,
            self.state.free,
        )

    # -- result ------------------------------------------------------------------------------------------

    async def proposal(self) -> Proposal:
        """Propose the candidate with the highest expected gain, if it is positive."""
        state = self.state
        scored = [state.candidates[number].values for number in state.scored]
        if not scored:
            return Proposal({}, tried=0, note="no candidate could be scored")
        within = [values for values in scored if self.task.meets_limits(values)] or scored
        model = self._model()
        facts = await self.local.finish(state.cells) if self.local is not None else {}
        means = model.means(within)
        best = int(np.argmax(means))
        if means[best] <= 0:
            note = "no candidate is expected to gain"
            return Proposal({}, state.before, state.before, len(scored), note, facts)
        found = within[best]
        if any("edits" in origins for origins in state.origins.values()):
            found = without_idle_edits(self.task, model, found)
        after = (state.before or 0.0) + model.means([found])[0]
        changed = changed_values(self.task, found)
        facts = {**facts, **state.contributions(found)}
        return Proposal(changed, state.before, after, len(scored), facts=facts)


def shape_of(
    sources: CandidateSources, job: Task | PlannedJob, runs: float, price: float
) -> tuple[int, int]:
    """Return the number of candidates and of examples of a step.

    With a model that writes prompts, few candidates are scored on more examples.
    """
    width, block = job.candidates, _fewest(job.minibatch)
    if sources.writes:
        width = min(width, max(NARROWEST, len(job.keys)))
        block = max(block, EVALUATIONS * job.minibatch // width)
    if math.isfinite(runs):
        block = max(block, math.ceil(runs / (MOST_STEPS * (width * price + 1))))
    return width, block


def affordable(width: int, minibatch: int, runs: float, price: float) -> int:
    """Return the number of first candidates that some system runs cover, one at least."""
    paid = runs - _fewest(minibatch)  # the incumbent is scored, too
    each = _fewest(minibatch) * price
    return int(max(1, min(width, paid / each))) if each else width


def _fewest(minibatch: int) -> int:
    return max(1, math.ceil(FEWEST * minibatch))


async def runs_of(
    task: Task, values: Mapping[str, object], rows: Sequence[Example]
) -> list[tuple[Trace, Example]]:
    """Return the scored runs of a candidate on some examples."""
    traces = await task.scorer.traces(values, rows) if rows else []
    return [*zip(traces, rows, strict=True)]


def without_idle_edits(task: Task, model: GainModel, values: Values) -> Values:
    """Return values whose texts have no edit without a measurable effect, by the scores so far.

    Edits are undone, the one with the least effect first, while `KEPT_GAIN` of the gain remains.
    """
    current = incumbent_values(task)
    least = KEPT_GAIN * model.means([values])[0]
    while True:
        fewer: list[Values] = []
        for key in text_keys(task):
            text, start = str(values[key]), str(current[key])
            if text != start:
                fewer.append({**values, key: start})
                own = [part for part in sentences(text) if part not in start and kind_of(part)]
                shorter = [re.sub(rf" ?{re.escape(part)} ?", " ", text).strip() for part in own]
                fewer += [{**values, key: each} for each in shorter if each]
        fewer = [each for each in fewer if changed_values(task, each)]
        gains = model.means(fewer)
        if not fewer or max(gains) < least:
            return values
        values = fewer[int(np.argmax(gains))]
