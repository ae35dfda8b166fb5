"""The optimization problem: a system, examples, a metric, and settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from compound.core.example import Example, Metric
from compound.evaluation.evaluate import EvaluationRules
from compound.execution.executor import Executor
from compound.execution.sender import Engines
from compound.graph.system import System
from compound.optimization.method import EarlierRun, Method
from compound.optimization.settings.optimize import OptimizeSettings

OpenExecutor = Callable[..., Executor]
"""Makes the executor of a run from the arguments of `Executor`, in this process or with workers."""


@dataclass(frozen=True)
class Problem:
    """A system to optimize, examples, metric and settings; names in settings are resolved in ``folder``.

    ``earlier`` is what the run takes over from an earlier one. ``further`` are examples that
    nothing uses before a decision that needs more than the validation split. ``outlook`` holds the
    result of `compound.optimization.prospects.outlook` and duplicate examples, for the record.
    ``open_executor`` makes the executor of a run, in this process or with workers. ``baselines``
    are the methods that run after ``method``, by name.
    """

    system: System
    train: Sequence[Example]
    valid: Sequence[Example]
    test: Sequence[Example]
    metric: Metric
    settings: OptimizeSettings
    method: Method
    engines: Engines
    folder: Path = Path()
    further: Sequence[Example] = ()
    earlier: EarlierRun = field(default_factory=EarlierRun)
    outlook: Mapping[str, object] = field(default_factory=dict)
    open_executor: OpenExecutor = Executor
    baselines: Mapping[str, Method] = field(default_factory=dict)

    @property
    def rules(self) -> EvaluationRules:
        """Rules of evaluations: concurrency and the treatment of failures."""
        s = self.settings
        return EvaluationRules(s.concurrency, s.failure_score, s.max_failed)

    def with_method(self, method: Method) -> Problem:
        """Return the problem with a method, whose training steps use no more examples than there are."""
        jobs = [job.within(len(self.train)) for job in method.jobs]
        return replace(self, method=replace(method, jobs=jobs))

    def bind(self, values: Mapping[str, object]) -> System:
        """Return the system bound to a configuration."""
        return self.system.bind(values)
