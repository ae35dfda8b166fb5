"""Load the adapters of a step into engines before its first call.

A vLLM server loads an adapter while none of its requests is in flight. If adapters were loaded at their first
use, each component of a system would wait for all calls of the components before it. Loaded together at the
start of a step, they wait once, when nothing is in flight.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path

from compound.engine import Adapter, AdapterEngine, Engine
from compound.errors import CompoundError
from compound.execution.schedule import setting_values
from compound.graph.system import System
from compound.narrowing import entry
from compound.storage.artifacts import is_reference, with_absolute_path


async def load_adapters(
    system: System, components: Iterable[str], engine_of: Callable[[str], Engine], folder: Path
) -> None:
    """Load the adapters of some components into the engines that support it, all of one engine together.

    An engine that holds fewer adapters than the components have loads them at their first use. So does an
    engine that fails now; the call that needs the adapter then raises the error.

    Args:
        system: the system, bound to the weights.
        components: names of the components.
        engine_of: returns the engine of a model.
        folder: the folder that paths of adapters are relative to.
    """
    engines: dict[str, AdapterEngine] = {}
    wanted: dict[str, dict[str, Adapter]] = {}
    for name in components:
        values = setting_values(system.components[name], system)
        lm, weights = entry(values, "lm", str), system.configuration[f"{name}.weights"]
        engine = engine_of(lm)
        if isinstance(engine, AdapterEngine) and is_reference(weights):
            adapter = Adapter(**with_absolute_path(weights, folder))
            engines[lm] = engine
            wanted.setdefault(lm, {})[adapter.sha256] = adapter
    await asyncio.gather(
        *(
            _load(engine, adapter)
            for lm, engine in engines.items()
            for adapter in wanted[lm].values()
            if len(wanted[lm]) <= engine.max_loras
        )
    )


async def _load(engine: AdapterEngine, adapter: Adapter) -> None:
    with contextlib.suppress(CompoundError):
        await engine.admit(adapter)
