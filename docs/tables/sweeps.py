"""Tables of sweeps, and of judges of local rewards."""

from __future__ import annotations

from statistics import fmean, stdev

from compound.evaluation.statistics import UNIT, interval_of_means
from compound.report.rendering import markdown_table
from compound.report.sweep import methods_of_file
from tables.data import markdown, results, spread

MIN_INPUTS = 10


def sweep(name: str) -> str:
    """Tabulate the methods of a sweep."""
    facts = results(f"sweep_{name}")
    return markdown_table(methods_of_file(facts, name))


def judged(name: str) -> str:
    """Tabulate the accuracies of local rewards and of a judge on the same pairs, by component and run.

    Runs with fewer than `MIN_INPUTS` inputs of a component are left out.
    """
    runs = results(f"judged_{name}")["runs"]
    components = dict.fromkeys(component for rows in runs.values() for component in rows)
    rows = []
    for component in components:
        for run, found in runs.items():
            row = found.get(component)
            if row and row["local"]["inputs"] >= MIN_INPUTS:
                seed, local = run.rpartition("-")[2], row["local"]
                accuracies = (spread(row[kind], digits=2) for kind in ("local", "judge"))
                rows.append(
                    [component, seed, *accuracies, str(local["inputs"]), str(local["pairs"])]
                )
    return markdown(["component", "seed", "local reward", "judge", "inputs", "pairs"], rows)


def of_searches() -> str:
    """Tabulate the test scores of a search with several seeds."""
    rows = []
    for method, budgets in results("searches/atlas_seeds")["runs"].items():
        for budget, runs in budgets.items():
            means = [fmean(run["scores"]) for run in runs.values()]
            unspent = 1 - fmean(run["system_runs"] for run in runs.values()) / float(budget)
            mean = interval_of_means(means, bounds=UNIT).to_json()
            numbers = (f"{number:.3f}" for number in (stdev(means), min(means), max(means)))
            parts = (f"`{method}`", budget, str(len(means)), spread(mean), *numbers)
            rows.append([*parts, f"{100 * unspent:.1f} %"])
    headings = [
        "method",
        "runs",
        "seeds",
        "mean",
        "standard deviation",
        "lowest",
        "highest",
        "unspent",
    ]
    return markdown(headings, rows)


TABLES = (sweep, judged, of_searches)
