"""Metrics that ask a model, and the calls that they make (docs/adr/0039)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from compound.errors import CallError, TransientError
from compound.example import Example, Metric, Score, Values
from compound.execution.executor import Executor
from compound.execution.trace import Call
from compound.graph.bounds import CallBound, Extent
from compound.graph.component import Operation

ADDRESS = "metric/"
"""Start of the addresses of metric calls, which no node of a system can have."""


@dataclass
class MetricCalls:
    """Makes and records the calls of a metric for one run.

    Attributes:
        executor: provides engines, cache, budget and retries.
        example: id of the example.
        calls: the finished calls; a metric makes them one after the other.
    """

    executor: Executor
    example: str = ""
    calls: list[Call] = field(default_factory=list)

    async def call(self, name: str, component: Operation, inputs: Values, values: Values) -> Values:
        """Return the outputs of one call of a component.

        Args:
            name: name of the call, unique within one scoring.
            component: the component.
            inputs: its inputs.
            values: the values of its settings.

        Raises:
            CallError: the call failed.
            TransientError: it failed for a reason that is no evidence about the outputs.
        """
        made = await self.executor.call_metric(
            component, inputs, values, address=f"{ADDRESS}{name}", example=self.example
        )
        self.calls.append(made)
        if made.failure is None:
            return made.outputs
        message = f"{made.failure.kind}: {made.failure.message}"
        if made.failure.is_transient:
            raise TransientError(message)
        raise CallError(message)


@runtime_checkable
class ModelMetric(Protocol):
    """A metric that asks a model. Its calls are counted, cached and recorded by the executor."""

    @property
    def name(self) -> str:
        """Short name for tables."""
        ...

    @property
    def lms(self) -> Sequence[str]:
        """The models that it asks, for checks of names, prices and keys."""
        ...

    def check(self, outputs: Collection[str], examples: Iterable[Example]) -> None:
        """Reject outputs and examples that cannot be scored, before anything is run."""
        ...

    def requests(self, outputs: Mapping[str, Extent], examples: Iterable[Example]) -> Sequence[CallBound]:
        """Return upper bounds of the requests of one scoring."""
        ...

    async def score_with(self, outputs: Values, example: Example, models: MetricCalls) -> Score:
        """Score outputs; `Metric.score` of such a metric raises, since it has no engine."""
        ...


def metric_lms(metric: Metric) -> Sequence[str]:
    """Return the models that a metric asks."""
    return metric.lms if isinstance(metric, ModelMetric) else ()
