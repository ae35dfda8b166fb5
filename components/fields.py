"""Format values as a prompt, and parse a model's text into typed fields.

The prompt starts with the part that all calls of a component share (instruction, demonstrations) and ends
with the inputs, so that engines can reuse the shared prefix.
"""

from __future__ import annotations

import json
import math
import re
import textwrap
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from compound.components.answer_types import describe, is_plain, labels_of, ordered_json, without_annotation
from compound.errors import ParseError
from compound.evaluation.metrics.text import is_negated
from compound.graph.configuration import canonical_json, to_json_types
from compound.graph.json_values import SCALARS, json_form
from compound.graph.space import Demo
from compound.graph.types import Port, accepts, convert, format_type
from compound.image import Image

Layout = Literal["text", "fields", "json"]
TRUE, FALSE = {"yes", "true", "1"}, {"no", "false", "0"}
# The search for JSON in a text of n characters reads at most SCAN_FACTOR * n + SCAN_FLOOR characters.
SCAN_FACTOR, SCAN_FLOOR = 16, 100_000
# A sign directly after a word is a hyphen (GPT-4); commas count only between groups of three digits.
NUMBER = re.compile(
    r"(?:(?<!\w)[-+])?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d*)?|(?<!\w)\.\d+)(?:[eE][-+]?\d+)?"
)


def render(
    prompt: str,
    demos: Sequence[Demo],
    inputs: Mapping[str, object],
    outputs: Mapping[str, Port],
    layout: Layout,
) -> str:
    """Render the message for a model: instruction, output format, demonstrations, then the inputs.

    >>> print(render("Answer.", [{"inputs": {"question": "1+1"}, "outputs": {"output": "2"}}],
    ...              {"question": "2+2"}, {"output": Port(str)}, "text"))
    Answer.
    <BLANKLINE>
    Question: 1+1
    Answer: 2
    <BLANKLINE>
    Question: 2+2
    """
    head = [prompt.strip(), _format_note(outputs, layout)]
    blocks = [part for part in head if part]
    for demo in demos:
        shown = format_inputs(_ordered(demo["inputs"], inputs))
        written = _ordered(demo["outputs"], outputs)
        blocks.append(f"{shown}\n{format_outputs(written, layout, outputs)}")
    blocks.append(format_inputs(inputs))
    return "\n\n".join(blocks)


def answer_cue(outputs: Mapping[str, Port], layout: Layout) -> str:
    """Return the text that starts an answer: the field's label in layout ``text``, otherwise ``""``.

    An answer in JSON has no label.

    >>> answer_cue({"country": Port(str)}, "text"), answer_cue({"ages": Port(dict[str, int])}, "text")
    ('Country:', '')
    """
    name, port = next(iter(outputs.items()))
    return f"{field_label(name)}:" if layout == "text" and is_plain(port.type) else ""


def _ordered(values: Mapping[str, object], like: Iterable[str]) -> dict[str, object]:
    """Sort a demonstration's fields into the order of the call's fields; its file may use another order."""
    order = {name: i for i, name in enumerate(like)}
    names = sorted(values, key=lambda name: (order.get(name, len(order)), name))
    return {name: values[name] for name in names}


def field_label(name: str) -> str:
    """Return a field's label in a prompt; the field ``output`` is labelled ``Answer``.

    >>> field_label("search_query"), field_label("output")
    ('Search query', 'Answer')
    """
    return "Answer" if name == "output" else name.replace("_", " ").capitalize()


def format_inputs(inputs: Mapping[str, object]) -> str:
    """Format inputs as labelled text."""
    texts = {name: format_value(value) for name, value in inputs.items() if value is not None}
    return "\n".join(
        f"{field_label(name)}:" + (f"\n{text}" if "\n" in text else f" {text}")
        for name, text in texts.items()
    )


