"""Fake servers that stand for the replicas of a fleet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fake_vllm as fake
from compound.engine import Adapter
from compound.storage.artifacts import folder_digest

Servers = list[fake.FakeVLLM]


@pytest.fixture
def servers() -> Iterator[Servers]:
    """Return three running servers of one model."""
    made = [fake.FakeVLLM().serve() for _ in range(3)]
    yield made
    for server in made:
        if not server.stopping.is_set():
            server.stop()


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Adapter]:
    """Write adapters as `fake_vllm.write_adapter` does."""

    def make(bias: float, before: float | None = 0.0, **settings: Any) -> Adapter:
        folder = tmp_path / f"adapter-{len(list(tmp_path.iterdir()))}"
        fake.write_adapter(folder, bias, before, **settings)
        return Adapter(str(folder), folder_digest(folder))

    return make
