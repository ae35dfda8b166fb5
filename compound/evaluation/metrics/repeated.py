"""pass@k: whether at least one of several outputs is right."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from compound.errors import DeclarationError
from compound.evaluation.metrics.bounds import bounds_of
from compound.evaluation.metrics.custom import Scoring, as_metric
from compound.evaluation.metrics.models import MetricCalls, metric_lms
from compound.evaluation.metrics.scoring import apply_metric, check_rows
from compound.evaluation.statistics import UNIT, Bounds
from compound.example import Example, Metric, Score, Values
from compound.graph.bounds import CallBound, Extent
from compound.narrowing import report_wrong_arguments


@dataclass(frozen=True)
class PassAt:
    """Estimates pass@k of an example from the scores of its repeats.

    Attributes:
        k: number of samples of which one must pass.
        threshold: the lowest score that passes.
    """

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
    """pass@k of another metric; see `pass_at_k`. A single run scores 1 if it passes, else 0.

    Attributes:
        of: the metric that decides whether a run passes.
        at: the number of samples and the threshold.
    """

    of: Metric
    at: PassAt

    @property
    def name(self) -> str:
        """Short name for tables."""
        return f"pass@{self.at.k} of {self.of.name}"

    @property
    def bounds(self) -> Bounds:
        """Minimum and maximum score."""
        return UNIT

    @property
    def lms(self) -> Sequence[str]:
        """The models that the other metric asks."""
        return metric_lms(self.of)

    def check(self, outputs: Collection[str], examples: Iterable[Example]) -> None:
        """Reject outputs and examples that the other metric cannot score."""
        check_rows(self.of, outputs, examples)

    def requests(self, outputs: Mapping[str, Extent], examples: Iterable[Example]) -> Sequence[CallBound]:
        """Return upper bounds of the requests of one scoring."""
        requests: Sequence[CallBound] = getattr(self.of, "requests", lambda *_: ())(outputs, examples)
        return requests

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

    An evaluation with n >= k repeats estimates it without bias as 1 - C(n - c, k) / C(n, k), where c of n
    runs pass (Chen et al. 2021). A search scores single runs while it compares candidates, that is, pass@1.

    Args:
        of: The metric that scores a run, or a function of outputs and example.
        k: The number of runs of which one must pass.
        threshold: The lowest score that passes.

    Raises:
        DeclarationError: ``of`` is no metric, ``k`` is below 1, or no score of the metric passes.

    >>> from compound import exact_match
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
    """Reject fewer repeats than pass@k needs.

    Raises:
        DeclarationError: there are fewer than k.
    """
    at = pass_at_of(metric)
    if at is not None and repeats < at.k:
        raise DeclarationError(
            f"{metric.name}: at least {at.k} runs per example are needed, but repeats is {repeats}",
            hint=f"set repeats to {at.k} or more; more repeats give a more precise estimate",
        )
