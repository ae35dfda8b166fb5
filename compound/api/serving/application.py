"""The ASGI application of a served system, and its routes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from fastapi import FastAPI
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from compound import __version__
from compound.api.serving.chat import chat_routes
from compound.api.serving.feedback_store import FeedbackStore
from compound.api.serving.ports import Interface, openapi
from compound.api.serving.routes import feedback_model, feedback_route, operation_routes, run_routes
from compound.api.serving.service import LOG, ServerMetrics, Service
from compound.api.serving.settings import Deployments, ServerSettings
from compound.core.security.sanitize import remember_secret, sanitize_text
from compound.core.web.guard import Guard
from compound.core.web.problems import INTERNAL, HTTPProblem
from compound.graph.registry.engines import GivenEngines, resolve_engines
from compound.graph.system import System
from compound.yaml import load as load_program


def app(
    system: System | str | Path,
    *,
    config: str | Path | None = None,
    engines: GivenEngines | None = None,
    settings: ServerSettings | None = None,
) -> FastAPI:
    """Return an ASGI application that serves a system, for uvicorn, Hypercorn, Granian or a larger
    application.

    Run it in one process: runs, limits and feedback are counted per application. The address in
    ``settings`` is not opened, but decides which names the ``Host`` header may have.

    Args:
        system: the system, or the path of its YAML file.
        config: a configuration file, such as the ``best.json`` of a run; it is read again when it
            changes.
        engines: engines by model name, as in `compound.run`.
        settings: key, limits and folders.

    Raises:
        ConfigurationError: the configuration cannot be used.
        CompoundError: the feedback folder cannot be written.

    Example:
        >>> import compound as cp
        >>> answerer = cp.LLM("answerer", prompt=cp.Text("Answer."))
        >>> qa = cp.System("qa", {"answer": answerer(cp.Input("question"))}, lm="smollm2")
        >>> sorted(app(qa).openapi()["paths"])[:3]
        ['/health', '/metrics', '/ready']
    """
    bound = system if isinstance(system, System) else load_program(system).system
    return build(bound, config, engines, settings or ServerSettings()).application


@dataclass(frozen=True)
class Built:
    """An application and the service behind it."""

    application: FastAPI
    service: Service


def build(
    system: System,
    config: str | Path | None,
    engines: GivenEngines | None,
    settings: ServerSettings,
) -> Built:
    """Return an application and its service; see `app`."""
    remember_secret(settings.key)
    metrics = ServerMetrics()
    deployments = Deployments(
        system,
        None if config is None else Path(config),
        lambda used: metrics.reloads.labels("used" if used else "rejected").inc(),
    )
    folder, most = settings.feedback, settings.max_feedback
    store = None if folder is None else FeedbackStore(folder, metrics.lost.inc, most)
    find = resolve_engines(system, engines)
    service = Service(deployments, find, settings, metrics, store)
    application = FastAPI(
        title=system.name,
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        lifespan=_lifespan(service),
    )
    _add_routes(application, service, system)
    application.add_exception_handler(HTTPProblem, _on_problem)
    application.add_exception_handler(HTTPException, _on_http_error)
    application.add_exception_handler(Exception, _on_error)
    application.add_middleware(Guard, count=metrics.answered, **settings.admission)
    return Built(application, service)


def _lifespan(service: Service) -> Any:  # noqa: ANN401 - FastAPI's type is not exported
    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        seconds = service.settings.reload
        tasks = [asyncio.create_task(service.deployments.watch(seconds))] if seconds else []
        try:
            await service.warm_up()
            yield
        finally:
            for task in tasks:
                task.cancel()
            await service.aclose()

    return lifespan


def _add_routes(application: FastAPI, service: Service, system: System) -> None:
    """Add the routes, and describe them."""
    routes = [
        *operation_routes(service),
        *run_routes(service, Interface.of(system, service.settings.batch)),
        feedback_route(service.store, feedback_model(system), service.metrics),
        *chat_routes(service, system, int(time.time())),
    ]
    shown = [route for route in routes if route.summary]
    document = openapi(system, shown, keyed=service.settings.key is not None)
    application.openapi = lambda: document  # type: ignore[method-assign]
    encoded = to_json(document)

    async def description(request: Request) -> Response:
        return Response(encoded, media_type="application/json")

    application.add_route("/openapi.json", description, methods=["GET"])
    service.metrics.paths = frozenset(route.path for route in routes)
    for route in routes:
        application.add_route(route.path, route.handler, methods=[route.method])


async def _on_problem(request: Request, error: Exception) -> Response:
    return cast("HTTPProblem", error).response()


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Answer an unknown path or method."""
    found = cast("HTTPException", error)
    kind = {404: "not_found", 405: "method_not_allowed"}.get(found.status_code, "http_error")
    message = f"{found.detail}; /openapi.json describes this server"
    return HTTPProblem(
        found.status_code, kind, message, headers=dict(found.headers or {})
    ).response()


async def _on_error(request: Request, error: Exception) -> Response:
    LOG.error("%s %s failed: %s", request.method, request.url.path, sanitize_text(str(error)))
    return HTTPProblem(500, "internal", INTERNAL).response()
