"""Compare methods where a scripted model of known skill writes the prompts.

    python -m benchmarks.simulated.writers.methods [METHOD ...]

For each method, world (`benchmarks.simulated.writers.worlds`), skill and number of system runs, the
file ``benchmarks/data/writers.json`` has what each of 10 seeds found: the mean test score of the
returned and of the proposed configuration, the system runs spent, and the requests to the writer.
The system runs include those of the initial evaluation and of the decision; all other settings are
the defaults.

Finished cells are kept, so an interrupted measurement can be resumed; to measure a method again,
remove its entry from the file.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from benchmarks.simulated.writers.cells import add_missing
from benchmarks.simulated.writers.worlds import FILES, Found, World

OUTPUT = Path(__file__).parents[2] / "data" / "writers.json"
METHODS = ("search", "opro", "gepa", "textgrad", "mipro", "random")
BUDGETS = (100, 200, 400)
SKILLS = (0.7, 0.4, 1.0)


def cells() -> Iterator[tuple[World, int]]:
    """Yield the worlds and numbers of system runs."""
    for skill in SKILLS:
        for name in FILES:
            yield from ((World(name, skill), runs) for runs in BUDGETS)


def run(method: str, world: World, runs: int, seed: int) -> Found:
    """Run a method once."""
    return world.search(method, runs, seed)


def main() -> None:
    """Measure all missing cells of the named methods, or of all, and write the file after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("methods", nargs="*", metavar="METHOD", help=f"one of {', '.join(METHODS)}")
    add_missing(OUTPUT, parser.parse_args().methods or METHODS, cells(), run)


if __name__ == "__main__":
    main()
