"""Format values as a prompt, and parse a model's text into typed fields.

The prompt starts with the part that all calls of a component share (instruction, demonstrations)
and ends with the inputs, so that engines can reuse the shared prefix.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from enum import Enum

from compound.components.answers.answer_types import (
    is_plain,
    mixes_text,
    ordered_json,
    takes_any_text,
)
from compound.components.answers.answer_values import (
    check_complete,
    float_reader,
    parse_value,
    writable,
)
from compound.components.answers.answer_words import json_object, labelled_fields
from compound.components.answers.type_notes import Layout, field_label, format_note
from compound.core.errors import ParseError
from compound.core.image import Image, replace_images
from compound.execution.answer_text import after_thoughts, answer_part
from compound.graph.configuration import canonical_json, to_json_types
from compound.graph.json_values import SCALARS, json_form
from compound.graph.space import Demo
from compound.graph.types import Port, accepts, reads_decimals


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
    return {
        name: replace_images(value, lambda image: image.label) for name, value in inputs.items()
    }


def _joined(shown: object, value: object) -> object:
    """Return the marks of a list of images in one line."""
    is_images = (
        isinstance(value, list | tuple) and value and all(isinstance(item, Image) for item in value)
    )
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
    if isinstance(value, Sequence) and value and all(map(is_passage, value)):
        return "\n".join(
            f"{p['title']}: {p['text']}" if p.get("title") else p["text"] for p in value
        )
    return canonical_json(value)


def is_passage(value: object) -> bool:
    """Return whether a value has a text and no fields that the line of a passage does not show.

    >>> is_passage({"title": None, "text": "Hi"}), is_passage({"role": "user", "text": "Hi"})
    (True, False)
    """
    return (
        isinstance(value, Mapping)
        and value.keys() <= {"id", "title", "text", "score"}
        and isinstance(value.get("text"), str)
        and isinstance(value.get("title"), str | None)
    )


def _text(value: str) -> str:
    """Return a text; that of a member of an Enum is its value, which formatting would replace by its name."""
    return str(value.value) if isinstance(value, Enum) else value


def format_outputs(
    outputs: Mapping[str, object], layout: Layout, ports: Mapping[str, Port] | None = None
) -> str:
    """Format outputs in the layout that the model is asked to use; ``ports`` have the declared types."""
    ports = ports or {}
    kinds = {
        name: ports[name].type
        for name in outputs
        if name in ports and not is_plain(ports[name].type)
    }
    if layout == "json" and not kinds:
        return canonical_json(dict(outputs))
    written = {
        name: ordered_json(kinds[name], to_json_types(value))
        if name in kinds
        else canonical_json(value)
        for name, value in outputs.items()
    }
    if layout == "json":
        return f"{{{', '.join(f'{json.dumps(name)}: {text}' for name, text in written.items())}}}"
    if layout == "text":
        shown = {
            name: written[name] if name in kinds else _answer(value)
            for name, value in outputs.items()
        }
        return "\n".join(t if n in kinds else f"{field_label(n)}: {t}" for n, t in shown.items())
    plain = {
        name: _text(value) if isinstance(value, str) else written[name]
        for name, value in outputs.items()
    }
    return "\n".join(f"{name}: {text}" for name, text in plain.items())


def _answer(value: object) -> str:
    """Format a single output as its `type_note` requests."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return _text(value) if isinstance(value, str) else canonical_json(value)


def parse(
    text: str, outputs: Mapping[str, Port], layout: Layout, *, is_cut: bool = False
) -> dict[str, object]:
    """Parse the declared fields from a model's text.

    Thoughts before the answer (``<think>…</think>``), which may contain drafts of it, are ignored,
    except in a single text. If a field occurs several times, the last one counts.

    Args:
        text: the model's text.
        outputs: the declared fields.
        layout: the layout that the model was asked for.
        is_cut: whether the text ended at the maximum length. Only values that are certainly
            complete are then accepted, and a single text.

    Raises:
        ParseError: a field is missing or has another type, or the text is nothing but thoughts;
            ``outputs`` holds the fields that were parsed.

    >>> parse("**answer**: Lima\\nconfident: yes", {"answer": Port(str), "confident": Port(bool)}, "fields")
    {'answer': 'Lima', 'confident': True}
    """
    try:
        raw = _raw_fields(text, outputs, layout)
    except ValueError as error:
        raise ParseError(str(error)) from None
    last = [*raw][-1] if raw and is_cut and layout != "json" else None
    parsed: dict[str, object] = {}
    problems: list[str] = []
    for name, port in [*outputs.items()][: 1 if layout == "text" else None]:
        if name not in raw:
            problems.append(f"{name!r} is missing")
            continue
        try:
            value = _value(raw[name], port.type, layout)
            if name == last:
                _check_last(str(raw[name]), port.type, value, layout)
        except ValueError as error:
            problems.append(f"{name!r}: {error}")
        else:
            parsed[name] = value
    if problems:
        raise ParseError(f"{'; '.join(problems)} in {text!r:.300}", outputs=parsed)
    return parsed


def _value(raw: object, kind: object, layout: Layout) -> object:
    # a string of JSON is a text
    is_text = layout == "json" and isinstance(raw, str) and accepts(kind, raw)
    return raw if is_text else parse_value(raw, kind)


def _check_last(raw: str, kind: object, value: object, layout: Layout) -> None:
    """Check that the last value of a text that was cut is complete; a single text may be cut."""
    if layout == "fields" and isinstance(value, str) and (takes_any_text(kind) or mixes_text(kind)):
        raise ValueError("the text was cut in this field")
    check_complete(raw, kind, value)


def _raw_fields(text: str, outputs: Mapping[str, Port], layout: Layout) -> Mapping[str, object]:
    """Return the texts or JSON values of the fields that a text has.

    Raises:
        ValueError: the text is nothing but thoughts, or ends with incomplete JSON.
    """
    names = list(outputs)
    if layout == "text":
        is_whole = outputs[names[0]].type is str and bool(after_thoughts(text))
        answer = text if is_whole else answer_part(text)
        # Engines that cannot prefill the answer show the cue in the message, and the model may
        # repeat it.
        return {names[0]: answer.strip().removeprefix(f"{field_label(names[0])}:").strip()}
    answer = answer_part(text)
    if layout == "json":
        exact = any(reads_decimals(port.type) for port in outputs.values())
        found = json_object(answer, names, float_reader(Decimal if exact else str))
        return {key: writable(item) for key, item in found.items()}
    fields = labelled_fields(answer, names)
    if fields and len(fields) < len(names) and after_thoughts(text) == text:
        whole = labelled_fields(text, names)  # a mark of thoughts may be the content of a field
        return whole if len(whole) == len(names) else fields
    return fields
