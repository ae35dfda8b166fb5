"""Adapters, and servers and processes that stand for vLLM."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fake_vllm as fake
from vllm_requests import new_adapter, replace_vllm, running


@pytest.fixture
def write(tmp_path: Path) -> Any:
    """Write adapters as `vllm_requests.new_adapter` does."""
    return functools.partial(new_adapter, tmp_path)


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace the command ``vllm``; return the file that lists the started processes."""
    return replace_vllm(tmp_path / "told", monkeypatch)


@pytest.fixture
def servers() -> Iterator[list[fake.FakeVLLM]]:
    with running(3) as found:
        yield found
