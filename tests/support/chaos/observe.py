"""Read the result of a run directory, without values that differ between processes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compound.optimization.runs.directory import read_records

TIMES = ("at", "spent", "seconds", "attempts", "memory", "prompt_tokens", "prompt_tokens_cached")
RECORDS = ("traces.jsonl", "candidates.jsonl", "memory.jsonl")


@dataclass(frozen=True)
class Ending:
    """The outcome of a finished run: equal for two runs that made the same decisions.

    Attributes:
        best: the values of ``best.json``.
        events: every event, without times, memory and token counts of one process.
        records: the same of traces, candidates and the method's memory.
        spent: the spending in the last event, without seconds.
    """

    best: Mapping[str, Any]
    events: tuple[str, ...]
    records: tuple[str, ...]
    spent: Mapping[str, float]


def ending(run: Path) -> Ending:
    """Return the outcome of a run."""
    *_, last = read_records(run, "events.jsonl")
    spent = {key: value for key, value in last["spent"].items() if key != "seconds"}
    best = json.loads((run / "best.json").read_text("utf-8"))["values"]
    return Ending(
        _without_places(best),
        tuple(_lines(run, "events.jsonl")),
        tuple(line for name in RECORDS for line in _lines(run, name)),
        spent,
    )


def _lines(run: Path, name: str) -> list[str]:
    found = read_records(run, name)
    return [json.dumps(_timeless(record), sort_keys=True) for record in found]


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
