"""Write ``report.md`` and ``report.html`` of a run, and its summary for a terminal."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from compound.core.security.untrusted import UntrustedFolder
from compound.optimization.proposals import OUTCOMES
from compound.optimization.runs.candidate_record import FEWEST
from compound.optimization.runs.directory import inconsistency_errors
from compound.optimization.settings.optimize import OptimizeSettings
from compound.optimization.settings.sections import defaults
from compound.report.facts import summarize
from compound.report.figures import curve_svg
from compound.report.graph import graph_svg
from compound.report.headline import SPLITS
from compound.report.record import Facts
from compound.report.rendering import (
    NONE,
    Columns,
    Figure,
    Table,
    brief,
    draw_figure,
    escape,
    render_html,
    render_markdown,
    table,
    tabulate,
)
from compound.report.rewards import reward_facts, reward_figures, use_table, weights_of
from compound.report.text import (
    align_columns,
    count,
    escape_invisible,
    limits,
    line,
    line_diff,
    money,
    seconds,
    shown,
    signed,
)
from compound.report.training import answers_of, speeds_of, trained_components, training_facts
from compound.report.training_curves import caption, panels_with_data, training_svg
from compound.rewards.model import NONE as NO_BACKBONE

SPENDING: Columns = {
    "#search runs": "system_runs | count",
    "#test runs": "test_runs | count",
    "#calls": "calls | count",
    "#tokens": "(prompt_tokens + completion_tokens if completion_tokens is number else none) | count",
    "#cost": "cost | money(unpriced or 0)",
    "#time": "seconds | seconds",
}
SUPPORTED = "NONE if accepted is undefined else accepted ~ ' of ' ~ decisions"


def report_context(facts: Facts) -> dict[str, Any]:
    """Return the variables of the template of a report."""
    return {
        "facts": facts,
        "methods": methods_table(facts),
        "versus": versus(facts),
        "figures": {figure.name: figure for figure in _figures(facts)},
        "reward_figures": reward_figures(facts.get("rewards")),
        "proposals": _proposals(facts["proposals"]) if facts["proposals"] else None,
        "provenance": _provenance(facts),
        "data": [{"split": role, **d} for role, d in facts["provenance"]["data"].items()],
        "use_table": use_table,
        "explained": _explained(facts.get("rewards") or {}),
        "speeds_of": speeds_of,
        "trained_components": trained_components,
        "answers_of": answers_of,
        "FEWEST": FEWEST,
        "NO_BACKBONE": NO_BACKBONE,
    }


def _figures(facts: Facts) -> Iterator[Figure]:
    """Yield the figures of a report, except those of local rewards."""
    yield draw_figure("graph", lambda: graph_svg(facts["graph"]), graph=facts["graph"])
    if any(curve["start"] for curve in facts["curves"]):
        yield draw_figure("curve", lambda: curve_svg(facts))
    for place, method in enumerate((facts.get("training") or {}).get("methods", ())):
        jobs, name = method["jobs"], f"training{place or ''}"
        if panels_with_data(jobs):
            yield draw_figure(name, partial(training_svg, jobs, name), caption=caption(jobs))


def methods_table(facts: Facts) -> Table:
    """Return the table of the unoptimized system, this method and the baselines."""
    rows: list[Facts] = facts["methods"]

    def measured(split: str) -> tuple[str, str]:
        """Return heading and cells of a split, with its size in the cells if it differs."""
        sizes = {row[split]["n"] for row in rows if row[split]}
        same = f", n\u00a0=\u00a0{count(*sizes)}" if len(sizes) == 1 else ""
        size = f" ~ (', n = ' ~ {split}.n if {split} else '')" if len(sizes) > 1 else ""
        return f"#{SPLITS[split]}{same}", f"({split} | interval){size}"

    return tabulate(
        rows,
        {
            "method": "method ~ (' (unfinished)' if missing else '')",
            **dict(measured(split) for split in ("valid", "test")),
            "#gain on test": "gain | gain",
            "#failed": "failed | count",
            "#supported": SUPPORTED,
            **SPENDING,
        },
    )


def versus(facts: Facts) -> list[str]:
    """Return a sentence for each baseline on the difference of test scores."""
    return [_versus(facts["method"], row) for row in facts["methods"] if row["versus"]]


def _versus(method: str, row: Facts) -> str:
    gap = row["versus"]
    low, high = gap["low"], gap["high"]
    if low is None or high is None or low <= 0 <= high:
        claim = "not significantly different from"
    else:
        claim = "better than" if gap["mean"] > 0 else "worse than"
    difference = f"{signed(gap['mean'])} {limits(gap)}".rstrip()
    return (
        f"On the test split, {method} is {claim} {row['method']}: "
        f"the paired difference is {difference}."
    )


def _explained(rewards: Facts) -> list[Facts]:
    """Return the local rewards that read named features, with the largest weights in words."""
    found = [head for head in rewards.get("heads", ()) if head["weights"]]
    return [{**head, "weights": weights_of(head["weights"])} for head in found]


def _proposals(found: Facts) -> Table:
    rows = [
        (
            lm,
            *(count(tally[name]) for name in ("asked", *OUTCOMES)),
            "; ".join(f"{n} × {line(reason)}" for reason, n in tally["reasons"].items()) or NONE,
        )
        for lm, tally in found["models"].items()
    ]
    return table(("model", "#asked", *(f"#{name}" for name in OUTCOMES), "failures"), rows)


def _provenance(facts: Facts) -> dict[str, str]:
    """Return the facts for reproducing a run, in words; empty ones are left out."""
    found, settings = facts["provenance"], facts["provenance"]["settings"]
    budget = {name: value for name, value in settings["budget"].items() if value is not None}
    others = {n: v for n, v in changed_settings(settings) if n not in ("method", "seed")}
    pairs = {
        "system": facts["system"],
        "signature": found["signature"],
        "metric": facts["metric"],
        "method": facts["method"],
        "seed": str(facts["seed"]),
        "budget": _spelled(budget),
        "non-default settings": _spelled(others),
        "defaults": _spelled(found["defaults"]),
        "models": _spelled(found["engines"]),
        "initial configuration": found["start"],
        "best configuration": found["best"],
        "started": _moment(found["began"]),
        "last event": _moment(found["ended"]),
        "spent": spending(facts["spent"]),
        "versions": ", ".join(f"{name} {version}" for name, version in found["versions"].items()),
    }
    return {name: value for name, value in pairs.items() if value}


def changed_settings(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the settings that differ from their defaults, except the budget."""
    usual = {**OptimizeSettings().model_dump(mode="json"), **defaults()}
    yield from _different({**settings, "budget": usual["budget"]}, usual)


