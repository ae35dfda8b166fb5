"""Joint search of prompts, demonstrations, choices and numbers.

A candidate may change every parameter at once. The first candidates form a balanced design: each option of
a parameter occurs in equally many of them, so that the effect of a single value is estimated from all
candidates that share it (`compound.optimizers.search.gain_model`). In each further step, the candidates that
a draw from the model's posterior ranks highest are scored on further examples: known ones, or new
combinations of values (Thompson sampling). The last part of the budget goes to known candidates alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
from pydantic import Field

from compound.evaluation.evaluate import Evaluation
from compound.example import Example
from compound.execution.rng import generator
from compound.formatting import plural
from compound.graph.configuration import canonical_json
from compound.graph.space import Choice, Float, Int
from compound.optimization.bounds import JobBound, Outlook
from compound.optimization.method import Progress, Proposal, ScoredCandidate, Task
from compound.optimizers.search.gain_model import GainModel, Observation
from compound.optimizers.search.levels import DRAWS, levels_of_each, new_texts, starting_levels
from compound.optimizers.search.prompts import (
    ATTEMPTS,
    Exemplars,
    PromptSearch,
    bootstrap_pools,
    split,
    text_keys,
)
from compound.optimizers.search.proposers.edits import kind_of, sentences
from compound.optimizers.search.racing import Track
from compound.storage.state import State

STEPS = 16  # planned number of steps, at most; with more runs, steps have more examples
MOST_STEPS = 64  # candidates that cost less than predicted leave runs for further steps
EXPLORATION = 0.85  # of the runs, after which no new candidates are added
COMBINATIONS = 256  # of values, from which new candidates are chosen
NEW_TEXTS = 0.25  # of the candidates of a step: new texts per step
KEPT_GAIN = 0.9  # of the expected gain, which a proposal keeps without its idle edits
FEWEST_CHANGED = 0.5  # expected share of the texts and demonstrations that a first candidate changes

Values = dict[str, object]


class Candidate(State):
    """A configuration with its comparison to the incumbent.

    Attributes:
        values: the values of all parameters of the job.
        gain: the mean difference of its scores and the incumbent's.
        squares: the sum of the squared deviations from it.
        n: the number of examples; 0 before the first evaluation.
    """

    values: Values
    gain: float = 0.0
    squares: float = 0.0
    n: int = 0


class JointProgress(State):
    """Progress of `JointSearch`.

    Attributes:
        levels: values of each parameter to combine, other than the incumbent's.
        runs: system runs of the search; ``None`` without a limit.
        candidates: all candidates so far.
        field: the numbers of the candidates to score in the next step, the most important ones first.
        steps: the number of completed steps.
        price: system runs that a candidate took per example; before the first step, the predicted ones.
        known: the number of examples that the incumbent was scored on.
        before: the incumbent's mean score; ``None`` before the first step.
        variance: variance of the scores of the last step.
        shown: worked examples for a model that writes prompts, since failed runs are in no cache.
    """

    levels: dict[str, list[object]]
    runs: float | None
    candidates: list[Candidate] = Field(default_factory=list)
    field: list[int] = Field(default_factory=list)
    steps: int = 0
    price: float = 1.0
    known: int = 0
    before: float | None = None
    variance: float = 0.0
    shown: dict[str, list[str]] | None = None

    def note(self, best: float) -> str:
        """Return the progress note of the last step; ``best`` is the highest expected gain."""
        scored = sum(candidate.n > 0 for candidate in self.candidates)
        size = plural(self.known, "example")
        return f"{plural(scored, 'candidate')}, the best on up to {size}: expected gain {best:+.3f}"


@dataclass(frozen=True)
class JointSearch:
    """Optimizer that searches all parameters except weights jointly.

    Attributes:
        prompts: proposes prompts and demonstrations.
    """

    prompts: PromptSearch

    def bound(self, outlook: Outlook) -> JobBound:
        """Declare the requests for new prompts: for the first candidates, and in each step."""
        texts = sum(key in outlook.texts for key in outlook.keys)
        first = levels_of_each(len(outlook.keys), outlook.candidates) * texts
        rounds = (first + STEPS * new_texts_per_step(outlook.candidates)) / outlook.candidates
        return self.prompts.rounds_bound(outlook, rounds)

    async def propose(self, task: Task) -> AsyncIterator[Progress | Proposal]:
        """Score combinations of values in steps, and propose the one with the highest expected gain."""
        pool, examples = split(task)
        state = None if task.resume is None else JointProgress.from_json(task.resume)
        shown: Exemplars | None = None if state is None else state.shown
        if shown is None:
            shown = await self.prompts.exemplars(task, pool or examples)
        if state is None:
            state = await self._start(task, pool, len(examples), shown)
            state.shown = {key: list(texts) for key, texts in shown.items()}
            yield Progress(state.to_json(), plural(len(state.candidates), "candidate"))
        while sizes := next_sizes(task, state, len(examples)):
            await score_step(task, state, examples, sizes)
            best = await self._choose_field(task, state, len(examples), shown)
            yield Progress(state.to_json(), state.note(best))
        yield proposal_of(task, state)

    async def _start(
        self, task: Task, pool: Sequence[Example], examples: int, shown: Exemplars
    ) -> JointProgress:
        """Propose values of each parameter, and combine them into the first candidates."""
        pools = await bootstrap_pools(task, pool) if "demos" in self.prompts.proposers else {}
        runs, free = task.scorer.runs_left, task.scorer.has_free_repeats
        price = task.prices.keys(task.keys) if free else 1.0
        count = Track(task.minibatch, examples, price, free_repeats=free).entrants(task.candidates, runs)
        levels = await starting_levels(task, self.prompts, pools, count, shown)
        limit = runs if math.isfinite(runs) else None
        state = JointProgress(levels=levels, runs=limit, price=price)
        state.candidates = [Candidate(values=values) for values in balanced_design(task, levels, count)]
        state.field = list(range(len(state.candidates)))
        return state

    async def _choose_field(self, task: Task, state: JointProgress, examples: int, shown: Exemplars) -> float:
        """Choose the candidates of the next step; return the highest expected gain."""
        model, rng = model_of(task, state), generator(task.seed, "step", state.steps)
        scored = [number for number, candidate in enumerate(state.candidates) if candidate.n]
        known = [state.candidates[number].values for number in scored]
        means = model.means(known)
        leader = scored[int(np.argmax(means))]
        new: list[Values] = []
        if explores(task, state):
            await self._add_texts(task, state, model, leader, shown)
            known_values = [candidate.values for candidate in state.candidates]
            new = combinations(task, known_values, state.levels, known_values[leader], rng)
        complete = [number for number in scored if state.candidates[number].n == examples]
        drawn = model.draw([*known, *new], rng)
        state.field, added = next_field(task.candidates, drawn, scored, complete, len(state.candidates))
        state.candidates = [*state.candidates, *(Candidate(values=new[i]) for i in added)]
        return max(means)

    async def _add_texts(
        self, task: Task, state: JointProgress, model: GainModel, leader: int, shown: Exemplars
    ) -> None:
        """Add new texts that resemble those of the leading candidate to the values to combine."""
        if state.steps >= STEPS:
            return
        nearby = _at(task, state.candidates[leader].values, model, state)
        count = new_texts_per_step(task.candidates)
        for key, texts in (await new_texts(nearby, self.prompts, count, shown, state.steps)).items():
            state.levels[key] = [*state.levels.get(key, []), *texts]


def next_field(
    size: int, drawn: np.ndarray, scored: Sequence[int], complete: Collection[int], count: int
) -> tuple[list[int], list[int]]:
    """Return the candidates of the next step: those that a draw of gains ranks highest.

    Args:
        size: maximum number of candidates of the step.
        drawn: a draw of the gains of the scored candidates and of the new ones, in this order.
        scored: the numbers of the scored candidates.
        complete: the numbers of those that were scored on all examples.
        count: the number of candidates so far, which new ones are numbered after.

    Returns:
        The numbers of the candidates, highest draw first, and the indices of the chosen new ones.
    """
    done = set(complete)
    ranked = [
        int(i) for i in np.argsort(-drawn, kind="stable") if i >= len(scored) or scored[int(i)] not in done
    ]
    field, added = list[int](), list[int]()
    for i in ranked[:size]:
        if i < len(scored):
            field.append(scored[i])
        else:
            field.append(count + len(added))
            added.append(i - len(scored))
    return field, added


def new_texts_per_step(candidates: int) -> int:
    """Return the number of new texts per step, if steps score this number of candidates."""
    return math.ceil(NEW_TEXTS * candidates)


def _compare(candidate: Candidate, evaluation: Evaluation, incumbent: Evaluation) -> None:
    """Update a candidate with its scores and the incumbent's on the same examples."""
    differences = np.subtract(evaluation.scores, incumbent.scores)
    candidate.gain, candidate.n = float(differences.mean()), len(differences)
    candidate.squares = float(((differences - differences.mean()) ** 2).sum())


