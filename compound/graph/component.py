"""Components, and the nodes that use them in a graph.

A component is a typed step (x_k; v_k) -> y_k: ports for x and y, settings for v. Calling one inside
a declaration creates a `Node`, a use of the component whose inputs are wired to other outputs.
Components are immutable; tuned values are stored in a `Configuration`.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import numpy as np

from compound.core.engine import Completion, OnText, Request, Usage
from compound.core.errors import DeclarationError, WiringError, suggest_name
from compound.core.example import CallValues
from compound.core.formatting import MOST_NAMES, format_names, format_repr, short_repr
from compound.core.loops import Sessions
from compound.core.narrowing import report_wrong_arguments
from compound.core.storage.artifacts import Reference
from compound.graph.building import COMPUTE, GraphBuild, Placeholder, active_build
from compound.graph.configuration import Configuration
from compound.graph.space import Space
from compound.graph.types import (
    Port,
    accepts,
    format_ports,
    format_type,
    is_assignable,
    member_type,
    member_types,
    union,
)

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


def check_name(kind: str, name: object) -> None:
    """Raise `DeclarationError` unless ``name`` is valid in addresses and configuration keys."""
    if not isinstance(name, str) or not NAME.match(name):
        raise DeclarationError(
            f"{kind} name must consist of letters, digits and underscores and not start with a digit, "
            f"but got {name!r}"
        )


@report_wrong_arguments
@dataclass(frozen=True, eq=False)
class Input(Placeholder):
    """A value that the system reads from each example.

    >>> Input("question", str).label
    '$question'
    """

    name: str
    type: object = str

    def __post_init__(self) -> None:
        check_name("Input", self.name)

    @property
    def label(self) -> str:
        """Spelling in messages and YAML."""
        return f"${self.name}"

    def equals(self, value: object) -> Condition:
        """Return the condition that this input equals ``value``."""
        return Condition(self, value)


@dataclass(frozen=True, eq=False, repr=False)
class Output(Placeholder):
    """One output field of a node; pass it to another component to create an edge.

    A field of a structured output is an output, too: ``person["name"]``, or ``person.name`` unless
    the name is one of this class. ``path`` holds the names of such fields.
    """

    node: Node
    field: str
    path: tuple[str, ...] = ()

    @property
    def type(self) -> object:
        """Type of the port, or of the field at ``path``."""
        kind = self.node.component.outputs[self.field].type
        for i, name in enumerate(self.path):
            kind = member_type(kind, name, Output(self.node, self.field, self.path[:i]).label)
        return kind

    @property
    def label(self) -> str:
        """Spelling in messages and YAML: ``$node``, or ``$node.field`` if the node has several outputs."""
        ports = self.node.component.outputs
        named = len(ports) > 1 or (self.path and self.path[0] in ports)
        return ".".join([f"${self.node.name}", *([self.field] if named else []), *self.path])

    def __getitem__(self, name: str) -> Output:
        if not isinstance(name, str):
            self._reject("an index or a slice reads", COMPUTE)
        found = Output(self.node, self.field, (*self.path, name))
        found.type  # noqa: B018 - raises if there is no such field
        return found

    def __getattr__(self, name: str) -> Output:
        if name.startswith("_") or name in ("node", "field", "path"):  # in a copy in progress
            raise AttributeError(name)
        if name not in member_types(self.type):
            raise AttributeError(f"{self.label} has no field or attribute {name!r}")
        return self[name]

    def __repr__(self) -> str:
        return f"Output({self.label}: {format_type(self.type)})"

    def equals(self, value: object) -> Condition:
        """Return the condition that this output equals ``value``."""
        return Condition(self, value)


Source = Input | Output


@dataclass(frozen=True, eq=False, repr=False)
class Condition:
    """Condition under which a node runs: its source equals ``value``. It makes E(x) depend on the input."""

    source: Source
    value: object = True

    def __repr__(self) -> str:
        return f"Condition({self.source.label} == {short_repr(self.value)})"


class Outputs(Placeholder):
    """Outputs of a node with several output fields: ``node.answer`` or ``node["answer"]``."""

    def __init__(self, node: Node) -> None:
        self._node = node

    @property
    def label(self) -> str:
        """Spelling in messages."""
        return f"${self._node.name}"

    def __getitem__(self, name: str) -> Output:
        ports = self._node.component.outputs
        if name not in ports:
            raise WiringError(
                f"{self._node.name} has no output {name!r}", hint=suggest_name(name, ports)
            )
        return Output(self._node, name)

    def __getattr__(self, name: str) -> Output:
        if name.startswith("_"):
            raise AttributeError(name)
        return self[name]

    def __iter__(self) -> Iterator[Output]:
        return (Output(self._node, name) for name in self._node.component.outputs)

    def __repr__(self) -> str:
        return f"Outputs({self._node.name}: {', '.join(self._node.component.outputs)})"


@dataclass(frozen=True, eq=False, repr=False)
class Node:
    """One use of a component. ``wires`` maps each connected input port or setting to its source."""

    name: str
    component: Component
    wires: Mapping[str, Source]
    when: Condition | None = None
    inputs: Mapping[str, Port] = field(default_factory=dict)

    @property
    def sources(self) -> tuple[Source, ...]:
        """Every source that this node waits for: its wires, then the source of its condition."""
        guard = (self.when.source,) if self.when else ()
        return (*self.wires.values(), *guard)

    def __repr__(self) -> str:
        wires = {port: source.label for port, source in [*self.wires.items()][:MOST_NAMES]}
        more = {"more": str(len(self.wires) - MOST_NAMES)} if len(self.wires) > MOST_NAMES else {}
        guard = {"when": repr(self.when)} if self.when else {}
        kind = f"{type(self.component).__name__} {self.component.name!r}"
        return format_repr("Node", repr(self.name), kind, **wires, **more, **guard)


class CallContext(Protocol):
    """Resources available to a running component besides its inputs and values."""

    @property
    def address(self) -> str:
        """Address of the call in the trace."""
        ...

    @property
    def seed(self) -> int:
        """Seed of the call's random stream."""
        ...

    @property
    def rng(self) -> np.random.Generator:
        """Random generator of the call."""
        ...

    @property
    def sessions(self) -> Sessions:
        """Connections that stay open until the end of the run, such as those to tool servers."""
        ...

    async def generate(
        self, lm: str, request: Request, on_text: OnText | None = None
    ) -> Completion:
        """Send a request to engine ``lm``, within the budget and its concurrency; record usage.

        ``on_text`` receives the answer's text as it arrives, if the engine can stream, without
        registered keys.
        """
        ...

    def forwards(self, lm: str) -> bool:
        """Return whether engine ``lm`` sends requests in OpenAI's format as they are (`Request.forward`)."""
        ...

    def reserve(self, worst: Usage) -> AbstractAsyncContextManager[list[Usage]]:
        """Reserve budget for requests that the component sends itself; append their usage to the list.

        Without reported usage, ``worst`` is charged. Usage above it is charged in full, and ends
        the run with the next request if a limit is exceeded.
        """
        ...

    async def scores(
        self, reward: Reference, component: str, calls: Sequence[CallValues]
    ) -> Sequence[float]:
        """Score (inputs, outputs) pairs of a component by a stored reward; higher is better."""
        ...


