"""Samples of one training step: passed in memory, or stored in a file if drawn ahead of their step."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from compound.engine import TokenRecord
from compound.optimizers.weights.learner.samples import Sample
from compound.optimizers.weights.learner.trainer import StaleSamples
from compound.optimizers.weights.recipes.recipe import CreditedSamples
from compound.token_ids import token_ids

FILE = "drawn.json"


@dataclass(frozen=True)
class StepBatch:
    """Training data of one step.

    Attributes:
        credited: samples with advantages, and the statistics of their credit assignment.
        facts: statistics of sampling (tokens, runs, seconds, failures), as JSON.
        version: the number of training steps of the weights that sampled every group of the batch.
    """

    credited: CreditedSamples
    facts: Mapping[str, Any]
    version: int = 0

    def write(self, folder: Path) -> None:
        """Write the batch to a file in ``folder``; `read` restores every number exactly."""
        credited = self.credited
        found = {
            "samples": [asdict(sample) for sample in credited.samples],
            "scores": list(credited.scores),
            "credit": dict(credited.facts),
            "facts": dict(self.facts),
            "version": self.version,
        }
        (folder / FILE).write_text(json.dumps(found) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path, step: int) -> StepBatch:
        """Read a batch from a folder that `write` wrote to.

        Args:
            folder: the folder.
            step: the step that the batch was drawn for. Files of version 0.3 and earlier state no version:
                their batches were drawn one step ahead.
        """
        found = json.loads((folder / FILE).read_text(encoding="utf-8"))
        samples = [_sample(row) for row in found["samples"]]
        credited = CreditedSamples(samples, found["scores"], found["credit"])
        return cls(credited, found["facts"], found.get("version", step - 1))

    def check_staleness(self, step: int, most: int, section: str) -> None:
        """Raise if the weights that sampled the batch are too old for a step.

        Args:
            step: the number of training steps of the current weights.
            most: the maximum number of steps that they may be ahead.
            section: the path of the training settings, for the message.

        Raises:
            StaleSamples: they are further ahead.
        """
        if step - self.version > most:
            raise StaleSamples(
                f"the samples of step {step + 1} were drawn with the weights of step {self.version}, which "
                f"are {step - self.version} steps old, but {section}.rollouts.max_staleness is {most}",
                hint=f"set {section}.rollouts.max_staleness to {step - self.version}, or start a new run",
            )


def _sample(row: Mapping[str, Any]) -> Sample:
    shared = {name: token_ids(row["tokens"][name]) for name in ("prompt", "sampled")}
    tokens = TokenRecord(**{**_tuples(row["tokens"]), **shared})
    return Sample(**_tuples({**row, "tokens": tokens}))


def _tuples(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
