"""LangChain runnables as components."""

from __future__ import annotations

import dataclasses
import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar, get_args, get_origin

import typing_extensions
from pydantic import BaseModel
from pydantic.errors import PydanticUserError

from compound.core.engine import Usage
from compound.core.errors import CallError, DeclarationError, explain_missing, suggest_name
from compound.core.narrowing import report_wrong_arguments
from compound.graph.configuration import to_readable_json
from compound.graph.fingerprint import code_digest
from compound.graph.types import Port
from compound.interchange.black_box import (
    BlackBox,
    Price,
    Report,
    as_port_type,
    as_text,
    counted,
)

if TYPE_CHECKING:
    from langchain_core.callbacks import BaseCallbackHandler
    from langchain_core.runnables import Runnable

SINGLE_INPUT, SINGLE_OUTPUT = "input", "output"
PLAIN = (str, int, float, bool, list, dict)


class LangChainRunnable(BlackBox):
    """A runnable as a component. Made by `compound.interchange.from_langchain`."""

    kind = "langchain"

    def __init__(
        self,
        name: str,
        runnable: Any,  # noqa: ANN401
        *,
        single: bool,
        fresh: Sequence[str],
        **options: Any,  # noqa: ANN401
    ) -> None:
        super().__init__(name, **options)
        self.runnable = runnable
        self._single, self._fresh = single, fresh

    async def invoke(  # noqa: D102
        self, arguments: Mapping[str, object], reports: list[Report]
    ) -> Mapping[str, object]:
        values = {name: arguments[name] for name in self.settings}
        given = {name: value for name, value in arguments.items() if name not in values}
        # no run continues the conversation of another
        own = {name: uuid.uuid4().hex for name in self._fresh}
        config: dict[str, Any] = {"callbacks": [_recorder(reports)], "run_name": self.name}
        config["configurable"] = {**own, **values}
        given_value = given[SINGLE_INPUT] if self._single else _as_instance(self.runnable, given)
        returned = await self.runnable.ainvoke(given_value, config=config)
        if isinstance(returned, Mapping) and (stops := returned.get("__interrupt__")):
            raise CallError(
                f"the graph waits for a person: {getattr(stops[0], 'value', stops[0])!r:.200}",
                hint="import a graph that answers this itself",
            )
        if list(self.outputs) == [SINGLE_OUTPUT] and not (
            isinstance(returned, Mapping) and set(returned) == {SINGLE_OUTPUT}
        ):
            return {SINGLE_OUTPUT: _as_output(returned, self.outputs[SINGLE_OUTPUT].type)}
        if not isinstance(returned, Mapping):
            members = (
                returned.model_dump()
                if isinstance(returned, BaseModel)
                else getattr(returned, "__dict__", None)
            )
            if members is None:
                raise CallError(
                    f"the runnable returned {type(returned).__name__}, and no {', '.join(self.outputs)}",
                    hint=f"name a single output {SINGLE_OUTPUT!r}, or return a mapping",
                )
            returned = members
        missing = [field for field in self.outputs if field not in returned]
        if missing:
            raise CallError(
                f"the runnable returned no {missing[0]!r}, but {', '.join(map(str, returned))}"
            )
        return {
            field: _as_output(returned[field], port.type) for field, port in self.outputs.items()
        }


