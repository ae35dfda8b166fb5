"""Components from plain Python functions; the annotations define the ports."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from typing import cast

from pydantic import NonNegativeInt, PositiveFloat

from compound.core.errors import DeclarationError
from compound.core.example import Values
from compound.core.narrowing import report_wrong_arguments
from compound.core.threads import FunctionRunner, ThreadUse
from compound.graph.component import CallContext, Operation
from compound.graph.fingerprint import code_digest
from compound.graph.types import Port


@report_wrong_arguments
class Function(Operation):
    """A component that calls a typed Python function, sync or async.

    Parameters with defaults become optional inputs. Keyword arguments passed to the constructor
    become settings, which may be spaces to tune. For several outputs, give ``outputs`` and return a
    dict.

    Args:
        name: the component's name.
        function: an annotated function. A parameter named ``rng`` receives the call's random
            generator and makes the component stochastic.
        outputs: output fields and their types; default ``{"output": return type}``.
        timeout: time limit of one attempt in seconds; a sync function then runs in a thread.
        retries: how often transient errors are retried.
        thread: where a sync function runs. ``"auto"``: on the event loop, and in a thread after a
            call took longer than 10 ms, or while a server runs; ``"always"``: in a thread;
            ``"never"``: on the event loop, for functions that are bound to a thread.
        **settings: values or spaces for parameters of the function.

    Example:
        >>> def fuse(a: float, b: float, weight: float) -> float:
        ...     return weight * a + (1 - weight) * b
        >>> from compound.graph.space import Float
        >>> fused = Function("fuse", fuse, weight=Float(0.0, 1.0, value=0.5))
        >>> sorted(fused.inputs), sorted(fused.parameters)
        (['a', 'b'], ['weight'])
    """

    kind = "function"

    def __init__(
        self,
        name: str,
        function: Callable[..., object],
        *,
        outputs: Mapping[str, object] | None = None,
        timeout: PositiveFloat | None = None,
        retries: NonNegativeInt = 0,
        thread: ThreadUse = "auto",
        **settings: object,
    ) -> None:
        if isinstance(function, Function):  # made by `compound.component`
            function = function.function
        self.name = name
        self.function: Callable[..., object] = function
        self.timeout = timeout
        self.retries = retries
        self.thread: ThreadUse = thread
        if timeout is not None and thread == "never":
            raise DeclarationError(
                f"function {name!r} has a timeout, which needs a thread",
                hint='leave out timeout or thread="never"',
            )
        # a timeout can abandon a thread, but not code that blocks the event loop
        within = "always" if timeout is not None and thread == "auto" else thread
        self._runner = FunctionRunner(name, function, within)
        self._settings = settings
        hints, parameters = _signature(f"function {name!r}", function)
        unknown = [s for s in settings if s not in parameters]
        if unknown:
            raise DeclarationError(
                f"function {name!r} has no parameter {unknown[0]!r}",
                hint=f"its parameters are {sorted(parameters)}",
            )
        self.stochastic = "rng" in parameters
        self._inputs = {
            p: _port(f"function {name!r}", p, parameters[p], hints)
            for p in parameters
            if p not in {*settings, "rng"}
        }
        self._outputs = {
            f: Port(t) for f, t in (outputs or {"output": _returned(name, hints)}).items()
        }
        self._single = outputs is None
        self._version = f"function:{code_digest(function)}"

    @property
    def inputs(self) -> Mapping[str, Port]:  # noqa: D102
        return self._inputs

    @property
    def outputs(self) -> Mapping[str, Port]:  # noqa: D102
        return self._outputs

    @property
    def settings(self) -> Mapping[str, object]:  # noqa: D102
        return self._settings

    @property
    def single(self) -> bool:
        """Whether the returned value is the only output, instead of a mapping of outputs."""
        return self._single

    @property
    def version(self) -> str:  # noqa: D102
        return self._version

    def deterministic(self, values: Mapping[str, object]) -> bool:  # noqa: D102
        return not self.stochastic

    async def run(  # noqa: D102
        self, inputs: Mapping[str, object], values: Mapping[str, object], call: CallContext
    ) -> Mapping[str, object]:
        arguments: dict[str, object] = {**inputs, **values}
        if self.stochastic:
            arguments["rng"] = call.rng
        result = await self._runner.call(**arguments)
        if self._single:
            return {"output": result}
        return cast("Values", result)  # the executor checks it


def _signature(
    what: str, function: Callable[..., object]
) -> tuple[dict[str, object], dict[str, inspect.Parameter]]:
    try:
        target = function if inspect.isroutine(function) else type(function).__call__
        hints = typing.get_type_hints(target)
        parameters = dict(inspect.signature(function).parameters)
    except (NameError, TypeError, ValueError) as error:
        raise DeclarationError(f"{what}: cannot read its annotations: {error}") from error
    if inspect.isgeneratorfunction(target) or inspect.isasyncgenfunction(target):
        raise DeclarationError(f"{what} is a generator", hint="return a list of its values")
    for parameter in parameters.values():
        if parameter.kind in (
            parameter.VAR_KEYWORD,
            parameter.VAR_POSITIONAL,
            parameter.POSITIONAL_ONLY,
        ):
            raise DeclarationError(
                f"{what}: parameter {parameter.name!r} must not be positional-only, *args or **kwargs"
            )
    return hints, parameters


def typed_signature(name: str, function: Callable[..., object]) -> tuple[dict[str, object], object]:
    """Return the types of a function's parameters, and the type that it returns.

    Raises:
        DeclarationError: one of them is missing, or a parameter cannot be given by name.
    """
    what = f"function {name!r}"
    return parameter_types(what, function), _returned(name, _signature(what, function)[0])


def parameter_types(what: str, function: Callable[..., object]) -> dict[str, object]:
    """Return the types of a function's parameters; ``what`` names it in messages.

    Raises:
        DeclarationError: one of them is missing, a parameter cannot be given by name, or the
            function is a generator, whose values only its first reader would get.
    """
    hints, parameters = _signature(what, function)
    return {p: _port(what, p, parameters[p], hints).type for p in parameters}


def _port(
    what: str, parameter: str, declared: inspect.Parameter, hints: Mapping[str, object]
) -> Port:
    if parameter not in hints:
        raise DeclarationError(
            f"{what}: parameter {parameter!r} has no type", hint=f"write `{parameter}: str`"
        )
    if declared.default is inspect.Parameter.empty:
        return Port(hints[parameter])
    return Port(hints[parameter], optional=True, default=declared.default)


def _returned(name: str, hints: Mapping[str, object]) -> object:
    if "return" not in hints:
        raise DeclarationError(
            f"function {name!r} has no return type",
            hint="annotate it, for example `-> str`, or give outputs={...}",
        )
    return hints["return"]


@report_wrong_arguments
class FirstOf(Operation):
    """A component that returns the first of its inputs whose node was not skipped."""

    kind = "first_of"

    def __init__(self, name: str, kind: object, ports: tuple[str, ...] = ("a", "b")) -> None:
        self.name = name
        self._type = kind
        self._ports = ports

    @property
    def inputs(self) -> Mapping[str, Port]:  # noqa: D102
        return {port: Port(self._type, optional=True) for port in self._ports}

    @property
    def outputs(self) -> Mapping[str, Port]:  # noqa: D102
        return {"output": Port(self._type)}

    @property
    def version(self) -> str:  # noqa: D102
        return f"first_of:{self._ports}"

    async def run(  # noqa: D102
        self, inputs: Mapping[str, object], values: Mapping[str, object], call: CallContext
    ) -> Mapping[str, object]:
        present = [inputs[port] for port in self._ports if inputs[port] is not None]
        if not present:
            raise LookupError("no input has a value: every branch was skipped")
        return {"output": present[0]}
