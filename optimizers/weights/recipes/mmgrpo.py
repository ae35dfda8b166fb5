"""mmGRPO: whole runs, every call earns the run's reward, and calls at the same place are compared.

Groups are keyed by example, component and k-th invocation (algorithm 1 of the paper), so that prompts
within a group may differ. Runs of teachers, which are the same system with another configuration, join the
groups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal, Self

from pydantic import Field, PositiveInt, model_validator

from compound.errors import DeclarationError
from compound.example import Example
from compound.execution.schedule import values_of
from compound.graph.configuration import load
from compound.graph.system import System
from compound.optimizers.weights.credit.advantages import advantages
from compound.optimizers.weights.credit.grouping import merged, module_groups, trajectory_samples
from compound.optimizers.weights.recipes.recipe import (
    Credited,
    GroupSettings,
    PolicyRecipe,
    RecipeContext,
    Sharing,
    learnable,
    scores_of,
)
from compound.optimizers.weights.recipes.rollouts import Rollout
from compound.settings.references import ConfigurationFile


class GRPOSettings(GroupSettings):
    """How modules are trained by groups of their calls."""

    group: int | None = Field(default=None, ge=2)
    """Samples of a group, chosen for the variance of their rewards; all by default."""
    padding: Literal["fill", "truncate", "none", "dspy_fill", "dspy_fill_random"] = "fill"
    """What is done where not every run made the same number of calls: `fill` up short groups with copies of
    their own samples, `truncate` to the calls that every run made, `none`, or DSPy's ways of filling up."""
    teachers: dict[ConfigurationFile, PositiveInt] = Field(default={})
    """By configuration file, how many of the runs are made with it instead."""

    @model_validator(mode="after")
    def _learnable(self) -> Self:
        """Refuse teachers that make all runs, or whose samples are not corrected."""
        taught, runs = sum(self.teachers.values()), self.rollouts.runs
        if taught >= runs:
            raise ValueError(
                f"teachers make {taught} of {runs} runs; leave at least one to the system itself, or raise "
                "rollouts.runs"
            )
        if taught and not self.loss.settings.corrected:
            raise ValueError("samples of teachers need a correction; it is null")
        return self

    @property
    def own_runs(self) -> int:
        """How many runs of an example the system itself makes."""
        return self.rollouts.runs - sum(self.teachers.values())


class MMGRPOSettings(GRPOSettings):
    """Settings of `mmgrpo`."""

    adapters: Sharing = "each"
    """Which components share an adapter: `each` has its own, all have one, or names with their components."""


@dataclass(frozen=True)
class MMGRPO(PolicyRecipe):
    """Module-level groups of whole runs."""

    settings: GRPOSettings

    async def collect(self, context: RecipeContext, examples: Sequence[Example]) -> Credited:
        """Run every example several times, by the system and by its teachers."""
        rollouts = [
            *await context.sampler.runs(examples, range(self.settings.own_runs)),
            *await _taught(context, self.settings, examples),
        ]
        samples = [
            sample
            for rollout in learnable(rollouts)
            for sample in trajectory_samples(
                rollout.trace, context.trained,
                rollout=rollout.number, fallback=context.fallback, on_policy=not rollout.teacher,
            )
        ]  # fmt: skip
        grouped = module_groups(
            samples,
            size=self.settings.group,
            padding=self.settings.padding,
            rollouts=Counter(rollout.example.id for rollout in learnable(rollouts)),
            seed=context.seed,
        )
        trained, facts = advantages(
            merged(grouped.samples), self.settings.scale, references=grouped.references
        )
        counts = {
            "truncated": grouped.truncated,
            "deselected": grouped.deselected,
            "copies": grouped.duplicated,
        }
        return Credited(trained, scores_of(rollouts), {**asdict(facts), **counts})


async def _taught(
    context: RecipeContext, settings: GRPOSettings, examples: Sequence[Example]
) -> list[Rollout]:
    """Return the runs of teachers: the system with another configuration, on the same model."""
    found: list[Rollout] = []
    number = settings.own_runs
    for path, count in settings.teachers.items():
        teacher = context.sampler.system.bind(load(context.folder / path))
        _check_same_model(context, teacher, path)
        found += await context.sampler.runs(examples, range(number, number + count), teacher, teacher=path)
        number += count
    return found


def _check_same_model(context: RecipeContext, teacher: System, path: str) -> None:
    """Raise where a teacher's tokens would be of another vocabulary: they are trained on as they are."""
    for component in context.trained:
        own, other = (
            values_of(s.components[component], s).get("lm") for s in (context.sampler.system, teacher)
        )
        if own != other:
            raise DeclarationError(
                f"the teacher {path} answers {component!r} with {other!r}, but {own!r} is trained",
                hint="a teacher is a configuration of the same model: prompts, demonstrations, adapters",
            )
