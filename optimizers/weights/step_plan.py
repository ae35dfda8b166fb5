"""Plan the steps of a training job: their examples, their evaluations, and whether the budget covers them."""

from __future__ import annotations

from dataclasses import dataclass, field

from compound.example import Example
from compound.execution.rng import generator
from compound.optimization.method import Task
from compound.optimizers.weights.learner.saved import TrainingState
from compound.optimizers.weights.recipes.recipe import Recipe
from compound.optimizers.weights.recipes.selection import Split, held_out_size, split
from compound.optimizers.weights.step_batch import StepBatch


@dataclass
class StepPlan:
    """The examples and the cost of the steps of a job.

    Attributes:
        task: the job.
        recipe: makes rollouts and assigns credit.
        components: the number of trained components.
        split: the train examples to train on, and those held out for evaluations.
        batch: the number of examples of a step.
        max_batch: the number of examples of a step if all that may be replaced are.
    """

    task: Task
    recipe: Recipe
    components: int
    split: Split = field(init=False)
    batch: int = field(init=False)
    max_batch: int = field(init=False)

    def __post_init__(self) -> None:
        train, settings = self.task.train, self.recipe.settings
        aside = held_out_size(len(train), settings.evaluation.examples, settings.evaluation.every)
        # with fewer steps than one evaluation interval, there are no checkpoints to choose among
        aside = aside if settings.steps > settings.evaluation.every else 0
        self.split = split(train, aside, self.task.pool_seed if aside else 0)
        self.batch = min(self.recipe.sampling.examples, len(self.split.trained))
        self.max_batch = min(self.recipe.sampling.max_examples, len(self.split.trained))

    def examples(self, number: int) -> list[Example]:
        """Return the examples of a step; each epoch goes through all train examples in a new order."""
        train, first = self.split.trained, number * self.batch
        found = []
        for place in range(first, first + self.batch):
            epoch, at = divmod(place, len(train))
            found.append(train[generator(self.task.seed, "epoch", epoch).permutation(len(train))[at]])
        # a batch that spans two epochs may contain an example twice
        return list({example.id: example for example in found}.values())

    def spare_examples(self, number: int) -> list[Example]:
        """Return further examples of a step, which replace examples without a gradient.

        They are drawn anew for each step, so that the examples of a step do not depend on earlier steps.
        """
        count = self.max_batch - self.batch
        if not count:
            return []
        present, train = {example.id for example in self.examples(number)}, self.split.trained
        order = generator(self.task.seed, "refill", number).permutation(len(train))
        return [train[place] for place in order if train[place].id not in present][:count]

    @property
    def cost(self) -> float:
        """Expected number of system runs of a step, if all examples that may be replaced are."""
        return self.recipe.cost(self.max_batch, self.components)

    @property
    def evaluation_cost(self) -> float:
        """Maximum number of system runs of an evaluation."""
        return self.recipe.evaluation_cost(len(self.split.held_out))

    def affords(self, number: int, max_runs: float, evaluations: int = 0) -> bool:
        """Return whether steps remain, and the job's share of the budget covers the next one.

        Args:
            number: the index of the next step.
            max_runs: the most runs of a step that the steps so far suggest; loops can raise them above the
                estimate.
            evaluations: the number of evaluations that the share must also cover.
        """
        # + 1: a whole run is reserved even for the last run of a step, of which only a part may be charged
        needed = self.cost if max_runs <= self.cost + 1e-9 else max_runs + 1.0  # fractions of runs are summed
        held = evaluations * self.evaluation_cost
        return number < self.recipe.settings.steps and self.task.scorer.runs_left >= needed + held

    def max_runs(self, number: int, drawn: StepBatch) -> float:
        """Return the system runs of a step like a given one that draws the maximum number of examples.

        Args:
            number: the index of the given step, which may have replaced fewer examples than it could.
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

        The starting weights are evaluated if the budget covers enough steps to choose among, then the weights
        of every `evaluation.every`-th step and of the last step.
        """
        every, step = self.recipe.settings.evaluation.every, state.step
        if not self.split.held_out:
            return False
        if not state.evaluated:
            # three evaluations: of the starting weights, of step `every`, and of the last step
            enough = (every + 1) * self.cost + 3 * self.evaluation_cost
            return step == 0 and self.task.scorer.runs_left >= enough
        if state.evaluated[-1][0] == step or self.task.scorer.runs_left < self.evaluation_cost:
            return False
        return step % every == 0 or not self.has_next_step(state)
