"""Compare searches of one component of a relay: by a local reward, by its variants, and by races alone.

    python -m compound.benchmarks.simulated.relay_estimates

The first of four steps has eight options. Each row is the expected score of the option that a job proposed,
as a share of the optimum's, by method and system runs of the job; 20 seeds. The result is written to
``benchmarks/data/relay_estimates.json``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from compound.benchmarks.simulated.mislabelled import FitToShuffled
from compound.benchmarks.simulated.relays import Relay
from compound.evaluation.statistics import UNIT, interval_of_means
from compound.narrowing import entry
from compound.optimization.method import Optimizer
from compound.optimizers.optimas.guided import GuidedSearch
from compound.optimizers.search.prompts import PromptSearch
from compound.optimizers.search.sampling import NumberSearch
from compound.rewards.settings import BackboneSettings, RewardLearning
from compound.testing import OptimizerJob

OUTPUT = Path(__file__).parents[1] / "data" / "relay_estimates.json"
LENGTH, SEEDS, RUNS = 4, 20, (25, 50, 100, 200)
LEARNING = RewardLearning(backbone=BackboneSettings(model="none"))
NO_PROMPTS = PromptSearch(())
METHODS: Mapping[str, Optimizer] = {
    "shrinkage": GuidedSearch(LEARNING, NO_PROMPTS),
    "control variate": GuidedSearch(LEARNING, NO_PROMPTS, shrink=False),
    "without gold": GuidedSearch(LEARNING, NO_PROMPTS, gold=False),
    "shuffled labels": GuidedSearch(LEARNING, NO_PROMPTS, fit=FitToShuffled()),
    "races alone": NumberSearch(),
}


def share(optimizer: Optimizer, runs: int, seed: int) -> float:
    """Return the expected score of the proposed option, as a share of the optimum's."""
    world = Relay(LENGTH, 1, seed=seed)
    job = OptimizerJob(
        world.system(), world, world.examples(100), share=runs, seed=seed, minibatch=8, candidates=8
    )
    _, proposal = job.run(optimizer)
    option = entry({"a.option": 0, **proposal.values}, "a.option", int)
    return world.value({"a": option}) / world.optimum()[1]


def main() -> None:
    """Run all jobs and write the file."""
    found: dict[str, dict[str, object]] = {}
    for name, optimizer in METHODS.items():
        for runs in RUNS:
            values = [share(optimizer, runs, seed) for seed in range(SEEDS)]
            summary = interval_of_means(values, bounds=UNIT)
            rounded = [round(value, 4) for value in values]
            found.setdefault(name, {})[str(runs)] = {**summary.to_json(), "values": rounded}
            print(name, runs, summary, flush=True)
    worlds = [Relay(LENGTH, 1, seed=seed) for seed in range(SEEDS)]
    start = sum(world.value({}) / world.optimum()[1] for world in worlds) / SEEDS
    result = {"start": round(start, 4), "methods": found}
    OUTPUT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
