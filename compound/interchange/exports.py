"""Export a configuration for other tools, and the candidates of a run as a study of Optuna."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from compound.components.agents.agent import Agent
from compound.components.agents.turn import HISTORY, LAST, TASK, AgentTurn
from compound.components.llm import LLM
from compound.core.engine import AnswerFormat, Capabilities, Engine, Request
from compound.core.errors import CompoundError, ExportError, explain_missing, suggest_name
from compound.core.image import Image
from compound.core.narrowing import report_wrong_arguments
from compound.core.security.sanitize import redact_values, remember_environment
from compound.core.security.untrusted import UntrustedFolder
from compound.core.storage.artifacts import without_path
from compound.engines.chat_format import messages_to_json, response_format, tools_to_json
from compound.engines.litellm import LiteLLMEngine
from compound.engines.openai import OpenAIEngine
from compound.engines.options import Unsupported
from compound.execution.schedule import setting_values
from compound.execution.tool_text import to_text
from compound.graph.component import Node
from compound.graph.configuration import digest, load
from compound.graph.registry.engines import resolve_engines
from compound.graph.system import System
from compound.graph.types import format_type
from compound.interchange.dspy_import import to_dspy
from compound.interchange.dspy_program import DSPyProgram
from compound.optimization.runs.candidate_record import read_candidates
from compound.optimization.runs.directory import inconsistency_errors, read_json

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.storages import BaseStorage

UNCHANGED = "start"  # label of an initial text


@explain_missing("the export to Optuna")
def to_optuna(run: str | Path, storage: str | BaseStorage | None = None) -> Study:
    """Return a study of Optuna with one trial for each candidate of a run, in the order of their first runs.

    The value of a trial is the mean score. Choices and numbers are parameters with the
    distributions of the system. Texts, demonstrations and other values are categorical: ``start``,
    or the start of a digest. The values, the costs per run, the fate and the rest of the record are
    user attributes of the trial.

    Args:
        run: the run directory.
        storage: a storage of Optuna, such as ``sqlite:///study.db``; default: in memory. The study
            gets the name of the run directory.

    Raises:
        ExportError: the run has no record of candidates, or the storage has a study of this name.
        RunDirectoryError: it is not a run directory, or is damaged.
    """
    import optuna

    candidates, config = read_candidates(run), read_json(run, "config.json")
    if not candidates:
        raise ExportError(f"{run} has no candidates", hint="runs of this version record them")
    start, name = config["start"], Path(run).resolve().name
    with inconsistency_errors(run):
        spaces = config["structure"]["parameters"]
        values = {key: [c.values.get(key, start[key]) for c in candidates] for key in start}
        columns = {
            key: _column(spaces.get(key, {}), own, start[key]) for key, own in values.items()
        }
    trials = [
        optuna.trial.create_trial(
            value=candidate.mean,
            params={key: own[number] for key, (_, own) in columns.items()},
            distributions={key: distribution for key, (distribution, _) in columns.items()},
            user_attrs={
                name: list(value) if isinstance(value, tuple) else value
                for name, value in asdict(candidate).items()
            },
        )
        for number, candidate in enumerate(candidates)
    ]
    try:
        study = optuna.create_study(storage=storage, study_name=name, direction="maximize")
    except optuna.exceptions.DuplicatedStudyError:
        raise ExportError(
            f"{storage} has a study {name!r} already", hint="name another file"
        ) from None
    study.set_user_attr(UNCHANGED, start)
    study.add_trials(trials)
    return study


def write_study(run: Path, path: Path) -> str:
    """Write the study of a run to an SQLite file, and return a sentence about it.

    Raises:
        ExportError: it cannot be written.
    """
    folder = UntrustedFolder(path.parent, error=ExportError)
    if folder.kind(path.name) not in (None, "file"):
        raise ExportError(f"{path} is no file", hint="name a file in a folder that exists, no link")
    storage = f"sqlite:///{path}"
    try:
        study = to_optuna(run, storage)
    except ImportError:
        raise
    except Exception as error:
        if type(error).__module__.partition(".")[0] != "sqlalchemy":
            raise
        raise ExportError(f"{path} cannot be written as a database: {error}") from None
    return f"study {study.study_name!r} with {len(study.trials)} trials: {storage}"


def _column(
    space: Mapping[str, Any], values: Sequence[object], start: object
) -> tuple[BaseDistribution, list[Any]]:
    """Return the distribution of a parameter, and its value in each trial."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    match space:
        case {"kind": "choice", "options": options} if all(
            any(v == o for o in options) for v in values
        ):
            return CategoricalDistribution(options), [*values]
        case {"kind": "int" | "float" as kind, "low": low, "high": high, "log": log}:
            make = IntDistribution if kind == "int" else FloatDistribution
            return make(low, high, log=log), [*values]
    digests = [digest(without_path(value)) for value in (start, *values)]
    labels = [UNCHANGED if own == digests[0] else own[:12] for own in digests[1:]]
    return CategoricalDistribution([*dict.fromkeys(labels)]), labels