class Component(ABC):
    """A typed step of a system: an `Operation`, which runs as one call, or a `Composite`, which has a body.

    Attributes:
        name: name of the component, unique in a system; part of configuration keys.
        inputs: the input ports, or ``None`` if any name and type may be connected.
        outputs: the output ports.
        settings: each a plain value, or a `Space` if it may be tuned. Any setting may be wired.
        cacheable: whether calls are worth caching and counting (those of engines and indexes are).
        external_inputs: whether a program outside of the graph chooses the inputs, so that a fork
            compares them before it reuses a call.
        timeout: seconds per attempt, or ``None``.
        retries: maximum number of retries after a `TransientError`.
    """

    kind: ClassVar[str] = "component"
    cacheable: ClassVar[bool] = False
    positional: ClassVar[bool] = (
        False  # whether the declared order of the inputs is that of arguments
    )
    external_inputs: ClassVar[bool] = False
    name: str
    timeout: float | None = None
    retries: int = 0

    @property
    @abstractmethod
    def inputs(self) -> Mapping[str, Port] | None:
        """The input ports, or ``None`` for any."""

    @property
    @abstractmethod
    def outputs(self) -> Mapping[str, Port]:
        """The output ports."""

    @property
    def settings(self) -> Mapping[str, object]:
        """Plain values and spaces by name; `run` receives their values as ``values``."""
        return {}

    @property
    def parameters(self) -> Mapping[str, Space]:
        """The tunable settings."""
        return {name: s for name, s in self.settings.items() if isinstance(s, Space)}

    @property
    @abstractmethod
    def version(self) -> str:
        """Everything that changes the behavior except inputs and values; part of cache keys."""

    def deterministic(self, values: Mapping[str, object]) -> bool:
        """Return whether equal inputs and ``values`` give equal outputs for every seed."""
        return True

    def is_demonstration(self, outputs: Mapping[str, object]) -> bool:
        """Return whether a successful call with these outputs may be shown as a demonstration."""
        return True

    def __repr__(self) -> str:
        parameters = format_names(self.parameters) if self.parameters else ""
        outputs = format_names(self.outputs)
        return format_repr(
            type(self).__name__, repr(self.name), outputs=outputs, parameters=parameters
        )

    def output_sizes(self, sizes: Mapping[str, float]) -> Mapping[str, float]:
        """Return the largest number of items of list outputs, and the largest value of numbers, if known.

        Maps and loops read them, so that calls can be counted before a run.

        Args:
            sizes: the same of the inputs; infinite if unknown.
        """
        return {}

    def __call__(
        self,
        *sources: Any,  # noqa: ANN401 - sources; typed as their values in functions that build a graph
        name: str | None = None,
        when: Any = None,  # noqa: ANN401
        **wires: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401 - `Output` or `Outputs`, depending on the component's ports
        """Use the component in a graph: create a node whose inputs are ``wires``.

        A source given by position feeds the only port, or the port of its position if the component
        declares an order (`positional`); if any port may be connected, an `Input` feeds the port
        with its own name. While a graph is built from a function, further uses of a component are
        numbered (``reader_2``), and constants are sources, too.

        Returns the node's `Output`, or an `Outputs` if it has several.
        """
        if not isinstance(name, str | None) or not isinstance(
            when, Input | Output | Condition | None
        ):
            taken, what = (
                ("when", "condition") if isinstance(name, str | None) else ("name", "name")
            )
            raise WiringError(
                f"{self.name}: {taken}= is the node's own {what}, and no input",
                hint=f"connect the input under another name, such as {self.name}(the_{taken}=…)",
            )
        build = active_build()
        own = name or (self.name if build is None else build.node_name(self.name))
        named = {**_by_position(self, own, sources, wires), **wires} if sources else wires
        if build is not None and build.constant is not None:
            named = {port: build.constant(f"{own}_{port}", value) for port, value in named.items()}
        node = connect(self, own, named, when)
        if build is not None:
            _add(build, node)
        if len(self.outputs) == 1:
            return Output(node, next(iter(self.outputs)))
        return Outputs(node)


class Operation(Component):
    """A component that runs as one call; subclass it and implement `run` to add a component kind."""

    @abstractmethod
    async def run(
        self, inputs: Mapping[str, object], values: Mapping[str, object], call: CallContext
    ) -> Mapping[str, object]:
        """Compute the outputs from the arguments only; raise `CallError` for a failed call."""


@dataclass(slots=True)
class Value:
    """A value in a run: the data, and the addresses of the calls that produced it.

    Treat it as immutable; it is not frozen because it is created in hot code.
    """

    data: object
    sources: tuple[str, ...] = ()


def merge_addresses(*sources: tuple[str, ...]) -> tuple[str, ...]:
    """Return the union of several address lists, in order of first occurrence.

    >>> merge_addresses(("a", "b"), ("b", "c"))
    ('a', 'b', 'c')
    """
    return tuple(dict.fromkeys(address for group in sources for address in group))


class Body(Protocol):
    """The graph inside a composite; implemented by `System`."""

    @property
    def nodes(self) -> Mapping[str, Node]:
        """The nodes by name."""
        ...

    @property
    def configuration(self) -> Configuration:
        """The configuration that the body is bound to."""
        ...


class CompositeBase(Component):
    """A component with a body graph; see `compound.graph.composite.Composite`."""

    body: Body


def connect(
    component: Component,
    name: str,
    wires: Mapping[str, Source],
    when: Source | Condition | None = None,
) -> Node:
    """Create a node, checking every edge."""
    check_name("Node", name)
    if not isinstance(component, Operation | CompositeBase):
        raise DeclarationError(
            f"component {component.name!r} is neither an Operation nor a Composite",
            hint="subclass Operation and implement run",
        )
    check_name("Component", component.name)
    for produced in component.outputs:
        check_name("Output", produced)
    for port, source in wires.items():
        if not isinstance(source, Input | Output):
            raise WiringError(
                f"{name}.{port} must be connected to an input or an output, but got {source!r}",
                hint=_constant_hint(source),
            )
    ports = _ports(component, name, wires)
    for port, source in wires.items():
        if port in component.settings:
            _check_setting(component, name, port, source)
        _check_edge(component, name, port, ports[port], source)
    missing = [port for port, p in ports.items() if not p.optional and port not in wires]
    if missing:
        raise WiringError(
            f"{name}.{missing[0]} is not connected", hint=f"{name} takes {format_ports(ports)}"
        )
    condition = Condition(when) if isinstance(when, Input | Output) else when
    _check_condition(name, condition)
    ordered = {port: wires[port] for port in ports if port in wires}
    return Node(name, component, ordered, condition, ports)


def _add(build: GraphBuild, node: Node) -> None:
    if node.name in build.nodes:
        raise WiringError(
            f"two nodes are named {node.name!r}", hint="give the second use another name=…, or none"
        )
    build.nodes[node.name] = node


def _constant_hint(value: object) -> str:
    if isinstance(value, Outputs):
        return f"name one of its fields: {format_names(value._node.component.outputs)}"
    if isinstance(value, list | tuple | Mapping):
        return f"make the {type(value).__name__} in a function with @cp.component"
    return "use the component's settings for constants, or cp.components.Hyperparameter('name', 'constant')()"


def _by_position(
    component: Component, name: str, sources: Sequence[Source], wires: Mapping[str, Source]
) -> dict[str, Source]:
    declared = component.inputs
    if declared is not None:
        free = [port for port in declared if port not in wires]
        if len(sources) == len(free) == 1:
            return {free[0]: sources[0]}
        if component.positional and len(sources) <= len(declared):
            placed = dict(zip(declared, sources, strict=False))
            if twice := next((port for port in placed if port in wires), None):
                raise WiringError(f"{name}.{twice} is connected twice")
            return placed
        ports = format_ports(declared)
        raise WiringError(f"{name} needs its inputs as keywords", hint=f"{name} takes {ports}")
    found: dict[str, Source] = {}
    for source in sources:
        if not isinstance(source, Input):
            label = getattr(source, "label", repr(source))
            raise WiringError(
                f"{name} accepts inputs of any name, so {label} must be given as a keyword",
                hint=f"{name}(some_name=…)",
            )
        if source.name in found or source.name in wires:
            raise WiringError(f"{name}.{source.name} is connected twice")
        found[source.name] = source
    return found


def _ports(component: Component, name: str, wires: Mapping[str, Source]) -> dict[str, Port]:
    """Return the node's ports: the declared ones, or one per wire, plus the wired settings."""
    declared = component.inputs
    settings = component.settings
    if declared is None:
        ports = {port: Port(source.type) for port, source in wires.items() if port not in settings}
    else:
        ports = dict(declared)
        unknown = [port for port in wires if port not in ports and port not in settings]
        if unknown:
            raise WiringError(
                f"{name} has no input {unknown[0]!r}",
                hint=f"{suggest_name(unknown[0], [*ports, *settings])} ({name} takes {format_ports(ports)})",
            )
    for port in wires:
        if port in settings:
            setting = settings[port]
            plain = Any if setting is None else type(setting)
            ports[port] = Port(setting.type if isinstance(setting, Space) else plain)
    return ports


def _check_setting(component: Component, name: str, port: str, source: Source) -> None:
    """Refuse an edge by which data would replace a setting that only has the same name."""
    setting, declared = component.settings[port], component.inputs
    what = f"{port!r} is a setting of {component.kind} {component.name!r}"
    rename = f"connect it under another name, such as the_{port}"
    if declared is not None and port in declared:
        raise WiringError(f"{name}.{port}: {what}, and also an input", hint="rename the input")
    if declared is not None and not hasattr(component, "takes"):
        return  # no data could be connected under this name
    if type(source) is Input:
        raise WiringError(
            f"{name}.{port}: {what}, which the data in {source.label} would replace",
            hint=f"{rename}; settings are fed by hyperparameters, selectors and functions",
        )
    if not isinstance(source, Output) or source.node.component.kind in (
        "hyperparameter",
        "selector",
    ):
        return
    if setting is not None and setting not in ("", ()):
        raise WiringError(
            f"{name}.{port}: {what} with the value {short_repr(setting)}, which {source.label} would replace",
            hint=f"{rename}; to replace the setting, feed it by a hyperparameter or a selector",
        )


def _check_edge(component: Component, name: str, port: str, expected: Port, source: Source) -> None:
    if port in component.settings and not isinstance(source.type, type):
        return  # Literal or Any into a setting is checked at run time
    if is_assignable(source.type, expected.type) or (
        expected.optional and is_assignable(source.type, union(expected.type, None))
    ):
        return
    possible = [
        label for label, kind in _node_outputs(source) if is_assignable(kind, expected.type)
    ]
    hint = f"connect {' or '.join(possible)}" if possible else "change one of the two declarations"
    raise WiringError(
        f"{name}.{port} expects {format_type(expected.type)}, but {source.label} is "
        f"{format_type(source.type)}",
        hint=f"{hint} ({name} takes {format_ports(component.inputs or {})})",
    )


def _node_outputs(source: Source) -> list[tuple[str, object]]:
    if isinstance(source, Input):
        return []
    return [
        (Output(source.node, f).label, p.type) for f, p in source.node.component.outputs.items()
    ]


def _check_condition(name: str, condition: Condition | None) -> None:
    if condition is None:
        return
    source = condition.source
    if not is_assignable(type(condition.value), source.type) and not accepts(
        source.type, condition.value
    ):
        raise WiringError(
            f"{name}: when compares {source.label} with {condition.value!r}, "
            f"but its type is {format_type(source.type)}",
            hint="use when=output.equals(value) with a possible value of the output",
        )
