"""Metrics that call a user function."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from compound.concurrency.own_thread import exit_as_error
from compound.evaluation.metrics.bounds import checked_bounds
from compound.evaluation.metrics.comparison import missing_output
from compound.evaluation.metrics.scoring import as_score
from compound.evaluation.statistics import Bounds
from compound.example import Example, Metric, Score
from compound.registry.user_code import check_signature

Scoring = Callable[[Mapping[str, Any], Example], object]  # Any: only the user knows the types of outputs


@dataclass(frozen=True)
class Custom:
    """A metric that calls a user function; see `custom`."""

    function: Scoring
    name: str
    bounds: Bounds | None = None

    def score(self, outputs: Mapping[str, object], example: Example) -> Score | Awaitable[Score]:
        """Call the function and convert its result to a `Score`.

        Raises:
            MissingOutput: the function reads an output that does not exist.
        """
        with exit_as_error(self.name):
            value = self.function(_Outputs(outputs, self.name, example), example)
        return self._later(value) if inspect.isawaitable(value) else as_score(value, self.name)

    async def _later(self, value: Awaitable[object]) -> Score:
        with exit_as_error(self.name):
            return as_score(await value, self.name)


class _Outputs(dict[str, object]):
    """Outputs passed to a user function; reading an unknown one raises an error that lists the known ones."""

    def __init__(self, outputs: Mapping[str, object], name: str, example: Example) -> None:
        super().__init__(outputs)
        self._name = name
        self._example = example

    def __missing__(self, output: str) -> NoReturn:
        raise missing_output(f"{self._name}, example {self._example.id!r}", output, self)


def custom(function: Scoring, name: str = "", bounds: Bounds | None = None) -> Custom:
    """Create a metric from a sync or async function of (outputs, example).

    Args:
        function: Scores one run; returns a number or a `Score`.
        name: Name in reports; default: the function's name.
        bounds: Minimum and maximum score, such as ``(0, 1)``. Confidence intervals then stay within them, and
            acceptance tests hold for every distribution of scores (`compound.evaluation.paired_tests`). After
            a score outside them they count as unknown, as they do by default.

    Raises:
        DeclarationError: The bounds are not two finite numbers in ascending order.
        UserCodeError: The function cannot be called with outputs and an example.

    >>> metric = custom(lambda outputs, example: len(outputs["answer"]) < 5, "short", bounds=(0, 1))
    >>> metric.score({"answer": "yes"}, None)
    Score(value=1.0, feedback='', parts={})
    """
    chosen = name or getattr(function, "__name__", type(function).__name__)
    check_signature(function, f"metric {chosen!r}", "outputs", "example")
    return Custom(function, chosen, None if bounds is None else checked_bounds(bounds, chosen))


def as_metric(metric: Metric | Scoring) -> Metric:
    """Return a metric unchanged, and wrap a function by `custom`.

    >>> as_metric(lambda outputs, example: 1.0).score({}, None).value
    1.0
    """
    return metric if isinstance(metric, Metric) else custom(metric)
