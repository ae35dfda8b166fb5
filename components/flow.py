"""Composites: a body that repeats (`Loop`) or runs once per item of a list (`Map`)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from compound.core.errors import CallError, DeclarationError, suggest_name
from compound.core.narrowing import report_wrong_arguments
from compound.graph.component import Value, merge_addresses
from compound.graph.composite import Composite, RunBody, largest_number
from compound.graph.space import Int
from compound.graph.system import System
from compound.graph.types import Port, format_type, is_assignable


def _body_ports(body: System) -> dict[str, Port]:
    return {name: Port(source.type) for name, source in body.outputs.items()}


@report_wrong_arguments
class Loop(Composite):
    """A body that repeats, with outputs fed back to inputs, until a condition holds or the turn limit.

    Args:
        name: the component's name.
        body: the system that runs in each turn.
        carry: maps a body output to the body input that it replaces in the next turn.
        until: a boolean body output that ends the loop when true; without it, all turns run.
        max_turns: the maximum number of turns; may be a space to tune.

    The outputs are the body's outputs in the last turn. Calls have addresses ``name[turn]/node``.

    Example:
        >>> from compound import Input, System
        >>> from compound.components.function import Function
        >>> def halve(x: int) -> int:
        ...     return x // 2
        >>> def small(x: int) -> bool:
        ...     return x < 3
        >>> half = Function("halve", halve)(x=Input("x", int))
        >>> body = System("turn", outputs={"x": half, "done": Function("small", small)(x=half)})
        >>> loop = Loop("shrink", body, carry={"x": "x"}, until="done", max_turns=9)
        >>> system = System("demo", outputs={"x": loop(x=Input("start", int)).x})
        >>> import compound
        >>> compound.run(system, {"start": 20}).outputs
        {'x': 2}
    """

    kind = "loop"

    def __init__(
        self,
        name: str,
        body: System,
        *,
        carry: Mapping[str, str],
        until: str | None = None,
        max_turns: int | Int = 5,
    ) -> None:
        self.name = name
        self.body = body
        self.carry = dict(carry)
        self.until = until
        self.max_turns = max_turns
        _without_model(name, body)
        if (max_turns.low if isinstance(max_turns, Int) else max_turns) < 1:
            raise DeclarationError(f"loop {name!r}: max_turns must be >= 1, but got {max_turns}")
        for source, target in self.carry.items():
            _check_carry(name, body, source, target)
        if until is not None:
            _require_port(name, "until", until, body.outputs)
            if not is_assignable(body.outputs[until].type, bool):
                raise DeclarationError(
                    f"loop {name!r}: until needs a bool, but {until!r} is "
                    f"{format_type(body.outputs[until].type)}"
                )

    @property
    def inputs(self) -> Mapping[str, Port]:  # noqa: D102
        return {name: Port(kind) for name, kind in self.body.inputs.items()}

    @property
    def outputs(self) -> Mapping[str, Port]:  # noqa: D102
        return _body_ports(self.body)

    @property
    def settings(self) -> Mapping[str, object]:  # noqa: D102
        return {"max_turns": self.max_turns}

    @property
    def version(self) -> str:  # noqa: D102
        return f"loop:{self.body.signature}:{sorted(self.carry.items())}:{self.until}"

    def most_turns(self, sizes: Mapping[str, float]) -> float:  # noqa: D102
        return sizes.get("max_turns", largest_number(self.max_turns))

    async def drive(  # noqa: D102
        self, inputs: Mapping[str, Value], values: Mapping[str, object], body: RunBody
    ) -> Mapping[str, Value] | None:
        state = {name: inputs[name] for name in self.body.inputs}
        turns = values["max_turns"]
        if type(turns) is not int or turns < 1:
            raise CallError(f"max_turns must be >= 1, but got {turns!r}")
        # The number of turns depends on the limit, if an edge sets it, and on every earlier
        # `until`. Later turns and the outputs therefore depend on those calls as well.
        decided = inputs["max_turns"].sources if "max_turns" in inputs else ()
        outputs: Mapping[str, Value] = {}
        for turn in range(turns):
            ran = await body(turn, state)
            if ran is None:
                return None
            if self.until is not None and turn + 1 < turns:
                decided = merge_addresses(decided, ran[self.until].sources)
            outputs = {
                name: Value(v.data, merge_addresses(v.sources, decided)) for name, v in ran.items()
            }
            if self.until is not None and outputs[self.until].data is True:
                break
            state = {**state, **{target: outputs[source] for source, target in self.carry.items()}}
            state = {
                name: Value(v.data, merge_addresses(v.sources, decided))
                for name, v in state.items()
            }
        return outputs


@report_wrong_arguments
class Map(Composite):
    """A body that runs concurrently for each item of a list; the outputs are lists in the items' order.

    Args:
        name: the component's name.
        body: the system that runs for one item.
        over: the body input that receives the items; all other inputs are shared.

    Example:
        >>> from compound import Input, System
        >>> from compound.components.function import Function
        >>> def square(x: int) -> int:
        ...     return x * x
        >>> body = System("one", outputs={"y": Function("square", square)(x=Input("x", int))})
        >>> squares = Map("squares", body, over="x")
        >>> import compound
        >>> system = System("demo", outputs={"ys": squares(x=Input("xs", list[int]))})
        >>> compound.run(system, {"xs": [1, 2]}).outputs
        {'ys': [1, 4]}
    """

    kind = "map"
    over: str

    def __init__(self, name: str, body: System, *, over: str) -> None:
        self.name = name
        self.body = body
        self.over = over
        _without_model(name, body)
        _require_port(name, "over", over, body.inputs)

    @property
    def inputs(self) -> Mapping[str, Port]:  # noqa: D102
        ports = {name: Port(kind) for name, kind in self.body.inputs.items()}
        return {**ports, self.over: Port(list[ports[self.over].type])}  # type: ignore[misc]

    @property
    def outputs(self) -> Mapping[str, Port]:  # noqa: D102
        return {
            name: Port(list[port.type])  # type: ignore[name-defined]
            for name, port in _body_ports(self.body).items()
        }

    @property
    def version(self) -> str:  # noqa: D102
        return f"map:{self.body.signature}:{self.over}"

    def most_turns(self, sizes: Mapping[str, float]) -> float:  # noqa: D102
        return sizes[self.over]

    async def drive(  # noqa: D102
        self, inputs: Mapping[str, Value], values: Mapping[str, object], body: RunBody
    ) -> Mapping[str, Value] | None:
        items = inputs[self.over]
        if not isinstance(items.data, list | tuple):
            raise CallError(f"{self.over} must be a list, but got {items.data!r:.200}")

        async def run_item(index: int, item: object) -> Mapping[str, Value] | None:
            return await body(index, {**inputs, self.over: Value(item, items.sources)})

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run_item(i, item)) for i, item in enumerate(items.data)]
        results = [task.result() for task in tasks]
        done = [result for result in results if result is not None]
        if len(done) < len(results):
            return None
        return {
            name: Value(
                [result[name].data for result in done],
                merge_addresses(items.sources, *(result[name].sources for result in done)),
            )
            for name in self.body.outputs
        }


def _without_model(name: str, body: System) -> None:
    if body.defaults:
        raise DeclarationError(
            f"{name!r}: its body sets the model {body.defaults['lm']!r}, but a body cannot set a model",
            hint="set lm on the outermost system or on the components of the body",
        )


def _require_port(name: str, setting: str, value: str, possible: Mapping[str, object]) -> None:
    if value not in possible:
        raise DeclarationError(
            f"{name!r}: {setting} names {value!r}, which its body does not have",
            hint=suggest_name(value, possible),
        )


def _check_carry(name: str, body: System, source: str, target: str) -> None:
    _require_port(name, "carry", source, body.outputs)
    _require_port(name, "carry", target, body.inputs)
    produced, expected = body.outputs[source].type, body.inputs[target]
    if not is_assignable(produced, expected):
        raise DeclarationError(
            f"loop {name!r}: carry gives {source!r} ({format_type(produced)}) to {target!r} "
            f"({format_type(expected)})"
        )
