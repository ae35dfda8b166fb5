"""Tools of agents in a file: functions, operations of HTTP interfaces, MCP servers, and the sandbox."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field, Tag

from compound.components.agents.agent import Agent
from compound.components.tools.functions import FunctionSource
from compound.components.tools.mcp_server import MCPServer, MCPSource
from compound.components.tools.openapi import OpenAPISource
from compound.components.tools.openapi_document import open_document
from compound.components.tools.programs import SandboxSource
from compound.components.tools.source import TIMEOUT
from compound.components.tools.tool import Tool
from compound.errors import DeclarationError
from compound.security.sandbox.limits import SandboxLimits
from compound.security.trust import Origin, Trust, refusal
from compound.spec.context import Context
from compound.spec.kinds.code_runner import SandboxSettings
from compound.spec.schema.installed import Installed
from compound.spec.schema.types import Code, Model
from compound.spec.schema.wiring import key_discriminator
from compound.spec.spelling import Tree
from compound.spec.yaml.document import Address
from compound.spec.yaml.text import Flow


class FunctionTool(Model):
    """A typed Python function, or a tool made of one."""

    function: Code
    """The function, as module:name; modules are also found in this file's folder."""
    name: str | None = None
    """The name of the tool; by default that of the function."""
    description: str | None = None
    """What the tool does; by default the function's docstring."""
    reproducible: bool = False
    """Whether equal arguments give equal results, so that samples share them."""
    timeout: float | None = Field(default=TIMEOUT, gt=0)
    """Time limit of one call in seconds."""


class OpenAPITool(Model):
    """An operation of an HTTP interface."""

    openapi: str
    """The OpenAPI document, a .json or .yaml file relative to this file."""
    operation: str
    """An operationId, or method and path such as `GET /items/{id}`."""
    base_url: str | None = None
    """The address of the server; by default the first of the document. It needs your consent."""
    auth_env: str | None = None
    """The environment variable that holds the key."""
    auth_header: str = "Authorization"
    """The header of the key; as `Bearer KEY` if it is Authorization."""
    name: str | None = None
    """The name of the tool; by default the operationId."""
    timeout: float = Field(default=TIMEOUT, gt=0)
    """Time limit of one call in seconds."""


class MCPSettings(Model):
    """An MCP server: a program to start, or an address."""

    command: list[str] = Field(default=[])
    """Program and arguments of a server on stdin and stdout; `python` is the interpreter of this process."""
    url: str | None = None
    """Address of a server with streamable HTTP. It needs your consent."""
    auth_env: str | None = None
    """The environment variable that holds the key of the server at `url`."""
    env: list[str] = Field(default=[])
    """Names of environment variables that the program receives."""
    only: list[str] = Field(default=[])
    """Names of the tools to use; by default all."""
    timeout: float = Field(default=TIMEOUT, gt=0)
    """Time limit of the start and of each call in seconds."""


class MCPTools(Model):
    """The tools of an MCP server."""

    mcp: MCPSettings
    """The server."""


class PythonTool(Model):
    """Python programs in a sandbox."""

    python: SandboxSettings
    """The limits of each program; `{}` for the defaults."""
    name: str = "python"
    """The name of the tool."""


TOOLS: Mapping[str, type[Model]] = {
    "function": FunctionTool,
    "openapi": OpenAPITool,
    "mcp": MCPTools,
    "python": PythonTool,
}
"""The models of tools by the key that selects one."""
NO_PLUGINS = Installed("tool", tuple, lambda name: Model)
TAGS = {f"~tool-{name}": model for name, model in TOOLS.items()}
ToolEntry = Annotated[
    Annotated[FunctionTool, Tag("~tool-function")]
    | Annotated[OpenAPITool, Tag("~tool-openapi")]
    | Annotated[MCPTools, Tag("~tool-mcp")]
    | Annotated[PythonTool, Tag("~tool-python")],
    key_discriminator(TOOLS, "tool", NO_PLUGINS, "tool-"),
]


def make_tools(entries: Sequence[Model], file: Context, address: Address) -> list[Tool] | None:
    """Return the tools of a file, or None after reporting why one cannot be made."""
    found: list[Tool] = []
    complete = True
    for number, entry in enumerate(entries):
        inside = (*address, number)
        made = _make(entry, file, inside)
        complete &= made is not None
        found += made or []
    return found if complete else None


def _make(entry: Model, file: Context, address: Address) -> list[Tool] | None:
    if isinstance(entry, FunctionTool):
        return _function(entry, file, address)
    if isinstance(entry, OpenAPITool):
        return _openapi(entry, file, address)
    if isinstance(entry, PythonTool):
        return _python(entry, file, address)
    assert isinstance(entry, MCPTools)
    return _mcp(entry.mcp, file, (*address, "mcp"))


