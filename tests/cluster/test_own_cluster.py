"""The address ``auto`` is the cluster of the user, never that of another user."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from compound.cluster.ray_cluster import ClusterUnavailable, RayCluster, own_cluster


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


def test_without_a_cluster_nothing_is_connected(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray, addresses = ModuleType("ray"), list[str]()
    ray.is_initialized = lambda: False  # type: ignore[attr-defined]
    ray.init = lambda *, address, **_: addresses.append(address)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", ray)
    asyncio.run(RayCluster("auto").connect())
    file.unlink()
    with pytest.raises(ClusterUnavailable, match="no Ray cluster of this user was found") as caught:
        asyncio.run(RayCluster("auto").connect())
    assert "ray start --head" in caught.value.hint
    assert addresses == ["127.0.0.1:6379"]
