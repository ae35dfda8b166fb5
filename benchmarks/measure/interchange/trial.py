"""One model and task on which programs are optimized."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import compound as cp
from benchmarks.measure.interchange.tasks import Rows, Task
from compound.api.arguments import GivenMetric
from compound.core.engine import Engine

MODEL = "openai/local"  # name of the model that the server answers as


@dataclass(frozen=True)
class Trial:
    """A task with a model that programs call at an OpenAI-compatible server.

    Attributes:
        model: name of the model in the table.
        task: the task.
        folder: holds the runs and the states of DSPy programs.
        url: address of the server.
        engine: engine of systems that call the server.
    """

    model: str
    task: Task
    folder: Path
    url: str
    engine: Engine

    @property
    def rows(self) -> Rows:
        """The rows of the task."""
        return self.task.rows

    def optimize(self, system: cp.System, budget: int) -> cp.Result:
        """Optimize a system with method ``search``."""
        return optimize(
            system,
            self.rows,
            "exact_match",
            budget,
            self.folder / system.name,
            {MODEL: self.engine},
        )

    def outputs(self, system: cp.System) -> list[object]:
        """Return the outputs of a system on the test rows, ``None`` for those of failed runs."""
        return outputs(system, self.rows, {MODEL: self.engine})

    def agreement(self, answer: Callable[[str], object], expected: list[object]) -> int:
        """Count the test rows on which a function of the question returns the expected output."""
        questions = (str(row["question"]) for row in self.rows["test"])
        return sum(
            answer(question) == each for question, each in zip(questions, expected, strict=True)
        )

    def row(
        self, library: str, form: str, result: cp.Result, same: Mapping[str, int]
    ) -> dict[str, Any]:
        """Return a row of the table."""
        named = f"{library} {version(library)}" if library != "compound" else "compound"
        return {**result_row(named, form, self.model, result), "same_outputs": dict(same)}


def optimize(
    system: cp.System,
    rows: Rows,
    metric: GivenMetric,
    budget: int,
    run_dir: Path,
    engines: Mapping[str, Engine],
) -> cp.Result:
    """Optimize a system with the default settings of method ``search``.

    Runs may fail: small models rarely follow DSPy's format without a demonstration.
    """
    return cp.optimize(
        system,
        rows,
        metric,
        method="search",
        budget=budget,
        run_dir=run_dir,
        engines=dict(engines),
        progress=False,
        seed=0,
        max_failed=1.0,
    )


def outputs(system: cp.System, rows: Rows, engines: Mapping[str, Engine]) -> list[object]:
    """Return the outputs of a system on the test rows, ``None`` for those of failed runs."""
    found = []
    for example in rows["test"]:
        inputs = {name: example[name] for name in system.inputs}
        trace = cp.run(system, inputs, engines=dict(engines), check=False)
        found.append(next(iter(trace.outputs.values()), None))
    return found


def result_row(library: str, form: str, model: str, result: cp.Result) -> dict[str, Any]:
    """Return the test scores of a run; ``library`` is named with its version."""
    before, after = result.test_before, result.test_after
    assert before is not None
    assert after is not None
    return {
        "library": library,
        "form": form,
        "model": model,
        "test_rows": len(after.scores),
        "test_before": before.mean,
        "test_after": after.mean,
    }
