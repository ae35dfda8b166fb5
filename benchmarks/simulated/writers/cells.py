"""Measurements of methods in worlds: a file of finished cells, to which a script adds the missing ones."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from compound.benchmarks.simulated.writers.worlds import Found, World

SEEDS = 10
Cell = dict[str, list[float]]  # what the seeds found, by the fields of `Found`
Run = Callable[[str, World, int, int], Found]  # of a method, a world, a number of system runs and a seed


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
        names: the methods to measure, in the order of the file.
        cells: worlds and numbers of system runs.
        run: runs a method once.
        **facts: further entries of the file.
    """
    for world, runs in cells:
        for name in names:
            known = _read(path)
            rows = known.setdefault(name, {}).setdefault(key_of(world), {})
            if str(runs) in rows:
                continue
            rows[str(runs)] = cell = _columns([run(name, world, runs, seed) for seed in range(SEEDS)])
            ordered = {each: known[each] for each in dict.fromkeys([*names, *known])}
            _write(path, {**facts, "seeds": SEEDS, "methods": ordered})
            print(key_of(world), runs, name, round(fmean(cell["returned"]), 4), flush=True)


def _columns(found: Sequence[Found]) -> Cell:
    rows = [asdict(each) for each in found]
    return {name: [round(float(row[name]), 4) for row in rows] for name in rows[0]}


def _read(path: Path) -> dict[str, dict[str, dict[str, Cell]]]:
    """Return the finished cells by method, world and system runs."""
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    methods: dict[str, dict[str, dict[str, Cell]]] = document.get("methods", {})
    return methods


def _write(path: Path, document: Mapping[str, object]) -> None:
    text = re.sub(r"\[[^][]*\]", lambda row: " ".join(row[0].split()), json.dumps(document, indent=1))
    path.write_text(f"{text}\n", encoding="utf-8")
