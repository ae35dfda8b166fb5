"""The kind ``external_agent``: an agent of any framework or language, run as it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from compound.components.agent_prompt import AgentPrompt
from compound.components.external_agent import ExternalAgent
from compound.errors import DataError, DeclarationError, SpecError
from compound.graph.space import Choice, Weights
from compound.registry.code import importable_problem
from compound.security.untrusted import UntrustedFolder
from compound.spec.kinds.kind import DumpContext, Kind, MakeContext, make_settings
from compound.spec.schema.settings import (
    CountSetting,
    FloatSetting,
    LabelSetting,
    TextSetting,
    WeightsSetting,
)
from compound.spec.schema.types import Code, Model, Name, Type
from compound.spec.schema.wiring import Out, Wiring
from compound.spec.spelling import Tree, spell_code
from compound.spec.yaml.document import Address
from compound.spec.yaml.source import read_value
from compound.spec.yaml.text import Flow

MAX_PROMPTS_FILE = 2**20  # bytes


class Match(Model):
    """Templates of the messages that a prompt is recognized by; `{{name}}` stands for any text."""

    system: str | None = None
    """The first system or developer message."""
    user: str | None = None
    """The first user message."""


class AgentPromptSettings(Model):
    """A prompt of the agent: requests that have it are rewritten with these texts and settings."""

    match: Match | None = None
    """The messages as the agent sends them; by default the initial texts."""
    system: TextSetting | None = None
    """The text that replaces the system message."""
    prompt: TextSetting | None = None
    """The text that replaces the user message."""
    lm: LabelSetting | None = None
    """The model; that of the agent by default."""
    temperature: FloatSetting | None = None
    """Sampling temperature; that of the request by default."""
    max_tokens: CountSetting | None = None
    """Maximum length of an answer in tokens; that of the request by default."""
    weights: WeightsSetting | None = None
    """A LoRA adapter to train."""
    timeout: float | None = Field(default=120.0, gt=0)
    """Timeout of one attempt of a remote model in seconds."""
    retries: int = Field(default=3, ge=0)
    """Maximum number of retries after transient errors."""


class ExternalAgentSettings(Model):
    """An agent, and how it is run."""

    call: Code | None = None
    """The agent's function, as module:name; modules are also found in this file's folder."""
    command: list[str] = Field(default=[])
    """The agent's program and its arguments: reads the inputs as JSON on stdin, writes outputs to stdout."""
    prompts: dict[Name, AgentPromptSettings] = Field(default={})
    """The agent's prompts to tune, by name; `compound gateway discover` finds them."""
    prompts_file: str | None = None
    """A YAML file with further prompts, relative to this file."""
    lm: LabelSetting | None = None
    """The model for all requests; the file's `lm` by default."""
    isolation: Literal["worker", "run", "thread"] = "worker"
    """Run a function in a process that later runs reuse, in one process per run, or in this process."""
    env: list[str] = Field(default=[])
    """Environment variables that the agent's process receives besides common ones."""
    timeout: float = Field(default=300.0, gt=0)
    """Time limit of a run in seconds, without the time of its requests."""
    max_requests: int = Field(default=50, ge=1)
    """Maximum number of requests of a run."""
    concurrency: int = Field(default=4, ge=1)
    """Maximum number of processes of the agent."""
    takes: dict[Name, Type] | None = None
    """Names and types of the inputs; by default those that are connected."""


class ExternalAgentEntry(Wiring):
    """An agent of any framework or language, whose requests to models are recorded and tuned."""

    external_agent: ExternalAgentSettings
    """The agent."""
    out: Out = Field(default="str", validate_default=True)
    """The type of the output, or the types of the output fields."""


def _make(entry: ExternalAgentEntry, context: MakeContext) -> ExternalAgent | None:
    file, inside, given = context.file, (*context.address, "external_agent"), entry.external_agent
    if given.lm is not None:
        _check_models(context, given.lm, (*inside, "lm"))
    else:
        file.without_model.setdefault(context.name, context.address)
    call = _program(given, context, inside)
    prompts = _prompts(given, context, inside)
    if file.document.has_errors(inside):
        return None
    names = ("isolation", "env", "timeout", "max_requests", "concurrency", "takes", "command")
    rest = {name: value for name, value in given.given.items() if name in names}
    lm = make_settings({"lm": given.lm}) if given.lm is not None else {}
    return file.attempt(
        inside,
        lambda: ExternalAgent(
            context.name, call=call, prompts=prompts, output=entry.out, folder=file.folder, **lm, **rest
        ),
    )


