"""An executor that runs whole examples on workers, with results equal to those of one process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from compound.cluster.handshake import SAME, WorkerMismatch
from compound.cluster.messages import Document, ForkRequest, Start
from compound.cluster.pool import RESUME, WorkerPool
from compound.cluster.services import ExampleJob
from compound.cluster.wire import CallCodec, values_to_wire
from compound.core.errors import CompoundError
from compound.core.storage.artifacts import is_reference
from compound.execution.executor import Executor
from compound.execution.graph_run import Fork, RunState
from compound.execution.sender import Engines
from compound.execution.trace import Trace
from compound.graph.system import System

T = TypeVar("T")


class RemoteExecutor(Executor):
    """Runs the examples of one system on workers, and everything else in this process.

    Cache, budget, admission to servers, metrics and proposal requests are those of this process. A
    run that workers cannot rebuild is made in this process, too: one of a part of the system, or of
    a configuration that refers to stored folders. So is a resampled call, which only training needs.
    """

    def __init__(
        self,
        engines: Engines,
        base: System,
        open_pool: Callable[[], WorkerPool],
        **options: Any,  # noqa: ANN401 - arguments of `Executor`
    ) -> None:
        super().__init__(engines, **options)
        self._base, self._open_pool = base.identity, open_pool
        self._pools: list[WorkerPool] = []  # shared by copies with other budgets; at most one

    @property
    def pool(self) -> WorkerPool:
        """The workers, which start with the first run."""
        if not self._pools:
            self._pools.append(self._open_pool())
        return self._pools[0]

    async def execute(self, run: RunState, inputs: Mapping[str, object]) -> Trace:
        """Execute a validated run on a worker."""
        if run.listener is not None or not self._can_send(run.system):
            return await super().execute(run, inputs)
        codec = CallCodec(run.system)
        start = Start(
            job=self.pool.next_job(),
            configuration=run.system.configuration.to_json(),
            example=run.example,
            sample=run.sample,
            seed=run.seed,
            caches=self._caller.caches,
            shares=self._caller.shares,
            priced=self.meter.budget.cost is not None,
            bypass=run.bypass,
            inputs=values_to_wire(inputs, codec.inputs(), "inputs"),
            settings={name: _plain(values, name) for name, values in run.settings.items()},
            samples=dict(run.samples),
            fork=None if run.fork is None else _fork(codec, run.fork),
        )
        future: asyncio.Future[Document] = asyncio.get_running_loop().create_future()
        job = ExampleJob(start, run.system, codec, self._caller, self.meter, future)
        async with self.meter.deadline():
            found = await self.pool.run(job)
        known = Trace(run.example, "", run.seed, run.sample, dict(inputs), ())
        trace = _read(lambda: codec.trace_from_wire(found, known))
        _check(trace, run.system)
        if self._on_call is not None:
            for call in trace.calls:
                self._on_call(call)
        return trace

    async def aclose(self) -> None:
        """End the workers, and close the engines of this process."""
        while self._pools:
            await self._pools.pop().aclose()
        await super().aclose()

    def _can_send(self, system: System) -> bool:
        """Return whether workers can rebuild a system."""
        return system.identity == self._base and not any(
            map(is_reference, system.configuration.values())
        )


def _fork(codec: CallCodec, fork: Fork) -> ForkRequest:
    component = fork.kept[fork.address].component
    outputs = fork.outputs
    if outputs is not None:
        outputs = values_to_wire(outputs, codec.outputs_of(component), fork.address)
    return ForkRequest(
        calls=[codec.to_wire(call) for call in fork.kept.values()],
        address=fork.address,
        outputs=outputs,
        resample=fork.resample,
        settings=_plain(fork.settings, fork.address),
    )


def _plain(settings: Mapping[str, object], where: str) -> Document:
    """Return settings as JSON types, or raise if they are anything else."""

    def undeclared(name: str) -> object:
        raise KeyError(name)

    sent = values_to_wire(settings, undeclared, where)
    return {name: cast("list[object]", item)[0] for name, item in sent.items()}


def _read(decode: Callable[[], T]) -> T:
    try:
        return decode()
    except Exception as error:  # its fields may hold any JSON
        raise _mismatch(f"{type(error).__name__}: {error}") from error


def _check(trace: Trace, system: System) -> None:
    """Reject a trace of anything else than what was asked for."""
    if trace.system != system.identity:
        raise _mismatch("it is of another system")
    if trace.configuration != system.configuration.digest:
        raise _mismatch("it is of another configuration")


def _mismatch(what: str) -> CompoundError:
    return WorkerMismatch(
        f"a worker returned a trace that does not fit the system: {what}", hint=f"{SAME}; {RESUME}"
    )
