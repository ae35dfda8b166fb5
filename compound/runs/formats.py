"""Run directories of earlier versions: their results can be read, but the runs cannot be resumed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compound.engine import Usage, UsageDocument, UsageRow
from compound.optimization.method import JobRecord
from compound.runs.state import RunState
from compound.settings.renamed import REWARDS

__all__ = ["read_state", "rename_event", "reward_section"]

EVENTS = {"baseline": "start", "sweep": "round"}  # names of events until checkpoint format 2


def rename_event(event: dict[str, Any]) -> dict[str, Any]:
    """Return an event with its current name.

    >>> rename_event({"event": "baseline", "n": 40})
    {'event': 'start', 'n': 40}
    """
    return {**event, "event": EVENTS.get(event["event"], event["event"])}


def reward_section(rewards: Mapping[str, object]) -> dict[str, dict[str, object]]:
    """Map ``optimize.rewards`` of earlier configurations to the current sections.

    >>> reward_section({"inputs": 20, "train": False, "rank": 16, "sure": 0.9})
    {'pairs': {'inputs': 20}, 'reward': {'sufficient_accuracy': 0.9}}
    """
    found: dict[str, dict[str, object]] = {}
    lora: dict[str, object] = {}
    for name, value in rewards.items():
        match REWARDS.get(name, "").split("."):
            case ["reward", "lora", leaf]:
                lora[leaf] = value
            case [part, leaf] if name != "train":
                found.setdefault(part, {})[leaf] = value
    if rewards.get("train"):
        found.setdefault("reward", {})["lora"] = lora
    return found


def read_state(stored: Mapping[str, Any]) -> RunState:
    """Convert the state of a checkpoint of format 1 or 2, which was a single dictionary.

    Raises:
        StateError: a field is missing or has the wrong type.
    """
    return RunState.from_json(
        {
            "format": RunState.FORMAT,
            "before": _evaluation(stored.get("before")),
            "search": _search(stored) if "plan" in stored and "incumbent" in stored else None,
            "test_before": _final(stored, "test_before"),
            "test_after": _final(stored, "test_after"),
            "meters": [{**meter, "usage": _usage(meter["usage"])} for meter in stored.get("meters", [])],
            "memory": stored.get("memory", {}),
            "done": stored.get("done", False),
            "reported": stored.get("reported", False),
        }
    )


def _search(stored: Mapping[str, Any]) -> dict[str, object]:
    records = [
        {name: record[name] for name in JobRecord.model_fields if name in record}
        for record in stored.get("history", [])
    ]
    ledger = stored.get("proposals") or {}
    usage = ledger.get("usage")
    return {
        "plan": stored["plan"],
        "free_runs": stored.get("free"),
        "best": stored["best"],
        "incumbent": _evaluation(stored["incumbent"]),
        "ledger": {"models": ledger.get("models", {}), **({"usage": _usage(usage)} if usage else {})},
        "working": stored.get("working", {}),
        "decisions": stored.get("decision", 0),
        "history": records,
        "stopped": stored.get("stopped", ""),
    }


def _final(stored: Mapping[str, Any], name: str) -> dict[str, object] | None:
    return {"evaluation": _evaluation(stored[name])} if name in stored else None


def _evaluation(evaluation: Mapping[str, Any] | None) -> dict[str, object] | None:
    return {**evaluation, "usage": _usage(evaluation["usage"])} if evaluation else None


def _usage(usage: UsageDocument | UsageRow) -> UsageDocument:
    """Return usage by name; format 1 stored a bare list."""
    return Usage.from_json(usage).to_json()
