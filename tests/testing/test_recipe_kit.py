"""The kit of recipes catches each kind of wrong recipe by the check that is meant for it."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import pytest

from compound import Example
from compound.execution.rng import generator
from compound.ext import Recipe, State
from compound.optimizers.weights.credit import trajectory_samples
from compound.optimizers.weights.learner.losses import ImitationObjective, PolicyObjective
from compound.optimizers.weights.learner.samples import Sample
from compound.optimizers.weights.learner.updates import CriticSettings
from compound.optimizers.weights.recipes.recipe import (
    CreditedSamples,
    PolicyRecipe,
    PolicySettings,
    RecipeContext,
    learnable,
    scores_of,
)
from compound.optimizers.weights.recipes.rollouts import Rollout, RolloutSettings
from compound.testing import RecipeKit, run_kit


class Baseline(State):
    """The mean reward of the steps so far."""

    mean: float = 0.0
    steps: int = 0


@dataclass(frozen=True)
class Right(PolicyRecipe):
    """The plain policy gradient with a running mean as the baseline."""

    async def collect(self, context: RecipeContext, examples: Sequence[Example]) -> CreditedSamples:
        state = context.recall(Baseline)
        rollouts = await context.sampler.runs(examples, range(self.settings.rollouts.runs))
        samples = self.chosen(context, self.made(context, rollouts))
        scores = self.scores(rollouts)
        found = [self.credit(sample, state.mean) for sample in samples]
        self.keep(context, state, scores)
        return CreditedSamples(found, scores, self.facts(state))

    def made(self, context: RecipeContext, rollouts: Sequence[Rollout]) -> list[Sample]:
        return [sample for rollout in learnable(rollouts) for sample in self.of(context, rollout)]

    def of(self, context: RecipeContext, rollout: Rollout) -> Sequence[Sample]:
        return trajectory_samples(
            rollout.trace, context.trained, rollout=rollout.number, fallback=context.fallback
        )

    def chosen(self, context: RecipeContext, samples: Sequence[Sample]) -> Sequence[Sample]:
        return [samples[i] for i in generator(context.seed, "order").permutation(len(samples))]

    def credit(self, sample: Sample, mean: float) -> Sample:
        return sample.with_advantage(sample.reward - mean)

    def scores(self, rollouts: Sequence[Rollout]) -> list[float]:
        return scores_of(rollouts)

    def keep(self, context: RecipeContext, state: Baseline, scores: Sequence[float]) -> None:
        if scores:
            mean = (state.mean * state.steps + fmean(scores)) / (state.steps + 1)
            context.keep(Baseline(mean=mean, steps=state.steps + 1))

    def facts(self, state: Baseline) -> Mapping[str, Any]:
        return {"mean": state.mean}


SETTINGS = PolicySettings(rollouts=RolloutSettings(runs=3))


def failures(recipe: Callable[[Any], Any], **attributes: Any) -> dict[str, str]:
    return run_kit(
        type("TestIt", (RecipeKit,), {"make": lambda self: recipe(SETTINGS), **attributes})
    )


def test_a_right_recipe_passes() -> None:
    assert failures(Right) == {}
    assert failures(Right, agents="ab", trained="b") == {}


def wrong(**attributes: Any) -> Callable[[Any], Any]:
    return dataclass(frozen=True)(type("Wrong", (Right,), {"__annotations__": {}, **attributes}))


def prepared(prepare: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a variant that changes the context of a step, or returns another one, before it collects."""

    async def collect(self: Any, context: RecipeContext, examples: Any) -> CreditedSamples:
        return await Right.collect(self, prepare(context) or context, examples)

    return wrong(collect=collect)


def of_everyone(self: Any, context: RecipeContext, rollout: Rollout) -> Sequence[Sample]:
    everyone = list(context.sampler.system.components)
    return trajectory_samples(
        rollout.trace, everyone, rollout=rollout.number, fallback=context.fallback
    )


def retokenized(self: Any, sample: Sample, mean: float) -> Sample:
    tokens = replace(sample.tokens, sampled=(*sample.tokens.sampled, 0), logprobs=(-1.0, -1.0))
    return replace(sample, tokens=tokens).with_advantage(sample.reward)


def numbered(context: Any) -> Any:
    seen = context.state.setdefault("seen", {})  # its keys become texts
    seen[context.sampler.step] = len(seen)
    return replace(context, state={})


def frozen(context: Any) -> Any:
    context.sampler.step = 0
    return replace(context, seed=0)


def labelled(example: str) -> Callable[[Any], Any]:
    return wrong(chosen=lambda self, _, samples: [replace(s, example=example) for s in samples])


