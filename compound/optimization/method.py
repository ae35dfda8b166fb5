"""The interfaces of optimizers, schedulers and methods, and the types that they exchange with the loop.

An optimizer receives a `Task` and is an async generator: it yields `Progress`, whose state is
checkpointed, and last one `Proposal`. Given the state back, it goes on from there.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Protocol

from pydantic import Field

from compound.engine import Completion, Request
from compound.evaluation.evaluate import Evaluation, Rules
from compound.example import Example, Metric
from compound.execution.executor import Executor
from compound.execution.trace import Trace
from compound.graph.system import System
from compound.optimization.proposals import Outcome
from compound.settings.base import Settings
from compound.storage.state import State

ROLLOUTS: Final = "of_rollouts"  # the fact by which a proposal says that its scores compare nothing


@dataclass(frozen=True)
class Job:
    """What is to be optimized next, by whom, and why.

    Attributes:
        optimizer: a name in `Method.optimizers`.
        keys: the parameters it may change.
        reason: the numbers the choice was made from, for the record.
        weight: its part of a round's budget, relative to other jobs.
        step: system runs of one step of it, where it goes by steps: with fewer there is no point in it.
        steps: how many it would take.
        examples: how many train examples a step works on, where there are so many.
        held_out: how many train examples its steps are compared on, a quarter of them at most.
        every: after how many steps that is done.
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

    def within(self, train: int) -> Job:
        """Return the job with so many train examples: a step works on no more."""
        if self.step is None:
            return self
        held_out = min(self.held_out, train // 4)
        left = train - held_out
        if left >= self.examples:
            return replace(self, held_out=held_out)
        return replace(self, step=self.step * left / self.examples, examples=left, held_out=held_out)

    def holds(self, runs: float) -> int:
        """Return how many steps, with their evaluations, so many system runs hold.

        >>> Job("mmgrpo", (), step=32.0, steps=25, held_out=16, every=5).holds(32 * 10 + 16 * 3)
        10
        """
        assert self.step  # it goes by steps
        if not self.held_out or runs < (self.every + 1) * self.step + 3 * self.held_out:
            return int(min(self.steps, runs // self.step))  # too few steps to choose among
        held = 0
        while held < self.steps:
            evaluations = 1 + math.ceil((held + 1) / self.every)
            if (held + 1) * self.step + evaluations * self.held_out > runs:
                break
            held += 1
        return held

    def least(self, minibatch: int) -> float:
        """Return the system runs below which it can do nothing: compare two minibatches, or make a step."""
        return 2.0 * minibatch if self.step is None else self.step


@dataclass(frozen=True)
class Progress:
    """A checkpoint of an optimizer.

    Attributes:
        state: what `Task.resume` gives back after an interruption, as JSON types.
        note: one line for people.
        facts: JSON, recorded in the event.
        step: completed steps, where the job consists of a known number of steps.
        of: that number; ``None`` where it depends on what is found.
    """

    state: Mapping[str, Any]
    note: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    step: int | None = None
    of: int | None = None


@dataclass(frozen=True)
class Proposal:
    """Values an optimizer believes to be better; empty when it found none.

    Attributes:
        values: by ``component.parameter``; keys of the job, and those that were searched together with them.
        before: the incumbent's score where the optimizer compared, ``after`` the proposal's.
        tried: how many candidates it looked at.
        note: what the change is, for people.
        facts: numbers for the record, which schedulers and reports read.
    """

    values: Mapping[str, Any]
    before: float | None = None
    after: float | None = None
    tried: int = 0
    note: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ScoredCandidate:
    """A candidate somebody scored: the memory that optimizers share across iterations."""

    values: Mapping[str, Any]
    score: float
    n: int


class JobRecord(State):
    """A finished job, as schedulers and reports read it.

    Attributes:
        job: its number.
        optimizer: the name of its optimizer.
        keys: the parameters it could change.
        reason: the numbers that the scheduler chose it from.
        values: what it proposed; empty when it found nothing better.
        train_before: the incumbent's score on train examples, where the optimizer compared.
        train_after: the proposal's score.
        tried: candidates it looked at.
        runs: system runs it spent.
        note: one line for people.
        facts: numbers from the optimizer.
        proposals: its requests for proposals, by model.
    """

    job: int
    optimizer: str
    keys: tuple[str, ...]
    reason: dict[str, float] = Field(default_factory=dict)
    values: dict[str, Any] = Field(default_factory=dict)
    train_before: float | None = None
    train_after: float | None = None
    tried: int = 0
    runs: float = 0.0
    note: str = ""
    facts: dict[str, Any] = Field(default_factory=dict)
    proposals: dict[str, Any] = Field(default_factory=dict)


class Scorer(Protocol):
    """Scores candidates by the global reward, within the job's share of the budget."""

    @property
    def left(self) -> float:
        """System runs this job may still spend (infinity without a limit)."""
        ...

    @property
    def free_repeats(self) -> bool:
        """Whether scoring a candidate again on the same examples costs no system runs."""
        ...

    async def score(
        self, candidates: Sequence[Mapping[str, Any]], examples: Sequence[Example]
    ) -> list[Evaluation]:
        """Run and score the incumbent with each candidate's values changed, on the same examples."""
        ...

    async def traces(self, values: Mapping[str, Any], examples: Sequence[Example]) -> list[Trace]:
        """Return the scored traces of one candidate, in order."""
        ...

    async def generate(self, request: Request, lm: str | None = None) -> Completion:
        """Ask a model for something that is not part of the system, such as a new prompt.

        Raises:
            CallError: the call failed, or was not made since `may_ask` is false.
        """
        ...

    def may_ask(self, lm: str | None = None) -> bool:
        """Return whether `generate` would send another request to a model.

        It does not when the model keeps failing, or when the job has made the requests that its optimizer
        declared. End the job then, rather than spend system runs on nothing new.
        """
        ...

    def judge(self, outcome: Outcome, lm: str | None = None) -> None:
        """Count what the last answer of `generate` was worth, for the record of the run."""
        ...


class Memory(Protocol):
    """What a method keeps from job to job: it is in the run directory, and goes back with a checkpoint."""

    @property
    def state(self) -> dict[str, Any]:
        """JSON, stored with every checkpoint; change it in place."""
        ...

    @property
    def folder(self) -> Path:
        """Where files may be written; name them by their content, since they do not go back."""
        ...

    def append(self, record: Mapping[str, Any]) -> None:
        """Add a JSON record."""
        ...

    def records(self) -> Iterable[dict[str, Any]]:
        """Return the records so far."""
        ...


@dataclass(frozen=True)
class JobContext:
    """What a job needs to run parts of a system by itself: forks, single calls, and their scores.

    ``folder`` is where code and files that the settings name are looked for.
    """

    executor: Executor
    metric: Metric
    rules: Rules
    memory: Memory
    folder: Path = Path()


@dataclass(frozen=True)
class Task:
    """One optimizer's assignment.

    Attributes:
        system: bound to the incumbent.
        keys: the parameters to change.
        train: the examples to learn from.
        scorer: runs candidates.
        seed: names this task's random streams.
        pool_seed: names the stream that sets examples aside for demonstrations, the same for all tasks
            of a run, so that their traces come from the cache.
        minibatch: examples for a candidate's first comparison.
        candidates: how many candidates to consider.
        context: runs forks and single calls, and remembers things from job to job.
        tried: what earlier tasks learned about these keys.
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
    resume: Mapping[str, Any] | None = None


class Optimizer(Protocol):
    """Proposes better values for some parameters."""

    def propose(self, task: Task) -> AsyncIterator[Progress | Proposal]:
        """Yield `Progress` any number of times and one `Proposal` at the end."""
        ...


class Scheduler(Protocol):
    """Chooses what to optimize next from the history alone."""

    def choose(self, jobs: Sequence[Job], history: Sequence[JobRecord], seed: int) -> Job:
        """Return one of ``jobs``; ``history`` holds the record of every finished job."""
        ...


@dataclass(frozen=True)
class Method:
    """A way of optimizing a system: its optimizers, the jobs they can do, and who chooses among them.

    ``opening`` is a job done once, before the scheduler is first asked; its weight is its part of all jobs'
    budget. ``least`` is how many minibatches' runs a job should at least be given. ``decisions`` is the most
    there are, whatever the budget. ``jobs_each`` is how many jobs precede each decision; where it is given,
    there are no others, and a job that proposes nothing uses its decision up. ``notes`` are told first.
    ``sections`` are the settings that it reads besides the common ones, by section of ``optimize:``.
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
    sections: Mapping[str, Settings] = field(default_factory=dict)