def take_images(inputs: Mapping[str, object]) -> tuple[dict[str, object], tuple[Image, ...]]:
    """Return inputs with a numbered mark in place of each image, and the images.

    >>> dot = Image.from_bytes(b"GIF89a-and-so-on")
    >>> take_images({"photo": dot, "others": [dot, dot], "question": "Which?"})[0]
    {'photo': '[image 1]', 'others': '[image 2] [image 3]', 'question': 'Which?'}
    """
    images: list[Image] = []

    def mark(image: Image) -> str:
        images.append(image)
        return f"[image {len(images)}]"

    shown: dict[str, object] = {}
    for name, value in inputs.items():
        if isinstance(value, Image):
            shown[name] = mark(value)
        elif isinstance(value, list | tuple) and value and all(isinstance(item, Image) for item in value):
            shown[name] = " ".join(map(mark, value))
        else:
            shown[name] = value
    return shown, tuple(images)


def format_value(value: object) -> str:
    """Format a value for a model: one passage per line, numbered texts, dates as text, all else as JSON.

    >>> format_value([{"title": "Peru", "text": "Lima is its capital.", "score": 2.0}])
    'Peru: Lima is its capital.'
    """
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, SCALARS):
        return str(json_form(value))
    if isinstance(value, Sequence) and value and all(isinstance(item, str) for item in value):
        return "\n".join(f"[{i}] {_text(item)}" for i, item in enumerate(value, 1))
    if isinstance(value, Sequence) and value and all(isinstance(v, Mapping) and "text" in v for v in value):
        return "\n".join(
            f"{item['title']}: {item['text']}" if item.get("title") else str(item["text"]) for item in value
        )
    return canonical_json(value)


def _text(value: str) -> str:
    """Return a text; that of a member of an Enum is its value, which formatting would replace by its name."""
    return str(value.value) if isinstance(value, Enum) else value


def format_outputs(
    outputs: Mapping[str, object], layout: Layout, ports: Mapping[str, Port] | None = None
) -> str:
    """Format outputs in the layout that the model is asked to use; ``ports`` have the declared types."""
    ports = ports or {}
    kinds = {name: ports[name].type for name in outputs if name in ports and not is_plain(ports[name].type)}
    if layout == "json" and not kinds:
        return canonical_json(dict(outputs))
    written = {
        name: ordered_json(kinds[name], to_json_types(value)) if name in kinds else canonical_json(value)
        for name, value in outputs.items()
    }
    if layout == "json":
        return f"{{{', '.join(f'{json.dumps(name)}: {text}' for name, text in written.items())}}}"
    if layout == "text":
        shown = {name: written[name] if name in kinds else _answer(value) for name, value in outputs.items()}
        return "\n".join(t if n in kinds else f"{field_label(n)}: {t}" for n, t in shown.items())
    plain = {
        name: _text(value) if isinstance(value, str) else written[name] for name, value in outputs.items()
    }
    return "\n".join(f"{name}: {text}" for name, text in plain.items())


