"""Choose the training step to propose: evaluations on train examples that no step trains on.

The acceptance test reads the validation split. If checkpoints were chosen on that split as well, the chosen
one would carry the luck of the maximum into the test, and more proposals than `alpha` would pass by chance.
So checkpoints are compared on a held-out part of the train split, and the test keeps its level.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from compound.contracts import Example
from compound.streams import generator

PART = 4  # at most one in so many train examples is held out


@dataclass(frozen=True)
class Split:
    """A job's train examples: those that steps sample from, and those that checkpoints are compared on."""

    trained: Sequence[Example]
    held_out: Sequence[Example]


def held_out_size(examples: int, wanted: int, every: int) -> int:
    """Return how many of some train examples are held out.

    >>> [held_out_size(examples, 16, every) for examples, every in ((100, 5), (20, 5), (3, 5), (100, 0))]
    [16, 5, 0, 0]
    """
    return min(wanted, examples // PART) if every else 0


def split(train: Sequence[Example], size: int, seed: int) -> Split:
    """Set ``size`` train examples aside; equal seeds set the same ones aside, whichever job asks."""
    aside = set(generator(seed, "held out").permutation(len(train))[:size].tolist())
    return Split(
        [example for place, example in enumerate(train) if place not in aside],
        [train[place] for place in sorted(aside)],
    )


def is_better(score: float, step: int, best: Mapping[str, Any] | None) -> bool:
    """Return whether an evaluated step replaces the best one so far.

    The earliest of equal steps stays. The starting weights, step 0, stay only if they score higher: an equal
    score on a few examples is no evidence against a training whose rewards rose.

    >>> is_better(0.5, 5, {"step": 0, "score": 0.5}), is_better(0.5, 10, {"step": 5, "score": 0.5})
    (True, False)
    """
    if best is None or score > best["score"]:
        return True
    return bool(score == best["score"] and best["step"] == 0 < step)
