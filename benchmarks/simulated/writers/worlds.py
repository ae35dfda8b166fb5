"""Systems whose prompts a scripted model writes, and one run of a method on them.

- ``tickets``: one step, scored 0 or 1 (`benchmarks.simulated.tickets`);
- ``writer``: two steps (`benchmarks.simulated.writer`);
- ``mixed``: the same, and a last step of two choices and an integer, which multiply its score by up to 2.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any

from benchmarks.simulated import tickets, writer
from compound.api.description import describe, open_run
from compound.api.optimize import make_problem
from compound.core.example import Example, Score
from compound.core.loops import run_blocking
from compound.execution.rng import generator
from compound.graph.configuration import Configuration
from compound.graph.space import as_demos
from compound.optimization.loop.loop import OptimizationLoop
from compound.optimization.runs.recorder import Event, Recorder
from compound.optimization.settings.optimize import make_settings
from compound.yaml import Program, load

FOLDER = Path(__file__).parents[2]
LAYOUTS: Mapping[str, float] = {
    "plain": 0.8,
    "boxed": 0.6,
    "lined": 1.0,
    "short": 0.7,
    "long": 0.75,
}
ORDERS: Mapping[str, float] = {"first": 0.85, "last": 1.0, "mixed": 0.7}
LEVEL, LOSS = 7, 0.05  # the best level, and the share lost with each level from it
# Test examples. Seeds share the luck of a prompt, which must be small where all methods come near
# the best.
TEST: Mapping[str, int] = {"tickets": 300, "writer": 1500, "mixed": 300}


def kept(layout: str, order: str, level: int) -> float:
    """Return the probability that the printer keeps a field.

    >>> kept("lined", "last", 7), round(kept("plain", "first", 2), 2)
    (1.0, 0.51)
    """
    return LAYOUTS[layout] * ORDERS[order] * (1 - LOSS * abs(level - LEVEL))


def print_label(label: str, layout: str, order: str, level: int) -> dict[str, str]:
    """Replace fields of a label at random; the probability depends on the settings."""
    rng = generator("printer", label, layout, order, level)
    fields = label.split("; ")
    drawn = rng.random(len(fields))
    pairs = zip(fields, drawn, strict=True)
    printed = [field if u < kept(layout, order, level) else "lost" for field, u in pairs]
    return {"printed": "; ".join(printed)}


Row = Mapping[str, str]
Shown = Sequence[Mapping[str, object]]  # demonstrations: fields of runs of a step


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

    def message(self, prompt: str, demos: Shown, value: str) -> str:
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
    "mixed": (Step("reader", "order", "draft"), Step("finisher", "draft", "label")),
}

Rows = Callable[[int, str], Sequence[Row]]
Answer = Callable[[str], str | None]  # the model as the performer of the steps
FILES: Mapping[str, tuple[str, type[writer.WriterLM | tickets.SorterLM], Rows, Answer]] = {
    "tickets": ("tickets.yaml", tickets.SorterLM, tickets.rows, tickets.answer),
    "writer": ("writer.yaml", writer.WriterLM, writer.rows, writer.answer),
    "mixed": ("writer_mixed.yaml", writer.WriterLM, writer.rows, writer.answer),
}


@dataclass(frozen=True)
class Found:
    """What a method found.

    Attributes:
        returned, proposed: mean test score of the configuration that it returns, and of the one
            that it had before the decision.
        runs: system runs spent, those of validation included.
        requests: requests to the model for anything but outputs of the steps.
    """

    returned: float
    proposed: float
    runs: float
    requests: int


@dataclass(frozen=True)
class World:
    """A system with its data, and the model that performs its steps and writes its prompts.

    Attributes:
        name: a key of `FILES`.
        skill: the skill of the model as a writer, from 0 to 1.
    """

    name: str
    skill: float = 0.7

    @cached_property
    def program(self) -> Program:
        """The system's file."""
        return load(FOLDER / FILES[self.name][0])

    @cached_property
    def test_rows(self) -> Sequence[Mapping[str, str]]:
        """Test examples; the first ones are those of the file."""
        return FILES[self.name][2](TEST[self.name], "test")

    def engine(self) -> writer.WriterLM | tickets.SorterLM:
        """Return a new engine, which counts its requests."""
        return FILES[self.name][1](self.skill)

    @property
    def steps(self) -> Sequence[Step]:
        """The steps that call the model, in order."""
        return STEPS[self.name]

    def outputs(
        self, prompts: Mapping[str, str], demos: Mapping[str, Shown], row: Row
    ) -> dict[str, str]:
        """Return the inputs and outputs of the steps, which are performed without the system."""
        found = dict(row)
        for step in self.steps:
            message = step.message(prompts[step.name], demos.get(step.name, ()), found[step.input])
            found[step.output] = FILES[self.name][3](message) or ""
        return {name: found[name] for step in self.steps for name in (step.input, step.output)}

    def score_of(self, row: Row, output: str) -> float:
        """Return the score of an output of the system."""
        metric, name = self.program.metric, self.steps[-1].output
        assert metric is not None
        score = metric.score({name: output}, Example(row["id"], {}, {name: row[name]}))
        assert isinstance(score, Score)
        return score.value

    def score(self, given: Configuration | Mapping[str, object]) -> float:
        """Return the mean test score of a configuration, or of values in place of initial ones."""
        values = self.program.system.bind(given).configuration
        prompts = {step.name: str(values[f"{step.name}.prompt"]) for step in self.steps}
        demos = {
            step.name: [
                {**demo["inputs"], **demo["outputs"]}
                for demo in as_demos(values[f"{step.name}.demos"])
            ]
            for step in self.steps
        }
        own = "printer."
        printer = {
            key.removeprefix(own): value for key, value in values.items() if key.startswith(own)
        }
        return self.mean_score(prompts, demos, printer)

    def mean_score(
        self,
        prompts: Mapping[str, str],
        demos: Mapping[str, Shown],
        printer: Mapping[str, Any] = MappingProxyType({}),
    ) -> float:
        """Return the mean test score of prompts and demonstrations by step, and of settings of a printer."""
        scores = []
        for row in self.test_rows:
            output = self.outputs(prompts, demos, row)[self.steps[-1].output]
            printed = print_label(output, **printer)["printed"] if printer else output
            scores.append(self.score_of(row, printed))
        return fmean(scores)

    def search(self, method: str, runs: int, seed: int) -> Found:
        """Run a method with a number of system runs, and default settings otherwise."""
        program, lm, events = self.program, self.engine(), list[Event]()
        assert program.data is not None
        assert program.metric is not None
        settings = make_settings({"method": method, "seed": seed, "budget": {"system_runs": runs}})
        data = replace(program.data, test=None)  # tested by `score`
        problem = make_problem(
            program.system, data, program.metric, settings, lambda _: lm, program.folder
        )
        with tempfile.TemporaryDirectory() as folder:
            recorder = Recorder(
                open_run(Path(folder) / "run", "", describe(problem)),
                listener=events.append,
            )
            try:
                loop = OptimizationLoop(problem, recorder)
                run_blocking(loop.run())
            finally:
                recorder.close()
        proposed: dict[str, object] = {}
        for event in events:
            if event["event"] == "job":
                proposed |= event["values"]
        best = Configuration(loop.context.search.best)
        score = self.score(best)
        same = program.system.bind(proposed).configuration == best
        runs_spent = events[-1]["spent"]["system_runs"]
        return Found(score, score if same else self.score(proposed), runs_spent, lm.written)
