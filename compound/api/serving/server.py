"""Run the application with uvicorn: signals, drain and reload."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
import sys
import threading
from pathlib import Path
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from compound.api.serving.application import Built, build
from compound.api.serving.ports import chat_problem
from compound.api.serving.settings import ServerSettings
from compound.core.errors import CompoundError
from compound.core.web.guard import BoundedProtocol
from compound.graph.registry.engines import GivenEngines
from compound.graph.system import System

KEEP_ALIVE = 30  # seconds that an idle connection stays open


def serve(
    system: System,
    *,
    config: str | Path | None = None,
    engines: GivenEngines | None = None,
    settings: ServerSettings | None = None,
) -> None:
    """Serve a system until SIGTERM or SIGINT; runs in flight are finished first.

    A second signal stops at once. SIGHUP reads the configuration file again.

    Args:
        system: the system.
        config: a configuration file, which is read again when it changes.
        engines: engines by model name, as in `compound.run`.
        settings: address, key, limits and folders.

    Raises:
        CompoundError: the address is in use, a file cannot be used, or the engines cannot be
            opened.
    """
    settings = settings or ServerSettings()
    listening = listen(settings)
    try:
        built = build(system, config, engines, settings)
        how = uvicorn_config(built.application, settings.drain)
        server = DrainingServer(how, built, system.name)
        server.run([listening])
    finally:
        listening.close()
    if server.failure is not None:
        raise server.failure
    if not server.started:
        raise CompoundError("the server could not be started", hint="the log above has the reason")


def uvicorn_config(application: ASGIApp, drain: float) -> uvicorn.Config:
    """Return uvicorn's settings: logs without requests, no trust in forwarded addresses, a bounded drain."""
    return uvicorn.Config(
        application,
        http=BoundedProtocol,
        log_config=LOGGING,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # a client could forge them
        ws="none",
        timeout_keep_alive=KEEP_ALIVE,
        # after the runs have been stopped, only connections that do not read their answers are left
        timeout_graceful_shutdown=drain + 1,  # type: ignore[arg-type]  # asyncio takes parts of seconds
    )


def listen(settings: ServerSettings) -> socket.socket:
    """Open the socket, before uvicorn, which would exit without an explanation."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # asyncio disables Nagle's algorithm only if TCP is named
    found = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((settings.host, settings.port))
        found.listen(2048)
    except OSError as error:
        found.close()
        options = "--port" if settings.host == "127.0.0.1" else "--host or --port"
        raise CompoundError(
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror or error}",
            hint=f"choose another {options}; port 0 chooses a free one",
        ) from None
    found.set_inheritable(True)
    return found


def url_of(listening: socket.socket) -> str:
    """Return the address of an open socket."""
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


class DrainingServer(uvicorn.Server):
    """A uvicorn server that reports that it drains before it closes its socket, and exits with 0."""

    def __init__(self, config: uvicorn.Config, built: Built, name: str) -> None:
        super().__init__(config)
        self._service, self._name = built.service, name
        self._closing: asyncio.TimerHandle | None = None
        self.failure: CompoundError | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Open the engines, start, and print the address."""
        try:
            await (
                self._service.warm_up()
            )  # uvicorn would log an error in the lifespan with its traceback
        except CompoundError as error:
            self.failure, self.should_exit = error, True
            await self._service.aclose()
            return
        await super().startup(sockets)
        if not self.started:
            return
        if threading.current_thread() is threading.main_thread():  # the process is the server's own
            # Without this, each full collection of garbage would traverse the imported libraries.
            gc.collect()
            gc.freeze()
            if hasattr(signal, "SIGHUP"):
                asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._reload)
        digest = self._service.deployments.current.digest[:12]
        print(
            f"serving {self._name} on {url_of((sockets or [])[0])} (configuration {digest})",
            file=sys.stderr,
            flush=True,
        )
        if problem := chat_problem(self._service.deployments.current.system):
            print(f"no chat for OpenAI's clients: {problem}", file=sys.stderr, flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Report that the server drains, and stop after the delay; a second signal stops at once."""
        if self._service.draining:
            self.should_exit = self.force_exit = True
            return
        self._service.draining = True
        delay, drain = self._service.settings.drain_delay, self._service.settings.drain
        asyncio.get_running_loop().call_later(delay + drain, self._service.stop_runs)
        print(f"draining: {self._service.running} runs in flight", file=sys.stderr, flush=True)
        if delay:
            self._closing = asyncio.get_running_loop().call_later(delay, self._close)
        else:
            self._close()

    def _close(self) -> None:
        self.should_exit = True

    def _reload(self) -> None:
        self._reloading = asyncio.ensure_future(self._service.deployments.reload())


LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"plain": {"format": "%(asctime)s %(levelname)s %(message)s"}},
    "handlers": {
        "stderr": {
            "class": "logging.StreamHandler",
            "formatter": "plain",
            "stream": "ext://sys.stderr",
        }
    },
    "loggers": {
        "uvicorn": {"handlers": ["stderr"], "level": "WARNING", "propagate": False},
        "compound": {"handlers": ["stderr"], "level": "INFO", "propagate": False},
    },
}
