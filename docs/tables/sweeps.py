"""Tables of sweeps, and of judges of local rewards."""

from __future__ import annotations

from statistics import fmean

from compound.report.comparison import methods
from compound.report.rendering.markdown import render_block
from tables.data import markdown, results, spread

MIN_INPUTS = 10  # of a component, over all runs


def sweep(name: str) -> str:
    """Tabulate the methods of a sweep."""
    facts = results(f"sweep_{name}")
    return render_block(methods(facts, name))


def judged(name: str) -> str:
    """Tabulate the accuracy of local rewards and of a judge on the same pairs, by component.

    Accuracies are means over the inputs of all runs. Components with few inputs are left out.
    """
    runs = results(f"judged_{name}")["runs"]
    components = dict.fromkeys(component for rows in runs.values() for component in rows)
    rows = []
    for component in components:
        found = [rows[component] for rows in runs.values() if component in rows]
        inputs = [row["local"]["inputs"] for row in found]
        if sum(inputs) < MIN_INPUTS:
            continue
        means = (
            f"{fmean([row[kind]['mean'] for row in found], inputs):.3f} "
            f"({', '.join(format(row[kind]['mean'], '.2f') for row in found)})"
            for kind in ("local", "judge")
        )
        counts = (", ".join(map(str, some)) for some in (inputs, (row["pairs"] for row in found)))
        rows.append([component, *means, *counts])
    return markdown(["component", "local reward (each run)", "judge (each run)", "inputs", "pairs"], rows)


def of_searches() -> str:
    """Tabulate the test scores of searches with several seeds."""
    found = results("spread")
    rows = [
        [name, str(len(row["scores"])), spread(row["mean"]), f"{row['sd']:.3f}", f"{row['worst']:.3f}",
         f"{max(row['scores']):.3f}"]
        for name, row in found["methods"].items()
    ]  # fmt: skip
    rows.append(["difference", str(found["gain"]["n"]), spread(found["gain"], signed=True), "–", "–", "–"])
    return markdown(["search", "seeds", "mean", "standard deviation", "lowest", "highest"], rows)


TABLES = (sweep, judged, of_searches)
