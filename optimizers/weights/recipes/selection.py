"""Choose the training step to propose, by evaluations on held-out train examples.

The acceptance test uses the validation split. Selecting checkpoints on the same split would bias the test
upward (the maximum of noisy scores is optimistic), so more proposals than `alpha` would pass by chance.
Checkpoints are therefore compared on a held-out part of the train split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import Field

from compound.example import Example
from compound.execution.rng import generator
from compound.optimizers.weights.learner.saved import Best
from compound.settings.base import Settings

MAX_HELD_OUT = 4  # at most one in this many train examples is held out


class EvaluationSettings(Settings):
    """Evaluations on held-out train examples, which choose the training step to propose."""

    every: int = Field(default=5, ge=0)
    """Training steps between evaluations. The best evaluated step is proposed; of equal steps, the earliest.
    With 0, or in a job too short for two evaluated steps, the last step is proposed."""
    examples: int = Field(default=16, ge=1)
    """Train examples held out for evaluations, at most a quarter of all train examples. Each evaluation costs
    one system run per example from the job's budget."""


@dataclass(frozen=True)
class Split:
    """The train examples of a job, divided into examples to train on and held-out ones for evaluations."""

    trained: Sequence[Example]
    held_out: Sequence[Example]


def held_out_size(examples: int, wanted: int, every: int) -> int:
    """Return the number of train examples to hold out.

    >>> [held_out_size(examples, 16, every) for examples, every in ((100, 5), (20, 5), (3, 5), (100, 0))]
    [16, 5, 0, 0]
    """
    return min(wanted, examples // MAX_HELD_OUT) if every else 0


def split(train: Sequence[Example], size: int, seed: int) -> Split:
    """Hold out ``size`` train examples; equal seeds hold out the same examples in all jobs."""
    aside = set(generator(seed, "held out").permutation(len(train))[:size].tolist())
    return Split(
        [example for place, example in enumerate(train) if place not in aside],
        [train[place] for place in sorted(aside)],
    )


def is_better(score: float, step: int, best: Best | None) -> bool:
    """Return whether an evaluated step replaces the best step so far.

    Of equal steps, the earliest stays. The starting weights (step 0) stay only if they score strictly higher:
    an equal score on a few examples is no evidence against a training whose rewards rose.

    >>> start, later = (Best(step=step, score=0.5, saved=None) for step in (0, 5))
    >>> is_better(0.5, 5, start), is_better(0.5, 10, later)
    (True, False)
    """
    if best is None or score > best.score:
        return True
    return score == best.score and best.step == 0 < step
