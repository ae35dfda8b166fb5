"""Tables of local rewards and of searches on simulated systems."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import fmean, stdev
from typing import Any

from compound.report.text import p_value
from tables.data import DATA, markdown, results, spread

MIN_INPUTS = 10
PUBLIC = ("optimas", "search", "random", "llm_selector", "hbc")


def summary(part: str) -> Mapping[str, Any]:
    """Return the summary of a part of the simulated benchmark."""
    found: Mapping[str, Any] = results("local_rewards")[part]["summary"]
    return found


def accuracy() -> str:
    """Tabulate the ranking accuracy of learned rewards on simulated systems, and its upper limit."""
    found = summary("accuracy")
    shapes = list(next(iter(found.values()))["learned"])
    rows = [
        [
            kind,
            *(
                f"{_over_seeds(found[kind]['learned'][s])} of {found[kind]['limit'][s]['mean']:.3f}"
                for s in shapes
            ),
        ]
        for kind in found
    ]
    return markdown(["", *shapes], rows)


def _over_seeds(found: Mapping[str, Any]) -> str:
    """Format a mean with its interval; equal values of all seeds have none."""
    return f"{found['mean']:.3f}" if found["low"] is None else spread(found)


def lora() -> str:
    """Tabulate the ranking accuracy of rewards on a trained backbone, by seed."""
    found = next(iter(summary("lora").values()))
    columns = zip(found["accuracy"], found["loss_before"], found["loss_after"], strict=True)
    rows = [
        [str(seed), *(f"{value:.{digits}f}" for value, digits in zip(row, (3, 2, 2), strict=True))]
        for seed, row in enumerate(columns)
    ]
    return markdown(["seed", "held-out accuracy", "held-out loss, untrained", "trained"], rows)


def regret() -> str:
    """Tabulate the regret of the schedulers."""
    found = summary("regret")
    rows = [
        [
            name,
            spread(part, digits=1),
            "–" if name == "uniform" else p_value(part["p_less_than_uniform"]),
        ]
        for name, part in found.items()
    ]
    return markdown(["scheduler", "regret", "p, less than uniform"], rows)


def relay_searches(system: str) -> str:
    """Tabulate the scores of configurations found on a relay, by method and system runs."""
    found = results("relay_searches")
    name = system.replace("_", " ")
    budgets = list(found["methods"]["optimas"][name])
    rows = [
        [
            f"`{method}`" if method in PUBLIC else f"`optimas`, {method}",
            *(spread(values[name][runs]) if runs in values[name] else "–" for runs in budgets),
        ]
        for method, values in found["methods"].items()
        if name in values
    ]
    start = ["as it starts", *([f"{found['start'][name]:.3f}"] * len(budgets))]
    return markdown(["method", *budgets], [start, *rows])


def relay_differences() -> str:
    """Tabulate the differences of `optimas` from each other row, paired by seed, in standard errors."""
    methods = results("relay_searches")["methods"]
    base = methods["optimas"]
    budgets = list(next(iter(base.values())))
    rows = [
        [system, method, *(_difference(base[system], values[system], runs) for runs in budgets)]
        for system in base
        for method, values in methods.items()
        if method != "optimas" and system in values
    ]
    return markdown(["system", "compared with", *budgets], rows)


def _difference(ours: Mapping[str, Any], theirs: Mapping[str, Any], runs: str) -> str:
    if runs not in theirs or runs not in ours:
        return "–"
    differences = [a - b for a, b in zip(ours[runs]["values"], theirs[runs]["values"], strict=True)]
    error = stdev(differences) / math.sqrt(len(differences))
    mean = fmean(differences)
    return f"{mean:+.3f} ({mean / error:+.1f})" if error else f"{mean:+.3f}"


def gold() -> str:
    """Tabulate the accuracies of rewards with and without gold answers on pairs of real runs."""
    rows = []
    for path in sorted((DATA / "gold_accuracy").glob("*.json")):
        for component, row in results(f"gold_accuracy/{path.stem}")["components"].items():
            if row["gold"]["inputs"] >= MIN_INPUTS:
                rows.append(
                    [
                        path.stem,
                        component,
                        spread(row["without"]),
                        spread(row["gold"]),
                        spread(row["difference"], signed=True),
                        str(row["gold"]["inputs"]),
                        str(row["gold"]["pairs"]),
                    ]
                )
    headings = ["system", "component", "without gold", "with gold", "difference", "inputs", "pairs"]
    return markdown(headings, rows)


TABLES = (
    accuracy,
    gold,
    lora,
    regret,
    relay_searches,
    relay_differences,
)
