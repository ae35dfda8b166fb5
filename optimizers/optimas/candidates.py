"""Candidates of one component: prompts and demonstrations, or choices and numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from compound.example import Example
from compound.execution.rng import derive_seed, generator
from compound.graph.configuration import canonical_json
from compound.graph.space import Choice, Float, Int
from compound.optimization.method import ScoredCandidate, Task
from compound.optimizers.search.gain_model import GainModel, Observation
from compound.optimizers.search.prompts import PromptSearch, bootstrap_pools, demo_keys, split, text_keys
from compound.optimizers.search.sampling import enumerate_settings, suggest

COMBINATIONS = 256  # random ones, from which a round chooses
LEAST_SD = 1e-3  # of an estimate
DRAWS = 8  # attempts per candidate, since some draws are equal

__all__ = ["Scored", "first_candidates", "has_more", "next_candidates"]


@dataclass(frozen=True)
class Scored:
    """A candidate with its estimated gain, and the standard deviation of the estimate if it is known."""

    values: Mapping[str, object]
    gain: float
    sd: float | None = None


async def first_candidates(
    task: Task, prompts: PromptSearch, pool: Sequence[Example]
) -> list[dict[str, object]]:
    """Return the first candidates of a job: proposed prompts, or all or random settings."""
    if demo_keys(task) or text_keys(task):
        pools = await bootstrap_pools(task, pool) if "demos" in prompts.proposers else {}
        return await prompts.candidates(task, pools, await prompts.exemplars(task, pool or split(task)[1]))
    grid = enumerate_settings(task)
    if len(grid) <= task.candidates:
        return list(grid)
    current = {key: task.system.configuration[key] for key in task.keys}
    found: dict[str, dict[str, object]] = {canonical_json(current): current}
    for number in range(DRAWS * task.candidates):
        if len(found) > task.candidates:
            break
        values = _random_values(task, number)
        found.setdefault(canonical_json(values), values)
    return list(found.values())[1:]


def has_more(task: Task) -> bool:
    """Return whether `next_candidates` can return candidates that the first ones did not include."""
    return bool(text_keys(task)) or (not demo_keys(task) and len(enumerate_settings(task)) > task.candidates)


async def next_candidates(
    task: Task,
    prompts: PromptSearch,
    number: int,
    best: Mapping[str, object],
    scored: Sequence[Scored],
) -> list[dict[str, object]]:
    """Return the candidates of another round.

    These are prompts near the best one; untried combinations of several choices and numbers, by a draw from
    the posterior of their gains (Thompson sampling); or suggestions of TPE for a single parameter.

    Args:
        task: the job.
        prompts: proposes prompts.
        number: the number of the round.
        best: the best values so far, which are a candidate again; empty if they are the incumbent's.
        scored: the candidates so far with their estimated gains.
    """
    again = [dict(best)] if best else []
    pool, examples = split(task)
    shown = await prompts.exemplars(task, pool or examples)
    task = replace(
        task, seed=derive_seed(task.seed, "round", number), candidates=task.candidates - len(again)
    )
    if text_keys(task):
        current = {key: task.system.configuration[key] for key in task.keys}
        tried = [ScoredCandidate({**current, **each.values}, each.gain, 1) for each in scored]
        system = task.system.bind({**task.system.configuration, **best})
        # a model that writes prompts sees all earlier ones with their gains
        nearby = replace(task, system=system, tried=[*task.tried, *tried])
        return [*again, *({**best, **values} for values in await prompts.candidates(nearby, {}, shown))]
    estimated = [each for each in scored if each.sd is not None]
    if len(task.keys) > 1 and estimated:
        return [*again, *_promising(task, estimated)]
    trials = [({key: each.values[key] for key in task.keys}, each.gain) for each in scored]
    known = {canonical_json(dict(each.values)) for each in scored}
    found: list[dict[str, object]] = []
    for _ in range(task.candidates):
        values = suggest(task, trials, found)
        if canonical_json(values) not in known:
            known.add(canonical_json(values))
            found.append(values)
    return [*again, *found]


def _promising(task: Task, scored: Sequence[Scored]) -> list[dict[str, object]]:
    """Return untried combinations, those with the highest gains in a draw from their posterior."""
    current = {key: task.system.configuration[key] for key in task.keys}
    known = {canonical_json(current), *(canonical_json(dict(each.values)) for each in scored)}
    drawn = [_random_values(task, number) for number in range(COMBINATIONS)]
    points = list(
        {name: values for values in drawn if (name := canonical_json(values)) not in known}.values()
    )
    if not points:
        return []
    variances = [max(each.sd or 0.0, LEAST_SD) ** 2 for each in scored]
    observations = [
        Observation(each.values, each.gain, variance=variance)
        for each, variance in zip(scored, variances, strict=True)
    ]
    spaces = {key: task.system.parameters[key] for key in task.keys}
    model = GainModel(spaces, current, observations, score_variance=float(np.mean(variances)))
    ranked = np.argsort(-model.draw(points, generator(task.seed, "combinations")), kind="stable")
    return [points[i] for i in ranked[: task.candidates]]


def _random_values(task: Task, number: int) -> dict[str, object]:
    rng = generator(task.seed, "draw", number)
    spaces = {key: task.system.parameters[key] for key in task.keys}
    return {key: s.draw(rng) for key, s in spaces.items() if isinstance(s, Choice | Int | Float)}