def _answer(value: object) -> str:
    """Format a single output as its `type_note` requests."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return _text(value) if isinstance(value, str) else canonical_json(value)


def type_note(outputs: Mapping[str, Port], layout: Layout) -> str:
    """Return the prompt's sentence about the type of a single output, or ``""`` if any text is valid.

    The note is part of a component's version. A text output has no note, so its version does not change.

    >>> type_note({"verdict": Port(Literal["yes", "no"])}, "text")
    'The verdict must be one of: yes, no'
    """
    if layout != "text":
        return ""
    name, port = next(iter(outputs.items()))
    description = _describe_type(port.type)
    return f"The {field_label(name).lower()} must be {description}" if description else ""


def json_note(outputs: Mapping[str, Port], layout: Layout) -> str:
    """Return the descriptions of the outputs of structured types, or ``""`` if there are none.

    They are part of a component's version, because the name of a class does not determine its fields.
    """
    found = {name: describe(port.type) for name, port in outputs.items() if not is_plain(port.type)}
    return canonical_json(found) if found and layout != "text" else ""


WORDS: Mapping[object, str] = {int: "a whole number", float: "a number", bool: "yes or no"}
ITEMS: Mapping[object, str] = {int: " of whole numbers", float: " of numbers"}


def _describe_type(kind: object) -> str:
    """Describe a type in plain words; ``""`` if it accepts any text."""
    if accepts(kind, "any text"):
        return ""
    if not is_plain(kind):
        return f"JSON: {describe(kind) or format_type(kind)}"
    if get_origin(kind) is Annotated:
        plain, limits = _describe_type(without_annotation(kind)), describe(kind).partition(" ")[2]
        return f"{plain.removesuffix('.')} {limits}".rstrip() + "."
    if labels_of(kind):
        return f"one of: {_choices(labels_of(kind))}"
    origin, arguments = get_origin(kind), get_args(kind)
    optional = type(None) in arguments and origin in (Union, types.UnionType)
    if optional and len(arguments) == 2:
        inner = next(argument for argument in arguments if argument is not type(None))
        if get_origin(inner) is Literal:
            return f"one of: {_choices([*get_args(inner), None])}"
        if inner in WORDS:
            return f"{WORDS[inner]} or none."
    if kind in WORDS:
        return f"{WORDS[kind]}."
    if origin is list or kind is list:
        one = (arguments or (Any,))[0]
        item = "one" if one in ITEMS else "one item"
        return f"a list{ITEMS.get(one, '')}: {item} in each line, or a JSON array."
    return f"JSON: {format_type(kind)}"


def _choices(options: Sequence[object]) -> str:
    texts = ["none" if option is None else str(option) for option in options]
    quoted = any("," in text or text != text.strip() or not text for text in texts)
    return ", ".join(map(canonical_json, texts) if quoted else texts)


def _format_note(outputs: Mapping[str, Port], layout: Layout) -> str:
    if layout == "text":
        return type_note(outputs, layout)
    if layout == "json":
        shape = ", ".join(f'"{name}": {_spelled(port.type)}' for name, port in outputs.items())
        return f"Reply with one JSON object: {{{shape}}}"
    lines = "\n".join(f"{name}: <{_spelled(port.type, 'JSON: ')}>" for name, port in outputs.items())
    return f"Reply in this format:\n{lines}"


def answer_note(outputs: Mapping[str, Port], layout: Layout) -> str:
    """Return the sentence about the type of a final answer, or ``""`` if any text is valid.

    >>> answer_note({"city": Port(str), "year": Port(int)}, "json")
    'The final answer must be one JSON object: {"city": str, "year": int}'
    """
    if layout != "json":
        return type_note(outputs, layout)
    return _format_note(outputs, layout).replace("Reply with", "The final answer must be", 1)


def _spelled(kind: object, prefix: str = "") -> str:
    """Spell a plain type by its name, and any other by the form of its JSON after a prefix."""
    shape = "" if is_plain(kind) else describe(kind)
    return f"{prefix}{shape}" if shape else format_type(kind)


def parse(text: str, outputs: Mapping[str, Port], layout: Layout) -> dict[str, object]:
    """Parse the declared fields from a model's text.

    Raises:
        ParseError: a field is missing or has another type; ``outputs`` holds the fields that were parsed.

    >>> parse("**answer**: Lima\\nconfident: yes", {"answer": Port(str), "confident": Port(bool)}, "fields")
    {'answer': 'Lima', 'confident': True}
    """
    if layout == "text":
        name, port = next(iter(outputs.items()))
        # Engines that cannot prefill the answer show the cue in the message, and the model may repeat it.
        repeated = f"{field_label(name)}:"
        raw: Mapping[str, object] = {name: text.strip().removeprefix(repeated).strip()}
        outputs = {name: port}
    else:
        names = list(outputs)
        raw = _json_object(text, names) if layout == "json" else _fields(text, names)
    parsed: dict[str, object] = {}
    problems: list[str] = []
    for name, port in outputs.items():
        if name not in raw:
            problems.append(f"{name!r} is missing")
            continue
        try:
            parsed[name] = parse_value(raw[name], port.type)
        except ValueError as error:
            problems.append(f"{name!r}: {error}")
    if problems:
        raise ParseError(f"{'; '.join(problems)} in {text!r:.300}", outputs=parsed)
    return parsed


def _fields(text: str, names: Sequence[str]) -> dict[str, str]:
    """Find ``name: value`` for each name; case, markdown and line breaks within values are tolerated."""
    options = "|".join(re.escape(name).replace("_", "[_ ]") for name in sorted(names, key=len, reverse=True))
    pattern = re.compile(rf"^[ \t#>*\-`]*({options})[ \t*`]*[:=]\**", re.IGNORECASE | re.MULTILINE)
    found: dict[str, str] = {}
    marks = list(pattern.finditer(text))
    for i, mark in enumerate(marks):
        end = marks[i + 1].start() if i + 1 < len(marks) else len(text)
        key = mark.group(1).lower().replace(" ", "_")
        name = next(n for n in names if n.lower() == key)
        found.setdefault(name, _bare(text[mark.end() : end]))
    return found


def _bare(text: str) -> str:
    """Remove a value's common indentation, and emphasis that encloses the whole value."""
    first, _, rest = text.partition("\n")
    value = (text if first.strip() else textwrap.dedent(rest)).strip()
    if whole := re.fullmatch(r"(\*{1,3}|`)([^*`\n]+)\1", value):
        return whole.group(2).strip()
    if value.endswith("**") and value.count("**") % 2:  # `**name: value**`
        return value[:-2].strip()
    return value


