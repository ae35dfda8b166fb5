"""The kit of optimizers catches each kind of wrong optimizer by the check that is meant for it."""

from __future__ import annotations

import itertools
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from pydantic import Field

from compound import Choice, Example, Function, Input, System
from compound.execution.rng import generator
from compound.ext import (
    JobPlan,
    Message,
    Metric,
    Optimizer,
    PlannedJob,
    Progress,
    Proposal,
    Request,
    State,
    Task,
)
from compound.metrics import custom
from compound.optimization.method import RequestCount
from compound.testing import OptimizerJob, OptimizerKit, run_kit

ASK = Request((Message("user", "Propose a letter."),), max_tokens=20)


class Gains(State):
    """What one change of each parameter gained."""

    values: dict[str, str] = Field(default_factory=dict)
    gains: list[float] = Field(default_factory=list)


class Right:
    """Tries one other option of each parameter, and proposes those that gain."""

    async def propose(self, task: Task) -> AsyncIterator[Any]:
        state = Gains() if task.resume is None else Gains.from_json(task.resume)
        batch = task.train[: task.minibatch]
        for key in task.keys[len(state.gains) :]:
            if task.scorer.runs_left < 2 * len(batch):
                break
            value = await self.draw(task, key)
            before, after = await task.scorer.score([{}, {key: value}], batch)
            state.values[key] = value
            state.gains.append(after.mean - before.mean)
            yield Progress(state.to_json(), step=len(state.gains), of=len(task.keys))
        yield self.proposal(task, state)

    async def draw(self, task: Task, key: str) -> str:
        space = task.system.parameters[key]
        assert isinstance(space, Choice)
        options = [option for option in space.options if option != task.system.configuration[key]]
        return str(options[generator(task.seed, key).integers(len(options))])

    def proposal(self, task: Task, state: Gains) -> Proposal:
        pairs = zip(state.values.items(), state.gains, strict=True)
        values = {key: value for (key, value), gain in pairs if gain > 0}
        return Proposal(values, before=0.0, after=sum(gain for gain in state.gains if gain > 0))

    def plan(self, job: PlannedJob) -> JobPlan:
        return JobPlan()


def pick(x: int, first: str, second: str, third: str) -> int:
    return x * (first == "b") + x * (second == "c")


def toy() -> System:
    settings: Any = {name: Choice("a", "b", "c", "d") for name in ("first", "second", "third")}
    return System("toy", outputs={"y": Function("picker", pick, **settings)(x=Input("x", int))})


class Toy(OptimizerKit):
    share = 60.0
    checkpoints = 3
    optimizer: Callable[[], Any] = Right

    def make(self) -> Optimizer:
        made: Optimizer = type(self).optimizer()
        return made

    def system(self) -> System:
        return toy()

    def train(self) -> list[Example]:
        return [Example(f"e{i}", {"x": i}, {"rows": [i]}) for i in range(20)]

    def metric(self) -> Metric:
        return custom(lambda outputs, example: outputs["y"] / 40, "sum", bounds=(0, 1))


def failures(optimizer: Callable[[], Any], **attributes: Any) -> dict[str, str]:
    return run_kit(type("TestToy", (Toy,), {"optimizer": staticmethod(optimizer), **attributes}))


def test_a_right_optimizer_passes() -> None:
    assert failures(Right) == {}


class Coroutine(Right):
    async def propose(self, task: Task) -> Any:  # type: ignore[override]
        return Proposal({})


@dataclass
class Changed(Right):
    change: Callable[[Any], Sequence[Any]]

    async def propose(self, task: Task) -> AsyncIterator[Any]:
        async for event in super().propose(task):
            for other in self.change(event):
                yield other


def changed(kind: type, change: Callable[[Any], Sequence[Any]]) -> Callable[[], Any]:
    return lambda: Changed(lambda event: change(event) if isinstance(event, kind) else [event])


