"""Coordinate ascent over choices, by a vote of the examples: LLMSelector.

Chen et al. 2025, "Optimizing Model Selection for Compound AI Systems". One slot after the other, every
option is run on the same examples; each example votes for all options tied for its best score, and the
option with most votes stays. The start is the incumbent, where the paper draws one at random.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

from pydantic import Field

from compound.errors import TooManyFailures, first_of
from compound.example import Example
from compound.execution.trace import Trace
from compound.graph.configuration import canonical, component_of
from compound.graph.space import Choice
from compound.optimization.bounds import JobBound, Outlook
from compound.optimization.method import Progress, Proposal, Task
from compound.optimizers.baselines.diagnoser import UNDECIDED, ask, blame, judged, verdicts
from compound.optimizers.search.prompts import split
from compound.optimizers.search.proposing import ask as send
from compound.settings.base import Settings
from compound.settings.references import ModelName
from compound.storage.state import State

AFFORDED = 2  # rounds over all slots that the number of examples is chosen for

Allocation = dict[str, object]  # an option for each parameter


class Selection(State):
    """The progress of `LLMSelector`.

    Attributes:
        rows: the number of examples that vote.
        allocations: the allocation that the job starts from, and the one in place after each step.
        means: the mean score of each allocation that was run, by its canonical JSON; ``None`` where it
            failed.
    """

    rows: int
    allocations: list[Allocation]
    means: dict[str, float | None] = Field(default_factory=dict)


class DiagnoserSettings(Settings):
    """How failures are attributed to components."""

    lm: ModelName | None = None
    """The model that diagnoses; the system's own by default."""


