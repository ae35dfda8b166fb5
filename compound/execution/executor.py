"""Executor: runs systems on examples, forks traces, resamples calls, and charges them to a budget.

How the calls of one run are made is described in `compound.execution.graph_run`.
"""

from __future__ import annotations

import asyncio
import copy
import time
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

from compound.core.engine import Completion, Engine, Request
from compound.core.errors import DeclarationError, first_leaf, suggest_name
from compound.core.example import Values
from compound.core.narrowing import report_wrong_arguments
from compound.core.security.sanitize import remember_environment, replace_surrogates
from compound.execution.budget import Meter
from compound.execution.cache import Cache
from compound.execution.caller import Caller, PendingCall, TokensOf
from compound.execution.exchange import recording
from compound.execution.graph_run import ComponentSettings, GraphRun, RunState, make_call, make_fork
from compound.execution.observers import RunFacts, RunListener, traced
from compound.execution.schedule import ExecutionPlan, prepare, setting_values
from compound.execution.trace import Call, Trace
from compound.graph.component import Operation
from compound.graph.system import System
from compound.graph.types import accepts, all_as_declared, as_declared, format_type

T = TypeVar("T")


@report_wrong_arguments
class Executor:
    """Runs systems.

    Args:
        engines: model name -> `Engine`, or a function that returns one.
        cache: cache for cacheable calls; ``None`` disables caching.
        meter: budget from which engine calls are reserved.
        seed: seed of all random streams.
        on_call: called with each finished call, for live progress.
        folder: base of relative paths of stored folders; default: the working directory.
        on_notice: receives one-line notices during the run, such as a wait for a rate limit;
            default: logged as a warning.

    Example:
        >>> from compound import Input, System
        >>> from compound.components.function import Function
        >>> def double(x: int) -> int:
        ...     return 2 * x
        >>> system = System("demo", outputs={"y": Function("double", double)(x=Input("x", int))})
        >>> asyncio.run(Executor().run(system, {"x": 4})).outputs
        {'y': 8}
    """

    def __init__(
        self,
        engines: Mapping[str, Engine] | Callable[[str], Engine] | None = None,
        *,
        cache: Cache | None = None,
        meter: Meter | None = None,
        seed: int = 0,
        on_call: Callable[[Call], None] | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        folder: Path | None = None,
        on_notice: Callable[[str], object] | None = None,
    ) -> None:
        remember_environment()  # so that no trace or cache holds a key named in the environment
        recording()  # rejects an unknown value before the first call
        self.seed = seed
        self.meter = meter or Meter()
        self._caller = Caller(engines, cache, self.meter, sleep, folder, on_notice)
        self._on_call = on_call
        # systems are immutable, so plans stay valid; weak keys release those of discarded systems
        self._plans: weakref.WeakKeyDictionary[System, dict[int, ExecutionPlan]] = (
            weakref.WeakKeyDictionary()
        )

    def with_meter(self, meter: Meter) -> Self:
        """Return an executor that shares cache and engines but charges another budget."""
        other = copy.copy(self)
        other.meter, other._caller = meter, self._caller.replace(meter=meter)
        return other

    def with_tokens(self, tokens_of: TokensOf) -> Self:
        """Return an executor that shares everything, but asks a function for the tokens of answers.

        Args:
            tokens_of: takes a request that wants tokens and its answer; returns the record of its
                tokens.
        """
        other = copy.copy(self)
        other._caller = self._caller.replace(tokens_of=tokens_of)
        return other

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
        """Run a system once.

        Args:
            system: system to run, bound to a configuration.
            inputs: a value for each input of the system; lone surrogates in texts are replaced.
            example: id of the example; part of every random stream.
            sample: sample index of the stochastic components.
            cache: ``False`` bypasses the cache for this run.
            settings: by component, settings that override its own, such as the temperature of a
                rollout. They are not part of the configuration.
            samples: by component, sample indices that override ``sample``.
            listener: receives the progress of the run, and texts as they arrive.

        Returns:
            The trace. A failed call is recorded in it; it does not raise.

        Raises:
            DeclarationError: an input is missing, unknown or of the wrong type.
            BudgetExhausted: the next engine call does not fit into the budget.
        """
        inputs = {
            name: as_declared(system.inputs.get(name, Any), replace_surrogates(value))
            for name, value in inputs.items()
        }
        _check_inputs(system, inputs)
        run = RunState(
            system, example, sample, self.seed, not cache, settings or {}, samples=samples or {}
        )
        run.listener = listener
        return await self._traced(run, inputs)

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
        """Rerun only the descendants of one call of a trace, with that call changed.

        Either replace the call's ``outputs``, or resample the call with sample index ``resample``
        and optional ``settings``. All calls that do not descend from it are taken from the trace.

        Args:
            system: system of the trace, bound to the same configuration.
            trace: the trace to fork.
            address: address of the call to change.
            outputs: outputs that replace those of the call.
            resample: sample index to resample the call with.
            settings: settings that override the component's own in this call.
            sample: sample index of downstream calls; default: the trace's, so that two forks of one
                call share their downstream randomness (common random numbers).
            others: by component, settings that override its own in all calls of the fork, as in
                `run`.
        """
        fork = make_fork(system, trace, address, outputs, resample, settings)
        index = trace.sample if sample is None else sample
        run = RunState(system, trace.example, index, trace.seed, False, others or {}, fork)
        inputs = {
            name: as_declared(system.inputs[name], value) for name, value in trace.inputs.items()
        }
        return await self._traced(run, inputs)

    async def resample_call(
        self,
        system: System,
        trace: Trace,
        address: str,
        *,
        settings: Mapping[str, object] | None = None,
        sample: int = 0,
    ) -> Call:
        """Resample one call of a trace, without running its descendants.

        Args:
            system: system of the trace, bound to the same configuration.
            trace: trace with the call.
            address: address of the call; its inputs are reused.
            settings: settings that override the component's own.
            sample: sample index.
        """
        make_fork(system, trace, address, None, sample, settings)
        call = trace.call(address)
        component = system.components[call.component]
        assert isinstance(component, Operation)  # `make_fork` rejects composites
        wired = {name: value for name, value in call.inputs.items() if name in component.settings}
        values = {**setting_values(component, system), **wired, **(settings or {})}
        ports = {n.name: n.inputs for n in system.all_nodes()}.get(call.node, {})
        inputs = all_as_declared(ports, call.inputs)
        stream = (trace.seed, "call", trace.example, address)
        pending = PendingCall(component, address, inputs, values, stream, sample, component.outputs)
        result = await self._caller.call(pending)
        made = make_call(pending, result, call.node, call.parents, counted=call.counted)
        return replace(made, inputs=call.inputs, seconds=call.seconds, invocation=call.invocation)

    async def call_metric(
        self,
        component: Operation,
        inputs: Values,
        values: Values,
        *,
        address: str,
        example: str = "",
    ) -> Call:
        """Call a component of a metric, outside of any system.

        The call is cached, retried and counted like those of a system, except that it is no part of
        a system run: it counts toward the limits of calls, tokens, cost and minutes only. A failure
        is recorded in the returned call.

        Args:
            component: the component, such as a judge.
            inputs: a value for each of its input ports.
            values: the values of its settings.
            address: address in the record of metric calls (`Trace.metric_calls`).
            example: id of the example; part of the random stream.
        """
        stream = (self.seed, "metric", example, address)
        pending = PendingCall(component, address, inputs, values, stream, 0, component.outputs)
        started = time.perf_counter()
        result = await self._caller.call(pending)
        made = make_call(pending, result, component.name)
        made.seconds = time.perf_counter() - started
        return made

    def settle_call(self, call: Call, trace: Trace) -> Call:
        """Charge a resampled call as its share of the trace's run; call in order, like `settle`."""
        self._caller.settle([call])
        share = trace.run_fraction(call)
        self.meter.charge_runs(0.0 if call.reused else share, held=share)
        return call

    def sharing_failures(self) -> AbstractContextManager[None]:
        """Return a context manager in which equal calls also share failures, not only cached results."""
        return self._caller.batch()

    @property
    def engines(self) -> Mapping[str, Engine]:
        """Engines that are open, by model name."""
        return self._caller.engines

    def engine(self, lm: str) -> Engine:
        """Return the engine of a model name."""
        return self._caller.engine(lm)

    async def request(self, lm: str, request: Request) -> Completion:
        """Send a request outside of nodes; cached, and within the budget."""
        return await self._caller.ask(lm, request)

    def settle(self, trace: Trace, held: float = 1.0, scale: float = 1.0) -> Trace:
        """Charge a trace to the budget; call in input order, so that counts do not depend on timing.

        Of equal calls made by several traces at once, the first in this order counts as executed.

        Args:
            trace: the finished trace.
            held: fraction of a run that was reserved for it.
            scale: fraction of a run of the whole system that the trace can be, if it ran a part of
                it.
        """
        self._caller.settle(trace.calls)
        self._caller.settle(trace.metric_calls)
        self.meter.metric_usage += trace.metric_usage
        self.meter.charge_runs(trace.equivalents * scale, held)
        return trace

    async def aclose(self) -> None:
        """Close the engines opened by this executor."""
        await self._caller.aclose()

    def _traced(self, run: RunState, inputs: Mapping[str, object]) -> Awaitable[Trace]:
        fork = run.fork.address if run.fork is not None else ""
        plan = partial(self._plan, run.system)
        return traced(
            GraphRun(run, self._caller, self.meter, plan, self._on_call).execute(inputs),
            lambda: RunFacts(run.system, inputs, run.example, run.sample, run.seed, fork),
        )

    def _plan(self, bound: System, system: System) -> ExecutionPlan:
        """Return the cached plan of a graph; values come from the outermost system's configuration."""
        plans = self._plans.setdefault(bound, {})
        plan = plans.get(id(system))
        if plan is None:
            plan = plans[id(system)] = prepare(system, bound)
        return plan


