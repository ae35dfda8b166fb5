"""Read the result of a run directory, without values that differ between processes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compound.optimization.runs.directory import RunDirectory

TIMES = ("at", "spent", "seconds", "memory", "prompt_tokens", "prompt_tokens_cached")


@dataclass(frozen=True)
class Ending:
    """The outcome of a finished run: equal for two runs that made the same decisions.

    Attributes:
        best: the values of ``best.json``.
        events: every event, without times, memory and token counts of one process.
        spent: the spending in the last event, without seconds.
    """

    best: Mapping[str, Any]
    events: tuple[str, ...]
    spent: Mapping[str, float]


def ending(run: Path) -> Ending:
    events = list(RunDirectory.read_only(run, "events.jsonl"))
    spent = {key: value for key, value in events[-1]["spent"].items() if key != "seconds"}
    best = json.loads((run / "best.json").read_text("utf-8"))["values"]
    return Ending(
        _without_places(best),
        tuple(json.dumps(_timeless(e), sort_keys=True) for e in events),
        spent,
    )


def _timeless(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            k: _timeless(v)
            for k, v in value.items()
            if k not in TIMES and not k.endswith("_seconds")
        }
    return [_timeless(item) for item in value] if isinstance(value, list) else value


def _without_places(value: Any) -> Any:
    """Drop the paths of adapters, whose digests identify their contents."""
    if isinstance(value, Mapping):
        return {
            k: _without_places(v)
            for k, v in value.items()
            if not (k == "path" and "sha256" in value)
        }
    return [_without_places(item) for item in value] if isinstance(value, list) else value