def _at(task: Task, values: Values, model: GainModel, state: JointProgress) -> Task:
    """Return the task at other values, with the expected score of each candidate so far."""
    scored = [candidate for candidate in state.candidates if candidate.n]
    means = model.means([candidate.values for candidate in scored])
    tried = [
        ScoredCandidate(candidate.values, (state.before or 0.0) + mean, candidate.n)
        for candidate, mean in zip(scored, means, strict=True)
    ]
    system = task.system.bind({**task.system.configuration, **values})
    return replace(task, system=system, tried=[*task.tried, *tried])


def incumbent_values(task: Task) -> Values:
    """Return the current values of the job's parameters."""
    return {key: task.system.configuration[key] for key in task.keys}


def changed_values(task: Task, values: Values) -> Values:
    """Return the values that differ from the incumbent's."""
    current = incumbent_values(task)
    return {key: x for key, x in values.items() if canonical_json(x) != canonical_json(current[key])}


def model_of(task: Task, state: JointProgress) -> GainModel:
    """Return the model of gains, given all scored candidates."""
    observations = [
        Observation(candidate.values, candidate.gain, candidate.squares, candidate.n)
        for candidate in state.candidates
        if candidate.n
    ]
    spaces = {key: task.system.parameters[key] for key in task.keys}
    return GainModel(spaces, incumbent_values(task), observations, state.variance)


