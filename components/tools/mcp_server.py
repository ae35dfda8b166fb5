"""Tools of MCP servers, over stdin and stdout or streamable HTTP.

A session is opened at the first call in a run, and closed with the run. It lives in one task of the
background loop, because the client library must enter and leave its contexts in the same task.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from compound.core.errors import (
    CallError,
    CompoundError,
    DeclarationError,
    MissingExtra,
    TransientError,
    first_leaf,
    suggest_name,
)
from compound.core.loops import Sessions, run_blocking, run_in_background
from compound.core.security.sanitize import remember_environment, sanitize_text
from compound.core.security.trust import Origin
from compound.engines.credentials import read_key
from compound.graph.configuration import digest

if TYPE_CHECKING:
    from mcp import ClientSession

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")
"""Names of tools that all providers accept."""
TIMEOUT = 60.0  # seconds of a call, unless the tool says otherwise
Schema = dict[str, Any]
MAX_TOOLS = 256  # of a server
MAX_LOG = 2_000  # characters of a program's last messages that an error shows
CLOSE_SECONDS = 10.0


@dataclass(frozen=True)
class MCPServer:
    """An MCP server: a program to start, or an address; see `Tool.from_mcp`.

    Raises:
        DeclarationError: not exactly one of command and url is given, or the address is invalid.
    """

    command: tuple[str, ...]
    url: str | None
    auth_env: str | None
    env: tuple[str, ...]
    timeout: float

    def __post_init__(self) -> None:
        if bool(self.command) == bool(self.url):
            raise DeclarationError("an MCP server needs exactly one of command and url")
        if self.url is not None:
            Origin.of(self.url)
        if self.auth_env and self.url is None:
            raise DeclarationError(
                "auth_env is the key of a server at url", hint="for a program, name it in env"
            )

    @property
    def label(self) -> str:
        """Description for messages."""
        return f"the MCP server {self.url or ' '.join(self.command)!r}"


@dataclass(frozen=True)
class MCPSource:
    """A tool of an MCP server."""

    server: MCPServer
    name: str
    repeatable: bool = False
    reproducible = False

    @property
    def version(self) -> str:
        """Digest of the server and the name."""
        server = self.server
        return f"mcp:{digest([server.command, server.url, self.name])}"

    async def call(self, arguments: Mapping[str, Any], sessions: Sessions) -> str:
        """Call the tool within the session of the run.

        Raises:
            TransientError: the server cannot be started or reached, or did not answer a repeatable
                call; the next attempt opens another session.
            CallError: the server reports an error, or did not answer another call.
        """
        session = await sessions.get(self.server, lambda: _open(self.server))
        try:
            return await run_in_background(session.call(self.name, arguments))
        except TransientError as error:
            await sessions.discard(self.server, session)
            if self.repeatable or isinstance(error, _Unsent):
                raise
            raise CallError(
                f"{error.message}; the call may have had an effect, so it was not repeated"
            ) from error


class _Unsent(TransientError):
    """The session was closed before the call was sent."""


def list_tools(server: MCPServer, only: Sequence[str]) -> list[tuple[str, str, Schema, MCPSource]]:
    """Return the names, descriptions, parameters and sources of a server's tools."""

    async def listed() -> list[Any]:
        session = await _open(server)
        try:
            return await session.tools()
        finally:
            await session.aclose()

    _check_library()
    try:
        found = run_blocking(run_in_background(listed()))
    except TransientError as error:
        raise CompoundError(error.message, hint=error.hint) from error
    names = [entry.name for entry in found]
    for name in only:
        if name not in names:
            raise DeclarationError(
                f"{server.label} has no tool {name!r}",
                hint=suggest_name(name, names),
            )
    return [_declared(server, entry) for entry in found if not only or entry.name in only]


def _declared(server: MCPServer, entry: Any) -> tuple[str, str, Schema, MCPSource]:  # noqa: ANN401
    schema = {"type": "object", "properties": {}, **(entry.input_schema or {})}
    schema.pop("$schema", None)
    hints = entry.annotations
    repeatable = bool(hints is not None and (hints.read_only_hint or hints.idempotent_hint))
    source = MCPSource(server, entry.name, repeatable)
    return usable_name(entry.name), sanitize_text(entry.description or ""), schema, source


def usable_name(name: str) -> str:
    """Return a name that all providers accept, made of another one.

    >>> usable_name("files.read"), usable_name("post pet!")
    ('files_read', 'post_pet')
    """
    return re.sub(r"[^A-Za-z0-9_-]", "_", name).strip("_")[:64] if not NAME.match(name) else name


def _check_library() -> None:
    try:
        import mcp  # noqa: F401 - to report here that it is missing
    except ImportError:
        raise MissingExtra("a tool of an MCP server", "mcp", "mcp") from None


