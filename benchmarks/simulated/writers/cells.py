"""Files of measurements of methods in worlds, and differences to the best of other methods."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.simulated.writers.worlds import Found, World
from compound.evaluation.statistics import Interval, interval_of_means

SEEDS = 10
Cell = dict[str, list[float]]  # what the seeds found, by the fields of `Found`
Run = Callable[
    [str, World, int, int], Found
]  # of a method, a world, a number of system runs and a seed


def key_of(world: World) -> str:
    """Return the key of a world in a file.

    >>> key_of(World("mixed", 1.0))
    'mixed 1.0'
    """
    return f"{world.name} {world.skill}"


def add_missing(
    path: Path, names: Sequence[str], cells: Iterable[tuple[World, int]], run: Run, **facts: object
) -> None:
    """Measure the cells that a file lacks, and write it after each.

    Args:
        path: the file.
        names: the methods to measure.
        cells: worlds and numbers of system runs.
        run: runs a method once.
        **facts: further entries of the file.
    """
    for world, runs in cells:
        for name in names:
            if str(runs) in read_cells(path).get(name, {}).get(key_of(world), {}):
                continue
            cell = _columns([run(name, world, runs, seed) for seed in range(SEEDS)])
            known = read_cells(path)  # again, since another process may have added cells
            known.setdefault(name, {}).setdefault(key_of(world), {})[str(runs)] = cell
            _write(path, {**facts, "seeds": SEEDS, "methods": known})
            print(key_of(world), runs, name, round(fmean(cell["returned"]), 4), flush=True)


def compare_with_best(
    ours: Sequence[float], others: Mapping[str, Sequence[float]]
) -> tuple[Interval, list[str]]:
    """Return the mean difference of our scores to those of the best other method, paired by seed.

    Even seeds are compared with the method that is best on odd seeds, and vice versa, so that no
    method is compared on the seeds that it was chosen by. The names are those of the two methods.

    >>> interval, names = compare_with_best([0.5, 0.5, 0.6, 0.5], {"a": [0.9, 0.3, 0.9, 0.3], "b": [0.4] * 4})
    >>> names, round(interval.mean, 3)
    (['b', 'a'], 0.175)
    """
    differences, names = [0.0] * len(ours), []
    for parity in (0, 1):
        best = max(others, key=lambda name: fmean(others[name][1 - parity :: 2]))
        names.append(best)
        for seed in range(parity, len(ours), 2):
            differences[seed] = ours[seed] - others[best][seed]
    return interval_of_means(differences), names


def _columns(found: Sequence[Found]) -> Cell:
    rows = [asdict(each) for each in found]
    return {name: [round(float(row[name]), 4) for row in rows] for name in rows[0]}


def read_cells(path: Path) -> dict[str, dict[str, dict[str, Cell]]]:
    """Return the finished cells by method, world and system runs."""
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    methods: dict[str, dict[str, dict[str, Cell]]] = document.get("methods", {})
    return methods


def _write(path: Path, document: Mapping[str, object]) -> None:
    text = re.sub(
        r"\[[^][]*\]", lambda row: " ".join(row[0].split()), json.dumps(document, indent=1)
    )
    path.write_text(f"{text}\n", encoding="utf-8")
