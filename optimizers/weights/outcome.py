"""The result of a training job: its evaluations, the step to propose, and their descriptions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from compound.optimization.method import ROLLOUTS, Proposal
from compound.optimizers.weights.learner.saved import Best, Saved, TrainingState

WINDOW = 0.2  # share of the steps at each end whose mean reward is compared


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
        return any(point.reward is not None for point in curve) and any(point.samples for point in curve)

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

        ``before`` and ``after`` are the scores of the starting and the proposed weights on the held-out
        examples. Without evaluations, they are the mean rewards of the first and the last rollouts. These are
        not directly comparable, since the examples differ and rollouts use their own temperature, but
        schedulers have no better estimate.

        Args:
            values: returns the weights of a checkpoint by key of the configuration.
        """
        state = self.state
        facts: dict[str, Any] = {"steps": state.step, "samples": sum(point.samples for point in state.curve)}
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
