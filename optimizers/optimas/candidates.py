"""Candidates of one component: prompts and demonstrations, or choices and numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from compound.example import Example
from compound.execution.rng import derive_seed, generator
from compound.graph.configuration import canonical_json
from compound.graph.space import Choice, Float, Int
from compound.optimization.method import ScoredCandidate, Task
from compound.optimizers.search.prompts import PromptSearch, bootstrap_pools, demo_keys, split, text_keys
from compound.optimizers.search.sampling import enumerate_settings, suggest

DRAWS = 8  # attempts per candidate, since some draws are equal

__all__ = ["first_candidates", "has_more", "next_candidates"]


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
    scored: Sequence[tuple[Mapping[str, object], float]],
) -> list[dict[str, object]]:
    """Return the candidates of another round: prompts near the best one, or suggestions of TPE.

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
        shown_gains = [({}, 0.0), *scored]  # the incumbent's own values, then the candidates'
        tried = [ScoredCandidate({**current, **values}, gain, 1) for values, gain in shown_gains]
        system = task.system.bind({**task.system.configuration, **best})
        # a model that writes prompts sees all earlier ones with their gains
        nearby = replace(task, system=system, tried=[*task.tried, *tried])
        return [*again, *({**best, **values} for values in await prompts.candidates(nearby, {}, shown))]
    trials = [({key: values[key] for key in task.keys}, gain) for values, gain in scored]
    known = {canonical_json(dict(values)) for values, _ in scored}
    found: list[dict[str, object]] = []
    for _ in range(task.candidates):
        values = suggest(task, trials, found)
        if canonical_json(values) not in known:
            known.add(canonical_json(values))
            found.append(values)
    return [*again, *found]


def _random_values(task: Task, number: int) -> dict[str, object]:
    rng = generator(task.seed, "draw", number)
    spaces = {key: task.system.parameters[key] for key in task.keys}
    return {key: s.draw(rng) for key, s in spaces.items() if isinstance(s, Choice | Int | Float)}
