"""The strings in source, text, YAML and JSON files, and how another text is written in place of one.

A string is found by its constant parts: those of an f-string, of a text for ``str.format``, ``%``,
``string.Template`` or Jinja, of a sum, or of a list that is joined. The expressions between them
are its other parts; the value of one that names a constant is known. Files are read and parsed,
and neither imported nor changed.
"""

from __future__ import annotations

import ast
import contextlib
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

from compound.core.errors import DataError
from compound.core.security.untrusted import UntrustedFolder

MAX_FOLDERS, MAX_FILES, MAX_BYTES = 1000, 500, 2**20  # that are read, and bytes of a file
MAX_PARSED = 2**21  # bytes of data files in all: parsing takes seconds for each million
DATA_FILES, MAX_DATA_BYTES = (".yaml", ".yml", ".json"), 2**17
TEXT_FILES = (".txt", ".md", ".prompt", ".j2", ".jinja", ".jinja2", ".tmpl", ".tpl")
SKIPPED = ("node_modules", "site-packages", "__pycache__", "venv", "runs")
UNREADABLE = (DataError, UnicodeError, SyntaxError, ValueError, RecursionError, yaml.YAMLError)
MARK = "\ue000"  # stands for an expression while a text is measured
Part = tuple[str, str]  # "text" or "code", and the constant text or the source of the expression
Parts = Sequence[Part]


@dataclass(frozen=True)
class SourceString:
    """A string in a file: where it is, its parts, and how the source of other parts is written."""

    start: int
    end: int
    parts: Parts
    write: Callable[[Parts], str]
    known: Mapping[str, str] = field(default_factory=dict)  # values of expressions in `parts`


@dataclass
class SourceFile:
    """A source file, the strings in it, and the new texts of some of them."""

    name: str
    text: str
    encoding: str
    strings: Sequence[SourceString] = ()
    changes: dict[tuple[int, int], str] = field(default_factory=dict)

    def changed(self) -> str:
        """Return the text with the changes."""
        text = self.text
        for (start, end), new in sorted(self.changes.items(), reverse=True):
            text = text[:start] + new + text[end:]
        return text


def merged(parts: Parts) -> list[Part]:
    """Return parts without empty ones, and with neighbouring texts as one."""
    merged: list[Part] = []
    for kind, piece in parts:
        if kind == "text" and merged and merged[-1][0] == "text":
            merged[-1] = ("text", merged[-1][1] + piece)
        elif piece:
            merged.append((kind, piece))
    return merged


# --- files -----------------------------------------------------------------------------------------


def read_files(folder: Path, may_hold: Callable[[str], bool]) -> list[SourceFile]:
    """Read the source and text files of a folder and of the folders in it, without following links.

    YAML and JSON files are parsed if their text ``may_hold`` a prompt, up to `MAX_PARSED` in all.
    """
    found: list[SourceFile] = []
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
            file = SourceFile(name, text, encoding)
            if path.suffix == ".py":
                trees[name] = ast.parse(file.text.removeprefix("\ufeff"))
            found.append(file)
    constants, parsed = _constants(trees.values()), 0
    for file in found:
        with contextlib.suppress(*UNREADABLE):
            if file.name in trees:
                file.strings = list(_python_strings(file.text, trees[file.name], constants))
            elif not file.name.endswith(DATA_FILES):
                file.strings = list(_whole_file(file.text))
            elif parsed <= MAX_PARSED and may_hold(file.text):
                parsed += len(file.text)
                file.strings = list(_scalars(file.text))
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


def _whole_file(text: str) -> Iterator[SourceString]:
    """Yield a text file as one string, as it is and without its ends, in each form of templates."""
    newline = "\r\n" if "\r\n" in text else "\n"
    plain = text.removeprefix("\ufeff")
    for body in dict.fromkeys((plain, plain.strip())):
        start = text.find(body)
        for parts, write in _forms(body.replace(newline, "\n")) if body else ():
            yield SourceString(start, start + len(body), parts, _with_newlines(write, newline))


