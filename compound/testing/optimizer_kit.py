"""Conformance kit for optimizers, and the job that runs them like the optimization loop.

Scorer, executor, cache, meter and ledger are the real ones. Only the model is scripted, and the
contents of run directories are in memory.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any
from unittest import SkipTest

import numpy as np

from compound.components.llm import LLM
from compound.core.engine import Completion, Engine, Request
from compound.core.errors import CompoundError
from compound.core.example import Example, Metric
from compound.core.formatting import short_repr
from compound.evaluation.metrics.custom import custom
from compound.execution.budget import MeterState
from compound.execution.executor import Executor
from compound.graph.component import Input
from compound.graph.configuration import to_readable_json
from compound.graph.space import Choice, Demos, Float, Text
from compound.graph.system import System
from compound.optimization.budget_plan import plan_job
from compound.optimization.method import (
    Job,
    JobContext,
    Method,
    Optimizer,
    Problem,
    Progress,
    Proposal,
    ScoredCandidate,
    Task,
)
from compound.optimization.prices import estimate_prices
from compound.optimization.proposals import LedgerState, Proposals
from compound.optimization.registration import RunningOptimizer
from compound.optimization.scorer import JobScorer
from compound.optimization.settings.optimize import OptimizeSettings
from compound.optimizers.scheduling import Uniform
from compound.testing.checks import (
    json_problem,
    same_json,
    temporary_folder,
    through_json,
    without_global_generators,
)
from compound.testing.doubles import MemorySnapshot, PlainMemory, ScriptedLM

__all__ = ["KitCheckpoint", "OptimizerJob", "OptimizerKit"]

SPENT_ROUNDING = 1e-6  # tolerance for sums of fractional system runs
NAME = "optimizer"


@dataclass(frozen=True)
class KitCheckpoint:
    """Checkpoint of a job after a `Progress`, with only JSON types, as in a run directory."""

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
        >>> from compound import Choice, Function, Input, System
        >>> from compound.metrics import custom
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
        self._arguments = (system, metric, train, lm, share)
        self._options: Any = {"keys": keys, "seed": seed, "pool_seed": pool_seed}
        self._options |= {"minibatch": minibatch, "candidates": candidates, "tried": tried}
        self.lm = engine = lm()
        self._files = temporary_folder(self)
        self._numbers = itertools.count()
        settings = OptimizeSettings(minibatch=minibatch, candidates=candidates, iterations=1)
        chosen = tuple(system.parameters) if keys is None else tuple(keys)
        self._base = Problem(
            system,
            train,
            (),
            (),
            metric,
            settings,
            Method("none", {}, [], Uniform()),
            lambda _: engine,
        )
        self.share = share
        self._cache = _Cache()
        self.memory = PlainMemory(self._files / "memory")
        self.memory.folder.mkdir()
        self.executor = Executor(self._base.engines, cache=self._cache, folder=self.memory.folder)
        self._proposals = Proposals(
            self.executor.meter, give_up=settings.budget.max_proposal_failures
        )
        self.scorer = _Scorer(self._base, self.executor, system, share, 0.0, self._proposals)
        context = JobContext(self.executor, metric, self._base.rules, self.memory)
        self.task = Task(
            system=system,
            keys=chosen,
            train=train,
            scorer=self.scorer,
            seed=seed,
            pool_seed=pool_seed,
            minibatch=minibatch,
            candidates=candidates,
            context=context,
            tried=tried,
            prices=estimate_prices(system),
        )

    @property
    def spent(self) -> float:
        """System runs spent so far."""
        return self.executor.meter.system_runs

    @property
    def proposal_requests(self) -> Sequence[tuple[str | None, Request]]:
        """Requests for proposals so far, each with the name of its model."""
        return self.scorer.proposal_requests

    @property
    def job(self) -> Job:
        """The job, as a method lists it."""
        return Job(NAME, self.task.keys)

    def problem(self, optimizer: Optimizer) -> Problem:
        """Return a problem whose method has only an optimizer and this job, for estimates."""
        method = Method("kit", {NAME: optimizer}, [self.job], Uniform())
        return replace(self._base, method=method)

    def run(self, optimizer: Optimizer) -> tuple[list[dict[str, object]], Proposal]:
        """Run an optimizer to the end.

        Returns:
            The state of each checkpoint, as JSON types, and the proposal.

        Raises:
            UserCodeError: the optimizer raised an error that is not of this package, or yielded an
                object that is neither `Progress` nor `Proposal`.
        """
        checkpoints, proposal = self.record(optimizer)
        return [checkpoint.state for checkpoint in checkpoints], proposal

    def record(self, optimizer: Optimizer) -> tuple[list[KitCheckpoint], Proposal]:
        """Run an optimizer to the end, and return each checkpoint and the proposal."""
        checkpoints, events = asyncio.run(self._record(optimizer))
        proposals = [event for event in events if isinstance(event, Proposal)]
        assert proposals, (
            "the optimizer ended without a Proposal; yield Proposal({}) if nothing is better"
        )
        return checkpoints, proposals[-1]

    def events(self, optimizer: Optimizer) -> list[Progress | Proposal]:
        """Run an optimizer to the end, and return everything it yields."""
        return asyncio.run(self._record(optimizer))[1]

    def fresh_copy(self) -> OptimizerJob:
        """Return an equal job that has not started, with a new engine."""
        return OptimizerJob(*self._arguments, **self._options)

    def resume(self, checkpoint: KitCheckpoint) -> OptimizerJob:
        """Return an equal job that resumes from a checkpoint, as after a crash.

        Memory, spending and scores are those of the checkpoint. The recorded calls are all that
        this job has made so far; those made after the checkpoint are charged again, as in a run
        directory.
        """
        other = self.fresh_copy()
        other._cache.fill(self._cache.rows, checkpoint.cached)
        other.memory.restore(checkpoint.memory)
        other.executor.meter.restore(checkpoint.meter)
        other.scorer.restore(checkpoint.scored)
        other._proposals.restore(checkpoint.ledger)
        other.task = replace(other.task, resume=checkpoint.state)
        return other

    def check_resume(self, make: Callable[[], Optimizer]) -> list[KitCheckpoint]:
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
                _check_equal(
                    where, _flat(one.progress), _flat(other.progress), f"checkpoint {place}"
                )
            assert abs(job.spent - self.spent) < SPENT_ROUNDING, (
                f"{where} spends {job.spent:g} system runs instead of {self.spent:g}; {KEEP}"
            )
            _check_equal(where, job.memory.state, self.memory.state, "the method's memory")
        return checkpoints

    async def _record(
        self, optimizer: Optimizer
    ) -> tuple[list[KitCheckpoint], list[Progress | Proposal]]:
        checkpoints: list[KitCheckpoint] = []
        events: list[Progress | Proposal] = []
        try:
            async for event in RunningOptimizer(NAME, optimizer).events(self.task):
                events.append(event)
                if isinstance(event, Progress):
                    checkpoints.append(self._checkpoint(event))
        finally:
            await self.executor.aclose()
        return checkpoints, events

    def _checkpoint(self, event: Progress) -> KitCheckpoint:
        """Return a checkpoint of the job, copied so that later changes do not affect it."""
        for what, value in (("state", event.state), ("facts", event.facts)):
            problem = json_problem(value)
            assert not problem, f"the {what} of Progress must be JSON, but {problem}; {STORE}"
        if event.written is not None:
            event.written()
        state, facts = (through_json(dict(value)) for value in (event.state, event.facts))
        assert isinstance(state, dict)
        assert isinstance(facts, dict)
        return KitCheckpoint(
            replace(event, state=state, facts=facts, written=None),
            self.memory.snapshot(self._files / f"checkpoint-{next(self._numbers)}"),
            frozenset(self._cache.rows),
            self.executor.meter.snapshot(),
            self.scorer.snapshot(),
            self._proposals.snapshot(),
        )


KEEP = (
    "store everything that later steps depend on in the state of Progress or in the method's memory"
)
STORE = "store numbers, strings, lists and dictionaries, as compound.core.storage.state.State.to_json does"


class _Scorer(JobScorer):
    """Scorer that records the requests for proposals."""

    @cached_property
    def proposal_requests(self) -> list[tuple[str | None, Request]]:
        return []

    async def generate(self, request: Request, lm: str | None = None) -> Completion:
        self.proposal_requests.append((lm, request))
        return await super().generate(request, lm)


class _Cache:
    """Cache whose entries after the checkpoint are charged when first read, as after a crash."""

    def __init__(self) -> None:
        self.rows: dict[str, str] = {}
        self._pending: set[str] = set()

    def fill(self, rows: Mapping[str, str], covered: frozenset[str]) -> None:
        """Add recorded calls; those that the checkpoint does not cover are pending."""
        self.rows |= rows
        self._pending |= set(rows).difference(covered)

    def get(self, key: str) -> Mapping[str, object] | None:
        row = self.rows.get(key)
        return None if row is None else json.loads(row)

    def put(self, key: str, outcome: Mapping[str, object]) -> None:
        self.rows.setdefault(key, json.dumps(outcome, ensure_ascii=False))

    def drop(self, key: str, why: str) -> None:
        raise AssertionError(f"{key}: {why}")  # all rows are its own

    def take_pending(self, key: str) -> bool:
        pending = key in self._pending
        self._pending.discard(key)
        return pending


def _flat(event: Progress | Proposal) -> dict[str, object]:
    found = {field.name: getattr(event, field.name) for field in fields(event)}
    return {
        name: dict(value) if isinstance(value, Mapping) else value for name, value in found.items()
    }


def _check_equal(
    where: str, found: Mapping[str, object], expected: Mapping[str, object], what: str
) -> None:
    """Raise an `AssertionError` that names the first entry in which two mappings differ."""
    for name in dict.fromkeys((*expected, *found)):
        one, other = found.get(name), expected.get(name)
        if not same_json(one, other):
            raise AssertionError(
                f"{where}, {what} has {name} {short_repr(one)} instead of {short_repr(other)}; {KEEP}"
            )


CUE = "Answer:"  # end of the prompts of the kit's system, which requests for proposals do not have
BETTER = "Be exact."
ROUNDING = 1e-9


class OptimizerKit:
    """Checks of an optimizer; subclass it as ``Test…``, and override `make`.

    The other hooks have defaults: a system of two language models with tunable prompts,
    demonstrations, temperature and lengths, a scripted model, and a metric that a better prompt
    improves. Override `system` or `keys` if the optimizer changes only some kinds of parameters,
    and `engine` if it expects more than a new prompt from the answers to its own requests.

    Attributes:
        share: the system runs of the job.
        checkpoints: the minimum number of `Progress` events of a run, so that resuming is tested; 0
            for an optimizer that yields none.

    Example:
        >>> from compound.optimizers.baselines.random import RandomSearch
        >>> from compound.testing import OptimizerKit, run_kit
        >>> class TestRandomSearch(OptimizerKit):
        ...     def make(self):
        ...         return RandomSearch()
        >>> run_kit(TestRandomSearch)
        {}
    """

    share: float = 200.0
    checkpoints: int = 1

    def make(self) -> Optimizer:
        """Return a new optimizer. Override this; all returned optimizers must be equivalent."""
        raise NotImplementedError("override make() to return the optimizer to test")

    def system(self) -> System:
        """Return the system to optimize, whose model is ``lm``."""
        question = Input("question", str)
        plan = LLM("first", prompt=Text("Think."), temperature=1.0, max_tokens=Choice(8, 16))(
            question=question
        )
        answer = LLM(
            "second",
            prompt=Text("Answer."),
            demos=Demos(max=2),
            temperature=Float(0.5, 1.0),
            max_tokens=Choice(8, 16, 32),
        )(plan=plan, question=question)
        return System("two", outputs={"answer": answer}, lm="lm")

    def keys(self) -> Sequence[str]:
        """Return the parameters that the job may change; all of the system's by default."""
        return tuple(self.system().parameters)

    def proposed_keys(self) -> Sequence[str]:
        """Return the parameters that a proposal may change; `keys` by default.

        Override this if the optimizer also changes parameters other than those of the job.
        """
        return self.keys()

    def train(self) -> Sequence[Example]:
        """Return the examples to learn from."""
        return [Example(f"e{i}", {"question": f"what is {i}"}) for i in range(60)]

    def metric(self) -> Metric:
        """Return the global reward."""
        return custom(
            lambda outputs, example: float(outputs["answer"] == "right"), "is_right", bounds=(0, 1)
        )

    def engine(self) -> Engine:
        """Return the model of the system, which also answers requests for proposals.

        Its answers must depend only on the request.
        """
        return ScriptedLM(_answer)

    def job(
        self,
        *,
        metric: Metric | None = None,
        share: float | None = None,
        seed: int = 1,
        minibatch: int = 4,
    ) -> OptimizerJob:
        """Return a job of the kit."""
        return OptimizerJob(
            self.system(),
            metric or self.metric(),
            self.train(),
            self.engine,
            self.share if share is None else share,
            keys=self.keys(),
            seed=seed,
            minibatch=minibatch,
        )

    def test_events_follow_the_protocol(self) -> None:
        """``propose`` yields `Progress` events with counted steps, then one `Proposal`; facts are JSON."""
        propose = getattr(self.make(), "propose", None)
        assert callable(propose), f"the optimizer has no method propose; {_ASYNC}"
        started = propose(self.job().task)
        if inspect.iscoroutine(started):
            started.close()
        assert inspect.isasyncgen(started), f"propose returned {type(started).__name__}; {_ASYNC}"
        events = self.job().events(self.make())  # the job checks every Progress
        proposals = [event for event in events if isinstance(event, Proposal)]
        assert len(proposals) == 1, (
            f"the optimizer yielded {len(proposals)} Proposals; yield exactly one, at the end"
        )
        assert events[-1] is proposals[0], (
            f"the optimizer yielded {short_repr(events[-1])} after its Proposal, which must be last"
        )
        problem = json_problem(dict(proposals[0].facts))
        assert not problem, f"the facts of Proposal must be JSON, but {problem}; {STORE}"
        progress = [event for event in events if isinstance(event, Progress)]
        assert len(progress) >= self.checkpoints, (
            f"the optimizer yielded {len(progress)} Progress, but the kit expects at least "
            f"{self.checkpoints}; yield one after each step that should be resumable, or set checkpoints = 0"
        )
        steps = [(event.step, event.of) for event in progress if event.step is not None]
        assert steps == sorted(steps), (
            f"Progress.step must not decrease, but the steps are {short_repr(steps)}"
        )
        for step, total in steps:
            assert total is None or step <= total, (
                f"Progress has step {step} of {total}; set Progress.of to the number of steps, or to None"
            )

    def test_the_proposal_can_be_bound(self) -> None:
        """The proposal names parameters of the task, with values of their spaces."""
        job = self.job()
        _, proposal = job.run(self.make())
        allowed = self.proposed_keys()
        others = [key for key in proposal.values if key not in allowed]
        assert not others, (
            f"the proposal changes {', '.join(others)}, but the task allows only {', '.join(allowed)}; "
            "propose values only for Task.keys"
        )
        try:
            job.task.system.bind({**job.task.system.configuration, **proposal.values})
        except CompoundError as error:
            raise AssertionError(f"the system cannot be bound to the proposal: {error}") from error

    def test_equal_seeds_yield_the_same_json(self) -> None:
        """Two runs of the same job yield equal events."""
        one, other = (self.job().record(self.make()) for _ in range(2))
        states, again = ([checkpoint.progress for checkpoint in found] for found, _ in (one, other))
        hint = "use only generator(task.seed, ...) for randomness, and do not iterate over sets"
        assert len(states) == len(again), (
            f"two runs with the same seed yielded {len(states)} and {len(again)} Progress; {hint}"
        )
        for number, (first, second) in enumerate(zip(states, again, strict=True), 1):
            assert first == second, (
                f"two runs with the same seed differ in Progress {number}: {short_repr(first.state)} and "
                f"{short_repr(second.state)}; {hint}"
            )
        assert one[1] == other[1], (
            f"two runs with the same seed proposed {short_repr(one[1].values)} and "
            f"{short_repr(other[1].values)}; {hint}"
        )

    def test_every_checkpoint_continues_to_the_same_end(self) -> None:
        """An interruption after any `Progress` does not change later events."""
        self.job().check_resume(self.make)

    def test_the_share_is_kept(self) -> None:
        """The optimizer spends at most its share of system runs."""
        few = 2
        for share, minibatch in ((self.share, 4), (2.0 * few, few)):
            job = self.job(share=share, minibatch=minibatch)
            job.run(self.make())
            assert job.spent <= share + ROUNDING, (
                f"the optimizer spent {job.spent:g} of {share:g} system runs; check task.scorer.runs_left "
                "before every step, and start only steps that fit"
            )

    def test_a_constant_metric_shows_no_gain(self) -> None:
        """If all scores are equal, ``after`` is not above ``before``."""
        constant = custom(lambda outputs, example: 0.5, "constant", bounds=(0, 1))
        _, proposal = self.job(metric=constant).run(self.make())
        if proposal.before is not None and proposal.after is not None:
            assert proposal.after <= proposal.before + ROUNDING, (
                f"the metric is constant, but the proposal has {proposal.before:g} -> {proposal.after:g}; "
                "compare candidates and the incumbent on the same examples"
            )

    def test_only_the_task_is_used(self) -> None:
        """The optimizer neither uses the global random generators nor changes the examples."""
        job, optimizer = self.job(), self.make()
        examples = [[example.inputs, example.gold] for example in job.task.train]
        before = to_readable_json(examples)
        with without_global_generators("the optimizer"):
            job.run(optimizer)
        assert to_readable_json(examples) == before, (
            "the optimizer modified an example of task.train; copy values before modifying them"
        )

    def test_requests_stay_within_the_plan(self) -> None:
        """Requests for proposals are at most as many as planned; a larger share does not lower the plan."""
        optimizer, job = self.make(), self.job()
        problem, runs = job.problem(optimizer), [self.share / 4, self.share, 4 * self.share]
        plans = [plan_job(problem, job.job, n) for n in runs]
        if None in plans:
            raise SkipTest("the optimizer does not state its requests")
        counts = [math.inf if (most := plan.most()) is None else most for plan in plans if plan]
        assert counts == sorted(counts), (
            f"with {runs} system runs plan states {counts} requests; they must not decrease"
        )
        job.run(optimizer)
        made = len(job.proposal_requests)
        assert made <= counts[1], (
            f"the optimizer made {made} requests for proposals, but plan states {counts[1]}; state the "
            "maximum for a job with job.runs system runs"
        )


_ASYNC = (
    "write async def propose(self, task) that yields Progress events and one Proposal at the end"
)


def _answer(message: str, rng: np.random.Generator) -> str:
    """Answer a call of the system at random, with a better prompt more often right, or propose a prompt."""
    if message.rstrip().endswith(CUE):
        return "right" if rng.random() < (0.9 if BETTER in message else 0.4) else "wrong"
    text = f"Style {'abc'[int(rng.integers(3))]}. {BETTER if rng.random() < 0.6 else 'Be quick.'}"
    answer = "Yes" if rng.random() < 0.5 else "No"
    return f"<prompt>{text}</prompt>\n```\n{text}\n```\n[final answer: {answer}]"
