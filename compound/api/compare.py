"""Compare the results of two runs on the examples that both were tested on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import cast

from compound.components.fields import format_inputs
from compound.core.errors import RunDirectoryError
from compound.core.formatting import NO_LIMIT
from compound.evaluation.evaluate import Evaluation, joint_bounds
from compound.evaluation.statistics import Bounds, Interval, mean_interval, paired_interval
from compound.execution.trace import whole_amounts
from compound.optimization.runs.directory import inconsistency_errors, read_records
from compound.report.record import SIDES, Record, recorded_trace
from compound.report.rendering import render_text
from compound.report.text import align_columns, count, line, number

SHOWN = 5  # examples that are printed of those that lose and of those that gain
AMOUNTS = ("tokens per run", "dollars per run", "seconds per run, with waits")
WORDS = {
    "score": ("scores lower", "scores higher"),
    AMOUNTS[0]: ("takes fewer tokens", "takes more tokens"),
    AMOUNTS[1]: ("costs less", "costs more"),
    AMOUNTS[2]: ("is faster", "is slower"),
}


@dataclass(frozen=True)
class Row:
    """A quantity of both results, each with its 95 % interval, and the mean paired difference."""

    name: str
    first: Interval
    second: Interval
    difference: Interval


@dataclass(frozen=True)
class RunComparison:
    """Two results, example by example.

    Attributes:
        split: the split of the common examples.
        rows: score, and what a run of the system takes; dollars only if every price is known.
        changed: examples with different scores, those of the second result that lose most first.
        examples: number of common examples.
        inputs: the inputs of the changed examples, as text on one line.
        metrics: the metrics of the two runs.
    """

    split: str
    rows: Sequence[Row]
    changed: Sequence[tuple[str, float, float]]
    examples: int
    inputs: Mapping[str, str] = field(default_factory=dict)
    metrics: Sequence[str] = ()

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int = NO_LIMIT) -> str:
        """Return the comparison for a terminal of a width."""
        groups: dict[str, list[str]] = {"better": [], "worse": [], "same": []}
        for row in self.rows:
            gap, cells = row.difference.mean, _cells(row)
            if not gap or -math.inf < row.difference.low <= 0 <= row.difference.high:
                groups["same"].append(cells[0])
                continue
            times = f", ×{row.second.mean / row.first.mean:.3g}" if row.first.mean > 0 else ""
            group = "better" if (gap > 0) == (row.name == "score") else "worse"
            groups[group].append(f"{WORDS[row.name][gap > 0]} ({cells[3]}{times})")
        table = [["per run", "first", "second", "difference"], *map(_cells, self.rows)]
        context = {
            "found": self,
            "gains": [row for row in reversed(self.changed) if row[2] > row[1]],
            "losses": [row for row in self.changed if row[2] < row[1]],
            "unknown": [short(n) for n in WORDS if n not in [row.name for row in self.rows]],
            "table": "\n".join(align_columns(table, width)),
            "width": width,
            "SHOWN": SHOWN,
        }
        return render_text("compare.jinja", {**context, **groups})


def compare(first: Path, second: Path) -> RunComparison:
    """Return the comparison of the results of two runs.

    Args:
        first, second: run directories. A run is compared with its own start by its report.

    Raises:
        RunDirectoryError: a folder is not a run directory, a file is damaged, or the runs have no
            scored examples in common.
    """
    records = []
    for path in (first, second):
        with inconsistency_errors(path):
            records.append(Record.read(path))
    for split, (_, after) in SIDES.items():
        sides = [record.evaluation(after) for record in records]
        found = [side for side in sides if side is not None]
        if len(found) == len(sides):
            runs = [
                _recorded(record, split, side.configuration)
                for record, side in zip(records, found, strict=True)
            ]
            if common := _common(records, split, found, runs):
                metrics = [str(record.config.get("metric", "")) for record in records]
                return replace(_compared(found, runs, split, common), metrics=metrics)
    raise RunDirectoryError(
        f"{first} and {second} have no scored test or validation examples in common",
        hint="compare runs on the same data",
    )


def _common(
    records: Sequence[Record],
    split: str,
    sides: Sequence[Evaluation],
    runs: Sequence[Mapping[str, Recorded]],
) -> list[str]:
    """Return the examples of both; of different data, those that have equal inputs as well as names."""
    names, other = sides[0].by_example(), sides[1].by_example()
    common = [name for name in names if name in other]
    digests = {record.config.get("data", {}).get(split, {}).get("digest") for record in records}
    if len(digests) == 1 and None not in digests:
        return common
    known = [name for name in common if all(name in side for side in runs)]
    return [name for name in known if runs[0][name].inputs == runs[1][name].inputs]


def _compared(
    sides: Sequence[Evaluation],
    runs: Sequence[Mapping[str, Recorded]],
    split: str,
    common: Sequence[str],
) -> RunComparison:
    scores = [side.by_example() for side in sides]
    old, new = ([side[name] for name in common] for side in scores)
    bounds = joint_bounds(*(side.range for side in sides))
    rows = [_row("score", old, new, bounds)]
    known = [name for name in common if all(name in side for side in runs)]
    for place, label in enumerate(AMOUNTS):
        before, after = ([side[name].amounts[place] for name in known] for side in runs)
        if known and None not in (*before, *after):
            rows.append(_row(label, cast("list[float]", before), cast("list[float]", after)))
    changed = [(e, b, a) for e, b, a in zip(common, old, new, strict=True) if a != b]
    changed.sort(key=lambda row: row[2] - row[1])
    inputs = {e: line(format_inputs(runs[0][e].inputs), 100) for e, _, _ in changed if e in runs[0]}
    return RunComparison(split, rows, changed, len(common), inputs)


def _row(
    name: str, old: Sequence[float], new: Sequence[float], bounds: Bounds | None = None
) -> Row:
    means = [mean_interval(values, bounds=bounds) for values in (old, new)]
    return Row(name, means[0], means[1], paired_interval(old, new, bounds=bounds))


def short(name: str) -> str:
    """Return the first word of the name of a row."""
    return name.partition(" ")[0]


def _cells(row: Row) -> list[str]:
    difference = _cell(row, row.difference)
    sign = "+" * (row.difference.mean > 0)
    return [short(row.name), _cell(row, row.first), _cell(row, row.second), sign + difference]


def _cell(row: Row, side: Interval) -> str:
    texts = list[str]()
    for value in (side.mean, side.low, side.high):
        if not math.isfinite(value):
            return texts[0]
        short = row.name in AMOUNTS[1:] and abs(value) < 100
        texts.append(f"{value:.3g}" if short else (number if row.name == "score" else count)(value))
    return "{} [{}, {}]".format(*texts).replace("-", "−")


Amounts = tuple[float, float | None, float]
"""Tokens, dollars if they are known, and seconds."""


@dataclass(frozen=True)
class Recorded:
    """Inputs of an example, and what its runs took, the mean over its samples."""

    inputs: Mapping[str, object]
    amounts: Amounts


def _recorded(record: Record, split: str, configuration: str) -> Mapping[str, Recorded]:
    runs: dict[str, dict[int, Amounts]] = {}
    inputs: dict[str, Mapping[str, object]] = {}
    with inconsistency_errors(record.folder):
        for line in read_records(record.folder, "traces.jsonl"):
            trace = recorded_trace(line)
            if (trace["split"], trace["configuration"]) != (split, configuration):
                continue
            usage, seconds = whole_amounts(trace)
            usd = None if usage.unpriced else usage.cost
            inputs[trace["example"]] = trace["inputs"]
            runs.setdefault(trace["example"], {})[trace["sample"]] = usage.tokens, usd, seconds
    return {name: Recorded(inputs[name], _mean([*each.values()])) for name, each in runs.items()}


def _mean(samples: Sequence[Amounts]) -> Amounts:
    dollars = [usd for _, usd, _ in samples if usd is not None]
    usd = fmean(dollars) if len(dollars) == len(samples) else None
    return fmean(s[0] for s in samples), usd, fmean(s[2] for s in samples)
