"""Choices and numbers: a small space is raced as a whole, a large one is sampled by TPE."""

from __future__ import annotations

import itertools
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

from pydantic import Field

from compound.example import Example
from compound.execution.rng import generator
from compound.graph.configuration import canonical
from compound.graph.space import Choice, Float, Int, Space
from compound.optimization.bounds import JobBound, Outlook
from compound.optimization.method import Progress, Proposal, Task
from compound.optimizers.search.prompts import Contest, race_incumbent, raced, split
from compound.optimizers.search.racing import rungs
from compound.optimizers.search.tpe import next_point
from compound.storage.state import State

FINALISTS = 3
ROUND = 4  # trials scored at once
DRAWS = 8  # for each random setting, since some are drawn twice


class Sample(State):
    """A setting that was scored on a minibatch, with its mean."""

    values: dict[str, object]
    mean: float


class NumberProgress(Contest):
    """The progress of `NumberSearch`.

    Attributes:
        samples: the settings that TPE suggested, in order; none where the whole space is raced.
        finalists: the settings to race; ``None`` as long as settings are sampled.
    """

    samples: list[Sample] = Field(default_factory=list)
    finalists: list[dict[str, object]] | None = None


@dataclass(frozen=True)
class NumberSearch:
    """Searches `Choice`, `Int` and `Float` parameters together."""

    def bound(self, outlook: Outlook) -> JobBound:
        """Declare that no model is asked."""
        spaces = [outlook.system.parameters[key] for key in outlook.keys]
        settings = math.prod(len(_options(space, outlook.candidates)) for space in spaces) - 1
        if settings <= outlook.candidates:
            return JobBound(candidates=min(settings, raced(outlook)))
        trials = outlook.runs / outlook.minibatch - FINALISTS - 1
        sampled = int(min(2 * outlook.candidates, trials)) if trials >= 1 else raced(outlook)
        return JobBound(candidates=sampled)

    async def propose(self, task: Task) -> AsyncIterator[Progress | Proposal]:
        """Race the whole space when it is small; else sample, then race the best."""
        state = NumberProgress() if task.resume is None else NumberProgress.from_json(task.resume)
        _, examples = split(task)
        if state.finalists is None:
            grid = enumerated(task)
            if len(grid) <= task.candidates:
                state.finalists = in_order(task, grid, len(examples))
            else:
                async for event in self._sample(task, state, examples):
                    yield event
                state.finalists = _best(state.samples) or _drawn(task, len(examples))
            count = len(state.finalists)
            yield Progress(state.to_json(), f"{count} setting{'s' * (count != 1)} to race")
        async for result in race_incumbent(task, state.finalists, examples, state):
            yield result

    async def _sample(
        self, task: Task, state: NumberProgress, examples: Sequence[Example]
    ) -> AsyncIterator[Progress]:
        """Score what TPE suggests in rounds: a few settings at once, so that models get full batches."""
        batch = examples[: task.minibatch]
        wanted = 2 * task.candidates
        while (done := len(state.samples)) < wanted:
            affordable = int(min(task.scorer.left / len(batch) - FINALISTS - 1, ROUND, wanted - done))
            if affordable < 1:
                return
            trials = [(sample.values, sample.mean) for sample in state.samples]
            round_: list[dict[str, object]] = []
            for _ in range(affordable):
                round_.append(suggest(task, trials, round_))
            for values, scored in zip(round_, await task.scorer.score(round_, batch), strict=True):
                state.samples.append(Sample(values=values, mean=scored.mean))
            done, best = len(state.samples), max(sample.mean for sample in state.samples)
            yield Progress(state.to_json(), f"best {best:.3f}", step=done, of=wanted)


def in_order(task: Task, grid: Sequence[dict[str, object]], examples: int) -> list[dict[str, object]]:
    """Return settings in the order in which they are raced, for a job whose runs do not hold them all.

    Those that no earlier job scored come first, the others after them; each part in an order of its own.
    """
    if _raced(task, len(grid), examples) >= len(grid):
        return list(grid)
    tried = {canonical(dict(known.values)) for known in task.tried}
    shuffled = [grid[i] for i in generator(task.seed, "grid").permutation(len(grid))]
    return sorted(shuffled, key=lambda setting: canonical(setting) in tried)


def _drawn(task: Task, examples: int) -> list[dict[str, object]]:
    """Return as many random settings as can be raced, for a job whose runs hold no sample beside a race."""
    current = {key: task.system.configuration[key] for key in task.keys}
    raced = _raced(task, task.candidates, examples)
    found: list[dict[str, object]] = []
    for attempt in range(DRAWS * task.candidates):
        rng = generator(task.seed, "draw", attempt)
        spaces = {key: task.system.parameters[key] for key in task.keys}
        setting: dict[str, object] = {
            key: s.draw(rng) for key, s in spaces.items() if isinstance(s, Choice | Int | Float)
        }
        if len(found) < raced and setting != current and setting not in found:
            found.append(setting)
    return found


def _raced(task: Task, candidates: int, examples: int) -> int:
    """Return how many candidates the first rung of a race holds."""
    plan = rungs(candidates, task.minibatch, examples, task.scorer.left, task.scorer.free_repeats)
    return plan[0][0] if plan else 0


def enumerated(task: Task) -> list[dict[str, object]]:
    """Return every other combination of values, or more than ``task.candidates`` when there are too many."""
    options = [_options(task.system.parameters[key], task.candidates) for key in task.keys]
    current = {key: task.system.configuration[key] for key in task.keys}
    combinations = itertools.islice(itertools.product(*options), task.candidates + 2)
    settings = [dict(zip(task.keys, values, strict=True)) for values in combinations]
    return [setting for setting in settings if setting != current]


def _options(space: Space, most: int) -> list[object]:
    if isinstance(space, Choice):
        return list(space.options)
    if isinstance(space, Int) and space.high - space.low <= most:
        return list(range(space.low, space.high + 1))
    return [None] * (most + 2)  # too many to enumerate


def suggest(
    task: Task,
    trials: Sequence[tuple[Mapping[str, object], float]],
    pending: Sequence[Mapping[str, object]] = (),
) -> dict[str, object]:
    """Return what TPE would try next, given the trials so far and those whose score is still to come."""
    spaces = {key: task.system.parameters[key] for key in task.keys}
    return next_point(spaces, trials, pending, task.seed, "searching numbers")


def _best(samples: Sequence[Sample]) -> list[dict[str, object]]:
    """Return the best few distinct settings."""
    found: list[dict[str, object]] = []
    for sample in sorted(samples, key=lambda sample: -sample.mean):
        if sample.values not in found:
            found.append(sample.values)
    return found[:FINALISTS]
