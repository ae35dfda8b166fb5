"""Compare the runs of a sweep: facts, tables, and the page ``sweep.md``.

Means are over seeds. All seeds are tested on the same examples, so an interval over seeds alone is too narrow
if the runs hardly differ, and one over examples alone is too narrow if they differ a lot. The report shows
the wider of the two; the facts have both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypedDict, cast

from compound.errors import RunDirectoryError
from compound.evaluation.evaluate import joint_bounds
from compound.evaluation.statistics import UNIT, Bounds, interval_of_means
from compound.formatting import plural
from compound.report.controls import (
    ControlResult,
    ControlRun,
    MeanSpending,
    Row,
    Trained,
    control_result,
    control_row,
    missing_controls,
)
from compound.report.facts.documents import MethodSpending
from compound.report.facts.facts import method_spending
from compound.report.facts.record import Record, to_strict_json
from compound.report.facts.text import (
    Interval,
    count,
    escape_invisible,
    interval,
    money,
    number,
    seconds,
    signed,
)
from compound.report.pooling import FEW_INPUTS, Pooled, pooled
from compound.report.rendering.markdown import escape, render_block
from compound.report.rendering.tables import Table, table
from compound.report.training.steps import method_training
from compound.report.training.tables import mebibytes
from compound.report.writing import align_columns
from compound.runs.events import AccuracyDocument, is_supported

UNOPTIMIZED = "unoptimized"
TRAINED = ("steps", "sampled", "tokens", "sample_seconds", "train_seconds", "memory")  # of weight training
SHOWN = ("method", "n", "test", "gain on test", "supported", "search runs")  # columns that fit in a terminal
READING = (
    "Each row is the mean over its finished seeds. Gains are paired: the score after optimization minus the "
    "score before it, for the same example in the same run.",
    "Brackets are 95 % confidence intervals: the wider of the interval over seeds and the interval over test "
    "examples (each averaged over seeds); n is seeds × test examples. With one seed, the interval is over "
    "examples and does not cover the variation between seeds; two seeds estimate that variation poorly.",
    "The spread is the standard deviation of the seeds' means and their range, for three or more seeds.",
    "The rows constant and direct call are controls on the same test examples: one answer for all inputs, "
    "chosen on train, and one call of the model with the inputs, without the system. Their cost is outside "
    "the budgets of the runs.",
    "Accepted is summed over all seeds; runs, calls, tokens, cost and time are means over seeds.",
)


Limits = Mapping[str, float | None]  # budget limits by name


class SweepRun(TypedDict):
    """A run of a sweep; its status is ``finished``, ``failed``, ``not applicable`` or ``unfinished``."""

    file: str
    method: str
    seed: int
    run: str
    status: str
    reason: str


class RunResult(SweepRun, MethodSpending):
    """A run of a sweep with its results."""

    test_before: float | None
    test_after: float | None
    gain: float | None
    accepted: int
    decisions: int
    accuracy: Mapping[str, AccuracyDocument]
    training: Trained | None


class AccuracyRow(Interval):
    """Ranking accuracy of a component's local reward, averaged over seeds."""

    file: str
    method: str
    component: str
    seeds: int
    pairs: float
    inputs: float


class SweepFacts(TypedDict):
    """All values of the page."""

    files: list[str]
    methods: list[str]
    seeds: list[int]
    budgets: dict[str, Limits]
    rows: list[Row]
    accuracy: list[AccuracyRow]
    runs: list[RunResult]
    controls: list[ControlResult]


def compare(
    planned: Sequence[SweepRun],
    folder: Path,
    budgets: Mapping[str, Limits],
    controls: Sequence[ControlRun] = (),
) -> SweepFacts:
    """Return all values of the page, as JSON types.

    Args:
        planned: for each run its file, method, seed, directory in the folder, status, and the reason for it.
        folder: the sweep's directory.
        budgets: the limits of each run of a file.
        controls: the controls evaluated so far.
    """
    runs = [_Run(row, folder) for row in planned]
    files = dict.fromkeys(row["file"] for row in planned)
    methods = dict.fromkeys(row["method"] for row in planned)
    rows: list[Row] = []
    accuracy: list[AccuracyRow] = []
    for file in files:
        done = [run for run in runs if run.is_for(file) and run.done]
        rows.append(_row(file, UNOPTIMIZED, list({run.seed: run for run in reversed(done)}.values())))
        names = dict.fromkeys(run["name"] for run in controls)
        rows += [row for name in names if (row := control_row(file, name, controls))]
        for method in methods:
            mine = [run for run in done if run.method == method]
            rows.append(_row(file, method, mine))
            accuracy += _accuracies(file, method, mine)
    facts: SweepFacts = {
        "files": list(files),
        "methods": list(methods),
        "seeds": list(dict.fromkeys(row["seed"] for row in planned)),
        "budgets": dict(budgets),
        "rows": rows,
        "accuracy": accuracy,
        "runs": [run.facts() for run in runs],
        "controls": [control_result(run) for run in controls],
    }
    return to_strict_json(facts)


