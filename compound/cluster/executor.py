"""An executor whose calls are computed by workers, with results equal to those of one process.

The graph, the cache, the budget, rate limits and requests to servers stay in this process. Workers
compute calls of components without a model, and the answers of models that run in the process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, TypeVar

from pydantic import TypeAdapter

from compound.cluster.handshake import SAME, WorkerMismatch
from compound.cluster.messages import Generate, MakeCall
from compound.cluster.pool import RESUME, WorkerPool
from compound.cluster.wire import NotSendable, result_from_wire, values_to_wire
from compound.components.external_agent import ExternalAgent
from compound.core.engine import Completion, Engine, Request
from compound.core.storage.artifacts import is_reference
from compound.execution.caller import Caller, PendingCall
from compound.execution.executor import Executor
from compound.execution.sender import Engines, find_in
from compound.execution.trace import CallResult
from compound.graph.component import Component
from compound.graph.json_values import is_json
from compound.graph.registry.engines import has_stable_name
from compound.graph.system import System

T = TypeVar("T")
COMPLETION = TypeAdapter(Completion)


class RemoteExecutor(Executor):
    """Runs one system with workers.

    The system ``base`` may have any configuration; components of other systems run here. The
    workers that ``open_pool`` returns start with the first call. ``options`` are those of `Executor`.
    """

    def __init__(
        self,
        engines: Engines,
        base: System,
        open_pool: Callable[[], WorkerPool],
        **options: Any,  # noqa: ANN401 - arguments of `Executor`
    ) -> None:
        self._workers = _Workers(open_pool)
        find = find_in(engines)
        super().__init__(lambda lm: self._workers.placed(lm, find(lm)), **options)
        self._caller = WorkerCaller(self._caller, base.components, self._workers)

    @property
    def pool(self) -> WorkerPool:
        """The workers."""
        return self._workers.pool

    async def aclose(self) -> None:
        """End the workers, and close the engines of this process."""
        await self._workers.aclose()
        await super().aclose()


class _Workers:
    """The workers of an executor and its copies with other budgets, opened at the first call."""

    def __init__(self, open_pool: Callable[[], WorkerPool]) -> None:
        self._open_pool = open_pool
        self._pool: WorkerPool | None = None

    @property
    def pool(self) -> WorkerPool:
        if self._pool is None:
            self._pool = self._open_pool()
        return self._pool

    def placed(self, lm: str, engine: Engine) -> Engine:
        return engine if engine.remote else WorkerEngine(lm, engine, self)

    async def aclose(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            await pool.aclose()


class WorkerEngine:
    """A model in the process, of which each worker has one; other members are those of its engine.

    Requests with adapters or images, and streams, are answered in this process.
    """

    def __init__(self, lm: str, engine: Engine, workers: _Workers) -> None:
        self._lm, self._engine, self._workers = lm, engine, workers
        self.stable_name = has_stable_name(engine)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - a member of any engine
        return getattr(self._engine, name)

    @property
    def concurrency(self) -> int:
        """Maximum number of requests in flight over all workers."""
        return self._engine.concurrency * self._workers.pool.size

    async def warm_up(self) -> None:
        """Start the workers."""
        await self._workers.pool.start()

    async def generate(self, request: Request) -> Completion:
        """Answer a request on a worker."""
        if request.adapter is not None or any(m.images for m in request.messages):
            return await self._engine.generate(request)
        message = Generate(lm=self._lm, request=asdict(request))
        found = await self._workers.pool.run(message, f"a request to {self._lm}")
        return _decoded(lambda: COMPLETION.validate_python(found))


class WorkerCaller(Caller):
    """Makes the calls of a system on workers where they can compute them."""

    def __init__(
        self, caller: Caller, components: Mapping[str, Component], workers: _Workers
    ) -> None:
        self.__dict__.update(vars(caller))
        self._versions = {name: component.version for name, component in components.items()}
        self._workers = workers
        self._here: set[str] = set()  # names of components that workers declined

    async def execute(self, pending: PendingCall, key: str) -> CallResult:
        """Make a call on a worker, or here if a worker cannot."""
        pool, message = self._workers.pool, self._message(pending)
        # also for a call made here: nothing is spent before all workers fit
        await self.meter.before_deadline(pool.start())
        if message is not None:
            what = f"{pending.address!r} of example {pending.stream[2]!r}"
            found = await self.meter.before_deadline(pool.run(message, what))
            if found is not None:
                ports = pending.component.outputs
                return _decoded(lambda: result_from_wire(found, ports, key))
            self._here.add(pending.component.name)
        return await super().execute(pending, key)

    def _message(self, pending: PendingCall) -> MakeCall | None:
        """Return what to send to a worker; ``None`` for a call to make here."""
        component, values = pending.component, pending.values
        if (
            not pending.inputs  # such as a hyperparameter, which computes nothing
            or "lm" in values
            or isinstance(component, ExternalAgent)  # which would start before it asks its model
            or component.name in self._here
            or self._versions.get(component.name) != component.version
            or pending.ports != component.outputs
            or any(is_reference(value) or not is_json(value) for value in values.values())
        ):
            return None
        try:
            inputs = values_to_wire(pending.inputs, component.inputs or {})
        except NotSendable:
            return None
        return MakeCall(
            component=component.name,
            address=pending.address,
            seed=pending.seed,
            values=dict(values),
            inputs=inputs,
        )


def _decoded(decode: Callable[[], T]) -> T:
    try:
        return decode()
    except Exception as error:  # its fields may hold any JSON
        raise WorkerMismatch(
            f"a worker returned a result that does not fit the system: {type(error).__name__}: {error}",
            hint=f"{SAME}; {RESUME}",
        ) from error
