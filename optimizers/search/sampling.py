"""Search of choices and numbers: races all settings of a small space, samples a large one by TPE."""

from __future__ import annotations

import itertools
import math
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass

from pydantic import Field

from compound.example import Example
from compound.execution.rng import generator
from compound.graph.configuration import canonical_json
from compound.graph.space import Choice, Float, Int, Space
from compound.optimization.bounds import JobBound, Outlook
from compound.optimization.method import Progress, Proposal, Task
from compound.optimizers.search.prompts import RaceProgress, first_rung_size, race_incumbent, split
from compound.optimizers.search.racing import Track
from compound.optimizers.search.tpe import next_point
from compound.storage.state import State

FINALISTS = 3
ROUND = 4  # trials scored concurrently
DRAWS = 8  # attempts per random setting, since some draws are duplicates


class Sample(State):
    """A setting with its mean score on a minibatch."""

    values: dict[str, object]
    mean: float


class NumberProgress(RaceProgress):
    """Progress of `NumberSearch`.

    Attributes:
        samples: the settings that TPE suggested, in order; empty if the whole space is raced.
        finalists: the settings to race; ``None`` until sampling is completed.
    """

    samples: list[Sample] = Field(default_factory=list)
    finalists: list[dict[str, object]] | None = None


@dataclass(frozen=True)
class NumberSearch:
    """Optimizer that searches `Choice`, `Int` and `Float` parameters jointly."""

    def requires_for(self, spaces: Iterable[object]) -> tuple[str, ...]:
        """Return the library that suggests values; small sets of values are compared without it."""
        return ("optuna",) if any(isinstance(space, Float) for space in spaces) else ()

    def bound(self, outlook: Outlook) -> JobBound:
        """Declare that the job sends no requests except the runs of the system."""
        spaces = [outlook.system.parameters[key] for key in outlook.keys]
        settings = math.prod(len(_options(space, outlook.candidates)) for space in spaces) - 1
        if settings <= outlook.candidates:
            return JobBound(candidates=min(settings, first_rung_size(outlook)))
        trials = _affordable_trials(outlook.runs / outlook.minibatch, outlook.prices.keys(outlook.keys))
        sampled = int(min(2 * outlook.candidates, trials)) if trials >= 1 else first_rung_size(outlook)
        return JobBound(candidates=sampled)

    async def propose(self, task: Task) -> AsyncIterator[Progress | Proposal]:
        """Race the whole space if it is small; otherwise sample it, and race the best samples."""
        state = NumberProgress() if task.resume is None else NumberProgress.from_json(task.resume)
        _, examples = split(task)
        if state.finalists is None:
            grid = enumerate_settings(task)
            if len(grid) <= task.candidates:
                state.finalists = race_order(task, grid, len(examples))
            else:
                async for event in self._sample(task, state, examples):
                    yield event
                state.finalists = _best(state.samples) or _random_settings(task, len(examples))
            count = len(state.finalists)
            yield Progress(state.to_json(), f"{count} setting{'s' * (count != 1)} to compare")
        async for result in race_incumbent(task, state.finalists, examples, state):
            yield result

    async def _sample(
        self, task: Task, state: NumberProgress, examples: Sequence[Example]
    ) -> AsyncIterator[Progress]:
        """Score the suggestions of TPE in rounds of a few settings, so that models get full batches."""
        batch = examples[: task.minibatch]
        total = 2 * task.candidates
        price = task.prices.keys(task.keys) if task.scorer.has_free_repeats else 1.0
        while (done := len(state.samples)) < total:
            trials_left = _affordable_trials(task.scorer.runs_left / len(batch), price)
            affordable = int(min(trials_left, ROUND, total - done))
            if affordable < 1:
                return
            trials = [(sample.values, sample.mean) for sample in state.samples]
            round_: list[dict[str, object]] = []
            for _ in range(affordable):
                round_.append(suggest(task, trials, round_))
            for values, scored in zip(round_, await task.scorer.score(round_, batch), strict=True):
                state.samples.append(Sample(values=values, mean=scored.mean))
            done, best = len(state.samples), max(sample.mean for sample in state.samples)
            yield Progress(state.to_json(), f"best {best:.3f}", step=done, of=total)


def _affordable_trials(minibatches: float, price: float) -> float:
    """Return the number of samples that a job can score, besides the incumbent and each finalist once.

    Args:
        minibatches: system runs left, divided by the size of a minibatch.
        price: system runs of a candidate on one example.
    """
    left = minibatches - 1 - FINALISTS * price
    return left / price if price else math.inf if left >= 0 else 0.0


def race_order(task: Task, grid: Sequence[dict[str, object]], examples: int) -> list[dict[str, object]]:
    """Return settings in the order in which they are raced.

    If the budget does not cover all of them, settings that no earlier job scored come first, in random order.
    """
    if _first_rung_size(task, len(grid), examples) >= len(grid):
        return list(grid)
    tried = {canonical_json(dict(known.values)) for known in task.tried}
    shuffled = [grid[i] for i in generator(task.seed, "grid").permutation(len(grid))]
    return sorted(shuffled, key=lambda setting: canonical_json(setting) in tried)


def _random_settings(task: Task, examples: int) -> list[dict[str, object]]:
    """Return as many random settings as can be raced; used if the budget does not also cover sampling."""
    current = {key: task.system.configuration[key] for key in task.keys}
    count = _first_rung_size(task, task.candidates, examples)
    settings: list[dict[str, object]] = []
    for attempt in range(DRAWS * task.candidates):
        rng = generator(task.seed, "draw", attempt)
        spaces = {key: task.system.parameters[key] for key in task.keys}
        setting: dict[str, object] = {
            key: s.draw(rng) for key, s in spaces.items() if isinstance(s, Choice | Int | Float)
        }
        if len(settings) < count and setting != current and setting not in settings:
            settings.append(setting)
    return settings


def _first_rung_size(task: Task, candidates: int, examples: int) -> int:
    """Return the number of candidates in the first rung of a race."""
    price = task.prices.keys(task.keys)
    track = Track(task.minibatch, examples, price, free_repeats=task.scorer.has_free_repeats)
    return track.entrants(candidates, task.scorer.runs_left)


def enumerate_settings(task: Task) -> list[dict[str, object]]:
    """Return all combinations of values except the current one.

    If there are more than ``task.candidates``, the list is incomplete, but longer than ``task.candidates``.
    """
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
    """Return the next suggestion of TPE, given the scored trials and the pending ones."""
    spaces = {key: task.system.parameters[key] for key in task.keys}
    return next_point(spaces, trials, pending, task.seed, "searching numbers")


def _best(samples: Sequence[Sample]) -> list[dict[str, object]]:
    """Return the best `FINALISTS` distinct settings."""
    distinct: list[dict[str, object]] = []
    for sample in sorted(samples, key=lambda sample: -sample.mean):
        if sample.values not in distinct:
            distinct.append(sample.values)
    return distinct[:FINALISTS]
