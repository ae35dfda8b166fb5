"""The steps of a training job: their state, samples and examples, their cost, and their outcome.

Checkpoints are compared on a held-out part of the train split. The acceptance test uses the
validation split; choosing checkpoints on the same split would bias it upward, since the maximum of
noisy scores is optimistic.
"""

from __future__ import annotations

import itertools
import json
import math
import resource
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from pydantic import ConfigDict, Field, TypeAdapter

from compound.core.example import Example
from compound.core.storage.artifacts import Reference
from compound.core.storage.state import State
from compound.execution.rng import generator
from compound.optimization.method import ROLLOUTS, Proposal, Task
from compound.optimizers.weights.learner.excerpts import TokenTexts, choose_groups, describe_groups
from compound.optimizers.weights.learner.losses import ClippedLoss
from compound.optimizers.weights.learner.samples import Sample
from compound.optimizers.weights.learner.trainer import Saved
from compound.optimizers.weights.recipes.recipe import CreditedSamples, Recipe

DRAWN = "drawn.json"  # the samples of a step that were drawn ahead
MAX_HELD_OUT = 4  # at most one in this many train examples is held out
WINDOW = 0.2  # share of the steps at each end whose mean reward is compared
SIMILARITY_TOKENS = 40  # the first tokens of answers, on which their similarity is measured


class CurvePoint(State):
    """One point of the learning curve."""

    model_config = ConfigDict(extra="ignore")  # earlier versions stored more

    reward: float | None  # mean reward of the step's rollouts; None without rollouts
    samples: int  # trained on
    made: int  # all samples, including those of skipped groups
    skipped: int = 0  # updates skipped because of a non-finite gradient
    why: str = ""  # the reason if there was nothing to train on


class Best(State):
    """The best evaluated step; step 0 and no checkpoint stand for the starting weights."""

    step: int
    score: float
    saved: Saved | None


class TrainingState(State):
    """Progress of a training job."""

    step: int = 0  # the number of completed steps
    saved: Saved | None = None  # the checkpoint of the current weights
    ahead: dict[str, str] | None = None  # the folder of the samples drawn ahead for the next step
    kept: dict[str, object] = Field(default={})  # the recipe's state between steps, as JSON
    curve: list[CurvePoint] = Field(default=[])  # the learning curve: one entry per completed step
    # the most system runs of any step, if it had drawn the maximum number of examples
    max_runs: float = 0.0
    # each evaluated step with its score
    evaluated: list[tuple[int, float | None]] = Field(default=[])
    best: Best | None = None  # the best evaluated step
    folders: list[str] = Field(default=[])  # the folders that this state needs
    folders_before: list[str] = Field(default=[])  # the folders that the previous state needed

    def evaluate(self, score: float | None) -> TrainingState:
        """Return the state after an evaluation of its step, which may be the best so far.

        Of equal steps, the earliest stays. The starting weights (step 0) stay only if they score
        strictly higher: an equal score on a few examples is no evidence against a training whose
        rewards rose.
        """
        step, best = self.step, self.best
        if score is not None and (
            best is None or score > best.score or (score == best.score and best.step == 0 < step)
        ):
            best = Best(step=step, score=score, saved=self.saved)
        return self.model_copy(update={"evaluated": [*self.evaluated, (step, score)], "best": best})

    @property
    def learned(self) -> bool:
        """Whether there were rewards, and samples to train on."""
        rewarded = any(point.reward is not None for point in self.curve)
        return rewarded and any(point.samples for point in self.curve)

    @property
    def best_evaluated(self) -> Best | None:
        """The best evaluated step, if steps were evaluated and not the start alone."""
        return self.best if len(self.evaluated) > 1 else None

    @property
    def chosen(self) -> Saved | None:
        """The checkpoint of the best step, or of the last step if steps were not evaluated.

        ``None`` stands for the starting weights.
        """
        if not self.learned:
            return None
        return best.saved if (best := self.best_evaluated) else self.saved