@dataclass(frozen=True)
class LLMSelector:
    """Chooses one option for each `Choice` parameter.

    An example's score of an option is ``beta * score + alpha * (1 - blame)``.

    Attributes:
        alpha: the weight of the diagnoser's verdict; with 0 no model is asked.
        beta: the weight of the global reward.
        rows: the most examples that vote.
        rounds: the most rounds over all slots, since votes, unlike means, may go in circles.
        lm: the model that diagnoses; the system's own when ``None``.
    """

    alpha: float = 0.0
    beta: float = 1.0
    rows: int = 100
    rounds: int = 4
    lm: str | None = None

    def bound(self, outlook: Outlook) -> JobBound:
        """Declare a verdict on each run of each option in each round, where a model diagnoses."""
        spaces = [outlook.system.parameters[key] for key in outlook.keys]
        options = [len(space.options) + 1 for space in spaces if isinstance(space, Choice)]
        if not self.alpha:
            return JobBound()
        rows = min(self.rows, len(outlook.train))
        if math.isfinite(outlook.runs) and options:
            held = outlook.runs // max(1, AFFORDED * sum(n - 2 for n in options))
            rows = int(min(rows, max(held, outlook.minibatch)))
        calls = self.rounds * sum(options) * rows
        return JobBound([verdicts(outlook, calls, self.lm)])

    async def propose(self, task: Task) -> AsyncIterator[Progress | Proposal]:
        """Go round the slots until a whole round changes nothing, or the share is spent."""
        slots = {key: _options(task, key) for key in task.keys}
        slots = {key: options for key, options in slots.items() if len(options) > 1}
        _, examples = split(task)
        start = {key: task.system.configuration[key] for key in slots}
        if task.resume is not None:
            state = Selection.from_json(task.resume)
        else:
            state = Selection(rows=self._affordable(task, slots, len(examples)), allocations=[start])
        rows = examples[: state.rows]
        while not self._is_done(state.allocations, len(slots)):
            step = len(state.allocations) - 1
            key = list(slots)[step % len(slots)]
            current = state.allocations[-1]
            arms = [{**current, key: option} for option in slots[key]]
            known = [canonical(arm) in state.means and task.scorer.free_repeats for arm in arms]
            cost = (len(arms) - sum(known)) * len(rows)
            if not rows or max(cost, 1) > task.scorer.left:  # even a run from the cache must fit
                break
            means, scores = await self._scores(task, arms, rows, key)
            chosen, votes = plurality(scores, [*map(canonical, arms)].index(canonical(current)))
            state.allocations.append(arms[chosen])
            state.means.update(zip(map(canonical, arms), means, strict=True))
            note = f"{key}: {slots[key][chosen]!r} has {votes[chosen]} of {sum(votes)} votes"
            yield Progress(state.to_json(), note, step=step + 1)
        yield _proposal(state)

    def _affordable(self, task: Task, slots: Mapping[str, Sequence[object]], examples: int) -> int:
        """Return how many examples vote: as many as two rounds can pay for, but a minibatch at least."""
        again = 1 if task.scorer.free_repeats else 0  # the option in place was run in the step before
        runs = again + AFFORDED * sum(len(options) - again for options in slots.values())
        first = max(map(len, slots.values()), default=1)  # options of one step
        least = min(task.minibatch, task.scorer.left // first)
        return int(min(self.rows, examples, max(task.scorer.left // max(runs, 1), least)))

    def _is_done(self, allocations: Sequence[Allocation], slots: int) -> bool:
        """Return whether a whole round changed nothing, or there were enough rounds."""
        last = allocations[-slots - 1 :]
        settled = len(last) == slots + 1 and len(set(map(canonical, last))) == 1
        return settled or len(allocations) > self.rounds * slots

    async def _scores(
        self, task: Task, arms: Sequence[Allocation], rows: Sequence[Example], key: str
    ) -> tuple[list[float | None], list[list[float]]]:
        """Return each arm's mean reward (``None`` when it is broken), and its scores by example."""
        if not self.alpha:
            evaluations = await task.scorer.score(arms, rows)
            scores = [[self.beta * score for score in e.scores] for e in evaluations]
            return [e.mean for e in evaluations], scores
        found: list[tuple[float | None, list[float]]] = []
        broken: TooManyFailures | None = None
        for arm in arms:
            try:
                found.append(await self._diagnosed(task, arm, rows, component_of(key)))
            except TooManyFailures as error:  # one option is broken, unless all are
                broken = error
                found.append((None, [-math.inf] * len(rows)))
        if broken is not None and all(mean is None for mean, _ in found):
            raise broken
        return [mean for mean, _ in found], [scores for _, scores in found]

    async def _diagnosed(
        self, task: Task, arm: Allocation, rows: Sequence[Example], component: str
    ) -> tuple[float, list[float]]:
        """Run one arm, and ask for a verdict on each of its traces, all in flight together."""
        traces = await task.scorer.traces(arm, rows)
        try:
            async with asyncio.TaskGroup() as group:
                asked = [
                    group.create_task(self._blame(task, trace, row, component))
                    for trace, row in zip(traces, rows, strict=True)
                ]
        except BaseExceptionGroup as errors:
            raise first_of(errors) from None
        rewards = [trace.score or 0.0 for trace in traces]
        scores = [
            self.beta * reward + self.alpha * (1 - verdict.result())
            for reward, verdict in zip(rewards, asked, strict=True)
        ]
        return sum(rewards) / len(rewards), scores

    async def _blame(self, task: Task, trace: Trace, example: Example, component: str) -> float:
        request = ask(task.system, trace, example, component)
        verdict = await send(task, request, self.lm, lambda reply: blame(reply) if judged(reply) else None)
        return UNDECIDED if verdict is None else verdict


def plurality(scores: Sequence[Sequence[float]], current: int) -> tuple[int, list[int]]:
    """Return the option with most votes, and the votes; each example votes for all its best options.

    Where several have most votes, the current one stays, or the first of them comes.

    Args:
        scores: for each option, its scores by example.
        current: the option in place.

    >>> plurality([[1, 0, 0], [1, 1, 0], [0, 1, 0]], current=0)
    (1, [2, 3, 2])
    """
    votes = [0] * len(scores)
    for row in zip(*scores, strict=True):
        votes = [count + (score == max(row)) for count, score in zip(votes, row, strict=True)]
    return (current if votes[current] == max(votes) else votes.index(max(votes))), votes


def _options(task: Task, key: str) -> tuple[object, ...]:
    """Return what a parameter may be, the value in place among it; nothing where it is no choice."""
    space, current = task.system.parameters[key], task.system.configuration[key]
    if not isinstance(space, Choice):
        return ()
    return space.options if current in space.options else (current, *space.options)  # a stored reward


def _proposal(state: Selection) -> Proposal:
    """Propose the allocation that the votes led to, whatever its mean: the loop decides about it."""
    first, last, means = state.allocations[0], state.allocations[-1], state.means
    if not means:
        return Proposal({}, note="nothing to choose from, or too few runs to compare anything")
    changed = {key: value for key, value in last.items() if canonical(value) != canonical(first[key])}
    note = "" if changed else "the votes kept every choice"
    return Proposal(changed, means[canonical(first)], means[canonical(last)], len(means), note)
