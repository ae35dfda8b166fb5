"""Errors of Ray without Ray: a module takes its place."""

from __future__ import annotations

import asyncio
import sys
from types import ModuleType

import pytest

from compound.cluster.messages import WorkerLost
from compound.cluster.ray_cluster import ClusterUnavailable, RayTransport, _RayConnection


class RayError(Exception):
    pass


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    found, exceptions = ModuleType("ray"), ModuleType("ray.exceptions")
    exceptions.RayError = RayError  # type: ignore[attr-defined]
    found.is_initialized = lambda: False  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", found)
    monkeypatch.setitem(sys.modules, "ray.exceptions", exceptions)
    return found


TEXTS = pytest.mark.parametrize(
    ("text", "first", "last"),
    [("", "{}", "{}"), ("  \n ", "{}", "{}"), ("refused\nby the head\n", "refused", "by the head")],
)


@TEXTS
def test_a_dead_address_is_reported(ray: ModuleType, text: str, first: str, last: str) -> None:
    def init(**_: object) -> None:
        raise ConnectionError(text)

    ray.init = init  # type: ignore[attr-defined]
    with pytest.raises(ClusterUnavailable) as caught:
        asyncio.run(RayTransport("head:6379").connect(1))
    assert (
        caught.value.message
        == f"no Ray cluster at address 'head:6379': {first.format('ConnectionError')}"
    )


@TEXTS
def test_a_lost_actor_is_reported(ray: ModuleType, text: str, first: str, last: str) -> None:
    class Method:
        async def remote(self, *_: object) -> None:
            raise RayError(text)

    class Actor:
        exchange = Method()

    with pytest.raises(WorkerLost) as caught:
        asyncio.run(_RayConnection(Actor()).receive())
    assert str(caught.value) == last.format("RayError")
