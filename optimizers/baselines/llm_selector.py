"""LLMSelector: coordinate ascent over choices, by a vote of the examples.

Chen et al. 2025, "Optimizing Model Selection for Compound AI Systems". For one slot (choice) after
another, every option is run on the same examples. Each example votes for all options with its best
score, and the option with most votes is selected. The search starts from the incumbent, whereas the
paper's starting point is random.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

from pydantic import Field

from compound.core.engine import Message, Request
from compound.core.errors import TooManyFailures, first_leaf
from compound.core.example import Example
from compound.core.storage.state import State
from compound.execution.trace import Trace
from compound.graph.configuration import canonical_json, component_of
from compound.graph.space import Choice
from compound.graph.system import System
from compound.optimization.method import JobPlan, PlannedJob, Progress, Proposal, RequestCount, Task
from compound.optimization.settings.base import ModelName, Settings
from compound.optimizers.search.proposers.proposing import (
    ask_for_proposal,
    diagram,
    fields,
    result,
    steps,
)
from compound.optimizers.search.sources import split

AFFORDED = 2  # the number of examples is chosen such that the budget covers this many rounds over all slots

Allocation = dict[str, object]  # an option for each slot


class Selection(State):
    """Progress of `LLMSelector`."""

    rows: int
    allocations: list[Allocation]
    # the mean score of each allocation that was run, by its canonical JSON; `None` if it failed
    means: dict[str, float | None] = Field(default_factory=dict)


class DiagnoserSettings(Settings):
    """Diagnosis of the components responsible for failures."""

    lm: ModelName | None = None
    """The model that diagnoses; the system's own by default."""


