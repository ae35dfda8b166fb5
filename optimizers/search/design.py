"""Combinations of values of several parameters: a first design, and random variations of a leader."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from compound.execution.rng import generator
from compound.graph.configuration import canonical_json, component_of
from compound.graph.space import Choice, Float, Int
from compound.optimization.method import Task

ATTEMPTS = 6  # per candidate, since duplicates are dropped
COMBINATIONS = 256  # of values, from which new candidates are chosen
DRAWS = 16  # random numbers of a range too large to enumerate
OPTIONS = 64  # random combinations of the values of one component

Values = dict[str, object]


def options_of(space: Choice | Int | Float, rng: np.random.Generator) -> Sequence[object]:
    """Return the values of a choice or of a small range, or numbers drawn from a large one."""
    if isinstance(space, Choice):
        return space.options
    if isinstance(space, Int) and not _is_large(space):
        return range(space.low, space.high + 1)
    return [space.draw(rng) for _ in range(DRAWS)]


def _is_large(space: Int | Float) -> bool:
    """Return whether a range has too many numbers to enumerate."""
    return isinstance(space, Float) or space.high - space.low >= DRAWS


def incumbent_values(task: Task) -> Values:
    """Return the current values of the job's parameters."""
    return {key: task.system.configuration[key] for key in task.keys}


def changed_values(task: Task, values: Values) -> Values:
    """Return the values that differ from the incumbent's."""
    current = incumbent_values(task)
    return {
        key: x for key, x in values.items() if canonical_json(x) != canonical_json(current[key])
    }


def balanced_design(
    task: Task, levels: Mapping[str, Sequence[object]], count: int, changed: float
) -> list[Values]:
    """Return distinct combinations in which each value of a parameter occurs about equally often.

    A parameter whose only other values are new ones keeps the incumbent's in some of the
    candidates, so that its effect can be told from that of the others.
    """
    current, seen = incumbent_values(task), {canonical_json(incumbent_values(task))}
    tried = {canonical_json(dict(known.values)) for known in task.tried}
    keys = [key for key in task.keys if levels.get(key)]
    design: list[Values] = []
    for attempt in range(ATTEMPTS if keys else 0):
        excluded = (
            tried if design or attempt < ATTEMPTS - 1 else set[str]()
        )  # rather again than nothing
        rng = generator(task.seed, "design", attempt)
        columns = {
            key: _column(task, key, levels[key], len(keys), count, changed, rng) for key in keys
        }
        for row in range(count):
            values = {**current, **{key: columns[key][row] for key in keys}}
            name = canonical_json(values)
            if len(design) < count and name not in seen and name not in excluded:
                seen.add(name)
                design.append(values)
    return design


def _column(
    task: Task,
    key: str,
    levels: Sequence[object],
    keys: int,
    count: int,
    changed: float,
    rng: np.random.Generator,
) -> list[object]:
    """Return the values of one parameter in each candidate of a design, in random order."""
    current = task.system.configuration[key]
    if isinstance(task.system.parameters[key], Choice | Int | Float):
        pattern = [*levels, current] if keys > 1 else list(levels)
        start = int(rng.integers(len(pattern)))
        values = [pattern[(start + row) % len(pattern)] for row in range(count)]
    else:
        new = math.ceil(count * max(changed, 1 / keys))
        values = [levels[row % len(levels)] for row in range(new)] + [current] * (count - new)
    return [values[i] for i in rng.permutation(count)]


def combinations(
    task: Task,
    candidates: Iterable[Values],
    levels: Mapping[str, Sequence[object]],
    start: Values,
    rng: np.random.Generator,
) -> list[Values]:
    """Return new random combinations of values: each parameter keeps that of ``start``, or gets another."""
    seen = {
        canonical_json(values)
        for values in (incumbent_values(task), *(t.values for t in task.tried))
    }
    seen |= {canonical_json(values) for values in candidates}
    found: list[Values] = []
    for _ in range(COMBINATIONS):
        values = dict(start)
        for key in task.keys:
            if rng.random() < 0.5:
                values[key] = _another(task, key, levels.get(key, ()), rng)
        if canonical_json(values) not in seen:
            seen.add(canonical_json(values))
            found.append(values)
    return found


def _another(task: Task, key: str, levels: Sequence[object], rng: np.random.Generator) -> object:
    """Draw a value of a parameter: a known one, the incumbent's, or a new number of a large range."""
    space, current = task.system.parameters[key], task.system.configuration[key]
    if isinstance(space, Int | Float) and _is_large(space):
        return space.draw(rng)
    options = [*levels, current]
    return options[rng.integers(len(options))]


def values_of(
    component: str,
    task: Task,
    candidates: Iterable[Values],
    levels: Mapping[str, Sequence[object]],
    rng: np.random.Generator,
) -> list[Values]:
    """Return combinations of values of one component's parameters: those of candidates, and random ones."""
    keys = [key for key in task.keys if component_of(key) == component]
    found = [{key: values[key] for key in keys} for values in candidates]
    found += [
        {key: _another(task, key, levels.get(key, ()), rng) for key in keys} for _ in range(OPTIONS)
    ]
    return list({canonical_json(values): values for values in found}.values())
