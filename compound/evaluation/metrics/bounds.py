"""Declared minimum and maximum scores of metrics."""

from __future__ import annotations

import math
import numbers

from compound.errors import DeclarationError
from compound.evaluation.statistics import Bounds
from compound.example import Metric


def bounds_of(metric: Metric) -> Bounds | None:
    """Return the minimum and maximum score of a metric, or ``None`` if it does not declare them.

    A metric declares them by an attribute ``bounds``, a pair of numbers.

    Raises:
        DeclarationError: They are not two finite numbers in ascending order.

    >>> from compound import custom, token_f1
    >>> bounds_of(token_f1("answer")), bounds_of(custom(lambda outputs, example: 1.0))
    ((0.0, 1.0), None)
    """
    found = getattr(metric, "bounds", None)
    return None if found is None else checked_bounds(found, metric.name)


def checked_bounds(bounds: object, name: str) -> Bounds:
    """Return declared bounds of a metric as floats, or raise `DeclarationError`."""
    if isinstance(bounds, list | tuple) and len(bounds) == 2:
        low, high = bounds
        if all(isinstance(b, numbers.Real) and math.isfinite(b) for b in bounds) and low < high:
            return float(low), float(high)
    raise DeclarationError(
        f"metric {name!r}: bounds must be the minimum and maximum score, but got {bounds!r}",
        hint="two finite numbers, the smaller one first, such as 0 and 1",
    )


def bounds_hint(metric: Metric) -> str:
    """Return how the user declares the bounds of a metric, in the syntax that it was made in."""
    return str(getattr(metric, "bounds_hint", "an attribute of the metric, such as bounds = (0, 1)"))


def check_failure_score(metric: Metric, failure_score: float) -> None:
    """Raise if failed runs would score as well as the best ones, so that a search would look for failures.

    Metrics that declare no bounds are not checked.

    Raises:
        DeclarationError: ``failure_score`` is at least the maximum score that the metric declares.
    """
    bounds = bounds_of(metric)
    if bounds is None or failure_score < bounds[1]:
        return
    low, high = bounds
    raise DeclarationError(
        f"failure_score={failure_score:g}: a failed run would score as well as the best one, since the "
        f"maximum score of metric {metric.name!r} is {high:g}",
        hint=f"set optimize.failure_score to its minimum score, {low:g}",
    )


def bounds_violation(metric: Metric, score: float, example: str) -> str:
    """Return a message if a score of ``metric`` is outside the bounds that it declares, else ``""``.

    >>> from compound import custom
    >>> bounds_violation(custom(lambda outputs, example: 7, "stars", bounds=(1, 5)), 7.0, "e3")
    "metric 'stars' returned 7 on example 'e3', outside its declared bounds [1, 5]"
    """
    bounds = bounds_of(metric)
    if bounds is None or bounds[0] <= score <= bounds[1]:
        return ""
    low, high = bounds
    return (
        f"metric {metric.name!r} returned {score:g} on example {example!r}, outside its declared bounds "
        f"[{low:g}, {high:g}]"
    )
