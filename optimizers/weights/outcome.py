"""Results of training steps and of a job: the step to propose, statistics, and descriptions."""

from __future__ import annotations

import itertools
import resource
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any

from compound.optimization.method import ROLLOUTS, Proposal
from compound.optimizers.weights.learner.samples import Sample
from compound.optimizers.weights.learner.saved import Best, CurvePoint, Saved, TrainingState
from compound.optimizers.weights.recipes.recipe import Recipe
from compound.optimizers.weights.steps import StepBatch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WINDOW = 0.2  # share of the steps at each end whose mean reward is compared


def is_better(score: float, step: int, best: Best | None) -> bool:
    """Return whether an evaluated step replaces the best step so far.

    Of equal steps, the earliest stays. The starting weights (step 0) stay only if they score
    strictly higher: an equal score on a few examples is no evidence against a training whose
    rewards rose.

    >>> start, later = (Best(step=step, score=0.5, saved=None) for step in (0, 5))
    >>> is_better(0.5, 5, start), is_better(0.5, 10, later)
    (True, False)
    """
    if best is None or score > best.score:
        return True
    return score == best.score and best.step == 0 < step


@dataclass(frozen=True)
class Outcome:
    """The result of a training job in a state.

    Attributes:
        state: the state.
        steps: the number of steps that the settings require.
        held_out: the number of train examples that evaluate steps.
        local: whether rewards are local rewards of answers; they are not scores of runs.
    """

    state: TrainingState
    steps: int
    held_out: int
    local: bool = False

    def evaluation(self) -> dict[str, float | None]:
        """Return the last evaluation, as JSON."""
        step, score = self.state.evaluated[-1]
        best = self.state.best.step if self.state.best else None
        return {"step": step, "score": score, "examples": self.held_out, "best": best}

    def format_evaluation(self) -> str:
        """Return the progress note of the last evaluation.

        >>> state = TrainingState(evaluated=[(0, 0.25)], best=Best(step=0, score=0.25, saved=None))
        >>> Outcome(state, steps=8, held_out=40).format_evaluation()
        'score 0.250 on 40 held-out train examples; best so far: step 0'
        """
        _, score = self.state.evaluated[-1]
        if score is None or self.state.best is None:
            return "not evaluated: every run was lost to transient errors"
        return (
            f"score {score:.3f} on {self.held_out} held-out train examples; "
            f"best so far: step {self.state.best.step}"
        )

    @property
    def learned(self) -> bool:
        """Whether there were rewards, and samples to train on."""
        curve = self.state.curve
        return any(point.reward is not None for point in curve) and any(
            point.samples for point in curve
        )

    @property
    def chosen(self) -> Saved | None:
        """The checkpoint of the best step, or of the last step if steps were not evaluated.

        ``None`` stands for the starting weights.
        """
        if not self.learned:
            return None
        return best.saved if (best := self._best) else self.state.saved

    def proposal(self, values: Callable[[Saved | None], Mapping[str, object]]) -> Proposal:
        """Propose the weights of `chosen`.

        ``before`` and ``after`` are the scores of the starting and the proposed weights on the
        held-out examples. Without evaluations, they are the mean rewards of the first and the last
        rollouts. These are not directly comparable, since the examples differ and rollouts use
        their own temperature, but schedulers have no better estimate.

        Args:
            values: returns the weights of a checkpoint by key of the configuration.
        """
        state = self.state
        facts: dict[str, Any] = {
            "steps": state.step,
            "samples": sum(point.samples for point in state.curve),
        }
        if not self.learned:
            whys = Counter(point.why for point in state.curve if point.why)
            why = whys.most_common(1)[0][0] if whys else "the budget does not cover one step"
            return Proposal(values(None), note=f"nothing to learn from: {why}", facts=facts)
        curve = [point.reward for point in state.curve if point.reward is not None]
        few = max(1, round(WINDOW * len(curve)))
        before, after = fmean(curve[:few]), fmean(curve[-few:])
        kind = "local reward of answers" if self.local else "reward of rollouts"
        note = f"{self._describe_steps()}: mean {kind} {before:.3f} -> {after:.3f}"
        scores: dict[str, float] = {}
        if best := self._best:
            note = f"{note}; {self._describe(best)}"
            facts |= {"best_step": best.step, "evaluated": [list(pair) for pair in state.evaluated]}
            if not self.local and state.evaluated[0][1] is not None:
                scores = {"before": state.evaluated[0][1], "after": best.score}
        elif not self.local:
            scores, facts = {"before": before, "after": after}, {**facts, ROLLOUTS: True}
        return Proposal(values(self.chosen), **scores, tried=state.step, note=note, facts=facts)

    @property
    def _best(self) -> Best | None:
        """The best evaluated step, if steps were evaluated and not the start alone."""
        return self.state.best if len(self.state.evaluated) > 1 else None

    def _describe_steps(self) -> str:
        """Return the number of completed steps, and why there were no more."""
        if self.state.step == self.steps:
            return f"{self.state.step} steps"
        return f"{self.state.step} of {self.steps} steps (the job's budget is used up)"

    def _describe(self, best: Best) -> str:
        """Return which step is proposed and why, as part of the note."""
        examples = f"on {self.held_out} held-out train examples"
        if best.step == 0:
            return f"no step scored higher than the starting weights, {best.score:.3f} {examples}"
        start = self.state.evaluated[0][1]
        claim = f"step {best.step} is the best of {len(self.state.evaluated) - 1} evaluated: {best.score:.3f}"
        return f"{claim} {examples}" + ("" if start is None else f", from {start:.3f}")


MAX_CHARACTERS = 300  # of an answer in a record
SIMILARITY_TOKENS = 40  # the first tokens of answers, on which their similarity is measured


def format_step(step: CurvePoint) -> str:
    """Return the progress note of a training step.

    >>> format_step(CurvePoint(reward=0.25, samples=24, made=32))
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
                "text": tokenizer.decode(sample.tokens.sampled, skip_special_tokens=True)[
                    :MAX_CHARACTERS
                ],
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
