"""Decisions: compare the working configuration with the best one on validation examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from compound.errors import BudgetExhausted
from compound.evaluation.alpha import decision_level
from compound.evaluation.evaluate import Evaluation, gain_interval, joint_bounds
from compound.evaluation.paired_tests import TestName, applicable_test, bounded_p, paired_test
from compound.evaluation.statistics import Bounds
from compound.execution.rng import generator
from compound.formatting import plural
from compound.graph.system import System
from compound.loop.context import RunContext
from compound.optimization.budget_plan import stochastic, uses_up_decisions

__all__ = ["decide", "stop_if_undecidable"]

PATIENCE = 3  # consecutive rounds without a proposal before the search ends
MOST_REPETITIONS = 20  # of the validation examples, in the estimate of a sufficient number


@dataclass(frozen=True)
class PairedComparison:
    """Evaluations of two configurations on the same validation examples and fresh samples.

    Attributes:
        before: the best configuration.
        after: the working one.
        p: one-sided p-value of the gain.
        test: the test that returned it.
    """

    before: Evaluation
    after: Evaluation
    p: float
    test: TestName

    def to_json(self) -> dict[str, object]:
        """Return the comparison as recorded with a decision."""
        gain = gain_interval(self.before, self.after).to_json()
        return {
            "p": self.p,
            "test": self.test,
            "before": self.before.summary(),
            "after": self.after.summary(),
            "gain": {name: gain[name] for name in ("mean", "low", "high")},
        }


async def decide(context: RunContext) -> None:
    """End a round: accept the working configuration, or return to the best one."""
    search, plan = context.search, context.budget.plan
    best, working = context.problem.bind(search.best), context.working()
    changes = [[c.key, c.before, c.after] for c in best.configuration.diff(working.configuration)]
    search.jobs_in_round, search.working = 0, {}
    if not changes:
        _end_idle_round(context)
        return
    search.decisions += 1
    search.idle_rounds = 0
    level = _level(context)
    record: dict[str, object] = {"decision": search.decisions, "level": level, "changes": changes}
    accepted, violations = False, list[str]()
    try:
        compared = await _compare(context, best, working)
    except BudgetExhausted as error:
        search.stopped = error.message
        record["note"] = "the budget was exhausted before the decision"
    else:
        accepted = compared.p <= level
        record |= compared.to_json()
        violations = [compared.before.violation, compared.after.violation]
        if lost := _lost_examples(compared.before):
            record["lost"] = len(lost)
        if accepted:
            search.incumbent, search.best = compared.after, working.configuration.to_json()
    if search.decisions == plan.decisions and not search.stopped:
        search.stopped = (
            "the planned decision was made"
            if plan.decisions == 1
            else f"all {plan.decisions} planned decisions were made"
        )
    context.recorder.event("decision", accepted=accepted, **record)
    context.record_violation(*violations)
    stop_if_undecidable(context)


def stop_if_undecidable(context: RunContext) -> None:
    """End the search if no later decision can accept a change, since scores can rise too little.

    This is certain, and checked, only for deterministic systems and metrics with bounds: a change that
    scores the maximum on every validation example has the smallest p-value.
    """
    search, bounds = context.search, context.search.incumbent.bounds
    if search.stopped or search.decisions == context.budget.plan.decisions:
        return
    if bounds is None or context.state.bounds_violation or stochastic(context.problem.system):
        return
    scores, level = search.incumbent.scores, _highest_level(context)
    p = _smallest_p(scores, bounds)
    if p <= level:
        return
    enough = (n for n in range(2, MOST_REPETITIONS) if _smallest_p(scores * n, bounds) <= level)
    repetitions = next(enough, None)
    advice = f"; about {repetitions * len(scores)} such examples would do" if repetitions else ""
    search.stopped = (
        f"no change can be accepted: if all {plural(len(scores), 'validation example')} scored "
        f"{bounds[1]:g}, p would be {p:.2g}, above the level {level:.2g}{advice}"
    )
    context.recorder.event("note", note=f"the search ends: {search.stopped}")


def _smallest_p(scores: Sequence[float], bounds: Bounds) -> float:
    """Return the p-value of a change that raises all scores to the maximum."""
    return bounded_p(bounds[1] - np.array(scores), bounds)


def _highest_level(context: RunContext) -> float:
    """Return the highest level of a later decision: that of the last one, if the others make no test."""
    search, planned = context.search, context.budget.plan.decisions
    tested = [number not in search.skipped for number in range(1, search.decisions + 1)]
    untested = [False] * (planned - search.decisions - 1)
    return decision_level(context.problem.settings.alpha, planned, [*tested, *untested])


async def _compare(context: RunContext, best: System, working: System) -> PairedComparison:
    """Evaluate both on fresh samples (if the system is stochastic) and test the difference."""
    number = context.search.decisions
    samples = context.samples(number)
    before = await context.validate(best, samples)
    after = await context.validate(working, samples)
    rng = generator(context.problem.settings.seed, "decision", number)
    known = joint_bounds(before.bounds, after.bounds)
    bounds = None if context.state.bounds_violation else known
    p = paired_test(_scores_before(before, after), after.scores, bounds=bounds, rng=rng)
    return PairedComparison(before, after, p, applicable_test(bounds))


def _lost_examples(evaluation: Evaluation) -> list[str]:
    """Return the names of the examples of which a run was lost to a transient failure."""
    rows = evaluation.rows
    return list(dict.fromkeys(r.example for r in rows if r.failure is not None and r.failure.is_transient))


def _scores_before(before: Evaluation, after: Evaluation) -> list[float]:
    """Return the scores of the best configuration, by which the change is tested.

    A score that was lost to a transient failure, such as of an overloaded server, is no evidence for the
    change: it counts as at least that of the working configuration.
    """
    lost, new = set(_lost_examples(before)), after.by_example()
    return [max(old, new[name]) if name in lost else old for name, old in before.by_example().items()]


def _level(context: RunContext) -> float:
    """Return the level of the current decision; those without a proposal left theirs to the later ones."""
    search = context.search
    tested = [number not in search.skipped for number in range(1, search.decisions)]
    return decision_level(context.problem.settings.alpha, context.budget.plan.decisions, tested)


def _end_idle_round(context: RunContext) -> None:
    """Record a round without a change; end the search after several in a row."""
    search = context.search
    search.idle_rounds += 1
    plan, method = context.budget.plan, context.problem.method
    if uses_up_decisions(method, plan):  # the planned jobs of this decision are finished
        search.decisions += 1
        search.skipped = [*search.skipped, search.decisions]
        if search.decisions == plan.decisions and not search.stopped:
            search.stopped = "all planned jobs are done"
    patience = PATIENCE if method.jobs_each else PATIENCE * len(method.jobs) // plan.jobs
    if search.idle_rounds >= patience and not search.stopped:
        search.stopped = f"{patience} consecutive rounds proposed nothing"
    context.recorder.event("round", note="no change to decide on", idle=search.idle_rounds)
