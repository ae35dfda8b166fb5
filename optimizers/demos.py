"""Demonstrations bootstrapped from the system's own successful traces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from compound.component import Component
from compound.configuration import canonical
from compound.trace import Trace

SUCCESS = 0.5  # the score from which a trace counts as successful
LONGEST = 1500  # characters of one demonstration


def bootstrap(
    traces: Sequence[Trace], component: Component, success: float = SUCCESS
) -> list[dict[str, Any]]:
    """Return demonstrations of a component: what it read and wrote in successful traces, best first.

    When fewer than two traces reach ``success``, the best ones with any score count instead. Equal
    demonstrations appear once; very long ones are left out.
    """
    ranked = sorted(
        (t for t in traces if t.failure is None and (t.score or 0) > 0), key=lambda t: -(t.score or 0)
    )
    good = [t for t in ranked if (t.score or 0) >= success]
    chosen = good if len(good) >= 2 else ranked[:4]
    found: dict[str, dict[str, Any]] = {}
    for trace in chosen:
        for call in trace.calls_of(component.name):
            if call.failure is None:
                inputs = {n: v for n, v in call.inputs.items() if n not in component.settings}
                demo = {"inputs": inputs, "outputs": dict(call.outputs)}
                text = canonical(demo)
                if len(text) <= LONGEST:
                    found.setdefault(text, demo)
    return list(found.values())


def draw(pool: Sequence[Mapping[str, Any]], most: int, rng: np.random.Generator) -> list[Mapping[str, Any]]:
    """Draw 1 to ``most`` different demonstrations."""
    count = int(rng.integers(1, min(most, len(pool)) + 1))
    return [pool[i] for i in rng.choice(len(pool), size=count, replace=False)]
