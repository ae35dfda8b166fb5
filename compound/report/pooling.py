"""Pool the scores of several seeds: their mean, its interval, and the spread over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TypedDict

from compound.evaluation.statistics import Bounds, IntervalDocument, cluster_mean_interval, interval_of_means
from compound.report.facts.text import Interval

SPREAD_SEEDS = 3  # fewest seeds with a reported spread
FEW_INPUTS = 10  # an interval over fewer inputs is marked


class Spread(TypedDict):
    """Spread of the means of seeds: standard deviation (n - 1 in the denominator), minimum and maximum."""

    sd: float
    low: float
    high: float


class Pooled(Interval):
    """Mean over seeds, with the wider of its intervals over seeds and over examples.

    ``spread`` is None with fewer than three seeds. ``few`` tells whether the interval is from fewer than ten
    inputs.
    """

    over: str | None
    intervals: dict[str, IntervalDocument]
    seeds: int
    examples: int
    spread: Spread | None
    few: bool


def pooled(seeds: Sequence[Mapping[str, float]], bounds: Bounds | None = None) -> Pooled | None:
    """Return the mean over seeds with the wider of the intervals over seeds and over examples.

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
    groups: dict[str, list[float]] = {}
    for scores in read:
        for example, value in scores.items():
            groups.setdefault(example, []).append(value)
    intervals = {
        "seeds": interval_of_means(means, bounds=bounds),
        "examples": cluster_mean_interval(groups.values(), bounds=bounds),
    }
    known = {name: found for name, found in intervals.items() if math.isfinite(found.high - found.low)}
    over = max(known, key=lambda name: known[name].high - known[name].low) if known else None
    mean = sum(means) / len(means)
    return {
        "mean": mean,
        "low": min(mean, known[over].low) if over else None,
        "high": max(mean, known[over].high) if over else None,
        "over": over,
        "intervals": {name: found.to_json() for name, found in intervals.items()},
        "seeds": len(read),
        "examples": len(groups),
        "spread": _spread(means),
        "few": len(groups) < FEW_INPUTS,
    }


def _spread(means: Sequence[float]) -> Spread | None:
    if len(means) < SPREAD_SEEDS:
        return None
    return {"sd": statistics.stdev(means), "low": min(means), "high": max(means)}
