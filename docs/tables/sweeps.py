"""Tables of sweeps, and of judges of local rewards."""

from __future__ import annotations

from compound.report.comparison import methods
from compound.report.rendering.markdown import render_block
from tables.data import markdown, results, spread

MIN_INPUTS = 10


def sweep(name: str) -> str:
    """Tabulate the methods of a sweep."""
    facts = results(f"sweep_{name}")
    return render_block(methods(facts, name))


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
                rows.append([component, seed, *accuracies, str(local["inputs"]), str(local["pairs"])])
    return markdown(["component", "seed", "local reward", "judge", "inputs", "pairs"], rows)


def of_searches() -> str:
    """Tabulate the test scores of searches with several seeds."""
    found = results("spread")
    rows = [
        [name, str(len(row["scores"])), spread(row["mean"]), f"{row['sd']:.3f}", f"{row['worst']:.3f}",
         f"{max(row['scores']):.3f}"]
        for name, row in found["methods"].items()
    ]  # fmt: skip
    return markdown(["search", "seeds", "mean", "standard deviation", "lowest", "highest"], rows)


TABLES = (sweep, judged, of_searches)