class MCPSession:
    """An open session with a server; all methods are called on the background loop."""

    def __init__(self, server: MCPServer) -> None:
        self._server = server
        self._closing = asyncio.Event()
        self._ready: asyncio.Future[ClientSession] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._live())
        self._log: IO[str] | None = None

    async def start(self) -> None:
        """Wait until the server is ready.

        Raises:
            TransientError: it cannot be started or reached.
        """
        try:
            async with asyncio.timeout(self._server.timeout):
                await asyncio.shield(self._ready)
        except TransientError:
            await self.aclose()
            raise
        except TimeoutError:
            messages = self._last_messages()
            await self.aclose()
            raise TransientError(
                f"{self._server.label} did not start within {self._server.timeout:g} s{messages}"
            ) from None

    async def tools(self) -> list[Any]:
        """Return the declarations of the server's tools.

        Raises:
            TransientError: the server did not list them in time; also one whose list has no end.
            CallError: the server reports an error.
        """
        from mcp.types import PaginatedRequestParams

        session, cursor = self._ready.result(), None
        found: list[Any] = []
        try:
            async with asyncio.timeout(self._server.timeout):
                with self._errors("tools/list"):
                    while len(found) < MAX_TOOLS:
                        page = await session.list_tools(
                            params=PaginatedRequestParams(cursor=cursor)
                        )
                        found += page.tools
                        cursor = page.next_cursor
                        if not cursor:
                            break
        except TimeoutError:
            raise TransientError(
                f"{self._server.label} did not list its tools within "
                f"{self._server.timeout:g} s{self._last_messages()}"
            ) from None
        return found[:MAX_TOOLS]

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool.

        Raises:
            TransientError: the server ended or did not answer in time.
            CallError: the server reports an error.
        """
        session = self._ready.result()
        with self._errors(name):
            result = await session.call_tool(name, dict(arguments), self._server.timeout)
        text = "\n".join(_text(part) for part in result.content)
        if not result.content and result.structured_content is not None:
            text = json.dumps(result.structured_content, ensure_ascii=False)
        if result.is_error:
            raise CallError(text or f"{name} failed")
        return text

    async def aclose(self) -> None:
        """Close the session and end a started program."""
        self._closing.set()
        done, _ = await asyncio.wait([self._task], timeout=CLOSE_SECONDS)
        if not done:
            self._task.cancel()
            await asyncio.wait([self._task], timeout=CLOSE_SECONDS)
        if self._log is not None:
            self._log.close()

    async def _live(self) -> None:
        """Enter the contexts of the library, and leave them in the same task when the session is closed."""
        from mcp import ClientSession

        try:
            async with self._streams() as (read, write), ClientSession(read, write) as session:
                await session.initialize()
                if not self._ready.done():
                    self._ready.set_result(session)
                await self._closing.wait()
        except BaseException as error:
            if not self._ready.done():
                first = first_leaf(error) if isinstance(error, BaseExceptionGroup) else error
                why = f"{type(first).__name__}: {first}{self._last_messages()}"
                problem = TransientError(f"{self._server.label} cannot be used: {why}")
                self._ready.set_exception(problem)
                self._ready.exception()  # mark as retrieved
            if isinstance(error, asyncio.CancelledError):
                raise

    @contextlib.asynccontextmanager
    async def _streams(self) -> AsyncIterator[tuple[Any, Any]]:
        from mcp.client.stdio import StdioServerParameters, stdio_client
        from mcp.client.streamable_http import streamable_http_client

        from compound.components.tools.mcp_transport import bounded_client

        server = self._server
        if server.url is not None:
            key = read_key(server.url, server.auth_env)
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            async with (
                bounded_client(headers, server.timeout) as client,
                streamable_http_client(server.url, http_client=client) as streams,
            ):
                yield streams
            return
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - closed later
        own = {name: os.environ[name] for name in server.env if name in os.environ}
        remember_environment(own)  # the program may return a key
        program, *arguments = server.command
        program = sys.executable if program == "python" else program
        parameters = StdioServerParameters(command=program, args=arguments, env=own)
        async with stdio_client(parameters, errlog=self._log) as streams:
            yield streams

    @contextlib.contextmanager
    def _errors(self, what: str) -> Any:  # noqa: ANN401 - a context manager
        """Turn errors of the library into those of calls."""
        import anyio
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED, REQUEST_TIMEOUT
        from pydantic import ValidationError

        try:
            yield
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"]))
            problem = f"returned an invalid answer to {what!r}: {place}: {first['msg']}"
            raise CallError(f"{self._server.label} {problem}") from error
        except MCPError as error:
            if error.error.code in (CONNECTION_CLOSED, REQUEST_TIMEOUT):  # reported by the client
                raise TransientError(self._message(what, error.error.message)) from error
            raise CallError(error.error.message) from error
        except (anyio.ClosedResourceError, anyio.BrokenResourceError) as error:
            raise _Unsent(self._message(what, str(error) or type(error).__name__)) from error
        except OSError as error:
            raise TransientError(self._message(what, str(error) or type(error).__name__)) from error

    def _message(self, what: str, why: str) -> str:
        return f"{self._server.label} did not answer {what!r}: {why}{self._last_messages()}"

    def _last_messages(self) -> str:
        """Return the last lines that a started program wrote on stderr, for error messages."""
        if self._log is None or self._log.closed:
            return ""
        self._log.flush()
        size = os.fstat(self._log.fileno()).st_size
        data = os.pread(self._log.fileno(), MAX_LOG, max(0, size - MAX_LOG))
        lines = sanitize_text(data.decode(errors="replace")).strip().splitlines()[-3:]
        return f" ({' | '.join(lines)})" if lines else ""


async def _open(server: MCPServer) -> MCPSession:
    """Open a session; called on the background loop."""
    _check_library()
    session = MCPSession(server)
    await session.start()
    return session


def _text(part: Any) -> str:  # noqa: ANN401 - a content block of the optional library
    text = getattr(part, "text", None)
    if text is None:
        text = getattr(getattr(part, "resource", None), "text", None)
    return text if isinstance(text, str) else f"[{getattr(part, 'type', 'content')} omitted]"