def _different(
    values: Mapping[str, Any], usual: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        other = usual.get(name)
        if isinstance(value, Mapping) and value:
            known = other if isinstance(other, Mapping) else {}
            yield from _different(value, known, f"{prefix}{name}.")
        elif value != other:
            yield f"{prefix}{name}", value


def spending(spent: Facts) -> str:
    """Return a phrase on what the run spent."""
    return (
        f"{count(spent.get('system_runs', 0))} system runs in the search and "
        f"{count(spent.get('test_runs', 0))} on the test split, {count(spent.get('calls', 0))} "
        f"calls, {count(spent.get('prompt_tokens', 0) + spent.get('completion_tokens', 0))} "
        f"tokens, {money(spent.get('cost', 0.0), spent.get('unpriced', 0))}, "
        f"{seconds(spent.get('seconds', 0.0))}{_metric_part(spent)}"
        f"{_incidents(spent.get('incidents') or {})}"
    )


def _metric_part(spent: Facts) -> str:
    """Return a phrase on the part of the amounts that the metric spent, such as a judge."""
    if not spent.get("metric_calls"):
        return ""
    cost = f", {money(spent['metric_cost'])}" if spent.get("metric_cost") else ""
    return (
        f"; of these, the metric used {count(spent['metric_calls'])} calls and "
        f"{count(spent.get('metric_tokens', 0))} tokens{cost}"
    )


def _incidents(counts: Mapping[str, float]) -> str:
    """Return a phrase on the incidents at servers."""
    descriptions = {
        "rate_limited": "requests rejected by a rate limit and retried",
        "lost": "requests without an answer, charged at their maximum",
        "usage_corrected": "answers with invalid usage, corrected",
    }
    found = [
        f"{count(counts[kind])} {words}" for kind, words in descriptions.items() if counts.get(kind)
    ]
    return f"; {', '.join(found)}" if found else ""


def _spelled(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name} = {shown(value)}" for name, value in values.items())


def _moment(at: float | None) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at)) if at else ""


