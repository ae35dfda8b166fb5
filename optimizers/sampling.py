"""Choices and numbers: a small space is raced as a whole, a large one is sampled by TPE."""

from __future__ import annotations

import itertools
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from compound.bounds import JobBound, Outlook
from compound.configuration import canonical
from compound.optimization import Progress, Proposal, Task
from compound.optimizers.prompts import contest, raced, split
from compound.optimizers.racing import rungs
from compound.optimizers.tpe import next_point
from compound.space import Choice, Float, Int, Space
from compound.streams import generator

FINALISTS = 3
ROUND = 4  # trials scored at once
DRAWS = 8  # for each random setting, since some are drawn twice


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
        state = dict(task.resume or {"trials": [], "finalists": None, "race": None})
        _, examples = split(task)
        if state["finalists"] is None:
            grid = enumerated(task)
            if len(grid) <= task.candidates:
                state["finalists"] = in_order(task, grid, len(examples))
            else:
                async for trials in self._sample(task, state["trials"], examples):
                    state = {**state, "trials": trials}
                    yield Progress(state, f"{len(trials)} trials: best {max(t[1] for t in trials):.3f}")
                finalists = _best(state["trials"]) or _drawn(task, len(examples))
                state = {**state, "finalists": finalists}
            yield Progress(state, f"{_settings(len(state['finalists']))} to race")
        async for event in contest(task, state["finalists"], examples, state):
            yield event

    async def _sample(
        self, task: Task, trials: Sequence[Any], examples: Sequence[Any]
    ) -> AsyncIterator[list[Any]]:
        """Yield the trials so far after each round: a few at once, so that models get full batches."""
        trials = list(trials)
        batch = examples[: task.minibatch]
        wanted = 2 * task.candidates
        while len(trials) < wanted:
            affordable = int(min(task.scorer.left / len(batch) - FINALISTS - 1, ROUND, wanted - len(trials)))
            if affordable < 1:
                return
            round_: list[dict[str, Any]] = []
            for _ in range(affordable):
                round_.append(suggest(task, trials, round_))
            evaluations = await task.scorer.score(round_, batch)
            trials += [[values, e.mean] for values, e in zip(round_, evaluations, strict=True)]
            yield list(trials)


def in_order(task: Task, grid: Sequence[dict[str, Any]], examples: int) -> list[dict[str, Any]]:
    """Return settings in the order in which they are raced, for a job whose runs do not hold them all.

    Those that no earlier job scored come first, the others after them; each part in an order of its own.
    """
    if _raced(task, len(grid), examples) >= len(grid):
        return list(grid)
    tried = {canonical(dict(known.values)) for known in task.tried}
    shuffled = [grid[i] for i in generator(task.seed, "grid").permutation(len(grid))]
    return sorted(shuffled, key=lambda setting: canonical(setting) in tried)


def _drawn(task: Task, examples: int) -> list[dict[str, Any]]:
    """Return as many random settings as can be raced, for a job whose runs hold no sample beside a race."""
    current = {key: task.system.configuration[key] for key in task.keys}
    raced = _raced(task, task.candidates, examples)
    found: list[dict[str, Any]] = []
    for attempt in range(DRAWS * task.candidates):
        rng = generator(task.seed, "draw", attempt)
        spaces = {key: task.system.parameters[key] for key in task.keys}
        setting = {key: s.draw(rng) for key, s in spaces.items() if isinstance(s, Choice | Int | Float)}
        if len(found) < raced and setting != current and setting not in found:
            found.append(setting)
    return found


def _raced(task: Task, candidates: int, examples: int) -> int:
    """Return how many candidates the first rung of a race holds."""
    plan = rungs(candidates, task.minibatch, examples, task.scorer.left, task.scorer.free_repeats)
    return plan[0][0] if plan else 0


def enumerated(task: Task) -> list[dict[str, Any]]:
    """Return every other combination of values, or more than ``task.candidates`` when there are too many."""
    options = [_options(task.system.parameters[key], task.candidates) for key in task.keys]
    current = {key: task.system.configuration[key] for key in task.keys}
    combinations = itertools.islice(itertools.product(*options), task.candidates + 2)
    settings = [dict(zip(task.keys, values, strict=True)) for values in combinations]
    return [setting for setting in settings if setting != current]


def _options(space: Space, most: int) -> list[Any]:
    if isinstance(space, Choice):
        return list(space.options)
    if isinstance(space, Int) and space.high - space.low <= most:
        return list(range(space.low, space.high + 1))
    return [None] * (most + 2)  # too many to enumerate


def suggest(task: Task, trials: Sequence[Any], pending: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """Return what TPE would try next, given the trials so far and those whose score is still to come."""
    spaces = {key: task.system.parameters[key] for key in task.keys}
    return next_point(spaces, trials, pending, task.seed, "searching numbers")


def _best(trials: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the best few distinct settings of the trials."""
    ranked = sorted(range(len(trials)), key=lambda i: (-trials[i][1], i))
    found: list[dict[str, Any]] = []
    for i in ranked:
        if trials[i][0] not in found:
            found.append(trials[i][0])
    return found[:FINALISTS]


def _settings(n: int) -> str:
    return f"{n} setting" if n == 1 else f"{n} settings"
