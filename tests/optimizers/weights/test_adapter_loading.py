"""Adapters of a step are loaded before its first call, together, where an engine supports it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import compound as cp
from compound.core.engine import Adapter, AdapterEngine
from compound.core.errors import CompoundError, DeclarationError, TransientError
from compound.graph.component import Input, Output
from compound.graph.space import LoRA
from compound.optimizers.weights.bases import load_adapters
from compound.testing import ScriptedLM

AGENTS = ("a", "b", "c")


class Server(ScriptedLM):
    """An engine that loads adapters; notes which, and how many were requested at the same time."""

    def __init__(self, max_loras: int = 4, error: CompoundError | None = None) -> None:
        super().__init__(lambda _: "")
        self.max_loras, self._error = max_loras, error
        self.admitted: list[Adapter] = []
        self._open = self.together = 0

    async def admit(self, adapter: Adapter) -> None:
        self.admitted.append(adapter)
        self._open += 1
        self.together = max(self.together, self._open)
        await asyncio.sleep(0)
        self._open -= 1
        if self._error is not None:
            raise self._error


def chain(**lms: str) -> cp.System:
    text: Input | Output = Input("x")
    for name in AGENTS:
        text = cp.LLM(name, lm=lms.get(name), weights=LoRA())(x=text)
    return cp.System("chain", outputs={"y": text}, lm="lm")


def weights(**digests: str) -> dict[str, Any]:
    return {f"{name}.weights": {"path": f"to/{d}", "sha256": d * 64} for name, d in digests.items()}


def load(system: cp.System, folder: Path, **engines: cp.ext.Engine) -> None:
    asyncio.run(load_adapters(system, AGENTS, lambda lm: engines[lm], folder))


def test_distinct_adapters_of_an_engine_are_requested_together(tmp_path: Path) -> None:
    one, other = Server(), Server()
    assert isinstance(one, AdapterEngine)
    system = chain(c="other").bind(weights(a="1", b="1", c="2"))
    load(system, tmp_path, lm=one, other=other)
    assert one.admitted == [Adapter(str(tmp_path / "to" / "1"), "1" * 64)]
    assert other.admitted == [Adapter(str(tmp_path / "to" / "2"), "2" * 64)]
    server = Server()
    load(chain().bind(weights(a="1", b="2", c="3")), tmp_path, lm=server)
    assert server.together == len(server.admitted) == 3


def test_components_without_an_adapter_load_none(tmp_path: Path) -> None:
    server = Server()
    load(chain().bind(weights(b="1")), tmp_path, lm=server)
    assert [adapter.sha256 for adapter in server.admitted] == ["1" * 64]


def test_more_adapters_than_an_engine_holds_are_not_loaded_in_advance(tmp_path: Path) -> None:
    """Each would replace one that is needed as soon."""
    server = Server(max_loras=2)
    load(chain().bind(weights(a="1", b="2", c="3")), tmp_path, lm=server)
    assert server.admitted == []


def test_engines_that_cannot_load_in_advance_are_skipped(tmp_path: Path) -> None:
    server, plain = Server(), ScriptedLM(lambda _: "")
    assert not isinstance(plain, AdapterEngine)
    load(chain(b="plain").bind(weights(a="1", b="2")), tmp_path, lm=server, plain=plain)
    assert [adapter.sha256 for adapter in server.admitted] == ["1" * 64]


@pytest.mark.parametrize("error", [TransientError("gone"), DeclarationError("no adapters")])
def test_errors_are_left_to_the_calls_that_need_the_adapter(
    tmp_path: Path, error: CompoundError
) -> None:
    server = Server(error=error)
    load(chain().bind(weights(a="1", b="2")), tmp_path, lm=server)
    assert len(server.admitted) == 2
