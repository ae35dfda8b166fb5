"""Validated scores, and examples that a metric cannot score."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType

from compound.containers import copy_containers
from compound.evaluation.metrics.bounds import bounds_of
from compound.evaluation.metrics.comparison import Comparison
from compound.evaluation.metrics.custom import Custom, as_score
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


def copy_arguments(outputs: Mapping[str, object], example: Example) -> tuple[dict[str, object], Example]:
    """Return outputs and an example that a metric may modify without changing traces and data."""
    inputs, gold = (
        MappingProxyType({name: copy_containers(value) for name, value in values.items()})
        for values in (example.inputs, example.gold)
    )
    copied = {name: copy_containers(value) for name, value in outputs.items()}
    return copied, replace(example, inputs=inputs, gold=gold)


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