FindEngine = Callable[[str], Engine]
MARK = (
    "\ue000{}\ue001"  # private characters around the number of an input; prompts hold none of them
)
PARTS = ("prompt", "demos", "weights")  # settings of which the messages and the model are made


def prompts_of(system: System, find: FindEngine) -> list[dict[str, Any]]:
    """Return the prompts of all LLM nodes and agents, those inside loops and maps included.

    ``body`` holds the messages as JSON, and temperature, maximum number of tokens, stop strings,
    tools, and options of the engine. Contents are format strings of Python. ``lm`` is empty if
    another component chooses it, and ``tool_names`` are the declared names by the tuned ones.

    Raises:
        ExportError: the system has none, or a part of a prompt comes from another component.
    """
    nodes = [node for node in system.all_nodes() if isinstance(node.component, LLM | Agent)]
    if not nodes:
        raise ExportError(
            f"system {system.name!r} has no prompts to export: it has no LLM components and agents",
            hint="tuned texts of other components are the values of its configuration",
        )
    return [_prompt(node, system, find) for node in nodes]


def _prompt(node: Node, system: System, find: FindEngine) -> dict[str, Any]:
    _check(node)
    component, names = node.component, {}
    shown = [name for name in node.wires if name not in component.settings]
    marks = {name: MARK.format(number) for number, name in enumerate(shown)}
    if isinstance(component, Agent):
        turn = component.body.nodes["turn"].component
        assert isinstance(turn, AgentTurn)
        values = setting_values(turn, system)
        request = turn.request({TASK: marks, HISTORY: [], LAST: False}, values)
        names = {name: tool.name for name, (_, tool) in turn.declared(values).items()}
        outputs = component.model.outputs
    else:
        assert isinstance(component, LLM)
        values = setting_values(component, system)
        request, outputs = component.request(marks, values), component.outputs
    if request.adapter is not None:
        raise ExportError(
            f"{component.name!r} uses a trained adapter, which an export does not hold",
            hint="serve it with compound serve, or export another configuration",
        )
    if not values["lm"] and "lm" not in node.wires:
        raise ExportError(f"{component.name!r} has no model", hint="set lm on the system")
    lm, asked, body = _sent(request, values["lm"], marks, find)
    return {
        "name": node.name,
        "lm": lm,
        "format": asked,
        "body": body,
        "tool_names": names,
        "inputs": {name: format_type(node.inputs[name].type) for name in marks},
        "outputs": {name: format_type(port.type) for name, port in outputs.items()},
    }


def _check(node: Node) -> None:
    """Reject a prompt that does not follow from the inputs of its node alone."""
    if wired := [name for name in node.wires if name in PARTS and name in node.component.settings]:
        raise ExportError(
            f"the prompt of {node.name!r} cannot be exported: its {wired[0]} comes from another component",
            hint="connect the text as an input",
        )
    if pictures := [name for name, port in node.inputs.items() if port.type is Image]:
        raise ExportError(
            f"the prompt of {node.name!r} cannot be exported: its input {pictures[0]!r} is an image"
        )


def _sent(
    request: Request, lm: object, marks: Mapping[str, str], find: FindEngine
) -> tuple[object, AnswerFormat | None, dict[str, Any]]:
    """Return the model, the format and the other parts of a request as its engine sends them.

    An engine that cannot be opened is taken to have all capabilities.
    """
    try:
        engine: Engine | None = find(str(lm))
        found = Capabilities(engine)
        unsupported, takes_tools = frozenset(found.unsupported), found.native_tools
        takes_format = found.takes_format and "response_format" not in unsupported
    except (CompoundError, ImportError, OSError):
        engine, unsupported, takes_format, takes_tools = None, frozenset(), True, True
    extra: Mapping[str, object] = {}
    if isinstance(engine, LiteLLMEngine):
        lm, extra = engine.model, engine.extra
    elif isinstance(engine, OpenAIEngine) and engine.model:
        lm = f"openai/{engine.model}"
    if request.tools and not takes_tools:  # it was measured with the tools described in the prompt
        request = to_text(request)
    messages = [
        {**message, "content": _template(message["content"], marks)}
        for message in messages_to_json(request.cued)
    ]
    document = {
        "messages": messages,
        "temperature": request.temperature,
        "max_tokens": request.max_tokens,
        **({"tools": tools_to_json(request.tools)} if request.tools else {}),
        **({"stop": list(request.stop)} if request.stop else {}),
    }
    # a format would exclude calls of declared tools
    asked = request.format if takes_format and not request.tools else None
    return lm, asked, {**Unsupported(unsupported, "").adapt(document), **extra}


def _template(text: str, marks: Mapping[str, str]) -> str:
    """Escape braces, and replace marks by placeholders."""
    text = text.replace("{", "{{").replace("}", "}}")
    for name, mark in marks.items():
        text = text.replace(mark, f"{{{name}}}")
    return text


Target = Literal["messages", "openai", "dspy"]
TARGETS: tuple[str, ...] = get_args(Target)


