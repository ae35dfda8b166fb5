"""Metrics of events and training steps, by the names that trackers show."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from compound.report.training.steps import step_metrics

SCORES = ("mean", "low", "high", "failed", "n")
JOB = ("job", "tried", "runs", "train_before", "train_after")
DECISION = ("decision", "p", "level", "accepted")


def event_metrics(event: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of an event; empty if it has none but the budget.

    ``best/valid`` is the score of the best configuration on the validation split. A decision evaluates it
    again, with fresh samples if the system is stochastic.

    >>> event_metrics({"event": "start", "mean": 0.25, "low": None, "high": None, "n": 40, "failed": 0})
    {'valid/mean': 0.25, 'valid/failed': 0, 'valid/n': 40, 'best/valid': 0.25}
    """
    match event["event"]:
        case "start":
            found = {**_named("valid", event, SCORES), "best/valid": event.get("mean")}
        case "job":
            found = {**_named("job", event, JOB), **dict(_accuracies(event))}
        case "decision":
            found = _decision(event)
        case "test_before" | "test_after":
            found = _named(str(event["event"]), event, SCORES)
        case "retry":
            found = _named(str(event["evaluation"]), event["after"], SCORES)
        case _:
            found = {}
    return _finite(found)


def budget_metrics(event: Mapping[str, Any]) -> dict[str, float]:
    """Return the amounts spent so far, as ``budget/system_runs`` and so on."""
    return _finite({f"budget/{name}": value for name, value in (event.get("spent") or {}).items()})


def training_metrics(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a training step, as ``training/reward`` and so on."""
    step = record.get("step")
    found = {f"training/{name}": value for name, value in step_metrics(record).items()}
    return _finite({**found, "training/step": step})


def _decision(event: Mapping[str, Any]) -> dict[str, object]:
    found: dict[str, object] = _named("decision", event, DECISION)
    if "before" in event:
        before, after = event["before"]["mean"], event["after"]["mean"]
        found |= {"decision/before": before, "decision/after": after}
        found["best/valid"] = after if event["accepted"] else before
        found |= _named("decision/gain", event.get("gain") or {}, ("mean", "low", "high"))
    return found


def _accuracies(event: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    accuracies = (event.get("facts") or {}).get("accuracy") or {}
    for component, accuracy in accuracies.items():
        yield f"reward/accuracy/{component}", accuracy.get("mean")


def _named(prefix: str, values: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, object]:
    return {f"{prefix}/{name}": values[name] for name in names if name in values}


def _finite(values: Mapping[str, object]) -> dict[str, float]:
    numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
    return {name: int(v) if isinstance(v, bool) else v for name, v in numbers.items() if math.isfinite(v)}
