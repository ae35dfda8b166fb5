"""Pydantic models of a system's inputs and outputs: they validate requests, and OpenAPI is made from them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response

from compound import __version__
from compound.components.fields import answer_cue
from compound.components.llm import LLM
from compound.core.web.problems import HTTPProblem, invalid
from compound.graph.component import Output
from compound.graph.configuration import to_readable_json
from compound.graph.json_values import dumps, find_nonfinite
from compound.graph.system import System
from compound.graph.types import format_type, holds_images, is_assignable


class Closed(BaseModel):
    """A body without unknown fields."""

    model_config = ConfigDict(extra="forbid")


class UsageBody(BaseModel):
    """Usage of a run."""

    calls: int = Field(description="Engine calls.")
    prompt_tokens: int
    completion_tokens: int
    cost: float = Field(description="Cost in US dollars.")
    unpriced: int = Field(description="Calls whose price is unknown; they add nothing to the cost.")


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: str
    code: str
    param: None = None
    run_id: str | None = None
    details: list[dict[str, Any]] | None = None


class ErrorBody(BaseModel):
    """The body of an answer that is no success."""

    error: ErrorDetail


def port_model(title: str, ports: Mapping[str, object]) -> type[BaseModel]:
    """Return a model with a required field per port; names that a model cannot have are used as aliases."""
    fields: dict[str, Any] = {
        f"port_{i}": (documented(kind), Field(alias=name, description=format_type(kind)))
        for i, (name, kind) in enumerate(ports.items())
    }
    config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
    return create_model(title, __config__=config, **fields)


def documented(kind: object) -> Any:  # noqa: ANN401 - any annotation
    """Return a type, or ``Any`` for one that JSON cannot describe."""
    try:
        model = create_model("Probe", value=(cast("Any", kind), ...))
        model.model_json_schema()
    except PydanticUserError:
        return Any
    return kind


@dataclass(frozen=True)
class Interface:
    """The bodies of requests and answers of a system."""

    system: System
    run: type[BaseModel]
    batch: type[BaseModel]
    answer: type[BaseModel]
    answers: type[BaseModel]

    @staticmethod
    def of(system: System, batch: int) -> Interface:
        """Return the interface of a system."""
        inputs = port_model("Inputs", system.inputs)
        outputs = port_model(
            "Outputs", {name: source.type for name, source in system.outputs.items()}
        )
        seed: Any = (
            int | None,
            Field(None, ge=0, lt=2**53, description="Random stream; random by default."),
        )
        run = create_model("RunRequest", __base__=Closed, inputs=(inputs, ...), seed=seed)
        batched: Any = list[inputs]  # type: ignore[valid-type]
        several = create_model(
            "BatchRequest",
            __base__=Closed,
            inputs=(batched, Field(min_length=1, max_length=batch)),
            seed=seed,
        )
        answer = create_model(
            "RunAnswer",
            run_id=(str, Field(description="Id of the run, for feedback.")),
            outputs=(outputs, ...),
            usage=(UsageBody, ...),
            configuration=(
                str,
                Field(description="Digest of the configuration that served the run."),
            ),
            seed=(int, Field(description="Random stream; the same seed repeats the run.")),
        )
        each: Any = list[answer | ErrorBody]  # type: ignore[valid-type]
        answers = create_model(
            "BatchAnswer", results=(each, Field(description="In the order of the inputs."))
        )
        return Interface(system, run, several, answer, answers)

    def inputs_of(self, values: BaseModel) -> dict[str, object]:
        """Return the inputs of a validated request.

        Raises:
            Problem: one holds a number that JSON does not have.
        """
        found = {name: getattr(values, f"port_{i}") for i, name in enumerate(self.system.inputs)}
        for name, value in found.items():
            if (number := find_nonfinite(value)) is not None:
                raise HTTPProblem(
                    422, "invalid_request", f"inputs.{name} holds {number}, which is no JSON number"
                )
        return found


def parse_body(model: type[BaseModel], body: bytes) -> Any:  # noqa: ANN401 - an instance of the model
    """Validate a JSON body.

    Raises:
        Problem: it does not match the model; the problem names every field.
    """
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        problem = invalid(
            error.errors(include_url=False, include_context=False, include_input=False)
        )
        if problem.message.startswith("Invalid JSON"):
            problem.status, problem.kind = 400, "invalid_json"
        raise problem from None
    except RecursionError:
        raise HTTPProblem(422, "invalid_request", "the body is nested too deeply") from None


def chat_problem(system: System) -> str:
    """Return why a system cannot chat, or ``""``: it needs one text input, and one output."""
    inputs, outputs = system.inputs, {name: source.type for name, source in system.outputs.items()}
    for what, types in (("input", inputs), ("output", outputs)):
        if len(types) != 1:
            return f"a chat needs one {what}, but it has {len(types)} ({', '.join(types)})"
    (name, kind), (output, made) = *inputs.items(), *outputs.items()
    if not is_assignable(str, kind):
        return f"a chat needs a text input, but {name} is {format_type(kind)}"
    return f"its output {output} is {format_type(made)}" if holds_images(made) else ""


def chat_text(value: object) -> str:
    """Return an output as the text of an answer: a text or a label as it is, anything else as JSON.

    >>> chat_text("bug"), chat_text(True), chat_text({"n": [1]})
    ('bug', 'true', '{"n": [1]}')
    """
    plain = to_readable_json(value)
    return plain if isinstance(plain, str) else dumps(plain)


def streamed_call(system: System) -> tuple[str, str] | None:
    """Return the address of the call whose text is the only output, and the cue that it may repeat.

    ``None`` if the output is not the plain text of an LLM component.
    """
    (source,) = system.outputs.values()
    if not isinstance(source, Output) or not isinstance(source.node.component, LLM):
        return None
    component = source.node.component
    if component.layout != "text" or source.type is not str:
        return None
    return source.node.name, answer_cue(component.outputs, component.layout)


REFERENCE = "#/components/schemas/{model}"
EVENTS = (
    "Server-sent events: `call` (a call started, finished or failed), `token` (a piece of text), then "
    "`output` or `error`, and `usage`. The data of each event is JSON."
)
STATUSES = {
    "401": "The key is missing or wrong.",
    "413": "The body is too large.",
    "422": "The body does not match its schema.",
    "429": "This server or a provider limits the rate; see `Retry-After`.",
    "502": "A model failed, or its answer does not match its type.",
    "504": "The run took too long.",
}


@dataclass(frozen=True)
class ServedRoute:
    """A route and its description."""

    path: str
    handler: Callable[[Request], Awaitable[Response]]
    summary: str = ""  # without one, the route is not described
    body: type[BaseModel] | None = None
    answer: type[BaseModel] | None = None  # any object, or a text of another media type
    media: str = "application/json"
    status: str = "200"
    description: str = ""

    @property
    def method(self) -> str:
        """HTTP method: ``POST`` for routes with a body."""
        return "GET" if self.body is None else "POST"


def openapi(system: System, routes: list[ServedRoute], *, keyed: bool) -> dict[str, object]:
    """Return the description of a server as JSON types."""
    models: set[type[BaseModel]] = {
        model for route in routes for model in (route.body, route.answer) if model is not None
    }
    models.add(ErrorBody)
    ordered = sorted(models, key=lambda model: model.__name__)
    _, definitions = models_json_schema(
        [(model, "validation") for model in ordered], ref_template=REFERENCE
    )
    paths: dict[str, dict[str, object]] = {}
    for route in routes:
        paths[route.path] = {route.method.lower(): _operation(route)}
    components: dict[str, object] = {"schemas": definitions.get("$defs", {})}
    document: dict[str, object] = {
        "openapi": "3.1.0",
        "info": {"title": system.name, "version": __version__},
        "paths": paths,
        "components": components,
    }
    if keyed:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


def _operation(route: ServedRoute) -> dict[str, object]:
    success: dict[str, object] = {"description": route.description or route.summary}
    kind = "object" if route.media == "application/json" else "string"
    schema = _reference(route.answer) if route.answer is not None else {"type": kind}
    success["content"] = {route.media: {"schema": schema}}
    operation: dict[str, object] = {
        "summary": route.summary,
        "operationId": route.path.strip("/").replace("/", "_"),
        "responses": {route.status: success, **(_problems() if route.body is not None else {})},
    }
    if route.body is not None:
        content = {"application/json": {"schema": _reference(route.body)}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _problems() -> Mapping[str, object]:
    content = {"application/json": {"schema": _reference(ErrorBody)}}
    return {status: {"description": text, "content": content} for status, text in STATUSES.items()}


def _reference(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": REFERENCE.format(model=model.__name__)}
