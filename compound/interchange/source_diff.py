"""The tuned texts of external agents as a unified diff of the files that contain the original ones.

A text of a request comes from a string in the agent's Python files, or from a text, YAML or JSON
file beside them. A string is found by its constant parts: those of an f-string, of a text for
``str.format``, ``%``, ``string.Template`` or Jinja, of a sum, or of a list that is joined. The
expressions between them take the places of the placeholders in the tuned text; the value of one
that names a constant is known. Files are read and parsed, and neither imported nor changed.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import io
import itertools
import json
import os
import re
import stat
import textwrap
import tokenize
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from compound.components.agent_prompt import AgentPrompt
from compound.components.external_agent import ExternalAgent
from compound.components.gateway.templates import PLACEHOLDER, PromptTemplate, fill
from compound.core.errors import DataError
from compound.core.security.untrusted import UntrustedFolder
from compound.graph.system import System

MAX_FOLDERS, MAX_FILES, MAX_BYTES = 1000, 500, 2**20  # that are read, and bytes of a file
DATA_FILES, MAX_DATA_BYTES = (".yaml", ".yml", ".json"), 2**17
TEXT_FILES = (".txt", ".md", ".prompt", ".j2", ".jinja", ".jinja2", ".tmpl", ".tpl")
SKIPPED = ("node_modules", "site-packages", "__pycache__", "venv", "runs")
MAX_EXPRESSIONS = 30  # of a string
LEAST_SHARE = 0.5  # of the constant characters of a text that a string must have
WIDTH = 88  # columns of a line that is written
BLOCKS = ('"""', "'''")
UNREADABLE = (DataError, UnicodeError, SyntaxError, ValueError, RecursionError, yaml.YAMLError)
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
    known: Mapping[str, str] = field(default_factory=dict)  # values of expressions in `parts`


@dataclass
class _File:
    """A source file, the strings in it, and the new texts of some of them."""

    name: str
    text: str
    encoding: str
    strings: Sequence[_String] = ()
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
    for folder in dict.fromkeys(agent.folder for agent in agents):
        files: list[_File] | None = None
        notes: list[str] = []
        prompts = [p for a in agents if a.folder == folder for p in a.prompts]
        texts = [(p.name, *text) for p in prompts for text in _texts(p, system)]
        # those that keep their text come last: they show what a change of a string concerns besides
        for name, setting, template, new in sorted(texts, key=lambda each: each[2].text == each[3]):
            is_changed = template.text != new
            if is_changed or files is not None:
                files = _files(folder) if files is None else files
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
    files: Sequence[_File], template: PromptTemplate
) -> list[tuple[_File, _String, dict[str, Parts]]]:
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


def _sharing(files: Sequence[_File], template: PromptTemplate) -> str:
    """Return what a reader must know of a prompt that keeps its text, if its string is changed."""
    for file, each, _ in _origins(files, template):
        if (each.start, each.end) in file.changes:
            return f"it keeps its text, but the diff changes the string in {file.name}, its origin"
    return ""


def _change(files: Sequence[_File], template: PromptTemplate, new: str) -> str:
    """Put a text in place of the strings that have another one; return what a reader must know."""
    best = _origins(files, template)
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
    lost = [
        code
        for kind, code in each.parts
        if kind == "code" and code not in each.known and (kind, code) not in parts
    ]
    return f"the new text does not use {', '.join(lost)}, the same in all runs" if lost else ""


