"""Choose where the calls of a run are made; refuse what cannot run there before anything is spent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from compound.cluster.executor import RemoteExecutor
from compound.cluster.handshake import facts_of
from compound.cluster.messages import Hello
from compound.cluster.pool import WorkerPool
from compound.cluster.ray_cluster import RayTransport
from compound.core.engine import Engine
from compound.core.errors import DeclarationError
from compound.execution.executor import Executor
from compound.execution.sender import Engines
from compound.graph.space import Weights
from compound.graph.system import System
from compound.optimization.method import Method, OpenExecutor
from compound.optimization.settings.base import RaySettings
from compound.optimization.settings.optimize import OptimizeSettings
from compound.yaml.program import FileEngines, SystemFile

__all__ = ["check_runner", "executor_opener", "source_of"]

HERE = "remove optimize.runner to run everything in this process"


def executor_opener(
    settings: OptimizeSettings,
    system: System,
    engines: Engines | None,
    method: Method | None = None,
) -> OpenExecutor:
    """Return a function that makes the executor of a run.

    Raises:
        MissingExtra: the library of the runner is not installed.
        DeclarationError: workers cannot rebuild the system, or run what a method does.
    """
    if settings.runner is None:
        return Executor
    source = source_of(engines)
    check_runner(settings, system, method)
    return _ray_opener(settings.runner.ray, system, source)


def check_runner(settings: OptimizeSettings, system: System, method: Method | None) -> None:
    """Reject what cannot run on workers, if the settings have a ``runner``.

    Raises:
        DeclarationError: a method trains weights, whose trainer and sampler share this process.
    """
    if settings.runner is None:
        return
    for job in (*method.jobs, method.opening) if method is not None else ():
        keys = () if job is None else job.keys
        trained = [key for key in keys if isinstance(system.parameters[key], Weights)]
        if job is not None and trained:
            raise DeclarationError(
                f"optimize.runner: optimizer {job.optimizer!r} trains {trained[0]} in this process",
                hint=f"choose a method that trains no weights; or {HERE}",
            )


def _ray_opener(settings: RaySettings, system: System, source: SystemFile) -> OpenExecutor:
    """Return a function that makes executors which make calls on a Ray cluster."""
    transport = RayTransport(settings.address, settings.cpus)

    def open_executor(
        engines: Engines,
        *,
        on_notice: Callable[[str], object] | None = None,
        **options: Any,  # noqa: ANN401 - the other arguments of `Executor`
    ) -> Executor:
        def open_pool() -> WorkerPool:
            return WorkerPool(
                transport,
                settings.workers,
                Hello(program=source),
                facts_of(system, Path(source.path).parent),
                on_notice or (lambda _: None),
                start_seconds=settings.start_seconds,
                max_restarts=settings.max_restarts,
            )

        return RemoteExecutor(engines, system, open_pool, on_notice=on_notice, **options)

    return open_executor


def source_of(engines: Engines | Callable[[str], Engine] | None) -> SystemFile:
    """Return the file whose engines are used.

    Raises:
        DeclarationError: the engines are Python objects, or the system was declared in Python.
    """
    if not isinstance(engines, FileEngines):
        raise DeclarationError(
            "optimize.runner: workers rebuild a system and its engines from a YAML file, but this system "
            "or its engines were given as Python objects",
            hint=f"declare them in a file and load it with cp.load_system, without engines=…; or {HERE}",
        )
    return engines.source
