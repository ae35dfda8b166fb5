"""mmGRPO: whole runs, every call earns the run's reward, and calls at the same place are compared.

Groups are keyed by example, component and k-th invocation (algorithm 1 of the paper), so that prompts
within a group may differ. Runs of teachers, which are the same system with another configuration, join the
groups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from compound.configuration import load
from compound.contracts import Example
from compound.errors import DeclarationError
from compound.optimizers.policy.advantages import advantages
from compound.optimizers.policy.grouping import merged, module_groups, trajectory_samples
from compound.optimizers.policy.recipe import Credited, Recipe, Work, learnable, scores_of
from compound.optimizers.policy.rollouts import Rollout
from compound.plan import values_of
from compound.settings import WeightSettings
from compound.system import System


@dataclass(frozen=True)
class MMGRPO(Recipe):
    """Module-level groups of whole runs."""

    async def collect(self, work: Work, examples: Sequence[Example]) -> Credited:
        """Run every example several times, by the system and by its teachers."""
        rollouts = [
            *await work.sampler.runs(examples, range(_own(work.settings))),
            *await _taught(work, examples),
        ]
        samples = [
            sample
            for rollout in learnable(rollouts)
            for sample in trajectory_samples(
                rollout.trace, work.trained,
                rollout=rollout.number, fallback=work.fallback, on_policy=not rollout.teacher,
            )
        ]  # fmt: skip
        grouped = module_groups(
            samples,
            size=work.settings.group,
            padding=work.settings.padding,
            rollouts=Counter(rollout.example.id for rollout in learnable(rollouts)),
            seed=work.seed,
        )
        trained, facts = advantages(
            merged(grouped.samples), work.settings.scale, references=grouped.references
        )
        counts = {
            "truncated": grouped.truncated,
            "deselected": grouped.deselected,
            "copies": grouped.duplicated,
        }
        return Credited(trained, scores_of(rollouts), {**asdict(facts), **counts})


def _own(settings: WeightSettings) -> int:
    """Return how many runs of an example the system itself makes.

    Raises:
        DeclarationError: teachers would make all of them, and the system none.
    """
    own = settings.runs - sum(settings.teachers.values())
    if own < 1:
        raise DeclarationError(
            f"optimize.weights.teachers make {sum(settings.teachers.values())} of {settings.runs} runs",
            hint="leave at least one to the system itself, or raise optimize.weights.runs",
        )
    return own


async def _taught(work: Work, examples: Sequence[Example]) -> list[Rollout]:
    """Return the runs of teachers: the system with another configuration, on the same model."""
    found: list[Rollout] = []
    number = _own(work.settings)
    for path, count in work.settings.teachers.items():
        teacher = work.sampler.system.bind(load(work.folder / path))
        _refuse_another_model(work, teacher, path)
        found += await work.sampler.runs(examples, range(number, number + count), teacher, teacher=path)
        number += count
    return found


def _refuse_another_model(work: Work, teacher: System, path: str) -> None:
    """Raise where a teacher's tokens would be of another vocabulary: they are trained on as they are."""
    for component in work.trained:
        own, other = (values_of(s.components[component], s).get("lm") for s in (work.sampler.system, teacher))
        if own != other:
            raise DeclarationError(
                f"the teacher {path} answers {component!r} with {other!r}, but {own!r} is trained",
                hint="a teacher is a configuration of the same model: prompts, demonstrations, adapters",
            )