@report_wrong_arguments
def export(
    system: System,
    to: Target,
    path: str | Path | None = None,
    *,
    configuration: Mapping[str, object] | str | Path | None = None,
    engines: Mapping[str, Engine | str] | None = None,
) -> str:
    """Return the prompts of a system as JSON for another library, and write it to a file.

    Requests are those that the engines of the system send: with the name of the engine's model, its
    options, and the format of answers or declarations of tools only if the engine sends them. No
    key is written: keys in the environment that occur in a text are replaced. Trained weights
    cannot be exported.

    Args:
        system: the system, bound to the configuration to export.
        to: ``messages`` (chat messages with placeholders), ``openai`` (request bodies), or ``dspy``
            (the state of a program imported from DSPy, for ``program.load``).
        path: the file to write; an existing one is replaced. Nothing else is written.
        configuration: values or a file (``best.json``) to export instead of those of ``system``.
        engines: the engines that the system was run with, as in `compound.run`; default: as there.

    Returns:
        The text.

    Raises:
        ExportError: a part of the system has no counterpart there; the message names it.

    Example:
        >>> from compound import LLM, Input, Text
        >>> answerer = LLM("answerer", prompt=Text("Answer {briefly}."))
        >>> system = System("qa", {"answer": answerer(question=Input("question"))}, lm="openai/gpt-4o-mini")
        >>> print(json.loads(export(system, "messages"))["prompts"][0]["messages"][0]["content"])
        Answer {{briefly}}.
        <BLANKLINE>
        Question: {question}
        Answer:
    """
    if to not in TARGETS:
        raise ExportError(f"cannot export to {to!r}", hint=suggest_name(str(to), TARGETS))
    if configuration is not None:
        values = load(configuration) if isinstance(configuration, str | Path) else configuration
        system = system.bind(values)
    document = _DOCUMENTS[to](system, resolve_engines(system, engines))
    remember_environment()
    text = json.dumps(redact_values(document), indent=2, ensure_ascii=False)
    if not_unicode := re.search("[\ud800-\udfff]", text):
        around = text[max(0, not_unicode.start() - 40) : not_unicode.start()]
        raise ExportError(
            f"a text holds {not_unicode.group()!a}, which is no Unicode character, after {around!a}",
            hint="correct this text in the configuration",
        )
    if path is not None:
        write(Path(path), text)
    return text


def write(path: Path, text: str) -> None:
    """Replace a file atomically, and keep its permissions; whatever fails, an existing file stays as it is.

    Raises:
        ExportError: it cannot be written, or is a link.
    """
    folder = UntrustedFolder(path.parent, error=ExportError)
    try:
        mode = path.lstat().st_mode if folder.kind(path.name) == "file" else None
        with folder.writer(path.name) as file:
            if mode is not None:
                os.fchmod(file.fileno(), stat.S_IMODE(mode))
            whole = text if text.endswith("\n") else f"{text}\n"
            file.write(whole.encode(errors="surrogateescape"))  # a diff may quote another encoding
    except ExportError as error:
        hint = "name a file in a folder that exists, no link"
        raise ExportError(f"{path} cannot be written: {error.message}", hint=hint) from None


def _messages(system: System, find: FindEngine) -> dict[str, Any]:
    """Return the prompts as messages with placeholders."""
    return {
        "format": "compound-messages-1",
        "system": system.name,
        "placeholders": "contents are Python format strings: {name} is an input, {{ and }} are braces",
        "prompts": [
            {
                **{key: prompt[key] for key in ("name", "lm")},
                **prompt["body"],
                **({"tool_names": prompt["tool_names"]} if "tools" in prompt["body"] else {}),
                **{key: prompt[key] for key in ("inputs", "outputs")},
            }
            for prompt in prompts_of(system, find)
        ],
    }


def _openai(system: System, find: FindEngine) -> dict[str, Any]:
    """Return the bodies of OpenAI's chat completions by node, with placeholders in the contents."""
    bodies = {}
    for prompt in prompts_of(system, find):
        name, lm, form = (prompt[key] for key in ("name", "lm", "format"))
        if not lm:
            raise ExportError(
                f"the model of {name!r} comes from another component",
                hint="export with --to messages",
            )
        asked = {"response_format": response_format(form)} if form else {}
        bodies[name] = {"model": str(lm).removeprefix("openai/"), **asked, **prompt["body"]}
    return bodies


@explain_missing("the export to DSPy")
def _dspy(system: System, _: FindEngine) -> dict[str, Any]:
    """Return the state of an imported program, which ``program.load`` reads from a file."""
    components = [node.component for node in system.nodes.values()]
    if len(components) != 1 or not isinstance(components[0], DSPyProgram):
        raise ExportError(
            f"system {system.name!r} was not imported from DSPy, so no program can load a state of it",
            hint="export with --to messages, or serve it with compound serve",
        )
    from dspy.utils.saving import get_dependency_versions

    values = {key: value for key, value in system.configuration.items() if value is not None}
    state: dict[str, Any] = to_dspy(components[0].program, values).dump_state()
    return {**state, "metadata": {"dependency_versions": get_dependency_versions()}}


_DOCUMENTS: Mapping[str, Callable[[System, FindEngine], dict[str, Any]]] = {
    "messages": _messages,
    "openai": _openai,
    "dspy": _dspy,
}
