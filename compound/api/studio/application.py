"""The web application: routes, guards and live updates, on loopback only.

The pages are rendered on the server and work without a script; a small one adds live updates,
keys, and the ticking of runs. Nothing is written but labels and the stop file of a run.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import cache, partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import uvicorn
from jinja2 import Environment, FileSystemLoader, StrictUndefined, TemplateError
from markupsafe import Markup
from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.convertors import PathConvertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response, StreamingResponse
from starlette.routing import Route

from compound import __version__
from compound.api.serving.server import listen, url_of, uvicorn_config
from compound.api.serving.settings import ServerSettings
from compound.api.studio.labels import Choice, Labels
from compound.api.studio.runs import Run, Runs
from compound.api.studio.traces import Query
from compound.api.studio.views import VIEWS, View, compare, list_runs, query_of, tabs
from compound.core.errors import CompoundError, RunDirectoryError
from compound.core.formatting import plural
from compound.core.security.sanitize import redact_secrets, sanitize_text
from compound.core.security.untrusted import UntrustedFolder
from compound.core.web.addresses import is_loopback
from compound.core.web.guard import Guard
from compound.core.web.problems import HTTPProblem, json_response
from compound.optimization.runs.directory import inconsistency_errors
from compound.report.figures import use_page_colors
from compound.report.rendering import brief, demo_states
from compound.report.text import FORMATS, escape_invisible, shown, word_diff

LOG = logging.getLogger("compound.api.studio")
HERE = Path(__file__).parent
ASSETS = {"studio.css": "text/css", "studio.js": "text/javascript"}
FOLLOWED = ("overview", "candidates", "training")  # views that change during a run
LONGEST = 200_000  # characters of a text on a page
POLL = 1.0  # seconds between looks at the files of a run that is followed
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; connect-src 'self'; "
        "img-src 'self' data:; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class RunName(PathConvertor):
    """A run's name in an address; a folder's name may contain line breaks."""

    regex = "(?s:.*)"


register_url_convertor("run", RunName())


class LabelBody(BaseModel):
    """A label: which side of a pair is better."""

    model_config = ConfigDict(extra="forbid", strict=True)

    split: str
    before: str
    after: str
    example: str
    choice: Choice


@dataclass(frozen=True)
class Studio:
    """What the routes share."""

    runs: Runs
    labels: Labels

    async def page(self, request: Request, make: Callable[[], View]) -> Response:
        """Render a view in a thread, so that a slow one delays no other."""
        return await run_in_threadpool(self._render, request, make)

    def _render(self, request: Request, make: Callable[[], View]) -> Response:
        try:
            with inconsistency_errors(request.url.path):
                template, context = make()
                return html(template, context)
        except TemplateError as error:  # a value is missing, as in runs of other versions
            LOG.info("%s cannot be shown", request.url.path, exc_info=True)
            raise RunDirectoryError(
                f"the files of this run lack a value that the page shows: {error}",
                hint="`compound runs verify` names damaged files",
            ) from error


def html(template: str, context: Mapping[str, Any], status: int = 200) -> HTMLResponse:
    """Return a page."""
    text = environment().get_template(template).render(**context)
    return HTMLResponse(escape_invisible(redact_secrets(text)), status, headers=HEADERS)


@cache
def environment() -> Environment:
    """Return the templates, which escape every value."""
    found = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    found.filters |= {
        **FORMATS,
        "brief": brief,
        "picture": lambda svg: Markup(use_page_colors(svg)),  # nosec B704  # drawn by this package
        "plural": plural,
        "time": lambda at: "–" if at is None else f"{datetime.fromtimestamp(at):%Y-%m-%d %H:%M}",
        "whole": partial(shown, limit=LONGEST),
    }
    found.globals |= {
        "demo_states": demo_states,
        "link": link,
        "version": __version__,
        "word_diff": lambda before, after: word_diff(shown(before, 10**6), shown(after, 10**6)),
    }
    return found


def link(run: str, view: str = "overview", query: Query | None = None, **options: object) -> str:
    """Return the address of a page of a run; of a query, only what differs from its defaults is named."""
    chosen: dict[str, object] = {} if view == "overview" else {"view": view}
    if query is not None:
        chosen |= asdict(query)
    chosen = {
        name: value for name, value in {**chosen, **options}.items() if value not in ("", None)
    }
    return f"/run/{quote(run)}" + (f"?{urlencode(chosen)}" if chosen else "")


def application(folder: Path, settings: ServerSettings | None = None) -> Starlette:
    """Return the ASGI application of the studio.

    Args:
        folder: a folder of runs, or a run directory.
        settings: the names by which it may be called; by default those of this machine.

    Raises:
        RunDirectoryError: the folder cannot be read.
    """
    UntrustedFolder(folder).names()  # raises before anything is created
    scratch = tempfile.TemporaryDirectory(prefix="compound-ui-")
    runs = Runs(folder, Path(scratch.name))
    studio = Studio(runs, Labels())

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            studio.labels.close()
            runs.close()
            scratch.cleanup()

    routes: Mapping[str, tuple[str, Callable[[Studio, Request], Awaitable[Response]]]] = {
        "/": ("GET", _list),
        "/compare": ("GET", _compare),
        "/assets/{name}": ("GET", _asset),
        "/live/{name:run}": ("GET", _live),
        "/run/{name:run}": ("GET", _run),
        "/stop/{name:run}": ("POST", _stop),
        "/label/{name:run}": ("POST", _label),
    }
    made = Starlette(
        routes=[
            Route(path, partial(handler, studio), methods=[method])
            for path, (method, handler) in routes.items()
        ],
        exception_handlers=dict.fromkeys((CompoundError, HTTPException, Exception), _on_error),
        lifespan=lifespan,
    )
    made.add_middleware(Guard, **(settings or ServerSettings(max_body=2**16)).admission)
    return made


async def _list(studio: Studio, request: Request) -> Response:
    return await studio.page(request, partial(list_runs, studio.runs, dict(request.query_params)))


async def _compare(studio: Studio, request: Request) -> Response:
    names = request.query_params.getlist("run")
    return await studio.page(request, partial(compare, studio.runs, names))


async def _run(studio: Studio, request: Request) -> Response:
    options = dict(request.query_params)
    if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        options.pop("rewards", None)  # a page of another site could make this machine load a model
    view = options.get("view", "overview")
    if view not in VIEWS:
        raise HTTPException(404, f"there is no view {view!r}")

    def make() -> View:
        run = studio.runs.get(request.path_params["name"])
        template, context = VIEWS[view](run, options)
        is_live = view in FOLLOWED and run.state != "finished"
        return template, {
            **context,
            "run": run,
            "view": view,
            "tabs": tabs(run),
            "is_live": is_live,
        }

    return await studio.page(request, make)


async def _asset(studio: Studio, request: Request) -> Response:
    name = request.path_params["name"]
    if name not in ASSETS:
        raise HTTPException(404, "there is no such file")
    return FileResponse(HERE / name, media_type=ASSETS[name], headers=HEADERS)


async def _live(studio: Studio, request: Request) -> Response:
    """Send an event whenever files of a run change, for the page to load itself anew."""
    run = await run_in_threadpool(studio.runs.get, request.path_params["name"])

    async def changes() -> AsyncIterator[str]:
        before, quiet = _state_of(run), 0.0
        yield "retry: 3000\n\n"
        while not await request.is_disconnected():
            await asyncio.sleep(POLL)
            now = await run_in_threadpool(_state_of, run)
            quiet += POLL
            if now != before:
                before, quiet = now, 0.0
                yield "data: changed\n\n"
            elif quiet > 15:  # a proxy or browser may close a silent connection
                quiet = 0.0
                yield ": still here\n\n"

    headers = {**HEADERS, "X-Accel-Buffering": "no"}
    return StreamingResponse(changes(), media_type="text/event-stream", headers=headers)


def _state_of(run: Run) -> tuple[object, ...]:
    """Return what differs after a change of a run."""
    return run.stamp(), run.is_stopping


async def _stop(studio: Studio, request: Request) -> Response:
    run = await run_in_threadpool(studio.runs.get, request.path_params["name"])
    await run_in_threadpool(run.stop)
    return json_response({"stopping": True})


async def _label(studio: Studio, request: Request) -> Response:
    try:
        body = LabelBody.model_validate_json(await request.body())
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        message = f"{'.'.join(map(str, first['loc'])) or 'body'}: {first['msg']}"
        raise HTTPException(422, message) from None

    def store() -> None:
        run = studio.runs.get(request.path_params["name"])
        run.traces.extend()
        query = query_of(run, body.model_dump(include={"split", "before", "after"}))
        studio.labels.add(run, query, body.example, body.choice)

    await run_in_threadpool(store)
    return json_response({"stored": True})


async def _on_error(request: Request, error: Exception) -> Response:
    """Answer with an error, as a page or as JSON."""
    status, message = 500, "The studio failed; its terminal shows the error."
    if isinstance(error, HTTPException):
        status, message = error.status_code, error.detail
    elif isinstance(error, CompoundError):
        status, message = 404 if error.message.startswith("there is no run") else 409, str(error)
    message = sanitize_text(message)
    if request.method == "POST":
        return HTTPProblem(status, "failed", message).response()
    return html("error.html", {"message": message}, status)


def serve(folder: Path, host: str, port: int, opened: Callable[[str], object]) -> None:
    """Serve the studio until it is interrupted.

    Args:
        folder: a folder of runs, or a run directory.
        host: an address of loopback.
        port: the port; 0 chooses a free one.
        opened: receives the address once the server accepts requests.

    Raises:
        CompoundError: the address is in use or not of loopback, or the folder cannot be read.
    """
    if not is_loopback(host):
        raise CompoundError(
            f"the studio listens on loopback only, not on {host}",
            hint="for another machine, forward the port: ssh -L 8200:127.0.0.1:8200 HOST",
        )
    settings = ServerSettings(host=host, port=port, max_body=2**16)
    listening = listen(settings)
    try:
        config = uvicorn_config(application(folder, settings), drain=0.0)  # live pages stay open
        opened(url_of(listening))
        uvicorn.Server(config).run([listening])
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
    finally:
        listening.close()
