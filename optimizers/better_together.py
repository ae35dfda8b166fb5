"""BetterTogether: methods in sequence on one budget, each starting from the best configuration so far.

A stage changes only its own kind of parameters: prompts are frozen while weights are trained.
Every job of a stage is followed by an acceptance test.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pydantic import field_validator

from compound.graph.system import System
from compound.optimization.method import Job, Method, Optimizer
from compound.optimization.settings.base import MethodName, Settings
from compound.optimization.settings.optimize import OptimizeSettings
from compound.optimizers.weights.methods import InOrder

Make = Callable[[str, System, OptimizeSettings], Method]
NAME = "better_together"


class BetterTogetherSettings(Settings):
    """Settings of `better_together`. The settings of a stage are those in the section of its method."""

    stages: tuple[MethodName, ...] = ("mipro", "mmgrpo")
    """The methods to run, in order."""

    @field_validator("stages")
    @classmethod
    def _others(cls, stages: tuple[str, ...]) -> tuple[str, ...]:
        """Check that there are stages, and that none of them is this method."""
        if not stages or NAME in stages:
            raise ValueError(
                f"must name other methods, for example [mipro, mmgrpo], but is {list(stages)}"
            )
        return stages


def better_together(
    system: System, optimize: OptimizeSettings, settings: BetterTogetherSettings, make: Make
) -> Method:
    """Return the method that runs the jobs of all stages in order."""
    optimizers: dict[str, Optimizer] = {}
    jobs: list[Job] = []
    notes: dict[str, None] = {}
    sections: dict[str, Settings] = {}
    least = 0.0
    for number, stage in enumerate(settings.stages, 1):
        made = make(stage, system, optimize)
        label = f"{number} {stage}"
        optimizers |= {f"{label}/{name}": optimizer for name, optimizer in made.optimizers.items()}
        opening = (
            [replace(made.opening, weight=made.opening.weight * len(made.jobs))]
            if made.opening
            else []
        )
        jobs += [
            replace(job, optimizer=f"{label}/{job.optimizer}") for job in (*opening, *made.jobs)
        ]
        least = max(least, made.least)
        notes |= dict.fromkeys(made.notes)
        sections |= made.sections
    return Method(
        NAME,
        optimizers,
        jobs,
        InOrder(),
        least=least,
        decisions=len(jobs),
        jobs_each=1,
        notes=list(notes),
        sections=sections,
    )
