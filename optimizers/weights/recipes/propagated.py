"""Samples with rewards propagated back through the calls of their runs, plus the components' penalties."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from compound.optimizers.weights.credit.grouping import call_samples
from compound.optimizers.weights.credit.propagation import Credit, propagate
from compound.optimizers.weights.learner.samples import Group, Sample
from compound.optimizers.weights.recipes.recipe import Penalties, RecipeContext, learnable
from compound.optimizers.weights.recipes.rollouts import Rollout

GroupOf = Callable[[Rollout, Credit], Group]


@dataclass(frozen=True)
class PropagatedSamples:
    """Samples with propagated rewards.

    Attributes:
        samples: the samples.
        facts: the mean penalty of each component, and the number of calls that no reward reached, as JSON.
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
            [rollout.trace for rollout in own], context.trained,
            penalties=rules, fallback=context.fallback,
        )  # fmt: skip
        unreached += len(propagated.unreached)
        for credit in propagated.credits:
            first = own[credit.traces[0]]
            paid.setdefault(credit.call.component, []).append(credit.penalty)
            samples += call_samples(
                credit.call, example, credit.reward,
                rollout=first.number, group=group(first, credit),
            )  # fmt: skip
    means = {name: sum(some) / len(some) for name, some in paid.items() if name in rules}
    return PropagatedSamples(samples, {"unreached": unreached, **({"penalties": means} if means else {})})
