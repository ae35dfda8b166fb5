"""Executor: the async core that runs a system on an example, or forks a trace.

Ready nodes run concurrently. A value carries the addresses of the calls that produced it, so the calls of
a run form a DAG, and a fork re-executes exactly the descendants of the changed call; loops, maps and
conditions need no special case. Results do not depend on timing: random streams are named, and calls are
ordered by their position in the graph.
"""

from __future__ import annotations

import asyncio
import copy
import sys
import time
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from compound.engine import Completion, Engine, Request
from compound.errors import CallError, DeclarationError, first_leaf, suggest_name
from compound.example import Values
from compound.execution.budget import Meter
from compound.execution.cache import Cache
from compound.execution.caller import Attempt, Caller
from compound.execution.forks import Fork, make_fork
from compound.execution.observers.events import RunListener
from compound.execution.observers.spans import RunFacts, active_tracer, within
from compound.execution.outcomes import CallResult
from compound.execution.rng import derive_seed
from compound.execution.schedule import (
    ABSENT,
    FAILED,
    ExecutionPlan,
    Step,
    collect_outputs,
    gather_inputs,
    prepare,
    read_source,
    setting_type_error,
    setting_values,
    skipped_output,
)
from compound.execution.trace import Call, Failure, Trace
from compound.graph.component import Component, Node, Operation, Value, merge_addresses
from compound.graph.composite import Composite
from compound.graph.system import System
from compound.graph.types import accepts, all_as_declared, as_declared, format_type

Place = tuple[int, ...]
ComponentSettings = Mapping[str, Values]  # by component: settings that override its own


@dataclass(slots=True)
class RunState:
    """A run in progress: what to run, and the calls made so far."""

    system: System
    example: str
    sample: int
    seed: int
    bypass: bool
    settings: ComponentSettings
    fork: Fork | None = None
    samples: Mapping[str, int] = field(default_factory=dict)
    calls: list[tuple[Place, Call]] = field(default_factory=list)
    listener: RunListener | None = None


