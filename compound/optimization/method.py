"""Interfaces of optimizers, schedulers and methods, and the types they exchange with the loop.

An optimizer receives a `Task` and is an async generator: it yields any number of `Progress`
objects, whose state is checkpointed and from which it resumes, and finally one `Proposal`.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

from pydantic import Field

from compound.core.engine import Completion, Request
from compound.core.example import Example, Metric
from compound.core.storage.state import State
from compound.evaluation.evaluate import Evaluation, EvaluationRules
from compound.execution.executor import Executor
from compound.execution.sender import Engines
from compound.execution.trace import Trace
from compound.graph.call_counts import CallCount
from compound.graph.space import Text
from compound.graph.system import System
from compound.optimization.prices import Prices
from compound.optimization.proposals import ProposalOutcome
from compound.optimization.settings.base import Settings
from compound.optimization.settings.optimize import OptimizeSettings

ROLLOUTS: Final = "of_rollouts"  # fact that marks a proposal's scores as not comparable


@dataclass(frozen=True)
class Job:
    """The next optimization step: an optimizer, its parameters, and the reason for the choice.

    Attributes:
        optimizer: a name in `Method.optimizers`.
        keys: the parameters that may be changed.
        reason: numbers on which the choice was based, for the record.
        weight: share of a round's budget, relative to other jobs.
        step: system runs per training step, if the job consists of steps; with fewer, it is
            useless.
        steps: maximum number of steps.
        examples: number of train examples per step, if available.
        held_out: number of train examples on which steps are compared, at most a quarter of them.
        every: number of steps between these comparisons.
        margin: loss of the mean score that a decision about the job accepts, since the change has
            other benefits.
    """

    optimizer: str
    keys: tuple[str, ...]
    reason: Mapping[str, float] = field(default_factory=dict)
    weight: float = 1.0
    step: float | None = None
    steps: int = 0
    examples: int = 1
    held_out: int = 0
    every: int = 0
    margin: float = 0.0

    def within(self, train: int) -> Job:
        """Return the job adapted to ``train`` examples: a step uses no more."""
        if self.step is None:
            return self
        held_out = min(self.held_out, train // 4)
        left = train - held_out
        if left >= self.examples:
            return replace(self, held_out=held_out)
        return replace(
            self, step=self.step * left / self.examples, examples=left, held_out=held_out
        )

    def holds(self, runs: float) -> int:
        """Return the number of steps, including their evaluations, that fit into ``runs`` system runs.

        >>> Job("mmgrpo", (), step=32.0, steps=25, held_out=16, every=5).holds(32 * 10 + 16 * 3)
        10
        """
        assert self.step  # only for jobs with steps
        if not self.held_out or runs < (self.every + 1) * self.step + 3 * self.held_out:
            return int(min(self.steps, runs // self.step))  # too few steps to compare
        held = 0
        while held < self.steps:
            evaluations = 1 + math.ceil((held + 1) / self.every)
            if (held + 1) * self.step + evaluations * self.held_out > runs:
                break
            held += 1
        return held

    def least(self, minibatch: int, price: float = 1.0) -> float:
        """Return the minimum system runs: one candidate and the incumbent on a minibatch, or one step.

        Args:
            minibatch: the size of a minibatch.
            price: system runs of a candidate on one example; see `compound.optimization.prices`.
        """
        return (1 + price) * minibatch if self.step is None else self.step


@dataclass(frozen=True)
class Progress:
    """A checkpoint of an optimizer.

    Attributes:
        state: JSON that `Task.resume` returns after an interruption.
        note: one-line description for users.
        facts: JSON recorded in the event.
        step: number of completed steps, if the job consists of steps.
        of: total number of steps; ``None`` if unknown in advance.
        written: waits until the files that the state refers to are on the disk. The checkpoint is
            stored then, while the job continues.
    """

    state: Mapping[str, Any]
    note: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    step: int | None = None
    of: int | None = None
    written: Callable[[], None] | None = None


@dataclass(frozen=True)
class Proposal:
    """Values that an optimizer considers better; empty if it found none.

    Attributes:
        values: by ``component.parameter``; keys of the job, and keys searched together with them.
        before: score of the incumbent, if the optimizer compared; ``after`` is that of the
            proposal.
        tried: number of candidates considered.
        note: description of the change for users.
        facts: numbers for the record, read by schedulers and reports.
    """

    values: Mapping[str, Any]
    before: float | None = None
    after: float | None = None
    tried: int = 0
    note: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ScoredCandidate:
    """A scored candidate, shared between optimizers across iterations."""

    values: Mapping[str, Any]
    score: float
    n: int


class JobRecord(State):
    """Record of a finished job, read by schedulers and reports."""

    job: int  # number of the job
    optimizer: str  # name of the optimizer
    keys: tuple[str, ...]  # the parameters that it could change
    # numbers on which the scheduler based its choice
    reason: dict[str, float] = Field(default_factory=dict)
    # the proposed values; empty if nothing better was found
    values: dict[str, Any] = Field(default_factory=dict)
    # score of the incumbent on train examples, if the optimizer compared
    train_before: float | None = None
    train_after: float | None = None  # score of the proposal
    tried: int = 0  # number of candidates considered
    runs: float = 0.0  # system runs spent
    note: str = ""  # one-line description for users
    facts: dict[str, Any] = Field(default_factory=dict)  # numbers from the optimizer
    proposals: dict[str, Any] = Field(default_factory=dict)  # the job's proposal requests, by model


class Scorer(Protocol):
    """Scores candidates by the global reward, within the job's share of the budget."""

    @property
    def runs_left(self) -> float:
        """System runs that this job may still spend (infinity without a limit)."""
        ...

    @property
    def has_free_repeats(self) -> bool:
        """Whether rescoring a candidate on the same examples costs no system runs."""
        ...

    async def score(
        self,
        candidates: Sequence[Mapping[str, Any]],
        examples: Sequence[Example],
        *,
        record: bool = True,
    ) -> list[Evaluation]:
        """Run and score the incumbent with the values of each candidate, on the same examples.

        Without ``record``, the candidates are not in the record of the run.
        """
        ...

    async def traces(self, values: Mapping[str, Any], examples: Sequence[Example]) -> list[Trace]:
        """Return the scored traces of one candidate, in order."""
        ...

    async def generate(self, request: Request, lm: str | None = None) -> Completion:
        """Send a request outside of the system, such as for a new prompt.

        Raises:
            CallError: the call failed, or was not sent because `may_ask` is false.
        """
        ...

    def may_ask(self, lm: str | None = None) -> bool:
        """Return whether `generate` would send another request to a model.

        It is false if the model keeps failing, or if the job has used all requests declared by its
        optimizer. End the job then, rather than spend system runs without new candidates.
        """
        ...

    def record_outcome(
        self, outcome: ProposalOutcome, lm: str | None = None, reason: str = ""
    ) -> None:
        """Record the usefulness of the last answer of `generate`, and why it is unusable."""
        ...

    def leaks(self, text: str, request: Request, lm: str | None = None) -> bool:
        """Return whether a new prompt contains the answer of a held-out example, and record that it does."""
        ...


