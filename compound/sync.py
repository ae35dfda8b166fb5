"""The sync door: run a system once, from ordinary code."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from compound.calls import Engines
from compound.engines import find_engine
from compound.executor import Executor
from compound.system import System
from compound.trace import Trace


def run(
    system: System,
    inputs: Mapping[str, Any],
    *,
    engines: Engines | None = None,
    seed: int = 0,
    sample: int = 0,
) -> Trace:
    """Run ``system`` on one set of inputs and return its trace; use `Executor` inside async code.

    ``engines`` gives models by name; without it, names are resolved as in YAML (``smollm2``,
    ``openai/gpt-4o-mini`` …).
    """

    async def once() -> Trace:
        executor = Executor(engines or find_engine, seed=seed)
        try:
            return await executor.run(system, inputs, sample=sample)
        finally:
            await executor.aclose()

    return asyncio.run(once())