def _match(string: _String, template: PromptTemplate) -> tuple[int, int, dict[str, Parts]]:
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
    pattern = "".join(
        re.escape(text)
        if kind == "text"
        else f"({re.escape(known[text])})"
        if text in known
        else "(.*?)"
        for kind, text in parts
    )
    matched = re.fullmatch(pattern, template.text, re.DOTALL)
    if matched is None:
        return 0, 0, {}
    values: dict[str, Parts] = {}
    for code, text in zip(codes, matched.groups(), strict=True):
        names = PLACEHOLDER.findall(text)
        if len(names) == 1 and PLACEHOLDER.fullmatch(text.strip()):
            values[names[0]] = (("code", code),)
        elif names:  # an expression stands for more than one placeholder
            return 0, 0, {}
    return (own + named, own, values) if set(template.names) <= set(values) else (0, 0, {})


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
    """Read the source and text files of a folder and of the folders in it, without following links."""
    found: list[_File] = []
    trees: dict[str, ast.Module] = {}
    source = UntrustedFolder(folder, error=DataError)
    for path in itertools.islice(_paths(folder), MAX_FILES):
        name = path.relative_to(folder).as_posix()
        with contextlib.suppress(*UNREADABLE):
            content = source.read(name)
            encoding = "utf-8"
            if path.suffix == ".py":  # a comment may name its encoding
                encoding = tokenize.detect_encoding(io.BytesIO(content).readline)[0]
                encoding = "utf-8" if encoding == "utf-8-sig" else encoding
            try:
                text = content.decode(encoding)
            except UnicodeDecodeError:
                encoding = "cp1252"
                text = content.decode(encoding)
            file = _File(name, text, encoding)
            if path.suffix == ".py":
                trees[name] = ast.parse(file.text.removeprefix("\ufeff"))
            found.append(file)
    constants = _constants(trees.values())
    for file in found:
        with contextlib.suppress(*UNREADABLE):
            if file.name in trees:
                file.strings = list(_python_strings(file.text, trees[file.name], constants))
            else:
                read = _scalars if file.name.endswith(DATA_FILES) else _whole_file
                file.strings = list(read(file.text))
    return found


def _paths(folder: Path) -> Iterator[Path]:
    for place, folders, names in itertools.islice(os.walk(folder), MAX_FOLDERS):
        folders[:] = sorted(each for each in folders if each not in SKIPPED and each[0] != ".")
        for path in (Path(place, name) for name in sorted(names)):
            if path.suffix in (".py", *TEXT_FILES, *DATA_FILES):
                most = MAX_DATA_BYTES if path.suffix in DATA_FILES else MAX_BYTES
                with contextlib.suppress(OSError):  # it may be deleted meanwhile
                    status = path.lstat()
                    if stat.S_ISREG(status.st_mode) and status.st_size <= most:
                        yield path


def _unified(file: _File) -> str:
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


def _whole_file(text: str) -> Iterator[_String]:
    """Yield a text file as one string, as it is and without its ends, in each form of templates."""
    newline = "\r\n" if "\r\n" in text else "\n"
    plain = text.removeprefix("\ufeff")
    for body in dict.fromkeys((plain, plain.strip())):
        start = text.find(body)
        for parts, write in _forms(body.replace(newline, "\n")) if body else ():
            yield _String(start, start + len(body), parts, _with_newlines(write, newline))


def _with_newlines(write: Callable[[Parts], str], newline: str) -> Callable[[Parts], str]:
    return lambda parts: write(parts).replace("\n", newline)


def _scalars(text: str) -> Iterator[_String]:
    """Yield the texts in a YAML or JSON file, except those that a file of this package tunes."""
    newline = "\r\n" if "\r\n" in text else "\n"
    # JSON, unlike YAML, may be indented by tabs
    source = text.replace("\t", " ") if text.lstrip("\ufeff \r\n\t")[:1] in ("{", "[") else text
    for root in yaml.compose_all(source, Loader=yaml.SafeLoader):
        waiting, seen = [root], set[int]()
        while waiting:
            node = waiting.pop()
            if id(node) in seen:
                continue
            seen.add(id(node))
            if isinstance(node, yaml.MappingNode):
                entries = {key.value: value for key, value in node.value if _is_scalar(key)}
                own = {"system", "components"} <= entries.keys() and node is root
                waiting += [] if own or "tune" in entries else entries.values()
            elif isinstance(node, yaml.SequenceNode):
                waiting += node.value
            elif node is not None and node.tag.endswith(":str"):
                start, end = node.start_mark.index, node.end_mark.index
                style = _ScalarStyle(text[start:end], newline)
                for remove in (str, str.strip):
                    body = remove(node.value)
                    for parts, write in (
                        _forms(body) if body and (remove is str or body != node.value) else ()
                    ):
                        yield _String(start, end, parts, style.writer(write, node.value, body))


def _is_scalar(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode)


