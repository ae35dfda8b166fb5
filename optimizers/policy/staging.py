"""BetterTogether: methods one after the other, each from the best configuration so far, on one budget.

A stage changes its own kind of parameters and leaves the others as they are: prompts are frozen while
weights are trained. Every job of a stage is followed by a decision.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from compound.errors import DeclarationError
from compound.optimization import Job, Method, Optimizer
from compound.optimizers.policy.methods import InOrder
from compound.settings import OptimizeSettings
from compound.system import System

Make = Callable[[str, System, OptimizeSettings], Method]
NAME = "better_together"


def better_together(system: System, settings: OptimizeSettings, make: Make) -> Method:
    """Return the method that goes through stages.

    Args:
        system: what is to be optimized.
        settings: ``weights.stages`` names the methods.
        make: makes a method by its name.

    Raises:
        DeclarationError: there are no stages, or a stage has nothing it could change, or is this method
        itself.
    """
    if not settings.weights.stages or NAME in settings.weights.stages:
        raise DeclarationError(
            f"optimize.weights.stages must name other methods, but is {list(settings.weights.stages)}",
            hint="for example [mipro, mmgrpo]",
        )
    optimizers: dict[str, Optimizer] = {}
    jobs: list[Job] = []
    notes: dict[str, None] = {}
    least = 0.0
    for number, stage in enumerate(settings.weights.stages, 1):
        made = make(stage, system, settings)
        label = f"{number} {stage}"
        optimizers |= {f"{label}/{name}": optimizer for name, optimizer in made.optimizers.items()}
        opening = [replace(made.opening, weight=made.opening.weight * len(made.jobs))] if made.opening else []
        jobs += [replace(job, optimizer=f"{label}/{job.optimizer}") for job in (*opening, *made.jobs)]
        least = max(least, made.least)
        notes |= dict.fromkeys(made.notes)
    return Method(
        NAME, optimizers, jobs, InOrder(), least=least, decisions=len(jobs), jobs_each=1, notes=list(notes)
    )