class Memory(Protocol):
    """Storage of a method across jobs, in the run directory; restored with a checkpoint."""

    @property
    def state(self) -> dict[str, Any]:
        """JSON, stored with every checkpoint; modify it in place."""
        ...

    @property
    def folder(self) -> Path:
        """Folder for files; name them by their content, since they are not restored."""
        ...

    def append(self, record: Mapping[str, Any]) -> None:
        """Append a JSON record."""
        ...

    def flush(self) -> None:
        """Wait until the last checkpoint is stored, before files that earlier ones need are deleted."""
        ...

    def records(self) -> Iterable[dict[str, Any]]:
        """Return the records so far."""
        ...


@dataclass(frozen=True)
class EarlierRun:
    """What an optimization takes over from an earlier run."""

    # values of its result that the system may have; the new run starts from them
    result: Mapping[str, object] = field(default_factory=dict)
    # further candidates: its other configurations, and the declared one
    values: Sequence[Mapping[str, object]] = ()
    # draws of its local rewards on train examples of the new run (`compound.rewards.pairs.Draw`)
    draws: Sequence[Any] = ()
    told: str = ""  # a sentence for the start
    digest: str = ""  # the digest of the values and draws; `""` without an earlier run


@dataclass(frozen=True)
class JobContext:
    """Resources of a job for running parts of a system: forks, single calls, and their scores.

    ``folder`` is searched for code and files named in the settings.
    """

    executor: Executor
    metric: Metric
    rules: EvaluationRules
    memory: Memory
    folder: Path = Path()
    earlier: EarlierRun = field(default_factory=EarlierRun)


