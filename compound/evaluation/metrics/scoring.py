"""Scoring of one run: calls of models by metrics (docs/adr/0039), validated scores, and pass@k."""

from __future__ import annotations

import inspect
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import ClassVar, Protocol, runtime_checkable

from compound.core.errors import CallError, DeclarationError, TransientError
from compound.core.example import Example, Metric, Score, Values, copy_containers
from compound.core.narrowing import report_wrong_arguments
from compound.evaluation.metrics.comparison import Comparison
from compound.evaluation.metrics.custom import Custom, Scoring, as_metric, as_score, bounds_of
from compound.evaluation.statistics import ROUNDING, UNIT, Bounds
from compound.execution.executor import Executor
from compound.execution.trace import Call
from compound.graph.component import Operation

ADDRESS = "metric/"
"""Start of the addresses of metric calls, which no node of a system can have."""


@dataclass
class MetricCalls:
    """Makes and records the calls of a metric for one run."""

    executor: Executor
    example: str = ""
    calls: list[Call] = field(default_factory=list)

    async def call(self, name: str, component: Operation, inputs: Values, values: Values) -> Values:
        """Return the outputs of one call of a component.

        Raises:
            CallError: the call failed.
            TransientError: it failed for a reason that is no evidence about the outputs.
        """
        made = await self.executor.call_metric(
            component, inputs, values, address=f"{ADDRESS}{name}", example=self.example
        )
        self.calls.append(made)
        if made.failure is None:
            return made.outputs
        message = f"{made.failure.kind}: {made.failure.message}"
        if made.failure.is_transient:
            raise TransientError(message)
        raise CallError(message)


@runtime_checkable
class ModelMetric(Protocol):
    """A metric that asks a model. Its calls are counted, cached and recorded by the executor."""

    @property
    def name(self) -> str:
        """Short name for tables."""
        ...

    @property
    def lms(self) -> Sequence[str]:
        """The models that it asks, for checks of names, prices and keys."""
        ...

    @property
    def calls_per_score(self) -> int:
        """Number of requests of one scoring."""
        ...

    def check(self, outputs: Collection[str], examples: Iterable[Example]) -> None:
        """Reject outputs and examples that cannot be scored, before anything is run."""
        ...

    async def score_with(self, outputs: Values, example: Example, models: MetricCalls) -> Score:
        """Score outputs; `Metric.score` of such a metric raises, since it has no engine."""
        ...


def metric_lms(metric: Metric) -> Sequence[str]:
    """Return the models that a metric asks."""
    return metric.lms if isinstance(metric, ModelMetric) else ()


def check_rows(metric: Metric, outputs: Collection[str], examples: Iterable[Example]) -> None:
    """Reject examples that a metric cannot score, before the first call; user functions are not checked."""
    if isinstance(metric, Comparison | ModelMetric):
        metric.check(outputs, examples)


def copy_arguments(
    outputs: Mapping[str, object], example: Example
) -> tuple[dict[str, object], Example]:
    """Return outputs and an example that a metric may modify without changing traces and data."""
    inputs, gold = (
        MappingProxyType({name: copy_containers(value) for name, value in values.items()})
        for values in (example.inputs, example.gold)
    )
    copied = {name: copy_containers(value) for name, value in outputs.items()}
    return copied, replace(example, inputs=inputs, gold=gold)


async def apply_metric(
    metric: Metric,
    outputs: Mapping[str, object],
    example: Example,
    models: MetricCalls | None = None,
) -> Score:
    """Score outputs with a sync or async metric, and validate the result.

    Rounding errors at the metric's bounds are clipped. A score farther outside is returned as it
    is; see `bounds_violation`.
    """
    if isinstance(metric, ModelMetric) and models is not None:
        value: object = metric.score_with(outputs, example, models)
    elif isinstance(metric, Custom):
        value = metric.score_in_loop(outputs, example)
    else:
        value = metric.score(outputs, example)
    score = as_score(await value if inspect.isawaitable(value) else value, metric.name)
    bounds = bounds_of(metric)
    if bounds is None:
        return score
    low, high = bounds
    nearest_bound = min(max(score.value, low), high)
    is_rounding = abs(score.value - nearest_bound) <= ROUNDING * (high - low)
    return replace(score, value=nearest_bound) if is_rounding else score


