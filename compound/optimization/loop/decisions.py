"""Decisions: compare the working configuration with a reference on validation examples.

The reference is the last configuration that a test supported, at first the initial one. If the
first look at the validation examples does not decide, a second one adds examples that nothing has
used, as far as the budget covers them. Whether there may be two looks, which then share the level
of the decision, is fixed before the first one, so that all levels sum to at most ``alpha``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from scipy import special

from compound.core.errors import BudgetExhausted
from compound.core.example import Example
from compound.core.formatting import plural
from compound.evaluation.acceptance import (
    MOST_EXAMPLES,
    POWER,
    TestName,
    applicable_test,
    bounded_p,
    decision_level,
    paired_test,
)
from compound.evaluation.evaluate import (
    Evaluation,
    gain_interval,
    joint_bounds,
    raise_too_many_failures,
)
from compound.evaluation.statistics import Bounds
from compound.execution.rng import generator
from compound.graph.configuration import Configuration
from compound.graph.system import System
from compound.optimization.budget_plan import decision_cost, further_cost, stochastic
from compound.optimization.loop.context import RunContext

Verdict = Literal["supported", "promising", "rejected", "feasible"]

PATIENCE = 3  # consecutive rounds without a proposal before the search ends
MOST_REPETITIONS = 20  # of the validation examples, in the estimate of a sufficient number
FIRST_SHARE = 0.6  # of the level of a decision, for the first of two looks
LEAST_FURTHER = 0.5  # examples of a second look, at least, relative to the first one
LEAST_COVERED = 0.5  # of the examples of a look; if the budget covers fewer, there is no decision
LEAST_GAIN = 1e-9  # mean gain of an example that is not a rounding error


@dataclass(frozen=True)
class Look:
    """Evaluations of two configurations on the same validation examples and fresh samples."""

    before: Evaluation  # the reference
    after: Evaluation  # the working configuration
    p: float  # one-sided p-value of the gain
    test: TestName  # the test that returned it
    level: float  # the level of the test
    margin: float = 0.0  # the loss that is accepted; see `Job.margin`

    @property
    def gains(self) -> list[float]:
        """Gain on each example, above the loss that is accepted; see `_scores_before`."""
        pairs = zip(_scores_before(self.before, self.after), self.after.scores, strict=True)
        return [new - old + self.margin for old, new in pairs]

    @property
    def gain(self) -> float:
        """Mean gain; 0 if it is only a rounding error."""
        gain = math.fsum(self.gains) / len(self.gains)
        return gain if abs(gain) > LEAST_GAIN else 0.0

    @property
    def verdict(self) -> Verdict:
        """Whether a test supports the change, or the change at least scored higher."""
        if self.p <= self.level:
            return "supported"
        return "promising" if self.gain > 0 else "rejected"

    def to_json(self) -> dict[str, object]:
        """Return the comparison as recorded with a decision."""
        gain = gain_interval(self.before, self.after).to_json()
        record: dict[str, object] = {
            "p": self.p,
            "test": self.test,
            "before": self.before.summary(),
            "after": self.after.summary(),
            "gain": {name: gain[name] for name in ("mean", "low", "high")},
            "probability": probability_of_gain(self.gains),
        }
        if self.margin:
            record |= {"margin": self.margin}
        if self.verdict == "promising":
            record["examples"] = examples_to_know(self.gains, self.level)
        return record


def probability_of_gain(gains: Sequence[float]) -> float:
    """Return the probability that the mean gain of all examples of the task is positive.

    This is Student's posterior of a mean under a flat prior, limited by Laplace's rule of
    succession, since few equal gains do not make sure of anything.

    >>> round(probability_of_gain([1, 0, 0, 0, 0, 0, 0, 0, 0, 0]), 2), probability_of_gain([0.0, 0.0])
    (0.83, 0.5)
    """
    n, mean = len(gains), float(np.mean(gains))
    sd = float(np.std(gains, ddof=1)) if n > 1 else 0.0
    most = (n + 1) / (n + 2)
    if not sd:
        return 0.5 if not mean else most if mean > 0 else 1 - most
    return min(most, max(1 - most, float(special.stdtr(n - 1, mean / sd * math.sqrt(n)))))


def examples_to_know(gains: Sequence[float], level: float) -> int:
    """Return about how many examples support a gain like this one with a probability of `POWER`.

    >>> examples_to_know([1, -1, 1, 0, 0, 0, 0, 0, 0, 1], 0.05)
    56
    """
    mean, sd = float(np.mean(gains)), float(np.std(gains))
    quantiles = special.ndtri(1 - level) + special.ndtri(POWER)
    needed = math.ceil(min(MOST_EXAMPLES, float(quantiles * sd / mean) ** 2))
    return max(len(gains) + 1, needed)


async def decide(context: RunContext) -> None:
    """End a round: accept the working configuration, or return to the best one."""
    search, plan = context.search, context.budget.plan
    best, working = context.problem.bind(search.best), context.working()
    changes = [[c.key, c.before, c.after] for c in best.configuration.diff(working.configuration)]
    margin = _margin(context)
    search.jobs_in_round, search.working = 0, {}
    if not changes:
        _end_idle_round(context)
        return
    context.enter("deciding")
    search.decisions += 1
    search.idle_rounds = 0
    level = _level(context)
    record: dict[str, object] = {"decision": search.decisions, "level": level, "changes": changes}
    accepted, violations = False, list[str]()
    try:
        first, look = await _looks(context, working, level, margin)
    except BudgetExhausted as error:
        search.stopped = error.message
        record["note"] = "the budget was exhausted before the decision"
    else:
        if first.after.cut:
            search.stopped = first.after.cut
            valid = plural(len(context.problem.valid), "validation example")
            record["note"] = f"the budget covered {len(first.gains)} of {valid}"
        over = context.candidates.broken_limits(working.configuration)
        exceeded = context.candidates.broken_limits(best.configuration)
        verdict = "feasible" if exceeded and not over else look.verdict
        record |= {"verdict": verdict, "level": look.level, "looks": 1 + (look is not first)}
        record |= look.to_json() | ({"over": over} if over else {})
        violations = [look.before.violation, look.after.violation]
        if lost := _lost_examples(look.before):
            record["lost"] = len(lost)
        accepted = not over and _accept(context, working, first, look, verdict)
        context.candidates.entry(working.configuration).fate = "over limit" if over else verdict
    if search.decisions == plan.decisions and not search.stopped:
        every = f"all {plan.decisions} planned decisions were made"
        search.stopped = "the planned decision was made" if plan.decisions == 1 else every
    context.write_candidates()
    context.recorder.event("decision", accepted=accepted, **record)
    context.record_violation(*violations)
    stop_if_undecidable(context)


def _accept(
    context: RunContext, working: System, first: Look, look: Look, verdict: Verdict
) -> bool:
    """Store what a decision found; return whether the working configuration becomes the best one.

    The first configuration that meets the limits replaces an initial one that does not.
    """
    search, values, score = context.search, working.configuration.to_json(), first.after.mean
    change = first.after.shared(search.incumbent).mean - search.incumbent.shared(first.after).mean
    if verdict == "feasible":
        search.supported = search.best = values
        search.incumbent = first.after
        return True
    is_reference = search.best == search.supported
    gain = look.gain if is_reference else change + look.margin - LEAST_GAIN
    highest = search.promising_score is None or (
        score > search.promising_score and not first.after.cut
    )
    if look.verdict == "supported":
        search.supported = values
        if highest:
            search.promising = search.promising_score = None
    elif look.verdict == "promising" and highest:
        search.promising, search.promising_score = values, score
    keeps_best = context.problem.settings.accept == "best"
    accepted = gain > 0 if keeps_best else look.verdict == "supported"
    if accepted:
        search.incumbent, search.best = first.after, values
    return accepted


def stop_if_undecidable(context: RunContext) -> None:
    """End the search if no later decision can accept a change, since scores can rise too little.

    This is certain, and checked, only for deterministic systems and metrics with bounds.
    """
    search, bounds = context.search, context.search.incumbent.bounds
    if search.stopped or search.decisions == context.budget.plan.decisions:
        return
    if context.candidates.broken_limits(Configuration(search.best)):
        return
    if any(job.margin for job in context.problem.method.jobs):  # equal scores may be accepted
        return
    if bounds is None or context.state.bounds_violation or stochastic(context.problem.system):
        return
    scores = search.incumbent.scores
    if context.problem.settings.accept == "best":
        if min(scores) < bounds[1]:
            return
        examples = plural(len(scores), "validation example")
        search.stopped = f"no change can score higher: all {examples} score {bounds[1]:g}"
    else:
        # a second look may add examples, on which the change gains most if they score the minimum
        further = min(len(context.problem.further), len(scores)) * [bounds[0]]
        level = _level(context, highest=True)
        if further and _smallest_p([*scores, *further], bounds) <= level * (1 - FIRST_SHARE):
            return
        level *= FIRST_SHARE if further else 1.0
        p = _smallest_p(scores, bounds)
        if p <= level:
            return
        enough = (n for n in range(2, MOST_REPETITIONS) if _smallest_p(scores * n, bounds) <= level)
        repetitions = next(enough, None)
        advice = (
            f"; about {repetitions * len(scores)} such examples would do" if repetitions else ""
        )
        search.stopped = (
            f"no change can be accepted: if all {plural(len(scores), 'validation example')} scored "
            f"{bounds[1]:g}, p would be {p:.2g}, above the level {level:.2g}{advice}"
        )
    context.recorder.event("note", note=f"the search ends: {search.stopped}")


def _smallest_p(scores: Sequence[float], bounds: Bounds) -> float:
    return bounded_p(bounds[1] - np.array(scores), bounds)


def _margin(context: RunContext) -> float:
    search = context.search
    names = {
        record.optimizer for record in search.history[-search.jobs_in_round :] if record.values
    }
    return max(
        (job.margin for job in context.problem.method.jobs if job.optimizer in names), default=0.0
    )


async def _looks(
    context: RunContext, working: System, level: float, margin: float
) -> tuple[Look, Look]:
    reference = context.problem.bind(context.search.supported)
    further = _further_examples(context, reference, working)
    number = context.search.decisions
    samples = context.samples(number)

    async def look(examples: Sequence[Example], level: float, known: Look | None = None) -> Look:
        before = await _reference(context, reference, samples, examples)
        after = await context.validate(
            working, samples, examples=examples, partial=known is None, max_failed=1.0
        )
        _check_lost(context, after)
        if after.cut:
            if len(after.scores) < LEAST_COVERED * len(examples):
                raise BudgetExhausted(after.cut)
            before = before.on(after.by_example())
        if known is not None:
            before, after = known.before.joined(before), known.after.joined(after)
        rng = generator(context.problem.settings.seed, "decision", number)
        bounds = joint_bounds(before.bounds, after.bounds)
        bounds = None if context.state.bounds_violation else bounds
        p = paired_test(
            _scores_before(before, after), after.scores, bounds=bounds, rng=rng, margin=margin
        )
        return Look(before, after, p, applicable_test(bounds), level, margin)

    first = await look(context.problem.valid, level * FIRST_SHARE if further else level)
    over = context.candidates.broken_limits(working.configuration)
    if not further or over or first.verdict != "promising" or first.after.cut:
        return first, first
    try:
        return first, await look(further, level * (1 - FIRST_SHARE), first)
    except BudgetExhausted:  # a limit other than that of system runs
        return first, first


async def _reference(
    context: RunContext, reference: System, samples: Sequence[int], examples: Sequence[Example]
) -> Evaluation:
    """Evaluate the reference, except where its scores are known because it is deterministic."""
    state = context.state
    evaluations = (context.search.incumbent, state.before)
    known = next(
        (e for e in evaluations if e and e.configuration == reference.configuration.digest), None
    )
    if known is None or list(samples) != [0]:
        return await context.validate(reference, samples, examples=examples)
    names = known.by_example().keys() - _lost_examples(known)
    found = known.on(example.id for example in examples if example.id in names)
    missing = [example for example in examples if example.id not in names]
    if not found.rows:
        return await context.validate(reference, samples, examples=examples)
    if missing:
        found = found.joined(
            await context.validate(reference, samples, examples=missing, max_failed=1.0)
        )
    return found.on(example.id for example in examples)


def _further_examples(context: RunContext, reference: System, working: System) -> Sequence[Example]:
    """Return the examples of a second look: as many as the rest of the budget covers, or none."""
    problem, search, budget = context.problem, context.search, context.budget
    later = budget.plan.decisions - search.decisions
    if not problem.further or (later and problem.settings.accept == "best"):
        return ()
    keys = frozenset(change.key for change in reference.configuration.diff(working.configuration))
    cost = further_cost(problem, keys, budget.prices)
    left = (
        budget.runs_left() - decision_cost(problem, keys, budget.prices) - later * budget.plan.cost
    )
    count = len(problem.further) if math.isinf(left) else int((left + 1e-9) / cost)
    count = min(count, len(problem.further), len(problem.valid))
    return problem.further[:count] if count >= LEAST_FURTHER * len(problem.valid) else ()


def _check_lost(context: RunContext, after: Evaluation) -> None:
    """Raise `TooManyFailures` if a change lost too many runs to transient failures."""
    rows = tuple(row for row in after.rows if row.failure and row.failure.is_transient)
    if len(rows) > context.problem.rules.max_failed * len(after.rows):
        lost = replace(after, rows=rows).failures()
        raise_too_many_failures(lost, len(after.rows), context.problem.rules)


def _lost_examples(evaluation: Evaluation) -> list[str]:
    rows = evaluation.rows
    return list(
        dict.fromkeys(r.example for r in rows if r.failure is not None and r.failure.is_transient)
    )


def _scores_before(before: Evaluation, after: Evaluation) -> list[float]:
    """Return the scores of the reference; those lost to a transient failure count as no gain."""
    lost, new = set(_lost_examples(before)), after.by_example()
    return [
        max(old, new[name]) if name in lost else old for name, old in before.by_example().items()
    ]


def _level(context: RunContext, *, highest: bool = False) -> float:
    """Return the level of the current decision, or the highest one of a later decision.

    Decisions without a proposal leave theirs to the later ones, in the second case all but the last.
    """
    search, planned = context.search, context.budget.plan.decisions
    number = search.decisions + highest
    tested = [each not in search.skipped for each in range(1, number)]
    tested += [False] * (planned - number) if highest else []
    return decision_level(context.problem.settings.alpha, planned, tested)


def _end_idle_round(context: RunContext) -> None:
    """Record a round without a change; end the search after several in a row."""
    search = context.search
    search.idle_rounds += 1
    if (
        context.problem.method.jobs_each is not None
    ):  # the planned jobs of this decision are finished
        search.decisions += 1
        search.skipped = [*search.skipped, search.decisions]
        if search.decisions == context.budget.plan.decisions and not search.stopped:
            search.stopped = "all planned jobs are done"
    if search.idle_rounds >= PATIENCE and not search.stopped:
        search.stopped = f"{PATIENCE} consecutive rounds proposed nothing"
    context.recorder.event("round", note="no change to decide on", idle=search.idle_rounds)
