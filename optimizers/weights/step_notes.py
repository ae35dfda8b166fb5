"""Describe a training step: its progress note, its answers by component, and why it had no samples."""

from __future__ import annotations

import itertools
import resource
from collections.abc import Sequence
from operator import attrgetter
from statistics import fmean, pstdev
from typing import TYPE_CHECKING

from compound.optimizers.weights.learner.samples import Sample
from compound.optimizers.weights.learner.saved import Step
from compound.optimizers.weights.recipes.recipe import Recipe
from compound.optimizers.weights.step_batch import StepBatch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_CHARACTERS = 300  # of an answer in a record
SIMILARITY_TOKENS = 40  # the first tokens of answers, on which their similarity is measured


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
        for name, own in _by_component(samples).items()
    }


def answer_metrics(answers: Sequence[Sample]) -> dict[str, dict[str, float]]:
    """Return, by component, statistics of its answers in a step's rollouts, trained on or not, as JSON."""
    return {
        name: {
            "answers": len(own),
            "length": fmean(s.length for s in own),
            "reward": fmean(s.reward for s in own),
            "spread": pstdev(s.reward for s in own),
            "similarity": similarity([s.tokens.sampled for s in own]),
            "truncated": fmean(s.is_truncated for s in own),
        }
        for name, own in sorted(_by_component(answers).items())
    }


def similarity(answers: Sequence[Sequence[int]]) -> float:
    """Return the similarity of answers: the mean Jaccard index of the token sets of successive answers.

    >>> similarity([(1, 2), (1, 2), (1, 3)])
    0.6666666666666666
    """
    sets = [set(answer[:SIMILARITY_TOKENS]) for answer in answers]
    pairs = list(itertools.pairwise(sets))
    return fmean(len(a & b) / len(a | b) if a | b else 1.0 for a, b in pairs) if pairs else 1.0


def _by_component(samples: Sequence[Sample]) -> dict[str, list[Sample]]:
    found: dict[str, list[Sample]] = {}
    for sample in samples:
        found.setdefault(sample.component, []).append(sample)
    return found


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
