"""Metrics that call a user function, and the bounds that metrics declare."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any, NoReturn

import numpy as np

from compound.core.errors import CallError, DeclarationError
from compound.core.example import Example, Metric, Score
from compound.core.narrowing import report_wrong_arguments
from compound.core.threads import FunctionRunner, ThreadUse, exit_as_error
from compound.evaluation.metrics.comparison import format_value, missing_output
from compound.evaluation.statistics import Bounds
from compound.graph.registry.user_code import UserCodeError, check_signature, definition


def bounds_of(metric: Metric) -> Bounds | None:
    """Return the minimum and maximum score of a metric, or ``None`` if it does not declare them.

    A metric declares them by an attribute ``bounds``, a pair of numbers.

    >>> from compound.metrics import custom, token_f1
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
    return str(
        getattr(metric, "bounds_hint", "an attribute of the metric, such as bounds = (0, 1)")
    )


def check_failure_score(metric: Metric, failure_score: float) -> None:
    """Raise if failed runs would score as well as the best ones, so that a search would look for failures.

    Metrics that declare no bounds are not checked.
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

    >>> from compound.metrics import custom
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


# Any: only the user knows the types of outputs
Scoring = Callable[[Mapping[str, Any], Example], object]


@dataclass(frozen=True)
class Custom:
    """A metric that calls a user function; see `custom`."""

    function: Scoring
    name: str
    bounds: Bounds | None = None
    thread: ThreadUse = "auto"
    bounds_hint: str = field(
        default="cp.metrics.custom(…, bounds=(0, 1))", repr=False, compare=False
    )
    _runner: FunctionRunner = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_runner", FunctionRunner(self.name, self.function, self.thread))

    def __call__(self, outputs: Mapping[str, object], example: Example) -> Score | Awaitable[Score]:
        """Score like `score`, so that a file can name the metric as it names a function."""
        return self.score(outputs, example)

    def score(self, outputs: Mapping[str, object], example: Example) -> Score | Awaitable[Score]:
        """Call the function and convert its result to a `Score`."""
        given = _CheckedOutputs(outputs, self.name, example)
        with exit_as_error(self.name), self._misreading(given, example):
            value = self.function(given, example)
        return self._later(value) if inspect.isawaitable(value) else as_score(value, self.name)

    async def score_in_loop(self, outputs: Mapping[str, object], example: Example) -> Score:
        """Score without blocking the event loop for long, as ``thread`` says; raises like `score`."""
        given = _CheckedOutputs(outputs, self.name, example)
        with self._misreading(given, example):
            value = await self._runner.call(given, example)
        return as_score(value, self.name)

    @contextmanager
    def _misreading(self, outputs: Mapping[str, object], example: Example) -> Iterator[None]:
        """End the evaluation if the function takes one argument for the other, since each row would fail."""
        try:
            yield
        except (AttributeError, TypeError) as error:
            owner = getattr(error, "obj", None)  # of the attribute
            kinds = [kind for kind in ("Example", "_CheckedOutputs") if f"'{kind}'" in str(error)]
            if owner is outputs or owner is example or (isinstance(error, TypeError) and kinds):
                raise _misread(self.function, self.name, f" failed with {error}") from error
            raise

    async def _later(self, value: Awaitable[object]) -> Score:
        with exit_as_error(self.name):
            return as_score(await value, self.name)


class _CheckedOutputs(dict[str, object]):
    """Outputs passed to a user function; reading an unknown one raises an error that lists the known ones."""

    def __init__(self, outputs: Mapping[str, object], name: str, example: Example) -> None:
        super().__init__(outputs)
        self._name = name
        self._example = example

    def __missing__(self, output: str) -> NoReturn:
        error = missing_output(f"{self._name}, example {self._example.id!r}", output, self)
        if output in self._example.gold:  # the arguments may be in the wrong order
            error.hint += (
                f"; read example.gold[{output!r}] of the second argument, metric(outputs, example)"
            )
        raise error

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Example):  # the function takes the example for outputs
            raise TypeError("outputs are never equal to an 'Example'")
        return super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None  # as of any dict


EXAMPLES = frozenset({"example", "ex", "gold", "row", "sample", "instance", "reference"})
OUTPUTS = frozenset({"outputs", "output", "pred", "preds", "prediction", "predicted"})


def _check_order(function: Callable[..., object], name: str) -> None:
    """Reject a function of (example, outputs), such as a metric of DSPy, by the names of its parameters.

    A mistake that they do not show ends the evaluation at the first call (`Custom`).
    """
    try:
        parameters = [*inspect.signature(function).parameters.values()][:2]
    except (TypeError, ValueError):
        return
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(names) < 2:
        return
    first, second = (each.lower() for each in names)
    if (first in EXAMPLES and second not in EXAMPLES) or (
        second in OUTPUTS and first not in OUTPUTS
    ):
        raise _misread(function, name)


def _misread(function: Callable[..., object], name: str, problem: str = "") -> UserCodeError:
    place = f"metric {name!r} at {definition(function)}{problem}"
    return UserCodeError(
        f"{place}: a metric is called as metric(outputs, example)",
        hint="read outputs['answer'], example.gold['answer'] and example.inputs['question']; "
        "a metric of DSPy, metric(example, pred), becomes one by cp.interchange.from_dspy_metric(metric)",
    )


@report_wrong_arguments
def custom(
    function: Scoring, name: str = "", bounds: Bounds | None = None, thread: ThreadUse = "auto"
) -> Custom:
    """Create a metric from a sync or async function of (outputs, example).

    Args:
        function: Scores one run; returns a number or a `Score`.
        name: Name in reports; default: the function's name.
        bounds: Minimum and maximum score, such as ``(0, 1)``. Confidence intervals then stay within
            them, and acceptance tests hold for every distribution of scores
            (`compound.evaluation.acceptance`). After a score outside them they count as unknown, as
            they do by default.
        thread: Where a sync function runs, as for `compound.Function`: ``auto`` calls it in threads
            once a call was slow; ``always`` and ``never`` are for functions that need it. Calls in
            threads overlap.

    Raises:
        DeclarationError: ``function`` is no function, the bounds are not two finite numbers in
            ascending order, or ``thread`` has another value.
        UserCodeError: The function takes other arguments than outputs and an example, in this
            order.

    >>> metric = custom(lambda outputs, example: len(outputs["answer"]) < 5, "short", bounds=(0, 1))
    >>> metric.score({"answer": "yes"}, None)
    Score(value=1.0, feedback='', parts={})
    """
    if not callable(function):
        raise DeclarationError(
            f"a metric must be a function of (outputs, example), but is {function!r:.80}",
            hint="or a metric such as cp.metrics.exact_match('answer')",
        )
    if isinstance(function, Custom):
        bounds = function.bounds if bounds is None else bounds
        return replace(function, name=name or function.name, bounds=bounds)
    chosen = name or getattr(function, "__name__", type(function).__name__)
    _check_order(function, chosen)
    check_signature(function, f"metric {chosen!r}", "outputs", "example")
    return Custom(
        function, chosen, None if bounds is None else checked_bounds(bounds, chosen), thread
    )


def as_metric(metric: Metric | Scoring) -> Metric:
    """Return a metric unchanged, and wrap a function by `custom`.

    >>> as_metric(lambda outputs, example: 1.0).score({}, None).value
    1.0
    """
    if not isinstance(metric, Metric):
        return custom(metric)
    if not type(metric).__module__.startswith("compound."):
        _check_order(metric.score, metric.name)
    return metric


def as_score(value: object, name: str) -> Score:
    """Convert the result of a metric to a `Score` of finite floats.

    >>> as_score(True, "short")
    Score(value=1.0, feedback='', parts={})
    """
    if not isinstance(value, Score):
        return Score(_finite(value, f"metric {name!r}"))
    parts = {
        part: _finite(number, f"{name}, part {part!r}") for part, number in value.parts.items()
    }
    return Score(_finite(value.value, f"metric {name!r}"), str(value.feedback), parts)


def _finite(value: object, source: str) -> float:
    value = value if not isinstance(value, Decimal) or value.is_snan() else float(value)
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