def _with_newlines(write: Callable[[Parts], str], newline: str) -> Callable[[Parts], str]:
    return lambda parts: write(parts).replace("\n", newline)


def _scalars(text: str) -> Iterator[SourceString]:
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
                entries = {
                    key.value: value
                    for key, value in node.value
                    if isinstance(key, yaml.ScalarNode)
                }
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
                        yield SourceString(start, end, parts, style.writer(write, node.value, body))


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


def _python_strings(
    text: str, tree: ast.Module, constants: Mapping[str, str]
) -> Iterator[SourceString]:
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
                    yield SourceString(start, end, parts, _writer(style, restored), values)
                continue
            for read, form in _forms("".join(piece for _, piece in parts)):
                yield SourceString(start, end, read, _writer(style, restored, form))


def _writer(
    style: _Style,
    restored: Callable[[Parts], Parts],
    form: Callable[[Parts], str] | None = None,
) -> Callable[[Parts], str]:
    return lambda parts: style.write(restored([("text", form(parts))] if form else parts))


def _outermost(tree: ast.AST, constants: Mapping[str, str]) -> Iterator[ast.expr]:
    """Yield strings, and sums that contain one, but not the strings in them, and no docstrings."""
    fields = [value if isinstance(value, list) else [value] for _, value in ast.iter_fields(tree)]
    for child in itertools.chain.from_iterable(map(_joined, fields)):
        if isinstance(child, ast.Expr) and _is_text(child.value):  # a docstring, or a comment
            continue
        terms = _terms(child) if isinstance(child, ast.expr) else []
        names = terms if len(terms) > 1 else []
        codes = [("code", f"{{{ast.unparse(term)}}}") for term in names]
        if isinstance(child, ast.expr) and (any(map(_is_text, terms)) or _known(codes, constants)):
            yield child
        else:
            yield from _outermost(child, constants)


def _joined(nodes: Sequence[object]) -> Iterator[ast.AST]:
    """Yield nodes; an assignment and the texts that the next ones append to it by += as a sum."""
    whole: ast.expr | None = None
    target = ""
    for node, following in itertools.pairwise([*nodes, None]):
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            target, whole = ast.unparse(targets[-1]), node.value
        elif _appends(node, target) and whole is not None:
            assert isinstance(node, ast.AugAssign)
            first, whole = whole, ast.BinOp(whole, ast.Add(), node.value)
            ast.copy_location(whole, first)
            whole.end_lineno, whole.end_col_offset = node.end_lineno, node.end_col_offset
        else:
            target, whole = "", None
        if isinstance(node, ast.AST) and not _appends(following, target):
            yield whole if whole is not None and isinstance(node, ast.AugAssign) else node


def _appends(node: object, target: str) -> bool:
    return (
        isinstance(node, ast.AugAssign)
        and isinstance(node.op, ast.Add)
        and ast.unparse(node.target) == target
    )


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
    return merged(parts)


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
    return merged([next(rest) if each == MARK else ("text", each) for each in pieces])


@dataclass(frozen=True)
class _Style:
    """The form in which a string is written.

    Attributes:
        is_apart: whether its text begins in the line after its triple quotes.
        newline: the line ends.
    """

    is_apart: bool
    newline: str

    @classmethod
    def of(cls, text: str, start: int, end: int) -> _Style:
        """Return the style of the string between two places of a source."""
        body = text[start:end].lstrip("rRuUbBfF")
        is_apart = re.match(r"(?:\"{3}|'{3})\\?\r?\n", body) is not None
        return cls(is_apart, "\r\n" if "\r\n" in text else "\n")

    def write(self, parts: Parts) -> str:
        """Write parts as an f-string, or as a constant if all of them are texts; lines in triple quotes.

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
        block = "\n" in "".join(piece for _, piece in parts).rstrip("\n")
        body = "".join(_escaped(t, block=block) if kind == "text" else t for kind, t in parts)
        if not block:
            return f'{prefix}"{body}"'
        first = "\\\n" if self.is_apart and body[0] != "\n" else ""
        return f'{prefix}"""{first}{body}"""'.replace("\n", self.newline)


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

        yield merged(read), write
