"""Conformance kit for metrics."""

from __future__ import annotations

import asyncio
import copy
import inspect
import math
import numbers
from collections.abc import Iterator, Mapping, Sequence
from typing import SupportsFloat

import numpy as np

from compound.core.engine import Engine
from compound.core.errors import CompoundError
from compound.core.example import Example, Metric, Score, Values
from compound.core.formatting import short_repr
from compound.evaluation.metrics.custom import Scoring, as_metric, bounds_violation
from compound.evaluation.metrics.scoring import MetricCalls, ModelMetric, apply_metric
from compound.execution.executor import Executor

__all__ = ["MetricKit"]

Case = tuple[Values, Example] | tuple[Values, Example, float]
TOLERANCE = 1e-9


class MetricKit:
    """Checks of a metric; subclass it as ``Test…``, and override `make` and `cases`.

    An evaluation records an exception of a metric as the failure of that run. Other exceptions,
    such as a `KeyError`, would not name the metric that failed or the available outputs.

    Example:
        >>> from compound import Example
        >>> from compound.metrics import custom
        >>> from compound.testing import MetricKit, run_kit
        >>> def brevity(outputs, example):
        ...     return 1.0 if len(outputs["answer"].split()) <= 5 else 0.0
        >>> class TestBrevity(MetricKit):
        ...     def make(self):
        ...         return custom(brevity, bounds=(0, 1))
        ...     def cases(self):
        ...         return [
        ...             ({"answer": "Paris"}, Example("e1", {}), 1.0),
        ...             ({"answer": "It is the city of Paris"}, Example("e2", {}), 0.0),
        ...         ]
        >>> run_kit(TestBrevity)
        {}
    """

    def make(self) -> Metric | Scoring:
        """Return the metric, or a function of outputs and example. Override this."""
        raise NotImplementedError("override make() to return the metric to test")

    def cases(self) -> Sequence[Case]:
        """Return pairs of outputs and example, optionally with the expected score. Override this."""
        raise NotImplementedError(
            "override cases() to return a list of (outputs, example[, score])"
        )

    def engines(self) -> Mapping[str, Engine]:
        """Return the engines of a metric that asks a model, by name; default: none."""
        return {}

    def test_it_has_a_name(self) -> None:
        """The name is a non-empty string."""
        name = self._metric().name
        assert isinstance(name, str), f"the name of the metric must be a string, but is {name!r}"
        assert name.strip(), "the name of the metric is empty; reports show it"

    def test_scores_are_finite(self) -> None:
        """Scores are finite numbers, and so are their parts."""
        for number, score in self._scores():
            if not isinstance(score, Score):
                assert _is_finite(score), (
                    f"case {number} scores {score!r}; return a finite number or a Score"
                )
                continue
            assert _is_finite(score.value), (
                f"case {number} scores {score.value!r}; it must be finite"
            )
            assert isinstance(score.feedback, str), (
                f"the feedback on case {number} must be a string, but is {short_repr(score.feedback)}"
            )
            wrong = {name: part for name, part in score.parts.items() if not _is_finite(part)}
            assert not wrong, f"case {number} has the parts {wrong!r}; they must be finite numbers"

    def test_scores_are_within_the_bounds(self) -> None:
        """All scores are within the declared bounds."""
        metric = self._metric()
        for number, outputs, example in self._arguments():
            try:
                score = asyncio.run(apply_metric(metric, outputs, example, self._calls(example)))
            except CompoundError as error:
                raise AssertionError(f"case {number} cannot be scored: {error}") from error
            violation = bounds_violation(metric, score.value, example.id)
            assert not violation, f"case {number}: {violation}"

    def test_equal_arguments_give_equal_scores(self) -> None:
        """Scoring again, with the same metric or a new one, gives the same score."""
        metric = self._metric()
        for number, outputs, example in self._arguments():
            found = [
                asyncio.run(self._scored(m, outputs, example))
                for m in (metric, metric, self._metric())
            ]
            assert found[0] == found[1] == found[2], (
                f"case {number} scores {short_repr(found[0])}, then {short_repr(found[1])}, and with a new "
                f"metric {short_repr(found[2])}; a score must depend only on outputs and example"
            )

    def test_arguments_are_not_changed(self) -> None:
        """Outputs and examples are unchanged after scoring."""
        for number, outputs, example in self._arguments():
            before = copy.deepcopy((dict(outputs), example))
            asyncio.run(self._scored(self._metric(), outputs, example))
            assert (dict(outputs), example) == before, (
                f"the metric modified the outputs or the example of case {number}; copy values before "
                "modifying them"
            )

    def test_scores_are_the_expected_ones(self) -> None:
        """Cases with an expected score get that score."""
        expected = [case[2] if len(case) == 3 else None for case in self.cases()]
        for (number, score), target in zip(self._scores(), expected, strict=True):
            value = score.value if isinstance(score, Score) else score
            if target is not None:
                assert isinstance(value, SupportsFloat), (
                    f"case {number} scores {value!r}, which is not a number"
                )
                assert math.isclose(float(value), target, rel_tol=TOLERANCE, abs_tol=TOLERANCE), (
                    f"case {number} scores {value!r} instead of {target!r}"
                )

    def test_a_missing_output_is_reported(self) -> None:
        """If an output is missing, the metric raises a `CompoundError` or returns a score."""
        for number, outputs, example in self._arguments():
            for missing in outputs:
                rest = {name: value for name, value in outputs.items() if name != missing}
                try:
                    asyncio.run(self._scored(self._metric(), rest, example))
                except CompoundError:
                    continue
                except Exception as error:
                    raise AssertionError(
                        f"without the output {missing!r} of case {number}, the metric raises "
                        f"{type(error).__name__}: {error}; raise a CallError that names the output, or "
                        "return a score"
                    ) from error

    def _metric(self) -> Metric:
        return as_metric(self.make())

    def _calls(self, example: Example) -> MetricCalls:
        return MetricCalls(Executor(self.engines()), example.id)

    async def _scored(self, metric: Metric, outputs: Values, example: Example) -> object:
        if isinstance(metric, ModelMetric):
            return await metric.score_with(outputs, example, self._calls(example))
        found = metric.score(outputs, example)
        return await found if inspect.isawaitable(found) else found

    def _arguments(self) -> Iterator[tuple[int, Values, Example]]:
        cases = self.cases()
        assert cases, "cases() returned no case; return at least one (outputs, example)"
        for number, case in enumerate(cases, 1):
            yield number, case[0], case[1]

    def _scores(self) -> Iterator[tuple[int, object]]:
        for number, outputs, example in self._arguments():
            yield number, asyncio.run(self._scored(self._metric(), outputs, example))


def _is_finite(value: object) -> bool:
    return isinstance(value, numbers.Real | np.bool_) and math.isfinite(value)