@dataclass(frozen=True)
class LLMSelector:
    """Optimizer that selects an option for each `Choice` parameter.

    The score of an option on an example is ``beta * score + alpha * (1 - blame)``.
    """

    alpha: float = 0.0  # the weight of the diagnoser's verdict; with 0, the diagnoser is not used
    beta: float = 1.0  # the weight of the global reward
    rows: int = 100
    # the maximum number of rounds over all slots, since votes, unlike means, may cycle
    rounds: int = 4
    lm: str | None = None

    def plan(self, job: PlannedJob) -> JobPlan:
        """Return a verdict on each run of each option in each round, if the diagnoser is used."""
        spaces = [job.system.parameters[key] for key in job.keys]
        options = [len(space.options) + 1 for space in spaces if isinstance(space, Choice)]
        if not self.alpha:
            return JobPlan()
        rows = min(self.rows, len(job.train))
        if math.isfinite(job.runs) and options:
            affordable = job.runs // max(1, AFFORDED * sum(n - 2 for n in options))
            rows = int(min(rows, max(affordable, job.minibatch)))
        return JobPlan([RequestCount("verdicts", self.rounds * sum(options) * rows, self.lm)])

    async def propose(self, task: Task) -> AsyncIterator[Progress | Proposal]:
        """Cycle through the slots until a whole round changes nothing, or the budget is used up."""
        slots = {key: _options(task, key) for key in task.keys}
        slots = {key: options for key, options in slots.items() if len(options) > 1}
        _, examples = split(task)
        start = {key: task.system.configuration[key] for key in slots}
        if task.resume is not None:
            state = Selection.from_json(task.resume)
        else:
            state = Selection(
                rows=self._affordable(task, slots, len(examples)), allocations=[start]
            )
        rows = examples[: state.rows]
        while len(state.allocations) <= self.rounds * len(slots):
            last = state.allocations[-len(slots) - 1 :]
            if len(last) > len(slots) and len(set(map(canonical_json, last))) == 1:
                break  # a whole round changed nothing
            step = len(state.allocations) - 1
            key = list(slots)[step % len(slots)]
            current = state.allocations[-1]
            arms = [{**current, key: option} for option in slots[key]]
            known = [
                canonical_json(arm) in state.means and task.scorer.has_free_repeats for arm in arms
            ]
            cost = (len(arms) - sum(known)) * len(rows)
            if not rows or max(cost, 1) > task.scorer.runs_left:  # even cached runs reserve one run
                break
            means, scores = await self._scores(task, arms, rows, key)
            chosen, votes = plurality(
                scores, [*map(canonical_json, arms)].index(canonical_json(current))
            )
            state.allocations.append(arms[chosen])
            state.means.update(zip(map(canonical_json, arms), means, strict=True))
            note = f"{key}: {slots[key][chosen]!r} has {votes[chosen]} of {sum(votes)} votes"
            yield Progress(state.to_json(), note, step=step + 1)
        yield _proposal(state)

    def _affordable(self, task: Task, slots: Mapping[str, Sequence[object]], examples: int) -> int:
        cached = (
            1 if task.scorer.has_free_repeats else 0
        )  # the selected option was run in the previous step
        runs = cached + AFFORDED * sum(len(options) - cached for options in slots.values())
        first = max(
            map(len, slots.values()), default=1
        )  # a minibatch must be affordable for one step
        least = min(task.minibatch, task.scorer.runs_left // first)
        return int(min(self.rows, examples, max(task.scorer.runs_left // max(runs, 1), least)))

    async def _scores(
        self, task: Task, arms: Sequence[Allocation], rows: Sequence[Example], key: str
    ) -> tuple[list[float | None], list[list[float]]]:
        """Return each option's mean reward (``None`` if too many runs failed) and its scores by example."""
        if not self.alpha:
            evaluations = await task.scorer.score(arms, rows)
            scores = [[self.beta * score for score in e.scores] for e in evaluations]
            return [e.mean for e in evaluations], scores
        results: list[tuple[float | None, list[float]]] = []
        broken: TooManyFailures | None = None
        for arm in arms:
            try:
                results.append(await self._diagnose(task, arm, rows, component_of(key)))
            except (
                TooManyFailures
            ) as error:  # a broken option loses; if all fail, the cause lies elsewhere
                broken = error
                results.append((None, [-math.inf] * len(rows)))
        if broken is not None and all(mean is None for mean, _ in results):
            raise broken
        return [mean for mean, _ in results], [scores for _, scores in results]

    async def _diagnose(
        self, task: Task, arm: Allocation, rows: Sequence[Example], component: str
    ) -> tuple[float, list[float]]:
        traces = await task.scorer.traces(arm, rows)
        try:
            async with asyncio.TaskGroup() as group:
                verdicts = [
                    group.create_task(self._blame(task, trace, row, component))
                    for trace, row in zip(traces, rows, strict=True)
                ]
        except BaseExceptionGroup as errors:
            raise first_leaf(errors) from None
        rewards = [trace.score or 0.0 for trace in traces]
        scores = [
            self.beta * reward + self.alpha * (1 - verdict.result())
            for reward, verdict in zip(rewards, verdicts, strict=True)
        ]
        return sum(rewards) / len(rewards), scores

    async def _blame(self, task: Task, trace: Trace, example: Example, component: str) -> float:
        request = verdict_request(task.system, trace, example, component)
        verdict = await ask_for_proposal(task, request, self.lm, blame)
        return UNDECIDED if verdict is None else verdict


def plurality(scores: Sequence[Sequence[float]], current: int) -> tuple[int, list[int]]:
    """Return the index of the option with most votes, and the votes.

    Each example votes for all options with its best score. Ties go to the current option if it is
    among the best, otherwise to the first one.

    >>> plurality([[1, 0, 0], [1, 1, 0], [0, 1, 0]], current=0)
    (1, [2, 3, 2])
    """
    votes = [0] * len(scores)
    for row in zip(*scores, strict=True):
        votes = [count + (score == max(row)) for count, score in zip(votes, row, strict=True)]
    return (current if votes[current] == max(votes) else votes.index(max(votes))), votes


def _options(task: Task, key: str) -> tuple[object, ...]:
    """Return the options of a parameter, including its current value; empty if it is no choice."""
    space, current = task.system.parameters[key], task.system.configuration[key]
    if not isinstance(space, Choice):
        return ()
    # the current value may be a stored reward that chooses per input, which is none of the options
    return space.options if current in space.options else (current, *space.options)


def _proposal(state: Selection) -> Proposal:
    """Propose the last allocation, whatever its mean score: the acceptance test decides about it."""
    first, last, means = state.allocations[0], state.allocations[-1], state.means
    if not means:
        return Proposal(
            {}, note="no options to choose from, or too few system runs to compare them"
        )
    differs = {k for k, value in last.items() if canonical_json(value) != canonical_json(first[k])}
    changed = {key: value for key, value in last.items() if key in differs}
    note = "" if changed else "the votes changed no choice"
    return Proposal(
        changed, means[canonical_json(first)], means[canonical_json(last)], len(means), note
    )


UNDECIDED = 0.5  # the blame if a model gives no verdict
MAX_TOKENS = 300  # of a verdict with its reasons
VERDICT = re.compile(r"\[\s*(?:final\s+answer\s*:\s*(yes|no)|correct\s+answer)\s*\]", re.IGNORECASE)


def verdict_request(system: System, trace: Trace, example: Example, component: str) -> Request:
    """Return the request that asks whether a component is responsible for a wrong result."""
    text = (
        f"A system works in steps:\n{diagram(system)}\n\n"
        f"One run of it read {fields(example.inputs)}\n{steps(trace)}\n"
        f"The result: {result(trace)}\n"
        f"The expected result: {fields(example.gold)}\n\n"
        f"Is the step {component} responsible for a wrong result? Say why in a few sentences. Then end with "
        "[correct answer] if the result is right, [final answer: Yes] if the step is responsible for a wrong "
        "result, or [final answer: No] if it is not."
    )
    return Request((Message("user", text),), max_tokens=MAX_TOKENS)


def blame(reply: str) -> float | None:
    """Return 1 if the last verdict of a reply blames the component, 0 if not, ``None`` without one.

    >>> blame("It lost the name. [final answer: Yes]"), blame("[correct answer]"), blame("Perhaps.")
    (1.0, 0.0, None)
    """
    verdicts = list(VERDICT.finditer(reply))
    return float((verdicts[-1][1] or "no").lower() == "yes") if verdicts else None
