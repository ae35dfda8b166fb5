"""Write ``report.md`` and ``report.html`` of a run, and its summary for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from compound.core.formatting import NO_LIMIT, plural
from compound.core.security.untrusted import UntrustedFolder
from compound.optimization.runs.candidate_record import FEWEST
from compound.optimization.runs.directory import inconsistency_errors
from compound.optimization.settings.optimize import OptimizeSettings
from compound.optimization.settings.sections import defaults
from compound.report.facts import SPLITS, summarize
from compound.report.figures import candidates_svg, fate_of, scores_svg
from compound.report.graph import graph_svg
from compound.report.record import GROUPS, Facts
from compound.report.rendering import (
    Columns,
    Figure,
    Table,
    draw_figure,
    render_html,
    render_markdown,
    render_text,
    tabulate,
)
from compound.report.rewards import reward_figures, use_table, weights_of
from compound.report.text import count, interval, money, seconds, signed
from compound.report.training import (
    answers_of,
    caption,
    panels_with_data,
    trained_components,
    training_svg,
)
from compound.rewards.model import NONE as NO_BACKBONE

SPENDING: Columns = {
    "#search runs": "system_runs | count",
    "#test runs": "test_runs | count",
    "#calls": "calls | count",
    "#tokens": "(prompt_tokens + completion_tokens if completion_tokens is number else none) | count",
    "#cost": "cost | money(unpriced or 0)",
    "#time": "seconds | seconds",
}
MANY = 500  # candidates to list in full
SUPPORTED = "NONE if accepted is undefined else accepted ~ ' of ' ~ decisions"


def report_context(facts: Facts) -> dict[str, Any]:
    """Return the variables of the template of a report."""
    rows, settings = facts["examples"]["rows"], facts["provenance"]["settings"]
    proposals, others = facts["proposals"] or {"models": {}}, "All others, lowest scores first"
    titles = {"equal": "Equal" if facts["changes"] else others}
    groups = {
        titles.get(group, group.capitalize()): found
        for group in GROUPS
        if (found := [row for row in rows if row["group"] == group])
    }
    return {
        "facts": facts,
        "request_rows": request_rows(facts),
        "methods": methods_table(facts),
        "groups": groups,
        "candidates": _candidates(facts["candidates"]),
        "figures": {figure.name: figure for figure in _figures(facts)},
        "reward_figures": reward_figures(facts["rewards"]),
        "proposals": [{**tally, "model": lm} for lm, tally in proposals["models"].items()],
        "budget": {name: value for name, value in settings["budget"].items() if value is not None},
        "settings": {n: v for n, v in changed_settings(settings) if n not in ("method", "seed")},
        "data": [{"split": role, **d} for role, d in facts["provenance"]["data"].items()],
        "use_table": use_table,
        "explained": _explained(facts["rewards"] or {}),
        "trained_components": trained_components,
        "answers_of": answers_of,
        "FEWEST": FEWEST,
        "NO_BACKBONE": NO_BACKBONE,
    }


def _figures(facts: Facts) -> Iterator[Figure]:
    drawing = facts["graph"]
    names = ", ".join(str(name).lstrip("$") for name, _ in drawing["nodes"])
    alt = f"Graph of the system: {names}"
    yield draw_figure("graph", lambda: graph_svg(drawing), graph=drawing, alt=alt)
    if scored := [row for row in facts["methods"] if row["valid"] or row["test"]]:
        scores = "; ".join(f"{r['method']} {interval(r['test'] or r['valid'])}" for r in scored)
        yield draw_figure("scores", lambda: scores_svg(facts), alt=f"Scores: {scores}")
    if found := facts["candidates"]:
        yield candidates_figure(found)
    if panels_with_data(jobs := (facts["training"] or {}).get("jobs", ())):
        yield draw_figure(
            "training",
            lambda: training_svg(jobs, "training"),
            caption=caption(jobs),
            alt=f"Curves of training of {facts['method']}",
        )


def candidates_figure(found: Facts) -> Figure:
    """Return the figure of all candidates of a run."""
    best = max(found["rows"], key=lambda row: float(row["gain"] or 0.0))
    alt = (
        f"Scores of {plural(len(found['rows']), 'candidate')}, and their gain against their "
        f"cost; the highest gain is {signed(best['gain'])} on {best['evaluations']} evaluations"
    )
    return draw_figure("candidates", lambda: candidates_svg(found), alt=alt)


def _tokens(mean: float | None) -> str:
    return count(round(mean) if mean and mean >= 10 else mean)


PER_REQUEST: Mapping[str, tuple[str, Callable[[float | None], str]]] = {
    "input tokens": ("prompt_tokens", _tokens),
    "output tokens": ("completion_tokens", _tokens),
    "cost": ("cost", money),
    "time under the load of the run": ("seconds", seconds),
    "median time": ("median_seconds", seconds),
}


def request_rows(facts: Facts) -> list[dict[str, str]]:
    """Return name, value before and after, and factor of what a request takes, if it is known."""
    before, after = (facts["requests"].get(side) for side in ("before", "after"))
    rows = []
    for name, (key, form) in PER_REQUEST.items():
        old, new = (side[key] if side else None for side in (before, after))
        unknown = key == "cost" and any(side and side["unpriced"] for side in (before, after))
        if unknown or not (old or new):
            continue
        factor = f"×{new / old:.2f}" if old and new and not 0.99 < new / old < 1.01 else ""
        rows.append({"name": name, "before": form(old), "after": form(new), "factor": factor})
    return rows


def _candidates(found: Facts | None) -> dict[str, list[Facts]] | None:
    if not found:
        return None
    shown = [row for row in found["rows"] if row["on_front"] or fate_of(row) != "other"]
    others = [row for row in found["rows"] if row not in shown]
    others.sort(key=lambda row: -row["evaluations"])
    return {"shown": shown, "others": others[:MANY]}


def methods_table(facts: Facts) -> Table:
    """Return the table of the unoptimized system and this method."""
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


def _explained(rewards: Facts) -> list[Facts]:
    """Return the local rewards that read named features, with the largest weights in words."""
    found = [head for head in rewards.get("heads", ()) if head["weights"]]
    return [{**head, "weights": weights_of(head["weights"])} for head in found]


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


# --- reports and summaries ------------------------------------------------------------------------


def write(path: str | Path) -> None:
    """Write ``report.md`` and ``report.html`` into the directory of a finished or unfinished run.

    Without matplotlib, the reports have no plots and explain how to install it.

    Raises:
        RunDirectoryError: the folder is not a run directory, one of its files is broken or links
            outside of it, or the reports cannot be written.
    """
    folder = UntrustedFolder(path)
    folder.check()
    facts = summarize(path)
    with inconsistency_errors(path):
        context = report_context(facts)
        pages = {
            "report.md": render_markdown("report.jinja", context),
            "report.html": render_html("report.jinja", context),
        }
    for name, text in pages.items():
        folder.write(name, text)


def terminal_summary(path: str | Path, width: int = NO_LIMIT) -> str:
    """Return the result, changes, cost and files of a run, as a terminal of a width shows them.

    Raises:
        RunDirectoryError: the folder is not a run directory, or one of its files is broken.
    """
    facts = summarize(path)
    with inconsistency_errors(path):
        context = {"facts": facts, "request_rows": request_rows(facts)}
        return render_text("terminal.jinja", {**context, "folder": Path(path), "width": width})


def forecast(facts: Mapping[str, Any]) -> str:
    """Return the result of `compound.api.estimate.estimate` as text for a terminal."""
    pilot = facts.get("pilot") or {"per_run": {}, "total": {}}
    runs = [{"unit": unit, **(row or {})} for unit, row in pilot["per_run"].items()]
    total = [{"unit": unit, "range": [*row.values()]} for unit, row in pilot["total"].items()]
    return render_text("forecast.jinja", {"facts": facts, "pilot_runs": runs, "pilot_total": total})