@dataclass(frozen=True)
class PassAt:
    """Estimates pass@k of an example from the scores of its repeats."""

    k: int
    threshold: float = 1.0

    def estimate(self, scores: Sequence[float]) -> float:
        """Return the unbiased estimate 1 - C(n - c, k) / C(n, k) from n scores of which c pass.

        See Chen et al. 2021. With fewer than k scores, the estimate is that of pass@n.

        >>> PassAt(2).estimate([1.0, 0.0, 0.0, 0.0]), PassAt(3).estimate([0.0])
        (0.5, 0.0)
        """
        n, passed = len(scores), sum(score >= self.threshold for score in scores)
        k = min(self.k, n)
        return 1 - math.comb(n - passed, k) / math.comb(n, k)


@dataclass(frozen=True)
class PassAtK:
    """pass@k of another metric; see `pass_at_k`. A single run scores 1 if it passes, else 0."""

    bounds: ClassVar[Bounds] = UNIT

    of: Metric
    at: PassAt

    @property
    def name(self) -> str:
        """Short name for tables."""
        return f"pass@{self.at.k} of {self.of.name}"

    @property
    def lms(self) -> Sequence[str]:
        """The models that the other metric asks."""
        return metric_lms(self.of)

    @property
    def calls_per_score(self) -> int:
        """Number of requests of one scoring."""
        return self.of.calls_per_score if isinstance(self.of, ModelMetric) else 0

    def check(self, outputs: Collection[str], examples: Iterable[Example]) -> None:
        """Reject outputs and examples that the other metric cannot score."""
        check_rows(self.of, outputs, examples)

    async def score(self, outputs: Values, example: Example) -> Score:
        """Return whether a run passes."""
        return self._passed(await apply_metric(self.of, outputs, example))

    async def score_with(self, outputs: Values, example: Example, models: MetricCalls) -> Score:
        """Return whether a run passes, by a metric that may ask a model."""
        return self._passed(await apply_metric(self.of, outputs, example, models))

    def _passed(self, score: Score) -> Score:
        return Score(float(score.value >= self.at.threshold), score.feedback, score.parts)


@report_wrong_arguments
def pass_at_k(of: Metric | Scoring, k: int, threshold: float = 1.0) -> PassAtK:
    """Score 1 if at least one of ``k`` runs of an example passes, estimated from all its repeats.

    An evaluation with n >= k repeats estimates it without bias as 1 - C(n - c, k) / C(n, k), where
    c of n runs pass (Chen et al. 2021). A search scores single runs while it compares candidates,
    that is, pass@1.

    Args:
        of: The metric that scores a run, or a function of outputs and example.
        k: The number of runs of which one must pass.
        threshold: The lowest score that passes.

    Raises:
        DeclarationError: ``of`` is no metric, ``k`` is below 1, or no score of the metric passes.

    >>> from compound.metrics import exact_match
    >>> pass_at_k(exact_match("answer"), k=3).name
    'pass@3 of exact_match'
    """
    metric = as_metric(of)
    if k < 1:
        raise DeclarationError(f"pass_at_k: k >= 1 must hold, got k={k}")
    bounds = bounds_of(metric)
    if bounds is not None and not bounds[0] < threshold <= bounds[1]:
        low, high = bounds
        raise DeclarationError(
            f"pass_at_k: threshold must be above {low:g} and at most {high:g}, the bounds of {metric.name}, "
            f"got {threshold:g}"
        )
    return PassAtK(metric, PassAt(k, threshold))


def pass_at_of(metric: Metric) -> PassAt | None:
    """Return how a metric summarizes the repeats of an example, or ``None`` for the mean."""
    return metric.at if isinstance(metric, PassAtK) else None


def check_repeats(metric: Metric, repeats: int) -> None:
    """Reject fewer repeats than pass@k needs."""
    at = pass_at_of(metric)
    if at is not None and repeats < at.k:
        raise DeclarationError(
            f"{metric.name}: at least {at.k} runs per example are needed, but repeats is {repeats}",
            hint=f"set repeats to {at.k} or more; more repeats give a more precise estimate",
        )
