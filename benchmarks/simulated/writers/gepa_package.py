"""The package ``gepa`` on worlds of scripted writers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.simulated.writers.programs import PlainProgram
from benchmarks.simulated.writers.worlds import Found, Row

if TYPE_CHECKING:
    import gepa


class ProgramAdapter:
    """Runs a program for ``gepa``, and shows its runs with the expected output to the reflection."""

    propose_new_texts = None  # the package's own

    def __init__(self, program: PlainProgram) -> None:
        self._program = program

    def evaluate(
        self, batch: Sequence[Row], candidate: Mapping[str, str], capture_traces: bool = False
    ) -> gepa.EvaluationBatch[Any, Any]:
        """Run prompts on examples."""
        import gepa

        last = self._program.steps[-1].output
        found = [self._program.run(candidate, row) for row in batch]
        scores = [
            self._program.score(row, run[last]) for row, run in zip(batch, found, strict=True)
        ]
        traces = list(zip(batch, found, scores, strict=True)) if capture_traces else None
        return gepa.EvaluationBatch(outputs=found, scores=scores, trajectories=traces)

    def make_reflective_dataset(
        self,
        candidate: Mapping[str, str],
        eval_batch: gepa.EvaluationBatch[Any, Any],
        components_to_update: Sequence[str],
    ) -> Mapping[str, Sequence[Mapping[str, object]]]:
        """Return the records that the reflection on each step reads."""
        return {
            step.name: [
                {
                    "Inputs": {step.input: run[step.input]},
                    "Generated Outputs": run[step.output],
                    "Feedback": self._program.feedback(row, score),
                }
                for row, run, score in eval_batch.trajectories or ()
            ]
            for step in self._program.steps
            if step.name in components_to_update
        }


class Silent:
    """Logger that drops all messages."""

    def log(self, message: str) -> None:
        """Drop a message."""


def evolve(program: PlainProgram, runs: int, valid: int) -> Found:
    """Optimize the prompts with ``gepa``; it ends with the iteration that spends the last run."""
    import gepa

    result = gepa.optimize(
        program.start,
        program.rows("train", 240),
        program.rows("dev", 100)[:valid],
        adapter=ProgramAdapter(program),
        reflection_lm=program.ask,
        max_metric_calls=runs,
        seed=program.seed,
        logger=Silent(),
    )
    return program.found(result.best_candidate, {})