class Dear(Right):
    async def collect(self, context: RecipeContext, examples: Sequence[Example]) -> CreditedSamples:
        await context.sampler.runs(examples[:1], [99])
        return await super().collect(context, examples)


class Evaluates(Right):
    async def evaluate(
        self, context: RecipeContext, values: Any, examples: Sequence[Example]
    ) -> list[float]:
        return scores_of(await context.sampler.runs(examples, range(2)))


@dataclass(frozen=True)
class Holds(Right):
    """Keeps its baseline in itself."""

    means: list[float] = field(default_factory=list)

    def keep(self, context: RecipeContext, state: Baseline, scores: Sequence[float]) -> None:
        self.means.append(fmean(scores))

    def credit(self, sample: Sample, mean: float) -> Sample:
        return super().credit(sample, self.means[-1] if self.means else 0.0)


Everyone = wrong(of=of_everyone)
OneAlone = wrong(
    chosen=lambda self, context, samples: [
        sample for sample in samples if sample.component == context.trained[-1]
    ]
)
Exchanged, Unknown = labelled("e0"), labelled("")
Empty = wrong(chosen=lambda self, _context, _samples: [])
Retokenized = wrong(credit=retokenized)
Cold = prepared(lambda c: setattr(c.sampler, "rules", replace(c.sampler.rules, settings={})))
Divides = wrong(credit=lambda self, sample, _: sample.with_advantage(math.inf))
Unweighed = wrong(credit=lambda self, sample, _: replace(sample, advantages=()))
Valued = wrong(credit=lambda self, s, _: replace(s.with_advantage(s.reward), values=(0.0,)))
NoValues = wrong(critic=CriticSettings())
Unlucky = wrong(chosen=lambda self, _, samples: random.sample(samples, len(samples)))
Frozen = prepared(frozen)
Objects = wrong(keep=lambda self, context, *_: context.state.update(seen={1, 2}))
Numbers = prepared(numbered)
Greedy = wrong(made=lambda self, c, rollouts: [s for each in rollouts for s in self.of(c, each)])
Scored = wrong(scores=lambda self, rollouts: [rollout.score for rollout in rollouts])
Stubborn = prepared(lambda c: setattr(c.sampler, "rules", replace(c.sampler.rules, max_failed=1.0)))
Early = prepared(lambda c: c.keep(c.recall(Baseline)))

AGREE = "test_settings_agree"
COSTS = "test_costs_are_consistent"
BELONG = "test_samples_belong_to_the_step"
SAMPLED = "test_samples_are_what_was_sampled"
FINITE = "test_advantages_are_finite"
EQUAL = "test_equal_seeds_give_equal_samples"
COST = "test_system_runs_stay_within_the_cost"
EVALUATION = "test_an_evaluation_stays_within_its_cost"
KEPT = "test_what_is_kept_restores"
LOST = "test_lost_rollouts_teach_nothing"
ENDS = "test_a_lost_step_ends"
GLOBAL = "test_global_generators_are_not_used"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "check", "message"),
    [
        (wrong(sampling={}), AGREE, "sampling must be SamplingSettings, but is {}"),
        (wrong(loss="grpo"), AGREE, "loss must be PolicyObjective or ImitationObjective, but is"),
        (wrong(critic=True), AGREE, "critic must be CriticSettings or NoneType, but is True"),
        (wrong(likelihood=True), AGREE, "likelihood is True, but the loss is grpo"),
        (wrong(loss=ImitationObjective(), critic=CriticSettings()), AGREE, "does not use a critic"),
        (
            wrong(
                sampling=RolloutSettings(max_staleness=2),
                loss=PolicyObjective.model_validate({"grpo": {"correction": None}}),
            ),
            AGREE,
            "has no off-policy correction",
        ),
        (wrong(cost=lambda self, examples, components: 0.0), COSTS, "cost must be a positive"),
        (wrong(cost=lambda self, examples, components: math.inf), COSTS, "cost must be a positive"),
        (
            wrong(cost=lambda self, examples, components: 9.0 / examples),
            COSTS,
            "cost must not decrease",
        ),
        (wrong(evaluation_cost=lambda self, examples: -1.0), COSTS, "evaluation_cost must be a"),
        (Everyone, BELONG, "a sample belongs to 'b', which is not trained"),
        (OneAlone, BELONG, "components are a, c, but only c has samples"),
        (Exchanged, BELONG, "a sample of the example 'e0' has a prompt with"),
        (Unknown, BELONG, "a sample belongs to the example '', which is not in the step"),
        (Empty, BELONG, "the step has no sample"),
        (Retokenized, SAMPLED, "which is not an answer to it at the temperature 1"),
        (Cold, SAMPLED, "which is not an answer to it at the temperature 1"),
        (Divides, FINITE, "advantages of a sample contain inf"),
        (Unweighed, FINITE, "a sample of 1 tokens has 0 advantages"),
        (Valued, FINITE, "a sample has values, but the recipe has no critic"),
        (NoValues, FINITE, "a sample of 1 tokens has 0 values"),
        (Unlucky, EQUAL, "two equal steps have different samples"),
        (Frozen, EQUAL, "steps 0 and 1 have equal samples"),
        (Dear, COST, "takes more than its cost of 9 system runs"),
        (Evaluates, EVALUATION, "system runs, but evaluation_cost is 3"),
        (wrong(facts=lambda self, state: {"of": {1}}), KEPT, "the facts of a step must be JSON,"),
        (Holds, KEPT, "after an interruption the next step has different samples"),
        (Objects, KEPT, "the state of a recipe must be JSON, but seen is {1, 2}"),
        (Numbers, KEPT, "the state of a recipe must be JSON, but seen has the key 0"),
        (Greedy, LOST, "samples are from a rollout that a server lost"),
        (Scored, LOST, "1 of 9 rollouts were lost, but the step has 9 scores"),
        (Stubborn, ENDS, "every request was lost, but the step has 0 samples and no error"),
        (Early, ENDS, "every request was lost, but the recipe stores"),
        (Unlucky, GLOBAL, "the global generator of random;"),
    ],
)
def test_a_wrong_recipe_is_caught(recipe: Callable[[Any], Any], check: str, message: str) -> None:
    found = failures(recipe)
    assert message in found.get(check, f"{check} passed; failed: {found}")