@report_wrong_arguments
@explain_missing("cp.interchange.from_langchain")
def from_langchain(
    runnable: Runnable[Any, Any],
    name: str = "",
    *,
    inputs: Mapping[str, object] | None = None,
    outputs: Mapping[str, object] | None = None,
    version: str = "",
    price: Price | None = None,
    worst: Usage | None = None,
    cache: bool = True,
    timeout: float | None = None,
    configurable: Mapping[str, object] | None = None,
    **settings: object,
) -> LangChainRunnable:
    """Make a component of a LangChain runnable, such as ``prompt | model | parser`` or a LangGraph graph.

    Inputs and outputs follow from the runnable's schemas; those of a graph are the fields of its
    state, of which any may be left unconnected. A chat message becomes its text, and a list of
    messages the text of the last one. The requests of the models are charged to the budget as
    LangChain reports them, after each run.

    Each run is a conversation of its own: it gets a new ``thread_id`` for a checkpointer, and a new
    ``session_id`` for a message history, unless ``configurable`` sets them.

    Args:
        runnable: the runnable.
        name: the component's name; default: ``runnable``.
        inputs: types of the inputs, if the schema does not state them; ``{"input": str}`` passes
            one value.
        outputs: types of the outputs, if the schema does not state them.
        version: text that changes when the runnable's behavior does, for the cache; added to its
            description.
        price: dollars per million prompt and completion tokens; default: litellm's price of the
            model.
        worst: upper bound of the usage of one run, which is reserved before it; without one, the
            last run may exceed the budget.
        cache: whether results are cached.
        timeout: time limit of one run in seconds.
        configurable: values or spaces of entries of ``config["configurable"]`` that the runnable
            reads, but does not declare, such as those of a graph's nodes.
        **settings: values or spaces of configurable fields (``runnable.configurable_fields``).

    Raises:
        DeclarationError: it is no runnable, it stops for a person, or it has no configurable field
            of the name of a setting.
    """
    from langchain_core.runnables import Runnable as Base

    own = name or "runnable"
    if not isinstance(runnable, Base):
        raise DeclarationError(
            f"from_langchain needs a Runnable, but got {type(runnable).__name__}",
            hint="wrap a function with langchain_core.runnables.RunnableLambda",
        )
    specs = {spec.id for spec in runnable.config_specs}
    unknown = [key for key in settings if key not in specs]
    if unknown:
        raise DeclarationError(
            f"the runnable {own!r} has no configurable field {unknown[0]!r}",
            hint=f"{suggest_name(unknown[0], specs)}; or set it in configurable={{…}}",
        )
    if stops := [*_stops(runnable, "before"), *_stops(runnable, "after")]:
        raise DeclarationError(
            f"the graph {own!r} stops at {stops[0]!r} for a person",
            hint="compile it without interrupt_…",
        )
    fresh = ["thread_id", *(s.id for s in runnable.config_specs if s.is_shared and not s.default)]
    settings |= configurable or {}
    ports = {k: Port(kind) for k, kind in inputs.items()} if inputs else _inputs(runnable)
    return LangChainRunnable(
        own,
        runnable,
        single=list(ports) == [SINGLE_INPUT] and not _takes_field(runnable),
        fresh=fresh,
        inputs=ports,
        outputs=outputs or _outputs(runnable),
        version=f"{version}|{_describe(runnable)}",
        settings=settings,
        price=price,
        worst=worst,
        cache=cache,
        timeout=timeout,
    )


def _stops(runnable: Any, when: str) -> list[str]:  # noqa: ANN401
    """Return the nodes before or after which a graph stops."""
    found = getattr(runnable, f"interrupt_{when}_nodes", ()) or ()
    return [found] if isinstance(found, str) else list(found)


def _recorder(reports: list[Report]) -> BaseCallbackHandler:
    """Return a callback that records the usage of each request, also of those without a model name."""
    from langchain_core.callbacks import BaseCallbackHandler as Base

    class RunnableRecorder(Base):  # type: ignore[misc]
        def on_llm_end(self, response: Any, **_: object) -> None:  # noqa: ANN401
            for generations in response.generations:
                message = getattr(generations[0], "message", None) if generations else None
                usage = getattr(message, "usage_metadata", None) or {}
                told = getattr(message, "response_metadata", None) or {}
                model = (
                    told.get("model_name")
                    or told.get("model")
                    or (response.llm_output or {}).get("model_name")
                )
                tokens = counted(usage.get("input_tokens")), counted(usage.get("output_tokens"))
                reports.append(Report(str(model or ""), 1, *tokens))

    return RunnableRecorder()


def _schema_fields(schema: Callable[[], Any]) -> Mapping[str, Any]:
    """Return the fields of a schema; empty if the value is no object with named fields."""
    try:
        fields = getattr(schema(), "model_fields", None) or {}
    except PydanticUserError:  # before Python 3.12, pydantic rejects `typing.TypedDict`
        return {}
    return {} if "root" in fields else fields


def _takes_field(runnable: Any) -> bool:  # noqa: ANN401
    """Return whether ``input`` is a field of the runnable's input, and not the whole of it."""
    return SINGLE_INPUT in {
        **_schema_fields(runnable.get_input_schema),
        **_state_ports(runnable.InputType),
    }