def balanced_design(task: Task, levels: Mapping[str, Sequence[object]], count: int) -> list[Values]:
    """Return distinct combinations in which each value of a parameter occurs about equally often.

    A parameter whose only other values are new ones keeps the incumbent's in half of the candidates, so that
    its effect can be told from that of the others.
    """
    current, seen = incumbent_values(task), {canonical_json(incumbent_values(task))}
    tried = {canonical_json(dict(known.values)) for known in task.tried}
    keys = [key for key in task.keys if levels.get(key)]
    design: list[Values] = []
    for attempt in range(ATTEMPTS if keys else 0):
        excluded = tried if design or attempt < ATTEMPTS - 1 else set[str]()  # rather again than nothing
        rng = generator(task.seed, "design", attempt)
        columns = {key: _column(task, key, levels[key], len(keys), count, rng) for key in keys}
        for row in range(count):
            values = {**current, **{key: columns[key][row] for key in keys}}
            name = canonical_json(values)
            if len(design) < count and name not in seen and name not in excluded:
                seen.add(name)
                design.append(values)
    return design


def _column(
    task: Task, key: str, levels: Sequence[object], keys: int, count: int, rng: np.random.Generator
) -> list[object]:
    """Return the values of one parameter in each candidate of a design, in random order."""
    current = task.system.configuration[key]
    if isinstance(task.system.parameters[key], Choice | Int | Float):
        pattern = [*levels, current] if keys > 1 else list(levels)
        start = int(rng.integers(len(pattern)))
        values = [pattern[(start + row) % len(pattern)] for row in range(count)]
    else:
        changed = math.ceil(count * max(FEWEST_CHANGED, 1 / keys))
        values = [levels[row % len(levels)] for row in range(changed)] + [current] * (count - changed)
    return [values[i] for i in rng.permutation(count)]


def combinations(
    task: Task,
    candidates: Sequence[Values],
    levels: Mapping[str, Sequence[object]],
    start: Values,
    rng: np.random.Generator,
) -> list[Values]:
    """Return new random combinations of values: each parameter keeps that of ``start``, or gets another.

    Args:
        task: the job.
        candidates: the candidates so far, which are left out.
        levels: values of each parameter to combine, other than the incumbent's.
        start: the values of the leading candidate.
        rng: the random generator.
    """
    seen = {canonical_json(values) for values in (incumbent_values(task), *(t.values for t in task.tried))}
    seen |= {canonical_json(values) for values in candidates}
    found: list[Values] = []
    for _ in range(COMBINATIONS):
        values = dict(start)
        for key in task.keys:
            if rng.random() < 0.5:
                values[key] = _another(task, key, levels.get(key, []), rng)
        if canonical_json(values) not in seen:
            seen.add(canonical_json(values))
            found.append(values)
    return found


