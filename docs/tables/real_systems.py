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
SIMULATED = "200"
RANDOM, SEARCH, LOCAL, WARM = "random", "search", "optimas", "optimas, warm"
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
    comparisons = [
        (SYSTEMS, (LOCAL, FEW), (SEARCH, FEW)),
        (SYSTEMS, (LOCAL, MORE), (SEARCH, MORE)),
        *(((name,), (LOCAL, MORE), (SEARCH, MORE)) for name in SYSTEMS),
        (SYSTEMS, (WARM, FEW), (LOCAL, FEW)),
        (SYSTEMS, (WARM, FEW), (SEARCH, MORE)),
    ]
    rows = []
    for systems, ours, other in comparisons:
        gains = []
        for name in systems:
            after, before = _runs(name, *ours), _runs(name, *other)
            gains += [after[seed] - before[seed] for seed in after if seed in before]
        difference = interval_of_means(gains, bounds=(-1.0, 1.0)).to_json()
        signs = (sum(gain > TIE for gain in gains), sum(gain < -TIE for gain in gains))
        counts = " / ".join(map(str, (signs[0], len(gains) - sum(signs), signs[1])))
        names = [f"{_label(method)}, {budget} runs" for method, budget in (ours, other)]
        on = "all" if systems == SYSTEMS else systems[0]
        rows.append([*names, on, str(len(gains)), spread(difference, signed=True), counts])
    headings = ["", "compared with", "systems", "pairs of runs", "difference"]
    return markdown([*headings, "better / equal / worse"], rows)


def measured() -> str:
    """Test scores of methods next to the controls; for simulated systems, shares of the optimum."""
    methods = (RANDOM, SEARCH, LOCAL)
    rows = []
    for name in SYSTEMS:
        found = results(f"searches/{name}")
        runs = {method: _runs(name, method, MORE) for method in methods}
        seeds = sorted(set.intersection(*map(set, filter(None, runs.values()))))
        scores = (fmean(each[s] for s in seeds) if each else None for each in runs.values())
        rows.append([name, len(seeds), fmean(found["start"]), *scores, *found["controls"].values()])
    simulated = results("relay_searches")
    for name, start in simulated["start"].items():
        cells = [simulated["methods"][method][name][SIMULATED] for method in methods]
        means = (cell["mean"] for cell in cells)
        rows.append([f"simulated: {name}", cells[0]["n"], start, *means, None, None])
    headings = ["system", "seeds", "initial", *(f"`{method}`" for method in methods)]
    return markdown(
        [*headings, "best constant answer", "direct call"],
        [[name, str(seeds), *map(_score, scores)] for name, seeds, *scores in rows],
    )


def _score(score: float | None) -> str:
    return "–" if score is None else f"{score:.3f}"


TABLES = (measured, real_system, real_differences)
