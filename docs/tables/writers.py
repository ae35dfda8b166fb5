"""Tables of searches where a scripted model writes the prompts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev

from benchmarks.simulated.writers.cells import compare_with_best
from benchmarks.simulated.writers.methods import BUDGETS, METHODS, SKILLS
from benchmarks.simulated.writers.worlds import FILES
from compound.evaluation.statistics import Interval
from tables.data import markdown, results, spread

OURS = "search"
COMPARED = ("tickets", "writer")  # worlds that other packages were run on
PROMPTS_ALONE = ("opro", "gepa", "textgrad", "mipro")
FEWEST_OTHERS = 3  # measured methods that tune prompts alone, in a row of differences
LOWEST, WIDEST = (
    -0.02,
    0.03,
)  # the goal: lower bound of the difference, and standard deviation over seeds
Cell = Mapping[str, list[float]]


def _cell(file: str, method: str, world: str, skill: float, runs: int) -> Cell | None:
    methods = results(file)["methods"]
    found: Cell | None = methods.get(method, {}).get(f"{world} {skill}", {}).get(str(runs))
    return found


def _scores(cell: Cell | None) -> str:
    """Format the mean and the standard deviation over seeds."""
    return f"{fmean(cell['returned']):.3f} ± {stdev(cell['returned']):.3f}" if cell else "–"


def _difference(found: Interval) -> str:
    """Format a difference; equal differences of all seeds have no interval."""
    return (
        spread(found.to_json(), signed=True) if math.isfinite(found.low) else f"{found.mean:+.3f}"
    )


def writer_scores(world: str) -> str:
    """Tabulate the test scores of returned configurations by method, skill of the writer and system runs."""
    columns = [(skill, runs) for skill in sorted(SKILLS) for runs in BUDGETS]
    rows = [
        [f"`{method}`", *(_scores(_cell("writers", method, world, *column)) for column in columns)]
        for method in METHODS
    ]
    return markdown(["method", *(f"skill {skill}, {runs} runs" for skill, runs in columns)], rows)


def writer_differences() -> str:
    """Tabulate the differences of `search` to the best method that tunes prompts alone."""
    columns = [
        (world, skill, runs) for world in FILES for skill in sorted(SKILLS) for runs in BUDGETS
    ]
    rows = [row for column in columns if (row := _differences(*column))]
    headings = [
        "world",
        "skill",
        "runs",
        "sd of `search`",
        "best of prompts alone",
        "difference to it",
        f"at least {LOWEST}",
        f"sd at most {WIDEST}",
    ]
    return markdown(headings, rows)


def _differences(world: str, skill: float, runs: int) -> list[str]:
    """Return a row of the differences; empty if a cell is missing."""
    ours = _cell("writers", OURS, world, skill, runs)
    others = {name: _cell("writers", name, world, skill, runs) for name in PROMPTS_ALONE}
    measured = {name: cell["returned"] for name, cell in others.items() if cell}
    if ours is None or len(measured) < FEWEST_OTHERS:
        return []
    interval, names = compare_with_best(ours["returned"], measured)
    sd = stdev(ours["returned"])
    return [
        world,
        f"{skill}",
        str(runs),
        f"{sd:.3f}",
        ", ".join(f"`{name}`" for name in dict.fromkeys(names)),
        _difference(interval),
        _answer(interval.low >= LOWEST),
        _answer(sd <= WIDEST),
    ]


def _answer(holds: bool) -> str:
    return "yes" if holds else "no"


def writer_spending() -> str:
    """Tabulate the system runs spent and the requests to the writer, over all measured worlds and skills."""
    worlds = [(world, skill) for world in FILES for skill in SKILLS]
    rows = []
    for method in METHODS:
        found = {
            runs: [_cell("writers", method, *world, runs) for world in worlds] for runs in BUDGETS
        }
        cells = {runs: [cell for cell in each if cell] for runs, each in found.items()}
        if all(cells.values()):
            rows.append(
                [
                    f"`{method}`",
                    *(f"{_mean(cells[runs], 'runs'):.0f}" for runs in BUDGETS),
                    *(f"{_mean(cells[runs], 'requests'):.0f}" for runs in BUDGETS),
                ]
            )
    headings = [f"{name}, {runs} runs" for name in ("spent", "requests") for runs in BUDGETS]
    return markdown(["method", *headings], rows)


def _mean(cells: Sequence[Cell], name: str) -> float:
    return fmean(fmean(cell[name]) for cell in cells)


def writer_packages(world: str) -> str:
    """Tabulate the scores of optimizers of other packages, and of ours with as many and half as many runs."""
    ours = {runs: _cell("writers", OURS, world, 0.7, runs) for runs in BUDGETS}
    cells = {name: [_package(name, world, runs) for runs in BUDGETS] for name in _packages()}
    cells |= {"`search`": list(ours.values())}
    cells |= {"`search`, half of the runs": [ours.get(runs // 2) for runs in BUDGETS]}
    rows = [
        [name, *map(_scores, found), *(_amounts(found, kind) for kind in ("runs", "requests"))]
        for name, found in cells.items()
    ]
    return markdown(
        ["", *(f"{runs} runs" for runs in BUDGETS), "runs spent", "requests to the writer"], rows
    )


def _packages() -> list[str]:
    return list(results("writer_packages")["methods"])


def _package(name: str, world: str, runs: int) -> Cell | None:
    return _cell("writer_packages", name, world, 0.7, runs)


def _amounts(cells: Sequence[Cell | None], name: str) -> str:
    return ", ".join(f"{fmean(cell[name]):.0f}" if cell else "–" for cell in cells)


def package_differences() -> str:
    """Tabulate the differences of `search` to the best optimizer of the other packages."""
    rows = []
    for world, runs in ((world, runs) for world in COMPARED for runs in BUDGETS):
        cells = {name: _package(name, world, runs) for name in _packages()}
        others = {name: cell["returned"] for name, cell in cells.items() if cell}
        ours = [_cell("writers", OURS, world, 0.7, own) for own in (runs, runs // 2)]
        if ours[0] is None or len(others) < len(cells):
            continue
        found = [compare_with_best(cell["returned"], others) if cell else None for cell in ours]
        differences = [_difference(pair[0]) if pair else "–" for pair in found]
        _, names = compare_with_best(ours[0]["returned"], others)
        rows.append([world, str(runs), ", ".join(dict.fromkeys(names)), *differences])
    return markdown(
        ["world", "runs", "best of the packages", "equal runs", "half of the runs"], rows
    )


TABLES = (
    writer_scores,
    writer_differences,
    writer_spending,
    writer_packages,
    package_differences,
)
