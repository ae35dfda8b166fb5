"""Interface of executors for evaluations: run systems and fork traces, here or on other machines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from compound.execution.budget import Meter
from compound.execution.cache import Cache
from compound.execution.executor import Executor
from compound.execution.graph_run import ComponentSettings
from compound.execution.observers.events import RunListener
from compound.execution.sender import Engines
from compound.execution.trace import Call, Trace
from compound.graph.system import System


class Runner(Protocol):
    """Runs whole examples.

    Implemented by `compound.execution.executor.Executor` in this process, and by
    `compound.cluster.executor.RemoteExecutor` on workers. Implementations return equal traces.
    """

    async def run(
        self,
        system: System,
        inputs: Mapping[str, object],
        *,
        example: str = "",
        sample: int = 0,
        cache: bool = True,
        settings: ComponentSettings | None = None,
        samples: Mapping[str, int] | None = None,
        listener: RunListener | None = None,
    ) -> Trace:
        """Run a system once; see `Executor.run`."""
        ...

    async def fork(
        self,
        system: System,
        trace: Trace,
        address: str,
        *,
        outputs: Mapping[str, object] | None = None,
        resample: int | None = None,
        settings: Mapping[str, object] | None = None,
        sample: int | None = None,
        others: ComponentSettings | None = None,
    ) -> Trace:
        """Rerun only the descendants of one call of a trace, with that call changed; see `Executor.fork`."""
        ...


class OpenExecutor(Protocol):
    """Makes the executor of a run; the class `Executor` is one."""

    def __call__(
        self,
        engines: Engines | None = None,
        *,
        cache: Cache | None = None,
        meter: Meter | None = None,
        seed: int = 0,
        on_call: Callable[[Call], None] | None = None,
        folder: Path | None = None,
        on_notice: Callable[[str], object] | None = None,
    ) -> Executor:
        """Return an executor; see `Executor` for the arguments."""
        ...
