"""Metrics that call a user function."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

from compound.concurrency.functions import FunctionRunner, ThreadUse
from compound.concurrency.own_thread import exit_as_error
from compound.errors import CallError, DeclarationError
from compound.evaluation.metrics.bounds import checked_bounds
from compound.evaluation.metrics.comparison import missing_output
from compound.evaluation.metrics.messages import format_value
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
    thread: ThreadUse = "auto"
    bounds_hint: str = field(default="cp.custom(…, bounds=(0, 1))", repr=False, compare=False)
    _runner: FunctionRunner = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_runner", FunctionRunner(self.name, self.function, self.thread))

    def score(self, outputs: Mapping[str, object], example: Example) -> Score | Awaitable[Score]:
        """Call the function and convert its result to a `Score`.

        Raises:
            MissingOutput: the function reads an output that does not exist.
        """
        with exit_as_error(self.name):
            value = self.function(_Outputs(outputs, self.name, example), example)
        return self._later(value) if inspect.isawaitable(value) else as_score(value, self.name)

    async def score_in_loop(self, outputs: Mapping[str, object], example: Example) -> Score:
        """Score without blocking the event loop for long, as ``thread`` says; raises like `score`."""
        return as_score(await self._runner.call(_Outputs(outputs, self.name, example), example), self.name)

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


def custom(
    function: Scoring, name: str = "", bounds: Bounds | None = None, thread: ThreadUse = "auto"
) -> Custom:
    """Create a metric from a sync or async function of (outputs, example).

    Args:
        function: Scores one run; returns a number or a `Score`.
        name: Name in reports; default: the function's name.
        bounds: Minimum and maximum score, such as ``(0, 1)``. Confidence intervals then stay within them, and
            acceptance tests hold for every distribution of scores (`compound.evaluation.paired_tests`). After
            a score outside them they count as unknown, as they do by default.
        thread: Where a sync function runs, as for `compound.Function`: ``auto`` calls it in threads once a
            call was slow; ``always`` and ``never`` are for functions that need it. Calls in threads overlap.

    Raises:
        DeclarationError: ``function`` is no function, the bounds are not two finite numbers in ascending
            order, or ``thread`` has another value.
        UserCodeError: The function cannot be called with outputs and an example.

    >>> metric = custom(lambda outputs, example: len(outputs["answer"]) < 5, "short", bounds=(0, 1))
    >>> metric.score({"answer": "yes"}, None)
    Score(value=1.0, feedback='', parts={})
    """
    if not callable(function):
        raise DeclarationError(
            f"a metric must be a function of (outputs, example), but is {function!r:.80}",
            hint="or a metric such as cp.exact_match('answer')",
        )
    chosen = name or getattr(function, "__name__", type(function).__name__)
    check_signature(function, f"metric {chosen!r}", "outputs", "example")
    return Custom(function, chosen, None if bounds is None else checked_bounds(bounds, chosen), thread)


def as_metric(metric: Metric | Scoring) -> Metric:
    """Return a metric unchanged, and wrap a function by `custom`.

    >>> as_metric(lambda outputs, example: 1.0).score({}, None).value
    1.0
    """
    return metric if isinstance(metric, Metric) else custom(metric)


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
