"""Tables of the comparison of searches on real systems."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from benchmarks.measure.searches.compare import summarize
from compound.evaluation.statistics import UNIT, interval_of_means
from tables.data import markdown, results, spread

SYSTEMS = ("relay", "atlas", "pubmedqa")
FEW, MORE = "120", "240"  # system runs
SEARCH, LOCAL, WARM = "search", "optimas", "optimas, warm"
TIE = 1e-9  # differences of test scores that are due to rounding


def real_system(name: str) -> str:
    """Test scores of the methods on a system by system runs, with the start and the controls."""
    found = results(f"searches/{name}")
    start = interval_of_means(found["start"], bounds=UNIT).to_json()
    rows = [["initial configuration", spread(start), "", "", ""]]
    rows += [
        [f"control: {control}", f"{score:.3f}" if score is not None else "–", "", "", ""]
        for control, score in found["controls"].items()
    ]
    for method, budgets in found["runs"].items():
        for budget, runs in budgets.items():
            summary = summarize(list(runs.values()), found["start"])
            accepted = (
                f"{sum(count > 0 for count in summary['accepted'])} of {len(summary['accepted'])}"
            )
            rows.append([f"{_label(method)}, {budget} runs", *_scores(summary), accepted])
    return markdown(["", "test score", "seeds", "gain over the start", "changed"], rows)


def _label(method: str) -> str:
    name, _, start = method.partition(", ")
    return f"`{name}`" + (f", {start}" if start else "")


def _scores(summary: Mapping[str, Any]) -> tuple[str, str, str]:
    scores = summary["scores"]
    mean = f"{scores[0]:.3f} with each seed" if len(set(scores)) == 1 else spread(summary["mean"])
    gain = spread(summary["gain"], signed=True) if any(summary["accepted"]) else "0"
    return (
        mean,
        ", ".join(f"{score:.3f}" for score in scores) if len(scores) <= 5 else f"{len(scores)}",
        gain,
    )


def _runs(name: str, method: str, budget: str) -> Mapping[str, float]:
    """Return the test score of each seed."""
    runs = results(f"searches/{name}")["runs"].get(method, {}).get(budget, {})
    return {seed: fmean(run["scores"]) for seed, run in runs.items()}


def real_differences() -> str:
    """Differences in test score, paired by system and seed."""
    comparisons = (
        ((LOCAL, FEW), (SEARCH, FEW)),
        ((LOCAL, MORE), (SEARCH, MORE)),
        ((WARM, FEW), (LOCAL, FEW)),
        ((WARM, FEW), (SEARCH, MORE)),
    )
    rows = []
    for ours, other in comparisons:
        gains = []
        for name in SYSTEMS:
            after, before = _runs(name, *ours), _runs(name, *other)
            gains += [after[seed] - before[seed] for seed in after if seed in before]
        difference = interval_of_means(gains, bounds=(-1.0, 1.0)).to_json()
        signs = (sum(gain > TIE for gain in gains), sum(gain < -TIE for gain in gains))
        counts = (signs[0], len(gains) - sum(signs), signs[1])
        names = [f"{_label(method)}, {budget} runs" for method, budget in (ours, other)]
        rows.append(
            [*names, str(len(gains)), spread(difference, signed=True), " / ".join(map(str, counts))]
        )
    return markdown(
        ["", "compared with", "pairs of runs", "difference", "better / equal / worse"], rows
    )


def measured() -> str:
    """Test scores of two methods, next to the controls."""
    rows = []
    for name in SYSTEMS:
        found = results(f"searches/{name}")
        runs = [_runs(name, method, MORE) for method in (SEARCH, LOCAL)]
        seeds = sorted(set.intersection(*map(set, runs)))
        scores = (fmean(each[seed] for seed in seeds) for each in runs)
        start, controls = fmean(found["start"]), found["controls"].values()
        rows.append(
            [name, str(len(seeds)), *(f"{score:.3f}" for score in (start, *scores, *controls))]
        )
    headings = [
        "system",
        "seeds",
        "initial",
        "`search`",
        "`optimas`",
        "best constant answer",
        "direct call",
    ]
    return markdown(headings, rows)


TABLES = (measured, real_system, real_differences)