def _inputs(runnable: Any) -> dict[str, Port]:  # noqa: ANN401
    """Return the fields of the input, or a single input."""
    if fields := _schema_fields(runnable.get_input_schema):
        return {
            name: Port(_plain(field.annotation), optional=not field.is_required(), default=None)
            for name, field in fields.items()
        }
    return _state_ports(runnable.InputType) or {SINGLE_INPUT: Port(_plain(runnable.InputType))}


def _state_ports(kind: Any) -> dict[str, Port]:  # noqa: ANN401 - a type
    """Return the fields of a TypedDict or a dataclass, such as the state of a graph; empty for other types.

    The fields of a TypedDict are optional, since a graph is usually given a part of its state.
    """
    if dataclasses.is_dataclass(kind):
        hints = typing_extensions.get_type_hints(kind)
        return {
            field.name: Port(_plain(hints[field.name]), optional=not _is_required(field))
            for field in dataclasses.fields(kind)
            if field.init
        }
    if not typing_extensions.is_typeddict(kind):
        return {}
    hints = typing_extensions.get_type_hints(kind)
    return {name: Port(_plain(hint), optional=True) for name, hint in hints.items()}


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _outputs(runnable: Any) -> dict[str, object]:  # noqa: ANN401
    fields = _schema_fields(runnable.get_output_schema)
    if not fields or _is_message(runnable.OutputType):
        kind = runnable.OutputType
        return {SINGLE_OUTPUT: str if _is_message(kind) else _plain(kind)}
    return {
        name: str if _is_message(field.annotation) else _plain(field.annotation)
        for name, field in fields.items()
    }


def _as_instance(runnable: Any, given: Mapping[str, Any]) -> object:  # noqa: ANN401
    """Return the fields of the input as an instance of its class, which functions of the runnable expect."""
    kind = runnable.InputType
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return kind(**given)
    is_model = isinstance(kind, type) and issubclass(kind, BaseModel)
    return kind.model_validate(given) if is_model else given


def _as_output(value: object, kind: object) -> object:
    """Return an output: the text of a chat message, or of the last one of a list, or the value itself."""
    from langchain_core.messages import BaseMessage

    if kind is str and isinstance(value, list) and value and isinstance(value[-1], BaseMessage):
        value = value[-1]
    return as_text(value)


def _is_message(kind: object) -> bool:
    """Return whether a type is a chat message, a union of kinds of them, or a list of them."""
    from langchain_core.messages import BaseMessage

    if get_origin(kind) is Annotated:
        return _is_message(get_args(kind)[0])
    if isinstance(kind, type) and get_origin(kind) is None:
        return issubclass(kind, BaseMessage)
    parts = [part for part in get_args(kind) if isinstance(part, type) or get_args(part)]
    return bool(parts) and all(_is_message(part) for part in parts)


def _plain(kind: object) -> object:
    """Return a type that ports can check; ``Any`` for type variables and classes of LangChain."""
    if isinstance(kind, TypeVar) or kind in (Generic, object) or "langchain_core." in str(kind):
        return Any
    return as_port_type(kind)


def _describe(runnable: Any) -> str:  # noqa: ANN401
    """Return a text that identifies a runnable: its serialized form, and the code of its functions."""
    from langchain_core.load import dumpd

    codes: list[str] = []
    stack, seen = [runnable], set()
    while stack:
        part = stack.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        for value in vars(part).values() if hasattr(part, "__dict__") else ():
            if callable(getattr(value, "ainvoke", None)):
                stack.append(value)
            elif isinstance(value, list | tuple):
                stack += [item for item in value if callable(getattr(item, "ainvoke", None))]
            elif isinstance(value, dict):
                stack += [
                    item for item in value.values() if callable(getattr(item, "ainvoke", None))
                ]
            elif hasattr(value, "__code__"):
                codes.append(code_digest(value))
    return json.dumps(
        [to_readable_json(_without_ids(dumpd(runnable))), sorted(codes)],
        sort_keys=True,
        default=str,
    )


def _without_ids(value: object) -> object:
    """Drop texts with addresses of objects, which differ between processes."""
    if isinstance(value, dict):
        return {
            key: _without_ids(item)
            for key, item in value.items()
            if key not in ("repr", "id", "graph")
        }
    return [_without_ids(item) for item in value] if isinstance(value, list) else value