class Executor:
    """Runs systems.

    Args:
        engines: model name -> `Engine`, or a function that returns one.
        cache: cache for cacheable calls; ``None`` disables caching.
        meter: budget from which engine calls are reserved.
        seed: seed of all random streams.
        on_call: called with each finished call, for live progress.
        folder: base of relative paths of stored folders; default: the working directory.
        on_notice: receives one-line notices during the run, such as a wait for a rate limit; default: logged
            as a warning.

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
        self.seed = seed
        self.meter = meter or Meter()
        self._caller = Caller(engines, cache, self.meter, sleep, folder, on_notice)
        self._on_call = on_call
        # systems are immutable, so plans stay valid; weak keys release those of discarded systems
        self._plans: weakref.WeakKeyDictionary[System, dict[int, ExecutionPlan]] = weakref.WeakKeyDictionary()

    def with_meter(self, meter: Meter) -> Self:
        """Return an executor that shares cache and engines but charges another budget."""
        return self.with_caller(self._caller.with_meter(meter), meter)

    def with_caller(self, caller: Caller, meter: Meter) -> Self:
        """Return an executor that shares everything but makes its calls by another caller and its budget."""
        other = copy.copy(self)
        other.meter = meter
        other._caller = caller
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
            inputs: a value for each input of the system.
            example: id of the example; part of every random stream.
            sample: sample index of the stochastic components.
            cache: ``False`` bypasses the cache for this run.
            settings: by component, settings that override its own, such as the temperature of a rollout. They
                are not part of the configuration.
            samples: by component, sample indices that override ``sample``.
            listener: receives the progress of the run, and texts as they arrive.

        Returns:
            The trace. A failed call is recorded in it; it does not raise.

        Raises:
            DeclarationError: an input is missing, unknown or of the wrong type.
            BudgetExhausted: the next engine call does not fit into the budget.
        """
        inputs = {name: as_declared(system.inputs.get(name, Any), value) for name, value in inputs.items()}
        _check_inputs(system, inputs)
        run = RunState(system, example, sample, self.seed, not cache, settings or {}, samples=samples or {})
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

        Either replace the call's ``outputs``, or resample the call with sample index ``resample`` and
        optional ``settings``. All calls that do not descend from it are taken from the trace.

        Args:
            system: system of the trace, bound to the same configuration.
            trace: the trace to fork.
            address: address of the call to change.
            outputs: outputs that replace those of the call.
            resample: sample index to resample the call with.
            settings: settings that override the component's own in this call.
            sample: sample index of downstream calls; default: the trace's, so that two forks of one call
                share their downstream randomness (common random numbers).
            others: by component, settings that override its own in all calls of the fork, as in `run`.
        """
        fork = make_fork(system, trace, address, outputs, resample, settings)
        index = trace.sample if sample is None else sample
        run = RunState(system, trace.example, index, trace.seed, False, others or {}, fork)
        inputs = {name: as_declared(system.inputs[name], value) for name, value in trace.inputs.items()}
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
        seed = derive_seed(trace.seed, "call", trace.example, address, sample)
        ports = {n.name: n.inputs for n in system.all_nodes()}.get(call.node, {})
        inputs = all_as_declared(ports, call.inputs)
        result = await self._caller.call(Attempt(component, address, inputs, values, seed, False))
        return replace(
            call,
            outputs=result.outputs, failure=result.failure, usage=result.usage, sample=sample,
            reused=result.reused, attempts=result.attempts, tokens=result.tokens, key=result.key,
            exchanges=result.exchanges,
        )  # fmt: skip

    async def call_metric(
        self,
        component: Operation,
        inputs: Values,
        values: Values,
        *,
        address: str,
        example: str = "",
        sample: int = 0,
    ) -> Call:
        """Call a component of a metric, outside of any system.

        The call is cached, retried and counted like those of a system, except that it is no part of a system
        run: it counts toward the limits of calls, tokens, cost and minutes only. A failure is recorded in the
        returned call.

        Args:
            component: the component, such as a judge.
            inputs: a value for each of its input ports.
            values: the values of its settings.
            address: address in the record of metric calls (`Trace.metric_calls`).
            example: id of the example; part of the random stream.
            sample: sample index; part of the random stream.
        """
        seed = derive_seed(self.seed, "metric", example, address, sample)
        started = time.perf_counter()
        result = await self._caller.call(Attempt(component, address, inputs, values, seed, False))
        return Call(
            address, component.name, component.name, (), inputs, result.outputs, result.failure, result.usage,
            time.perf_counter() - started, sample, reused=result.reused, attempts=result.attempts,
            key=result.key, exchanges=result.exchanges,
        )  # fmt: skip

    def settle_call(self, call: Call, trace: Trace) -> Call:
        """Charge a resampled call as its share of the trace's run; call in order, like `settle`."""
        self._caller.settle([call])
        share = trace.run_fraction(call)
        self.meter.charge_runs(0.0 if call.reused else share, held=share)
        return call

    def sharing_failures(self) -> AbstractContextManager[None]:
        """Return a context manager in which equal calls also share failures, not only cached results."""
        return self._caller.batch()

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
            scale: fraction of a run of the whole system that the trace can be, if it ran a part of it.
        """
        self._caller.settle(trace.calls)
        self._caller.settle(trace.metric_calls)
        self.meter.metric_usage += trace.metric_usage
        self.meter.charge_runs(trace.equivalents * scale, held)
        return trace

    async def aclose(self) -> None:
        """Close the engines opened by this executor."""
        await self._caller.aclose()

    async def _traced(self, run: RunState, inputs: Mapping[str, object]) -> Trace:
        tracer = active_tracer()
        if tracer is None:
            return await self.execute(run, inputs)
        fork = run.fork.address if run.fork is not None else ""
        facts = RunFacts(run.system, inputs, run.example, run.sample, run.seed, fork)
        return await within(tracer.run(facts), self.execute(run, inputs))

    async def execute(self, run: RunState, inputs: Mapping[str, object]) -> Trace:
        """Execute a validated run; the part that an executor on other machines replaces.

        Args:
            run: what to run, and with a fork, what to keep.
            inputs: a value of the declared type for each input.
        """
        values = {name: Value(inputs[name]) for name in run.system.inputs}
        results = await self._graph(run, run.system, "", (), values)
        calls = _in_order(run.calls)
        outputs, failure = collect_outputs(run.system, results, calls)
        return Trace(
            example=run.example,
            system=run.system.identity,
            configuration=run.system.configuration.digest,
            seed=run.seed,
            sample=run.sample,
            inputs={name: inputs[name] for name in run.system.inputs},
            calls=calls,
            outputs=outputs,
            failure=failure,
            ends=merge_addresses(*(value.sources for value in results.values())),
        )

    async def _graph(
        self, run: RunState, system: System, prefix: str, place: Place, inputs: Mapping[str, Value]
    ) -> dict[str, Value]:
        """Run every node of a graph and return the values of its outputs."""
        plan = self._plan(system, run.system)
        results: dict[str, Mapping[str, Value]] = {}
        waiting = plan.waiting.copy()

        async def work(name: str | None, group: asyncio.TaskGroup | None) -> None:
            while name is not None:
                results[name] = await self._node(run, plan.steps[name], prefix, place, inputs, results)
                ready = []
                for successor in plan.successors[name]:
                    waiting[successor] -= 1
                    if not waiting[successor]:
                        ready.append(successor)
                for other in ready[1:]:
                    assert group is not None  # a plan with a branch point is not sequential
                    group.create_task(work(other, group))
                # continue with one successor in this task: chains need no further tasks
                name = ready[0] if ready else None

        if plan.sequential:
            await work(plan.roots[0], None)
        else:
            try:
                async with asyncio.TaskGroup() as group:
                    for root in plan.roots:
                        group.create_task(work(root, group))
            except BaseExceptionGroup as errors:
                raise first_leaf(errors) from None
        return {key: read_source(source, inputs, results) for key, source in system.outputs.items()}

    async def _node(
        self,
        run: RunState,
        step: Step,
        prefix: str,
        place: Place,
        inputs: Mapping[str, Value],
        results: Mapping[str, Mapping[str, Value]],
    ) -> Mapping[str, Value]:
        """Run one node: check its inputs and condition, then call it or drive its body."""
        node = step.node
        arguments, parents, mark = gather_inputs(step, inputs, results)
        outputs = node.component.outputs
        if mark is not None:
            return {name: Value(mark, parents) for name in outputs}
        own = run.settings.get(node.component.name)
        wired = {name: arguments[name].data for name in step.wired_settings}
        values: Mapping[str, object] = (
            {**step.values, **wired, **(own or {})} if own or wired else step.values
        )
        address = prefix + node.name
        here = (*place, step.place)
        wrong = setting_type_error(step, values) if step.wired_settings else ""
        if wrong:
            given = {port: value.data for port, value in arguments.items()}
            call = Call(address, node.name, node.component.name, parents, given, {}, Failure("type", wrong),
                        sample=run.sample)  # fmt: skip
        elif isinstance(node.component, Composite):
            driven = await self._composite(run, node.component, address, here, arguments, values)
            if not isinstance(driven, Failure):
                return driven or {name: Value(FAILED, parents) for name in outputs}
            given = {port: value.data for port, value in arguments.items()}
            name = node.component.name
            call = Call(address, node.name, name, parents, given, {}, driven, sample=run.sample)
            here = (*here, sys.maxsize)  # after the calls that may have caused the failure
        else:
            call = await self._call(run, step, address, parents, arguments, values)
        run.calls.append((here, call))
        if self._on_call is not None:
            self._on_call(call)
        if run.listener is not None:
            run.listener.on_call(call)
        if call.failure is not None:
            return {name: Value(FAILED, (address,)) for name in outputs}
        return {name: Value(call.outputs[name], (address,)) for name in outputs}

    async def _composite(
        self,
        run: RunState,
        component: Composite,
        address: str,
        place: Place,
        arguments: Mapping[str, Value],
        values: Mapping[str, object],
    ) -> Mapping[str, Value] | Failure | None:
        """Run a composite like `_drive`, in a span if a tracer is active."""
        work = self._drive(run, component, address, place, arguments, values)
        tracer = active_tracer()
        return await work if tracer is None else await within(tracer.body(component, address), work)

    async def _drive(
        self,
        run: RunState,
        component: Composite,
        address: str,
        place: Place,
        arguments: Mapping[str, Value],
        values: Mapping[str, object],
    ) -> Mapping[str, Value] | Failure | None:
        """Run a composite; return ``None`` if an inner call failed, its own failure if it failed itself."""
        skipped: dict[int, str] = {}
        failed = False

        async def body(index: int, inputs: Mapping[str, Value]) -> Mapping[str, Value] | None:
            nonlocal failed
            outputs = await self._graph(run, component.body, f"{address}[{index}]/", (*place, index), inputs)
            if component.keeps_partial_outputs:
                failed = failed or any(value.data is FAILED for value in outputs.values())
                return {name: value for name, value in outputs.items() if value.data is not ABSENT}
            if any(value.data is FAILED for value in outputs.values()):
                failed = True
                return None
            for name, value in outputs.items():
                if value.data is ABSENT:
                    skipped[index] = f"{skipped_output(component.body, name)} of {address}[{index}]"
                    return None
            return outputs

        try:
            async with self.meter.deadline():  # a body may wait for something other than calls
                driven = await component.drive(arguments, values, body)
        except BaseExceptionGroup as errors:
            raise first_leaf(errors) from None
        except CallError as error:
            return Failure(error.kind, f"{address}: {error}")
        if driven is None and skipped and not failed:
            return Failure("skipped", f"{skipped[min(skipped)]} was skipped by a condition")
        return driven

    async def _call(
        self,
        run: RunState,
        step: Step,
        address: str,
        parents: tuple[str, ...],
        arguments: Mapping[str, Value],
        values: Mapping[str, object],
    ) -> Call:
        """Return the node's call: reused from the forked trace, replaced by the fork, or executed."""
        sample = run.samples.get(step.node.component.name, run.sample)
        fork = run.fork
        inputs = {port: value.data for port, value in arguments.items()}
        node = step.node
        counted = node.component.cacheable
        if fork is not None:
            if address == fork.address:
                fork.dirty.add(address)
                if fork.outputs is not None:
                    return Call(
                        address,
                        node.name,
                        node.component.name,
                        parents,
                        inputs,
                        all_as_declared(node.component.outputs, fork.outputs),
                        sample=sample,
                        reused=True,
                        counted=counted,
                    )
                sample = fork.resample
                values = {**values, **fork.settings}
            elif self._is_kept(fork, node.component, address, parents, inputs):
                kept = fork.kept[address]  # a stored trace holds the JSON form of typed values
                outputs = all_as_declared(node.component.outputs, kept.outputs)
                return replace(kept, outputs=outputs, reused=True)
            else:
                fork.dirty.add(address)
        seed = derive_seed(run.seed, "call", run.example, address, sample)
        assert isinstance(node.component, Operation)  # `connect` accepts only operations and composites
        attempt = Attempt(node.component, address, inputs, values, seed, run.bypass, listener=run.listener)
        if run.listener is not None:
            run.listener.on_start(address, node.component.name)
        started = time.perf_counter()
        result = await self._caller.call(attempt)
        return _to_call(node, address, parents, inputs, result, time.perf_counter() - started, sample)

    @staticmethod
    def _is_kept(
        fork: Fork, component: Component, address: str, parents: tuple[str, ...], inputs: Values
    ) -> bool:
        """Return whether a call of a fork takes its result from the trace.

        The requests of an external program are compared, too: it may not repeat them when it runs again.
        """
        if address not in fork.kept or not fork.dirty.isdisjoint(parents):
            return False
        return not component.external_inputs or fork.kept[address].inputs == inputs

    def _plan(self, system: System, bound: System) -> ExecutionPlan:
        """Return the cached plan of a graph; values come from the outermost system's configuration."""
        plans = self._plans.setdefault(bound, {})
        plan = plans.get(id(system))
        if plan is None:
            plan = plans[id(system)] = prepare(system, bound)
        return plan


def _to_call(
    node: Node,
    address: str,
    parents: tuple[str, ...],
    inputs: Mapping[str, object],
    result: CallResult,
    seconds: float,
    sample: int,
) -> Call:
    return Call(
        address=address,
        node=node.name,
        component=node.component.name,
        parents=parents,
        inputs=inputs,
        outputs=result.outputs,
        failure=result.failure,
        usage=result.usage,
        seconds=seconds,
        sample=sample,
        reused=result.reused,
        counted=node.component.cacheable,
        attempts=result.attempts,
        tokens=result.tokens,
        key=result.key,
        exchanges=result.exchanges,
    )


def _in_order(calls: Sequence[tuple[Place, Call]]) -> tuple[Call, ...]:
    """Order calls by their position in the graph and number the invocations of each component."""
    ordered = [call for _, call in sorted(calls, key=lambda item: item[0])]
    counts: Counter[str] = Counter()
    for call in ordered:
        call.invocation = counts[call.component]
        counts[call.component] += 1
    return tuple(ordered)


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
