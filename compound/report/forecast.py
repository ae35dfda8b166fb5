"""Format a dry run as text: the maximum cost of a run, and the gains that it can detect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compound.formatting import plural
from compound.report.facts.text import count, money
from compound.report.writing import align_columns

NUMBERS = ("calls", "prompt_tokens", "completion_tokens")
HEADINGS = ("at most", "system runs", "calls", "prompt tokens", "completion tokens", "dollars")


def forecast(facts: Mapping[str, Any]) -> str:
    """Return the result of `compound.api.estimate.estimate` as text for a terminal."""
    data, plan = facts["data"], facts["plan"]
    method, *baselines = facts["methods"]
    blocks = [
        [
            f"{facts['system']}: dry run, no requests are sent",
            f"run directory: {facts['run']}",
            f"method: {method}" + (f", baselines {', '.join(baselines)}" if baselines else ""),
            f"examples: {data['train']} train, {data['valid']} validation, {data['test']} test "
            f"({data['path']})",
            f"plan: {plural(plan['decisions'], 'decision')} at level {plan['level']:.3g}, "
            f"{count(plan['runs_per_decision'])} system runs each",
        ],
        bounds_table(facts),
        [
            f"not bounded: {reason}; a budget of calls, tokens or cost still applies"
            for reason in facts["at_most"]["why"]
        ],
        [f"budget.{name}: {count(b['limit'])} {b['counts']}" for name, b in facts["budget"].items()],
        [f"note: {note}" for note in (*facts["prospects"]["told"], *facts["notes"])],
        [_step(step) for step in facts["steps"]],
        facts["memory"],
        [f"warning: {text}" for text in (*facts["keys"], *facts["duplicates"])],
        list(facts["assumed"]),
    ]
    return "\n\n".join("\n".join(lines) for lines in blocks if lines)


def bounds_table(facts: Mapping[str, Any]) -> list[str]:
    """Return the table of upper bounds: a line for each part of each method, and the total."""
    several = len(facts["methods"]) > 1
    rows = [list(HEADINGS)]
    for row in facts["bounds"]:
        what = f"{row['method']}: {row['what']}" if several else row["what"]
        rows.append([what, _runs(row), *_numbers(row)])
    if several:
        rows.append(["all methods", _runs(facts["at_most"]), *_numbers(facts["at_most"])])
    return align_columns(rows)


def _runs(row: Mapping[str, Any]) -> str:
    if row["system_runs"] is not None:
        return count(row["system_runs"])
    return "no limit" if "system runs" in row.get("what", "total") or row.get("what") == "total" else ""


def _numbers(row: Mapping[str, Any]) -> list[str]:
    cost = (
        "unknown price" if not row["priced"] else "not bounded" if row["cost"] is None else money(row["cost"])
    )
    return [*("not bounded" if row[name] is None else count(row[name]) for name in NUMBERS), cost]


def _step(step: Mapping[str, Any]) -> str:
    ends = step.get("unless_ended_by")
    ended = f", unless the budget of {', '.join(ends)} ends first" if ends else ""
    return (
        f"training of {step['job']}: the budget covers {step['budget_holds']} of {step['steps']} steps of "
        f"{count(step['runs_per_step'])} system runs{ended}"
    )
