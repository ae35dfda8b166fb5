"""Conformance kit for optimizers."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from unittest import SkipTest

import numpy as np

from compound.components.llm import LLM
from compound.engine import Engine
from compound.errors import CompoundError
from compound.evaluation.metrics.custom import custom
from compound.example import Example, Metric, Values
from compound.formatting import short_repr
from compound.graph.component import Input
from compound.graph.configuration import to_readable_json
from compound.graph.space import Choice, Demos, Float, Text
from compound.graph.system import System
from compound.optimization.allowance import allowance
from compound.optimization.bounds import Bounded
from compound.optimization.method import Optimizer, Progress, Proposal
from compound.testing.checks import json_problem, without_global_generators
from compound.testing.doubles import ScriptedLM
from compound.testing.optimizer_job import STORE, OptimizerJob

__all__ = ["OptimizerKit"]

CUE = "Answer:"  # end of the prompts of the kit's system, which requests for proposals do not have
BETTER = "Be exact."
ROUNDING = 1e-9


class OptimizerKit:
    """Checks of an optimizer; subclass it as ``Test…``, and override `make`.

    The other hooks have defaults: a system of two language models with tunable prompts, demonstrations,
    temperature and lengths, a scripted model, and a metric that a better prompt improves. Override `system`
    or `keys` if the optimizer changes only some kinds of parameters, and `engine` if it expects more than a
    new prompt from the answers to its own requests.

    Checks:
        - ``propose`` takes a task and is an async generator of `Progress` and `Proposal`
        - it yields exactly one `Proposal`, as the last event
        - states and facts are JSON, and steps increase up to their total
        - the proposal names parameters of the task, with values that can be bound to the system
        - two runs with the same seed yield the same events
        - resuming from any checkpoint, with a new optimizer and the memory of that time, gives the same
          result
        - it spends at most its share of system runs, also if the share covers only two minibatches
        - with a constant metric it reports no gain
        - it does not use or seed the global generators of `random` and `numpy.random`
        - it does not modify examples
        - if it declares ``bound``, it makes at most that many requests for proposals, and none longer

    Attributes:
        share: the system runs of the job.
        checkpoints: the minimum number of `Progress` events of a run, so that resuming is tested; 0 for an
            optimizer that yields none.

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

    # -- hooks -----------------------------------------------------------------------------------------

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
        return custom(_is_right, "is_right", bounds=(0, 1))

    def engine(self) -> Engine:
        """Return the model of the system, which also answers requests for proposals.

        Its answers must depend only on the request.
        """
        return ScriptedLM(_answer)

    def job(
        self, *, metric: Metric | None = None, share: float | None = None, seed: int = 1, minibatch: int = 4
    ) -> OptimizerJob:
        """Return a job of the kit."""
        return OptimizerJob(
            self.system(), metric or self.metric(), self.train(), self.engine,
            self.share if share is None else share,
            keys=self.keys(), seed=seed, minibatch=minibatch,
        )  # fmt: skip

    # -- checks ----------------------------------------------------------------------------------------

    def test_propose_is_an_async_generator(self) -> None:
        """``propose`` takes a task and returns an async generator."""
        propose = getattr(self.make(), "propose", None)
        assert callable(propose), f"the optimizer has no method propose; {_ASYNC}"
        events = propose(self.job().task)
        if inspect.iscoroutine(events):
            events.close()
        assert inspect.isasyncgen(events), f"propose returned {type(events).__name__}; {_ASYNC}"

    def test_one_proposal_comes_last(self) -> None:
        """The optimizer yields any number of `Progress` events, then exactly one `Proposal`."""
        events = self.job().events(self.make())
        proposals = sum(isinstance(event, Proposal) for event in events)
        assert proposals == 1, f"the optimizer yielded {proposals} Proposals; yield exactly one, at the end"
        after = events[-1]
        assert isinstance(after, Proposal), (
            f"the optimizer yielded {short_repr(after)} after its Proposal; the Proposal must be the last "
            "event"
        )
        count = len(events) - 1
        assert count >= self.checkpoints, (
            f"the optimizer yielded {count} Progress, but the kit expects at least {self.checkpoints}; yield "
            "one after each step that should be resumable, or set checkpoints = 0 in the kit"
        )

    def test_states_and_facts_are_json(self) -> None:
        """States and facts can be stored in checkpoints and records."""
        for event in self.job().events(self.make()):  # the job checks every Progress
            problem = json_problem(dict(event.facts))
            assert not problem, f"the facts of Proposal must be JSON, but {problem}; {STORE}"

    def test_steps_are_counted_upwards(self) -> None:
        """Steps of `Progress` events, if given, do not decrease and do not exceed their total."""
        events = self.job().events(self.make())
        numbered = [(e.step, e.of) for e in events if isinstance(e, Progress) and e.step is not None]
        steps = [step for step, _ in numbered]
        assert steps == sorted(steps), (
            f"Progress.step must not decrease, but the steps are {short_repr(steps)}"
        )
        for step, total in numbered:
            assert total is None or step <= total, (
                f"Progress has step {step} of {total}; set Progress.of to the number of steps, or to None if "
                "it is unknown"
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

    def test_equal_seeds_yield_the_same(self) -> None:
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
        constant = custom(_half, "constant", bounds=(0, 1))
        _, proposal = self.job(metric=constant).run(self.make())
        if proposal.before is not None and proposal.after is not None:
            assert proposal.after <= proposal.before + ROUNDING, (
                f"the metric is constant, but the proposal has {proposal.before:g} -> {proposal.after:g}; "
                "compare candidates and the incumbent on the same examples"
            )

    def test_global_generators_are_not_used(self) -> None:
        """The optimizer neither uses nor seeds the global random generators."""
        job, optimizer = self.job(), self.make()
        with without_global_generators("the optimizer"):
            job.run(optimizer)

    def test_examples_are_not_changed(self) -> None:
        """The examples are unchanged after the run."""
        job = self.job()
        before = to_readable_json([[example.inputs, example.gold] for example in job.task.train])
        job.run(self.make())
        after = to_readable_json([[example.inputs, example.gold] for example in job.task.train])
        assert after == before, (
            "the optimizer modified an example of task.train; copy values before modifying them"
        )

    def test_requests_stay_within_the_bound(self) -> None:
        """Number and length of the requests for proposals are within the declared bound."""
        optimizer = self.make()
        if not isinstance(optimizer, Bounded):
            raise SkipTest("the optimizer declares no bound of its requests")
        job = self.job()
        (allowed,) = allowance(job.problem(optimizer), self.share, 1, lms=("lm",)).jobs
        assert allowed.bound is not None
        job.run(optimizer)
        most = allowed.bound.calls
        assert len(job.proposal_requests) <= most, (
            f"the optimizer made {len(job.proposal_requests)} requests for proposals, but bound declares "
            f"{most:g}; declare the maximum for a job with outlook.runs system runs"
        )
        longest = max((request.max_tokens for request in allowed.bound.requests), default=0)
        for _, request in job.proposal_requests:
            assert request.max_tokens <= longest, (
                f"the optimizer requested an answer of {request.max_tokens} tokens, but bound declares "
                f"{longest:g}; declare the largest max_tokens of its requests"
            )

    def test_a_larger_share_does_not_lower_the_bound(self) -> None:
        """The bound does not decrease if the job may spend more system runs."""
        optimizer = self.make()
        if not isinstance(optimizer, Bounded):
            raise SkipTest("the optimizer declares no bound of its requests")
        outlook = allowance(self.job().problem(optimizer), self.share, 1, lms=("lm",)).outlook
        runs = [self.share / 4, self.share, 4 * self.share]
        calls = [optimizer.bound(replace(outlook, keys=tuple(self.keys()), runs=n)).calls for n in runs]
        assert calls == sorted(calls), (
            f"with {runs} system runs the bound declares {calls} requests; it must not decrease"
        )


_ASYNC = "write async def propose(self, task) that yields Progress events and one Proposal at the end"


def _answer(message: str, rng: np.random.Generator) -> str:
    """Answer a call of the system at random, with a better prompt more often right, or propose a prompt."""
    if message.rstrip().endswith(CUE):
        return "right" if rng.random() < (0.9 if BETTER in message else 0.4) else "wrong"
    text = f"Style {'abc'[int(rng.integers(3))]}. {BETTER if rng.random() < 0.6 else 'Be quick.'}"
    return (
        f"<prompt>{text}</prompt>\n```\n{text}\n```\n[final answer: {'Yes' if rng.random() < 0.5 else 'No'}]"
    )


def _is_right(outputs: Values, example: Example) -> float:
    return float(outputs["answer"] == "right")


def _half(outputs: Values, example: Example) -> float:
    return 0.5