class _Run:
    """A run of the sweep, read from its directory."""

    def __init__(self, row: SweepRun, folder: Path) -> None:
        self.row = row
        self.seed, self.method = row["seed"], row["method"]
        self.done = row["status"] == "finished"
        self.record = Record.read(folder / row["run"]) if self.done else None
        self.training = _training(self.record) if self.record else None

    def is_for(self, file: str) -> bool:
        return bool(self.row["file"] == file)

    def scores(self, name: str) -> dict[str, float]:
        """Return the test scores by example; empty if the test split was not read."""
        evaluation = self.record.evaluation(name) if self.record else None
        return evaluation.by_example() if evaluation else {}

    @property
    def bounds(self) -> Bounds | None:
        """Range of the scores for intervals, if it is known."""
        names = ("before", "test_before", "test_after")
        found = [each for name in names if self.record and (each := self.record.evaluation(name))]
        return joint_bounds(*(each.range for each in found))

    def gains(self) -> dict[str, float]:
        before, after = self.scores("test_before"), self.scores("test_after")
        return {example: after[example] - before[example] for example in before if example in after}

    def verdicts(self) -> list[bool]:
        return [is_supported(e) for e in self.record.all("decision")] if self.record else []

    def accuracy(self) -> Mapping[str, AccuracyDocument]:
        """Return the latest held-out ranking accuracy of each component's local reward."""
        search = self.record.state.search if self.record else None
        history = search.history if search else []
        found = (job.facts["accuracy"] for job in reversed(history) if job.facts.get("accuracy"))
        return cast("Mapping[str, AccuracyDocument]", next(found, {}))  # as optimizers record it

    def facts(self) -> RunResult:
        verdicts = self.verdicts()
        return {
            **self.row,
            "test_before": _mean(self.scores("test_before")),
            "test_after": _mean(self.scores("test_after")),
            "gain": _mean(self.gains()),
            "accepted": sum(verdicts),
            "decisions": len(verdicts),
            **method_spending(self.record.spent if self.record else {}),
            "accuracy": self.accuracy(),
            "training": self.training,
        }


def _training(record: Record) -> Trained | None:
    """Return the cost of weight training in a run, or ``None`` if it trained no weights."""
    try:
        found = method_training(record)
    except RunDirectoryError:
        return None  # the scores do not depend on these records; the run's own report shows the error
    totals: Mapping[str, object] = found["totals"] if found else {}
    return {name: _known(totals, name) for name in TRAINED} if found else None


def _mean(scores: Mapping[str, float]) -> float | None:
    return sum(scores.values()) / len(scores) if scores else None


def _row(file: str, method: str, runs: Sequence[_Run]) -> Row:
    """Return a row of the table: a method's runs on one file, or the unoptimized systems."""
    seeds = sorted(run.seed for run in runs)
    bounds = joint_bounds(*(run.bounds for run in runs))
    if method == UNOPTIMIZED:
        before = pooled([run.scores("test_before") for run in runs], bounds)
        return {
            "file": file, "method": method, "control": None, "seeds": seeds, "test": before, "gain": None,
        }  # fmt: skip
    verdicts = [verdict for run in runs for verdict in run.verdicts()]
    return {
        "file": file,
        "method": method,
        "control": None,
        "seeds": seeds,
        "test": pooled([run.scores("test_after") for run in runs], bounds),
        "gain": pooled(
            [run.gains() for run in runs], bounds and (bounds[0] - bounds[1], bounds[1] - bounds[0])
        ),
        "accepted": sum(verdicts),
        "decisions": len(verdicts),
        **_mean_spending([run.record.spent for run in runs if run.record], len(runs)),
        "training": _trained([run.training for run in runs if run.training]),
    }


