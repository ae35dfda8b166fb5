"""Parameters of a run, by dotted names, from its resolved configuration."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from compound.security.sanitize import sanitize_text

SECTIONS = ("system", "optimize", "engines", "data", "metric", "versions", "start")
MAX_CHARACTERS = 500  # of a value; MLflow accepts 6,000, its table shows far fewer


def run_parameters(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the parameters that trackers show; long values are truncated.

    >>> run_parameters({"system": "qa", "optimize": {"seed": 0, "budget": {"calls": 40, "cost": None}}})
    {'system': 'qa', 'optimize.seed': '0', 'optimize.budget.calls': '40'}
    """
    chosen = {name: config[name] for name in SECTIONS if name in config}
    return {name: sanitize_text(text)[:MAX_CHARACTERS] for name, text in _flat(chosen, "")}


def _flat(value: object, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, str):
        yield name, value
    elif isinstance(value, Sequence | int | float):
        yield name, json.dumps(value, ensure_ascii=False, default=str)
