"""The tuned texts of external agents as a unified diff of the files that contain the original ones.

A text of a request comes from a string in the agent's Python files, or from a text, YAML or JSON
file beside them (`compound.interchange.source_strings`). The expressions of a string take the
places of the placeholders in the tuned text. Files are neither imported nor changed.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from compound.components.agent_prompt import AgentPrompt
from compound.components.external_agent import ExternalAgent
from compound.components.gateway.templates import PLACEHOLDER, PromptTemplate, fill
from compound.graph.system import System
from compound.interchange.source_strings import (
    Part,
    Parts,
    SourceFile,
    SourceString,
    merged,
    read_files,
)

LEAST_SHARE = 0.5  # of the constant characters of a text that a string must have
WORDS_SHARE = 0.3  # the same of the characters of its words, of which expressions may cut some
LEAST_PIECE = 8  # characters of a string that is named as a part of a text
MAX_EXPRESSIONS = 30  # of a string


@dataclass(frozen=True)
class SourceDiff:
    """Changes of an agent's files."""

    text: str  # the unified diff, with paths relative to `folder`; empty without a change
    folder: Path  # the folder of the agent
    notes: Sequence[str] = ()  # what the diff does not contain, and why


def source_diff(system: System) -> list[SourceDiff]:
    """Return the tuned texts of a system's external agents as diffs, one for each folder of agents.

    Args:
        system: the system, bound to the configuration to write.

    Example:
        A text that is not in the files is named in ``notes``:

        >>> import compound as cp
        >>> prompt = cp.components.AgentPrompt("p", system=cp.Text("Be brief."))
        >>> program = {"command": ["node", "agent.mjs"], "folder": "docs/images"}
        >>> agent = cp.components.ExternalAgent("a", **program, prompts=[prompt])
        >>> qa = cp.System("qa", {"answer": agent(question=cp.Input("question"))}, lm="lm")
        >>> source_diff(qa.bind({"p.system": "Be very brief."}))[0].notes
        ("p.system: no string in the agent's files has the original text",)
    """
    diffs: list[SourceDiff] = []
    agents = [found for found in system.components.values() if isinstance(found, ExternalAgent)]
    for folder in dict.fromkeys(agent.folder for agent in agents):
        files: list[SourceFile] | None = None
        notes: list[str] = []
        prompts = [p for a in agents if a.folder == folder for p in a.prompts]
        texts = [(p.name, *text) for p in prompts for text in _texts(p, system)]
        may_hold = partial(_may_hold, [_words(template) for _, _, template, _ in texts])
        # those that keep their text come last: they show what a change of a string concerns besides
        for name, setting, template, new in sorted(texts, key=lambda each: each[2].text == each[3]):
            is_changed = template.text != new
            if is_changed or files is not None:
                files = read_files(folder, may_hold) if files is None else files
                note = _change(files, template, new) if is_changed else _sharing(files, template)
                notes += [f"{name}.{setting}: {note}"] if note else []
        notes += [note for prompt in prompts for note in _other_settings(prompt, system)]
        parts: list[str] = []
        for file in files or ():
            try:
                parts.append(_unified(file))
            except SyntaxError:  # what is written must at least be Python
                notes.append(f"{file.name} cannot be changed: the result would be no Python")
            except UnicodeEncodeError as error:
                lost = error.object[error.start]
                notes.append(
                    f"{file.name} cannot be changed: its encoding {file.encoding} has no {lost!r}"
                )
        if any(parts) or notes:
            diffs.append(SourceDiff("".join(parts), folder, tuple(notes)))
    return diffs


def _words(template: PromptTemplate) -> list[str]:
    """Return the words of a prompt that have the same form in all files, also with escapes."""
    return re.findall("[A-Za-z0-9]+", "\n".join(template.constants))


def _may_hold(prompts: Sequence[Sequence[str]], text: str) -> bool:
    """Return whether a file has enough of the words of a prompt to have its text, for a quick answer."""
    return any(
        sum(len(word) for word in words if word in text) >= WORDS_SHARE * sum(map(len, words))
        for words in prompts
    )


def _texts(prompt: AgentPrompt, system: System) -> Iterator[tuple[str, PromptTemplate, str]]:
    """Yield the settings of a prompt, what the agent sends, and the text that replaces it."""
    for role, template in prompt.templates.items():
        setting = "system" if role == "system" else "prompt"
        text = system.configuration.get(f"{prompt.name}.{setting}", getattr(prompt, setting))
        if not isinstance(text, str) or text == template.text:
            yield setting, template, template.text
        else:
            shown = dict.fromkeys(template.names)
            filled = fill(text, {name: f"{{{{{name}}}}}" for name in shown})
            yield setting, template, filled


def _other_settings(prompt: AgentPrompt, system: System) -> Iterator[str]:
    for setting in ("lm", "temperature", "max_tokens", "weights"):
        key = f"{prompt.name}.{setting}"
        if key in system.parameters:
            yield f"{key} = {system.configuration[key]!r:.200}: pass it to the request yourself"


def _origins(
    files: Sequence[SourceFile], template: PromptTemplate
) -> list[tuple[SourceFile, SourceString, dict[str, Parts]]]:
    """Return the strings that have the most of a template in common, with the values of its names."""
    found = [
        ((size, own, len(each.parts)), file, each, values)
        for file in files
        for each in file.strings
        for size, own, values in [_match(each, template)]
        if size
    ]
    most = max((rank for rank, *_ in found), default=None)
    return [(file, each, values) for rank, file, each, values in found if rank == most]


