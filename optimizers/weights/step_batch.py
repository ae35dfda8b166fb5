"""Samples of one training step: passed in memory, or stored in a file if drawn ahead of their step."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from compound.engine import TokenRecord
from compound.optimizers.weights.learner.samples import Sample
from compound.optimizers.weights.recipes.recipe import CreditedSamples
from compound.token_ids import token_ids

FILE = "drawn.json"


@dataclass(frozen=True)
class StepBatch:
    """Training data of one step.

    Attributes:
        credited: samples with advantages, and the statistics of their credit assignment.
        facts: statistics of sampling (tokens, runs, seconds, failures), as JSON.
    """

    credited: CreditedSamples
    facts: Mapping[str, Any]

    def write(self, folder: Path) -> None:
        """Write the batch to a file in ``folder``; `read` restores every number exactly."""
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
        """Read a batch from a folder that `write` wrote to."""
        found = json.loads((folder / FILE).read_text(encoding="utf-8"))
        samples = [_sample(row) for row in found["samples"]]
        return cls(CreditedSamples(samples, found["scores"], found["credit"]), found["facts"])


def _sample(row: Mapping[str, Any]) -> Sample:
    shared = {name: token_ids(row["tokens"][name]) for name in ("prompt", "sampled")}
    tokens = TokenRecord(**{**_tuples(row["tokens"]), **shared})
    return Sample(**_tuples({**row, "tokens": tokens}))


def _tuples(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
