"""Choose where the examples of a run are run; refuse what cannot run there before anything is spent."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from compound.cluster.executor import RemoteExecutor
from compound.cluster.handshake import facts_of
from compound.cluster.messages import Hello, SystemFile
from compound.cluster.pool import WorkerPool
from compound.cluster.ray_transport import RayTransport
from compound.components.external_agent import ExternalAgent
from compound.engine import Engine
from compound.errors import DeclarationError
from compound.evaluation.runner import OpenExecutor
from compound.execution.budget import Meter
from compound.execution.cache import Cache
from compound.execution.executor import Executor
from compound.execution.sender import Engines
from compound.execution.trace import Call
from compound.graph.space import Weights
from compound.graph.system import System
from compound.optimization.method import Method
from compound.settings.common import RaySettings
from compound.settings.optimize import OptimizeSettings
from compound.spec.program import FileEngines, Program
from compound.storage.artifacts import is_reference

__all__ = ["check_runner", "executor_opener", "source_of"]

HERE = "remove optimize.runner to run everything in this process"


def executor_opener(
    settings: OptimizeSettings,
    system: System,
    engines: Engines | None,
    methods: Iterable[Method] = (),
) -> OpenExecutor:
    """Return a function that makes the executor of a run.

    Args:
        settings: the settings, with ``runner``.
        system: the system, bound to any configuration.
        engines: the engines of the run.
        methods: the methods of the run; used only if there is a runner.

    Raises:
        MissingExtra: the library of the runner is not installed.
        DeclarationError: workers cannot rebuild the system, or run what a method does.
    """
    if settings.runner is None:
        return Executor
    source = source_of(engines)
    check_runner(settings, system, methods)
    return RayOpener(settings.runner.ray, system, source)


def check_runner(settings: OptimizeSettings, system: System, methods: Iterable[Method]) -> None:
    """Reject a system or methods that cannot run on workers, if the settings have a ``runner``.

    Raises:
        DeclarationError: workers cannot run a component, or what a method does.
    """
    if settings.runner is not None:
        check_components(system)
        for method in methods:
            check_method(method, system)


class RayOpener:
    """Makes executors that run examples on a Ray cluster; an `OpenExecutor`.

    Args:
        settings: the cluster.
        system: the system that workers rebuild.
        source: its file.
    """

    def __init__(self, settings: RaySettings, system: System, source: SystemFile) -> None:
        self._settings, self._system, self._source = settings, system, source
        self._transport = RayTransport(settings.address, settings.cpus)

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
        settings, notify = self._settings, on_notice or (lambda _: None)
        memory = None if folder is None else str(folder.absolute())

        def open_pool() -> WorkerPool:
            facts = facts_of(self._system, Path(self._source.path).parent)
            hello = Hello(program=self._source, seed=seed, folder=memory)
            return WorkerPool(
                self._transport, settings.workers, hello, facts, notify,
                start_seconds=settings.start_seconds, max_restarts=settings.max_restarts,
            )  # fmt: skip

        assert engines is not None
        return RemoteExecutor(
            engines, self._system, open_pool, cache=cache, meter=meter, seed=seed, on_call=on_call,
            folder=folder, on_notice=on_notice,
        )  # fmt: skip


def source_of(engines: Engines | Callable[[str], Engine] | None) -> SystemFile:
    """Return the file whose engines are used.

    Raises:
        DeclarationError: the engines are Python objects, or the system was declared in Python.
    """
    owner = getattr(engines, "__self__", engines)  # of the method `Program.find_engine`
    if not isinstance(owner, Program | FileEngines) or owner.source is None:
        raise DeclarationError(
            "optimize.runner: workers rebuild a system and its engines from a YAML file, but this system "
            "or its engines were given as Python objects",
            hint=f"declare them in a file and load it with cp.load_system, without engines=…; or {HERE}",
        )
    found = owner.source
    return SystemFile(
        text=found.text,
        path=str(owner.path.absolute()),
        overrides=found.overrides,
        allow_import=found.allow_import,
        trust=found.trust,
    )


def check_components(system: System) -> None:
    """Reject a system with components that workers cannot run.

    Raises:
        DeclarationError: it has an external agent, or an adapter in a folder of this machine.
    """
    for name, component in system.components.items():
        if isinstance(component, ExternalAgent):
            raise DeclarationError(
                f"optimize.runner: component {name!r} is an external agent, which runs beside a gateway in "
                "this process",
                hint=HERE,
            )
    for key, value in system.configuration.items():
        if is_reference(value):
            raise DeclarationError(
                f"optimize.runner: {key} is a folder of this machine, which workers do not have", hint=HERE
            )


def check_method(method: Method, system: System) -> None:
    """Reject a method that trains weights, whose trainer and sampler share this process.

    Raises:
        DeclarationError: it does.
    """
    for job in (*method.jobs, *([method.opening] if method.opening is not None else [])):
        trained = [key for key in job.keys if isinstance(system.parameters[key], Weights)]
        if trained:
            raise DeclarationError(
                f"optimize.runner: optimizer {job.optimizer!r} trains {trained[0]} in this process",
                hint=f"choose a method that trains no weights; or {HERE}",
            )
