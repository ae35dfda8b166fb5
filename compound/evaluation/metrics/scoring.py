"""Validated scores, and examples that a metric cannot score."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

import numpy as np

from compound.errors import CallError
from compound.evaluation.metrics.bounds import bounds_of
from compound.evaluation.metrics.comparison import Comparison
from compound.evaluation.metrics.messages import format_value
from compound.evaluation.metrics.models import MetricCalls, ModelMetric
from compound.evaluation.statistics import ROUNDING
from compound.example import Example, Metric, Score


def check_rows(metric: Metric, outputs: Collection[str], examples: Iterable[Example]) -> None:
    """Reject examples that a metric cannot score, before the first call; user functions are not checked.

    Raises:
        DataError: the metric reads an unknown output, an example has no right answer, or the output's labels
            cannot match it.
    """
    if isinstance(metric, Comparison | ModelMetric):
        metric.check(outputs, examples)


async def apply_metric(
    metric: Metric, outputs: Mapping[str, object], example: Example, models: MetricCalls | None = None
) -> Score:
    """Score outputs with a sync or async metric, and validate the result.

    Rounding errors at the metric's bounds are clipped. A score farther outside is returned as it is; see
    `bounds_violation`.

    Raises:
        CallError: The value is not a finite real number.
    """
    if isinstance(metric, ModelMetric) and models is not None:
        value: object = metric.score_with(outputs, example, models)
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


def as_score(value: object, name: str) -> Score:
    """Convert the result of a metric to a `Score` of finite floats.

    >>> as_score(True, "short")
    Score(value=1.0, feedback='', parts={})
    """
    if not isinstance(value, Score):
        return Score(_finite(value, f"metric {name!r}"))
    parts = {part: _finite(number, f"{name}, part {part!r}") for part, number in value.parts.items()}
    return Score(_finite(value.value, f"metric {name!r}"), str(value.feedback), parts)


def _finite(value: object, source: str) -> float:
    if isinstance(value, numbers.Real | np.bool_) and math.isfinite(value):
        return float(value)
    if isinstance(value, Metric):
        raise CallError(
            f"{source} must return a finite real number, got another metric",
            hint="if the function returns a metric, call it with its settings: "
            "custom: {call: …, settings: {…}}, or cp.evaluate(…, metric=function(…)) in Python",
        )
    raise CallError(
        f"{source} must return a finite real number, got {format_value(value)} ({type(value).__name__})",
        hint="return a number, or cp.Score(number, feedback)",
    )
