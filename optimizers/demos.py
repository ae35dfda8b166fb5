"""Demonstrations bootstrapped from the system's own successful traces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from compound.component import Component
from compound.configuration import canonical, plain
from compound.trace import Trace

SHARPNESS = 4  # how much likelier a demonstration from a better trace is drawn
LONGEST = 1500  # characters of one demonstration


@dataclass(frozen=True)
class Found:
    """A demonstration and how likely it is to be drawn, against the others of its pool."""

    demo: Mapping[str, Any]
    weight: float


def bootstrap(traces: Sequence[Trace], component: Component) -> list[Found]:
    """Return demonstrations of a component: what it read and wrote in traces that scored, best first.

    A trace's demonstrations weigh ``(score / best) ** SHARPNESS``: where the best traces are exact, those
    with partial credit are rarely drawn; where none is, they are what there is. Equal demonstrations
    appear once; very long ones are left out.
    """
    scored = [(t.score or 0.0, t) for t in traces if t.failure is None and (t.score or 0.0) > 0]
    best = max((score for score, _ in scored), default=1.0)
    found: dict[str, Found] = {}
    for score, trace in sorted(scored, key=lambda pair: -pair[0]):
        for call in trace.calls_of(component.name):
            if call.failure is None:
                inputs = {n: v for n, v in call.inputs.items() if n not in component.settings}
                try:
                    demo = plain({"inputs": inputs, "outputs": dict(call.outputs)})
                except (TypeError, ValueError):  # what a configuration cannot hold
                    continue
                text = canonical(demo)
                if len(text) <= LONGEST:
                    found.setdefault(text, Found(demo, (score / best) ** SHARPNESS))
    return list(found.values())


def draw(pool: Sequence[Found], most: int, rng: np.random.Generator) -> list[Mapping[str, Any]]:
    """Draw 1 to ``most`` different demonstrations, by weight."""
    count = int(rng.integers(1, min(most, len(pool)) + 1))
    weights = np.array([max(found.weight, 1e-9) for found in pool])
    chosen = rng.choice(len(pool), size=count, replace=False, p=weights / weights.sum())
    return [pool[i].demo for i in chosen]
