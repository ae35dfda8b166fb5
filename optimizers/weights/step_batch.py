"""A step's samples on their way to the trainer: in memory, or in a file while another step is trained."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from compound.engine import TokenRecord
from compound.optimizers.weights.learner.samples import Sample
from compound.optimizers.weights.recipes.recipe import Credited

FILE = "drawn.json"


@dataclass(frozen=True)
class StepBatch:
    """What one step is to be trained on.

    Attributes:
        credited: samples with advantages, and how they came about.
        facts: what drawing them took, as JSON.
    """

    credited: Credited
    facts: Mapping[str, Any]

    def write(self, folder: Path) -> None:
        """Write everything to a file in a folder; `read` gives it back to the last digit."""
        credited = self.credited
        found = {
            "samples": [asdict(sample) for sample in credited.samples],
            "scores": list(credited.scores),
            "credit": dict(credited.facts),
            "facts": dict(self.facts),
        }
        (folder / FILE).write_text(json.dumps(found) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> StepBatch:
        """Read what `write` wrote."""
        found = json.loads((folder / FILE).read_text(encoding="utf-8"))
        samples = [_sample(row) for row in found["samples"]]
        return cls(Credited(samples, found["scores"], found["credit"]), found["facts"])


def _sample(row: Mapping[str, Any]) -> Sample:
    tokens = TokenRecord(**_tuples(row["tokens"]))
    return Sample(**_tuples({**row, "tokens": tokens}))


def _tuples(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
