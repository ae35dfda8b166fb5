"""Metrics of DSPy."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from compound.errors import DeclarationError
from compound.evaluation.metrics.bounds import checked_bounds
from compound.evaluation.metrics.custom import Custom
from compound.evaluation.statistics import Bounds
from compound.example import Example, Score
from compound.extras import explain_missing
from compound.narrowing import report_wrong_arguments


@report_wrong_arguments
@explain_missing("cp.from_dspy_metric")
def from_dspy_metric(
    metric: Callable[..., object], *, name: str = "", bounds: Bounds | None = None
) -> Custom:
    """Make a metric of one that was written for DSPy.

    The function is called as ``metric(example, pred)``, as by `dspy.Evaluate`: further parameters without a
    default, such as ``trace``, ``pred_name`` and ``pred_trace`` of GEPA, get None. ``example`` is a
    `dspy.Example` with the inputs and the reference values, ``pred`` a `dspy.Prediction` with the outputs of
    the system. It returns a number, or an object with ``score`` and ``feedback``.

    Args:
        metric: the function, sync or async, or a module such as `dspy.evaluate.SemanticF1`, whose requests
            DSPy makes and no budget counts.
        name: name in reports; default: the function's name.
        bounds: minimum and maximum score, as for `custom`.

    Raises:
        DeclarationError: it cannot be called.

    Example:
        >>> from compound import Example
        >>> def same(example, pred, trace=None):
        ...     return example.answer == pred.answer
        >>> from_dspy_metric(same).score({"answer": "Lima"}, Example("1", {}, {"answer": "Lima"}))
        Score(value=1.0, feedback='', parts={})
    """
    if not callable(metric):
        raise DeclarationError(f"a metric of DSPy must be a function, but is {metric!r:.80}")
    chosen = name or getattr(metric, "__name__", type(metric).__name__)
    more = _required(metric) - 2

    def score(outputs: Mapping[str, Any], example: Example) -> object:
        import dspy

        given = {"id": example.id, **example.gold, **example.inputs}
        arguments = (dspy.Example(**given).with_inputs(*example.inputs), dspy.Prediction(**outputs))
        found = metric(*arguments, *[None] * more)
        return _awaited(found) if inspect.isawaitable(found) else _score(found)

    score.__dict__["__wrapped__"] = metric  # errors name its place
    return Custom(score, chosen, None if bounds is None else checked_bounds(bounds, chosen))


def _required(metric: Callable[..., object]) -> int:
    """Return the number of arguments that a metric needs, at least two."""
    try:
        parameters = inspect.signature(metric).parameters.values()
    except (TypeError, ValueError):
        return 2
    needed = [
        p
        for p in parameters
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    return max(2, len(needed))


async def _awaited(found: Any) -> object:  # noqa: ANN401
    return _score(await found)


def _score(found: Any) -> object:  # noqa: ANN401
    """Return the result of a metric; one with a score and feedback as a `Score`."""
    if isinstance(found, Mapping):
        value, feedback = found.get("score"), found.get("feedback")
    elif not isinstance(found, Score) and hasattr(found, "score"):
        value, feedback = found.score, getattr(found, "feedback", None)
    else:
        return found
    return found if value is None else Score(value, str(feedback or ""))
