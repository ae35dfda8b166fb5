"""Connections to a cluster of Ray without Ray, whose module is replaced, and the cluster that is `auto`."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from compound.cluster.messages import WorkerLost
from compound.cluster.ray_cluster import (
    ClusterUnavailable,
    RayCluster,
    RayTransport,
    _RayConnection,
    own_cluster,
)


class RayError(Exception):
    pass


class OutOfMemoryError(RayError):
    pass


@pytest.fixture(autouse=True)
def ray(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    found, exceptions = ModuleType("ray"), ModuleType("ray.exceptions")
    exceptions.RayError = RayError  # type: ignore[attr-defined]
    exceptions.OutOfMemoryError = OutOfMemoryError  # type: ignore[attr-defined]
    found.is_initialized = lambda: False  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", found)
    monkeypatch.setitem(sys.modules, "ray.exceptions", exceptions)
    return found


def connection(error: Exception) -> _RayConnection:
    """Return a connection to an actor whose calls fail."""

    class Method:
        async def remote(self, *_: object) -> None:
            raise error

    return _RayConnection(SimpleNamespace(call=Method()))


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


def test_a_worker_that_ran_out_of_memory_is_reported_in_a_few_words() -> None:
    with pytest.raises(WorkerLost, match="^its machine ran out of memory$"):
        asyncio.run(connection(OutOfMemoryError("a page of advice")).call("x"))


@TEXTS
def test_a_lost_actor_is_reported(text: str, first: str, last: str) -> None:
    with pytest.raises(WorkerLost) as caught:
        asyncio.run(connection(RayError(text)).call("x"))
    assert str(caught.value) == last.format("RayError")


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file that ``ray start`` writes."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    path = tmp_path / "ray" / "ray_current_cluster"
    path.parent.mkdir()
    path.write_text("127.0.0.1:6379\n")
    return path


def test_it_is_that_of_the_environment_or_of_ray_start(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert own_cluster() == "127.0.0.1:6379"
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert own_cluster() == "head:6379"


def test_the_file_of_another_user_is_not_used(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: file.stat().st_uid + 1)
    assert own_cluster() is None


@pytest.mark.parametrize("kind", ["missing", "link", "pipe", "folder"])
def test_only_a_file_is_read(file: Path, kind: str) -> None:
    target = file.rename(file.with_name("target"))
    if kind == "link":
        file.symlink_to(target)
    elif kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    assert own_cluster() is None


def test_without_a_cluster_nothing_is_connected(file: Path, ray: ModuleType) -> None:
    addresses = list[str]()
    ray.init = lambda *, address, **_: addresses.append(address)  # type: ignore[attr-defined]
    asyncio.run(RayCluster("auto").connect())
    file.unlink()
    with pytest.raises(ClusterUnavailable, match="no Ray cluster of this user was found") as caught:
        asyncio.run(RayCluster("auto").connect())
    assert "ray start --head" in caught.value.hint
    assert addresses == ["127.0.0.1:6379"]
