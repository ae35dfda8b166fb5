"""Feature maps: the features of a component's calls, on which its head is linear.

They are the backbone's features of the inputs and outputs as texts, named numbers that the template
computes without a model, and, if an output is one of a few labels, a block of the inputs' features
for each label, so that the best label can depend on the inputs.
"""

from __future__ import annotations

import math
import re
import sys
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeGuard, get_args, get_origin

import numpy as np
from numpy.typing import NDArray

from compound.components.fields import format_value
from compound.graph.component import Component

TEMPLATE = 2  # version in a checkpoint's card: increase it if `Template.read` changes
WORD = re.compile(r"\w+")
DIGITS = 6  # significant digits of a number
PURPOSE = 160  # characters of the first line of a docstring


@dataclass(frozen=True, slots=True)
class Reading:
    """A call (x, y) in the form that a reward model reads."""

    # the inputs as text, short fields first, so that truncation affects the longest one
    inputs: str
    output: str
    numbers: Mapping[str, float]
    label: str  # the outputs with label types, as one text; `""` if there are none
    description: str = ""  # what the component does, in a line

    @property
    def written(self) -> str:
        """The outputs as text, those with label types last."""
        return "\n".join(part for part in (self.output, self.label) if part)

    @property
    def texts(self) -> tuple[str, str]:
        """The two texts that a backbone reads: the description with the inputs, and the output."""
        given = f"{self.description}\n{self.inputs}" if self.description else self.inputs
        return given, self.output


@dataclass(frozen=True)
class Template:
    """Template that renders the calls of a component.

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
    # the possible values of its outputs with label types, by name
    labels: Mapping[str, tuple[object, ...]]
    description: str = ""

    @staticmethod
    def of(component: Component) -> Template:
        """Return the template of a component, which leaves out connected settings."""
        types = {name: port.type for name, port in component.outputs.items()}
        labels = {
            name: get_args(kind) for name, kind in types.items() if get_origin(kind) is Literal
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
    """Return a line on a component: its name, the first line of its docstring, its inputs and outputs."""
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
    return isinstance(value, bool | int | float) and abs(value) <= sys.float_info.max


Matrix = NDArray[np.float32]


class Embedder(ABC):
    """Base class of backbones, which embed text pairs; the other methods are optional.

    Attributes:
        adapter: the digest of trained weights; ``""`` without any.
    """

    dim: int
    adapter = ""
    max_length = 0

    @abstractmethod
    def embed(self, texts: Sequence[tuple[str, str]]) -> Matrix:
        """Return a vector of length ``dim`` for each (inputs, output)."""

    def store_in(self, path: Path) -> None:
        """Store computed features in a file, and reuse the features in it."""

    def limit_features(self, most: int) -> None:
        """Forget the features in memory if there are more than ``most``."""

    def save_adapter(self, folder: Path) -> None:
        """Write the adapter in peft's format (safetensors), if there is one."""

    def remove_adapter(self) -> None:
        """Remove the adapter, which restores the base weights."""


class NoBackbone(Embedder):
    """Backbone that reads no text, so that rewards are linear in the template's numbers and labels."""

    dim = 0

    def embed(self, texts: Sequence[tuple[str, str]]) -> Matrix:
        """Return vectors of length 0."""
        return np.zeros((len(texts), 0), np.float32)


LARGEST = 1e15  # absolute value of a number, so that sums of squares are finite in float32


@dataclass(frozen=True)
class FeatureMap:
    """Columns of a component's features, determined by the training data."""

    template: Template
    # the names of the template's numbers in use, in order; a missing number counts as 0
    numbers: tuple[str, ...]
    # the label texts, in order; each has an indicator column and a block of `dim` columns
    labels: tuple[str, ...]
    dim: int

    @staticmethod
    def of(template: Template, readings: Sequence[Reading], dim: int) -> FeatureMap:
        """Return the map for the numbers and labels of some readings."""
        numbers = sorted({name for reading in readings for name in reading.numbers})
        seen = sorted({reading.label for reading in readings if reading.label})
        labels = template.choices() or tuple(seen)
        return FeatureMap(template, tuple(numbers), labels, dim)

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns; those of the backbone are numbered."""
        text = tuple(f"φ{i}" for i in range(self.dim)) if not self.labels else ()
        crossed = tuple(f"{label}×φ{i}" for label in self.labels for i in range(self.dim))
        return (*text, *self.numbers, *self.labels, *crossed)

    @property
    def soft(self) -> tuple[bool, ...]:
        """Whether each column comes from the backbone."""
        return tuple("φ" in column for column in self.columns)

    def matrix(self, readings: Sequence[Reading], backbone: Embedder) -> Matrix:
        """Return the features, one row per reading."""
        values = np.array(
            [[reading.numbers.get(name, 0.0) for name in self.numbers] for reading in readings]
        ).reshape(len(readings), len(self.numbers))
        numbers = np.clip(np.nan_to_num(values), -LARGEST, LARGEST).astype(np.float32)
        if not self.labels:
            return np.hstack([backbone.embed([r.texts for r in readings]), numbers])
        embedded = backbone.embed([r.texts for r in readings])
        chosen = np.zeros((len(readings), len(self.labels)), np.float32)
        for row, reading in enumerate(readings):
            if reading.label in self.labels:
                chosen[row, self.labels.index(reading.label)] = 1.0
        crossed = (chosen[:, :, None] * embedded[:, None, :]).reshape(len(readings), -1)
        return np.hstack([numbers, chosen, crossed])

    def to_json(self) -> dict[str, object]:
        """Return the map as JSON types."""
        template = self.template
        return {
            "component": template.component,
            "settings": sorted(template.settings),
            "label_fields": {name: list(options) for name, options in template.labels.items()},
            "numbers": list(self.numbers),
            "labels": list(self.labels),
            "dim": self.dim,
            "description": template.description,
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> FeatureMap:
        """Read a map from the form of `to_json`."""
        fields = {name: tuple(options) for name, options in data["label_fields"].items()}
        template = Template(
            str(data["component"]), frozenset(data["settings"]), fields, str(data["description"])
        )
        return FeatureMap(template, tuple(data["numbers"]), tuple(data["labels"]), data["dim"])