@dataclass(frozen=True)
class _ScalarStyle:
    """The form of a text in a YAML or JSON file: its source, and the line ends."""

    source: str
    newline: str

    def writer(self, write: Callable[[Parts], str], old: str, body: str) -> Callable[[Parts], str]:
        """Return a function that writes parts in place of `body`, a part of the old value."""
        lead, _, tail = old.partition(body)
        return lambda parts: self._write(lead + write(parts) + tail)

    def _write(self, value: str) -> str:
        lines = value.rstrip("\n").split("\n")
        is_plain = all(line.isprintable() for line in lines) and not lines[0].startswith(" ")
        if self.source[:1] not in ("|", ">") or not lines[0] or not is_plain:
            # JSON escapes a character beyond four digits as two, which YAML does not join
            quoted = "".join(
                each if each.isprintable() or ord(each) > 0xFFFF else f"\\u{ord(each):04x}"
                for each in json.dumps(value, ensure_ascii=False)
            )
            return quoted + self.newline if self.source.endswith("\n") else quoted
        ends = len(value) - len(value.rstrip("\n"))
        header = "|" + ("-" if ends == 0 else "" if ends == 1 else "+")
        content = next(line for line in self.source.splitlines()[1:] if line.strip())
        indent = content[: len(content) - len(content.lstrip(" "))]
        rows = [header, *(f"{indent}{line}" if line else "" for line in lines), *[""] * (ends - 1)]
        return "".join(f"{row}{self.newline}" for row in rows)


# --- strings in Python -----------------------------------------------------------------------------


def _constants(trees: Iterable[ast.Module]) -> dict[str, str]:
    """Return the texts of names that some files assign once, and that are no parameters."""
    found: dict[str, str] = {}
    nodes = [node for tree in trees for node in ast.walk(tree)]
    counts = Counter(
        node.arg if isinstance(node, ast.arg) else node.id
        for node in nodes
        if isinstance(node, ast.arg)
        or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    )
    for node in nodes:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if len(targets) == 1 and isinstance(targets[0], ast.Name) and counts[targets[0].id] == 1:
            assert isinstance(node, ast.Assign)
            terms = _terms(node.value)
            parts = _parts(node.value) if len(terms) > 1 or _is_text(terms[0]) else []
            texts = [text if kind == "text" else found.get(text[1:-1]) for kind, text in parts]
            if parts and None not in texts:
                found[targets[0].id] = "".join(filter(None, texts))
    return found


def _python_strings(text: str, tree: ast.Module, constants: Mapping[str, str]) -> Iterator[_String]:
    """Yield the strings of a Python file; a constant in each of the forms that it may be used in."""
    code = text.removeprefix("\ufeff")
    lines = re.findall(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+", code)
    starts = list(itertools.accumulate(map(len, lines), initial=len(text) - len(code)))

    def at(line: int, column: int) -> int:
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    for node in _outermost(tree, constants):
        start = at(node.lineno, node.col_offset)
        end = at(node.end_lineno or 0, node.end_col_offset or 0)
        style = _Style.of(text, start, end)
        own = _parts(node)
        known = _known(own, constants)
        for parts, restored in _removals(own):
            if not isinstance(node, ast.Constant):
                for values in (known, {}) if known else ({},):  # another variable may have the name
                    yield _String(start, end, parts, _writer(style, restored), values)
                continue
            for read, form in _forms("".join(piece for _, piece in parts)):
                yield _String(start, end, read, _writer(style, restored, form))


def _writer(
    style: _Style,
    restored: Callable[[Parts], Parts],
    form: Callable[[Parts], str] | None = None,
) -> Callable[[Parts], str]:
    return lambda parts: style.write(restored([("text", form(parts))] if form else parts))


def _outermost(tree: ast.AST, constants: Mapping[str, str]) -> Iterator[ast.expr]:
    """Yield strings, and sums that contain one, but not the strings in them, and no docstrings."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.Expr) and _is_text(child.value):  # a docstring, or a comment
            continue
        terms = _terms(child) if isinstance(child, ast.expr) else []
        names = terms if len(terms) > 1 else []
        codes = [("code", f"{{{ast.unparse(term)}}}") for term in names]
        if isinstance(child, ast.expr) and (any(map(_is_text, terms)) or _known(codes, constants)):
            yield child
        else:
            yield from _outermost(child, constants)


def _known(parts: Parts, constants: Mapping[str, str]) -> dict[str, str]:
    """Return the values of expressions that name a constant."""
    codes = [code for kind, code in parts if kind == "code"]
    names = {code: code[1:-1].rpartition(".")[2] for code in codes}
    return {code: constants[name] for code, name in names.items() if name in constants}


def _terms(node: ast.expr) -> list[ast.expr]:
    """Return the terms of a sum or of a list that a constant joins, or the expression itself."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return [*_terms(node.left), *_terms(node.right)]
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "join"
        and isinstance(node.func.value, ast.Constant)
        and len(node.args) == 1
        and isinstance(node.args[0], ast.List | ast.Tuple)
        and not any(isinstance(each, ast.Starred) for each in node.args[0].elts)
    ):
        joined = [[*_terms(each), node.func.value] for each in node.args[0].elts]
        return list(itertools.chain(*joined))[:-1]
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


