"""Worlds of scripted writers as plain programs, for optimizers of other packages."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.simulated.tickets import SorterLM
from benchmarks.simulated.writer import WriterLM
from benchmarks.simulated.writers.worlds import FILES, Found, Row, Shown, Step, World
from compound.core.engine import Message, Request
from compound.execution.rng import derive_seed, generator

LONGEST = 1000  # words of a reply


@dataclass
class PlainProgram:
    """Program of a world, with its data for one seed.

    Attributes:
        world: the world.
        seed: the seed of the order of the examples and of the writer.
        runs: the runs so far, without those of the test.
    """

    world: World
    seed: int
    runs: int = 0
    _lm: WriterLM | SorterLM = field(init=False)
    _requests: int = 0

    def __post_init__(self) -> None:
        self._lm = self.world.engine()

    def __deepcopy__(self, memo: object) -> PlainProgram:
        return self  # copies of a program of DSPy count together

    @property
    def steps(self) -> Sequence[Step]:
        """The steps, in order."""
        return self.world.steps

    @property
    def start(self) -> dict[str, str]:
        """The first prompts, by step."""
        return {
            step.name: str(self.world.program.system.configuration[f"{step.name}.prompt"])
            for step in self.steps
        }

    def rows(self, kind: str, count: int) -> list[dict[str, str]]:
        """Return examples of a split, in the order of the seed."""
        found = FILES[self.world.name][2](count, kind)
        return [dict(found[i]) for i in generator("rows", kind, self.seed).permutation(len(found))]

    def ask(self, message: str) -> str:
        """Return a reply of the model."""
        self._requests += 1
        request = Request(
            (Message("user", message),),
            seed=derive_seed(self.seed, self._requests),
            max_tokens=LONGEST,
        )
        return asyncio.run(self._lm.generate(request)).text.strip()

    def run(self, prompts: Mapping[str, str], row: Row) -> dict[str, str]:
        """Run the program on an example, and return the inputs and outputs of its steps."""
        self.runs += 1
        return self.world.outputs(prompts, {}, row)

    def score(self, row: Row, output: str) -> float:
        """Return the score of an output of the last step."""
        return self.world.score_of(row, output)

    def feedback(self, row: Row, score: float) -> str:
        """Return what a reflection is told about a run."""
        last = self.steps[-1].output
        return f"The score is {score:.2f}. The expected {last} is: {row[last]}"

    def found(self, prompts: Mapping[str, str], demos: Mapping[str, Shown]) -> Found:
        """Return the test score of prompts and demonstrations, and what finding them took."""
        score = self.world.mean_score(prompts, demos)
        return Found(score, score, self.runs, self._lm.written)
