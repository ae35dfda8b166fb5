"""Export a system with a configuration to messages, request bodies, and programs for other libraries."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, get_args

from compound.engine import Engine
from compound.errors import ExportError, suggest_name
from compound.exports.dspy_state import dspy_state, imported_program
from compound.exports.modules import dspy_module, langchain_module, python_module
from compound.exports.program import without_secrets
from compound.exports.prompts import langchain_messages, messages_document, openai_document, prompts_of
from compound.extras import explain_missing
from compound.graph.configuration import load
from compound.graph.system import System
from compound.narrowing import report_wrong_arguments
from compound.registry.engines import find_engine
from compound.security.untrusted import UntrustedFolder

Target = Literal["messages", "openai", "langchain", "dspy", "python"]
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
    """Return a system in the form of another library, and write it to a file.

    Requests are those that the engines of the system send: with the name of the engine's model, its options,
    and the format of answers or declarations of tools only if the engine sends them. No key is written: keys
    in the environment that occur in a text are replaced. Weights and learned selectors cannot be exported.

    Args:
        system: the system, bound to the configuration to export.
        to: ``messages`` (JSON with chat messages and placeholders), ``openai`` (JSON with request bodies),
            ``langchain`` (a Python module with chat prompts, or their JSON for a path that ends in
            ``.json``), ``dspy`` (the state of an imported program, or else a Python module with a program),
            or ``python`` (a module that needs the standard library only).
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
    if engines is not None:
        system = system.with_engines(_finder(engines, system.engines or find_engine))
    target = None if path is None else Path(path)
    as_json = target is not None and target.suffix == ".json"
    text = _WRITERS[to](system, as_json)
    if not_unicode := re.search("[\ud800-\udfff]", text):
        around = text[max(0, not_unicode.start() - 40) : not_unicode.start()]
        raise ExportError(
            f"a text holds {not_unicode.group()!a}, which is no Unicode character, after {around!a}",
            hint="correct this text in the configuration",
        )
    if target is not None:
        write(target, text)
    return text


def _finder(
    engines: Mapping[str, Engine | str], otherwise: Callable[[str], Engine]
) -> Callable[[str], Engine]:
    def find(lm: str) -> Engine:
        found = engines.get(lm, lm)
        return otherwise(found) if isinstance(found, str) else found

    return find


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
            file.write((text if text.endswith("\n") else f"{text}\n").encode())
    except ExportError as error:
        hint = "name a file in a folder that exists, no link"
        raise ExportError(f"{path} cannot be written: {error.message}", hint=hint) from None


def _json(value: object) -> str:
    return json.dumps(without_secrets(value), indent=2, ensure_ascii=False)


@explain_missing("the export to LangChain's JSON")
def _langchain(system: System, as_json: bool) -> str:
    source = langchain_module(system)
    if not as_json:
        return source
    from langchain_core.load import dumpd
    from langchain_core.prompts import ChatPromptTemplate

    prompts = prompts_of(system)
    if agents := [prompt.node for prompt in prompts if prompt.tools]:
        raise ExportError(
            f"the tools of {agents[0]!r} have no place in LangChain's JSON",
            hint="export to a file that ends in .py",
        )
    return _json(
        {
            prompt.node: dumpd(ChatPromptTemplate.from_messages(langchain_messages(prompt)))
            for prompt in prompts
        }
    )


def _dspy(system: System, as_json: bool) -> str:
    imported = imported_program(system)
    if imported is not None:
        return dspy_state(system, imported)
    if as_json:
        raise ExportError(
            f"system {system.name!r} was not imported from DSPy, so that there is no program to load a state",
            hint="export to a file that ends in .py: a DSPy program with its state",
        )
    return dspy_module(system)


_WRITERS: Mapping[str, Callable[[System, bool], str]] = {
    "messages": lambda system, _: _json(messages_document(system)),
    "openai": lambda system, _: _json(openai_document(system)),
    "langchain": _langchain,
    "dspy": _dspy,
    "python": lambda system, _: python_module(system),
}
