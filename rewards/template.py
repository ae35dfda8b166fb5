"""The input of a reward model: the inputs and the output of a call as two texts and as numbers.

The texts go to the backbone. The numbers are what typed ports know without reading: a value, a length, how
much of an output repeats an input. They are named, so that a reward can be explained by them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeGuard, get_args, get_origin

from compound.components.fields import show
from compound.graph.component import Component

TEMPLATE = 1  # part of a checkpoint's card: raise it when `render` changes
WORD = re.compile(r"\w+")
DIGITS = 6  # significant digits of a number


@dataclass(frozen=True, slots=True)
class Reading:
    """One (x, y) as a reward model reads it.

    Attributes:
        inputs: the inputs as text, short fields first, so that a cut at the end takes the longest.
        output: the outputs as text; ``""`` when all of them are labels.
        numbers: features by name.
        label: the outputs that are one of a few labels, in one text; ``""`` when there are none.
    """

    inputs: str
    output: str
    numbers: Mapping[str, float]
    label: str


@dataclass(frozen=True)
class Template:
    """Renders the calls of one component.

    Example:
        >>> from compound.components.function import Function
        >>> def shorten(text: str) -> str:
        ...     return text[:5]
        >>> template = Template.of(Function("shorten", shorten))
        >>> reading = template.read({"text": "Lima, Peru"}, {"output": "Lima,"})
        >>> reading.inputs, reading.output, reading.numbers["output.words"]
        ('text: Lima, Peru', 'output: Lima,', 0.6931471805599453)
    """

    component: str
    settings: frozenset[str]
    labels: Mapping[str, tuple[object, ...]]

    @staticmethod
    def of(component: Component) -> Template:
        """Return the template of a component; settings that are wired are not shown."""
        labels = {
            name: get_args(port.type)
            for name, port in component.outputs.items()
            if get_origin(port.type) is Literal
        }
        return Template(component.name, frozenset(component.settings), labels)

    def read(self, inputs: Mapping[str, object], outputs: Mapping[str, object]) -> Reading:
        """Return the texts and numbers of one call."""
        given = self.given(inputs)
        texts = {name: as_text(value) for name, value in given.items()}
        shown = sorted(texts.items(), key=lambda item: len(item[1]))
        written = {n: v for n, v in outputs.items() if n not in self.labels}
        return Reading(
            "\n".join(f"{name}: {text}" for name, text in shown),
            "\n".join(f"{name}: {as_text(value)}" for name, value in written.items()),
            _numbers(given, texts, written) | _crossed(given, {n: outputs[n] for n in self.labels}),
            "\n".join(f"{name}={outputs[name]}" for name in self.labels),
        )

    def given(self, inputs: Mapping[str, object]) -> dict[str, object]:
        """Return the inputs without wired settings and without what is missing."""
        return {n: v for n, v in inputs.items() if n not in self.settings and v is not None}

    def choices(self) -> tuple[str, ...]:
        """Return every label text a reading of this component can have, where it has one label field."""
        if len(self.labels) != 1:
            return ()
        ((name, options),) = self.labels.items()
        return tuple(f"{name}={option}" for option in options)


def as_text(value: object) -> str:
    """Return a value as a reward model reads it."""
    if isinstance(value, float):
        return f"{value:.{DIGITS}g}"
    return show(value)


def _numbers(
    given: Mapping[str, object], texts: Mapping[str, str], written: Mapping[str, object]
) -> dict[str, float]:
    """Return the features of the outputs: values with their products, or lengths and overlaps."""
    found: dict[str, float] = {}
    values = {name: float(v) for name, v in given.items() if _is_number(v)}
    words = {name: set(WORD.findall(text.lower())) for name, text in texts.items() if name not in values}
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
    """Return each number among the inputs for the label at hand: which label is best may depend on it."""
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
