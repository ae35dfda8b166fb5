"""Train a LoRA adapter of the embedded model by reinforcement learning, and test it on new examples.

The model should say in one word whether a review is positive or negative. The method `mmgrpo`
samples six answers to each review, and makes those more probable that score above the mean of the
six.

Needs ``pip install -e ".[local,train]"`` and ``compound models get smollm2``.
Run: python docs/examples/train_adapter.py [FOLDER]
"""

from __future__ import annotations

import itertools
import random
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import compound as cp

THINGS = (
    "coffee",
    "cake",
    "garden",
    "music",
    "soup",
    "tea",
    "breakfast",
    "bread",
    "room",
    "service",
    "pie",
    "view",
)
WORDS = {
    "positive": ("wonderful", "excellent", "lovely", "perfect"),
    "negative": ("terrible", "awful", "disgusting", "horrible"),
}


def rows() -> dict[str, list[dict[str, str]]]:
    """Return reviews; the things of one split are not in the others."""
    rng, found = random.Random(0), {}
    for place, split in enumerate(("train", "valid", "test")):
        pairs = itertools.product(THINGS[place::3], WORDS.items())
        made = [
            {"id": f"{thing}-{word}", "review": f"The {thing} was {word}.", "label": label}
            for thing, (label, words) in pairs
            for word in words
        ]
        rng.shuffle(made)
        found[split] = made
    return found


def reward(outputs: Mapping[str, object], example: cp.Example) -> float:
    """Score 1 for the right label, 0.3 for the wrong one, and 0 for everything else."""
    answer = str(outputs["label"]).strip().lower()
    if answer not in WORDS:
        return 0.0
    return 1.0 if answer == example.gold["label"] else 0.3


def main(folder: Path) -> cp.Result:
    """Train the adapter, and print the reward before and after."""
    prompt = "Is this review positive or negative? Answer in one word."
    labeller = cp.LLM(
        "labeller", prompt=prompt, output={"label": str}, max_tokens=6, weights=cp.LoRA(8)
    )
    review = cp.Input("review", str)
    system = cp.System("train_adapter", outputs={"label": labeller(review=review)}, lm="smollm2")
    result = cp.optimize(
        system,
        data=rows(),
        metric=cp.metrics.custom(reward, bounds=(0, 1)),
        method="mmgrpo",
        mmgrpo={
            "steps": 8,
            "rollouts": {"examples": 4, "runs": 6},
            "optimizer": {"lr": 1e-3},
            "evaluation": {"every": 0},
        },
        budget=cp.Budget(system_runs=600),
        run_dir=folder / "train_adapter",
        progress=False,
    )
    for name, measured in (("before", result.test_before), ("after", result.test_after)):
        assert measured is not None
        interval = measured.interval
        print(
            f"{name}: {interval.mean:.2f}, 95 % interval {interval.low:.2f} to {interval.high:.2f}"
        )
    return result


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(sys.argv[1] if len(sys.argv) > 1 else temporary))
