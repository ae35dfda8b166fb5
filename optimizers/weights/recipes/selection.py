"""Choose the training step to propose: evaluations on train examples that no step trains on.

The acceptance test reads the validation split. If checkpoints were chosen on that split as well, the chosen
one would carry the luck of the maximum into the test, and more proposals than `alpha` would pass by chance.
So checkpoints are compared on a held-out part of the train split, and the test keeps its level.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import Field

from compound.example import Example
from compound.execution.rng import generator
from compound.optimizers.weights.learner.saved import Best
from compound.settings.base import Settings

PART = 4  # at most one in so many train examples is held out


class EvaluationSettings(Settings):
    """How the training step to propose is chosen, on held-out train examples."""

    every: int = Field(default=5, ge=0)
    """Training steps between evaluations. The best evaluated step is proposed, the earliest of equals. A job
    too short for two evaluated steps, or 0, proposes its last step."""
    examples: int = Field(default=16, ge=1)
    """Train examples held out for these evaluations, at most a quarter of the train examples. Each evaluation
    takes one system run per example from the job's budget."""


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


def is_better(score: float, step: int, best: Best | None) -> bool:
    """Return whether an evaluated step replaces the best one so far.

    The earliest of equal steps stays. The starting weights, step 0, stay only if they score higher: an equal
    score on a few examples is no evidence against a training whose rewards rose.

    >>> start, later = (Best(step=step, score=0.5, saved=None) for step in (0, 5))
    >>> is_better(0.5, 5, start), is_better(0.5, 10, later)
    (True, False)
    """
    if best is None or score > best.score:
        return True
    return score == best.score and best.step == 0 < step
