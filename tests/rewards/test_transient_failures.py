"""Transient failures are no evidence about an output: neither in forks nor in the runs of a comparison."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from compound import Choice, Example, Executor, Input, Port, System
from compound.core.errors import CallError, OutputTypeError, ParseError, RateLimited, TransientError
from compound.evaluation.evaluate import EvaluationRules, score
from compound.execution.cache import MemoryCache
from compound.ext import CallContext, Operation
from compound.metrics import custom
from compound.rewards.candidates import Sampling
from compound.rewards.pairs import Collection, collect

METRIC = custom(lambda outputs, _: 1.0)  # every output is equally good


class Pick(Operation):
    kind = "pick"
    cacheable = True
    name = "pick"
    inputs = {"x": Port(int)}  # noqa: RUF012
    outputs = {"y": Port(int)}  # noqa: RUF012
    settings = {"option": Choice(0, 1, 2, 3)}  # noqa: RUF012
    version = "pick"

    async def run(
        self, inputs: Mapping[str, object], values: Mapping[str, object], call: CallContext
    ) -> Mapping[str, object]:
        return {"y": values["option"]}


class Server(Operation):
    """Fails for some of its inputs a number of times."""

    kind = "server"
    cacheable = True
    name = "server"
    inputs = {"y": Port(int)}  # noqa: RUF012
    outputs = {"z": Port(int)}  # noqa: RUF012
    version = "server"

    def __init__(self, *, random: bool = False) -> None:
        self.failures: dict[int, int] = {}
        self.error: CallError = TransientError("503")
        self.attempts: Counter[object] = Counter()
        self.random = random

    def deterministic(self, values: Mapping[str, object]) -> bool:
        return not self.random

    async def run(
        self, inputs: Mapping[str, object], values: Mapping[str, object], call: CallContext
    ) -> Mapping[str, object]:
        y: Any = inputs["y"]
        self.attempts[y] += 1
        if self.attempts[y] <= self.failures.get(y, 0):
            raise self.error
        return {"z": y}


def collected(server: Server, failures: Mapping[int, int], *, cache: bool = True) -> Collection:
    system = System("s", outputs={"z": server(y=Pick()(x=Input("x", int)))})
    executor = Executor(cache=MemoryCache() if cache else None)

    async def run() -> Collection:
        example = Example("e", {"x": 0}, {})
        trace = executor.settle(await executor.run(system, example.inputs, example="e"))
        traced = [(example, await score(executor, trace, METRIC, example, EvaluationRules()))]
        server.failures.update(failures)
        server.attempts.clear()
        return await collect(executor, system, traced, ["pick"], METRIC, sampling=Sampling(3, 2, 3))

    return asyncio.run(run())


def outputs(found: Collection) -> list[object]:
    return [candidate.outputs["y"] for draw in found.draws for candidate in draw.candidates]


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("random", [True, False])
@pytest.mark.parametrize("error", [TransientError("503"), RateLimited("429")])
class TestCollecting:
    def test_an_outage_is_no_preference(self, error: CallError, random: bool, cache: bool) -> None:
        """A server that was gone for one output gave pairs of the full gap, and they stayed in the buffer."""
        server = Server(random=random)
        server.error = error
        found = collected(server, {2: 100}, cache=cache)
        assert sorted(map(str, outputs(found))) == ["0", "1", "3"]
        assert found.pairs == ()
        assert found.lost == 1
        assert {
            reward for draw in found.draws for c in draw.candidates for reward in c.rewards
        } == {1.0}

    def test_it_is_tried_once_more(self, error: CallError, random: bool, cache: bool) -> None:
        server = Server(random=random)
        server.error = error
        found = collected(server, {2: 1}, cache=cache)
        assert sorted(map(str, outputs(found))) == ["0", "1", "2", "3"]
        assert (found.pairs, found.lost) == ((), 0)


@pytest.mark.parametrize("error", [ParseError("?"), OutputTypeError("?"), CallError("broken")])
def test_a_failure_that_the_output_causes_is_evidence(error: CallError) -> None:
    server = Server()
    server.error = error
    found = collected(server, {2: 100})
    assert {(pair.chosen["y"], pair.rejected["y"], pair.gap) for pair in found.pairs} == {
        (0, 2, 1.0),
        (1, 2, 1.0),
        (3, 2, 1.0),
    }
    assert found.lost == 0
