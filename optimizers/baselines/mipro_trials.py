"""Joint search by trials on minibatches, with a full evaluation of the best combination every few trials.

The search of MIPROv2 (Opsahl-Ong et al. 2024) as in DSPy: multivariate TPE suggests one combination
of values per trial; every few trials, the one with the best average that was not fully evaluated
yet is. The best fully evaluated combination wins.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence

from pydantic import Field

from compound.core.errors import MissingExtra, TooManyFailures
from compound.core.example import Example
from compound.core.storage.state import State
from compound.execution.rng import derive_seed, generator
from compound.graph.configuration import canonical_json
from compound.optimization.method import Task

FULL_EVERY = 5  # trials between full evaluations
WHOLE = 50  # with at most this many examples, each trial is a full evaluation
RANDOM = 10  # random trials before the first suggestion of TPE, Optuna's default, as in DSPy
LARGER = 3  # size of the full set in minibatches, if the budget requires smaller sizes

Point = dict[str, int]  # by parameter, the number of one of its values; 0 is the incumbent's


class Trial(State):
    """A point with its mean score on some examples."""

    point: Point
    mean: float


class TrialPlan(State):
    """Sizes of a joint search."""

    trials: int
    batch: int
    # the number of examples of a full evaluation; if equal to `batch`, each trial is one
    full: int

    @property
    def runs(self) -> int:
        """System runs of the search, with the full evaluation of the incumbent.

        >>> TrialPlan(trials=20, batch=35, full=100).runs, TrialPlan(trials=20, batch=40, full=40).runs
        (1200, 840)
        """
        full = 0 if self.batch == self.full else math.ceil(self.trials / FULL_EVERY)
        return (1 + full) * self.full + self.trials * self.batch


class TrialSearch(State):
    """Progress of a joint search."""

    values: dict[str, list[object]]
    plan: TrialPlan
    trials: list[Trial] = Field(default_factory=list)
    # the fully evaluated points, in order; the first one is the incumbent
    full: list[Trial] = Field(default_factory=list)

    @property
    def evaluated(self) -> list[Trial]:
        """All fully evaluated points."""
        return [*self.full, *self.trials] if self.plan.batch == self.plan.full else self.full

    def changes(self, point: Point) -> dict[str, object]:
        """Return the values of a point that differ from the incumbent's."""
        return {key: self.values[key][number - 1] for key, number in point.items() if number}


def trials_for(parameters: int, values: int) -> int:
    """Return the number of trials as in the paper's code: max(2 m log2(n), 1.5 n), rounded down.

    >>> [trials_for(4, n) for n in (6, 12, 18)], trials_for(1, 8), trials_for(0, 6)
    ([20, 28, 33], 12, 0)
    """
    return int(max(2 * parameters * math.log2(values), 1.5 * values)) if parameters else 0


def plan_trials(
    trials: int, most: int, full: int, *, least: int, examples: int, runs: float
) -> TrialPlan | None:
    """Return the sizes of a search that ``runs`` system runs cover; ``None`` if they cover no trial.

    The wanted sizes are ``trials`` trials on minibatches of ``most`` examples, and ``full`` examples of a
    full evaluation. They are reduced in this order: the full set, down to three minibatches; the
    minibatch, down to ``least``; the number of trials, down to 1; and the full set, down to one
    minibatch.

    >>> plan_trials(20, 35, 100, least=8, examples=200, runs=1200)
    TrialPlan(trials=20, batch=35, full=100)
    >>> plan_trials(20, 35, 100, least=8, examples=200, runs=300)
    TrialPlan(trials=20, batch=8, full=24)
    >>> plan_trials(20, 35, 100, least=8, examples=200, runs=100)
    TrialPlan(trials=5, batch=8, full=24)
    """
    if not trials or not examples:
        return None
    full = min(full, examples)
    plans = _plans(trials, min(most, full), full, min(least, full))
    return next((plan for plan in plans if plan.runs <= runs), None)


