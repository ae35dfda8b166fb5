"""Feature maps: the features of a component's calls, on which its head is linear.

``φ(x, y)`` consists of the backbone's features of the two texts, the template's numbers and, if an
output is one of a few labels, a block of the inputs' features for each label, so that the best
label can depend on the inputs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compound.rewards.template import Reading, Template

Matrix = NDArray[np.float32]


class Embedder(ABC):
    """Base class of backbones, which embed text pairs; the other methods are optional.

    Attributes:
        adapter: the digest of trained weights; ``""`` without any.
        max_length: the maximum number of tokens of a text pair.
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


@dataclass(frozen=True)
class FeatureMap:
    """Columns of a component's features, determined by the training data.

    Attributes:
        template: the template that renders the component's calls.
        numbers: the names of the template's numbers in use, in order; a missing number counts as 0.
        labels: the label texts, in order; each has an indicator column and a block of ``dim``
            columns.
    """

    template: Template
    numbers: tuple[str, ...]
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
        numbers = np.array(
            [[reading.numbers.get(name, 0.0) for name in self.numbers] for reading in readings],
            np.float32,
        ).reshape(len(readings), len(self.numbers))
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
