"""Conformance kit for components."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import SkipTest

from compound.core.engine import Engine
from compound.core.errors import DeclarationError
from compound.core.example import Values
from compound.core.formatting import short_repr
from compound.execution.executor import Executor
from compound.execution.schedule import setting_values
from compound.execution.trace import Trace
from compound.graph.component import NAME, Component, Input, Operation, Output, Outputs
from compound.graph.composite import Composite
from compound.graph.space import Space
from compound.graph.system import System
from compound.graph.types import Port, accepts, format_type
from compound.testing.checks import json_problem, same_json, without_global_generators
from compound.testing.doubles import ScriptedLM

__all__ = ["ComponentKit"]

LM = "lm"
LONGEST_REPR = 300
ADDRESS = " at 0x"  # part of Python's default repr


class ComponentKit:
    """Checks of a component; subclass it as ``Test…``, and override `make` and `inputs`.

    The component runs as the only node of a system that uses the model of `engine`.

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
            assert isinstance(value, str) and value, (  # noqa: PT018
                f"{what} must be a text that is not empty, but is {short_repr(value)}"
            )
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

    def test_equal_components_behave_alike(self) -> None:
        """Another instance and copies have equal declarations, and equal outputs of equal calls."""
        component = self.make("tested")
        others = {
            "another instance": self.make("tested"),
            "a copy by copy.copy": copy.copy(component),
            "a copy by copy.deepcopy": copy.deepcopy(component),
        }
        for which, other in others.items():
            for what in ("name", "kind", "version", "inputs", "outputs"):
                self._check_equal(which, what, getattr(component, what), getattr(other, what))
            spaces = [
                {name: space.to_json() for name, space in c.parameters.items()}
                for c in (component, other)
            ]
            self._check_equal(which, "the parameters", *spaces)
            self._check_equal(which, "the outputs", *map(self._outputs, (component, other)))

    def _check_equal(self, which: str, what: str, one: object, other: object) -> None:
        assert one == other or same_json(one, other), (
            f"{which} has {what} {short_repr(other)} instead of {short_repr(one)}; a component must depend "
            "only on its arguments, and a call only on inputs, values and call.rng, since results are cached"
        )

    def test_the_repr_is_short(self) -> None:
        """The repr fits into error messages and notebooks."""
        found = repr(self.make("tested"))
        assert len(found) <= LONGEST_REPR, (
            f"repr has {len(found)} characters; it must have at most {LONGEST_REPR}: {found[:80]}..."
        )

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

    def test_a_deterministic_component_ignores_its_stream(self) -> None:
        """If ``deterministic`` is true, another random stream gives the same outputs."""
        component = self.make("tested")
        if not isinstance(component, Operation):
            raise SkipTest("the components in the body declare whether they are deterministic")
        if not component.deterministic(setting_values(component, self._system(component))):
            raise SkipTest("the component is not deterministic")
        found = [self._outputs(component, sample) for sample in (0, 1)]
        for number, (one, other) in enumerate(zip(*found, strict=True), 1):
            assert same_json(one, other), (
                f"deterministic(values) is True, but on inputs {number} two random streams give "
                f"{short_repr(one)} and {short_repr(other)}; let deterministic() return False"
            )

    def test_global_generators_are_not_used(self) -> None:
        """Results neither depend on the global random generators nor change them."""
        found = []
        for seed in (1, 2):
            with without_global_generators("the component", seed):
                found.append(self._outputs(self.make("tested")))
        assert same_json(*found), (
            f"the outputs {short_repr(found[0])} and {short_repr(found[1])} depend on the seed of a global "
            "generator; draw from call.rng"
        )

    def _inputs(self) -> list[Values]:
        given = self.inputs()
        found = [given] if isinstance(given, Mapping) else list(given)
        assert found, "inputs() returned no inputs; return those of at least one call, {} for none"
        names = {tuple(sorted(inputs)) for inputs in found}
        assert len(names) == 1, (
            f"inputs() must name the same ports in every call, but names {sorted(names)}"
        )
        return found

    def _system(self, component: Component) -> System:
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

    def _trace(self, system: System, inputs: Values, sample: int = 0) -> Trace:
        answering = self.engine()

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
        return [trace.outputs for trace in self._traces(component, sample)]


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