def _check_inputs(system: System, inputs: Mapping[str, object]) -> None:
    unknown = [name for name in inputs if name not in system.inputs]
    if unknown:
        raise DeclarationError(
            f"system {system.name!r} has no input {unknown[0]!r}",
            hint=suggest_name(unknown[0], system.inputs),
        )
    for name, kind in system.inputs.items():
        if name not in inputs:
            raise DeclarationError(
                f"system {system.name!r} needs input {name!r}: {format_type(kind)}",
                hint=f"got {', '.join(map(repr, sorted(inputs))) or 'no inputs'}",
            )
        if not accepts(kind, inputs[name]):
            raise DeclarationError(
                f"input {name!r} must be {format_type(kind)}, but got {inputs[name]!r:.200}"
            )


async def gather_ordered(
    executor: Executor,
    factories: Sequence[Callable[[], Awaitable[T]]],
    charge: Callable[[int, T], object],
    max_concurrency: int,
    costs: Sequence[float] | None = None,
) -> list[T]:
    """Run awaitables concurrently, but reserve and charge system runs in input order.

    The result and the amount spent therefore do not depend on which task finishes first.

    Raises:
        BudgetExhausted: the next one does not fit. Those in flight are cancelled and not charged.
    """
    slots, turn = asyncio.Semaphore(max_concurrency), asyncio.Lock()
    finished: dict[int, T] = {}
    charged = 0

    async def run_one(number: int, make: Callable[[], Awaitable[T]]) -> T:
        nonlocal charged
        async with slots:
            async with turn:
                await executor.meter.reserve_run(1.0 if costs is None else costs[number])
            finished[number] = found = await make()
            while charged in finished:
                charge(charged, finished.pop(charged))
                charged += 1
            return found

    try:
        with executor.sharing_failures():
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(run_one(i, make)) for i, make in enumerate(factories)]
    except BaseExceptionGroup as errors:
        executor.meter.release_runs()
        raise first_leaf(errors) from None
    return [task.result() for task in tasks]
