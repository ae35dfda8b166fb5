"""Validation of forks: the call to change, and the calls to reuse."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from compound.errors import DeclarationError, suggest_name
from compound.execution.trace import Call, Trace
from compound.graph.component import Component
from compound.graph.composite import Composite
from compound.graph.system import System
from compound.graph.types import accepts, as_declared, format_type


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
    _check_outputs(component, address, outputs)
    unknown = sorted(set(settings or ()) - set(component.settings))
    if unknown:
        raise DeclarationError(
            f"{address} has no setting {unknown[0]!r}", hint=suggest_name(unknown[0], component.settings)
        )
    return Fork(kept, address, outputs, resample or 0, dict(settings or {}))


def _check_outputs(component: Component, address: str, outputs: Mapping[str, object] | None) -> None:
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
