"""Tables of the acceptance test and of decisions."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from statistics import fmean
from typing import Any

from compound.evaluation.statistics import binomial_tail
from compound.optimization.settings.optimize import OptimizeSettings
from tables.data import markdown, results


def needed() -> str:
    """Tabulate how many binary examples must improve for acceptance, by the number that get worse."""
    worse = (0, 1, 2, 3, 5, 10)
    rows = []
    for decisions in (1, 2, 3, 6):
        level = OptimizeSettings().alpha / decisions
        least = [
            next(up for up in count(down) if binomial_tail(up, up + down, 0.5) <= level)
            for down in worse
        ]
        rows.append([str(decisions), f"{level:.4f}", *map(str, least)])
    headings = ["none wrong" if down == 0 else f"{down} wrong" for down in worse]
    return markdown(["planned decisions", "level", *headings], rows)


def false_accepts_file(part: str) -> Mapping[str, Any]:
    """Return a part of the measurement of false accepts."""
    found: Mapping[str, Any] = results("false_accepts")[part]
    return found


def false_accepts(part: str, level: str) -> str:
    """Tabulate how often each test accepts gains that are 0 on average; the largest of a row's five sizes."""
    found = false_accepts_file(part)
    at, draws = int(level), found.get("samples", 1)

    def cells(sizes: Mapping[str, Any], test: str) -> list[str]:
        shares = {n: rates[test][at] / draws for n, rates in sizes.items()}
        worst = max(shares, key=lambda n: shares[n])
        return [f"{shares['40']:.2%}", f"{shares[worst]:.2%} ({worst})"]

    rows = [
        [
            case,
            *cells(sizes, "bounded mean"),
            *cells(sizes, "sign flips and t"),
            *cells(sizes, "sign flips"),
        ]
        for case, sizes in found["cases"].items()
    ]
    headings = ["gain of an example"]
    headings += [
        f"{test}, {size}"
        for test in ("bounded mean", "sign flips and t", "sign flips")
        for size in ("n = 40", "largest (n)")
    ]
    return markdown(headings, rows)


def false_runs() -> str:
    """Tabulate the whole runs that called a change supported although no candidate is better."""
    found = false_accepts_file("runs")
    rows = [
        [name, f"{row['gain']:+.4f}", str(row["runs"]), str(row["supported"]), str(found["limit"])]
        for name, row in found["worlds"].items()
    ]
    return markdown(
        ["candidates", "true gain", "runs", "runs with a supported one", "limit (99.9 %)"], rows
    )


def policies() -> str:
    """Tabulate how often each policy returns a candidate of a known gain."""
    found = false_accepts_file("policies")["rows"]
    rows = [
        [
            f"{gain:+.2f}",
            *(
                f"{row[policy]:.0%}"
                for policy in ("best", "supported")
                for row in found
                if row["gain"] == gain
            ),
        ]
        for gain in dict.fromkeys(row["gain"] for row in found)
    ]
    headings = [
        f"`{policy}`, {looks}"
        for policy in ("best", "supported")
        for looks in ("one look", "two looks")
    ]
    return markdown(["true gain", *headings], rows)


def acceptance_power(level: str) -> str:
    """Tabulate how often each test accepts typical improvements."""
    found, at = false_accepts_file("power"), int(level)
    rows = [
        [f"{case}, n = {n}", *(f"{rates[at]:.0%}" for rates in tests.values())]
        for case, sizes in found["cases"].items()
        for n, tests in sizes.items()
    ]
    names = list(next(iter(next(iter(found["cases"].values())).values())))
    return markdown(["gain of an example", *names], rows)


def valid_sizes() -> str:
    """Tabulate the results of small budgets by the number of validation examples."""
    found = results("valid_sizes")
    systems = list(found["start"])
    means: dict[tuple[int, int], dict[str, tuple[float, int]]] = {}
    for row in found["rows"]:
        by_system = means.setdefault((row["runs"], row["valid"]), {})
        by_system[row["system"]] = (row["mean"], row["accepted"])
    rows = [
        [
            str(runs),
            str(valid),
            *(f"{each[name][0]:.3f} ({each[name][1]})" for name in systems),
            f"{fmean(mean for mean, _ in each.values()):.3f}",
        ]
        for (runs, valid), each in means.items()
    ]
    start = ["–", "–", *(f"{found['start'][name]:.3f}" for name in systems)]
    rows.insert(0, [*start, f"{fmean(found['start'].values()):.3f}"])
    return markdown(["system runs", "n", *systems, "mean"], rows)


TABLES = (needed, false_accepts, false_runs, policies, acceptance_power, valid_sizes)
