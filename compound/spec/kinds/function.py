"""The kind ``function``: a typed Python function."""

from __future__ import annotations

from pydantic import ConfigDict, Field

from compound.components.declaration.component import FunctionComponent
from compound.components.function import Function
from compound.concurrency.functions import ThreadUse
from compound.errors import DeclarationError
from compound.graph.types import format_type
from compound.spec.kinds.kind import DumpContext, Kind, MakeContext, make_settings, report_wrong_settings
from compound.spec.schema.settings import AnySetting
from compound.spec.schema.types import Code, Model
from compound.spec.schema.wiring import Out, Wiring
from compound.spec.spelling import Tree, spell_code
from compound.spec.yaml.text import Flow


class FunctionSettings(Model):
    """A typed Python function; additional keys set its parameters and may be tunable."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, AnySetting]

    call: Code
    """The function, as module:name; modules are also found in this file's folder."""
    timeout: float | None = Field(default=None, gt=0)
    """Timeout of one attempt in seconds."""
    retries: int = Field(default=0, ge=0)
    """Maximum number of retries after transient errors."""
    thread: ThreadUse = "auto"
    """Where a sync function runs: on the event loop until a call took longer than 10 ms (auto), or always or
    never in a thread. In a server, auto is always."""


class FunctionEntry(Wiring):
    """A Python function as a component; its annotations define the ports."""

    function: FunctionSettings
    """The function and its settings."""
    out: Out | None = None
    """The types of the output fields, if the function returns a mapping."""


def _make(entry: FunctionEntry, context: MakeContext) -> Function | None:
    file, inside, given = context.file, (*context.address, "function"), entry.function
    settings = make_settings(given.model_extra or {})
    function = file.load_function(given.call, (*inside, "call"))
    rest = {key: value for key, value in given.given.items() if key != "call"}
    if isinstance(function, Function):  # made by `compound.component`; the file overrides its settings
        settings = {**function.settings, **settings}
        rest = {"timeout": function.timeout, "retries": function.retries, "thread": function.thread, **rest}
        function = function.function
    if function is None or report_wrong_settings(file, function, settings, inside):
        return None
    outputs = entry.out if isinstance(entry.out, dict) else None
    component = file.attempt(
        inside,
        lambda: Function(context.name, function, outputs=outputs, **rest, **settings),
        code=given.call,
    )
    if component is not None and outputs is None and entry.out is not None:
        returned = component.outputs["output"].type
        if entry.out != returned:
            mismatch = f"is {format_type(entry.out)}, but the function returns {format_type(returned)}"
            file.document.report((*context.address, "out"), mismatch)
    return component


def _dump(component: Function, context: DumpContext) -> Tree:
    settings = {name: context.setting(name, value) for name, value in component.settings.items()}
    reserved = [name for name in settings if name in FunctionSettings.model_fields]
    if reserved:
        raise DeclarationError(
            f"{component.name}: a setting named {reserved[0]!r} cannot be written in YAML",
            hint="rename the function's parameter",
        )
    limits = {"timeout": component.timeout} if component.timeout is not None else {}
    tries = {"retries": component.retries} if component.retries else {}
    threads = {"thread": component.thread} if component.thread != "auto" else {}
    call = spell_code(component.function, component.name)
    outputs = {} if component._single else context.output_types(component)
    return {
        "function": {"call": call, **limits, **tries, **threads, **settings},
        **({"out": Flow(outputs)} if outputs else {}),
    }


FUNCTION_KIND = Kind("function", FunctionEntry, _make, (Function, FunctionComponent), _dump)