def _program(given: ExternalAgentSettings, context: MakeContext, inside: Address) -> Any:  # noqa: ANN401
    """Return the function to call, or its place; None for a command, or after reporting an error."""
    file = context.file
    if given.command and not file.allow_import:
        file.document.report((*inside, "command"), "names a program, and imports are not allowed")
    if given.call is None:
        return None
    if given.isolation == "thread" or not file.allow_import:
        return file.load_function(given.call, (*inside, "call"))
    problem = importable_problem(given.call, file.folder)
    if problem:
        file.document.report((*inside, "call"), problem)
    return given.call


def _prompts(given: ExternalAgentSettings, context: MakeContext, inside: Address) -> list[AgentPrompt]:
    """Return the prompts of the file, and those of the separate file."""
    found = [_prompt(n, p, context, (*inside, "prompts", n)) for n, p in given.prompts.items()]
    if given.prompts_file is not None:
        address = (*inside, "prompts_file")
        further = _read_prompts(given.prompts_file, context, address)
        found += [_prompt(name, prompt, context, address) for name, prompt in further.items()]
    return [prompt for prompt in found if prompt is not None]


def _prompt(
    name: str, given: AgentPromptSettings, context: MakeContext, address: Address
) -> AgentPrompt | None:
    file, settings = context.file, make_settings(given.given)
    first = file.names.setdefault(name, address)
    if first != address:
        hint = f"the first is at {file.document.label(first, key=True)}"
        file.document.report(address, f"a second component is named {name!r}", hint)
    if given.match is not None:
        settings["match"] = given.match.given
    if given.lm is not None:
        _check_models(context, given.lm, (*address, "lm"))
    if isinstance(weights := settings.get("weights"), Weights) and weights.value is not None:
        settings["weights"] = replace(weights, value=file.resolve_stored(weights.value, address))
    return file.attempt(address, lambda: AgentPrompt(name, **settings))


def _check_models(context: MakeContext, given: object, address: Address) -> None:
    lm = make_settings({"lm": given})["lm"]
    context.file.check_models(lm.options if isinstance(lm, Choice) else [lm], address)


def _read_prompts(given: str, context: MakeContext, address: Address) -> Mapping[str, AgentPromptSettings]:
    """Return the prompts of a separate file, or nothing after reporting what is wrong with it."""
    file = context.file
    path, _ = file.resolve_path(given, address)
    if file.document.has_errors(address):
        return {}
    try:
        found = read_value(_bounded_text(path), str(given))
        return TypeAdapter(dict[Name, AgentPromptSettings]).validate_python(found)
    except DataError as error:
        file.document.report(address, f"cannot be read: {error.message}")
    except (SpecError, DeclarationError, UnicodeError) as error:
        file.document.report(address, f"cannot be used: {error}")
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        file.document.report(address, f"{given}: {where}: {first['msg']}")
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


def _dump(component: ExternalAgent, context: DumpContext) -> Tree:
    program = component.program
    given: Tree = {}
    if program.command:
        given["command"] = list(program.command)
    else:
        given["call"] = component.place or spell_code(program.call, component.name)
    given["prompts"] = {prompt.name: _dump_prompt(prompt, component, context) for prompt in component.prompts}
    if component.lm is not None:
        given["lm"] = context.setting("lm", component.lm)
    if program.isolation != "worker":
        given["isolation"] = program.isolation
    if program.env:
        given["env"] = list(program.env)
    limits = {
        "timeout": (component.run_timeout, 300.0),
        "max_requests": (component.max_requests, 50),
        "concurrency": (component.concurrency, 4),
    }
    given |= {name: value for name, (value, usual) in limits.items() if value != usual}
    if component.takes is not None:
        given["takes"] = context.types(component.takes)
    outputs = context.output_types(component)
    if outputs == {"output": "str"}:
        return {"external_agent": given}
    out = outputs["output"] if list(outputs) == ["output"] else Flow(outputs)
    return {"external_agent": given, "out": out}


def _dump_prompt(prompt: AgentPrompt, agent: ExternalAgent, context: DumpContext) -> Tree:
    """Return a prompt with explicit templates: its texts may be bound to others than the agent sends."""
    own = dataclasses.replace(context, name=prompt.name)
    skip = ("name", "match", *(["lm"] if prompt.lm == agent.lm else []))
    match = {role: template.text for role, template in prompt.templates.items()}
    return {"match": match, **own.changed_fields(prompt, skip)}


EXTERNAL_AGENT_KIND = Kind("external_agent", ExternalAgentEntry, _make, (ExternalAgent,), _dump)
