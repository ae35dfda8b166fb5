"""Run jobs of optimizers like the optimization loop, from the start or from a checkpoint.

Scorer, executor, cache, meter and ledger are the real ones. Only the model is scripted, and the contents of
the run directory are held in memory.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from compound.engine import Completion, Engine, Request
from compound.example import Example, Metric
from compound.execution.budget import MeterState
from compound.execution.executor import Executor
from compound.formatting import short_repr
from compound.graph.system import System
from compound.optimization.method import (
    Job,
    JobContext,
    Method,
    Optimizer,
    Progress,
    Proposal,
    ScoredCandidate,
    Task,
)
from compound.optimization.prices import estimate_prices
from compound.optimization.problem import Problem
from compound.optimization.proposals import LedgerState, Proposals
from compound.optimization.role_checks import RunningOptimizer
from compound.optimization.scorer import JobScorer
from compound.optimizers.scheduling.scheduler import Uniform
from compound.settings.optimize import OptimizeSettings
from compound.testing.checks import json_problem, temporary_folder, through_json
from compound.testing.doubles import MemorySnapshot, PlainMemory, ScriptedLM

__all__ = ["Checkpoint", "OptimizerJob"]

ROUNDING = 1e-6  # tolerance for sums of fractional system runs
NAME = "optimizer"


@dataclass(frozen=True)
class Checkpoint:
    """Checkpoint of a job after a `Progress`, as in a run directory.

    Attributes:
        progress: the progress, with only JSON types.
        memory: the method's memory.
        cached: the keys of the recorded calls.
        meter: the spending.
        scored: the candidates scored so far.
        ledger: the requests for proposals.
    """

    progress: Progress
    memory: MemorySnapshot
    cached: frozenset[str]
    meter: MeterState
    scored: Sequence[ScoredCandidate]
    ledger: LedgerState

    @property
    def state(self) -> dict[str, object]:
        """State of the progress, as read from a checkpoint."""
        return dict(self.progress.state)


class OptimizerJob:
    """Job of an optimizer, run like in the optimization loop but with a scripted model.

    Args:
        system: the system to optimize.
        metric: the global reward.
        train: the examples to learn from.
        lm: creates the engine, which serves every model name.
        share: the number of system runs that the job may spend.
        keys: the parameters that the job may change; all of the system's by default.
        seed: see `compound.optimization.method.Task`.
        pool_seed: see `Task`.
        minibatch: see `Task`.
        candidates: see `Task`.
        tried: see `Task`.

    Attributes:
        problem: the optimization problem, with settings that agree with the task.
        task: the task of the optimizer.
        lm: the engine.
        executor, scorer, memory: those of the task.
        proposal_requests: the requests for proposals so far, each with the name of its model.

    Example:
        >>> from compound import Choice, Function, Input, System, custom
        >>> from compound.optimizers.baselines.random import RandomSearch
        >>> def pick(x: int, mode: str) -> int:
        ...     return x if mode == "b" else 0
        >>> picked = Function("picker", pick, mode=Choice("a", "b"))(x=Input("x", int))
        >>> right = custom(lambda outputs, example: outputs["y"] == example.inputs["x"], "right")
        >>> rows = [Example(f"e{i}", {"x": i + 1}) for i in range(20)]
        >>> job = OptimizerJob(System("toy", outputs={"y": picked}), right, rows, share=50)
        >>> states, proposal = job.run(RandomSearch())
        >>> dict(proposal.values), job.spent <= 50
        ({'picker.mode': 'b'}, True)
    """

    def __init__(
        self,
        system: System,
        metric: Metric,
        train: Sequence[Example],
        lm: Callable[[], Engine] = lambda: ScriptedLM([]),
        share: float = float("inf"),
        *,
        keys: Sequence[str] | None = None,
        seed: int = 1,
        pool_seed: int = 2,
        minibatch: int = 4,
        candidates: int = 8,
        tried: Sequence[ScoredCandidate] = (),
    ) -> None:
        self.lm = engine = lm()
        self._make_lm = lm
        self._files = temporary_folder(self)
        self._numbers = itertools.count()
        settings = OptimizeSettings(minibatch=minibatch, candidates=candidates, iterations=1)
        chosen = tuple(system.parameters) if keys is None else tuple(keys)
        self._base = Problem(
            system, train, (), (), metric, settings, Method("none", {}, [], Uniform()), lambda _: engine
        )
        self.share = share
        self._cache = _Cache({}, ())
        self.memory = PlainMemory(self._files / "memory")
        self.memory.folder.mkdir()
        self.executor = Executor(self._base.engines, cache=self._cache, folder=self.memory.folder)
        self._proposals = Proposals(self.executor.meter, give_up=settings.budget.max_proposal_failures)
        self.scorer = _Scorer(self._base, self.executor, system, share, 0.0, self._proposals)
        context = JobContext(self.executor, metric, self._base.rules, self.memory)
        self.task = Task(
            system=system, keys=chosen, train=train, scorer=self.scorer, seed=seed, pool_seed=pool_seed,
            minibatch=minibatch, candidates=candidates, context=context, tried=tried,
            prices=estimate_prices(system),
        )  # fmt: skip

    @property
    def spent(self) -> float:
        """System runs spent so far."""
        return self.executor.meter.system_runs

    @property
    def proposal_requests(self) -> Sequence[tuple[str | None, Request]]:
        """Requests for proposals so far, each with the name of its model."""
        return self.scorer.proposal_requests

    def problem(self, optimizer: Optimizer) -> Problem:
        """Return a problem whose method has only an optimizer and this job, for estimates."""
        method = Method("kit", {NAME: optimizer}, [Job(NAME, self.task.keys)], Uniform())
        return replace(self._base, method=method)

    def run(self, optimizer: Optimizer) -> tuple[list[dict[str, object]], Proposal]:
        """Run an optimizer to the end.

        Returns:
            The state of each checkpoint, as JSON types, and the proposal.

        Raises:
            UserCodeError: the optimizer raised an error that is not of this package, or yielded an object
                that is neither `Progress` nor `Proposal`.
        """
        checkpoints, proposal = self.record(optimizer)
        return [checkpoint.state for checkpoint in checkpoints], proposal

    def record(self, optimizer: Optimizer) -> tuple[list[Checkpoint], Proposal]:
        """Run an optimizer to the end, and return each checkpoint and the proposal."""
        checkpoints, events = asyncio.run(self._record(optimizer))
        proposals = [event for event in events if isinstance(event, Proposal)]
        assert proposals, "the optimizer ended without a Proposal; yield Proposal({}) if nothing is better"
        return checkpoints, proposals[-1]

    def events(self, optimizer: Optimizer) -> list[Progress | Proposal]:
        """Run an optimizer to the end, and return everything it yields."""
        return asyncio.run(self._record(optimizer))[1]

    def fresh_copy(self) -> OptimizerJob:
        """Return an equal job that has not started, with a new engine."""
        task, base = self.task, self._base
        return OptimizerJob(
            base.system, base.metric, base.train, self._make_lm, self.share,
            keys=task.keys, seed=task.seed, pool_seed=task.pool_seed, minibatch=task.minibatch,
            candidates=task.candidates, tried=task.tried,
        )  # fmt: skip

    def resume(self, checkpoint: Checkpoint) -> OptimizerJob:
        """Return an equal job that resumes from a checkpoint, as after a crash.

        Memory, spending and scores are those of the checkpoint. The recorded calls are all that this job has
        made so far; those made after the checkpoint are charged again, as in a run directory.
        """
        other = self.fresh_copy()
        other._cache.fill(self._cache.rows, checkpoint.cached)
        other.memory.restore(checkpoint.memory)
        other.executor.meter.restore(checkpoint.meter)
        other.scorer.restore(checkpoint.scored)
        other._proposals.restore(checkpoint.ledger)
        other.task = replace(other.task, resume=checkpoint.state)
        return other

    def check_resume(self, make: Callable[[], Optimizer]) -> list[Checkpoint]:
        """Check that resuming from every checkpoint gives the result of an uninterrupted run.

        The job runs once to its end, and then once from each checkpoint with a new optimizer.

        Args:
            make: creates an optimizer; all of them must be equivalent.

        Returns:
            The checkpoints of the uninterrupted run.

        Raises:
            AssertionError: a resumed run differs in its events, its spending or its memory.
        """
        checkpoints, proposal = self.record(make())
        for number, checkpoint in enumerate(checkpoints, 1):
            job = self.resume(checkpoint)
            where = f"resuming from checkpoint {number} of {len(checkpoints)}"
            later, found = job.record(make())
            expected = checkpoints[number:]
            _check_equal(where, _flat(found), _flat(proposal), "the proposal")
            assert len(later) == len(expected), (
                f"{where} yields {len(later)} more Progress instead of {len(expected)}; {KEEP}"
            )
            for place, (one, other) in enumerate(zip(later, expected, strict=True), number + 1):
                _check_equal(where, _flat(one.progress), _flat(other.progress), f"checkpoint {place}")
            assert abs(job.spent - self.spent) < ROUNDING, (
                f"{where} spends {job.spent:g} system runs instead of {self.spent:g}; {KEEP}"
            )
            _check_equal(where, job.memory.state, self.memory.state, "the method's memory")
        return checkpoints

    async def _record(self, optimizer: Optimizer) -> tuple[list[Checkpoint], list[Progress | Proposal]]:
        """Run an optimizer like the loop does, and take a checkpoint at each progress."""
        checkpoints: list[Checkpoint] = []
        events: list[Progress | Proposal] = []
        try:
            async for event in RunningOptimizer(NAME, optimizer).events(self.task):
                events.append(event)
                if isinstance(event, Progress):
                    checkpoints.append(self._checkpoint(event))
        finally:
            await self.executor.aclose()
        return checkpoints, events

    def _checkpoint(self, event: Progress) -> Checkpoint:
        """Return a checkpoint of the job, copied so that later changes do not affect it."""
        for what, value in (("state", event.state), ("facts", event.facts)):
            problem = json_problem(value)
            assert not problem, f"the {what} of Progress must be JSON, but {problem}; {STORE}"
        state, facts = (through_json(dict(value)) for value in (event.state, event.facts))
        assert isinstance(state, dict)
        assert isinstance(facts, dict)
        return Checkpoint(
            replace(event, state=state, facts=facts),
            self.memory.snapshot(self._files / f"checkpoint-{next(self._numbers)}"),
            frozenset(self._cache.rows),
            self.executor.meter.snapshot(),
            self.scorer.snapshot(),
            self._proposals.snapshot(),
        )


KEEP = "store everything that later steps depend on in the state of Progress or in the method's memory"
STORE = "store numbers, strings, lists and dictionaries, as compound.storage.state.State.to_json does"


class _Scorer(JobScorer):
    """Scorer that records the requests for proposals."""

    def __init__(
        self,
        problem: Problem,
        executor: Executor,
        incumbent: System,
        share: float,
        spent: float,
        proposals: Proposals,
    ) -> None:
        super().__init__(problem, executor, incumbent, share, spent, proposals)
        self.proposal_requests: list[tuple[str | None, Request]] = []

    async def generate(self, request: Request, lm: str | None = None) -> Completion:
        """Record a request for a proposal, and send it."""
        self.proposal_requests.append((lm, request))
        return await super().generate(request, lm)


class _Cache:
    """Cache whose entries after the checkpoint are charged when first read, as after a crash."""

    def __init__(self, rows: Mapping[str, str], covered: Sequence[str]) -> None:
        self.rows: dict[str, str] = {}
        self._pending: set[str] = set()
        self.fill(rows, covered)

    def fill(self, rows: Mapping[str, str], covered: Sequence[str] | frozenset[str]) -> None:
        """Add recorded calls; those that the checkpoint does not cover are pending."""
        self.rows |= rows
        self._pending |= set(rows).difference(covered)

    def get(self, key: str) -> Mapping[str, object] | None:
        row = self.rows.get(key)
        return None if row is None else json.loads(row)

    def put(self, key: str, outcome: Mapping[str, object]) -> None:
        self.rows.setdefault(key, json.dumps(outcome, ensure_ascii=False))

    def take_pending(self, key: str) -> bool:
        if key in self._pending:
            self._pending.discard(key)
            return True
        return False


def _flat(event: Progress | Proposal) -> dict[str, object]:
    """Return the fields of an event as a dictionary."""
    found = {field.name: getattr(event, field.name) for field in fields(event)}
    return {name: dict(value) if isinstance(value, Mapping) else value for name, value in found.items()}


def _check_equal(where: str, found: Mapping[str, object], expected: Mapping[str, object], what: str) -> None:
    """Raise an `AssertionError` that names the first entry in which two mappings differ."""
    for name in dict.fromkeys((*expected, *found)):
        one, other = found.get(name), expected.get(name)
        if not _same(one, other):
            raise AssertionError(
                f"{where}, {what} has {name} {short_repr(one)} instead of {short_repr(other)}; {KEEP}"
            )


def _same(one: object, other: object) -> bool:
    """Return whether two values have the same JSON form; NaN equals itself."""
    try:
        return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
    except (TypeError, ValueError):
        return bool(one == other)