def _sharing(files: Sequence[SourceFile], template: PromptTemplate) -> str:
    """Return what a reader must know of a prompt that keeps its text, if its string is changed."""
    for file, each, _ in _origins(files, template):
        if (each.start, each.end) in file.changes:
            return f"it keeps its text, but the diff changes the string in {file.name}, its origin"
    return ""


def _change(files: Sequence[SourceFile], template: PromptTemplate, new: str) -> str:
    """Put a text in place of the strings that have another one; return what a reader must know."""
    best = _origins(files, template)
    if not best:
        pieces = ", ".join(_pieces(files, template))
        return "no string in the agent's files has the original text" + (
            f"; it is put together from parts in {pieces}, so write it there yourself"
            if pieces
            else ""
        )
    if len({tuple(each.parts) for _, each, _ in best}) > 1:
        places = ", ".join(dict.fromkeys(file.name for file, _, _ in best))
        return f"several strings could be its origin (in {places})"
    for file, each, values in best:
        parts = _filled(new, values)
        try:
            written = each.write(parts)
        except ValueError as error:
            return f"it cannot be written into {file.name}, since {error}"
        if file.changes.setdefault((each.start, each.end), written) != written:
            return f"the string in {file.name} is also the origin of another prompt"
    lost = [
        code
        for kind, code in each.parts
        if kind == "code" and code not in each.known and (kind, code) not in parts
    ]
    return f"the new text does not use {', '.join(lost)}, the same in all runs" if lost else ""


def _pieces(files: Sequence[SourceFile], template: PromptTemplate) -> list[str]:
    """Return the lines of strings that are parts of a text, as ``file:line``, at most five."""
    places = [
        f"{file.name}:{file.text.count(chr(10), 0, each.start) + 1}"
        for file in files
        for each in file.strings
        for kind, text in each.parts
        if kind == "text" and len(text.strip()) >= LEAST_PIECE and text.strip() in template.text
    ]
    return [*dict.fromkeys(places)][:5]


def _match(string: SourceString, template: PromptTemplate) -> tuple[int, int, dict[str, Parts]]:
    """Return how many constant characters a string has in common with a template, 0 if it does not match.

    Also returns how many of them are its own, without those of constants that it names, and what
    stands in the string at each placeholder of the template.
    """
    parts, known = string.parts, string.known
    own = len("".join(text for kind, text in parts if kind == "text").strip())
    named = sum(len(known.get(code, "").strip()) for kind, code in parts if kind == "code")
    if own + named < LEAST_SHARE * len("".join(template.constants).strip()) or not own + named:
        return 0, 0, {}
    codes = [code for kind, code in parts if kind == "code"]
    if len(codes) > MAX_EXPRESSIONS:
        return 0, 0, {}
    if not codes:  # placeholders stand for constants of the string
        found = template.match(parts[0][1])
        if found is None or not all(value.strip() for value in found.values()):
            return 0, 0, {}
        size = len("".join(template.constants).strip())
        return size, size, {name: (("text", value),) for name, value in found.items()}
    for groups in ([[part] for part in parts], _grouped(parts)):
        pattern = "".join(
            re.escape(text)
            if kind == "text"
            else f"({re.escape(known[text])})"
            if text in known and not rest
            else "(.*?)"
            for (kind, text), *rest in groups
        )
        matched = re.fullmatch(pattern, template.text, re.DOTALL)
        gaps = [group for group in groups if group[0][0] == "code"]
        values: dict[str, Parts] = {}
        for group, text in zip(gaps, matched.groups() if matched else (), strict=bool(matched)):
            names = PLACEHOLDER.findall(text)
            if len(names) == 1 and PLACEHOLDER.fullmatch(text.strip()):
                values[names[0]] = group
            elif names:  # an expression stands for more than one placeholder
                return 0, 0, {}
        if matched and set(template.names) <= set(values):
            return own + named, own, values
    return 0, 0, {}


def _grouped(parts: Parts) -> list[list[Part]]:
    """Return parts in groups: expressions without a word between them, which have one placeholder."""
    groups: list[list[Part]] = []
    for part in parts:
        last = groups[-1][-1] if groups and part[0] == "code" else ("", "")
        if last[0] == "code":
            groups[-1].append(part)
        elif last[0] == "text" and len(groups) > 1 and not re.search(r"[^\W_]", last[1]):
            groups[-2:] = [[*groups[-2], last, part]]
        else:
            groups.append([part])
    return groups


def _filled(text: str, values: Mapping[str, Parts]) -> list[Part]:
    """Return the parts of a tuned text: the source's expressions in place of the placeholders."""
    parts: list[Part] = []
    for number, piece in enumerate(PLACEHOLDER.split(text)):
        parts += (
            values.get(piece, [("text", f"{{{{{piece}}}}}")]) if number % 2 else [("text", piece)]
        )
    return merged(parts)


def _unified(file: SourceFile) -> str:
    """Return the changes of a file; bytes of another encoding than UTF-8 as surrogates."""
    new = file.changed()
    if file.name.endswith(".py"):
        ast.parse(new.removeprefix("\ufeff"))
    # only "\n" ends a line for `patch`, unlike for `str.splitlines`
    old_lines, new_lines = (
        re.findall(
            r"[^\n]*\n|[^\n]+", text.encode(file.encoding).decode("utf-8", "surrogateescape")
        )
        for text in (file.text, new)
    )
    lines = difflib.unified_diff(old_lines, new_lines, f"a/{file.name}", f"b/{file.name}")
    end = "\n\\ No newline at end of file\n"
    return "".join(line if line.endswith("\n") else line + end for line in lines)
