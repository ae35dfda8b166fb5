"""Choice of a method from what a system has to tune, the prices of its evaluations, and the budget.

The choice is made once, before the first run, and each part of it is told with its reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.util import find_spec

from compound.core.formatting import plural
from compound.engines.local.devices import device_count
from compound.graph.configuration import components_of
from compound.graph.space import Choice, Demos, Float, Int, Text, Weights
from compound.graph.system import System
from compound.optimization.method import Method
from compound.optimization.prices import estimate_prices
from compound.optimization.settings.optimize import OptimizeSettings
from compound.optimizers.better_together import BetterTogetherSettings, better_together
from compound.optimizers.optimas.methods import OptimasSettings, optimas
from compound.optimizers.scheduling import keys_of
from compound.optimizers.search.local_gains import savings_of, total_savings
from compound.optimizers.search.sources import SearchSettings

Make = Callable[[str, System, OptimizeSettings], Method]
# Factor by which local rewards must be able to make a search cheaper; 2 gained nothing on Atlas.
LEAST_SAVING = 3.0
TRAINED_BY = "mmgrpo"
LEAST_STEPS = 20  # of a training, in half of the budget
NO_BACKBONE: Mapping[str, object] = {
    "model": "none"
}  # rewards read numbers, labels and gold answers


def auto(system: System, optimize: OptimizeSettings, make: Make) -> Method:
    """Choose by system and budget: a joint search, local rewards where they pay, and training of weights."""
    stages, notes = list[str](), list[str]()
    if keys_of(system, Text, Demos, Choice, Int, Float):
        stage, reason, optimize = _search(system, optimize)
        stages.append(stage)
        notes.append(f"auto: {stage}, since {reason}")
    if keys_of(system, Weights):
        trains, reason = _training(system, optimize, make, alone=not stages)
        stages += [TRAINED_BY] * trains
        notes.append(f"auto: {reason}")

    def stage_of(name: str, system: System, optimize: OptimizeSettings) -> Method:
        if name != "optimas":
            return make(name, system, optimize)
        settings = optimize.section(name, OptimasSettings)
        return replace(optimas(system, optimize, settings, trains=False), sections={name: settings})

    if len(stages) > 1:
        made = better_together(
            system, optimize, BetterTogetherSettings(stages=tuple(stages)), stage_of
        )
    else:
        made = stage_of(stages[0] if stages else "search", system, optimize)
    return replace(made, name="auto", notes=[*notes, *made.notes])


def _search(system: System, optimize: OptimizeSettings) -> tuple[str, str, OptimizeSettings]:
    """Return the method that searches all parameters except weights, the reason for it, and its settings.

    The settings of `search` and of `optimas` count for either; a model to embed texts must be
    named.
    """
    tuned = components_of(keys_of(system, Text, Demos, Choice, Int, Float))
    prices = estimate_prices(system)
    savings = [savings_of(system, name, prices) for name in tuned]
    saved = total_savings(savings)
    given: dict[str, object] = {"backbone": NO_BACKBONE}
    for section in (
        optimize.section("search", SearchSettings),
        optimize.section("optimas", OptimasSettings),
    ):
        given |= section.model_dump(exclude_unset=True)
    cheap = ", ".join(each.component for each in savings if not each.unused_reason)
    factor = f"at most {saved:.3g} times" if math.isfinite(saved) else "much"
    if saved < LEAST_SAVING:
        chosen, reason = "search", "local evaluations would save little"
    elif find_spec("sklearn") is None:
        chosen, reason = "search", "local rewards need the extra 'rewards'"
    else:
        chosen, reason = "optimas", f"local evaluations of {cheap} can make it {factor} cheaper"
        reason += ", as far as scores confirm local rewards"
    if chosen == "search":
        given = {
            name: value for name, value in given.items() if name in SearchSettings.model_fields
        }
    return chosen, reason, OptimizeSettings.model_validate({**optimize.given, chosen: given})


def _training(
    system: System, optimize: OptimizeSettings, make: Make, *, alone: bool
) -> tuple[bool, str]:
    """Return whether to train weights, and why."""
    names = ", ".join(components_of(keys_of(system, Weights)))
    runs, step = optimize.budget.system_runs, make(TRAINED_BY, system, optimize).jobs[0].step
    steps = math.inf if runs is None or not step else runs / 2 // step
    if alone:
        return True, f"{TRAINED_BY}, since only the weights of {names} can change"
    if find_spec("torch") is None or not device_count("cuda"):
        why = "there is no GPU"
    elif steps < LEAST_STEPS:
        covered = plural(int(steps), "step")
        why = f"half of the budget covers {covered} of {TRAINED_BY}, and a training takes {LEAST_STEPS}"
    else:
        return True, f"then {TRAINED_BY} for the weights of {names}"
    return (
        False,
        f"the weights of {names} stay, since {why}; method: better_together trains them anyway",
    )
