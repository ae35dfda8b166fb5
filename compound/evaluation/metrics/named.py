"""Metrics by name: built-in ones, and those of installed packages."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping

from compound.core.errors import DeclarationError, suggest_name
from compound.core.example import Metric
from compound.core.formatting import short_repr
from compound.evaluation.metrics.built_in import (
    accuracy,
    exact_match,
    json_match,
    mrr,
    recall_at_k,
    token_f1,
)
from compound.evaluation.metrics.custom import custom
from compound.evaluation.metrics.judges import pairwise, rubric
from compound.evaluation.metrics.reading import numeric_match, regex_match
from compound.evaluation.metrics.similarity import rouge, semantic_similarity
from compound.graph.registry.plugins import Plugin, visible, warn_if_hidden
from compound.graph.registry.user_code import UserCodeError, check_signature, definition, reported

Factory = Callable[..., Metric]  # its parameters are the settings of the metric
METRICS: Mapping[str, Factory] = {
    "exact_match": exact_match,
    "token_f1": token_f1,
    "accuracy": accuracy,
    "mrr": mrr,
    "recall_at_k": recall_at_k,
    "regex_match": regex_match,
    "numeric_match": numeric_match,
    "json_match": json_match,
    "rouge": rouge,
    "semantic_similarity": semantic_similarity,
    "rubric": rubric,
    "pairwise": pairwise,
}
"""The metrics that a file configures by the parameters of their factories."""
BUILT_IN = (*METRICS, "custom", "pass_at_k")
"""The names that an installed metric cannot have."""


def installed() -> Mapping[str, Plugin]:
    """Return the metrics of installed packages, except names of built-in metrics."""
    return visible("metrics", BUILT_IN)


def metric_factory(name: str) -> Factory:
    """Return the factory of a metric.

    An entry point of the group ``compound.metrics`` names either a function or class whose typed
    parameters are the settings, or a scoring function of ``(outputs, example)`` without settings.

    Raises:
        DeclarationError: the metric does not exist, or its package cannot be loaded.
    """
    if name in METRICS:
        warn_if_hidden("metrics", name)
        return METRICS[name]
    if name not in installed():
        raise DeclarationError(
            f"no metric {name!r}", hint=suggest_name(name, [*METRICS, *installed()])
        )
    found = installed()[name].load()
    if not callable(found):
        raise UserCodeError(
            f"metric {name!r} is {short_repr(found)}",
            hint="name a function of its settings, or of (outputs, example)",
        )
    try:
        parameters = list(inspect.signature(found).parameters)
    except (TypeError, ValueError):
        parameters = []
    if parameters == ["outputs", "example"]:
        scoring: Callable[..., object] = found

        @functools.wraps(scoring, assigned=("__doc__", "__module__"))
        def plain() -> Metric:
            return custom(scoring, name)

        del plain.__wrapped__
        return plain
    return _checked(name, found)


def _checked(name: str, found: Callable[..., object]) -> Factory:
    @functools.wraps(found)
    def make(*arguments: object, **settings: object) -> Metric:
        return made_by(found, name, *arguments, **settings)

    return make


def made_by(
    found: Callable[..., object], name: str, /, *arguments: object, **settings: object
) -> Metric:
    """Return the metric that a user-defined function creates from its settings."""
    check_signature(found, f"metric {name!r}", *map(str, arguments), **settings)
    with reported(f"metric {name!r}", found):
        made = found(*arguments, **settings)
    if not isinstance(made, Metric):
        raise UserCodeError(
            f"metric {name!r} at {definition(found)} returned {short_repr(made)}, which is not a metric",
            hint="return an object with name and score, such as cp.metrics.custom(function)",
        )
    return made
