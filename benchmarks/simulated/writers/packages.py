"""Run the optimizers of ``dspy`` and ``gepa`` where a scripted model of known skill writes the prompts.

    python -m benchmarks.simulated.writers.packages

They get the same rows, model and metric as our methods in `benchmarks.simulated.writers.methods`.
Every run of the program counts as a system run, also those of demonstrations and of validation, as
with our methods. The number of validation examples is `valid_size`: nearly all optimizers were
better so on other seeds than with 20, 40 and 50 examples. The file
``benchmarks/data/writer_packages.json`` has the same columns as that of our methods; finished cells
are kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from benchmarks.simulated.writers.cells import add_missing
from benchmarks.simulated.writers.dspy_package import OPTIMIZERS, compile_program
from benchmarks.simulated.writers.gepa_package import evolve
from benchmarks.simulated.writers.methods import BUDGETS
from benchmarks.simulated.writers.programs import PlainProgram
from benchmarks.simulated.writers.worlds import Found, World

OUTPUT = Path(__file__).parents[2] / "data" / "writer_packages.json"
WORLDS = ("tickets", "writer")
DSPY = "dspy "
METHODS = (*(f"{DSPY}{name}" for name in OPTIMIZERS), "gepa")


def cells() -> Iterator[tuple[World, int]]:
    """Yield the worlds and numbers of system runs."""
    for runs in BUDGETS:
        yield from ((World(name), runs) for name in WORLDS)


def valid_size(runs: int) -> int:
    """Return the number of validation examples with a number of system runs.

    >>> [valid_size(runs) for runs in BUDGETS]
    [12, 25, 25]
    """
    return min(25, runs // 8)


def run(method: str, world: World, runs: int, seed: int) -> Found:
    """Run an optimizer of a package once."""
    program, valid = PlainProgram(world, seed), valid_size(runs)
    if method.startswith(DSPY):
        return compile_program(method.removeprefix(DSPY), program, runs, valid)
    return evolve(program, runs, valid)


def main() -> None:
    """Measure all missing cells, and write the file after each."""
    versions = {name: version(name) for name in ("dspy", "gepa")}
    add_missing(OUTPUT, METHODS, cells(), run, versions=versions)


if __name__ == "__main__":
    main()
