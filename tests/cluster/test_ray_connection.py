"""The connection to an actor of Ray, without Ray: calls that start and return in any order."""

from __future__ import annotations

import asyncio
import random
import sys
from types import ModuleType

import pytest

from compound.cluster import ray_cluster
from compound.cluster.messages import WorkerConnection, WorkerLost
from compound.cluster.ray_cluster import WorkerActor, _RayConnection


@pytest.fixture(autouse=True)
def _ray(monkeypatch: pytest.MonkeyPatch) -> None:
    exceptions = ModuleType("ray.exceptions")
    exceptions.RayError = ZeroDivisionError  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    monkeypatch.setitem(sys.modules, "ray.exceptions", exceptions)


class Actor:
    """An actor whose calls are delayed by random numbers of turns of the event loop, in both directions."""

    def __init__(self, seed: int) -> None:
        self._worker, self._random = WorkerActor(), random.Random(seed)
        self.exchange = self
        self.calls = 0

    def remote(self, number: int, text: str) -> asyncio.Task[list[tuple[int, str]]]:
        self.calls += 1
        return asyncio.create_task(self._run(number, text))

    async def _run(self, number: int, text: str) -> list[tuple[int, str]]:
        await self._wait()
        found = await self._worker.exchange(number, text)
        await self._wait()
        return found

    async def _wait(self) -> None:
        for _ in range(self._random.randrange(20)):
            await asyncio.sleep(0)


@pytest.mark.parametrize("seed", range(20))
def test_texts_arrive_once_and_in_order_in_both_directions(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    received = list[str]()

    async def serve(connection: WorkerConnection) -> None:
        """Answer each text with two, and send others in between."""
        while True:
            received.append(await connection.receive())
            await connection.send(f"{received[-1]}a")
            await asyncio.sleep(0)
            await connection.send(f"{received[-1]}b")

    async def work() -> list[str]:
        connection = _RayConnection(Actor(seed))

        async def send() -> None:
            for number in range(50):
                await connection.send(str(number))
                if number % 7 == 0:
                    await asyncio.sleep(0.002)

        sending = asyncio.create_task(send())
        found = [await connection.receive() for _ in range(100)]
        await sending
        return found

    monkeypatch.setattr(ray_cluster, "serve", serve)
    expected = [str(number) for number in range(50)]
    assert asyncio.run(asyncio.wait_for(work(), 120)) == [
        text + each for text in expected for each in ("a", "b")
    ]
    assert received == expected


def test_a_question_and_its_reply_take_one_call_each(monkeypatch: pytest.MonkeyPatch) -> None:
    async def serve(connection: WorkerConnection) -> None:
        while True:
            await connection.send(await connection.receive())

    async def work() -> int:
        actor = Actor(0)
        connection = _RayConnection(actor)
        for number in range(10):
            await connection.send(str(number))
            assert await connection.receive() == str(number)
        return actor.calls

    monkeypatch.setattr(ray_cluster, "serve", serve)
    assert asyncio.run(work()) == 10


def test_an_error_of_the_worker_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    async def serve(connection: WorkerConnection) -> None:
        await connection.receive()
        raise ZeroDivisionError("of the worker")

    async def work() -> None:
        connection = _RayConnection(Actor(0))
        await connection.send("x")
        await connection.receive()

    monkeypatch.setattr(ray_cluster, "serve", serve)
    with pytest.raises(WorkerLost, match="of the worker"):
        asyncio.run(asyncio.wait_for(work(), 120))