def _function(entry: FunctionTool, file: Context, address: Address) -> list[Tool] | None:
    found = file.load_code(entry.function, (*address, "function"))
    given = {key: value for key, value in entry.given.items() if key != "function"}
    if isinstance(found, Tool):
        if given:
            file.document.report(
                address, f"{entry.function} is a tool, which has its own {next(iter(given))}"
            )
            return None
        return [found]
    if not callable(found):
        if found is not None:
            file.document.report((*address, "function"), f"{entry.function} is not a function")
        return None
    made = file.attempt(address, lambda: Tool.from_function(found, **given), code=entry.function)
    return None if made is None else [made]


def _openapi(entry: OpenAPITool, file: Context, address: Address) -> list[Tool] | None:
    path, _ = file.resolve_path(entry.openapi, (*address, "openapi"))
    if file.document.has_errors(address):
        return None

    def made() -> Tool | None:
        server = open_document(path).server(entry.base_url)
        if not _is_trusted(server, entry.auth_env, file, address, "base_url"):
            return None
        given = {key: value for key, value in entry.given.items() if key not in ("openapi", "operation")}
        return Tool.from_openapi(path, entry.operation, hosts=[str(Origin.of(server))], **given)

    tool = file.attempt(address, made)
    return None if tool is None else [tool]


def _python(entry: PythonTool, file: Context, address: Address) -> list[Tool] | None:
    if not file.allow_import:  # the programs may come from the file's own data
        file.document.report(address, "runs generated code, and imports are not allowed")
        return None
    limits = SandboxLimits(**entry.python.given)
    made = file.attempt(address, lambda: Tool.python(limits, name=entry.name))
    return None if made is None else [made]


def _mcp(given: MCPSettings, file: Context, address: Address) -> list[Tool] | None:
    if given.command and not file.allow_import:
        program = " ".join(given.command)
        file.document.report(
            (*address, "command"), f"starts a program ({program}), and imports are not allowed"
        )
        return None
    if given.url is not None and not _is_trusted(given.url, given.auth_env, file, address, "url"):
        return None

    def made() -> list[Tool]:
        server = MCPServer(tuple(given.command), given.url, given.auth_env, tuple(given.env), given.timeout)
        return Tool.from_mcp(server, only=given.only)

    return file.attempt(address, made)


def _is_trusted(server: str, key: str | None, file: Context, address: Address, setting: str) -> bool:
    """Return whether the user trusts a server, or report how to give consent."""
    try:
        trust = Trust.of_user(file.trusted, strict=not file.allow_import)
        refused = refusal(trust, "", server, key, sends="requests", only_listed=True)
    except DeclarationError as error:
        file.document.report_error((*address, setting), error)
        return False
    if refused is not None:
        place = "auth_env" if key is not None else setting
        named = (*address, place) if file.document.has((*address, place)) else address
        file.document.report(named, *refused)
    return refused is None


def dump_tools(agent: Agent) -> list[Tree]:
    """Return the entries of an agent's tools; those of one MCP server form one entry.

    Raises:
        DeclarationError: a tool cannot be named in a file.
    """
    entries: list[Tree] = []
    servers: dict[MCPServer, list[str]] = {}
    for tool in agent.tools:
        source = tool.source
        if isinstance(source, MCPSource):
            if source.server not in servers:
                entries.append({"mcp": _server(source.server, servers.setdefault(source.server, []))})
            servers[source.server].append(source.name)
        else:
            entries.append(_entry(agent.name, tool))
    return entries


def _server(server: MCPServer, names: list[str]) -> Tree:
    own: Tree = {"command": list(server.command)} if server.command else {"url": server.url}
    own |= {"auth_env": server.auth_env} if server.auth_env else {}
    own |= {"env": list(server.env)} if server.env else {}
    own |= {"timeout": server.timeout} if server.timeout != TIMEOUT else {}
    return {**own, "only": names}


def _entry(owner: str, tool: Tool) -> Tree:
    source = tool.source
    if isinstance(source, FunctionSource) and source.place is not None:
        if source.is_decorated:
            return {"function": source.place}
        plain = Tool.from_function(source.function)
        changed: dict[str, Any] = {
            name: getattr(tool, name)
            for name in ("name", "description", "timeout")
            if getattr(tool, name) != getattr(plain, name)
        }
        return {
            "function": source.place,
            **changed,
            **({"reproducible": True} if source.reproducible else {}),
        }
    if isinstance(source, SandboxSource):
        defaults = SandboxLimits()
        names = SandboxSettings.model_fields
        limits = {n: v for n in names if (v := getattr(source.limits, n)) != getattr(defaults, n)}
        return {"python": Flow(limits), **({"name": tool.name} if tool.name != "python" else {})}
    if isinstance(source, OpenAPISource) and source.document:
        return {
            "openapi": source.document,
            "operation": source.operation,
            "base_url": source.base_url,
            **({"auth_env": source.auth_env, "auth_header": source.auth_header} if source.auth_env else {}),
            "name": tool.name,
            "timeout": source.timeout,
        }
    raise DeclarationError(
        f"{owner}: the tool {tool.name!r} cannot be named in a file",
        hint="define its function at the top of a module, or give the OpenAPI document as a file",
    )
