"""Notes of prompts about the types of answers.

A note is part of a component's version if it is not determined by the spelling of the type.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from compound.components.answers.answer_types import (
    describe,
    is_plain,
    is_text,
    labels_of,
    limits_of,
    takes_any_text,
    without_annotation,
)
from compound.graph.configuration import canonical_json
from compound.graph.json_types import schema_of_annotation
from compound.graph.types import Port, format_type, identify_type

Layout = Literal["text", "fields", "json"]
WORDS: Mapping[object, str] = {int: "a whole number", float: "a number", bool: "yes or no"}
ITEMS: Mapping[object, str] = {int: " of whole numbers", float: " of numbers"}


def field_label(name: str) -> str:
    """Return a field's label in a prompt; the field ``output`` is labelled ``Answer``.

    >>> field_label("search_query"), field_label("output")
    ('Search query', 'Answer')
    """
    return "Answer" if name == "output" else name.replace("_", " ").capitalize()


def format_note(outputs: Mapping[str, Port], layout: Layout) -> str:
    """Return the part of a prompt about the form of the answer, or ``""`` if any text is valid."""
    if layout == "text":
        return type_note(outputs, layout)
    if layout == "json":
        shape = ", ".join(f'"{name}": {_spelled(port.type)}' for name, port in outputs.items())
        return f"Reply with one JSON object: {{{shape}}}"
    lines = "\n".join(
        f"{name}: <{_spelled(port.type, 'JSON: ')}>" for name, port in outputs.items()
    )
    return f"Reply in this format:\n{lines}"


def answer_note(outputs: Mapping[str, Port], layout: Layout) -> str:
    """Return the sentence about the type of a final answer, or ``""`` if any text is valid.

    >>> answer_note({"city": Port(str), "year": Port(int)}, "json")
    'The final answer must be one JSON object: {"city": str, "year": int}'
    """
    if layout != "json":
        return type_note(outputs, layout)
    return format_note(outputs, layout).replace("Reply with", "The final answer must be", 1)


def type_note(outputs: Mapping[str, Port], layout: Layout) -> str:
    """Return the prompt's sentence about the type of a single output, or ``""`` if any text is valid.

    The note is part of a component's version. A text output has no note, so its version does not
    change.

    >>> type_note({"verdict": Port(Literal["yes", "no"])}, "text")
    'The verdict must be one of: yes, no'
    """
    if layout != "text":
        return ""
    name, port = next(iter(outputs.items()))
    description = _describe_type(port.type)
    return f"The {field_label(name).lower()} must be {description}" if description else ""


def json_note(outputs: Mapping[str, Port], layout: Layout) -> str:
    """Return what the layouts of several fields show of the outputs' types besides their names, or ``""``.

    It is part of a component's version, because the name of a class does not determine its fields.
    """
    if layout == "text":
        return ""
    found = {name: describe(port.type) for name, port in outputs.items() if not is_plain(port.type)}
    plain = {name: port.type for name, port in outputs.items() if is_plain(port.type)}
    found |= {
        name: _spell(kind) for name, kind in plain.items() if _spell(kind) != identify_type(kind)
    }
    return canonical_json(found) if found else ""


def _describe_type(kind: object) -> str:
    """Describe a type in plain words; ``""`` if it accepts any text."""
    if takes_any_text(kind):
        return ""
    if not is_plain(kind):
        return f"JSON: {describe(kind) or format_type(kind)}"
    if labels_of(kind):
        return f"one of: {_choices(label_texts(kind))}"
    if is_text(kind):
        return f"text {limits_of(kind)}".rstrip() + "."
    if get_origin(kind) is Annotated:
        subject, colon, rest = (
            _describe_type(without_annotation(kind)).removesuffix(".").partition(":")
        )
        return f"{subject} {limits_of(kind)}".rstrip() + colon + rest + "."
    if kind in WORDS:
        return f"{WORDS[kind]}."
    if get_origin(kind) is list or kind is list:
        return _describe_list((get_args(kind) or (Any,))[0])
    return _describe_union(kind)


def _describe_list(item: object) -> str:
    if labels_of(item):
        return (
            f"a list of labels ({_choices(label_texts(item))}): one in each line, or a JSON array."
        )
    plain, limits = (
        without_annotation(item),
        limits_of(item) if get_origin(item) is Annotated else "",
    )
    of = (
        f" of texts {limits}"
        if is_text(item) and limits
        else ITEMS.get(plain, "") + f" {limits}".rstrip()
    )
    return f"a list{of}: {'one' if of else 'one item'} in each line, or a JSON array."


def _describe_union(kind: object) -> str:
    parts = get_args(kind)
    given = [part for part in parts if part is not type(None)]
    if len(given) < len(parts) and len(given) == 1:
        (inner,) = given
        if labels_of(inner):
            return f"one of: {_choices([*label_texts(inner), 'none'])}"
        if inner in WORDS or get_origin(inner) is Annotated:
            return f"{_describe_type(inner).removesuffix('.')} or none."
    if any(get_origin(part) is Annotated or _is_enum(part) for part in given):
        texts = [_describe_type(part).removesuffix(".") for part in given]
        return " or ".join([*texts, *["none"] * (len(given) < len(parts))]) + "."
    return f"JSON: {format_type(kind)}"


def label_texts(kind: object) -> list[str]:
    """Return the labels of a type as a prompt shows them.

    >>> label_texts(enum.Enum("Level", {"LOW": 1, "HIGH": 2}))
    ['1 (LOW)', '2 (HIGH)']
    """
    kind = without_annotation(kind)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return [m.value if isinstance(m.value, str) else f"{m.value} ({m.name})" for m in kind]
    return ["none" if label is None else str(label) for label in labels_of(kind)]


def _choices(texts: Sequence[str]) -> str:
    quoted = any("," in text or text != text.strip() or not text for text in texts)
    return ", ".join(map(canonical_json, texts) if quoted else texts)


def _spelled(kind: object, prefix: str = "") -> str:
    """Spell a plain type by its name, and any other by the form of its JSON after a prefix."""
    shape = "" if is_plain(kind) else describe(kind)
    return f"{prefix}{shape}" if shape else _spell(kind)


def _spell(kind: object) -> str:
    """Spell a plain type with its limits and labels.

    >>> from pydantic import Field
    >>> _spell(Annotated[int, Field(ge=0)] | None), _spell(enum.Enum("Level", {"LOW": 1, "HIGH": 2}))
    ('int (at least 0) | None', 'one of 1 (LOW), 2 (HIGH)')
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if _is_enum(kind):
        return f"one of {', '.join(label_texts(kind))}"
    if origin is Annotated and schema_of_annotation(kind) is None:
        return f"{_spell(arguments[0])} {limits_of(kind)}".rstrip()
    if origin is list:
        return f"list[{_spell_inner(arguments[0])}]"
    if origin in (Union, types.UnionType):
        return " | ".join(map(_spell_inner, arguments))
    return format_type(kind)


def _spell_inner(kind: object) -> str:
    """Spell a type inside another, where ``one of`` would absorb the text after it."""
    if _is_enum(kind):
        return f"Literal[{', '.join(map(repr, label_texts(kind)))}]"
    if get_origin(kind) is Literal:
        return f"Literal[{', '.join(map(repr, get_args(kind)))}]"
    return _spell(kind)


def _is_enum(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, enum.Enum)
