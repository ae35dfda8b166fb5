"""Requests of the tests of the vLLM engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from compound.components.engines.vllm.engine import VLLMEngine
from compound.engine import Completion, Message, Request


def request(text: str = "What is 2 + 2?", **settings: Any) -> Request:
    return Request((Message("user", text),), **settings)


def ask(lm: VLLMEngine, *requests: Request) -> list[Completion]:
    """Make requests sequentially, and close the engine."""

    async def run() -> list[Completion]:
        try:
            return [await lm.generate(each) for each in requests or (request(),)]
        finally:
            await lm.aclose()

    return asyncio.run(run())


async def until(holds: Callable[[], bool]) -> None:
    for _ in range(1500):
        if holds():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("the condition did not become true within 30 s")
