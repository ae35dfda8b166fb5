"""Compare the runs of a sweep: facts, tables, and the page ``sweep.md``.

Means are over seeds. All seeds are tested on the same examples, so an interval over seeds alone is
too narrow if the runs hardly differ, and one over examples alone is too narrow if they differ a
lot. The report shows the wider of the two; the facts have both.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, TypedDict

from compound.core.engine import NO_USAGE
from compound.core.errors import RunDirectoryError
from compound.evaluation.evaluate import Evaluation, joint_bounds
from compound.evaluation.statistics import (
    Bounds,
    cluster_mean_interval,
    difference_bounds,
    interval_of_means,
)
from compound.optimization.runs.recorder import is_supported
from compound.report.facts import SPENDING
from compound.report.record import Facts, Record, items_of, to_strict_json
from compound.report.rendering import Columns, Table, render_markdown, render_text, tabulate
from compound.report.sections import SPENDING as SPENDING_COLUMNS
from compound.report.sections import SUPPORTED
from compound.report.training import method_training

SPREAD_SEEDS = 3  # fewest seeds with a reported spread
FEW_INPUTS = 10  # an interval over fewer inputs is marked
SPREAD = (
    "'sd ' ~ test.spread.sd | number ~ ', ' ~ test.spread.low | number ~ ' to ' ~ "
    "test.spread.high | number if test and test.spread else NONE"
)
TRAINED = ("steps", "sampled", "tokens", "sample_seconds", "train_seconds", "memory")


class SweepRun(TypedDict):
    """A run; its status is ``finished``, ``failed``, ``not applicable`` or ``unfinished``."""

    file: str
    method: str
    seed: int
    run: str
    status: str
    reason: str


class ControlRun(TypedDict):
    """A control of one file and seed; its status is ``finished``, ``skipped`` or ``failed``.

    ``name`` is ``constant`` or ``direct call``; ``choice`` is the answer that is given, or the
    model.
    """

    file: str
    name: str
    seed: int
    status: str
    reason: str
    choice: str
    evaluation: Evaluation | None


def compare(
    planned: Sequence[SweepRun],
    folder: Path,
    budgets: Mapping[str, Mapping[str, float | None]],
    controls: Sequence[ControlRun] = (),
) -> Facts:
    """Return all values of the page, as JSON types."""
    runs = [_Run(row, folder) for row in planned]
    files, methods, seeds = (
        list(dict.fromkeys(row[name] for row in planned)) for name in ("file", "method", "seed")
    )
    facts = {
        "files": files,
        "methods": methods,
        "seeds": seeds,
        "budgets": dict(budgets),
        "rows": [row for file in files for row in _rows(str(file), runs, controls)],
        "runs": [run.facts() for run in runs],
        "controls": [_control(run) for run in controls],
    }
    return to_strict_json(facts)


class _Run:
    """A run of the sweep, read from its directory."""

    def __init__(self, row: SweepRun, folder: Path) -> None:
        self.row = row
        self.record = record = Record.read(folder / row["run"]) if self.done else None
        names = ("before", "test_before", "test_after")
        found = {name: record.evaluation(name) for name in names} if record else {}
        scores = {name: each.by_example() for name, each in found.items() if each}
        self.bounds = joint_bounds(*(each.range for each in found.values() if each))
        self.before, self.after = scores.get("test_before", {}), scores.get("test_after", {})
        self.gains = {
            e: self.after[e] - score for e, score in self.before.items() if e in self.after
        }
        self.verdicts = [is_supported(e) for e in record.all("decision")] if record else []
        self.training = _training(record) if record else None

    @property
    def done(self) -> bool:
        return self.row["status"] == "finished"

    def facts(self) -> Facts:
        return {
            **self.row,
            "test_before": _mean(self.before.values()),
            "test_after": _mean(self.after.values()),
            "gain": _mean(self.gains.values()),
            "accepted": sum(self.verdicts),
            "decisions": len(self.verdicts),
            **items_of(self.record.spent if self.record else {}, SPENDING),
            "training": self.training,
        }


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _training(record: Record) -> Facts | None:
    """Return the cost of weight training in a run, or ``None`` if it trained no weights."""
    try:
        found = method_training(record)
    except RunDirectoryError:  # scores do not depend on it, and the run's report shows it
        return None
    return items_of(found["totals"], TRAINED) if found else None


def _rows(file: str, runs: Sequence[_Run], controls: Sequence[ControlRun]) -> Iterator[Facts]:
    """Yield the rows of one file: the unoptimized systems, the controls, and every method."""
    mine = [run for run in runs if run.row["file"] == file]
    done = [run for run in mine if run.done]
    first = {run.row["seed"]: run for run in reversed(done)}.values()
    bounds = joint_bounds(*(run.bounds for run in first))
    row: Facts = {"file": file, "control": None, "gain": None}
    seeds = sorted(run.row["seed"] for run in first)
    test = pooled([run.before for run in first], bounds)
    yield {**row, "method": "unoptimized", "seeds": seeds, "test": test}
    for name in dict.fromkeys(run["name"] for run in controls):
        found = [run for run in controls if (run["file"], run["name"]) == (file, name)]
        yield from _control_rows(row, name, found)
    for method in dict.fromkeys(run.row["method"] for run in runs):
        yield {**row, "method": method, **_method([r for r in done if r.row["method"] == method])}


def _method(runs: Sequence[_Run]) -> Facts:
    bounds = joint_bounds(*(run.bounds for run in runs))
    verdicts = [*chain.from_iterable(run.verdicts for run in runs)]
    spent = [run.record.spent for run in runs if run.record]
    return {
        "seeds": sorted(run.row["seed"] for run in runs),
        "test": pooled([run.after for run in runs], bounds),
        "gain": pooled([run.gains for run in runs], difference_bounds(bounds)),
        "accepted": sum(verdicts),
        "decisions": len(verdicts),
        **{name: _mean([each.get(name) or 0 for each in spent]) for name in SPENDING},
        "training": _mean_training([run.training for run in runs if run.training]),
    }


def _mean_training(runs: Sequence[Facts]) -> Facts | None:
    """Return the mean cost of training over the runs that recorded it, and the peak memory."""
    if not runs:
        return None
    means = {name: _mean(run[name] for run in runs) for name in TRAINED}
    memory = max((run["memory"] for run in runs if run["memory"] is not None), default=None)
    return {**means, "memory": memory, "seeds": len(runs)}


def _control_rows(row: Facts, name: str, runs: Sequence[ControlRun]) -> Iterator[Facts]:
    """Yield the row of a control, over the seeds for which it was evaluated, if there are any."""
    done = [(run, found) for run in runs if (found := run["evaluation"])]
    if not done:
        return
    results = [_control(run) for run, _ in done]
    spent = {name: _mean([r[name] for r in results]) for name in SPENDING if name in results[0]}
    bounds = joint_bounds(*(evaluation.range for _, evaluation in done))
    choices = ", ".join(dict.fromkeys(run["choice"] for run, _ in done))
    yield {
        **row,
        "method": f"{name}: {choices}",
        "control": name,
        "seeds": sorted(run["seed"] for run, _ in done),
        "test": pooled([evaluation.by_example() for _, evaluation in done], bounds),
        **spent,
    }


def _control(run: ControlRun) -> Facts:
    evaluation = run["evaluation"]
    return {
        **items_of(run, ("file", "name", "seed", "status", "reason", "choice")),
        "test": evaluation.mean if evaluation else None,
        "failed": evaluation.failed if evaluation else 0,
        **(evaluation.usage if evaluation else NO_USAGE).to_json(),
    }


def pooled(seeds: Sequence[Mapping[str, float]], bounds: Bounds | None = None) -> Facts | None:
    """Return the mean over seeds with the wider of the intervals over seeds and over examples.

    ``spread`` is the standard deviation of the seeds' means and their range, ``None`` with fewer
    than three seeds. ``few`` tells whether the interval is from fewer than ten inputs.

    Args:
        seeds: for each seed, a number for each example.
        bounds: the minimum and maximum possible number, if known.

    >>> found = pooled([{"a": 1.0, "b": 0.5}, {"a": 1.0, "b": 0.5}], (0.0, 1.0))
    >>> found["mean"], found["over"], found["seeds"], found["examples"]
    (0.75, 'examples', 2, 2)
    """
    read = [scores for scores in seeds if scores]
    if not read:
        return None
    means = [sum(scores.values()) / len(scores) for scores in read]
    groups: dict[str, list[float]] = defaultdict(list)
    for example, value in chain.from_iterable(scores.items() for scores in read):
        groups[example].append(value)
    intervals = {
        "seeds": interval_of_means(means, bounds=bounds),
        "examples": cluster_mean_interval(groups.values(), bounds=bounds),
    }
    widths = {name: found.high - found.low for name, found in intervals.items()}
    known = {name: width for name, width in widths.items() if math.isfinite(width)}
    over = max(known, key=known.__getitem__) if known else None
    mean = sum(means) / len(means)
    sd = statistics.stdev(means) if len(means) >= SPREAD_SEEDS else None
    return {
        "mean": mean,
        "low": min(mean, intervals[over].low) if over else None,
        "high": max(mean, intervals[over].high) if over else None,
        "over": over,
        "intervals": {name: found.to_json() for name, found in intervals.items()},
        "seeds": len(read),
        "examples": len(groups),
        "spread": None if sd is None else {"sd": sd, "low": min(means), "high": max(means)},
        "few": len(groups) < FEW_INPUTS,
    }


# --- the page -------------------------------------------------------------------------------------


def sweep_page(facts: Facts) -> str:
    """Return the page ``sweep.md``."""
    return render_markdown("sweep.jinja", _context(facts))


def sweep_summary(facts: Facts) -> str:
    """Return the summary that a terminal shows at the end of a sweep."""
    return render_text("sweep_terminal.jinja", _context(facts))


def _context(facts: Facts) -> dict[str, Any]:
    tables = {file: methods_of_file(facts, file) for file in facts["files"]}
    return {
        "facts": facts,
        "statuses": Counter(run["status"] for run in facts["runs"]),
        "tables": tables,
        "FEW_INPUTS": FEW_INPUTS,
        "trainings_of_file": trainings_of_file,
        "missing": missing(facts),
    }


def methods_of_file(facts: Facts, file: str) -> Table:
    """Return the table of one file: the unoptimized system, the controls, and every method."""
    rows = [row for row in facts["rows"] if row["file"] == file]
    # Neither sweeps of earlier versions nor fewer than three seeds have a spread.
    spread = any(row["test"] and row["test"].get("spread") for row in rows)
    columns: Columns = {
        "method": "method",
        "#n": "test.seeds ~ ' × ' ~ test.examples if test else NONE",
        "#test": "test | interval",
        **({"#spread over seeds": SPREAD} if spread else {}),
        "#gain on test": "gain | gain",
        "#supported": f"({SUPPORTED}) if test else NONE",
        **SPENDING_COLUMNS,
    }
    return tabulate(rows, columns)


def trainings_of_file(facts: Facts, file: str) -> Table:
    """Return the table of the cost of weight training in one file's runs."""
    mine = [row for row in facts["rows"] if row["file"] == file and row.get("training")]
    columns: Columns = {
        "method": "method",
        "#seeds": "training.seeds | count",
        "#steps": "training.steps | count",
        "#tokens sampled": "training.sampled | count",
        "#tokens trained": "training.tokens | count",
        "#sampling": "training.sample_seconds | seconds",
        "#training": "training.train_seconds | seconds",
        "#peak memory": "training.memory | mebibytes",
    }
    return tabulate(mine, columns)


def missing(facts: Facts) -> list[str]:
    """Return notes on runs and controls that are not in the tables or have no test score."""
    seeds: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    controls = [{**each, "method": f"control {each['name']!r}"} for each in facts["controls"]]
    for run in (*facts["runs"], *controls):
        reason = f"{run['status']}: {run['reason']}" if run["reason"] else run["status"]
        if run["status"] == "finished":
            unread = run.get("test_after", run.get("test")) is None
            reason = "finished, but the test split was not read" if unread else ""
        if reason:
            seeds[run["file"], run["method"], reason].append(str(run["seed"]))
    return [
        f"{file}, {method}, seed{'s' if len(affected) > 1 else ''} {', '.join(affected)}: {reason}"
        for (file, method, reason), affected in seeds.items()
    ]
