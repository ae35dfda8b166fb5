"""Conformance kit for components."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any
from unittest import SkipTest

import numpy as np

from compound.core.engine import Capabilities, Completion, Engine, OnText, Request, Usage
from compound.core.errors import CompoundError, DeclarationError
from compound.core.example import CallValues, Values
from compound.core.formatting import short_repr
from compound.core.loops import Sessions
from compound.core.storage.artifacts import Reference
from compound.execution.executor import Executor
from compound.execution.schedule import setting_values
from compound.execution.trace import Trace
from compound.graph.component import NAME, Component, Input, Operation, Output, Outputs
from compound.graph.composite import Composite
from compound.graph.configuration import canonical_json, to_readable_json
from compound.graph.registry.code import place_of
from compound.graph.space import Choice, Space
from compound.graph.system import System
from compound.graph.types import Port, accepts, format_type
from compound.testing.checks import json_problem, without_global_generators
from compound.testing.doubles import ScriptedLM
from compound.yaml import dump, loads

__all__ = ["ComponentKit"]

LM = "lm"
LONGEST_REPR = 300
ADDRESS = " at 0x"  # part of Python's default repr


class ComponentKit:
    """Checks of a component; subclass it as ``Test…``, and override `make` and `inputs`.

    The component runs as the only node of a system that uses the model of `engine`.

    Checks:
        - it keeps its name, and declares its kind, version and ports
        - its parameters are spaces with valid initial values
        - instances created with equal arguments have the same version
        - its outputs have the declared types
        - equal inputs and random streams give equal outputs; if it is declared deterministic, equal inputs
          are enough
        - it does not use or change the global random generators
        - it does not modify its inputs
        - its ``repr`` is short
        - copies behave like the original
        - a system with it survives a round trip through YAML, if its class can be imported by name

    Attributes:
        dumpable: whether the component can be written to YAML. Set it to False if its settings or
            port types cannot be written.

    Example:
        >>> from compound.ext import Operation
        >>> from compound.graph.types import Port
        >>> from compound.testing import ComponentKit, run_kit
        >>> class Shout(Operation):
        ...     kind, version = "shout", "1"
        ...     inputs, outputs = {"text": Port(str)}, {"shouted": Port(str)}
        ...     def __init__(self, name):
        ...         self.name = name
        ...     async def run(self, inputs, values, call):
        ...         return {"shouted": inputs["text"].upper()}
        >>> class TestShout(ComponentKit):
        ...     def make(self, name):
        ...         return Shout(name)
        ...     def inputs(self):
        ...         return [{"text": "hello"}, {"text": ""}]
        >>> run_kit(TestShout)
        {}
    """

    dumpable: bool = True

    # -- hooks -----------------------------------------------------------------------------------------

    def make(self, name: str) -> Component:
        """Return a new component with a name. Override this; all returned components must be equivalent."""
        raise NotImplementedError("override make(name) to return the component to test")

    def inputs(self) -> Values | Sequence[Values]:
        """Return the inputs of a call by port, or those of several calls. Override this."""
        raise NotImplementedError(
            "override inputs() to return the inputs of a call, or a list of them"
        )

    def engine(self) -> Engine:
        """Return the engine of the component; its answers must depend only on the request."""
        return ScriptedLM(lambda message: "yes")

    # -- checks of declarations ------------------------------------------------------------------------

    def test_it_keeps_its_name(self) -> None:
        """The name is the one passed to `make`."""
        for name in ("first", "second_2"):
            found = self.make(name).name
            assert found == name, (
                f"a component created as {name!r} has the name {found!r}; keep the name"
            )

    def test_kind_version_and_ports_are_declared(self) -> None:
        """Kind, version and ports have the right types, and names are identifiers."""
        component = self.make("tested")
        assert isinstance(component, Operation | Composite), (
            f"{type(component).__name__} is neither an Operation nor a Composite; subclass one of them"
        )
        for what in ("kind", "version"):
            value = getattr(component, what)
            assert isinstance(value, str), f"{what} must be a string, but is {short_repr(value)}"
            assert value, f"{what} is empty"
        assert ADDRESS not in component.version, (
            f"the version {component.version!r} contains the address of an object, which differs between "
            "processes; describe the object by its content"
        )
        inputs, outputs = component.inputs, component.outputs
        _check_ports("inputs", {} if inputs is None else inputs)
        _check_ports("outputs", outputs)
        assert outputs, "outputs declares no port"
        both = sorted(set(inputs or ()) & set(component.settings))
        assert not both, (
            f"{', '.join(both)} is an input and a setting; drop the input, because settings can be connected"
        )

    def test_parameters_hold_their_start_values(self) -> None:
        """Each parameter is a `Space` with a valid initial value."""
        component = self.make("tested")
        for name, space in component.parameters.items():
            assert NAME.match(name), (
                f"the parameter {name!r} must be a name of letters, digits, underscores"
            )
            assert isinstance(space, Space), (
                f"the parameter {name!r} must be a Space, but is {short_repr(space)}"
            )
            problem = space.problem(space.value)
            assert not problem, f"the value of the parameter {name!r} {problem}"
            problem = json_problem(space.to_json())
            assert not problem, f"to_json of the parameter {name!r} must be JSON, but {problem}"

    def test_instances_made_alike_have_one_version(self) -> None:
        """The version differs only if the behaviour does."""
        one, other = self.make("tested"), self.make("tested")
        assert one.version == other.version, (
            f"two equivalent instances have the versions {one.version!r} and {other.version!r}; the version "
            "is part of cache keys, so it must depend only on what changes the behaviour"
        )
        assert self._system(one).signature == self._system(other).signature, (
            "systems of two equivalent instances have different signatures; declare equal ports, settings "
            "and spaces"
        )

    def test_the_repr_is_short(self) -> None:
        """The repr fits into error messages and notebooks."""
        found = repr(self.make("tested"))
        assert len(found) <= LONGEST_REPR, (
            f"repr has {len(found)} characters; it must have at most {LONGEST_REPR}: {found[:80]}..."
        )

    # -- checks of behaviour ---------------------------------------------------------------------------

    def test_outputs_have_the_declared_types(self) -> None:
        """Every call returns a value of the declared type for each output."""
        component = self.make("tested")
        for number, trace in enumerate(self._traces(component), 1):
            for name, port in component.outputs.items():
                value = trace.outputs[name]
                assert accepts(port.type, value), (
                    f"on inputs {number} the output {name!r} must be {format_type(port.type)}, but is "
                    f"{short_repr(value)}"
                )

    def test_equal_inputs_and_streams_give_equal_outputs(self) -> None:
        """Equal calls return equal outputs, so that cached results are valid."""
        found = [self._outputs(self.make("tested")) for _ in range(2)]
        for number, (one, other) in enumerate(zip(*found, strict=True), 1):
            assert _same(one, other), (
                f"on equal inputs {number} two instances return {short_repr(one)} and {short_repr(other)}; "
                "depend only on inputs, values and call.rng"
            )

    def test_a_deterministic_component_ignores_its_stream(self) -> None:
        """If ``deterministic`` is true, another random stream gives the same outputs."""
        component = self.make("tested")
        if not isinstance(component, Operation):
            raise SkipTest("the components in the body declare whether they are deterministic")
        if not component.deterministic(setting_values(component, self._system(component))):
            raise SkipTest("the component is not deterministic")
        found = [self._outputs(component, sample) for sample in (0, 1)]
        for number, (one, other) in enumerate(zip(*found, strict=True), 1):
            assert _same(one, other), (
                f"deterministic(values) is True, but on inputs {number} two random streams give "
                f"{short_repr(one)} and {short_repr(other)}; let deterministic() return False"
            )

    def test_global_generators_are_not_used(self) -> None:
        """Results neither depend on the global random generators nor change them."""
        found = []
        for seed in (1, 2):
            with without_global_generators("the component", seed):
                found.append(self._outputs(self.make("tested")))
        assert _same(*found), (
            f"the outputs {short_repr(found[0])} and {short_repr(found[1])} depend on the seed of a global "
            "generator; draw from call.rng"
        )

    def test_inputs_are_not_changed(self) -> None:
        """Inputs and values are unchanged after a call, because other calls read them too."""
        component = self.make("tested")
        system = self._system(component)
        for number, inputs in enumerate(self._inputs(), 1):
            if isinstance(component, Operation):
                node = system.nodes[component.name]
                read = {name: inputs.get(name, port.default) for name, port in node.inputs.items()}
                given = copy.deepcopy(read)
                wired = {name: value for name, value in given.items() if name in component.settings}
                values = {**setting_values(component, system), **wired}
                before = copy.deepcopy((given, values))
                asyncio.run(_run(component, given, values, self.engine()))
                after = (given, values)
            else:  # a composite: only the executor can run its body
                given = copy.deepcopy(dict(inputs))
                before, after = (copy.deepcopy(given), {}), (given, {})
                self._trace(system, given)
            assert _same(before, after), (
                f"the component modified its inputs or values {number}: {short_repr(before)} became "
                f"{short_repr(after)}; copy values before modifying them"
            )

    def test_copies_behave_alike(self) -> None:
        """Shallow and deep copies behave like the original."""
        component = self.make("tested")
        for how in (copy.copy, copy.deepcopy):
            self._check_alike(component, how(component), f"copy.{how.__name__}")

    def test_it_can_be_written_and_read(self) -> None:
        """A system with the component is unchanged after a round trip through YAML."""
        component = self.make("tested")
        if not self.dumpable:
            raise SkipTest("the kit declares that the component cannot be written to YAML")
        if place_of(type(component)) is None:
            raise SkipTest(f"{type(component).__name__} cannot be imported by its name")
        system = self._system(component)
        try:
            text = dump(system)
            read = loads(text, models=_models(system)).system
        except CompoundError as error:
            raise AssertionError(
                f"the system of the component cannot be written to YAML and read back: {error}; store each "
                "argument of __init__ in an attribute of the same name, or set dumpable = False in the kit"
            ) from error
        for what in ("signature", "configuration", "settings"):
            one, other = getattr(system, what), getattr(read, what)
            assert one == other, (
                f"after a round trip through YAML, the system has the {what} {short_repr(other)} instead of "
                f"{short_repr(one)}; the file is\n{text}"
            )

    # -- parts -----------------------------------------------------------------------------------------

    def _inputs(self) -> list[Values]:
        """Return the inputs of each call."""
        given = self.inputs()
        found = [given] if isinstance(given, Mapping) else list(given)
        assert found, "inputs() returned no inputs; return those of at least one call, {} for none"
        names = {tuple(sorted(inputs)) for inputs in found}
        assert len(names) == 1, (
            f"inputs() must name the same ports in every call, but names {sorted(names)}"
        )
        return found

    def _system(self, component: Component) -> System:
        """Return the system whose only node is the component."""
        examples = self._inputs()
        ports = component.inputs or {}

        def kind(name: str) -> object:
            if name in ports:
                return ports[name].type
            setting = component.settings.get(name)
            if isinstance(setting, Space):
                return setting.type
            kinds = {type(inputs[name]) for inputs in examples}
            return kinds.pop() if len(kinds) == 1 else Any

        wires: dict[str, Any] = {name: Input(name, kind(name)) for name in examples[0]}
        try:
            made = component(**wires)
        except DeclarationError as error:
            raise AssertionError(
                f"the inputs of the kit cannot be connected to the component: {error}"
            ) from error
        fields = made if isinstance(made, Outputs) else [made]
        outputs = {output.field: output for output in fields if isinstance(output, Output)}
        return System("tested_alone", outputs=outputs, lm=LM)

    def _trace(
        self, system: System, inputs: Values, sample: int = 0, engine: Engine | None = None
    ) -> Trace:
        """Return the trace of one run, which must not fail."""
        answering = engine or self.engine()

        async def run() -> Trace:
            executor = Executor(lambda _: answering)
            try:
                return await executor.run(system, inputs, example="kit", sample=sample)
            finally:
                await executor.aclose()

        trace = asyncio.run(run())
        assert trace.failure is None, (
            f"on {short_repr(inputs)} the call failed: {trace.failure.message}"
        )
        return trace

    def _traces(self, component: Component, sample: int = 0) -> Iterator[Trace]:
        system = self._system(component)
        for inputs in self._inputs():
            yield self._trace(system, inputs, sample)

    def _outputs(self, component: Component, sample: int = 0) -> list[Values]:
        """Return the outputs of each call."""
        return [trace.outputs for trace in self._traces(component, sample)]

    def _check_alike(self, component: Component, other: Component, how: str) -> None:
        """Check that another component has the same declarations and outputs as the first one."""
        for what in ("name", "kind", "version", "inputs", "outputs"):
            one, two = getattr(component, what), getattr(other, what)
            assert one == two, (
                f"after {how} the component has {what} {short_repr(two)} instead of {short_repr(one)}"
            )
        spaces = [
            {name: space.to_json() for name, space in c.parameters.items()}
            for c in (component, other)
        ]
        assert spaces[0] == spaces[1], (
            f"after {how} the component has other parameters: {short_repr(spaces[1])}"
        )
        found = [self._outputs(c) for c in (component, other)]
        assert _same(*found), (
            f"after {how} the component returns {short_repr(found[1])}, not {short_repr(found[0])}"
        )


class _Call:
    """Call context of a component that the kit runs directly; implements `CallContext`."""

    def __init__(self, engine: Engine) -> None:
        self.address = "tested"
        self.seed = 0
        self.last_attempt = True
        self.rng = np.random.default_rng(0)
        self.sessions = Sessions()
        self._engine = engine

    async def generate(
        self, lm: str, request: Request, on_text: OnText | None = None
    ) -> Completion:
        """Send the request to the engine."""
        return await self._engine.generate(request)

    @asynccontextmanager
    async def reserve(self, worst: Usage) -> AsyncIterator[list[Usage]]:
        """Accept any usage."""
        yield []

    def forwards(self, lm: str) -> bool:
        """Return whether the engine forwards requests."""
        return Capabilities(self._engine).forwards

    async def scores(
        self, reward: Reference, component: str, calls: Sequence[CallValues]
    ) -> list[float]:
        """Return the score 0 for every call."""
        return [0.0] * len(calls)


async def _run(component: Operation, given: Values, values: Values, engine: Engine) -> Values:
    call = _Call(engine)
    try:
        return await component.run(given, values, call)
    finally:
        await call.sessions.aclose()


def _check_ports(what: str, ports: object) -> None:
    assert isinstance(ports, Mapping), f"{what} must map names to ports, but is {short_repr(ports)}"
    for name, port in ports.items():
        assert isinstance(name, str), f"{what} must have strings as names, but has {name!r}"
        assert NAME.match(name), (
            f"{what} must have names of letters, digits and underscores, but has {name!r}"
        )
        assert isinstance(port, Port), (
            f"{name!r} of {what} must be a Port, but is {short_repr(port)}"
        )
        try:
            accepts(port.type, None)
        except DeclarationError as error:
            raise AssertionError(f"{name!r} of {what}: {error}") from error


def _models(system: System) -> list[str]:
    """Return the models that a system names."""
    found = [LM]
    for component in system.components.values():
        lm = component.settings.get("lm")
        found += [str(option) for option in lm.options] if isinstance(lm, Choice) else []
        found += [lm] if isinstance(lm, str) else []
    return found


def _same(one: object, other: object) -> bool:
    """Return whether two values have the same JSON form; NaN equals itself."""
    return canonical_json(to_readable_json(one)) == canonical_json(to_readable_json(other))
