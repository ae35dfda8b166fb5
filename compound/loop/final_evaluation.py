"""Final evaluation on the test split, once, of the initial and the best configuration."""

from __future__ import annotations

from collections.abc import Mapping

from compound.errors import BudgetExhausted
from compound.evaluation.evaluate import evaluate
from compound.execution.executor import Executor
from compound.graph.system import System
from compound.loop.context import RunContext
from compound.optimization.budget_plan import stochastic
from compound.runs.state import FinalEvaluation

__all__ = ["evaluate_test_split"]

FIRST_SAMPLE = 1_000_000  # first sample index reserved for the test split


async def evaluate_test_split(context: RunContext) -> None:
    """Evaluate both configurations unless already done; each evaluation is one event and one checkpoint."""
    state, problem = context.state, context.problem
    executor = context.executor.with_meter(context.test_meter)
    if state.test_before is None:
        state.test_before = await _evaluate(context, executor, problem.system)
        _record(context, "test_before", state.test_before)
    if state.test_after is None:
        best = problem.bind(context.search.best)
        unchanged = best.configuration == problem.system.configuration
        before = FinalEvaluation(evaluation=state.test_before.evaluation)
        state.test_after = before if unchanged else await _evaluate(context, executor, best)
        _record(context, "test_after", state.test_after)


async def _evaluate(context: RunContext, executor: Executor, system: System) -> FinalEvaluation:
    """Evaluate a configuration on the test split, if the budget allows."""
    problem = context.problem
    if not problem.test:
        return FinalEvaluation()
    samples = [0]
    if stochastic(problem.system):
        samples = [FIRST_SAMPLE + sample for sample in context.samples(0)]
    try:
        evaluation = await evaluate(
            executor, system, problem.test, problem.metric, samples=samples, rules=problem.rules,
            on_trace=context.recorder.trace("test"),
        )  # fmt: skip
    except BudgetExhausted as error:
        return FinalEvaluation(skipped=error.message)
    return FinalEvaluation(evaluation=evaluation)


def _record(context: RunContext, name: str, reading: FinalEvaluation) -> None:
    facts: Mapping[str, object] = reading.evaluation.summary() if reading.evaluation else {}
    context.recorder.event(name, **facts, **({"skipped": reading.skipped} if reading.skipped else {}))