def test_rollouts_that_are_not_the_sampler_s_are_watched_by_their_samples() -> None:
    class Own(Right):
        """Runs the system by itself; what is lost has no sample."""

        async def collect(
            self, context: RecipeContext, examples: Sequence[Example]
        ) -> CreditedSamples:
            numbers = itertools.product(examples, range(self.settings.rollouts.runs))
            rollouts = []
            for example, number in numbers:
                trace = await context.sampler.executor.run(
                    context.sampler.system,
                    example.inputs,
                    example=example.id,
                    sample=context.sampler.index(number),
                    settings=context.sampler.rules.settings,
                )
                context.sampler.executor.settle(trace)
                context.sampler.count([trace.failure])
                if trace.failure is None:
                    rollouts.append(
                        Rollout(
                            example, trace.with_score(int(str(trace.outputs["y"])) / 10), number
                        )
                    )
            context.sampler.check_failures()
            samples = self.made(context, rollouts)
            return CreditedSamples(
                [self.credit(sample, 0.5) for sample in samples], scores_of(rollouts)
            )

    assert failures(Own) == {}

    class Failing(Own):
        def made(self, context: RecipeContext, rollouts: Sequence[Rollout]) -> list[Sample]:
            found = super().made(context, rollouts)
            return [*found, *found][: 3 * 3 * len(context.trained)]

    assert "the step has as many samples as without" in failures(Failing)[LOST]


def test_what_a_recipe_is_made_of_is_named() -> None:
    assert "override make()" in run_kit(RecipeKit)[AGREE]
    assert issubclass(Right, Recipe)


async def nothing(self: Any, context: RecipeContext, examples: Any) -> None:
    pass


async def alone(self: Any, context: RecipeContext) -> None:
    pass


async def raising(self: Any, context: RecipeContext, examples: Any) -> None:
    raise ValueError("no samples")


def at_once(self: Any, context: RecipeContext, examples: Any) -> CreditedSamples:
    return CreditedSamples([], [])


@pytest.mark.parametrize(
    ("collect", "said"),
    [
        (nothing, "collect of recipe 'Wrong' at {} returned None; write async def collect(self,"),
        (at_once, "collect of recipe 'Wrong' at {} returned CreditedSamples("),
        (alone, "collect of recipe 'Wrong' at {} has the signature (context"),
    ],
)
def test_a_collect_that_does_not_keep_to_its_role_names_the_line_and_the_fix(
    collect: Any, said: str
) -> None:
    wrong = type("Wrong", (Right,), {"collect": collect})
    found = failures(wrong)[FINITE]
    assert said.format(f"{__file__}:{collect.__code__.co_firstlineno}") in found


def test_an_exception_of_a_recipe_names_its_line() -> None:
    wrong = type("Wrong", (Right,), {"collect": raising})
    line = raising.__code__.co_firstlineno + 1
    assert failures(wrong)[FINITE] == f"ValueError: no samples ({__file__}:{line})"