# --- reports and summaries ------------------------------------------------------------------------

IN_TERMINAL = (
    "method",
    "validation",
    "test",
    "gain on test",
    "search runs",
)  # columns for a terminal


def write(path: str | Path) -> None:
    """Write ``report.md`` and ``report.html`` into the directory of a finished or unfinished run.

    Without matplotlib, the reports have no plots and explain how to install it.

    Raises:
        RunDirectoryError: the folder is not a run directory, one of its files is broken or links
            outside of it, or the reports cannot be written.
    """
    folder = UntrustedFolder(path)
    folder.check()
    learned = {"rewards": reward_facts(path), "training": training_facts(path)}
    facts = {**summarize(path), **learned}
    with inconsistency_errors(path):
        context = report_context(facts)
        notes = "\n".join(f"- {escape(note)}" for note in facts["notes"])
        start = (
            f"# {escape(facts['system'])}: {escape(facts['title'])}\n\n{escape(facts['sentence'])}"
        )
        pages = {
            "report.md": render_markdown("report.jinja", context, f"{start}\n\n{notes}"),
            "report.html": render_html("report.jinja", context),
        }
    for name, text in pages.items():
        folder.write(name, text)


def terminal_summary(path: str | Path) -> str:
    """Return the result, changes, cost and files of a run, as a terminal shows them.

    Raises:
        RunDirectoryError: the folder is not a run directory, or one of its files is broken.
    """
    facts, folder = summarize(path), Path(path)
    with inconsistency_errors(path):
        blocks = [
            [f"{facts['system']}: {facts['title']}", facts["sentence"], *facts["notes"]],
            _compared(facts),
            [line for change in facts["changes"] for line in _changed(change)],
            [
                f"training, job {job['job'] + 1}: {job['note']}"
                for job in facts["jobs"]
                if job["best_step"] is not None  # it proposed the best of several steps
            ],
            [f"spent: {spending(facts['spent'])}", f"report: {folder / 'report.html'}"],
        ]
        if facts["files"]["best.json"]:
            blocks[-1].append(f"best configuration: {folder / 'best.json'}")
    return join_blocks(blocks)


def join_blocks(blocks: Sequence[Sequence[str]]) -> str:
    """Return blocks of lines, separated by empty lines, for a terminal."""
    return escape_invisible("\n\n".join("\n".join(lines) for lines in blocks if lines))


def _compared(facts: Facts) -> list[str]:
    """Return the table of the methods and their differences, if there is more than one method."""
    if len(facts["methods"]) < 3:  # the unoptimized system and this method
        return []
    table = methods_table(facts)
    kept = [i for i, heading in enumerate(table.headings) if heading.split(",")[0] in IN_TERMINAL]
    lines = align_columns([[row[i] for i in kept] for row in (table.headings, *table.rows)])
    return [*lines, *versus(facts)]


def _changed(change: Facts) -> list[str]:
    """Return the lines of a change: a diff for a text, otherwise the old and the new value."""
    if change["kind"] != "text":
        return [f"{change['key']}: {brief(change['before'])} -> {brief(change['after'])}"]
    lines = line_diff(str(change["before"] or ""), str(change["after"] or ""))
    return [f"{change['key']}:", *(f"  {line[0]} {line[1:]}" for line in lines if line[0] in "-+")]
