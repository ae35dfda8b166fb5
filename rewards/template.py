"""Render the inputs and outputs of a call as the two texts and the numbers that a reward model reads.

The texts are embedded by the backbone. The numbers are computed from typed ports without a model: a
value, a length, the overlap of an output with an input. They have names, so that a reward can be
explained by them.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeGuard, get_args, get_origin

from compound.components.fields import format_value
from compound.graph.component import Component

TEMPLATE = 2  # version in a checkpoint's card: increase it if `Template.read` changes
WORD = re.compile(r"\w+")
DIGITS = 6  # significant digits of a number
PURPOSE = 160  # characters of the first line of a docstring


@dataclass(frozen=True, slots=True)
class Reading:
    """A call (x, y) in the form that a reward model reads.

    Attributes:
        inputs: the inputs as text, short fields first, so that truncation affects the longest one.
        label: the outputs with label types, as one text; ``""`` if there are none.
        description: what the component does, in a line.
    """

    inputs: str
    output: str
    numbers: Mapping[str, float]
    label: str
    description: str = ""

    @property
    def written(self) -> str:
        """The outputs as text, those with label types last."""
        return "\n".join(part for part in (self.output, self.label) if part)

    @property
    def texts(self) -> tuple[str, str]:
        """The two texts that a backbone reads: the description with the inputs, and the output."""
        return (
            f"{self.description}\n{self.inputs}" if self.description else self.inputs,
            self.output,
        )


@dataclass(frozen=True)
class Template:
    """Template that renders the calls of a component.

    Attributes:
        labels: the possible values of its outputs with label types, by name.
        description: what the component does; see `describe`.

    Example:
        >>> from compound.components.function import Function
        >>> def shorten(text: str) -> str:
        ...     "Return the start of a text."
        ...     return text[:5]
        >>> template = Template.of(Function("shorten", shorten))
        >>> reading = template.read({"text": "Lima, Peru"}, {"output": "Lima,"})
        >>> reading.inputs, reading.output, reading.numbers["output.words"]
        ('text: Lima, Peru', 'output: Lima,', 0.6931471805599453)
        >>> reading.description
        'shorten: Return the start of a text. Reads text. Writes output.'
    """

    component: str
    settings: frozenset[str]
    labels: Mapping[str, tuple[object, ...]]
    description: str = ""

    @staticmethod
    def of(component: Component) -> Template:
        """Return the template of a component, which leaves out connected settings."""
        labels = {
            name: get_args(port.type)
            for name, port in component.outputs.items()
            if get_origin(port.type) is Literal
        }
        return Template(component.name, frozenset(component.settings), labels, describe(component))

    def read(self, inputs: Mapping[str, object], outputs: Mapping[str, object]) -> Reading:
        """Return the texts and numbers of a call."""
        given = self.given(inputs)
        texts = {name: as_text(value) for name, value in given.items()}
        shown = sorted(texts.items(), key=lambda item: len(item[1]))
        written = {n: v for n, v in outputs.items() if n not in self.labels}
        return Reading(
            "\n".join(f"{name}: {text}" for name, text in shown),
            "\n".join(f"{name}: {as_text(value)}" for name, value in written.items()),
            _numbers(given, texts, written) | _crossed(given, {n: outputs[n] for n in self.labels}),
            "\n".join(f"{name}={outputs[name]}" for name in self.labels),
            self.description,
        )

    def given(self, inputs: Mapping[str, object]) -> dict[str, object]:
        """Return the inputs without connected settings and None values."""
        return {n: v for n, v in inputs.items() if n not in self.settings and v is not None}

    def choices(self) -> tuple[str, ...]:
        """Return all possible label texts of this component, if it has exactly one label field."""
        if len(self.labels) != 1:
            return ()
        ((name, options),) = self.labels.items()
        return tuple(f"{name}={option}" for option in options)


def describe(component: Component) -> str:
    """Return a line on a component: its name, the first line of its docstring, and its inputs and outputs.

    Its configuration is not part of the description, because a reward must not depend on it.
    """
    documented = getattr(component, "function", type(component))
    purpose = textwrap.shorten(
        (documented.__doc__ or "").strip().partition("\n")[0], PURPOSE, placeholder=" …"
    )
    parts = [f"{component.name}:", purpose] if purpose else [f"{component.name}."]
    if component.inputs:
        parts.append(f"Reads {', '.join(component.inputs)}.")
    return " ".join([*parts, f"Writes {', '.join(component.outputs)}."])


def as_text(value: object) -> str:
    """Format a value as text for a reward model."""
    if isinstance(value, float):
        return f"{value:.{DIGITS}g}"
    return format_value(value)


def _numbers(
    given: Mapping[str, object], texts: Mapping[str, str], written: Mapping[str, object]
) -> dict[str, float]:
    """Return the features of the outputs: values and products for numbers, lengths and overlaps for texts."""
    found: dict[str, float] = {}
    values = {name: float(v) for name, v in given.items() if _is_number(v)}
    words = {
        name: set(WORD.findall(text.lower())) for name, text in texts.items() if name not in values
    }
    for name, value in written.items():
        if _is_number(value):
            y = float(value)
            found[name], found[f"{name}^2"] = y, y * y
            found.update({f"{name}*{other}": y * x for other, x in values.items()})
        else:
            found.update(_of_text(name, as_text(value), words))
            if isinstance(value, Sequence) and not isinstance(value, str):
                found[f"{name}.items"] = math.log1p(len(value))
    return found


def _crossed(given: Mapping[str, object], labels: Mapping[str, object]) -> dict[str, float]:
    """Return each numeric input crossed with the label, since the best label may depend on it."""
    return {
        f"{name}={label}*{other}": float(x)
        for name, label in labels.items()
        for other, x in given.items()
        if _is_number(x)
    }


def _of_text(name: str, text: str, words: Mapping[str, set[str]]) -> dict[str, float]:
    mine = WORD.findall(text.lower())
    distinct = set(mine)
    found = {
        f"{name}.words": math.log1p(len(mine)),
        f"{name}.characters": math.log1p(len(text)),
        f"{name}.lines": math.log1p(text.count("\n")),
        f"{name}.repeats": 1 - len(distinct) / len(mine) if mine else 0.0,
        f"{name}.sentence": float(text.rstrip().endswith((".", "!", "?"))),
        f"{name}.capital": float(text.lstrip()[:1].isupper()),
        f"{name}.digits": float(any(c.isdigit() for c in text)),
    }
    for other, theirs in words.items():
        found[f"{name} in {other}"] = len(distinct & theirs) / len(distinct) if distinct else 0.0
    return found


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, bool | int | float) and math.isfinite(value)
