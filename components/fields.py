"""Format values as a prompt, and parse a model's text into typed fields.

The prompt starts with the part that all calls of a component share (instruction, demonstrations) and ends
with the inputs, so that engines can reuse the shared prefix.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum

from compound.components.answers.answer_types import is_plain, ordered_json
from compound.components.answers.answer_values import SCAN_FACTOR, SCAN_FLOOR, parse_value, writable
from compound.components.answers.type_notes import Layout, field_label, format_note
from compound.errors import ParseError
from compound.execution.tool_text import THOUGHTS_END
from compound.graph.configuration import canonical_json, to_json_types
from compound.graph.json_values import SCALARS, json_form
from compound.graph.space import Demo
from compound.graph.types import Port
from compound.image import Image, replace_images


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
    head = [prompt.strip(), format_note(outputs, layout)]
    blocks = [part for part in head if part]
    for demo in demos:
        shown = format_inputs(_ordered(describe_images(demo["inputs"]), inputs))
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


def format_inputs(inputs: Mapping[str, object]) -> str:
    """Format inputs as labelled text."""
    texts = {name: format_value(value) for name, value in inputs.items() if value is not None}
    return "\n".join(
        f"{field_label(name)}:" + (f"\n{text}" if "\n" in text else f" {text}")
        for name, text in texts.items()
    )


def take_images(inputs: Mapping[str, object]) -> tuple[dict[str, object], tuple[Image, ...]]:
    """Return inputs with a numbered mark in place of each image, also within their values, and the images.

    >>> dot = Image.from_bytes(b"GIF89a-and-so-on")
    >>> take_images({"photo": dot, "others": [dot, dot], "question": "Which?"})[0]
    {'photo': '[image 1]', 'others': '[image 2] [image 3]', 'question': 'Which?'}
    """
    images: list[Image] = []

    def mark(image: Image) -> str:
        images.append(image)
        return f"[image {len(images)}]"

    shown = {name: replace_images(value, mark) for name, value in inputs.items()}
    return {name: _joined(value, inputs[name]) for name, value in shown.items()}, tuple(images)


def describe_images(inputs: Mapping[str, object]) -> dict[str, object]:
    """Return inputs of a demonstration with a description in place of each image, which is not sent."""
    return {name: replace_images(value, lambda image: image.label) for name, value in inputs.items()}


def _joined(shown: object, value: object) -> object:
    """Return the marks of a list of images in one line."""
    is_images = isinstance(value, list | tuple) and value and all(isinstance(item, Image) for item in value)
    return " ".join(map(str, shown)) if is_images and isinstance(shown, list) else shown


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


def parse(text: str, outputs: Mapping[str, Port], layout: Layout) -> dict[str, object]:
    """Parse the declared fields from a model's text.

    Thoughts before the answer (``<think>…</think>``), which may contain drafts of it, are ignored unless the
    whole text is the value. Chat templates may write ``<think>``, so that the model's text lacks it.

    Raises:
        ParseError: a field is missing or has another type; ``outputs`` holds the fields that were parsed.

    >>> parse("**answer**: Lima\\nconfident: yes", {"answer": Port(str), "confident": Port(bool)}, "fields")
    {'answer': 'Lima', 'confident': True}
    """
    name, port = next(iter(outputs.items()))
    if THOUGHTS_END in text and (layout != "text" or port.type is not str):
        text = text.partition(THOUGHTS_END)[2]
    if layout == "text":
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
    decoder = json.JSONDecoder(strict=False)
    left = SCAN_FACTOR * len(text) + SCAN_FLOOR
    for match in re.finditer(r"\{", text):
        try:
            value, end = decoder.raw_decode(text, match.start())
        except (ValueError, RecursionError) as error:
            end, value = getattr(error, "pos", len(text)), None
        if isinstance(value, dict) and not value.keys().isdisjoint(names):
            return {key: writable(item) for key, item in value.items()}
        left -= end
        if left < 0:
            break
    return {}