def _json_object(text: str, names: Sequence[str]) -> Mapping[str, object]:
    """Return the first JSON object with at least one of the fields; surrounding text is ignored.

    Each failed attempt scans the text up to the error, so the total work is bounded.
    """
    decoder = json.JSONDecoder()
    left = SCAN_FACTOR * len(text) + SCAN_FLOOR
    for match in re.finditer(r"\{", text):
        try:
            value, end = decoder.raw_decode(text, match.start())
        except (ValueError, RecursionError) as error:
            end, value = getattr(error, "pos", len(text)), None
        if isinstance(value, dict) and not value.keys().isdisjoint(names):
            return {key: _writable(item) for key, item in value.items()}
        left -= end
        if left < 0:
            break
    return {}


def _writable(value: object) -> object:
    """Replace lone surrogates (``\\ud800``), which cannot be encoded as UTF-8."""
    return json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))


def parse_value(raw: object, kind: object) -> object:
    """Convert a model's text for a value to ``kind``.

    >>> parse_value("about 3.5 km", float), parse_value("Yes.", bool), parse_value("- a\\n- b", list[str])
    (3.5, True, ['a', 'b'])
    >>> parse_value("'No'", Literal["yes", "no"])
    'no'
    """
    origin = get_origin(kind)
    if not isinstance(raw, str):
        return _from_json_value(raw, kind, origin)
    if origin in (Union, types.UnionType) and _is_none(raw, get_args(kind)):
        return None
    if kind is Any or accepts(kind, raw):
        return raw
    if origin is Annotated and is_plain(kind):
        return convert(kind, parse_value(raw, without_annotation(kind)))
    if labels := labels_of(kind):
        found = _label(raw, labels)
        return found if origin is Literal else convert(kind, found)
    if kind in (bool, int, float):
        return _bool(raw) if kind is bool else _number(raw, kind)
    if origin is list or kind is list:
        return _list(raw, (get_args(kind) or (Any,))[0])
    if origin in (Union, types.UnionType):
        return _union(raw, get_args(kind))
    return _from_json(raw, kind)


def _from_json_value(raw: object, kind: object, origin: object) -> object:
    if isinstance(raw, float) and not math.isfinite(raw):
        raise ValueError(f"{raw!r} is not a finite number")
    if accepts(kind, raw):
        return raw
    if isinstance(raw, int | float) and (kind is str or origin is Literal):
        return parse_value(canonical_json(raw), kind)  # {"year": 1999} although the field is declared as text
    return convert(kind, raw)


