"""Measure the time that sampling during training saves, on a simulated sampler of known latency.

Run ``python -m benchmarks.measure.training.overlap``.

Prints one JSON object and writes it to ``benchmarks/data/overlap.json``. The sampler stands for a
server on other hardware: it answers with random words after a random time, without computation in
this process. The trainer trains a toy model for real. Trainings with and without overlap alternate,
for several latencies and lengths of training steps.

From the times of the steps without overlap, the script also computes the speed of queues: samples
may be several updates old, and several steps are sampled at once, which requires a sampler with
room for all of them. "1 old, 1 at once" is what was measured, and shows how close the computation
is.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles

from benchmarks.measure.learning_curves import LAST, Case, Setup, train
from benchmarks.simulated.toy_model import SAID
from compound.core.engine import Completion, Request, TokenRecord, Usage
from compound.core.narrowing import entry
from compound.engines.local.engine import TransformersEngine
from compound.execution.rng import generator

OUTPUT = Path(__file__).parents[2] / "data" / "overlap.json"
CASES = (  # median seconds of an answer, of which a run makes three in a row, and epochs of a training step
    (0.03, 2),
    (0.1, 2),
    (0.25, 2),
    (0.25, 12),
)
SPREAD = 0.5  # of the logarithm of the seconds
QUEUES: Mapping[
    str, tuple[int, float]
] = {  # updates that samples may be old, steps sampled at once
    "1 old, 1 at once": (1, 1),
    "4 old, 1 at once": (4, 1),
    "1 old, 2 at once": (1, 2),
    "4 old, 5 at once": (4, 5),
}
STEPS = 13


class SimulatedServer(TransformersEngine):
    """Engine that answers with a random word after a random time, as the weights that it is asked for."""

    def __init__(self, model: str, latency: float) -> None:
        super().__init__(model, dtype="float32")
        self.latency, self.concurrency = latency, 1024  # every request of a step at once

    async def generate(self, request: Request) -> Completion:
        """Wait, and answer; equal requests get equal answers after equal times."""
        text = request.messages[-1].text
        rng = generator(request.seed or 0, "simulated", text)
        await asyncio.sleep(self.latency * float(rng.lognormal(0.0, SPREAD)))
        word = SAID[int(rng.integers(len(SAID)))]
        prompt = tuple(
            2 + sum(map(ord, part)) % 20 for part in text.split()
        )  # any ids of the vocabulary
        version = request.adapter.sha256 if request.adapter else ""
        record = TokenRecord(prompt, (2 + SAID.index(word),), (-1.8,), "stop", version)
        return Completion(word, Usage(1, len(prompt), 1), tokens=record)


def timed(latency: float, epochs: int, seed: int, staleness: int) -> dict[str, list[float]]:
    """Train, and return the seconds of every step but the first, and of its sampling and training."""
    settings = {
        "steps": STEPS,
        "rollouts": {"examples": 8, "runs": 8, "max_staleness": staleness},
        "optimizer": {"lr": 3e-3, "epochs": epochs},
        "evaluation": LAST,
    }
    numbers = ("sample_seconds", "train_seconds")
    setup = Setup(settings, numbers, engine=lambda model: SimulatedServer(model, latency))
    found = train(Case("chain", "mmgrpo", seed), setup)
    return {
        "step": entry(found, "step_seconds", list),
        **{name.removesuffix("_seconds"): entry(found, name, list)[1:] for name in numbers},
    }


def queued(
    sample: Sequence[float], training: Sequence[float], staleness: int, at_once: float = math.inf
) -> float:
    """Return the seconds of a training whose samples may be ``staleness`` updates old.

    The samples of a step are drawn as soon as weights exist that are new enough, and fewer than
    ``at_once`` steps are being sampled.

    >>> steps = [2.0] * 6, [1.0] * 6
    >>> [queued(*steps, staleness, 1) for staleness in (0, 1, 2)]
    [18.0, 13.0, 13.0]
    >>> [queued(*steps, staleness) for staleness in (0, 1, 2)]
    [18.0, 10.0, 8.0]
    """
    ends: list[float] = []
    sampled: list[float] = []
    for number, (drawing, updating) in enumerate(zip(sample, training, strict=True)):
        version = number - staleness - 1
        start = ends[version] if version >= 0 else 0.0
        if number >= at_once:
            start = max(start, sorted(sampled)[-int(at_once)])
        sampled.append(start + drawing)
        ends.append(max(sampled[-1], ends[-1] if ends else 0.0) + updating)
    return ends[-1]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median, the quartiles and the range."""
    low, _, high = quantiles(values, n=4)
    found = {
        "median": median(values),
        "p25": low,
        "p75": high,
        "least": min(values),
        "most": max(values),
    }
    return {name: round(value, 4) for name, value in found.items()}


def measured(latency: float, epochs: int, rounds: int) -> dict[str, object]:
    """Alternate trainings with and without overlap."""
    plain: list[dict[str, list[float]]] = []
    ahead: list[dict[str, list[float]]] = []
    for number in range(rounds):
        for staleness in (0, 1) if number % 2 else (1, 0):
            (ahead if staleness else plain).append(timed(latency, epochs, number, staleness))
    totals = [sum(one["step"]) for one in plain]
    computed = {
        name: spread(
            [
                queued(one["sample"], one["train"], 0) / queued(one["sample"], one["train"], *queue)
                for one in plain
            ]
        )
        for name, queue in QUEUES.items()
    }
    return {
        "latency": latency,
        "epochs": epochs,
        "seconds_per_step": spread([total / (STEPS - 1) for total in totals]),
        "sampling_per_step": spread([median(one["sample"]) for one in plain]),
        "training_per_step": spread([median(one["train"]) for one in plain]),
        "speed": spread([a / sum(b["step"]) for a, b in zip(totals, ahead, strict=True)]),
        "computed_speed": computed,
    }


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=6, help="pairs of trainings for each latency")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    given = parser.parse_args()
    found = {
        "python": platform.python_version(),
        "processors": os.cpu_count(),
        "rounds": given.rounds,
        "steps": STEPS - 1,
        "runs_per_step": 64,
        "calls_per_run": 3,
        "cases": [measured(latency, epochs, given.rounds) for latency, epochs in CASES],
    }
    text = json.dumps(found, indent=1)
    print(text)
    given.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
