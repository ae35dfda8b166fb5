"""The tuned texts of external agents as a unified diff of the files that contain the original ones.

A text of a request comes from a string in the agent's Python files, or from a text file beside
them. A string is found by its constant parts: those of an f-string, of a text for ``str.format``,
``%``, ``string.Template`` or Jinja, or of a sum. The expressions between them take the places of
the placeholders in the tuned text. Files are read and parsed, and neither imported nor changed.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import itertools
import os
import re
import stat
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from compound.components.agent_prompt import AgentPrompt
from compound.components.external_agent import ExternalAgent
from compound.components.gateway.templates import PLACEHOLDER, PromptTemplate, fill
from compound.core.errors import DataError
from compound.core.security.untrusted import UntrustedFolder
from compound.graph.system import System

MAX_FOLDERS, MAX_FILES, MAX_BYTES = 1000, 500, 2**20  # that are read, and bytes of a file
TEXT_FILES = (".txt", ".md", ".prompt", ".j2", ".jinja", ".jinja2", ".tmpl", ".tpl")
SKIPPED = ("node_modules", "site-packages", "__pycache__", "venv", "runs")
MAX_EXPRESSIONS = 30  # of a string
LEAST_SHARE = 0.5  # of the constant characters of a text that a string must have
WIDTH = 88  # columns of a line that is written
BLOCKS = ('"""', "'''")
MARK = "\ue000"  # stands for an expression while a text is measured
Part = tuple[str, str]  # "text" or "code", and the constant text or the source of the expression
Parts = Sequence[Part]


@dataclass(frozen=True)
class SourceDiff:
    """Changes of an agent's files."""

    text: str  # the unified diff, with paths relative to `folder`; empty without a change
    folder: Path  # the folder of the agent
    notes: Sequence[str] = ()  # what the diff does not contain, and why


@dataclass(frozen=True)
class _String:
    """A string in a file: where it is, its parts, and how the source of other parts is written."""

    start: int
    end: int
    parts: Parts
    write: Callable[[Parts], str]


@dataclass
class _File:
    """A source file, the strings in it, and the new texts of some of them."""

    name: str
    text: str
    strings: Sequence[_String]
    changes: dict[tuple[int, int], str] = field(default_factory=dict)

    def changed(self) -> str:
        """Return the text with the changes."""
        text = self.text
        for (start, end), new in sorted(self.changes.items(), reverse=True):
            text = text[:start] + new + text[end:]
        return text


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
    for folder in dict.fromkeys(agent.program.folder for agent in agents):
        files: list[_File] | None = None
        notes: list[str] = []
        for prompt in (p for a in agents if a.program.folder == folder for p in a.prompts):
            for setting, template, new in _changes(prompt, system):
                files = _files(folder) if files is None else files
                note = _change(files, template, new)
                notes += [f"{prompt.name}.{setting}: {note}"] if note else []
            notes += _other_settings(prompt, system)
        parts: list[str] = []
        for file in files or ():
            try:
                parts.append(_unified(file))
            except SyntaxError:  # what is written must at least be Python
                notes.append(f"{file.name} cannot be changed: the result would be no Python")
        if any(parts) or notes:
            diffs.append(SourceDiff("".join(parts), folder, tuple(notes)))
    return diffs


def _changes(prompt: AgentPrompt, system: System) -> Iterator[tuple[str, PromptTemplate, str]]:
    """Yield the settings of a prompt whose text differs from what the agent sends."""
    for role, template in prompt.templates.items():
        setting = "system" if role == "system" else "prompt"
        text = system.configuration.get(f"{prompt.name}.{setting}", getattr(prompt, setting))
        if isinstance(text, str) and text != template.text:
            shown = dict.fromkeys(template.names)
            filled = fill(text, {name: f"{{{{{name}}}}}" for name in shown})
            yield setting, template, filled


def _other_settings(prompt: AgentPrompt, system: System) -> Iterator[str]:
    for setting in ("lm", "temperature", "max_tokens", "weights"):
        key = f"{prompt.name}.{setting}"
        if key in system.parameters:
            yield f"{key} = {system.configuration[key]!r:.200}: pass it to the request yourself"