def _label(raw: str, options: Sequence[object]) -> object:
    """Return the only option that occurs as whole words and is not negated; an exact match wins."""
    plain = raw.strip().strip("\"'`.*").lower()
    exact = [option for option in options if str(option).lower() == plain]
    longest_first = sorted((str(o).lower() for o in options if str(o)), key=len, reverse=True)
    words = re.finditer(rf"(?<!\w)(?:{'|'.join(map(re.escape, longest_first))})(?!\w)", raw.lower())
    found = {word.group() for word in words if not is_negated(raw, word.start())}
    named = exact or [o for o in options if str(o).lower() in found]
    if len(named) != 1:
        raise ValueError(
            f"{raw!r:.100} names {'none' if not named else 'several'} of {', '.join(map(str, options))}"
        )
    return named[0]


def _bool(raw: str) -> bool:
    words = re.findall(r"\w+", raw.lower())
    first = words[0] if words else ""
    if first in TRUE | FALSE:
        return first in TRUE
    raise ValueError(f"{raw!r:.100} is neither yes nor no")


def _number(raw: str, kind: object) -> object:
    matches = list(NUMBER.finditer(raw.replace("\N{MINUS SIGN}", "-")))
    if not matches:
        raise ValueError(f"{raw!r:.100} holds no number")
    text = matches[0].group().replace(",", "")
    leads = not any(character.isalnum() for character in raw[: matches[0].start()])
    if not leads and len({match.group().replace(",", "") for match in matches}) > 1:
        raise ValueError(f"{raw!r:.100} holds several numbers and does not start with one")
    if kind is int and text.lstrip("+-").isdigit():
        return int(text)
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{raw!r:.100} is not a finite number")
    if kind is int:
        if not value.is_integer():
            raise ValueError(f"{raw!r:.100} is not a whole number")
        return int(value)
    return value


def _list(raw: str, item: object) -> list[object]:
    text = raw.strip()
    if text.startswith("["):
        try:
            value = _writable(json.loads(text))
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, list):
            return [parse_value(v, item) for v in value]
    marker = re.compile(r"^\s*(?:[-*•](?!\d)|\d+[.)](?!\d)|\[\d+\])\s*")
    parts = [line for line in (marker.sub("", line).strip() for line in text.splitlines()) if line]
    if len(parts) == 1 and not marker.match(text):
        parts = [part.strip() for part in parts[0].split(",") if part.strip()]
    return [parse_value(part, item) for part in parts]


def _is_none(raw: str, options: Sequence[object]) -> bool:
    return type(None) in options and raw.strip().lower() in ("", "none", "null")


def _union(raw: str, options: Sequence[object]) -> object:
    for option in options:
        try:
            return parse_value(raw, option)
        except ValueError:
            continue
    raise ValueError(f"{raw!r:.100} is none of {', '.join(map(format_type, options))}")


def _from_json(raw: str, kind: object) -> object:
    """Convert the first JSON value of a text that fits, alone or among other text, such as a code block."""
    problem = ""
    for value in _json_values(raw):
        try:
            return convert(kind, _writable(value))
        except ValueError as error:
            problem = problem or str(error)
    if not problem and not re.search(r"[{\[]", raw):
        try:
            return convert(kind, raw)  # such as a date without quotes
        except ValueError as error:
            problem = str(error)
    raise ValueError(problem or f"{raw!r:.100} holds no complete JSON for {format_type(kind)}") from None


def _json_values(text: str) -> Iterator[object]:
    """Yield the whole text as JSON, or else the outermost objects and arrays in it, with bounded work."""
    try:
        yield json.loads(text)
    except (ValueError, RecursionError):
        pass
    else:
        return
    decoder, end = json.JSONDecoder(), 0
    left = SCAN_FACTOR * len(text) + SCAN_FLOOR
    for match in re.finditer(r"[{\[]", text):
        if match.start() < end:
            continue
        try:
            value, end = decoder.raw_decode(text, match.start())
        except (ValueError, RecursionError) as error:
            left -= getattr(error, "pos", len(text))
        else:
            yield value
        if left < 0:
            return
