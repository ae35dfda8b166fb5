"""BetterTogether: methods in sequence on one budget, each starting from the best configuration so far.

A stage changes only its own kind of parameters: prompts are frozen while weights are trained,
unless rounds of prompt search are interleaved (`compound.optimizers.fast_slow`). Every job of a
stage is followed by an acceptance test.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pydantic import field_validator

from compound.core.errors import DeclarationError
from compound.graph.system import System
from compound.optimization.method import Job, Method, Optimizer
from compound.optimization.settings.base import MethodName, Settings
from compound.optimization.settings.optimize import OptimizeSettings
from compound.optimizers.baselines.gepa import GEPA
from compound.optimizers.fast_slow import InterleaveSettings, can_interleave, interleaved
from compound.optimizers.weights.methods import InOrder

Make = Callable[[str, System, OptimizeSettings], Method]
NAME = "better_together"


class BetterTogetherSettings(Settings):
    """Settings of `better_together`. The settings of a stage are those in the section of its method."""

    stages: tuple[MethodName, ...] = ("mipro", "mmgrpo")
    """The methods to run, in order."""
    interleave: InterleaveSettings | None = None
    """Rounds of prompt search between the training steps of `mmgrpo` and `prompt_r1` (fast-slow training);
    none by default, such that prompts are fixed while weights are trained."""

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
    interleaves = False
    for number, stage in enumerate(settings.stages, 1):
        made = make(stage, system, optimize)
        if settings.interleave and can_interleave(made):
            reflection = make("gepa", system, optimize)
            search, interleaves = reflection.optimizers["gepa"], True
            assert isinstance(search, GEPA)
            made = interleaved(made, system, settings.interleave, search, stage)
            sections |= reflection.sections
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
    if settings.interleave and not interleaves:
        raise DeclarationError(
            f"better_together.interleave: none of the stages {', '.join(settings.stages)} can be interleaved",
            hint="add mmgrpo or prompt_r1 to the stages, or remove interleave",
        )
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
