"""Compare methods where a scripted model of known skill writes the prompts.

    python -m compound.benchmarks.simulated.writers.methods [METHOD ...]

For each method, world (`compound.benchmarks.simulated.writers.worlds`), skill and number of system runs, the
file ``benchmarks/data/writers.json`` has what each of 10 seeds found: the mean test score of the returned and
of the proposed configuration, the system runs spent, and the requests to the writer. The system runs include
those of the initial evaluation and of the decision; all other settings are the defaults.

Finished cells are kept, so an interrupted measurement can be resumed; to measure a method again, remove its
entry from the file.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean

from compound.benchmarks.simulated.writers.worlds import FILES, World

OUTPUT = Path(__file__).parents[2] / "data" / "writers.json"
OURS = "search"
METHODS = (OURS, "optimas", "opro", "gepa", "textgrad", "mipro", "random")
BUDGETS = (100, 200, 400)
SKILLS = (0.7, 0.4, 1.0)
SEEDS = 10
Cell = dict[str, list[float]]  # what the seeds found, by the fields of `Found`
Document = dict[str, dict[str, dict[str, Cell]]]  # by method, world with skill, and system runs


def cells() -> Iterator[tuple[World, int]]:
    """Yield the worlds and numbers of system runs."""
    for skill in SKILLS:
        for name in FILES:
            yield from ((World(name, skill), runs) for runs in BUDGETS)


def key_of(world: World) -> str:
    """Return the key of a world in the file.

    >>> key_of(World("mixed", 1.0))
    'mixed 1.0'
    """
    return f"{world.name} {world.skill}"


def measure(world: World, method: str, runs: int, seeds: Sequence[int]) -> Cell:
    """Run a method once per seed."""
    found = [asdict(world.search(method, runs, seed)) for seed in seeds]
    return {name: [round(float(row[name]), 4) for row in found] for name in found[0]}


def read() -> Document:
    """Return the finished cells."""
    known: Mapping[str, Document] = json.loads(OUTPUT.read_text(encoding="utf-8")) if OUTPUT.exists() else {}
    return known.get("methods", {})


def write(found: Document) -> None:
    """Write the finished cells, in the order of the methods."""
    document = {"seeds": SEEDS, "methods": {name: found[name] for name in METHODS if name in found}}
    text = re.sub(r"\[[^][]*\]", lambda row: " ".join(row[0].split()), json.dumps(document, indent=1))
    OUTPUT.write_text(f"{text}\n", encoding="utf-8")


def main() -> None:
    """Measure all missing cells of the named methods, or of all, and write the file after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("methods", nargs="*", metavar="METHOD", help=f"one of {', '.join(METHODS)}")
    names = parser.parse_args().methods or METHODS
    for world, runs in cells():
        for name in names:
            found = read()
            rows = found.setdefault(name, {}).setdefault(key_of(world), {})
            if str(runs) in rows:
                continue
            rows[str(runs)] = cell = measure(world, name, runs, range(SEEDS))
            write(found)
            print(key_of(world), runs, name, round(fmean(cell["returned"]), 4), flush=True)


if __name__ == "__main__":
    main()
