"""Worlds of scripted writers as plain programs, for optimizers of other packages."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from compound.benchmarks.simulated.tickets import SorterLM
from compound.benchmarks.simulated.writer import WriterLM
from compound.benchmarks.simulated.writers.worlds import FILES, Found, World
from compound.engine import Message, Request
from compound.example import Example, Score
from compound.execution.rng import derive_seed, generator

Row = Mapping[str, str]
LONGEST = 1000  # words of a reply


@dataclass(frozen=True)
class Step:
    """A step of a program, whose messages are those of our component.

    Attributes:
        name: the component.
        input, output: its fields.
    """

    name: str
    input: str
    output: str

    def message(self, prompt: str, demos: Sequence[Row], value: str) -> str:
        """Return the message that asks for the output.

        >>> Step("reader", "order", "draft").message("Copy.", [{"order": "a", "draft": "A"}], "b")
        'Copy.\\n\\nOrder: a\\nDraft: A\\n\\nOrder: b\\nDraft:'
        """
        reads, writes = self.input.capitalize(), self.output.capitalize()
        shown = [f"{reads}: {demo[self.input]}\n{writes}: {demo[self.output]}" for demo in demos]
        return "\n\n".join([prompt, *shown, f"{reads}: {value}\n{writes}:"])


STEPS: Mapping[str, tuple[Step, ...]] = {
    "tickets": (Step("sorter", "ticket", "queue"),),
    "writer": (Step("reader", "order", "draft"), Step("finisher", "draft", "label")),
}


@dataclass
class PlainProgram:
    """Program of a world, with its data for one seed.

    Attributes:
        world: the world; a key of `STEPS`.
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
        return STEPS[self.world.name]

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
            (Message("user", message),), seed=derive_seed(self.seed, self._requests), max_tokens=LONGEST
        )
        return asyncio.run(self._lm.generate(request)).text.strip()

    def values(
        self, prompts: Mapping[str, str], row: Row, demos: Mapping[str, Sequence[Row]]
    ) -> dict[str, str]:
        """Return the fields of a run, without counting it."""
        found = dict(row)
        for step in self.steps:
            message = step.message(prompts[step.name], demos.get(step.name, ()), found[step.input])
            found[step.output] = self.ask(message)
        return {name: found[name] for step in self.steps for name in (step.input, step.output)}

    def run(self, prompts: Mapping[str, str], row: Row) -> dict[str, str]:
        """Run the program on an example."""
        self.runs += 1
        return self.values(prompts, row, {})

    def score(self, row: Row, output: str) -> float:
        """Return the score of an output of the last step."""
        metric, last = self.world.program.metric, self.steps[-1]
        assert metric is not None
        score = metric.score({last.output: output}, Example(row["id"], {}, {last.output: row[last.output]}))
        assert isinstance(score, Score)
        return score.value

    def feedback(self, row: Row, score: float) -> str:
        """Return what a reflection is told about a run."""
        last = self.steps[-1].output
        return f"The score is {score:.2f}. The expected {last} is: {row[last]}"

    def found(self, prompts: Mapping[str, str], demos: Mapping[str, Sequence[Row]]) -> Found:
        """Return the test score of prompts and demonstrations, and what finding them took."""
        requests, last = self._lm.written, self.steps[-1].output
        scores = [self.score(row, self.values(prompts, row, demos)[last]) for row in self.world.test_rows]
        return Found(fmean(scores), fmean(scores), self.runs, requests)