@dataclass(frozen=True)
class StepBatch:
    """Training data of one step."""

    credited: CreditedSamples
    facts: Mapping[str, Any]  # statistics of sampling, as JSON
    version: int = 0  # training steps of the weights that sampled the batch

    def write(self, folder: Path) -> None:
        """Write the batch to a file in ``folder``; `read` restores every number exactly."""
        kept = replace(self, credited=replace(self.credited, answers=()))
        found = TypeAdapter(StepBatch).dump_python(kept)
        (folder / DRAWN).write_text(json.dumps(found) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> StepBatch:
        """Read a batch from a folder that `write` wrote to."""
        found = json.loads((folder / DRAWN).read_text(encoding="utf-8"))
        return TypeAdapter(StepBatch).validate_python(found)


class StepPlan:
    """The examples and the cost of the steps of a job.

    Attributes:
        trained: the train examples to train on.
        held_out: those for evaluations, the same ones in all jobs.
        batch: the number of examples of a step.
        cost: the expected number of system runs of a step.
        evaluation_cost: the maximum number of system runs of an evaluation.
    """

    def __init__(self, task: Task, recipe: Recipe, components: int) -> None:
        self.task, self.recipe, settings = task, recipe, recipe.settings
        size = min(settings.evaluation.examples, len(task.train) // MAX_HELD_OUT)
        # with fewer steps than one evaluation interval, there are no checkpoints to choose among
        if not 0 < settings.evaluation.every < settings.steps:
            size = 0
        self.trained, self.held_out = split(task.train, size, task.pool_seed if size else 0)
        self.batch = min(recipe.sampling.examples, len(self.trained))
        self.cost = recipe.cost(self.batch, components)
        self.evaluation_cost = recipe.evaluation_cost(len(self.held_out))

    def examples(self, number: int) -> list[Example]:
        """Return the examples of a step; each epoch goes through all train examples in a new order."""
        train, first = self.trained, number * self.batch
        found = []
        for place in range(first, first + self.batch):
            epoch, at = divmod(place, len(train))
            order = generator(self.task.seed, "epoch", epoch).permutation(len(train))
            found.append(train[order[at]])
        # a batch that spans two epochs may contain an example twice
        return list({example.id: example for example in found}.values())

    def affords(self, number: int, max_runs: float, evaluations: int = 0) -> bool:
        """Return whether steps remain, and the job's share of the budget covers the next one."""
        # + 1: a whole run is reserved even for the last run of a step, of which only a part may be
        # charged; fractions of runs are summed
        needed = self.cost if max_runs <= self.cost + 1e-9 else max_runs + 1.0
        held = evaluations * self.evaluation_cost
        return number < self.recipe.settings.steps and self.task.scorer.runs_left >= needed + held

    def max_runs(self, number: int, drawn: StepBatch) -> float:
        """Return the system runs of a step like a given one that draws the maximum number of examples."""
        runs: float = drawn.facts["runs"]
        return runs * self.batch / len(self.examples(number))

    def has_next_step(self, state: TrainingState) -> bool:
        """Return whether another step follows: its samples are already drawn, or the budget covers it.

        If steps are evaluated, the budget must also cover the evaluation of the step.
        """
        evaluations = bool(state.evaluated)
        return state.ahead is not None or self.affords(state.step, state.max_runs, evaluations)

    def is_evaluation_due(self, state: TrainingState) -> bool:
        """Return whether the weights of a state must be evaluated before the next step.

        The starting weights are evaluated if the budget covers enough steps to choose among, then
        the weights of every `evaluation.every`-th step and of the last step.
        """
        every, step = self.recipe.settings.evaluation.every, state.step
        if not self.held_out:
            return False
        if not state.evaluated:
            # three evaluations: of the starting weights, of step `every`, and of the last step
            enough = (every + 1) * self.cost + 3 * self.evaluation_cost
            return step == 0 and self.task.scorer.runs_left >= enough
        if state.evaluated[-1][0] == step or self.task.scorer.runs_left < self.evaluation_cost:
            return False
        return step % every == 0 or not self.has_next_step(state)


def split(train: Sequence[Example], size: int, seed: int) -> tuple[list[Example], list[Example]]:
    """Hold out ``size`` train examples; equal seeds hold out the same examples in all jobs."""
    aside = set(generator(seed, "held out").permutation(len(train))[:size].tolist())
    trained = [example for place, example in enumerate(train) if place not in aside]
    return trained, [train[place] for place in sorted(aside)]


# -- outcome -------------------------------------------------------------------------------------


def describe_evaluation(state: TrainingState, held_out: int) -> tuple[str, dict[str, Any]]:
    """Return the progress note and the facts of the last evaluation, on some held-out examples."""
    (step, score), best = state.evaluated[-1], state.best
    note = "not evaluated: every run was lost to transient errors"
    if score is not None and best is not None:
        note = f"score {score:.3f} on {held_out} held-out train examples; "
        note += f"best so far: step {best.step}"
    facts = {"step": step, "score": score, "examples": held_out}
    return note, {"evaluation": {**facts, "best": best.step if best else None}}


def make_proposal(
    state: TrainingState, recipe: Recipe, held_out: int, values: Mapping[str, object]
) -> Proposal:
    """Propose the values of the best step, as `TrainingState.chosen` defines it.

    ``before`` and ``after`` are the scores of the starting and the proposed weights on the held-out
    examples. Without evaluations, they are the mean rewards of the first and the last rollouts.
    These are not directly comparable, since the examples differ and rollouts use their own
    temperature, but schedulers have no better estimate.
    """
    samples = sum(point.samples for point in state.curve)
    facts: dict[str, Any] = {"steps": state.step, "samples": samples}
    if not state.learned:
        whys = Counter(point.why for point in state.curve if point.why)
        why = whys.most_common(1)[0][0] if whys else "the budget does not cover one step"
        return Proposal(values, note=f"nothing to learn from: {why}", facts=facts)
    curve = [point.reward for point in state.curve if point.reward is not None]
    few = max(1, round(WINDOW * len(curve)))
    before, after = fmean(curve[:few]), fmean(curve[-few:])
    kind = "local reward of answers" if recipe.local else "reward of rollouts"
    done, steps = state.step, recipe.settings.steps
    part = "steps" if done == steps else f"of {steps} steps (the job's budget is used up)"
    note = f"{done} {part}: mean {kind} {before:.3f} -> {after:.3f}"
    scores: dict[str, float] = {}
    if best := state.best_evaluated:
        start, examples = state.evaluated[0][1], f"on {held_out} held-out train examples"
        if best.step == 0:
            note += (
                f"; no step scored higher than the starting weights, {best.score:.3f} {examples}"
            )
        else:
            note += f"; step {best.step} is the best of {len(state.evaluated) - 1} evaluated: "
            note += f"{best.score:.3f} {examples}"
            note += "" if start is None else f", from {start:.3f}"
        facts |= {"best_step": best.step, "evaluated": [list(pair) for pair in state.evaluated]}
        if not recipe.local and start is not None:
            scores = {"before": start, "after": best.score}
    elif not recipe.local:
        scores, facts = {"before": before, "after": after}, {**facts, ROLLOUTS: True}
    return Proposal(values, **scores, tried=state.step, note=note, facts=facts)


def format_step(step: CurvePoint) -> str:
    """Return the progress note of a training step."""
    reward = "no rollouts" if step.reward is None else f"mean reward {step.reward:.3f}"
    samples, made = step.samples, step.made
    several = f"{samples} samples" if samples == made else f"trained on {samples} of {made} samples"
    skipped = f", {step.skipped} updates skipped: gradient not finite" if step.skipped else ""
    return f"{reward}, {several}{skipped}" + (f": {step.why}" if step.why else "")


def describe_samples(
    credited: CreditedSamples, recipe: Recipe, number: int, texts: TokenTexts, logps: Sequence[Any]
) -> list[dict[str, Any]]:
    """Return the groups of a step that its record shows, as JSON.

    Of components without samples to train on, they are groups of all answers.
    """
    steps, loss = recipe.settings.steps, recipe.loss.settings
    trained = {sample.component for sample in credited.samples}
    others = [answer for answer in credited.answers if answer.component not in trained]
    groups = choose_groups(credited.samples, number, steps) + choose_groups(others, number, steps)
    bounds = loss.bounds if isinstance(loss, ClippedLoss) else (0.0, math.inf)
    return describe_groups(groups, logps, texts, recipe.sampling, bounds)


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
        for name in sorted({answer.component for answer in answers})
        if (own := [answer for answer in answers if answer.component == name])
    }


def similarity(answers: Sequence[Sequence[int]]) -> float:
    """Return the similarity of answers: the mean Jaccard index of the token sets of successive answers."""
    sets = [set(answer[:SIMILARITY_TOKENS]) for answer in answers]
    pairs = list(itertools.pairwise(sets))
    return fmean(len(a & b) / len(a | b) if a | b else 1.0 for a, b in pairs) if pairs else 1.0


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


# -- optimizer states of earlier jobs ------------------------------------------------------------

# Optimizer states persist across jobs of a run, in its memory: Adam moments and the value head,
# under the digests of the adapters that a job proposed. A later job of the same recipe that starts
# from these adapters restores them; if the proposal is rejected, they are dropped, so that those of
# the previous adapter apply.
MOMENTS = "optimizer_states"


class StoredMoments(State):
    """Reference to the optimizer states of an earlier proposal."""

    recipe: str
    adapters: dict[str, str]
    reference: dict[str, str]


def stored_moments(memory: Mapping[str, Any]) -> list[StoredMoments]:
    """Return all entries in the memory of a run."""
    return [StoredMoments.from_json(entry) for entry in memory.get(MOMENTS, [])]


def remember_moments(memory: dict[str, Any], recipe: str, saved: Saved) -> None:
    """Add the optimizer states of the checkpoint that a recipe proposes to the memory of a run."""
    digests = {name: reference["sha256"] for name, reference in saved.adapters.items() if reference}
    if digests:
        entry = StoredMoments(recipe=recipe, adapters=digests, reference=saved.optimizers)
        others = [stored for stored in stored_moments(memory) if stored != entry]
        memory[MOMENTS] = [stored.to_json() for stored in (*others, entry)]


def find_moments(
    memory: dict[str, Any], recipe: str, live: set[str], starts: Mapping[str, Reference | None]
) -> dict[str, StoredMoments]:
    """Return, by adapter name, the stored states that match the adapters a job starts from.

    States of adapters whose digests are not in the current configuration, ``live``, are removed.
    """
    kept = [each for each in stored_moments(memory) if not live.isdisjoint(each.adapters.values())]
    if MOMENTS in memory:
        memory[MOMENTS] = [stored.to_json() for stored in kept]
    return {
        name: stored
        for stored in kept
        for name, start in starts.items()
        if start and stored.recipe == recipe and stored.adapters.get(name) == start["sha256"]
    }
