"""Server of a gateway, one per event loop."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import socket
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass

import uvicorn
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from compound.components.gateway.bodies import read_document
from compound.components.gateway.documents import Document, Route
from compound.components.gateway.sessions import NO_RETRY, AgentSession
from compound.core.errors import CompoundError
from compound.core.web.addresses import LOCAL_NAMES
from compound.core.web.guard import BoundedProtocol, Guard
from compound.core.web.problems import HTTPProblem, json_response


@dataclass(frozen=True, kw_only=True)
class GatewaySettings:
    """Limits of the requests that a gateway accepts; it listens on loopback only."""

    max_body: int = 32 * 2**20
    body_timeout: float = 30.0


ROUTES: dict[str, Route] = {
    "/v1/chat/completions": "chat/completions",
    "/v1/responses": "responses",
}
MODELS = "/v1/models"
TEXT_ONLY = (
    "the gateway answers requests for texts only, whose usage the budget counts. Send other requests to "
    "their server directly: give their client a base_url and an api_key of its own, not those of the run"
)


class _Server(uvicorn.Server):
    """A server that leaves the signals to the process that it runs in."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Gateway:
    """A running gateway; use `gateway` to get that of the running event loop.

    Attributes:
        sessions: the open runs by key; ``None`` for a key that lasts, between two runs.
        base_url: the address for clients of OpenAI's API.
        closing: functions that are called when the gateway ends.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        self.sessions: dict[str, AgentSession | None] = {}
        self.base_url = ""
        self.closing: list[Callable[[], Awaitable[None]]] = []
        self.resources: dict[object, object] = {}
        self._settings = settings
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def is_running(self) -> bool:
        """Whether requests are accepted."""
        return self._task is not None and not self._task.done()

    async def start(self) -> None:
        """Open a free port on loopback.

        Raises:
            CompoundError: it cannot be opened.
        """
        # asyncio disables Nagle's algorithm, which delays answers by 40 ms, only if TCP is named
        listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            listening.bind(("127.0.0.1", 0))
            listening.listen(2048)
        except OSError as error:
            listening.close()
            raise CompoundError(f"the gateway cannot listen on loopback: {error}") from None
        self.base_url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        application = Guard(
            self._application,
            host_names=LOCAL_NAMES,
            max_body=self._settings.max_body,
            body_timeout=self._settings.body_timeout,
            admit=self._session_of,  # each run has a key of its own
        )
        config = uvicorn.Config(
            application,
            http=BoundedProtocol,
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            proxy_headers=False,
            ws="none",
            timeout_graceful_shutdown=1,
        )
        self._server = _Server(config)
        self._task = asyncio.create_task(
            self._serve(self._server, listening), name="compound-gateway"
        )
        ready = asyncio.create_task(self._server.ready.wait())
        await asyncio.wait({ready, self._task}, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if not self._server.started:
            raise CompoundError("the gateway could not be started")

    async def _serve(self, server: _Server, listening: socket.socket) -> None:
        try:
            await server.serve(sockets=[listening])
        finally:
            for opened in getattr(server, "servers", []):
                opened.close()
            listening.close()
            for close in self.closing:
                await close()

    async def aclose(self) -> None:
        """End the gateway."""
        if self._server is not None and self._task is not None:
            self._server.should_exit = True
            await asyncio.wait([self._task])

    def _session_of(self, authorization: bytes) -> AgentSession:
        """Return the session of a request.

        Raises:
            Problem: the key is missing, or it belongs to no open run.
        """
        scheme, _, given = authorization.partition(b" ")
        known = [key for key in self.sessions if hmac.compare_digest(given.strip(), key.encode())]
        if scheme.lower() != b"bearer" or not known:
            raise HTTPProblem(
                401,
                "invalid_key",
                "the key belongs to no open run; an agent uses the OPENAI_API_KEY or api_key of its run",
                headers={"WWW-Authenticate": "Bearer", **NO_RETRY},
            )
        found = self.sessions[known[0]]
        if found is None:
            raise HTTPProblem(
                409,
                "no_open_run",
                "no run of the agent is open; requests are accepted during a run only",
                headers=NO_RETRY,
            )
        return found

    async def _application(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that the guard has admitted."""
        try:
            answer = await self._answer(scope, receive)
        except HTTPProblem as problem:
            await problem.response()(scope, receive, send)
            return
        if isinstance(answer, dict):
            await json_response(answer)(scope, receive, send)
            return
        events = StreamingResponse(
            answer, media_type="text/event-stream", headers={"Cache-Control": "no-store"}
        )
        await events(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive) -> Document | AsyncIterator[str]:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        session = self._session_of(headers.get(b"authorization", b""))
        method, path = scope["method"], scope["path"]
        if (method, path) == ("GET", MODELS):
            data = [
                {"id": name, "object": "model", "owned_by": "compound", "created": 0}
                for name in session.models
            ]
            return {"object": "list", "data": data}
        if path not in ROUTES:
            known = ", ".join([*ROUTES, MODELS])
            raise HTTPProblem(
                404,
                "not_found",
                f"the gateway has no {path}; it has {known}. {TEXT_ONLY}",
                headers=NO_RETRY,
            )
        if method != "POST":
            raise HTTPProblem(405, "method_not_allowed", f"{path} takes POST")
        message: Message = await receive()
        return await session.answer(ROUTES[path], read_document(message.get("body", b"")))


_GATEWAYS: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Gateway] = (
    weakref.WeakKeyDictionary()
)
_STARTING: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = (
    weakref.WeakKeyDictionary()
)


@contextlib.asynccontextmanager
async def gateway(settings: GatewaySettings | None = None) -> AsyncIterator[Gateway]:
    """Use the gateway of the running event loop, which is started if necessary, and ends with the loop."""
    loop = asyncio.get_running_loop()
    async with _STARTING.setdefault(loop, asyncio.Lock()):
        found = _GATEWAYS.get(loop)
        if found is None or not found.is_running:
            found = _GATEWAYS[loop] = Gateway(settings or GatewaySettings())
            await found.start()
    yield found
