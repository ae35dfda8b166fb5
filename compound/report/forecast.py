"""Format a dry run as text: the plan in counts, the gains it can detect, and what a pilot measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from compound.core.formatting import plural
from compound.report.text import align_columns, count, money

FORMATS: Mapping[str, Callable[[float], str]] = {
    "tokens": count,
    "dollars": money,
    "seconds": lambda value: f"{value:.3g}",
    "minutes": lambda value: f"{value:.3g}",
}


def forecast(facts: Mapping[str, Any]) -> str:
    """Return the result of `compound.api.estimate.estimate` as text for a terminal."""
    data, plan, pilot = facts["data"], facts["plan"], facts.get("pilot")
    method, *baselines = facts["methods"]
    sends = "only the requests of the pilot are sent" if pilot else "no requests are sent"
    blocks = [
        [
            f"{facts['system']}: dry run, {sends}",
            f"run directory: {facts['run']}",
            f"method: {method}" + (f", baselines {', '.join(baselines)}" if baselines else ""),
            f"examples: {data['train']} train, {data['valid']} validation, {data['test']} test "
            f"({data['path']})",
            f"plan: {plural(plan['decisions'], 'decision')} at level {plan['level']:.3g}, "
            f"{count(plan['runs_per_decision'])} system runs each",
        ],
        _runs_table(facts),
        _calls_table(facts),
        _requests_table(facts),
        _pilot_lines(pilot) if pilot else [],
        [
            f"not known: {text}"
            for text in (*facts["not_known"], *(pilot or {}).get("not_known", ()))
        ]
        + [f"not counted: {text}" for text in facts["not_counted"]],
        [
            f"budget.{name}: {count(b['limit'])} ({b['counts']})"
            for name, b in facts["budget"].items()
        ],
        [f"note: {note}" for note in (*facts["notes"], *facts["prospects"]["told"])],
        [_step(step) for step in facts["steps"]],
        facts["memory"],
        [f"warning: {text}" for text in (*facts["keys"], *facts["duplicates"])],
    ]
    return "\n\n".join("\n".join(lines) for lines in blocks if lines)


def _runs_table(facts: Mapping[str, Any]) -> list[str]:
    rows = [["system runs, at most", "search", "test split", "total"]]
    for row in facts["system_runs"]:
        numbers = (row["search"], row["test"], row["total"])
        rows.append([row["method"], *map(_at_most, numbers)])
    if len(rows) > 2:
        totals = [row["total"] for row in facts["system_runs"]]
        rows.append(["all methods", "", "", _at_most(None if None in totals else sum(totals))])
    return align_columns(rows)


def _calls_table(facts: Mapping[str, Any]) -> list[str]:
    """Return the calls of one run; their models are in the last column."""
    rows = [["calls of one system run", "number", "models"]]
    rows += [[row["component"], row["per_run"], ", ".join(row["models"])] for row in facts["calls"]]
    total = facts["model_calls"]
    limit = "no limit is known" if total is None else f"at most {count(total)}"
    if total is not None and total > _calls_of_whole_runs(facts):
        limit += ", if the other calls of runs are cached: such a run counts as a fraction"
    return [*align_columns(rows), f"calls of models in all: {limit}"]


def _calls_of_whole_runs(facts: Mapping[str, Any]) -> int:
    """Return the calls of models of as many whole runs as the plan has, with its proposal requests."""
    runs: float = sum(row["total"] for row in facts["system_runs"])
    per_run: float = sum(row["at_most"] for row in facts["calls"] if row["models"])
    requests: int = sum(row["at_most"] for row in facts["requests"])
    return math.ceil(runs * per_run + requests)


def _requests_table(facts: Mapping[str, Any]) -> list[str]:
    several = len(facts["methods"]) > 1
    rows = [["proposal requests of the run", "at most", "model"]]
    for row in facts["requests"]:
        what = f"{row['method']}: {row['what']}" if several else row["what"]
        rows.append([what, _at_most(row["at_most"]), row["model"] or "none"])
    return align_columns(rows) if len(rows) > 1 else []


def _at_most(value: float | None) -> str:
    return "no limit" if value is None else count(value)


def _pilot_lines(pilot: Mapping[str, Any]) -> list[str]:
    """Return what a pilot spent and measured, and the range of the whole run."""
    limits = ", ".join(f"{name} {value:g}" for name, value in pilot["limit"].items())
    spent, total = pilot["spent"], pilot["total"]
    tokens = spent["prompt_tokens"] + spent["completion_tokens"]
    rows = [["one system run", "lowest", "mean", "highest"]]
    for name, row in pilot["per_run"].items():
        cells = ["unknown"] * 3 if row is None else [FORMATS[name](row[k]) for k in rows[0][1:]]
        rows.append([name, *cells])
    whole = [["the whole plan", "from", "to"]]
    whole += [
        [name, *("no limit" if v is None else FORMATS[name](v) for v in row.values())]
        for name, row in total.items()
    ]
    return [
        f"pilot: {pilot['runs']} of {plural(pilot['examples'], 'validation example')}, "
        f"{count(spent['calls'])} requests, {count(tokens)} tokens, "
        f"{money(spent['cost'], spent['unpriced'])} and {spent['seconds']:.3g} seconds "
        f"spent (limits: {limits})",
        *(f"warning: a run of the pilot failed: {text}" for text in pilot["failures"]),
        "",
        *align_columns(rows),
        "",
        *align_columns(whole),
        "",
        *(f"extrapolated: {text}" for text in pilot["extrapolated"]),
    ]


def _step(step: Mapping[str, Any]) -> str:
    ends = step.get("unless_ended_by")
    ended = f", unless the budget of {', '.join(ends)} ends first" if ends else ""
    return (
        f"training of {step['job']}: the budget covers {step['budget_holds']} of {step['steps']} "
        f"steps of {count(step['runs_per_step'])} system runs{ended}"
    )