@dataclass(frozen=True)
class Task:
    """Assignment of an optimizer.

    Attributes:
        system: the system, bound to the incumbent.
        keys: the parameters to change.
        train: the train examples.
        scorer: runs and scores candidates.
        seed: seed of this task's random streams.
        pool_seed: seed of the stream that reserves examples for demonstrations; the same for all
            tasks of a run, so that their traces come from the cache.
        minibatch: number of examples in a candidate's first comparison.
        candidates: number of candidates to consider.
        context: runs forks and single calls, and stores data across jobs.
        tried: candidates scored by earlier tasks for these keys.
        prices: expected fractions of a system run, by the components that change.
        meets_limits: returns whether the runs of a candidate so far meet the limits of the
            objective.
        note_origin: records the values that a candidate changes, and what proposed it.
        resume: the last `Progress.state` of an interrupted attempt.
    """

    system: System
    keys: tuple[str, ...]
    train: Sequence[Example]
    scorer: Scorer
    seed: int
    pool_seed: int
    minibatch: int
    candidates: int
    context: JobContext
    tried: Sequence[ScoredCandidate] = ()
    prices: Prices = field(default_factory=Prices)
    meets_limits: Callable[[Mapping[str, Any]], bool] = lambda values: True
    note_origin: Callable[[Mapping[str, Any], Mapping[str, Any], str], None] = lambda *_: None
    resume: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class PlannedJob:
    """A job before it starts, from which an optimizer computes its requests.

    Attributes:
        system: the system, bound to the initial configuration.
        keys: the parameters of the job.
        train: the train examples.
        minibatch, candidates: as in `Task`.
        runs: system runs that the job may spend (infinity without a limit).
        calls: the calls of each component in one run.
        prices: expected fractions of a system run, by the components that change.
    """

    system: System
    keys: tuple[str, ...]
    train: Sequence[Example]
    minibatch: int
    candidates: int
    runs: float
    calls: Mapping[str, CallCount] = field(default_factory=dict)
    prices: Prices = field(default_factory=Prices)

    @property
    def texts(self) -> tuple[str, ...]:
        """The keys of text parameters."""
        return tuple(key for key in self.keys if isinstance(self.system.parameters[key], Text))


@dataclass(frozen=True)
class RequestCount:
    """A maximum number of proposal requests."""

    purpose: str  # the purpose of the requests in a word or two, for tables
    count: float  # the maximum number of requests of a job
    lm: str | None = None  # the model; `None` for the system's own


@dataclass(frozen=True)
class JobPlan:
    """Requests and candidates of a job, in addition to its system runs.

    Attributes:
        requests: the proposal requests; the loop rejects requests beyond their total.
        candidates: number of candidates that the job can compare; ``None`` if unknown in advance.
    """

    requests: Sequence[RequestCount] = ()
    candidates: int | None = None

    def most(self, times: int = 1) -> int | None:
        """Return the total number of requests of several such jobs; ``None`` if it is infinite."""
        total = times * sum(request.count for request in self.requests)
        return math.ceil(total) if math.isfinite(total) else None


@runtime_checkable
class PlanningOptimizer(Protocol):
    """An optimizer that states its requests before a job."""

    def plan(self, job: PlannedJob) -> JobPlan:
        """Return the plan of a job; its requests must not decrease as ``job.runs`` increases."""
        ...


class Optimizer(Protocol):
    """Proposes better values for some parameters."""

    def propose(self, task: Task) -> AsyncIterator[Progress | Proposal]:
        """Yield any number of `Progress` objects, then one `Proposal`."""
        ...


class Scheduler(Protocol):
    """Chooses the next job from the history alone."""

    def choose(self, jobs: Sequence[Job], history: Sequence[JobRecord], seed: int) -> Job:
        """Return one of ``jobs``; ``history`` holds the records of all finished jobs."""
        ...


@dataclass(frozen=True)
class Method:
    """An optimization method: its optimizers, their jobs, and the scheduler that chooses among them.

    ``opening`` is a job that runs once before the scheduler is used; its weight is its share of the
    budget of all jobs. ``least`` is the minimum runs per job, in minibatches. ``decisions`` is the
    maximum number of decisions. ``jobs_each`` is the number of jobs before each decision, which are then
    the only ones. ``notes`` are shown at the start. ``proposers`` says what writes new prompts and
    demonstrations. ``sections`` are the settings used in addition to the common ones.
    """

    name: str
    optimizers: Mapping[str, Optimizer]
    jobs: Sequence[Job]
    scheduler: Scheduler
    opening: Job | None = None
    least: float = 6.0
    decisions: int | None = None
    jobs_each: int | None = None
    notes: Sequence[str] = ()
    proposers: Sequence[str] = ()
    sections: Mapping[str, Settings] = field(default_factory=dict)


OpenExecutor = Callable[..., Executor]
"""Makes the executor of a run from the arguments of `Executor`, in this process or with workers."""


@dataclass(frozen=True)
class Problem:
    """A system to optimize, examples, metric and settings; names in settings are resolved in ``folder``.

    ``earlier`` is what the run takes over from an earlier one. ``further`` are examples that
    nothing uses before a decision that needs more than the validation split. ``outlook`` holds the
    result of `compound.optimization.preflight.outlook` and duplicate examples, for the record.
    ``open_executor`` makes the executor of a run, in this process or with workers.
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