def _plans(trials: int, most: int, full: int, least: int) -> Iterator[TrialPlan]:
    """Yield sizes in the order in which they are preferred."""
    if full <= WHOLE:
        yield TrialPlan(trials=trials, batch=full, full=full)
    for size in range(full, min(LARGER * most, full) - 1, -1):
        yield TrialPlan(trials=trials, batch=min(most, size), full=size)
    for batch in range(most - 1, least - 1, -1):
        yield TrialPlan(trials=trials, batch=batch, full=min(LARGER * batch, full))
    for fewer in range(trials - 1, 0, -1):
        yield TrialPlan(trials=fewer, batch=least, full=max(least, min(LARGER * least, full)))
    for size in range(min(LARGER * least, full) - 1, least - 1, -1):
        yield TrialPlan(trials=1, batch=least, full=size)


async def search_jointly(
    task: Task, state: TrialSearch, examples: Sequence[Example]
) -> AsyncIterator[TrialSearch]:
    """Advance a search; yield its progress after the evaluation of the incumbent and after each trial."""
    plan, full_set = state.plan, examples[: state.plan.full]
    full = (
        0 if plan.batch == plan.full else plan.full
    )  # system runs reserved for the next full evaluation
    if not state.full:
        if task.scorer.runs_left < plan.full + plan.batch + full:
            return
        (incumbent,) = await task.scorer.score([{}], full_set)
        state.full.append(Trial(point=dict.fromkeys(sorted(state.values), 0), mean=incumbent.mean))
        yield state
    while len(state.trials) < plan.trials and task.scorer.runs_left >= plan.batch + full:
        # draws depend on the order, which checkpoints do not preserve
        sizes = {key: len(values) + 1 for key, values in sorted(state.values.items())}
        known = [(trial.point, trial.mean) for trial in [*state.full, *state.trials]]
        point = next_point(sizes, known, task.seed)
        order = generator(task.seed, "minibatch", len(state.trials)).permutation(len(full_set))
        mean = await _mean(task, state, point, [full_set[i] for i in order[: plan.batch]])
        state.trials.append(Trial(point=point, mean=mean))
        done = len(state.trials)
        is_last = done == plan.trials or task.scorer.runs_left < full + plan.batch + full
        if full and (done % FULL_EVERY == 0 or is_last):
            best = promising(state.trials, [trial.point for trial in state.full])
            if best is not None:
                state.full.append(Trial(point=best, mean=await _mean(task, state, best, full_set)))
        yield state


async def _mean(task: Task, state: TrialSearch, point: Point, examples: Sequence[Example]) -> float:
    try:
        (evaluation,) = await task.scorer.score([state.changes(point)], examples)
    except TooManyFailures:
        return task.context.rules.failure_score
    return evaluation.mean


def promising(trials: Sequence[Trial], evaluated: Sequence[Point]) -> Point | None:
    """Return the point with the best mean over its trials that was not fully evaluated yet.

    >>> trials = [Trial(point={"a": a}, mean=mean) for a, mean in [(1, 0.9), (2, 0.6), (1, 0.2)]]
    >>> promising(trials, evaluated=[{"a": 0}])
    {'a': 2}
    """
    points = {canonical_json(trial.point): trial.point for trial in trials}
    means: dict[str, list[float]] = {}
    for trial in trials:
        if trial.point not in evaluated:
            means.setdefault(canonical_json(trial.point), []).append(trial.mean)
    if not means:
        return None
    return points[max(means, key=lambda name: sum(means[name]) / len(means[name]))]


def next_point(
    sizes: Mapping[str, int], trials: Sequence[tuple[Mapping[str, int], float]], seed: int
) -> dict[str, int]:
    """Return the next suggestion of multivariate TPE (Bergstra et al. 2011).

    The study is rebuilt from the trials, with a sampler seeded by their number, so that a resumed search
    makes the same suggestions.
    """
    try:
        import optuna
    except ImportError:
        raise MissingExtra("mipro", "optuna", "search") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # of `multivariate`
        sampler = optuna.samplers.TPESampler(
            seed=derive_seed(seed, "trial", len(trials)) % 2**32,
            n_startup_trials=RANDOM,
            multivariate=True,
        )
    study = optuna.create_study(direction="maximize", sampler=sampler)
    make = optuna.distributions.CategoricalDistribution
    options = {name: make(range(size)) for name, size in sizes.items()}
    for point, score in trials:
        study.add_trial(
            optuna.trial.create_trial(params=dict(point), distributions=options, value=score)
        )
    trial = study.ask(options)
    return {name: trial.params[name] for name in sizes}
