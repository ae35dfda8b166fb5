"""Servers and adapters of the tests of fleets."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import fake_vllm as fake
from compound.core.engine import Adapter
from vllm_requests import new_adapter, running


@pytest.fixture
def servers() -> Iterator[list[fake.FakeVLLM]]:
    with running(3) as found:
        yield found


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Adapter]:
    return functools.partial(new_adapter, tmp_path)
