"""Describe a training step: its progress note, example answers for its record, and why it had no samples."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING

from compound.optimizers.weights.learner.samples import Sample
from compound.optimizers.weights.learner.saved import Step
from compound.optimizers.weights.recipes.recipe import Recipe
from compound.optimizers.weights.step_batch import StepBatch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_CHARACTERS = 300  # of an answer in a record


def format_step(step: Step) -> str:
    """Return the progress note of a training step.

    >>> format_step(Step(reward=0.25, samples=24, made=32))
    'mean reward 0.250, trained on 24 of 32 samples'
    """
    reward = "no rollouts" if step.reward is None else f"mean reward {step.reward:.3f}"
    samples, made = step.samples, step.made
    several = f"{samples} samples" if samples == made else f"trained on {samples} of {made} samples"
    skipped = f", {step.skipped} updates skipped: gradient not finite" if step.skipped else ""
    refilled = f", {step.refilled} further examples drawn" if step.refilled else ""
    return f"{reward}, {several}{refilled}{skipped}"


def examples_of(
    samples: Sequence[Sample], tokenizer: PreTrainedTokenizerBase
) -> dict[str, list[dict[str, str | float]]]:
    """Return, by component, the answers with the highest and the lowest reward, as JSON."""
    reward = attrgetter("reward")
    by_component: dict[str, list[Sample]] = {}
    for sample in samples:
        by_component.setdefault(sample.component, []).append(sample)
    return {
        name: [
            {
                "example": sample.example,
                "reward": sample.reward,
                "text": tokenizer.decode(sample.tokens.sampled, skip_special_tokens=True)[:MAX_CHARACTERS],
            }
            # one entry if the best and the worst answer are the same sample
            for sample in {id(s): s for s in (max(own, key=reward), min(own, key=reward))}.values()
        ]
        for name, own in by_component.items()
    }


def reason_without_samples(recipe: Recipe, drawn: StepBatch) -> str:
    """Return why a step has no samples to train on; recipes of users may state no facts."""
    facts, credited = drawn.facts, drawn.credited
    if facts["failed"] and facts["failed"] >= len(credited.scores):
        return f"every run failed, most often with {facts['failure']}"
    if credited.samples:
        return "every answer was excluded: longer than max_length with its prompt, or masked as truncated"
    if "threshold" in credited.facts:
        return f"no attempt reached the threshold {credited.facts['threshold']:.3g}"
    if recipe.likelihood:
        return "the recipe returned no samples to imitate"
    if not credited.facts.get("groups"):
        return "no run called a trained component"
    return "all rewards within each group were equal"


def peak_memory() -> float:
    """Return the peak memory so far in MiB: of the GPU if there is one, otherwise of this process."""
    import torch

    if torch.cuda.is_available():
        return float(torch.cuda.max_memory_allocated()) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
