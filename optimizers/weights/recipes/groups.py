"""Recipes that compare the rollouts of an example, and replace examples whose rollouts give no gradient.

If all rewards within the groups of an example are equal, its rollouts have no advantage; nor do
they give a gradient if the loss excludes every answer with an advantage, because it is masked or
too long. With ``rollouts.refill`` such an example is replaced by a further one, as in the dynamic
sampling of DAPO (arXiv 2503.14476, section 3.2). Examples are replaced in rounds: a round draws one
example for each that is missing, and waits for all of its rollouts. What is drawn depends on the
answers and their rewards only, and not on the order in which rollouts finish.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from compound.core.errors import BudgetExhausted
from compound.core.example import Example
from compound.optimizers.weights.credit.grouping import MIXED, call_samples
from compound.optimizers.weights.credit.propagation import Credit, propagate
from compound.optimizers.weights.learner.samples import Group, Sample, SamplingSettings
from compound.optimizers.weights.recipes.recipe import (
    CreditedSamples,
    GroupSettings,
    Penalties,
    PolicyRecipe,
    RecipeContext,
    learnable,
)
from compound.optimizers.weights.recipes.rollouts import Rollout

NO_ADVANTAGE = 1e-9  # largest rounding error of an advantage of 0
T = TypeVar("T")


@dataclass(frozen=True)
class GroupRecipe(PolicyRecipe):
    """Base class of recipes that compare the rollouts of an example.

    Attributes:
        settings: the settings of the method.
    """

    settings: GroupSettings

    @abstractmethod
    async def draw(self, context: RecipeContext, examples: Sequence[Example]) -> list[Rollout]:
        """Make the rollouts of some examples."""

    @abstractmethod
    async def credit(self, context: RecipeContext, rollouts: Sequence[Rollout]) -> CreditedSamples:
        """Return the samples of all rollouts of the step, with advantages."""

    async def collect(self, context: RecipeContext, examples: Sequence[Example]) -> CreditedSamples:
        """Draw rollouts of the examples and, with `refill`, of further ones, and assign credit."""
        draw, credit = partial(self.draw, context), partial(self.credit, context)
        return await collect_groups(context, examples, draw, credit, self.sampling)


async def collect_groups(
    context: RecipeContext,
    examples: Sequence[Example],
    draw: Callable[[Sequence[Example]], Awaitable[Sequence[T]]],
    credit: Callable[[Sequence[T]], Awaitable[CreditedSamples]],
    sampling: SamplingSettings,
) -> CreditedSamples:
    """Return the samples of a step, in which examples without a gradient are replaced.

    Args:
        context: the inputs of the step; ``context.spare`` are the examples that may replace others.
        examples: the examples of the step.
        draw: makes the rollouts of some examples.
        credit: assigns credit to all rollouts of the step.
        sampling: which samples the loss excludes.

    Returns:
        The samples. If examples may be replaced, the facts also contain the number of examples that
        were drawn in addition (``refilled``) and of examples that give a gradient
        (``informative``).
    """
    drawn = [*await draw(examples)]
    credited = await credit(drawn)
    if not context.spare:
        return credited
    further = 0
    while (missing := len(examples) - _informative(credited, sampling)) > 0 and further < len(
        context.spare
    ):
        more = context.spare[further : further + missing]
        try:
            made = [*drawn, *await draw(more)]
            credited = await credit(made)
        except BudgetExhausted:  # the step keeps the examples that were drawn before
            break
        drawn, further = made, further + len(more)
    counts = {"refilled": further, "informative": _informative(credited, sampling)}
    return replace(credited, facts={**credited.facts, **counts})


def _informative(credited: CreditedSamples, sampling: SamplingSettings) -> int:
    """Return the number of examples that give a gradient.

    The loss must learn from an answer that has an advantage in a group of the example's own
    rollouts. Masked answers count in the statistics of their group, so the others may differ from
    its mean, or not.
    """
    return len(
        {
            sample.example
            for sample in credited.samples
            if sample.group[:1] != (MIXED,)
            and sampling.learns_from(sample)
            and any(abs(advantage) > NO_ADVANTAGE for advantage in sample.advantages)
        }
    )


GroupOf = Callable[[Rollout, Credit], Group]


@dataclass(frozen=True)
class PropagatedSamples:
    """Samples with propagated rewards.

    Attributes:
        samples: the samples.
        facts: the mean penalty of each component, and the number of calls that no reward reached,
            as JSON.
    """

    samples: Sequence[Sample]
    facts: dict[str, Any]


def propagated_samples(
    context: RecipeContext, rollouts: Sequence[Rollout], group: GroupOf, penalties: Penalties
) -> PropagatedSamples:
    """Return the samples of each call of trained components; a call shared by several forks counts once.

    Args:
        context: the inputs of the step.
        rollouts: of one or more examples, possibly with forks of the same run.
        group: returns the group of a call, from the first rollout that contains it and its credit.
        penalties: penalty functions by component, whose values are added to the rewards of calls.
    """
    by_example: dict[str, list[Rollout]] = {}
    for rollout in learnable(rollouts):
        by_example.setdefault(rollout.example.id, []).append(rollout)
    samples: list[Sample] = []
    rules, paid = context.penalties(penalties), dict[str, list[float]]()
    unreached = 0
    for example, own in by_example.items():
        propagated = propagate(
            [rollout.trace for rollout in own],
            context.trained,
            penalties=rules,
            fallback=context.fallback,
        )
        unreached += len(propagated.unreached)
        for credit in propagated.credits:
            first = own[credit.traces[0]]
            paid.setdefault(credit.call.component, []).append(credit.penalty)
            samples += call_samples(
                credit.call,
                example,
                credit.reward,
                rollout=first.number,
                group=group(first, credit),
            )
    means = {name: sum(some) / len(some) for name, some in paid.items() if name in rules}
    return PropagatedSamples(
        samples, {"unreached": unreached, **({"penalties": means} if means else {})}
    )
