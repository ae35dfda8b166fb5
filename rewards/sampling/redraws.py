"""Choose the settings that a call of a component is drawn again with, so that its outputs differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from compound.graph.component import Component
from compound.graph.configuration import canonical_json, to_readable_values
from compound.graph.space import Choice, Float, Int

WARM = 1.0  # temperature of additional draws of a greedy component without other settings to vary
TRIES = 200  # random settings to consider for the draws of a call; a few for each option of a small space

CallSettings = Mapping[str, object]


def settings_of_draws(
    component: Component,
    current: CallSettings,
    proposals: Sequence[CallSettings],
    draws: int,
    rng: np.random.Generator,
) -> list[CallSettings]:
    """Return the settings of each additional draw of a call, as changes of the component's own.

    Draws have different settings as long as there are any: first the proposed ones, then random choices and
    numbers. Every second draw of a stochastic component keeps its settings, as do all draws without others.
    A deterministic component is not drawn with the same settings twice, but at a temperature if it has one.

    Args:
        component: the component.
        current: its own settings.
        proposals: other settings, such as candidate prompts.
        draws: the maximum number of draws.
        rng: chooses among proposals and options.
    """
    is_fixed = component.deterministic(current)
    others = _distinct(current, _candidates(component, proposals, rng))
    found: list[CallSettings] = []
    for i in range(draws):
        is_plain = not is_fixed and i % 2 == 1
        other = None if is_plain else next(others, None)
        if other is not None:
            found.append(other)
        elif not is_fixed:
            found.append({})
        elif "temperature" in component.settings:
            found.append({"temperature": WARM})
    return found


def _candidates(
    component: Component, proposals: Sequence[CallSettings], rng: np.random.Generator
) -> Iterator[CallSettings]:
    """Yield the proposals in random order, then random choices and numbers."""
    yield from (proposals[i] for i in rng.permutation(len(proposals)))
    spaces = {n: s for n, s in component.parameters.items() if isinstance(s, Choice | Int | Float)}
    for _ in range(TRIES if spaces else 0):
        yield {name: space.draw(rng) for name, space in spaces.items()}


def _distinct(current: CallSettings, candidates: Iterator[CallSettings]) -> Iterator[CallSettings]:
    """Yield the candidates that differ from the current settings and from earlier candidates."""
    known = {canonical_json({})}
    for settings in candidates:
        changed = {name: value for name, value in settings.items() if current.get(name) != value}
        key = canonical_json(to_readable_values(changed))
        if key not in known:
            known.add(key)
            yield settings
