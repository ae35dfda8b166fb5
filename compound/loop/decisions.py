"""Decisions: compare the working configuration with the best one on validation examples."""

from __future__ import annotations

from dataclasses import dataclass

from compound.errors import BudgetExhausted
from compound.evaluation.evaluate import Evaluation, gain_interval
from compound.evaluation.statistics import paired_test
from compound.execution.rng import generator
from compound.graph.system import System
from compound.loop.context import RunContext

__all__ = ["decide"]

PATIENCE = 3  # consecutive rounds without a proposal before the search ends


@dataclass(frozen=True)
class PairedComparison:
    """Evaluations of two configurations on the same validation examples and fresh samples.

    Attributes:
        before: the best configuration.
        after: the working one.
        p: one-sided p-value of the gain.
    """

    before: Evaluation
    after: Evaluation
    p: float

    def to_json(self) -> dict[str, object]:
        """Return the comparison as recorded with a decision."""
        gain = gain_interval(self.before, self.after).to_json()
        return {
            "p": self.p,
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
    record: dict[str, object] = {"decision": search.decisions, "level": plan.level, "changes": changes}
    accepted = False
    try:
        compared = await _compare(context, best, working)
    except BudgetExhausted as error:
        search.stopped = error.message
        record["note"] = "the budget was exhausted before the decision"
    else:
        accepted = compared.p <= plan.level
        record |= compared.to_json()
        if accepted:
            search.incumbent, search.best = compared.after, working.configuration.to_json()
    if search.decisions == plan.decisions and not search.stopped:
        search.stopped = (
            "the planned decision was made"
            if plan.decisions == 1
            else f"all {plan.decisions} planned decisions were made"
        )
    context.recorder.event("decision", accepted=accepted, **record)


async def _compare(context: RunContext, best: System, working: System) -> PairedComparison:
    """Evaluate both on fresh samples (if the system is stochastic) and test the difference."""
    number = context.search.decisions
    samples = context.samples(number)
    before = await context.validate(best, samples)
    after = await context.validate(working, samples)
    rng = generator(context.problem.settings.seed, "decision", number)
    return PairedComparison(before, after, paired_test(before.scores, after.scores, rng=rng))


def _end_idle_round(context: RunContext) -> None:
    """Record a round without a change; end the search after several in a row."""
    search = context.search
    search.idle_rounds += 1
    if context.problem.method.jobs_each is not None:  # the planned jobs of this decision are finished
        search.decisions += 1
        if search.decisions == context.budget.plan.decisions and not search.stopped:
            search.stopped = "all planned jobs are done"
    if search.idle_rounds >= PATIENCE and not search.stopped:
        search.stopped = f"{PATIENCE} consecutive rounds proposed nothing"
    context.recorder.event("round", note="no change to decide on", idle=search.idle_rounds)
