"""Values of single parameters, from which a joint search combines candidates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from compound.execution.rng import derive_seed, generator
from compound.graph.configuration import canonical_json
from compound.graph.space import Choice, Demos, Float, Int
from compound.optimization.method import Task
from compound.optimizers.search.prompts import Exemplars, Pools, PromptSearch, text_keys
from compound.optimizers.search.proposers.demos import draw_demos

DRAWS = 16  # random numbers of a range too large to enumerate

__all__ = ["DRAWS", "levels_of_each", "new_texts", "starting_levels"]

Levels = dict[str, list[object]]


async def starting_levels(
    task: Task, prompts: PromptSearch, pools: Pools, candidates: int, shown: Exemplars | None = None
) -> Levels:
    """Return values of each parameter, other than the current ones.

    Choices and small ranges are enumerated; there are half as many demonstrations and texts as candidates,
    since half of the candidates keep the current ones.

    Args:
        task: the job.
        prompts: proposes prompts.
        pools: demonstrations by parameter.
        candidates: the number of candidates to combine.
        shown: worked examples for a model that writes prompts.
    """
    number = levels_of_each(len(task.keys), candidates)
    levels: Levels = {}
    for key in task.keys:
        drawn: list[object] = []
        space, rng = task.system.parameters[key], generator(task.seed, "levels", key)
        if isinstance(space, Demos) and pools.get(key):
            drawn = [draw_demos(pools[key], space.max, rng) for _ in range(number)]
        elif isinstance(space, Choice):
            drawn = [*space.options]
        elif isinstance(space, Int) and space.high - space.low < DRAWS:
            drawn = [*range(space.low, space.high + 1)]
        elif isinstance(space, Int | Float):
            drawn = [space.draw(rng) for _ in range(DRAWS)]
        levels[key] = _others(task, key, drawn)
    return levels | await new_texts(task, prompts, number * len(text_keys(task)), shown)


def levels_of_each(keys: int, candidates: int) -> int:
    """Return the number of new texts or demonstrations of each of several parameters."""
    return candidates if keys == 1 else (candidates + 1) // 2


async def new_texts(
    task: Task, prompts: PromptSearch, count: int, shown: Exemplars | None = None, step: int = 0
) -> Levels:
    """Return up to ``count`` new texts in total, by parameter; each ``step`` draws others."""
    active = tuple(name for name in prompts.proposers if name != "demos")
    keys = text_keys(task)
    if not active or not keys or not count:
        return {}
    seed = derive_seed(task.seed, "texts", step)
    texts = replace(task, keys=tuple(keys), seed=seed, candidates=count)
    found: Levels = {}
    for values in await replace(prompts, proposers=active).candidates(texts, {}, shown):
        for key, text in values.items():
            found.setdefault(key, []).append(text)
    return found


def _others(task: Task, key: str, values: Sequence[object]) -> list[object]:
    """Return the distinct values other than the current one."""
    known = {canonical_json(task.system.configuration[key])}
    found: list[object] = []
    for value in values:
        if canonical_json(value) not in known:
            known.add(canonical_json(value))
            found.append(value)
    return found