def with_facts(**facts: Any) -> Callable[[], Any]:
    return changed(object, lambda event: [replace(event, facts=facts)])


def with_values(values: dict[str, Any]) -> Callable[[], Any]:
    return changed(Proposal, lambda event: [replace(event, values=values)])


def drawing(draw: Callable[[Any, str], Any]) -> Callable[[], Any]:
    async def drawn(self: Any, task: Task, key: str) -> str:
        return str(draw(task, key))

    return type("Drawing", (Right,), {"draw": drawn})


class Keeps(Right):
    """Keeps what it found in itself, and not in its state."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}

    async def draw(self, task: Task, key: str) -> str:
        self.found[key] = value = await super().draw(task, key)
        return value

    def proposal(self, task: Task, state: Gains) -> Proposal:
        return Proposal(self.found)


def resuming(change: Callable[[Any], Any]) -> Callable[[], Any]:
    async def propose(self: Right, task: Task) -> AsyncIterator[Any]:
        if task.resume is not None:
            task = replace(task, resume=change(task.resume))
        async for event in Right.propose(self, task):
            yield event

    return type("Resuming", (Right,), {"propose": propose})


Forgets = resuming(lambda state: {**state, "gains": [-1.0] * len(state["gains"])})
Again = resuming(lambda state: None)


class Remembers(Right):
    """Counts its draws in the memory, but those of before an interruption twice."""

    async def propose(self, task: Task) -> AsyncIterator[Any]:
        task.context.memory.state["begun"] = task.context.memory.state.get("begun", 0) + 1
        async for event in super().propose(task):
            yield event


class Later(Right):
    """Relies on what the memory held when the job began; later draws write into it, too."""

    async def draw(self, task: Task, key: str) -> str:
        drawn = task.context.memory.state.setdefault("drawn", {})
        if key not in drawn:
            drawn[key] = await super().draw(task, key)
        return str(drawn[key])


class Spends(Right):
    async def draw(self, task: Task, key: str) -> str:
        await task.scorer.score([{key: value} for value in "abcd"], task.train)
        return await super().draw(task, key)


@dataclass
class Asks(Right):
    """Asks a model for each parameter, and states a number of requests."""

    most: float = 0

    async def draw(self, task: Task, key: str) -> str:
        await task.scorer.generate(ASK, "lm")
        return await super().draw(task, key)

    def plan(self, job: PlannedJob) -> JobPlan:
        return JobPlan([RequestCount("letters", self.most)])


DRAWS = itertools.cycle("bcdcb")  # runs of three draws differ
Unlucky = drawing(lambda task, key: next(DRAWS))
Global = drawing(lambda task, key: random.choice("bcd"))
Seeds = drawing(lambda task, key: np.random.seed(task.seed) or np.random.choice([*"bcd"]))
Edits = drawing(lambda task, key: task.train[0].gold["rows"].append(key) or "b")
Boasts = changed(Proposal, lambda event: [replace(event, after=0.5, before=0.25)])
Falling = type(
    "Falling",
    (Right,),
    {"plan": lambda self, job: JobPlan([RequestCount("letters", 1000 / job.runs)])},
)

EVENTS = "test_events_follow_the_protocol"
BOUND = "test_the_proposal_can_be_bound"
EQUAL = "test_equal_seeds_yield_the_same"
RESUME = "test_every_checkpoint_continues_to_the_same_end"
SHARE = "test_the_share_is_kept"
CONSTANT = "test_a_constant_metric_shows_no_gain"
ONLY = "test_only_the_task_is_used"
REQUESTS = "test_requests_stay_within_the_plan"


@pytest.mark.parametrize(
    ("optimizer", "check", "message"),
    [
        (object, EVENTS, "has no method propose"),
        (Coroutine, EVENTS, "propose returned coroutine"),
        (changed(Proposal, lambda event: [event, event]), EVENTS, "yielded 2 Proposals"),
        (changed(Proposal, lambda event: []), EVENTS, "yielded 0 Proposals"),
        (changed(Progress, lambda event: []), EVENTS, "0 Progress, but the kit expects at least 3"),
        (with_facts(drawn={1, 2}), EVENTS, "the facts of Progress must be JSON, but drawn is {1,"),
        (with_facts(by_number={1: 2}), EVENTS, "by_number has the key 1"),
        (changed(Progress, lambda e: [replace(e, step=4)]), EVENTS, "step 4 of 3"),
        (changed(Progress, lambda e: [replace(e, step=-e.step)]), EVENTS, "must not decrease"),
        (with_values({"picker.third": "e"}), BOUND, "cannot be bound to the proposal:"),
        (with_values({"picker.fourth": "a"}), BOUND, "changes picker.fourth, but the task allows"),
        (Unlucky, EQUAL, "with the same seed"),
        (Keeps, RESUME, "resuming from checkpoint 1 of 3, the proposal has values"),
        (Forgets, RESUME, "resuming from checkpoint"),
        (Again, RESUME, "resuming from checkpoint 1 of 3 yields 3 more Progress instead of 2"),
        (Remembers, RESUME, "the method's memory has begun 2 instead of 1"),
        (Spends, SHARE, "system runs; check task.scorer.runs_left"),
        (Boasts, CONSTANT, "the metric is constant, but the proposal has 0.25 -> 0.5"),
        (Global, ONLY, "the global generator of random;"),
        (Seeds, ONLY, "the global generator of numpy.random;"),
        (Edits, ONLY, "modified an example of task.train"),
        (Asks, REQUESTS, "made 3 requests for proposals, but plan states 0"),
        (lambda: Asks(2), REQUESTS, "made 3 requests for proposals, but plan states 2"),
        (Falling, REQUESTS, "they must not decrease"),
    ],
)
def test_a_wrong_optimizer_is_caught(
    optimizer: Callable[[], Any], check: str, message: str
) -> None:
    found = failures(optimizer)
    assert message in found.get(check, f"{check} passed; failed: {found}")


def test_a_proposal_of_a_key_of_another_job_is_caught_unless_declared() -> None:
    one: Any = {"keys": lambda self: ("picker.first",), "checkpoints": 1}
    made = with_values({"picker.third": "b"})
    assert "picker.third, but the task allows only picker.first" in failures(made, **one)[BOUND]
    one["proposed_keys"] = lambda self: tuple(toy().parameters)
    assert BOUND not in failures(made, **one)


def test_what_is_declared_right_passes() -> None:
    assert failures(lambda: Asks(3)) == {}


def test_the_memory_of_a_checkpoint_does_not_hold_what_came_later() -> None:
    """Rolled back, it lacks the draws that follow: an optimizer that draws them again is right."""
    assert failures(Later) == {}
    job = OptimizerJob(toy(), Toy().metric(), Toy().train(), share=60)
    first, *_ = job.record(Later())[0]
    assert list(job.memory.state["drawn"]) == ["picker.first", "picker.second", "picker.third"]  # type: ignore[call-overload]
    assert list(job.resume(first).memory.state["drawn"]) == ["picker.first"]  # type: ignore[call-overload]


def test_a_continued_job_has_the_files_and_the_spending_of_its_checkpoint() -> None:
    class Files(Right):
        async def draw(self, task: Task, key: str) -> str:
            (task.context.memory.folder / key).write_text(key)
            return await super().draw(task, key)

    job = OptimizerJob(toy(), Toy().metric(), Toy().train(), share=60)
    checkpoints, _ = job.record(Files())
    continued = job.resume(checkpoints[0])
    assert [path.name for path in continued.memory.folder.iterdir()] == ["picker.first"]
    assert continued.spent == 8 < job.spent
    assert continued.task.scorer.runs_left == 52
    continued.run(Files())
    assert continued.spent == job.spent
