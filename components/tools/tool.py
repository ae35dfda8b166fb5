"""Tools: functions with a name, a description and typed arguments that a model can call."""

from __future__ import annotations

import asyncio
import json
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, Protocol, overload

from pydantic import PositiveFloat

from compound.components.code import shared_sandbox
from compound.components.tools.functions import FunctionSource, declare
from compound.components.tools.mcp_server import NAME, TIMEOUT, MCPServer, list_tools
from compound.core.engine import ToolSpec
from compound.core.errors import CallError, CompoundError, DeclarationError, TransientError
from compound.core.formatting import format_repr
from compound.core.loops import Sessions
from compound.core.narrowing import report_wrong_arguments
from compound.core.security.sandbox.limits import SandboxLimits
from compound.graph.configuration import digest
from compound.graph.json_types import JSONSchema, json_type

MAX_ARGUMENTS = 100_000  # characters of a call's arguments
MAX_ERROR = 2_000  # characters of an error's end that are shown
PYTHON = "Run a Python program in a sandbox without network access, and return what it prints."
PROGRAM: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "code": {"type": "string", "description": "the program, which prints its result"}
    },
    "required": ["code"],
    "additionalProperties": False,
}


class ToolSource(Protocol):
    """The implementation of a tool."""

    @property
    def reproducible(self) -> bool:
        """Whether equal arguments give equal results."""
        ...

    @property
    def version(self) -> str:
        """Everything that changes the results of calls; part of cache keys."""
        ...

    async def call(self, arguments: Mapping[str, Any], sessions: Sessions) -> str:
        """Return the result as text.

        Raises:
            TransientError: a server did not answer, and the call can be repeated without a second
                effect: it was not sent, or is idempotent. It is retried.
            Exception: any other error is shown to the model.
        """
        ...


@dataclass(frozen=True)
class SandboxSource:
    """Programs in a sandbox."""

    limits: SandboxLimits
    reproducible = False

    @property
    def version(self) -> str:
        """The version of Python, and the limits."""
        return f"python:{platform.python_version()}:{astuple(self.limits)}"

    async def call(self, arguments: Mapping[str, Any], sessions: Sessions) -> str:
        """Run the program; one that fails is a result with its error."""
        result = await shared_sandbox(self.limits).run(str(arguments["code"]))
        if result.ok:
            return result.stdout
        why = (
            f"the program reached the limit {result.limit!r}"
            if result.limit
            else "the program failed"
        )
        return "\n".join(filter(None, [result.stdout, f"error: {why}", result.stderr[-MAX_ERROR:]]))


