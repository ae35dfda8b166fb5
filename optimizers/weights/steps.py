"""The steps of a training job: their samples, their examples, and whether the budget covers them.

Checkpoints are compared on a held-out part of the train split. The acceptance test uses the
validation split; choosing checkpoints on the same split would bias it upward, since the maximum of
noisy scores is optimistic.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compound.core.example import Example
from compound.execution.rng import generator
from compound.optimization.method import Task
from compound.optimizers.weights.learner.samples import samples_from_json, samples_to_json
from compound.optimizers.weights.learner.saved import TrainingState
from compound.optimizers.weights.learner.trainer import StaleSamples
from compound.optimizers.weights.recipes.recipe import CreditedSamples, Recipe

DRAWN = "drawn.json"  # the samples of a step that were drawn ahead
MAX_HELD_OUT = 4  # at most one in this many train examples is held out


@dataclass(frozen=True)
class StepBatch:
    """Training data of one step.

    Attributes:
        credited: samples with advantages, and the statistics of their credit assignment.
        facts: statistics of sampling (tokens, runs, seconds, failures), as JSON.
        version: the number of training steps of the weights that sampled every group of the batch.
    """

    credited: CreditedSamples
    facts: Mapping[str, Any]
    version: int = 0

    def write(self, folder: Path) -> None:
        """Write the batch to a file in ``folder``; `read` restores every number exactly."""
        credited = self.credited
        found = {
            "samples": samples_to_json(credited.samples),
            "scores": list(credited.scores),
            "credit": dict(credited.facts),
            "facts": dict(self.facts),
            "version": self.version,
        }
        (folder / DRAWN).write_text(json.dumps(found) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path, step: int) -> StepBatch:
        """Read a batch from a folder that `write` wrote to.

        Args:
            folder: the folder.
            step: the step that the batch was drawn for. Files of version 0.3 and earlier state no
                version: their batches were drawn one step ahead.
        """
        found = json.loads((folder / DRAWN).read_text(encoding="utf-8"))
        samples = samples_from_json(found["samples"])
        credited = CreditedSamples(samples, found["scores"], found["credit"])
        return cls(credited, found["facts"], found.get("version", step - 1))

    def check_staleness(self, step: int, most: int, section: str) -> None:
        """Raise if the weights that sampled the batch are too old for a step.

        Args:
            step: the number of training steps of the current weights.
            most: the maximum number of steps that they may be ahead.
            section: the path of the training settings, for the message.

        Raises:
            StaleSamples: they are further ahead.
        """
        if step - self.version > most:
            raise StaleSamples(
                f"the samples of step {step + 1} were drawn with the weights of step {self.version}, which "
                f"are {step - self.version} steps old, but {section}.rollouts.max_staleness is {most}",
                hint=f"set {section}.rollouts.max_staleness to {step - self.version}, or start a new run",
            )


@dataclass
class StepPlan:
    """The examples and the cost of the steps of a job.

    Attributes:
        task: the job.
        recipe: makes rollouts and assigns credit.
        components: the number of trained components.
        trained: the train examples to train on.
        held_out: those held out for evaluations; equal seeds hold out the same ones in all jobs.
        batch: the number of examples of a step.
        max_batch: the number of examples of a step if all that may be replaced are.
    """

    task: Task
    recipe: Recipe
    components: int
    trained: list[Example] = field(init=False)
    held_out: list[Example] = field(init=False)
    batch: int = field(init=False)
    max_batch: int = field(init=False)

    def __post_init__(self) -> None:
        train, settings = self.task.train, self.recipe.settings
        size = held_out_size(len(train), settings.evaluation.examples, settings.evaluation.every)
        # with fewer steps than one evaluation interval, there are no checkpoints to choose among
        size = size if settings.steps > settings.evaluation.every else 0
        self.trained, self.held_out = split(train, size, self.task.pool_seed if size else 0)
        self.batch = min(self.recipe.sampling.examples, len(self.trained))
        self.max_batch = min(self.recipe.sampling.max_examples, len(self.trained))

    def examples(self, number: int) -> list[Example]:
        """Return the examples of a step; each epoch goes through all train examples in a new order."""
        train, first = self.trained, number * self.batch
        found = []
        for place in range(first, first + self.batch):
            epoch, at = divmod(place, len(train))
            found.append(
                train[generator(self.task.seed, "epoch", epoch).permutation(len(train))[at]]
            )
        # a batch that spans two epochs may contain an example twice
        return list({example.id: example for example in found}.values())

    def spare_examples(self, number: int) -> list[Example]:
        """Return further examples of a step, which replace examples without a gradient.

        They are drawn anew for each step, so that the examples of a step do not depend on earlier
        steps.
        """
        count = self.max_batch - self.batch
        if not count:
            return []
        present, train = {example.id for example in self.examples(number)}, self.trained
        order = generator(self.task.seed, "refill", number).permutation(len(train))
        return [train[place] for place in order if train[place].id not in present][:count]

    @property
    def cost(self) -> float:
        """Expected number of system runs of a step, if all examples that may be replaced are."""
        return self.recipe.cost(self.max_batch, self.components)

    @property
    def evaluation_cost(self) -> float:
        """Maximum number of system runs of an evaluation."""
        return self.recipe.evaluation_cost(len(self.held_out))

    def affords(self, number: int, max_runs: float, evaluations: int = 0) -> bool:
        """Return whether steps remain, and the job's share of the budget covers the next one.

        Args:
            number: the index of the next step.
            max_runs: the most runs of a step that the steps so far suggest; loops can raise them
                above the estimate.
            evaluations: the number of evaluations that the share must also cover.
        """
        # + 1: a whole run is reserved even for the last run of a step, of which only a part may be
        # charged
        needed = (
            self.cost if max_runs <= self.cost + 1e-9 else max_runs + 1.0
        )  # fractions of runs are summed
        held = evaluations * self.evaluation_cost
        return number < self.recipe.settings.steps and self.task.scorer.runs_left >= needed + held

    def max_runs(self, number: int, drawn: StepBatch) -> float:
        """Return the system runs of a step like a given one that draws the maximum number of examples.

        Args:
            number: the index of the given step, which may have replaced fewer examples than it
                could.
            drawn: its samples.
        """
        examples: int = len(self.examples(number)) + drawn.credited.facts.get("refilled", 0)
        runs: float = drawn.facts["runs"]
        return runs * max(1.0, self.max_batch / examples)

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


def held_out_size(examples: int, wanted: int, every: int) -> int:
    """Return the number of train examples to hold out.

    >>> [held_out_size(examples, 16, every) for examples, every in ((100, 5), (20, 5), (3, 5), (100, 0))]
    [16, 5, 0, 0]
    """
    return min(wanted, examples // MAX_HELD_OUT) if every else 0


def split(train: Sequence[Example], size: int, seed: int) -> tuple[list[Example], list[Example]]:
    """Hold out ``size`` train examples; equal seeds hold out the same examples in all jobs."""
    aside = set(generator(seed, "held out").permutation(len(train))[:size].tolist())
    trained = [example for place, example in enumerate(train) if place not in aside]
    return trained, [train[place] for place in sorted(aside)]