def _mean_spending(spent: Sequence[Mapping[str, object]], runs: int) -> MeanSpending:
    def mean(name: str) -> float | None:
        return sum(_known(totals, name) or 0 for totals in spent) / runs if runs else None

    return {
        "system_runs": mean("system_runs"),
        "test_runs": mean("test_runs"),
        "calls": mean("calls"),
        "prompt_tokens": mean("prompt_tokens"),
        "completion_tokens": mean("completion_tokens"),
        "cost": mean("cost"),
        "unpriced": mean("unpriced"),
        "seconds": mean("seconds"),
    }


def _known(values: Mapping[str, object], name: str) -> float | None:
    value = values.get(name)
    return value if isinstance(value, int | float) else None


def _trained(runs: Sequence[Trained]) -> Trained | None:
    """Return the mean cost of weight training over the runs that recorded it, and the peak memory."""
    if not runs:
        return None
    known = {name: [took for run in runs if (took := run[name]) is not None] for name in TRAINED}
    means = {name: sum(found) / len(found) if found else None for name, found in known.items()}
    return {**means, "memory": max(known["memory"], default=None), "seeds": len(runs)}


def _accuracies(file: str, method: str, runs: Sequence[_Run]) -> list[AccuracyRow]:
    """Return the ranking accuracy of each component's local reward, averaged over seeds."""
    measured = [run.accuracy() for run in runs]
    rows: list[AccuracyRow] = []
    for component in dict.fromkeys(name for found in measured for name in found):
        mine = [found[component] for found in measured if component in found]
        single = mine[0] if len(mine) == 1 else None
        found = interval_of_means([m["mean"] for m in mine], bounds=UNIT).to_json()
        rows.append(
            {
                "file": file,
                "method": method,
                "component": component,
                "mean": found["mean"],
                "low": single["low"] if single else found["low"],
                "high": single["high"] if single else found["high"],
                "seeds": len(mine),
                "pairs": sum(m["pairs"] for m in mine) / len(mine),
                "inputs": sum(m["inputs"] for m in mine) / len(mine),
            }
        )
    return rows


# --- the page ------------------------------------------------------------------------------------------


def markdown(facts: SweepFacts) -> str:
    """Return the page ``sweep.md``."""
    parts = ["# Sweep", escape(_sentence(facts))]
    for file in facts["files"]:
        limits = [f"{name.replace('_', ' ')} {limit:g}" for name, limit in facts["budgets"][file].items()]
        budget = ", ".join(limits) or "no limit"
        parts += [f"## {escape(file)}", escape(f"Budget of each run: {budget}.")]
        parts.append(render_block(methods(facts, file)))
        if few := few_inputs(facts, file):
            parts.append(escape(few))
        rewards = accuracies(facts, file)
        if rewards.rows:
            parts += ["Held-out ranking accuracy of local rewards, mean over seeds:", render_block(rewards)]
        trained = trainings(facts, file)
        if trained.rows:
            parts += ["Weight training, mean over seeds; peak memory is the maximum:", render_block(trained)]
    notes = missing(facts)
    if notes:
        parts += ["## Not in the tables", "\n".join(f"- {escape(note)}" for note in notes)]
    parts += ["## How to read this", "\n".join(f"- {escape(line)}" for line in READING)]
    return escape_invisible("\n\n".join(parts) + "\n")


def terminal_summary(facts: SweepFacts) -> str:
    """Return the summary that a terminal shows at the end of a sweep."""
    blocks = [[_sentence(facts)]]
    for file in facts["files"]:
        found = methods(facts, file)
        kept = [i for i, heading in enumerate(found.headings) if heading in SHOWN]
        rows = [[row[i] for i in kept] for row in (found.headings, *found.rows)]
        blocks.append([file, *align_columns(rows), *filter(None, [few_inputs(facts, file)])])
    blocks.append(missing(facts))
    return escape_invisible("\n\n".join("\n".join(lines) for lines in blocks if lines))