def _removals(parts: Parts) -> Iterator[tuple[Parts, Callable[[Parts], Parts]]]:
    """Yield parts as they are, and without the indentation and ends that programs often remove.

    With each, a function that restores what was removed. It raises `ValueError` for parts of which
    more would be removed.
    """
    codes = [part for part in parts if part[0] == "code"]
    whole = "".join(piece if kind == "text" else MARK for kind, piece in parts)
    lead, tail = whole[: len(whole) - len(whole.lstrip())], whole[len(whole.rstrip()) :]
    second = re.search(r"\n([ \t]*)\S", whole.strip())
    indent = second[1] if second else lead.rpartition("\n")[2]
    seen = set[str]()
    for remove in (str, textwrap.dedent, str.strip, lambda text: textwrap.dedent(text).strip()):
        body = remove(whole)
        if body and body not in seen:
            seen.add(body)
            ways = list(
                itertools.product(
                    (lead, indent, ""), (indent, ""), (tail, tail.rpartition("\n")[2], "")
                )
            )
            yield _divided(body, codes), _restorer(remove, ways)


def _restorer(
    remove: Callable[[str], str], ways: Sequence[tuple[str, str, str]]
) -> Callable[[Parts], Parts]:
    def restored(new: Parts) -> Parts:
        codes = [part for part in new if part[0] == "code"]
        whole = "".join(piece if kind == "text" else MARK for kind, piece in new)
        for lead, indent, tail in ways:
            rows = whole.split("\n")
            later = [f"{indent}{row}" if row else "" for row in rows[1:]]
            found = lead + "\n".join([rows[0], *later]) + tail
            if remove(found) == whole:
                return _divided(found, codes)
        raise ValueError("the program removes spaces or line breaks of it")

    return restored


def _divided(whole: str, codes: Sequence[Part]) -> list[Part]:
    """Return a text with marks as parts, with expressions in place of the marks."""
    rest = iter(codes)
    pieces = re.split(f"({MARK})", whole)
    return _merged([next(rest) if each == MARK else ("text", each) for each in pieces])


@dataclass(frozen=True)
class _Style:
    """The form in which a string is written.

    Attributes:
        is_block: whether in triple quotes.
        is_apart: whether its text begins in the line after the quotes.
        is_enclosed: whether brackets around it allow rows.
        indent: the indentation of its line.
        is_first: whether nothing else is before it in its line.
        newline: the line ends.
    """

    is_block: bool
    is_apart: bool
    is_enclosed: bool
    indent: str
    is_first: bool
    newline: str

    @classmethod
    def of(cls, text: str, start: int, end: int) -> _Style:
        """Return the style of the string between two places of a source."""
        line = re.split("[\r\n]", text[:start])[-1]
        body = text[start:end].lstrip("rRuUbBfF")
        return cls(
            body.startswith(BLOCKS),
            re.match(r"\\?\r?\n", body[3:]) is not None,
            text[:start].rstrip()[-1:] == "(" and text[end:].lstrip()[:1] == ")",
            line[: len(line) - len(line.lstrip())] if line.strip() else line,
            not line.strip(),
            "\r\n" if "\r\n" in text else "\n",
        )

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
            first = "\\\n" if self.is_apart and body[0] != "\n" else ""
            return f'{prefix}"""{first}{body}"""'.replace("\n", self.newline)
        if not codes and '"' in whole and "'" not in whole and "\n" not in whole:
            line = _escaped(whole).replace('\\"', '"')
            if len(line) + len(self.indent) <= WIDTH - 10:
                return f"'{line}'"
        line = "".join(_escaped(t) if kind == "text" else t for kind, t in parts)
        if len(line) + len(self.indent) <= WIDTH - 10 and "\n" not in whole.rstrip("\n"):
            return f'{prefix}"{line}"'
        inner = self.indent if self.is_enclosed and self.is_first else f"{self.indent}    "
        rows = [
            f'{inner}{prefix if "{" in row or "}" in row else ""}"{row}"'
            for row in _rows(parts, WIDTH - len(inner) - 3)
        ]
        if self.is_enclosed:
            return self.newline.join(rows).lstrip()
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
