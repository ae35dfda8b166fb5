"""Samples whose rewards flowed back through the calls of their runs, with each component's own penalty."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from compound.optimizers.weights.credit.grouping import call_samples
from compound.optimizers.weights.learner.samples import Group, Sample
from compound.optimizers.weights.recipes.recipe import Penalties, RecipeContext, learnable
from compound.optimizers.weights.recipes.rollouts import Rollout
from compound.rewards.credit.propagation import Credit, propagate

GroupOf = Callable[[Rollout, Credit], Group]


@dataclass(frozen=True)
class Earned:
    """Samples with rewards, and how large the penalties are and how many calls earned nothing."""

    samples: Sequence[Sample]
    facts: dict[str, Any]


def earned(
    context: RecipeContext, rollouts: Sequence[Rollout], group: GroupOf, penalties: Penalties
) -> Earned:
    """Return a sample for each call of trained components, once however many forks share it.

    Args:
        context: the step.
        rollouts: of one or more examples; forks of one run are among them.
        group: the group of a call, from the first rollout it is in and its credit.
        penalties: functions by component, which are added to the rewards of its calls.
    """
    by_example: dict[str, list[Rollout]] = {}
    for rollout in learnable(rollouts):
        by_example.setdefault(rollout.example.id, []).append(rollout)
    samples: list[Sample] = []
    rules, paid = context.penalties(penalties), dict[str, list[float]]()
    unreached = 0
    for example, own in by_example.items():
        found = propagate(
            [rollout.trace for rollout in own], context.trained,
            penalties=rules, fallback=context.fallback,
        )  # fmt: skip
        unreached += len(found.unreached)
        for credit in found.credits:
            first = own[credit.traces[0]]
            paid.setdefault(credit.call.component, []).append(credit.penalty)
            samples += call_samples(
                credit.call, example, credit.reward,
                rollout=first.number, group=group(first, credit),
            )  # fmt: skip
    means = {name: sum(some) / len(some) for name, some in paid.items() if name in rules}
    return Earned(samples, {"unreached": unreached, **({"penalties": means} if means else {})})
