"""Execution of one run: its graph, the bodies of loops and maps, and what a fork keeps.

Ready nodes run concurrently. A value carries the addresses of the calls that produced it, so the
calls of a run form a DAG, and a fork re-executes exactly the descendants of the changed call;
loops, maps and conditions need no special case. Results do not depend on timing: random streams are
named, and calls are ordered by their position in the graph.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from compound.core.errors import CallError, DeclarationError, first_leaf, suggest_name
from compound.core.example import Values
from compound.execution.budget import Meter
from compound.execution.caller import Caller, PendingCall
from compound.execution.observers import CallFacts, RunListener, traced
from compound.execution.schedule import (
    ABSENT,
    ExecutionPlan,
    Mark,
    NodeResult,
    PlannedNode,
    collect_outputs,
    gather_inputs,
    is_failed,
    read_wire,
    skipped_output,
)
from compound.execution.trace import Call, CallResult, Failure, Trace
from compound.graph.component import Component, Operation, Value, merge_addresses
from compound.graph.composite import Composite
from compound.graph.system import System
from compound.graph.types import accepts, all_as_declared, as_declared, format_type

Place = tuple[int, ...]
ComponentSettings = Mapping[str, Values]  # by component: settings that override its own


@dataclass(slots=True)
class Fork:
    """A fork in progress: the calls of the trace, the one to change, and the calls changed so far.

    Either ``outputs`` replace the call's outputs, or the call is resampled with sample index
    ``resample`` and ``settings``.
    """

    kept: Mapping[str, Call]
    address: str
    outputs: Mapping[str, object] | None
    resample: int
    settings: Mapping[str, object]
    dirty: set[str] = field(default_factory=set)


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


@dataclass(slots=True)
class OpenGraph:
    """A graph in progress: a system, or one turn of a composite's body."""

    plan: ExecutionPlan
    prefix: str
    place: Place
    inputs: Mapping[str, Value]
    waiting: dict[str, int]
    results: dict[str, NodeResult] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GraphRun:
    """Executes a run."""

    run: RunState
    caller: Caller
    meter: Meter
    plan_of: Callable[[System], ExecutionPlan]
    on_call: Callable[[Call], None] | None

    async def execute(self, inputs: Mapping[str, object]) -> Trace:
        """Run the system with a value of the declared type for each input."""
        values = {name: Value(inputs[name]) for name in self.run.system.inputs}
        results = await self._graph(self.run.system, "", (), values)
        calls = _in_order(self.run.calls)
        outputs, failure = collect_outputs(self.run.system, results, calls)
        return Trace(
            example=self.run.example,
            system=self.run.system.identity,
            configuration=self.run.system.configuration.digest,
            seed=self.run.seed,
            sample=self.run.sample,
            inputs={name: inputs[name] for name in self.run.system.inputs},
            calls=calls,
            outputs=outputs,
            failure=failure,
            ends=merge_addresses(*(value.sources for value in results.values())),
        )

    async def _graph(
        self, system: System, prefix: str, place: Place, inputs: Mapping[str, Value]
    ) -> dict[str, Value]:
        """Run every node of a graph and return the values of its outputs."""
        plan = self.plan_of(system)
        graph = OpenGraph(plan, prefix, place, inputs, plan.waiting.copy())
        if plan.sequential:
            for name, step in plan.nodes.items():
                graph.results[name] = await self._node(step, graph)
        else:
            try:
                async with asyncio.TaskGroup() as group:
                    for root in plan.roots:
                        group.create_task(self._branch(root, graph, group))
            except BaseExceptionGroup as errors:
                raise first_leaf(errors) from None
        return {wire.target: read_wire(wire, inputs, graph.results) for wire in plan.outputs}

    async def _branch(self, name: str | None, graph: OpenGraph, group: asyncio.TaskGroup) -> None:
        """Run a node and those after it, each as soon as the nodes that it reads have finished.

        A method: a closure that calls itself would keep traces until garbage is collected.
        """
        waiting = graph.waiting
        while name is not None:
            graph.results[name] = await self._node(graph.plan.nodes[name], graph)
            ready = []
            for successor in graph.plan.successors[name]:
                waiting[successor] -= 1
                if not waiting[successor]:
                    ready.append(successor)
            for other in ready[1:]:
                group.create_task(self._branch(other, graph, group))
            # continue with one successor in this task: chains need no further tasks
            name = ready[0] if ready else None

    async def _node(self, step: PlannedNode, graph: OpenGraph) -> NodeResult:
        """Run one node: check its inputs and condition, then call it or drive its body."""
        node, run = step.node, self.run
        arguments, given, parents, mark = gather_inputs(step, graph.inputs, graph.results)
        if mark is not None:
            return {name: Value(mark, parents) for name in step.outputs}
        component, address = node.component, graph.prefix + node.name
        here = (*graph.place, step.place)
        values, wrong = step.values, ""
        if step.wired_settings or run.settings:
            values, wrong = self._values(step, arguments)
        if step.operation is not None and not wrong:
            call = self._forked(step, address, parents, given) if run.fork else None
            if call is None:
                pending = self._pending(step, step.operation, address, given, values)
                result = await self.caller.call(pending)
                call = make_call(pending, result, node.name, parents, counted=component.cacheable)
        else:
            failure = Failure("type", wrong)
            if isinstance(component, Composite) and not wrong:
                driven = await traced(
                    self._drive(component, address, here, arguments, values),
                    lambda: CallFacts(component, address, body=True),
                )
                if not isinstance(driven, Failure):
                    return driven or {name: Value(Mark("error"), parents) for name in step.outputs}
                failure = driven
                here = (*here, sys.maxsize)  # after the calls that may have caused the failure
            call = Call(address, node.name, component.name, parents, given, {}, failure)
            call.sample = run.sample
        run.calls.append((here, call))
        if self.on_call is not None:
            self.on_call(call)
        if run.listener is not None:
            run.listener.on_call(call)
        return call

    def _values(
        self, step: PlannedNode, arguments: Mapping[str, Value]
    ) -> tuple[Mapping[str, object], str]:
        """Return the values of a node's settings, and an error message if a wired one is wrong."""
        own = self.run.settings.get(step.node.component.name)
        wired = {name: arguments[name].data for name in step.wired_settings}
        values = {**step.values, **wired, **(own or {})} if own or wired else step.values
        for name in wired:
            kind = step.node.inputs[name].type
            if not accepts(kind, values[name]):
                place, got = f"{step.node.name}.{name}", f"{values[name]!r:.200}"
                return values, f"{place} must be {format_type(kind)}, but got {got}"
        return values, ""

    def _pending(
        self,
        step: PlannedNode,
        component: Operation,
        address: str,
        inputs: Mapping[str, object],
        values: Mapping[str, object],
    ) -> PendingCall:
        """Return a node's call, with the sample and the settings that a fork gives it."""
        run, fork = self.run, self.run.fork
        sample = run.samples.get(component.name, run.sample) if run.samples else run.sample
        if fork is not None and address == fork.address:
            sample, values = fork.resample, {**values, **fork.settings}
        if run.listener is not None:
            run.listener.on_start(address, component.name)
        return PendingCall(
            component,
            address,
            inputs,
            values,
            (run.seed, "call", run.example, address),
            sample,
            step.outputs,
            run.bypass,
            run.listener,
        )

    def _forked(
        self,
        step: PlannedNode,
        address: str,
        parents: tuple[str, ...],
        inputs: Mapping[str, object],
    ) -> Call | None:
        """Return a call that a fork takes from its trace, or replaces; ``None`` if it is executed."""
        fork, node = self.run.fork, step.node
        assert fork is not None
        if address != fork.address and _is_kept(fork, node.component, address, parents, inputs):
            kept = fork.kept[address]  # a stored trace holds the JSON form of typed values
            return replace(kept, outputs=all_as_declared(step.outputs, kept.outputs), reused=True)
        fork.dirty.add(address)
        if address != fork.address or fork.outputs is None:
            return None
        outputs = all_as_declared(step.outputs, fork.outputs)
        call = Call(address, node.name, node.component.name, parents, inputs, outputs)
        call.sample = self.run.samples.get(node.component.name, self.run.sample)
        call.reused, call.counted = True, node.component.cacheable
        return call

    async def _drive(
        self,
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
            outputs = await self._graph(
                component.body, f"{address}[{index}]/", (*place, index), inputs
            )
            if component.keeps_partial_outputs:
                failed = failed or any(is_failed(value.data) for value in outputs.values())
                return {name: value for name, value in outputs.items() if value.data is not ABSENT}
            if any(is_failed(value.data) for value in outputs.values()):
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


def make_call(
    pending: PendingCall,
    result: CallResult,
    node: str,
    parents: tuple[str, ...] = (),
    *,
    counted: bool = False,
) -> Call:
    """Return the record of a call that was made."""
    return Call(
        pending.address,
        node,
        pending.component.name,
        parents,
        pending.inputs,
        result.outputs,
        result.failure,
        result.usage,
        result.seconds,
        pending.sample,
        0,
        result.reused,
        counted,
        result.attempts,
        result.tokens,
        result.key,
        result.exchanges,
    )


def _is_kept(
    fork: Fork, component: Component, address: str, parents: tuple[str, ...], inputs: Values
) -> bool:
    """Return whether a call of a fork takes its result from the trace.

    The requests of an external program are compared, too: it may not repeat them when it runs
    again.
    """
    if address not in fork.kept or not fork.dirty.isdisjoint(parents):
        return False
    return not component.external_inputs or fork.kept[address].inputs == inputs


def _in_order(calls: Sequence[tuple[Place, Call]]) -> tuple[Call, ...]:
    """Order calls by their position in the graph and number the invocations of each component."""
    ordered = [call for _, call in sorted(calls, key=lambda item: item[0])]
    counts: dict[str, int] = {}
    for call in ordered:
        call.invocation = counts.get(call.component, 0)
        counts[call.component] = call.invocation + 1
    return tuple(ordered)


def make_fork(
    system: System,
    trace: Trace,
    address: str,
    outputs: Mapping[str, object] | None,
    resample: int | None,
    settings: Mapping[str, object] | None,
) -> Fork:
    """Validate the arguments of `Executor.fork` and return the fork."""
    if (outputs is None) == (resample is None):
        raise DeclarationError("fork requires exactly one of outputs and resample")
    if outputs is not None and settings:
        raise DeclarationError(
            "settings are not allowed with outputs, because the call does not run"
        )
    if system.identity != trace.system:
        raise DeclarationError(
            "the trace was recorded with another system", hint="pass the system that recorded it"
        )
    if system.configuration.digest != trace.configuration:
        raise DeclarationError(
            "the trace was recorded with another configuration",
            hint="bind the system to it before forking",
        )
    kept = {call.address: call for call in trace.calls}
    if address not in kept:
        raise DeclarationError(
            f"the trace has no call at {address!r}", hint=suggest_name(address, kept)
        )
    component = system.components.get(kept[address].component)
    if component is None or isinstance(component, Composite):
        raise DeclarationError(
            f"cannot fork at {address!r}: it is not a call of a component of system {system.name!r}",
            hint="fork at a call inside it",
        )
    _check_fork_outputs(component, address, outputs)
    unknown = sorted(set(settings or ()) - set(component.settings))
    if unknown:
        raise DeclarationError(
            f"{address} has no setting {unknown[0]!r}",
            hint=suggest_name(unknown[0], component.settings),
        )
    return Fork(kept, address, outputs, resample or 0, dict(settings or {}))


def _check_fork_outputs(
    component: Component, address: str, outputs: Mapping[str, object] | None
) -> None:
    ports = component.outputs
    if outputs is None:
        return
    if set(outputs) != set(ports):
        raise DeclarationError(
            f"fork at {address!r} must have the outputs {sorted(ports)}, but got {sorted(outputs)}"
        )
    for name, value in outputs.items():
        if not accepts(ports[name].type, as_declared(ports[name].type, value)):
            raise DeclarationError(
                f"fork at {address!r}: {name} must be {format_type(ports[name].type)}, but got {value!r:.200}"
            )