def _another(task: Task, key: str, levels: Sequence[object], rng: np.random.Generator) -> object:
    """Draw a value of a parameter: a known one, the incumbent's, or a new number of a large range."""
    space, current = task.system.parameters[key], task.system.configuration[key]
    if isinstance(space, Int | Float) and len(levels) >= DRAWS:
        return space.draw(rng)
    options = [*levels, current]
    return options[rng.integers(len(options))]


def explores(task: Task, state: JointProgress) -> bool:
    """Return whether new candidates may still be added."""
    if state.runs is None:
        return state.steps < EXPLORATION * STEPS
    return task.scorer.runs_left > (1 - EXPLORATION) * state.runs


def next_sizes(task: Task, state: JointProgress, examples: int) -> dict[int, int]:
    """Return the number of examples of each candidate of the next step that the runs left cover.

    All candidates of a step get equally many further examples.
    """
    runs, free = task.scorer.runs_left, task.scorer.has_free_repeats
    if not state.field or state.steps == (STEPS if state.runs is None else MOST_STEPS):
        return {}
    track = Track(task.minibatch, examples)
    width = task.candidates * state.price + 1
    step = max(track.fewest, math.ceil((state.runs or 0.0) / (STEPS * width)))
    if state.runs is None:
        step = task.minibatch
    if not free:  # all scores cost whole runs, also the incumbent's
        size = min(examples, max(step, 2 * state.known))
        return dict.fromkeys(state.field[: max(0, int((runs + 1e-9) / size) - 1)], size)
    predicted = max(state.price, task.prices.keys(task.keys))
    sizes: dict[int, int] = {}
    known, paid = state.known, 0.0
    for number in state.field:
        seen = state.candidates[number].n
        size = min(examples, seen + step)
        cost = predicted * (size - seen) + max(0, size - known)
        if paid + cost <= runs + 1e-9:
            paid, known = paid + cost, max(known, size)
            sizes[number] = size
    return sizes


async def score_step(
    task: Task, state: JointProgress, examples: Sequence[Example], sizes: Mapping[int, int]
) -> None:
    """Score candidates and the incumbent; those with equally many examples together."""
    free, scores = task.scorer.has_free_repeats, list[float]()
    new, spent = 0, 0.0
    for size, group in groupby(sorted(sizes, key=lambda number: (sizes[number], number)), sizes.__getitem__):
        field = [state.candidates[number] for number in group]
        new += sum(size - candidate.n if free else size for candidate in field)
        incumbent, *scored = await task.scorer.score([{}, *(c.values for c in field)], examples[:size])
        for candidate, evaluation in zip(field, scored, strict=True):
            _compare(candidate, evaluation, incumbent)
        scores += [score for evaluation in (incumbent, *scored) for score in evaluation.scores]
        spent += sum(evaluation.system_runs for evaluation in scored)
        if size >= state.known:
            state.known, state.before = size, incumbent.mean
    state.variance = float(np.var(scores))
    state.price = spent / new
    state.steps += 1


def proposal_of(task: Task, state: JointProgress) -> Proposal:
    """Propose the candidate with the highest expected gain, if it is positive."""
    scored = [candidate for candidate in state.candidates if candidate.n]
    if not scored:
        return Proposal({}, tried=0, note="no candidate could be scored")
    means = model_of(task, state).means([candidate.values for candidate in scored])
    best = int(np.argmax(means))
    if means[best] <= 0:
        return Proposal({}, state.before, state.before, len(scored), "no candidate is expected to gain")
    before, model = state.before or 0.0, model_of(task, state)
    found = without_idle_edits(task, model, scored[best].values)
    return Proposal(changed_values(task, found), before, before + model.means([found])[0], len(scored))


def without_idle_edits(task: Task, model: GainModel, values: Values) -> Values:
    """Return values whose texts have no edit without a measurable effect, by the scores so far.

    Edits are undone one after another, the one with the least effect first, as long as `KEPT_GAIN` of the
    expected gain remains: the current text takes the place of a text, or one clause is left out.
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
