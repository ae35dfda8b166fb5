"""Measure variants of training on toy tasks with equal budgets: stale samples, and λ.

Run ``python -m benchmarks.measure.training.scores [--only PART] [--seeds 6]``.

Writes ``benchmarks/data/training_variants.json``: for each part, task, variant and seed, the greedy
score of the trained system, the mean reward of rollouts over the training and over its last fifth,
and the medians of some numbers over the steps. Every variant of a part has the same number of
system runs, except for the part ``steps``, in which it has the same number of steps; it starts from
the same model.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from benchmarks.measure.learning_curves import LAST, Case, Setup, train
from compound.core.narrowing import entry
from compound.evaluation.statistics import interval_of_means

OUTPUT = Path(__file__).parents[2] / "data" / "training_variants.json"
MANY = 1000  # steps: the budget ends the training
CHAIN = {
    "steps": MANY,
    "rollouts": {"examples": 8, "runs": 8},
    "loss": {"grpo": {"entropy": 0.01}},
    "optimizer": {"lr": 3e-3},
    "evaluation": LAST,
}
TALK = {**CHAIN, "rollouts": {"examples": 8, "runs": 8}, "optimizer": {"lr": 2e-3}}
HEAD = {"lr": 1e-2, "lam": 0.95}
NUMBERS = ("explained", "skipped", "groups", "staleness")


@dataclass(frozen=True)
class Part:
    """Variants of a training with equal budgets.

    Attributes:
        task: the toy task.
        method: the method.
        runs: the budget, in system runs.
        base: the settings of all variants.
        variants: the settings of each variant, by name; sections are merged.
    """

    task: str
    method: str
    runs: float
    base: Mapping[str, object]
    variants: Mapping[str, Mapping[str, Mapping[str, object]]]

    def setup(self, variant: str) -> Setup:
        """Return the training of a variant."""
        settings = dict(self.base)
        for section, values in self.variants[variant].items():
            base = entry(settings, section, dict) if section in settings else {}
            settings[section] = {**base, **values}
        return Setup(settings, NUMBERS, self.runs)


Variants = Mapping[str, Mapping[str, Mapping[str, object]]]
STALE: Variants = {"plain": {}, "max_staleness 1": {"rollouts": {"max_staleness": 1}}}
EPOCHS = {"epochs": 2}
SEQUENCES, TOKENS = {"grpo": {"entropy": 0.01}}, {"dapo": {"entropy": 0.01}}
ADVANTAGES: Variants = {
    "λ 0.95": {"critic": HEAD, "loss": SEQUENCES},
    "λ 1": {"critic": {**HEAD, "lam": 1.0}, "loss": SEQUENCES},
    "λ 1, dapo": {"critic": {**HEAD, "lam": 1.0}, "loss": TOKENS},
}
PARTS = {
    "sampling/chain": Part("chain", "mmgrpo", 1280, CHAIN, STALE),
    "sampling/conversation": Part("conversation", "prompt_r1", 2560, TALK, STALE),
    "longer/chain": Part("chain", "mmgrpo", 2560, CHAIN, STALE),
    "advantages/conversation": Part(
        "conversation",
        "mappo",
        2560,
        {**TALK, "loss": {}, "optimizer": {"lr": 2e-3, **EPOCHS}},
        ADVANTAGES,
    ),
}


def measured(name: str, variant: str, seed: int) -> dict[str, object]:
    """Train a variant; return its score, its rewards, and medians over its steps."""
    part = PARTS[name]
    found = train(Case(part.task, part.method, seed), part.setup(variant))
    curve = entry(found, "curve", list)
    numbers = {key: entry(found, key, list) for key in NUMBERS}
    return {
        "part": name,
        "variant": variant,
        "seed": seed,
        "score": entry(entry(found, "after", dict), "score", float),
        "steps": len(curve),
        "rollouts": found["rollouts"],
        "reward": round(fmean(curve), 4),
        "last_reward": round(fmean(curve[-max(1, len(curve) // 5) :]), 4),
        "seconds": found["seconds"],
        "medians": {key: round(median(values), 4) for key, values in numbers.items() if values},
    }


def differences(rows: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """Return the mean difference of each variant from the first one, over the seeds, with its interval."""
    by_name: dict[tuple[str, str], dict[int, Mapping[str, object]]] = {}
    for row in rows:
        key = entry(row, "part", str), entry(row, "variant", str)
        by_name.setdefault(key, {})[entry(row, "seed", int)] = row
    found: dict[str, object] = {}
    for (part, variant), own in by_name.items():
        if part not in PARTS:  # of an earlier version
            continue
        base = by_name[part, next(iter(PARTS[part].variants))]
        seeds = [seed for seed in own if seed in base]
        for number in ("score", "reward", "last_reward"):
            pairs = [(entry(own[s], number, float), entry(base[s], number, float)) for s in seeds]
            if own is not base:
                interval = interval_of_means([a - b for a, b in pairs], bounds=(-1, 1))
                found[f"{part}/{variant}/{number}"] = interval.to_json()
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Train the selected variants, and keep the results of all others."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="prefix of the parts, such as sampling/")
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    args = parser.parse_args(arguments)
    wanted = [
        (name, variant, seed)
        for seed in range(args.seeds)
        for name, part in PARTS.items()
        if name.startswith(args.only)
        for variant in part.variants
    ]
    known = (
        json.loads(args.output.read_text(encoding="utf-8"))["runs"] if args.output.exists() else {}
    )
    with ProcessPoolExecutor(args.processes) as pool:
        for case, found in zip(wanted, pool.map(measured, *zip(*wanted, strict=True)), strict=True):
            known["/".join(map(str, case))] = found
            runs = dict(sorted(known.items()))
            document = {"differences": differences(list(runs.values())), "runs": runs}
            args.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
            print(case, found, file=sys.stderr)


if __name__ == "__main__":
    main()
