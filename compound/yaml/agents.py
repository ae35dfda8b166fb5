"""Tools of agents, and external agents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Required

from pydantic import Field, TypeAdapter, ValidationError

from compound.components.agent_prompt import AgentPrompt
from compound.components.external_agent import ExternalAgent
from compound.components.tools.tool import Tool
from compound.core.errors import DataError, DeclarationError, SpecError
from compound.core.security.sandbox.limits import SandboxLimits
from compound.core.security.untrusted import UntrustedFolder
from compound.graph.registry.code import importable_problem
from compound.yaml.context import FileContext
from compound.yaml.document import Address
from compound.yaml.kind import Given, Made, MakeContext, arguments, class_kind
from compound.yaml.source import read_value
from compound.yaml.spaces import TAKES, make_model, settings_model, summary
from compound.yaml.types import Code, MadeModel, Model, Name, SelectedModel

MAX_PROMPTS_FILE = 2**20  # bytes


def _field(kind: object, description: str) -> object:
    return Annotated[kind, Field(description=description)]


SandboxSettings = settings_model("sandbox", SandboxLimits)
MCPSettings = settings_model("tool_mcp", Tool.from_mcp)
_CODE = _field(Code, "The function, as module:name; modules are also found in this file's folder.")
_LIMITS = _field(SandboxSettings, "The limits of each program; `{}` for the defaults.")
TOOLS: Mapping[str, type[Model]] = {
    "function": settings_model(
        "tool_function",
        Tool.from_function,
        skip=("executes_code",),
        forms={"function": Required[_CODE]},
    ),
    "mcp": make_model("tool_mcp", summary(Tool.from_mcp), {"mcp": (MCPSettings, ...)}, MadeModel),
    "python": settings_model(
        "tool_python", Tool.python, skip=("limits",), forms={"python": Required[_LIMITS]}
    ),
}
"""The models of tools by the key that selects one."""
_FORMER = {"openapi": "make it an MCP server with FastMCP.from_openapi, and name this in `mcp`"}
TOOLS_OF_AGENTS = list[Annotated[Model, SelectedModel("tool", TOOLS, former=_FORMER)]]


def make_tools(entries: Sequence[Made], file: FileContext, address: Address) -> list[Tool] | None:
    """Return the tools of a file, or None after reporting why one cannot be made."""
    makers = {"function": _function, "mcp": _mcp, "python": _python}
    found: list[Tool] = []
    complete = True
    for number, entry in enumerate(entries):
        key = next(key for key in TOOLS if key in type(entry).model_fields)
        made = makers[key](entry, file, (*address, number))
        complete &= made is not None
        found += made or []
    return found if complete else None


def _function(entry: Made, file: FileContext, address: Address) -> list[Tool] | None:
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


def _python(entry: Made, file: FileContext, address: Address) -> list[Tool] | None:
    if not file.allow_import:  # the programs may come from the file's own data
        file.document.report(address, "runs generated code, and imports are not allowed")
        return None
    limits = SandboxLimits(**entry.python.given)
    made = file.attempt(address, lambda: Tool.python(limits, name=entry.name))
    return None if made is None else [made]


def _mcp(entry: Made, file: FileContext, address: Address) -> list[Tool] | None:
    given, inside = entry.mcp, (*address, "mcp")
    if given.command and not file.allow_import:
        program = " ".join(given.command)
        file.document.report(
            (*inside, "command"), f"starts a program ({program}), and imports are not allowed"
        )
        return None
    if given.url is not None:
        key, wrong = given.auth_env, (*inside, "url")
        named = wrong if key is None else (*inside, "auth_env")
        if not file.check_trust(given.url, key, wrong, named, sends="requests", only_listed=True):
            return None
    return file.attempt(inside, lambda: Tool.from_mcp(**given.given))


# External agents


class Match(Model):
    """Templates of the messages that a prompt is recognized by; `{{name}}` stands for any text."""

    system: str | None = None
    """The first system or developer message."""
    user: str | None = None
    """The first user message."""


AgentPromptSettings = settings_model(
    "agent_prompt", AgentPrompt, skip=("name",), forms={"match": Match | None}
)
_PROMPTS_FILE = _field(str | None, "A YAML file with further prompts, relative to this file.")


def _read_external_agent(settings: Given, context: MakeContext, at: Address) -> Given | None:
    file = context.file
    if settings.get("lm") is None:
        file.without_model.setdefault(context.name, context.address)
    settings["call"] = _program(settings, file, at)
    own, further = settings.pop("prompts", {}), settings.pop("prompts_file", None)
    found = [_prompt(n, p, file, (*at, "prompts", n)) for n, p in own.items()]
    if further is not None:
        place = (*at, "prompts_file")
        read = _read_prompts(further, file, place)
        found += [_prompt(name, prompt, file, place) for name, prompt in read.items()]
    if file.document.has_errors(at):
        return None
    return {**settings, "prompts": found, "folder": file.folder}


def _program(given: Mapping[str, Any], file: FileContext, inside: Address) -> Any:  # noqa: ANN401
    """Return the function to call, or its place; None for a command, or after reporting an error."""
    if given.get("command") and not file.allow_import:
        file.document.report((*inside, "command"), "names a program, and imports are not allowed")
    call = given.get("call")
    if call is None:
        return None
    if given.get("isolation") == "thread" or not file.allow_import:
        return file.load_function(call, (*inside, "call"))
    problem = importable_problem(call, file.folder)
    if problem:
        file.document.report((*inside, "call"), problem)
    return call


def _prompt(name: str, given: Made, file: FileContext, address: Address) -> AgentPrompt | None:
    first = file.names.setdefault(name, address)
    if first != address:
        hint = f"the first is at {file.document.label(first, key=True)}"
        file.document.report(address, f"a second component is named {name!r}", hint)
    settings = arguments(given.given, file, address)
    if given.match is not None:
        settings["match"] = given.match.given
    return file.attempt(address, lambda: AgentPrompt(name, **settings))


def _read_prompts(given: str, file: FileContext, at: Address) -> Mapping[str, Made]:
    """Return the prompts of a separate file, or nothing after reporting what is wrong with it."""
    path, _ = file.resolve_path(given, at)
    if file.document.has_errors(at):
        return {}
    try:
        found = read_value(_bounded_text(path), str(given))
        return TypeAdapter(dict[Name, AgentPromptSettings]).validate_python(found)  # type: ignore[valid-type]
    except DataError as error:
        file.document.report(at, f"cannot be read: {error.message}")
    except (SpecError, DeclarationError, UnicodeError) as error:
        file.document.report(at, f"cannot be used: {error}")
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        file.document.report(at, f"{given}: {where}: {first['msg']}")
    return {}


def _bounded_text(path: Path) -> str:
    """Return the content of a file, which may not be a link.

    Raises:
        DataError: it cannot be read, or is too large.
    """
    with UntrustedFolder(path.parent, error=DataError).reader(path.name) as opened:
        content = opened.read(MAX_PROMPTS_FILE + 1)
    if len(content) > MAX_PROMPTS_FILE:
        raise DataError(f"{path} is larger than 1 MiB")
    return content.decode()


EXTERNAL_AGENT_KIND = class_kind(
    "external_agent",
    ExternalAgent,
    settings=settings_model(
        "external_agent",
        ExternalAgent,
        skip=("name", "output", "folder"),
        forms={
            "takes": TAKES,
            "call": Code | None,
            "prompts": dict[Name, AgentPromptSettings],  # type: ignore[valid-type]
            "prompts_file": _PROMPTS_FILE,
        },
    ),
    out=True,
    read=_read_external_agent,
)
