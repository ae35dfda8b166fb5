"""The conformance kit of optimizers."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from unittest import SkipTest

import numpy as np

from compound.components.llm import LLM
from compound.engine import Engine
from compound.errors import CompoundError
from compound.evaluation.metrics import custom
from compound.example import Example, Metric, Values
from compound.formatting import short
from compound.graph.component import Input
from compound.graph.configuration import readable
from compound.graph.space import Choice, Demos, Float, Text
from compound.graph.system import System
from compound.optimization.allowance import allowance
from compound.optimization.bounds import Bounded
from compound.optimization.method import Optimizer, Progress, Proposal
from compound.testing.checks import json_problem, without_global_generators
from compound.testing.doubles import ScriptedLM
from compound.testing.optimizer_job import STORE, OptimizerJob

__all__ = ["OptimizerKit"]

CUE = "Answer:"  # how the calls of the kit's own system end; requests for proposals end otherwise
BETTER = "Be exact."
ROUNDING = 1e-9


class OptimizerKit:
    """Checks of an optimizer: inherit it, name the class ``Test…``, and override `make`.

    The other hooks have defaults: a system of two language models whose prompts, demonstrations, temperature
    and lengths may be tuned, a scripted model, and a metric that one of the prompts raises. Override `system`
    or `keys` if the optimizer changes parameters of some kinds alone, and `engine` if it reads more than a
    new prompt from the answer to a request of its own.

    Checks:
        - ``propose`` takes a task and is an async generator of `Progress` and `Proposal`
        - it yields one `Proposal`, and nothing after it
        - states and facts are JSON, and steps are counted upwards to their number
        - the proposal names parameters of the task, with values that the system can be bound to
        - two runs with the same seed yield the same
        - every checkpoint continues to the same end with a new optimizer, and with the memory of that moment
        - it spends no more system runs than its share, also if that holds two minibatches alone
        - under a constant metric it reports no gain
        - it neither draws from nor seeds the global generators of `random` and `numpy.random`
        - it changes no example
        - if it declares ``bound``, it makes no more and no longer requests for proposals than that

    Attributes:
        share: the system runs of the job.
        checkpoints: the fewest `Progress` that a run must yield, so that continuing is tested; 0 for an
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
        """Return a new optimizer. Override it; all that it returns must be alike."""
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

        Override it if the optimizer changes further parameters together with those of the job.
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

        Its answers must depend on the request alone.
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
        """It yields `Progress` any number of times, one `Proposal`, and nothing after it."""
        events = self.job().events(self.make())
        proposals = sum(isinstance(event, Proposal) for event in events)
        assert proposals == 1, f"the optimizer yielded {proposals} Proposals; yield exactly one, at the end"
        after = events[-1]
        assert isinstance(after, Proposal), (
            f"the optimizer yielded {short(after)} after its Proposal; the Proposal must be the last event"
        )
        count = len(events) - 1
        assert count >= self.checkpoints, (
            f"the optimizer yielded {count} Progress, but the kit expects at least {self.checkpoints}; yield "
            "one after each step that is worth keeping, or set checkpoints = 0 in the kit"
        )

    def test_states_and_facts_are_json(self) -> None:
        """What checkpoints and the record store can be stored."""
        for event in self.job().events(self.make()):  # which checks every Progress
            problem = json_problem(dict(event.facts))
            assert not problem, f"the facts of Proposal must be JSON, but {problem}; {STORE}"

    def test_steps_are_counted_upwards(self) -> None:
        """Where `Progress` tells steps, they do not fall, and are no more than their number."""
        events = self.job().events(self.make())
        told = [(e.step, e.of) for e in events if isinstance(e, Progress) and e.step is not None]
        steps = [step for step, _ in told]
        assert steps == sorted(steps), f"Progress.step must not fall, but the steps are {short(steps)}"
        for step, of in told:
            assert of is None or step <= of, (
                f"Progress tells step {step} of {of}; set of to the number of steps, or to None if it is not "
                "known"
            )

    def test_the_proposal_can_be_bound(self) -> None:
        """It names parameters of the task, with values of their spaces."""
        job = self.job()
        _, proposal = job.run(self.make())
        allowed = self.proposed_keys()
        others = [key for key in proposal.values if key not in allowed]
        assert not others, (
            f"the proposal changes {', '.join(others)}, but the task is to change {', '.join(allowed)}; "
            "propose values of Task.keys alone"
        )
        try:
            job.task.system.bind({**job.task.system.configuration, **proposal.values})
        except CompoundError as error:
            raise AssertionError(f"the system cannot be bound to the proposal: {error}") from error

    def test_equal_seeds_yield_the_same(self) -> None:
        """Two runs of the same job yield equal events."""
        one, other = (self.job().record(self.make()) for _ in range(2))
        states, again = ([checkpoint.progress for checkpoint in found] for found, _ in (one, other))
        hint = "draw from generator(task.seed, ...) alone, and iterate over no sets"
        assert len(states) == len(again), (
            f"two runs with the same seed yielded {len(states)} and {len(again)} Progress; {hint}"
        )
        for number, (first, second) in enumerate(zip(states, again, strict=True), 1):
            assert first == second, (
                f"two runs with the same seed differ in Progress {number}: {short(first.state)} and "
                f"{short(second.state)}; {hint}"
            )
        assert one[1] == other[1], (
            f"two runs with the same seed proposed {short(one[1].values)} and {short(other[1].values)}; "
            f"{hint}"
        )

    def test_every_checkpoint_continues_to_the_same_end(self) -> None:
        """An interruption after any `Progress` changes nothing that follows."""
        self.job().check_resume(self.make)

    def test_the_share_is_kept(self) -> None:
        """It spends no more system runs than it may."""
        few = 2
        for share, minibatch in ((self.share, 4), (2.0 * few, few)):
            job = self.job(share=share, minibatch=minibatch)
            job.run(self.make())
            assert job.spent <= share + ROUNDING, (
                f"the optimizer spent {job.spent:g} of {share:g} system runs; ask task.scorer.left before "
                "every step, and do only what fits into it"
            )

    def test_a_constant_metric_shows_no_gain(self) -> None:
        """Where all scores are equal, ``after`` is not above ``before``."""
        constant = custom(_half, "constant", bounds=(0, 1))
        _, proposal = self.job(metric=constant).run(self.make())
        if proposal.before is not None and proposal.after is not None:
            assert proposal.after <= proposal.before + ROUNDING, (
                f"the metric is constant, but the proposal says {proposal.before:g} -> {proposal.after:g}; "
                "compare candidates and the incumbent on the same examples"
            )

    def test_global_generators_are_not_used(self) -> None:
        """It neither draws from nor seeds them."""
        job, optimizer = self.job(), self.make()
        with without_global_generators("the optimizer"):
            job.run(optimizer)

    def test_examples_are_not_changed(self) -> None:
        """The examples are the same after the run."""
        job = self.job()
        before = readable([[example.inputs, example.gold] for example in job.task.train])
        job.run(self.make())
        after = readable([[example.inputs, example.gold] for example in job.task.train])
        assert after == before, "the optimizer changed an example of task.train; copy what it changes"

    def test_requests_stay_within_the_bound(self) -> None:
        """It makes no more and no longer requests for proposals than it declares."""
        optimizer = self.make()
        if not isinstance(optimizer, Bounded):
            raise SkipTest("the optimizer declares no bound of its requests")
        job = self.job()
        (allowed,) = allowance(job.problem(optimizer), self.share, 1, lms=("lm",)).jobs
        assert allowed.bound is not None
        job.run(optimizer)
        most = allowed.bound.calls
        assert len(job.asked) <= most, (
            f"the optimizer made {len(job.asked)} requests for proposals, but bound declares {most:g}; "
            "declare the most that a job with outlook.runs system runs can make"
        )
        longest = max((request.max_tokens for request in allowed.bound.requests), default=0)
        for _, request in job.asked:
            assert request.max_tokens <= longest, (
                f"the optimizer asked for an answer of {request.max_tokens} tokens, but bound declares "
                f"{longest:g}; declare the max_tokens of its longest request"
            )

    def test_a_larger_share_does_not_lower_the_bound(self) -> None:
        """The bound does not fall when the job may spend more system runs."""
        optimizer = self.make()
        if not isinstance(optimizer, Bounded):
            raise SkipTest("the optimizer declares no bound of its requests")
        outlook = allowance(self.job().problem(optimizer), self.share, 1, lms=("lm",)).outlook
        runs = [self.share / 4, self.share, 4 * self.share]
        calls = [optimizer.bound(replace(outlook, keys=tuple(self.keys()), runs=n)).calls for n in runs]
        assert calls == sorted(calls), (
            f"with {runs} system runs the bound declares {calls} requests; it must not fall when runs rise"
        )


_ASYNC = (
    "write async def propose(self, task), which yields Progress any number of times and one Proposal at the "
    "end"
)


def _answer(message: str, rng: np.random.Generator) -> str:
    """Answer a call of the system by chance, more often right with a better prompt; else write a prompt."""
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
