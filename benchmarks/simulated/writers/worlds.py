"""Systems whose prompts a scripted model writes, and one run of a method on them.

- ``tickets``: one step, scored 0 or 1 (`compound.benchmarks.simulated.tickets`);
- ``writer``: two steps (`compound.benchmarks.simulated.writer`);
- ``mixed``: the same, and a last step of two choices and an integer, which multiply its score by up to 2.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import cast

from compound.api.description import describe, open_run
from compound.api.optimize import make_problem
from compound.api.sync import evaluate
from compound.benchmarks.simulated import tickets, writer
from compound.concurrency.blocking import run_blocking
from compound.execution.rng import generator
from compound.graph.configuration import Configuration
from compound.loop.loop import OptimizationLoop
from compound.runs.events import Event
from compound.runs.recorder import Recorder
from compound.settings.optimize import make_settings
from compound.spec import Program, load

FOLDER = Path(__file__).parents[2]
LAYOUTS: Mapping[str, float] = {"plain": 0.8, "boxed": 0.6, "lined": 1.0, "short": 0.7, "long": 0.75}
ORDERS: Mapping[str, float] = {"first": 0.85, "last": 1.0, "mixed": 0.7}
LEVEL, LOSS = 7, 0.05  # the best level, and the share lost with each level from it
TEST = 300  # test examples; the mean score of a good configuration of tickets has a standard error of 0.013


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


Rows = Callable[[int, str], Sequence[Mapping[str, str]]]
FILES: Mapping[str, tuple[str, type[writer.WriterLM | tickets.SorterLM], Rows]] = {
    "tickets": ("tickets.yaml", tickets.SorterLM, tickets.rows),
    "writer": ("writer.yaml", writer.WriterLM, writer.rows),
    "mixed": ("writer_mixed.yaml", writer.WriterLM, writer.rows),
}


@dataclass(frozen=True)
class Found:
    """What a method found.

    Attributes:
        returned, proposed: mean test score of the configuration that it returns, and of the one that it had
            before the decision.
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
        return FILES[self.name][2](TEST, "test")

    def engine(self) -> writer.WriterLM | tickets.SorterLM:
        """Return a new engine, which counts its requests."""
        return FILES[self.name][1](self.skill)

    def score(self, configuration: Configuration | Mapping[str, object]) -> float:
        """Return the mean test score of a configuration, or of values in place of initial ones."""
        assert self.program.metric is not None
        return evaluate(
            self.program.system.bind(configuration), [dict(row) for row in self.test_rows],
            self.program.metric, "test", engines={"writer": self.engine()}, cache=False,
        ).mean  # fmt: skip

    def search(self, method: str, runs: int, seed: int) -> Found:
        """Run a method with a number of system runs, and default settings otherwise."""
        program, lm, events = self.program, self.engine(), list[Event]()
        assert program.data is not None
        assert program.metric is not None
        settings = make_settings({"method": method, "seed": seed, "budget": {"system_runs": runs}})
        data = replace(program.data, test=None)  # tested by `score`
        problem = make_problem(program.system, data, program.metric, settings, lambda _: lm, program.folder)
        with tempfile.TemporaryDirectory() as folder:
            recorder = Recorder(
                open_run(Path(folder) / "run", "", describe(problem)),
                listener=lambda event: events.append(cast("Event", event)),
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