def _change(files: Sequence[_File], template: PromptTemplate, new: str) -> str:
    """Put a text in place of the strings that have another one; return what a reader must know."""
    found = [
        ((size, len(each.parts)), file, each, values)
        for file in files
        for each in file.strings
        for size, values in [_match(each.parts, template)]
        if size
    ]
    most = max((rank for rank, *_ in found), default=None)
    best = [(file, each, values) for rank, file, each, values in found if rank == most]
    if not best:
        return "no string in the agent's files has the original text"
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
    lost = [code for kind, code in each.parts if kind == "code" and (kind, code) not in parts]
    return f"the new text does not use {', '.join(lost)}, the same in all runs" if lost else ""


def _match(parts: Parts, template: PromptTemplate) -> tuple[int, dict[str, Parts]]:
    """Return how many constant characters a string has in common with a template, 0 if it does not match.

    Also returns what stands in the string at each placeholder of the template.
    """
    own = len("".join(text for kind, text in parts if kind == "text").strip())
    if own < LEAST_SHARE * len("".join(template.constants).strip()) or not own:
        return 0, {}
    codes = [code for kind, code in parts if kind == "code"]
    if len(codes) > MAX_EXPRESSIONS:
        return 0, {}
    if not codes:  # placeholders stand for constants of the string
        found = template.match(parts[0][1])
        size = 0 if found is None else len("".join(template.constants).strip())
        return size, {name: (("text", value),) for name, value in (found or {}).items()}
    pattern = "".join(re.escape(t) if kind == "text" else "(.*?)" for kind, t in parts)
    matched = re.fullmatch(pattern, template.text, re.DOTALL)
    if matched is None:
        return 0, {}
    values: dict[str, Parts] = {}
    for code, text in zip(codes, matched.groups(), strict=True):
        names = PLACEHOLDER.findall(text)
        if len(names) == 1 and PLACEHOLDER.fullmatch(text.strip()):
            values[names[0]] = (("code", code),)
        elif names:  # an expression stands for more than one placeholder
            return 0, {}
    return (own, values) if set(template.names) <= set(values) else (0, {})


def _filled(text: str, values: Mapping[str, Parts]) -> list[Part]:
    """Return the parts of a tuned text: the source's expressions in place of the placeholders."""
    parts: list[Part] = []
    for number, piece in enumerate(PLACEHOLDER.split(text)):
        parts += (
            values.get(piece, [("text", f"{{{{{piece}}}}}")]) if number % 2 else [("text", piece)]
        )
    return _merged(parts)


def _merged(parts: Parts) -> list[Part]:
    """Return parts without empty ones, and with neighbouring texts as one."""
    merged: list[Part] = []
    for kind, piece in parts:
        if kind == "text" and merged and merged[-1][0] == "text":
            merged[-1] = ("text", merged[-1][1] + piece)
        elif piece:
            merged.append((kind, piece))
    return merged


# --- files -----------------------------------------------------------------------------------------


def _files(folder: Path) -> list[_File]:
    """Read the Python and text files of a folder and of the folders in it, without following links."""
    found: list[_File] = []
    source = UntrustedFolder(folder, error=DataError)
    for path in itertools.islice(_paths(folder), MAX_FILES):
        name = path.relative_to(folder).as_posix()
        try:
            text = source.read(name).decode()
            read = _python_strings if path.suffix == ".py" else _whole_file
            strings = list(read(text))
        except (DataError, UnicodeError, SyntaxError, ValueError, RecursionError):
            continue  # not a file that an agent reads
        found.append(_File(name, text, strings))
    return found


def _paths(folder: Path) -> Iterator[Path]:
    for place, folders, names in itertools.islice(os.walk(folder), MAX_FOLDERS):
        folders[:] = sorted(each for each in folders if each not in SKIPPED and each[0] != ".")
        for path in (Path(place, name) for name in sorted(names)):
            if path.suffix in (".py", *TEXT_FILES):
                with contextlib.suppress(OSError):  # it may be deleted meanwhile
                    status = path.lstat()
                    if stat.S_ISREG(status.st_mode) and status.st_size <= MAX_BYTES:
                        yield path


def _unified(file: _File) -> str:
    new = file.changed()
    if file.name.endswith(".py"):
        ast.parse(new.removeprefix("\ufeff"))
    # only "\n" ends a line for `patch`, unlike for `str.splitlines`
    old_lines, new_lines = (re.findall(r"[^\n]*\n|[^\n]+", text) for text in (file.text, new))
    lines = difflib.unified_diff(old_lines, new_lines, f"a/{file.name}", f"b/{file.name}")
    end = "\n\\ No newline at end of file\n"
    return "".join(line if line.endswith("\n") else line + end for line in lines)


