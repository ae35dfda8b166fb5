"""Tables of confidence intervals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tables.data import markdown, results


def coverage() -> str:
    """Tabulate coverage and width of intervals for the mean of bounded scores."""
    found = results("interval_coverage")
    rows = [
        [
            name,
            f"{row['least_coverage']:.1%} ({row['at']})",
            f"{row['least_coverage_from_n_10']:.1%}",
            f"{row['places_below_94_percent']} of {row['places']}",
            f"{row['left_range']:.0%}",
            f"{row['no_width']:.0%}",
            f"{row['width_beside_gaffke_from_n_10']:.2f}",
        ]
        for name, row in found["worst"].items()
    ]
    headings = [
        "interval",
        "least coverage (where)",
        "least, n ≥ 10",
        "below 94 %",
        "leaves the range, at most",
        "no width, at most",
        "width, n ≥ 10, relative to Gaffke's",
    ]
    return markdown(headings, rows)


def of_seeds() -> str:
    """Tabulate coverage and width of intervals over seeds."""
    found = results("interval_coverage")["seeds"]
    names = list(next(iter(found.values())))

    def cell(row: Mapping[str, Any]) -> str:
        return f"{row['coverage']:.1%}, {row['width']:.3f}, {row['left_range']:.0%}"

    rows = [[case, *(cell(row[name]) for name in names)] for case, row in found.items()]
    return markdown(["means of 60 scores", *names], rows)


TABLES = (coverage, of_seeds)
