"""Describe a training step: its line for people, the answers its record shows, why it taught nothing."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from typing import TYPE_CHECKING

from compound.optimizers.weights.learner.samples import Sample
from compound.optimizers.weights.learner.saved import Step
from compound.optimizers.weights.recipes.recipe import Recipe
from compound.optimizers.weights.step_batch import StepBatch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LETTERS = 300  # of an answer that a record shows


def format_step(step: Step) -> str:
    """Return a training step as a note.

    >>> format_step(Step(reward=0.25, samples=24, made=32))
    'mean reward 0.250, 24 of 32 samples have an advantage'
    """
    reward = "no rollouts" if step.reward is None else f"mean reward {step.reward:.3f}"
    samples, made = step.samples, step.made
    several = f"{samples} samples" if samples == made else f"{samples} of {made} samples have an advantage"
    skipped = f", {step.skipped} updates skipped: gradient not finite" if step.skipped else ""
    return f"{reward}, {several}{skipped}"


def examples_of(
    samples: Sequence[Sample], tokenizer: PreTrainedTokenizerBase
) -> dict[str, list[dict[str, str | float]]]:
    """Return, by component, the answers that earned most and least, as JSON: what there was to learn from."""
    found: dict[str, list[Sample]] = {}
    for sample in samples:
        found.setdefault(sample.component, []).append(sample)
    return {
        name: [
            {
                "example": sample.example,
                "reward": sample.reward,
                "text": tokenizer.decode(sample.tokens.sampled, skip_special_tokens=True)[:LETTERS],
            }
            for sample in {id(s): s for s in (max(own, key=_reward), min(own, key=_reward))}.values()
        ]
        for name, own in found.items()
    }


def _reward(sample: Sample) -> float:
    return sample.reward


def why_nothing(recipe: Recipe, drawn: StepBatch) -> str:
    """Return why a step has no samples."""
    facts = drawn.facts
    if facts["failed"] and facts["failed"] >= len(drawn.credited.scores):
        return f"every run failed, most often by {facts['failure']}"
    if recipe.likelihood:
        return f"no attempt earned the threshold {drawn.credited.facts['threshold']:.3g}"
    if not drawn.credited.facts.get("groups"):
        return "no run called a component that is trained"
    return "the rewards of every group were all equal"


def peak() -> float:
    """Return the most memory so far in MiB: of the device where there is one, of this process otherwise."""
    import torch

    if torch.cuda.is_available():
        return float(torch.cuda.max_memory_allocated()) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