def _whole_file(text: str) -> Iterator[_String]:
    """Yield a text file as one string, in each of the forms of templates."""
    body = text.strip()
    start = text.find(body)
    for parts, write in _forms(body):
        yield _String(start, start + len(body), parts, write)


# --- strings in Python -----------------------------------------------------------------------------


def _python_strings(text: str) -> Iterator[_String]:
    """Yield the strings of a Python file; a constant in each of the forms that it may be used in."""
    code = text.removeprefix("\ufeff")
    lines = re.findall(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+", code)
    starts = list(itertools.accumulate(map(len, lines), initial=len(text) - len(code)))

    def at(line: int, column: int) -> int:
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    for node in _outermost(ast.parse(code)):
        start = at(node.lineno, node.col_offset)
        end = at(node.end_lineno or 0, node.end_col_offset or 0)
        line = lines[node.lineno - 1]
        indent = line[: len(line) - len(line.lstrip())]
        is_block = text[start:end].lstrip("rRuUbBfF").startswith(BLOCKS)
        style = _Style(is_block, indent, "\r\n" if "\r\n" in text else "\n")
        for parts, indented in _indentations(_parts(node)):
            if not isinstance(node, ast.Constant):
                yield _String(start, end, parts, _writer(style, indented))
                continue
            for read, form in _forms("".join(piece for _, piece in parts)):
                yield _String(start, end, read, _writer(style, indented, form))


def _writer(
    style: _Style,
    indented: Callable[[Parts], Parts],
    form: Callable[[Parts], str] | None = None,
) -> Callable[[Parts], str]:
    return lambda parts: style.write(indented([("text", form(parts))] if form else parts))


def _outermost(tree: ast.AST) -> Iterator[ast.expr]:
    """Yield strings, and sums that contain one, but not the strings in them, and no docstrings."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.Expr) and _is_text(child.value):  # a docstring, or a comment
            continue
        if isinstance(child, ast.expr) and any(map(_is_text, _terms(child))):
            yield child
        else:
            yield from _outermost(child)


def _terms(node: ast.expr) -> list[ast.expr]:
    """Return the terms of a sum, or the expression itself."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return [*_terms(node.left), *_terms(node.right)]
    return [node]


def _is_text(node: ast.expr) -> bool:
    is_constant = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return is_constant or isinstance(node, ast.JoinedStr)


def _parts(node: ast.expr) -> list[Part]:
    """Return the parts of a constant, an f-string or a sum."""
    parts: list[Part] = []
    for term in _terms(node):
        for value in term.values if isinstance(term, ast.JoinedStr) else [term]:
            if isinstance(value, ast.Constant):
                parts.append(("text", str(value.value)))
            elif isinstance(value, ast.FormattedValue):
                source = ast.unparse(ast.JoinedStr([value]))  # f'{value}'
                parts.append(("code", source[source.index("{") : source.rindex("}") + 1]))
            else:
                parts.append(("code", f"{{{ast.unparse(value)}}}"))
    return _merged(parts)


def _indentations(parts: Parts) -> Iterator[tuple[Parts, Callable[[Parts], Parts]]]:
    """Yield parts as they are, and without the indentation and ends that programs often remove.

    With each, a function that restores what was removed.
    """
    yield parts, lambda new: new
    whole = "".join(piece if kind == "text" else MARK for kind, piece in parts)
    body = textwrap.dedent(whole).strip()
    if body == whole or not body:
        return
    codes = iter([part for part in parts if part[0] == "code"])
    pieces = re.split(f"({MARK})", body)
    lead = whole[: len(whole) - len(whole.lstrip())]
    tail = whole[len(whole.rstrip()) :]
    second = re.search(r"\n([ \t]*)\S", whole.strip())
    indent = second[1] if second else lead.rpartition("\n")[2]

    def indented(new: Parts) -> Parts:
        inside = [
            (k, re.sub(r"\n(?=[^\n])", f"\n{indent}", t) if k == "text" else t) for k, t in new
        ]
        return _merged([("text", lead), *inside, ("text", tail)])

    yield _merged([next(codes) if each == MARK else ("text", each) for each in pieces]), indented


@dataclass(frozen=True)
class _Style:
    """How a string is written: whether in triple quotes, the indentation of its line, the line ends."""

    is_block: bool
    indent: str
    newline: str

    def write(self, parts: Parts) -> str:
        """Write parts as an f-string, or as a constant if all of them are texts.

        Raises:
            ValueError: an expression cannot be in an f-string.
        """
        codes = [piece for kind, piece in parts if kind == "code"]
        if wrong := next((code for code in codes if re.search(r'["\\\n]', code)), None):
            raise ValueError(f"an f-string cannot contain {wrong}")
        prefix = "f" if codes else ""
        if codes:
            double = str.maketrans({"{": "{{", "}": "}}"})
            parts = [(kind, t.translate(double) if kind == "text" else t) for kind, t in parts]
        whole = "".join(piece for _, piece in parts)
        if self.is_block and "\n" in whole:
            body = "".join(_escaped(t, block=True) if kind == "text" else t for kind, t in parts)
            return f'{prefix}"""{body}"""'.replace("\n", self.newline)
        if not codes and '"' in whole and "'" not in whole and "\n" not in whole:
            line = _escaped(whole).replace('\\"', '"')
            if len(line) + len(self.indent) <= WIDTH - 10:
                return f"'{line}'"
        line = "".join(_escaped(t) if kind == "text" else t for kind, t in parts)
        if len(line) + len(self.indent) <= WIDTH - 10 and "\n" not in whole.rstrip("\n"):
            return f'{prefix}"{line}"'
        inner = f"{self.indent}    "
        rows = [f'{inner}{prefix}"{row}"' for row in _rows(parts, WIDTH - len(inner) - 3)]
        return self.newline.join(["(", *rows, f"{self.indent})"])


def _rows(parts: Parts, width: int) -> list[str]:
    """Divide parts into escaped rows, after line breaks and between words."""
    rows = [""]
    for kind, piece in parts:
        words = [piece] if kind == "code" else re.findall(r"\S*(?:\n|[^\S\n]+|\Z)", piece)
        for word in words if kind == "code" else map(_escaped, words):
            if rows[-1] and (rows[-1].endswith("\\n") or len(rows[-1]) + len(word) > width):
                rows.append("")
            rows[-1] += word
    return [row for row in rows if row]


def _escaped(text: str, *, block: bool = False) -> str:
    r"""Return a text as it stands between double quotes, or in a block between three.

    >>> print(_escaped('"é"\n\\'))
    \"é\"\n\\
    """
    keep = "\n" if block else ""
    found = "".join(
        f"\\{c}" if c in '"\\' else c if c.isprintable() or c in keep else ascii(c)[1:-1]
        for c in text
    )
    # in a block, a quote needs an escape only where three of them, or the end, would close it
    return re.sub(r'(?<!\\)\\"(?!\\"|\Z)', '"', found) if block else found


# --- forms of templates ------------------------------------------------------------------------------

FORMS = (
    (r"\{\{|\}\}|\{[^{}]*\}", "{}", r"\{[!:].*|\{\}"),  # str.format
    (r"%(?:\(\w+\))?[-#0 +]*\d*(?:\.\d+)?[a-zA-Z]|%%", "%", r"%[^(].*"),  # the operator %
    (r"\$\$|\$\{\w+\}|\$[A-Za-z_]\w*", "$", r"(?!)"),  # string.Template
    (r"(?s:\{\{.*?\}\}|\{%.*?%\})", "", r"(?!)"),  # Jinja
)
"""The forms of templates that programs use.

Each has a pattern of its expressions, the characters that are doubled to stand for themselves, and a
pattern of the expressions whose order matters.
"""


def _forms(text: str) -> Iterator[tuple[Parts, Callable[[Parts], str]]]:
    """Yield the parts of a text as it is, and in each form of which it has an expression.

    With each, a function that writes other parts in this form. It raises `ValueError` if expressions
    without names are not used exactly as before.
    """
    yield [("text", text)], lambda parts: "".join(piece for _, piece in parts)
    for code, doubled, unnamed in FORMS:
        pairs = [2 * each for each in doubled]
        parts = [
            ("code", piece) if number % 2 and piece not in pairs else ("text", piece)
            for number, piece in enumerate(re.split(f"({code})", text))
        ]
        before = [piece for kind, piece in parts if kind == "code"]
        if not before:
            continue
        read = [(kind, piece[0] if piece in pairs else piece) for kind, piece in parts]

        def write(
            parts: Parts, before: list[str] = before, unnamed: str = unnamed, doubled: str = doubled
        ) -> str:
            codes = [code for kind, code in parts if kind == "code"]
            if codes != before and any(re.fullmatch(unnamed, code) for code in before):
                raise ValueError("its placeholders have no names, and are used in another way")
            double = str.maketrans({each: 2 * each for each in doubled})
            return "".join(t if kind == "code" else t.translate(double) for kind, t in parts)

        yield _merged(read), write
