"""The OpenAPI description of a server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from compound import __version__
from compound.graph.system import System
from compound.serving.ports import ErrorBody

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
class Route:
    """A route for the description.

    Attributes:
        method: ``get`` or ``post``.
        path: the path.
        summary: what it does.
        body: the model of the body.
        answer: the model of a success; ``None`` for any object, or a text of another media type.
        media: the media type of a success.
        status: the status of a success.
        description: more about it.
    """

    method: str
    path: str
    summary: str
    body: type[BaseModel] | None = None
    answer: type[BaseModel] | None = None
    media: str = "application/json"
    status: str = "200"
    description: str = ""


def openapi(system: System, routes: list[Route], *, keyed: bool) -> dict[str, object]:
    """Return the description of a server as JSON types.

    Args:
        system: the system.
        routes: the routes.
        keyed: whether requests need a bearer key.
    """
    models: set[type[BaseModel]] = {
        model for route in routes for model in (route.body, route.answer) if model is not None
    }
    models.add(ErrorBody)
    ordered = sorted(models, key=lambda model: model.__name__)
    _, definitions = models_json_schema([(model, "validation") for model in ordered], ref_template=REFERENCE)
    paths: dict[str, dict[str, object]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method] = _operation(route)
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


def _operation(route: Route) -> dict[str, object]:
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
