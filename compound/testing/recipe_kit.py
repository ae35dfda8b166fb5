"""The conformance kit of training recipes."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Sequence

from compound.errors import BudgetExhausted, TooManyFailures
from compound.execution.budget import Meter
from compound.formatting import short
from compound.graph.configuration import canonical
from compound.optimizers.weights.learner.samples import Sample, SamplingSettings
from compound.optimizers.weights.learner.values import CriticSettings
from compound.optimizers.weights.loss.objective import ImitationObjective, PolicyObjective
from compound.optimizers.weights.recipes.recipe import Credited, Recipe, TrainingSettings
from compound.testing.checks import json_problem, through_json, without_global_generators
from compound.testing.recipe_job import EXAMPLES, RecipeJob, WatchedSampler

__all__ = ["RecipeKit"]

ROUNDING = 1e-6  # of a sum of shares of system runs
WORD = re.compile(rb"word\d+")  # what the examples of the job hold


class RecipeKit:
    """Checks of a training recipe: inherit it, name the class ``Test…``, and override `make`.

    Steps are made on a chain of agents without a model: see `compound.testing.RecipeJob`. Let the recipe make
    at least two runs of each example, so that there is something to compare.

    Checks:
        - ``sampling``, ``loss`` and ``critic`` are settings that agree with each other and with the samples
        - every sample belongs to a component that is trained and to an example of the step
        - its advantages are finite numbers, one for each token
        - its tokens are those that the model recorded for that component, at the temperature of ``sampling``
        - equal seeds give equal samples, and another step draws others
        - a step makes no more system runs than ``cost``, and an evaluation no more than ``evaluation_cost``
        - facts are JSON, and so is what is kept from step to step; restored, it leads to the same samples
        - a rollout that was lost to a server gives no sample and no score, and a step that is lost as a whole
          ends in `TooManyFailures` and keeps nothing
        - it neither draws from nor seeds the global generators

    The training loop begins a step where the job's share of the budget holds its ``cost``, and stops the step
    when it takes more than the share: a cost that is too low ends the job without that step.

    Attributes:
        agents: the agents of the chain, of one letter each.
        trained: those that are trained.

    Example:
        >>> from compound.optimizers.weights.recipes.mmgrpo import MMGRPO, MMGRPOSettings
        >>> from compound.testing import RecipeKit, run_kit
        >>> class TestMMGRPO(RecipeKit):
        ...     def make(self):
        ...         return MMGRPO(MMGRPOSettings(rollouts={"runs": 4}))
        >>> run_kit(TestMMGRPO)
        {}
    """

    agents: Sequence[str] = ("a", "b", "c")
    trained: Sequence[str] = ("a", "c")

    # -- hooks -----------------------------------------------------------------------------------------

    def make(self) -> Recipe:
        """Return a new recipe. Override it; all that it returns must be alike."""
        raise NotImplementedError("override make() to return the recipe to test")

    def job(self, agents: Sequence[str] | None = None) -> RecipeJob:
        """Return a job of the kit."""
        return RecipeJob(self.agents if agents is None else agents, self.trained)

    # -- checks ----------------------------------------------------------------------------------------

    def test_settings_agree(self) -> None:
        """``sampling``, ``loss`` and ``critic`` are settings, and agree with each other."""
        recipe = self.make()
        for what, value, kind in (
            ("settings", recipe.settings, TrainingSettings),
            ("sampling", recipe.sampling, SamplingSettings),
            ("loss", recipe.loss, (PolicyObjective, ImitationObjective)),
            ("critic", recipe.critic, (CriticSettings, type(None))),
        ):
            kinds = kind if isinstance(kind, tuple) else (kind,)
            names = " or ".join(each.__name__ for each in kinds)
            assert isinstance(value, kinds), f"{what} must be {names}, but is {short(value)}"
        imitates = isinstance(recipe.loss, ImitationObjective)
        assert recipe.likelihood == imitates, (
            f"likelihood is {recipe.likelihood}, but the loss is {recipe.loss.name}"
        )
        assert not (imitates and recipe.critic), (
            "a recipe that imitates samples has no use for a critic; let critic be None"
        )
        stale = recipe.sampling.max_staleness
        corrected = isinstance(recipe.loss, ImitationObjective) or recipe.loss.settings.corrected
        assert not stale or corrected, (
            f"samples may be {stale} steps old, but the loss {recipe.loss.name} corrects for none"
        )

    def test_costs_are_consistent(self) -> None:
        """They are finite, positive, and do not fall with the number of examples."""
        recipe = self.make()
        for what, costs in (
            ("cost", [recipe.cost(n, len(self.trained)) for n in (1, 2, 8)]),
            ("evaluation_cost", [recipe.evaluation_cost(n) for n in (1, 2, 8)]),
        ):
            assert all(math.isfinite(cost) and cost > 0 for cost in costs), (
                f"{what} must be a positive number, but is {costs} for 1, 2 and 8 examples"
            )
            assert costs == sorted(costs), (
                f"{what} must not fall with the number of examples, but is {costs} for 1, 2 and 8"
            )

    def test_samples_belong_to_the_step(self) -> None:
        """They are of trained components, and of the examples of the step."""
        job = self.job()
        credited = self._collected(job)
        known = {example.id for example in EXAMPLES}
        for sample in credited.samples:
            assert sample.component in self.trained, (
                f"a sample is of {sample.component!r}, which is not trained; make samples of the calls of "
                "context.trained alone"
            )
            assert sample.example in known, f"a sample is of the example {sample.example!r}, which is not one"
            read = set(WORD.findall(bytes(sample.tokens.prompt)))
            words = {
                str(example.inputs["x"]).encode() for example in EXAMPLES if example.id == sample.example
            }
            assert read <= words, (
                f"a sample of the example {sample.example!r} has a prompt with {sorted(read - words)}, which "
                "is of another example"
            )
        trained = {sample.component for sample in credited.samples}
        assert trained == set(self.trained), (
            f"{', '.join(self.trained)} are trained, but only {', '.join(sorted(trained))} has samples"
        )

    def test_samples_are_what_was_sampled(self) -> None:
        """Tokens are those that the model recorded, as rollouts sample them."""
        job, recipe = self.job(), self.make()
        credited = self._collected(job, recipe)
        temperature = recipe.sampling.temperature
        answers = {(answer.component, answer.tokens, answer.temperature) for answer in job.lm.answers}
        for sample in credited.samples:
            assert (sample.component, sample.tokens, temperature) in answers, (
                f"a sample of {sample.component!r} holds {sample.tokens!r}, which is no answer to it at the "
                f"temperature {temperature:g}; pass the token record of a call on as it is"
            )

    def test_advantages_are_finite(self) -> None:
        """There is one for each token, and values where there is a critic."""
        job, recipe = self.job(), self.make()
        credited = self._collected(job, recipe)
        for sample in credited.samples:
            _check_numbers(sample, "advantages", sample.length)
            for name in ("values", "returns"):
                _check_numbers(sample, name, sample.length if recipe.critic else 0)
            for name in ("reward", "weight"):
                value = getattr(sample, name)
                assert math.isfinite(value), f"a sample has the {name} {value}; it must be finite"
        for score in credited.scores:
            assert math.isfinite(score), f"a score of the step is {score}; it must be finite"

    def test_equal_seeds_give_equal_samples(self) -> None:
        """Two new jobs make the same step; another step is another one."""
        one, other = (self._collected(self.job()) for _ in range(2))
        for what in ("samples", "scores", "facts"):
            first, second = _plain(one, what), _plain(other, what)
            assert first == second, (
                f"two equal steps have different {what}; draw from generator(context.seed, ...) and from the "
                "sampler alone"
            )
        later = self._collected(self.job(), step=1)
        assert _plain(one, "samples") != _plain(later, "samples"), (
            "steps 0 and 1 have equal samples; make rollouts by context.sampler, whose step seeds them"
        )

    def test_system_runs_stay_within_the_cost(self) -> None:
        """A step takes no more than ``cost``, where every agent is trained and called once."""
        recipe, meter = self.make(), Meter()
        cost = recipe.cost(len(EXAMPLES), len(self.trained))
        job = self.job(self.trained)
        try:
            with meter.capped(cost):
                job.collect(recipe, meter=meter)
        except BudgetExhausted as error:
            raise AssertionError(
                f"a step of {len(EXAMPLES)} examples takes more than its cost of {cost:g} system runs; the "
                "training loop gives it no more, so return the most that it takes"
            ) from error
        assert meter.system_runs <= cost + ROUNDING, (
            f"a step took {meter.system_runs:g} system runs, but its cost is {cost:g}"
        )

    def test_an_evaluation_stays_within_its_cost(self) -> None:
        """It gives finite scores, and takes no more than ``evaluation_cost``."""
        recipe, meter = self.make(), Meter()
        cost = recipe.evaluation_cost(len(EXAMPLES))
        context = self.job().context(recipe, meter=meter)
        scores = asyncio.run(recipe.evaluate(context, {}, EXAMPLES))
        assert scores, "an evaluation of examples that all succeed has no score"
        assert all(math.isfinite(score) for score in scores), f"the scores of an evaluation are {scores}"
        assert meter.system_runs <= cost + ROUNDING, (
            f"an evaluation of {len(EXAMPLES)} examples took {meter.system_runs:g} system runs, but "
            f"evaluation_cost is {cost:g}"
        )

    def test_facts_are_json(self) -> None:
        """The record of a step can be stored."""
        credited = self._collected(self.job())
        problem = json_problem(dict(credited.facts))
        assert not problem, f"the facts of a step must be JSON, but {problem}"

    def test_what_is_kept_restores(self) -> None:
        """The next step is the same after an interruption, with a new recipe and what was kept as JSON."""
        job, recipe = self.job(), self.make()
        job.collect(recipe)
        problem = json_problem(job.kept)
        assert not problem, (
            f"recipes keep JSON, but {problem}; use context.recall and context.keep with a State"
        )
        restored = self.job()
        kept = through_json(job.kept)
        assert isinstance(kept, dict)
        restored.kept.update(kept)
        whole, later = job.collect(recipe, step=1), restored.collect(self.make(), step=1)
        for what in ("samples", "scores", "facts"):
            assert _plain(whole, what) == _plain(later, what), (
                f"after an interruption the next step has other {what}; keep what later steps depend on by "
                "context.keep, and nothing in the recipe"
            )
        assert canonical(job.kept) == canonical(restored.kept), (
            f"after an interruption the recipe keeps {short(restored.kept)} instead of {short(job.kept)}"
        )

    def test_lost_rollouts_teach_nothing(self) -> None:
        """A rollout that a server lost says nothing of the weights: it gives no sample and no score."""
        recipe, job = self.make(), self.job()
        whole = self._collected(self.job(), recipe)
        job.lm.gone[self.trained[-1]] = 1
        context = job.context(recipe)
        found = asyncio.run(recipe.collect(context, EXAMPLES))
        sampler = context.sampler
        assert isinstance(sampler, WatchedSampler)
        if not sampler.rollouts:  # it samples in another way: what was lost is missing
            assert len(found.samples) < len(whole.samples), (
                "one answer was lost, but the step has as many samples as without"
            )
            return
        lost = {(rollout.example.id, rollout.number) for rollout in sampler.rollouts if rollout.lost}
        assert lost, "no rollout of the step was lost; make rollouts by context.sampler"
        taught = [sample for sample in found.samples if (sample.example, sample.rollout) in lost]
        assert not taught, (
            f"{len(taught)} samples are of a rollout that was lost to a server; leave such rollouts out, as "
            "compound.optimizers.weights.recipes.recipe.learnable does"
        )
        assert len(found.scores) <= len(sampler.rollouts) - len(lost), (
            f"{len(lost)} of {len(sampler.rollouts)} rollouts were lost, but the step has "
            f"{len(found.scores)} scores; leave those of lost rollouts out"
        )

    def test_a_lost_step_ends(self) -> None:
        """Where every request is lost, there is an error, and nothing is kept."""
        job = self.job()
        job.lm.gone.update(dict.fromkeys(self.agents, 10**6))
        try:
            credited = job.collect(self.make())
        except TooManyFailures:
            assert not job.kept, (
                f"every request was lost, but the recipe keeps {short(job.kept)}; keep nothing before the "
                "step is made"
            )
            return
        raise AssertionError(
            f"every request was lost, but the step has {len(credited.samples)} samples and no error; make "
            "rollouts by context.sampler, which raises TooManyFailures"
        )

    def test_global_generators_are_not_used(self) -> None:
        """It neither draws from nor seeds them."""
        recipe, job = self.make(), self.job()
        with without_global_generators("the recipe"):
            job.collect(recipe)

    # -- parts -----------------------------------------------------------------------------------------

    def _collected(self, job: RecipeJob, recipe: Recipe | None = None, step: int = 0) -> Credited:
        """Return a step that has samples."""
        credited = job.collect(recipe or self.make(), step=step)
        assert credited.samples, (
            "the step has no sample, so that nothing is tested; let make() return a recipe that learns from "
            "rewards of 0.0 to 0.9"
        )
        return credited


def _check_numbers(sample: Sample, name: str, count: int) -> None:
    """Check that a sample has so many finite numbers."""
    numbers = getattr(sample, name)
    assert len(numbers) == count, (
        f"a sample of {count} tokens has {len(numbers)} {name}"
        if count
        else (f"a sample has {name}, but the recipe has no critic")
    )
    wrong = [number for number in numbers if not math.isfinite(number)]
    assert not wrong, f"{name} of a sample hold {wrong[0]}; they must be finite"


def _plain(credited: Credited, what: str) -> object:
    """Return a part of a step for comparison."""
    value = getattr(credited, what)
    return canonical(dict(value)) if what == "facts" else list(value)
