"""Tables of the comparison of methods on real systems."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from compound.benchmarks.measure.searches.compare import summarize
from compound.evaluation.statistics import UNIT, interval_of_means
from tables.data import markdown, results, spread

SYSTEMS = ("relay", "atlas", "pubmedqa", "amazon", "hotpotqa")
WITH_BOTH_SIZES = SYSTEMS[:4]  # measured with two numbers of validation examples
WITH_TWO_MODELS = ("atlas_models", "pubmedqa_models")
BUDGETS = ("100", "200", "400")
FEWEST_SEEDS = 3  # for an interval over seeds
OURS = "optimas"
TIE = 1e-9  # differences of test scores that are due to rounding


def real_system(name: str) -> str:
    """Test scores of the methods on a system by system runs, with the start and the controls."""
    found = results(f"searches/{name}")
    start = interval_of_means(found["start"], bounds=UNIT).to_json()
    rows = [["initial configuration", spread(start), "", ""]]
    rows += [
        [f"control: {control}", f"{score:.3f}" if score is not None else "–", "", ""]
        for control, score in found["controls"].items()
    ]
    for method, runs in sorted(found["runs"].items()):
        for budget in (budget for budget in BUDGETS if runs.get(budget)):
            summary = summarize(list(runs[budget].values()), found["start"])
            rows.append([
                f"`{method}`, {budget} runs", _scores(summary), _gain(summary),
                f"{sum(count > 0 for count in summary['accepted'])} of {len(summary['accepted'])}",
            ])  # fmt: skip
    return markdown(["", "test score", "gain over the start", "runs with an accepted change"], rows)


def _scores(summary: Mapping[str, Any]) -> str:
    scores = summary["scores"]
    if len(scores) >= FEWEST_SEEDS and len(set(scores)) == 1:
        return f"{scores[0]:.3f} with each seed"
    if len(scores) >= FEWEST_SEEDS:
        return spread(summary["mean"])
    return f"{fmean(scores):.3f} ({', '.join(f'{score:.3f}' for score in scores)})"


def _gain(summary: Mapping[str, Any]) -> str:
    return spread(summary["gain"], signed=True) if any(summary["accepted"]) else "0"


def real_runs() -> str:
    """Mean test scores by method and system runs, over systems that have the same seeds of all methods."""
    rows = []
    for name in (*SYSTEMS, *WITH_TWO_MODELS):
        found = results(f"searches/{name}")["runs"]
        for budget in BUDGETS:
            complete = {m: runs[budget] for m, runs in found.items() if runs.get(budget)}
            seeds = set.intersection(*(set(runs) for runs in complete.values())) if complete else set()
            if not seeds:
                continue
            means = {m: fmean(fmean(runs[s]["scores"]) for s in seeds) for m, runs in complete.items()}
            ranked = sorted(means, key=lambda method: -means[method])
            cells = [f"`{method}` {means[method]:.3f}" for method in ranked]
            rows.append([name, budget, str(len(seeds)), ", ".join(cells)])
    return markdown(["system", "system runs", "seeds", "mean test scores, best first"], rows)


def real_differences() -> str:
    """Differences in test score between `optimas` and every other method, paired by system and seed."""
    systems = {name: results(f"searches/{name}")["runs"] for name in SYSTEMS}
    others = sorted({method for runs in systems.values() for method in runs} - {OURS})
    rows = []
    for budget in BUDGETS:
        for method in others:
            pairs = [
                (fmean(runs[method][budget][seed]["scores"]), fmean(ours["scores"]))
                for runs in systems.values()
                if method in runs
                for seed, ours in runs[OURS].get(budget, {}).items()
                if seed in runs[method].get(budget, {})
            ]
            gains = [after - before for before, after in pairs]
            difference = interval_of_means(gains, bounds=(-1.0, 1.0)).to_json()
            signs = (sum(gain > TIE for gain in gains), sum(gain < -TIE for gain in gains))
            counts = (signs[0], len(gains) - sum(signs), signs[1])
            cells = (str(len(gains)), spread(difference, signed=True), " / ".join(map(str, counts)))
            rows.append([budget, f"`{method}`", *cells])
    headings = ["system runs", "compared with", "pairs of runs", "difference", "better / equal / worse"]
    return markdown(headings, rows)


def measured() -> str:
    """Test scores by 400 system runs of two methods, next to the controls."""
    rows = []
    for name in SYSTEMS:
        found = results(f"searches/{name}")
        runs = {method: found["runs"][method][BUDGETS[-1]] for method in ("search", "optimas")}
        seeds = sorted(set.intersection(*(set(each) for each in runs.values())))
        scores = (fmean(fmean(each[seed]["scores"]) for seed in seeds) for each in runs.values())
        start, controls = fmean(found["start"]), found["controls"].values()
        cells = (f"{score:.3f}" for score in (start, *scores, *controls))
        rows.append([name, str(len(seeds)), *cells])
    headings = ["system", "seeds", "initial", "`search`", "`optimas`", "best constant answer", "direct call"]
    return markdown(headings, rows)


def valid_sizes_real() -> str:
    """Mean test scores with 100 system runs, and accepted changes, by the number of validation examples."""
    rows = []
    for name in WITH_BOTH_SIZES:
        fewer, more = results(f"searches/{name}")["runs"], results(f"searches/{name}_40")["runs"]
        pairs = [
            (run, fewer[method]["100"][seed])
            for method, runs in more.items()
            for seed, run in runs["100"].items()
            if seed in fewer[method].get("100", {})
        ]
        if not pairs:
            continue
        sides = list(zip(*pairs, strict=True))
        scores = (f"{fmean(fmean(run['scores']) for run in side):.3f}" for side in sides)
        accepted = (str(sum(run["accepted"] > 0 for run in side)) for side in sides)
        rows.append([name, str(len(pairs)), *scores, *accepted])
    headings = ["system", "runs", "score, n = 40", "score, n = 25", "accepted, n = 40", "accepted, n = 25"]
    return markdown(headings, rows)


TABLES = (measured, real_system, real_runs, real_differences, valid_sizes_real)