def _sentence(facts: SweepFacts) -> str:
    statuses = [run["status"] for run in facts["runs"]]
    counts = [f"{statuses.count(s)} {s}" for s in dict.fromkeys(statuses)]
    numbers = {"file": len(facts["files"]), "method": len(facts["methods"]), "seed": len(facts["seeds"])}
    parts = [plural(number, name) for name, number in numbers.items()]
    return f"{', '.join(parts)}: {plural(len(statuses), 'run')}, {', '.join(counts)}."


def methods(facts: SweepFacts, file: str) -> Table:
    """Return the table of one file: the unoptimized system, the controls, and every method."""
    mine = [row for row in facts["rows"] if row["file"] == file]
    spreads = [spread(row["test"]) for row in mine]
    shown = any(spreads)  # the column of spreads; earlier sweeps have none
    headings = (
        "method", "#n", "#test", *["#spread over seeds"] * shown, "#gain on test", "#supported",
        "#search runs", "#test runs", "#calls", "#tokens", "#cost", "#time",
    )  # fmt: skip
    rows = [
        (
            row["method"], _n(row["test"]), interval(row["test"]), *[found or "–"] * shown,
            interval(row["gain"], signed),
            f"{row['accepted']} of {row['decisions']}" if row["test"] and "decisions" in row else "–",
            count(row.get("system_runs")), count(row.get("test_runs")), count(row.get("calls")),
            count(_tokens(row)), money(row.get("cost"), row.get("unpriced")), seconds(row.get("seconds")),
        )
        for row, found in zip(mine, spreads, strict=True)
    ]  # fmt: skip
    return table(headings, rows)


def _n(test: Pooled | None) -> str:
    return f"{test['seeds']} × {test['examples']}" if test else "–"


def spread(test: Pooled | None) -> str:
    """Format the standard deviation over seeds and their range; ``""`` with fewer than three seeds."""
    found = test.get("spread") if test else None
    return f"sd {number(found['sd'])}, {number(found['low'])} to {number(found['high'])}" if found else ""


def few_inputs(facts: SweepFacts, file: str) -> str:
    """Return a note on rows whose intervals are from few inputs, or ``""``."""
    tests = {row["method"]: row["test"] for row in facts["rows"] if row["file"] == file}
    found = [method for method, test in tests.items() if test and test.get("few")]
    return f"Intervals from fewer than {FEW_INPUTS} inputs: {', '.join(found)}." if found else ""


def _tokens(row: Row) -> float | None:
    prompt, completion = row.get("prompt_tokens"), row.get("completion_tokens")
    return None if prompt is None or completion is None else prompt + completion


def accuracies(facts: SweepFacts, file: str) -> Table:
    """Return the table of one file's local rewards."""
    rows = [
        (a["method"], a["component"], interval(a), count(a["seeds"]), count(a["pairs"]), count(a["inputs"]))
        for a in facts["accuracy"]
        if a["file"] == file
    ]
    return table(("method", "component", "#accuracy", "#seeds", "#pairs each", "#inputs each"), rows)


def trainings(facts: SweepFacts, file: str) -> Table:
    """Return the table of the cost of weight training in one file's runs."""
    headings = ("method", "#seeds", "#steps", "#tokens sampled", "#tokens trained", "#sampling", "#training",
                "#peak memory")  # fmt: skip
    rows = [
        (
            row["method"], count(t["seeds"]), count(t["steps"]), count(t["sampled"]), count(t["tokens"]),
            seconds(t["sample_seconds"]), seconds(t["train_seconds"]), mebibytes(t["memory"]),
        )
        for row in facts["rows"]
        if row["file"] == file and (t := row.get("training"))
    ]  # fmt: skip
    return table(headings, rows)


def missing(facts: SweepFacts) -> list[str]:
    """Return notes on runs that are not in the tables or have no test score."""
    seeds: dict[tuple[str, str, str], list[str]] = {}
    for run in facts["runs"]:
        reason = f"{run['status']}: {run['reason']}" if run["reason"] else run["status"]
        if run["status"] == "finished" and run["test_after"] is None:
            reason = "finished, but the test split was not read"
        if reason != "finished":
            seeds.setdefault((run["file"], run["method"], reason), []).append(str(run["seed"]))
    return [
        f"{file}, {method}, seed{'s' if len(affected) > 1 else ''} {', '.join(affected)}: {reason}"
        for (file, method, reason), affected in seeds.items()
    ] + missing_controls(facts["controls"])
