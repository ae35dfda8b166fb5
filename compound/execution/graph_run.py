"""Execution of one run: its graph, the bodies of loops and maps, and what a fork keeps.

Ready nodes run concurrently. A value carries the addresses of the calls that produced it, so the calls of
a run form a DAG, and a fork re-executes exactly the descendants of the changed call; loops, maps and
conditions need no special case. Results do not depend on timing: random streams are named, and calls are
ordered by their position in the graph.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from compound.errors import CallError, DeclarationError, first_leaf, suggest_name
from compound.example import Values
from compound.execution.budget import Meter
from compound.execution.caller import Caller
from compound.execution.calls.attempts import PendingCall
from compound.execution.observers.events import RunListener
from compound.execution.observers.spans import active_tracer, within
from compound.execution.outcomes import CallResult
from compound.execution.rng import derive_seed
from compound.execution.schedule import (
    ABSENT,
    ExecutionPlan,
    Mark,
    Step,
    collect_outputs,
    gather_inputs,
    is_failed,
    read_source,
    setting_type_error,
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
class Fork:
    """A fork in progress: the calls of the trace, the one to change, and the calls changed so far.

    Either ``outputs`` replace the call's outputs, or the call is resampled with sample index ``resample`` and
    ``settings``.
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


@dataclass(frozen=True, slots=True)
class GraphRun:
    """Executes a run.

    Attributes:
        run: what to run, and with a fork, what to keep; receives the calls.
        caller: makes the calls.
        meter: the budget.
        plan_of: returns the plan of the run's system, or of a body in it.
        on_call: called with each finished call.
    """

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
        results: dict[str, Mapping[str, Value]] = {}
        waiting = plan.waiting.copy()

        async def work(name: str | None, group: asyncio.TaskGroup | None) -> None:
            while name is not None:
                results[name] = await self._node(plan.steps[name], prefix, place, inputs, results)
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
        own = self.run.settings.get(node.component.name)
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
                        sample=self.run.sample)  # fmt: skip
        elif isinstance(node.component, Composite):
            driven = await self._composite(node.component, address, here, arguments, values)
            if not isinstance(driven, Failure):
                return driven or {name: Value(Mark("error"), parents) for name in outputs}
            given = {port: value.data for port, value in arguments.items()}
            name = node.component.name
            call = Call(address, node.name, name, parents, given, {}, driven, sample=self.run.sample)
            here = (*here, sys.maxsize)  # after the calls that may have caused the failure
        else:
            call = await self._call(step, address, parents, arguments, values)
        self.run.calls.append((here, call))
        if self.on_call is not None:
            self.on_call(call)
        if self.run.listener is not None:
            self.run.listener.on_call(call)
        if call.failure is not None:
            return {name: Value(Mark(call.failure.kind), (address,)) for name in outputs}
        return {name: Value(call.outputs[name], (address,)) for name in outputs}

    async def _composite(
        self,
        component: Composite,
        address: str,
        place: Place,
        arguments: Mapping[str, Value],
        values: Mapping[str, object],
    ) -> Mapping[str, Value] | Failure | None:
        """Run a composite like `_drive`, in a span if a tracer is active."""
        work = self._drive(component, address, place, arguments, values)
        tracer = active_tracer()
        return await work if tracer is None else await within(tracer.body(component, address), work)

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
            outputs = await self._graph(component.body, f"{address}[{index}]/", (*place, index), inputs)
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

    async def _call(
        self,
        step: Step,
        address: str,
        parents: tuple[str, ...],
        arguments: Mapping[str, Value],
        values: Mapping[str, object],
    ) -> Call:
        """Return the node's call: reused from the forked trace, replaced by the fork, or executed."""
        sample = self.run.samples.get(step.node.component.name, self.run.sample)
        fork = self.run.fork
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
        seed = derive_seed(self.run.seed, "call", self.run.example, address, sample)
        assert isinstance(node.component, Operation)  # `connect` accepts only operations and composites
        pending = PendingCall(
            node.component, address, inputs, values, seed, self.run.bypass, listener=self.run.listener
        )
        if self.run.listener is not None:
            self.run.listener.on_start(address, node.component.name)
        result = await self.caller.call(pending)
        return _to_call(node, address, parents, inputs, result, sample)

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


def _to_call(
    node: Node,
    address: str,
    parents: tuple[str, ...],
    inputs: Mapping[str, object],
    result: CallResult,
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
        seconds=result.seconds,
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


def make_fork(
    system: System,
    trace: Trace,
    address: str,
    outputs: Mapping[str, object] | None,
    resample: int | None,
    settings: Mapping[str, object] | None,
) -> Fork:
    """Validate the arguments of `Executor.fork` and return the fork.

    Raises:
        DeclarationError: the trace belongs to another system, or the call cannot be changed this way.
    """
    if (outputs is None) == (resample is None):
        raise DeclarationError("fork requires exactly one of outputs and resample")
    if outputs is not None and settings:
        raise DeclarationError("settings are not allowed with outputs, because the call does not run")
    if system.identity != trace.system:
        raise DeclarationError(
            "the trace was recorded with another system", hint="pass the system that recorded it"
        )
    if system.configuration.digest != trace.configuration:
        raise DeclarationError(
            "the trace was recorded with another configuration", hint="bind the system to it before forking"
        )
    kept = {call.address: call for call in trace.calls}
    if address not in kept:
        raise DeclarationError(f"the trace has no call at {address!r}", hint=suggest_name(address, kept))
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
            f"{address} has no setting {unknown[0]!r}", hint=suggest_name(unknown[0], component.settings)
        )
    return Fork(kept, address, outputs, resample or 0, dict(settings or {}))


def _check_fork_outputs(component: Component, address: str, outputs: Mapping[str, object] | None) -> None:
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