@report_wrong_arguments
@dataclass(frozen=True, eq=False, repr=False)
class Tool:
    """A tool for `Agent`.

    Create one with `from_function`, the decorator `tool` or `python`, and several with `from_mcp`.

    Attributes:
        name: name by which models call it: at most 64 letters, digits, underscores and hyphens.
        description: what it does, and when to call it.
        parameters: JSON schema of its arguments, an object.
        source: its implementation.
        timeout: time limit of one call in seconds.
        executes_code: whether its arguments may be code or commands that it executes. Such a tool
            needs a sandbox; see `python`.

    Raises:
        DeclarationError: the name or the schema is invalid, or it executes code without a sandbox.

    Example:
        >>> def add(a: int, b: int) -> int:
        ...     '''Add two numbers.
        ...
        ...     Args:
        ...         a: first summand
        ...         b: second summand
        ...     '''
        ...     return a + b
        >>> import asyncio
        >>> asyncio.run(Tool.from_function(add).answer('{"a": 1, "b": 2}', Sessions()))
        '3'
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    source: ToolSource
    timeout: float | None = TIMEOUT
    executes_code: bool = False

    def __post_init__(self) -> None:
        if not NAME.match(self.name):
            raise DeclarationError(
                f"the name of a tool must be 1 to 64 letters, digits, underscores or hyphens, but got "
                f"{self.name!r}",
                hint="set name=…",
            )
        if self.executes_code and not isinstance(self.source, SandboxSource):
            raise DeclarationError(
                f"tool {self.name!r} executes code without a sandbox",
                hint="use cp.Tool.python(), which runs programs in a sandbox",
            )
        if self.parameters.get("type") != "object":
            raise DeclarationError(
                f"tool {self.name!r}: the schema of its arguments must be an object"
            )
        try:
            json_type(self.parameters)
        except DeclarationError as error:
            raise DeclarationError(
                f"tool {self.name!r}: {error.message}", hint=error.hint
            ) from None

    @property
    def schema(self) -> str:
        """Schema of the arguments as JSON text."""
        return json.dumps(self.parameters)

    @property
    def spec(self) -> ToolSpec:
        """Declaration of the tool with its own texts."""
        return ToolSpec(self.name, self.description, self.schema)

    @property
    def version(self) -> str:
        """Digest of the declaration and the implementation."""
        return digest([self.name, self.description, self.schema, self.source.version])

    async def answer(self, arguments: str, sessions: Sessions) -> str:
        """Call the tool and return its result, or a text that begins with ``error:``.

        Args:
            arguments: JSON text, as a model wrote it.
            sessions: open connections to servers of tools.

        Raises:
            TransientError: a server did not answer, and the call can be repeated.
            CompoundError: an error of the setup, such as a missing library or sandbox.
        """
        given, problem = self._parsed(arguments)
        if problem:
            return f"error: {problem}"
        try:
            async with asyncio.timeout(self.timeout) as limit:
                return await self.source.call(given, sessions)
        except (TimeoutError, ConnectionError) as error:
            if limit.expired():
                return f"error: {self.name} took longer than {self.timeout:g} s"
            if self.source.reproducible:  # else a repetition could have a second effect
                raise
            return f"error: {type(error).__name__}: {error}"
        except TransientError:
            raise
        except CallError as error:
            return f"error: {error.message}"
        except CompoundError:
            raise
        except Exception as error:  # noqa: BLE001 - the model may correct its call
            return f"error: {type(error).__name__}: {error}"

    def __call__(self, *arguments: Any, **named: Any) -> Any:  # noqa: ANN401 - those of the function
        """Call the function that the tool was made of, without a model.

        Raises:
            DeclarationError: it was made of something else, which only an agent can call.
        """
        if not isinstance(self.source, FunctionSource):
            raise DeclarationError(
                f"tool {self.name!r} is no Python function, and cannot be called directly",
                hint="an agent calls it",
            )
        return self.source.function(*arguments, **named)

    def _parsed(self, arguments: str) -> tuple[Mapping[str, Any], str]:
        """Return the arguments, and what is wrong with them."""
        if len(arguments) > MAX_ARGUMENTS:
            return {}, f"the arguments have more than {MAX_ARGUMENTS:,} characters"
        try:
            given = json.loads(arguments or "{}", strict=False)
        except (ValueError, RecursionError) as error:
            return {}, f"the arguments are not JSON: {error}"
        if not isinstance(given, dict):
            return {}, f"the arguments must be a JSON object, but got {arguments:.200}"
        problems = JSONSchema(self.schema).problems(given)
        return given, f"invalid arguments: {'; '.join(problems)}" if problems else ""

    @staticmethod
    @report_wrong_arguments
    def from_function(
        function: Callable[..., object],
        *,
        name: str | None = None,
        description: str | None = None,
        reproducible: bool = False,
        timeout: PositiveFloat | None = TIMEOUT,
        executes_code: bool = False,
    ) -> Tool:
        """Return a tool that calls a typed Python function.

        The schema of the arguments comes from the annotations. The description, and those of the
        arguments, come from the docstring (Google's, NumPy's or Sphinx's style) or from
        pydantic's ``Field(description=…)``.

        Args:
            function: the function, sync or async. Sync functions run in a thread.
            name: the tool's name; default: the function's.
            description: default: the docstring without its sections.
            reproducible: whether equal arguments give equal results. Samples then share them, and a
                call that lost a connection is repeated.
            timeout: time limit of one call in seconds.
            executes_code: whether it executes code given by the model, which is refused.
        """
        shown, described, parameters = declare(function, name)
        source = FunctionSource(function, reproducible)
        text = description or described
        return Tool(shown, text, parameters, source, timeout, executes_code)

    @staticmethod
    def python(limits: SandboxLimits | None = None, *, name: str = "python") -> Tool:
        """Return a tool that runs Python programs in a sandbox, and returns what they print.

        Args:
            limits: resources of each program.
            name: the tool's name.

        Raises:
            SandboxUnavailable: at the first call, on a machine without a sandbox.
        """
        # the sandbox has its own time limit, and programs may wait for their turn
        source = SandboxSource(limits or SandboxLimits())
        return Tool(name, PYTHON, PROGRAM, source, timeout=None, executes_code=True)

    @staticmethod
    @report_wrong_arguments
    def from_mcp(
        *,
        command: Sequence[str] = (),
        url: str | None = None,
        auth_env: str | None = None,
        env: Sequence[str] = (),
        only: Sequence[str] = (),
        timeout: PositiveFloat = TIMEOUT,
    ) -> list[Tool]:
        """Return the tools of an MCP server, which is started or contacted to list them.

        Each run opens one session with the server, at the first call of a tool, and closes it at
        the end.

        Args:
            command: program and arguments of a server on stdin and stdout; ``python`` stands for
                the interpreter of this process.
            url: address of a server with streamable HTTP.
            auth_env: environment variable with the key of the server at ``url``, sent as a bearer
                token.
            env: names of environment variables that the started program receives, besides ``PATH``
                and ``HOME``.
            only: names of the tools to return; default: all.
            timeout: time limit of the start and of each call in seconds.

        Raises:
            DeclarationError: the server lacks a tool, or not exactly one of command and url is
                given.
            CompoundError: the server cannot be started or reached.
            MissingExtra: mcp is not installed.
        """
        server = MCPServer(tuple(command), url, auth_env, tuple(env), timeout)
        # the call has the session's limit, and its first attempt may also have to start the server
        limit = 2 * timeout + 5
        return [Tool(*declared, limit) for declared in list_tools(server, only)]

    def __repr__(self) -> str:
        arguments = ", ".join(self.parameters.get("properties", {}))
        return format_repr("Tool", repr(self.name), arguments=arguments)


@overload
def tool(function: Callable[..., object], /) -> Tool: ...
@overload
def tool(
    *,
    name: str | None = None,
    description: str | None = None,
    reproducible: bool = False,
    timeout: float | None = TIMEOUT,
) -> Callable[[Callable[..., object]], Tool]: ...
@report_wrong_arguments
def tool(
    function: Callable[..., object] | None = None,
    /,
    **settings: Any,
) -> Tool | Callable[[Callable[..., object]], Tool]:
    """Turn a typed function into a `Tool`; with the settings of `Tool.from_function`.

    The tool can still be called like the function.

    >>> @tool
    ... def double(x: int) -> int:
    ...     '''Double a number.'''
    ...     return 2 * x
    >>> double, double(4)
    (Tool('double', arguments=x), 8)
    """

    if function is None:
        return lambda found: Tool.from_function(found, **settings)
    return Tool.from_function(function, **settings)
