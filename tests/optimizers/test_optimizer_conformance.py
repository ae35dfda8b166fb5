"""Every optimizer of this package passes the checks of its role, and reads back what its checkpoints hold."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

import compound.optimizers
from compound.core.storage.state import State, StateError
from compound.optimization.method import Optimizer
from compound.optimizers.baselines.gepa import GEPA, Evolution, GEPASettings
from compound.optimizers.baselines.llm_selector import LLMSelector, Selection
from compound.optimizers.baselines.mipro import Mipro, MIPROProgress, MIPROSettings
from compound.optimizers.baselines.opro import OPRO, Generations
from compound.optimizers.baselines.random import Halving, RandomSearch
from compound.optimizers.baselines.textgrad import Descent, TextGrad, TextGradSettings
from compound.optimizers.optimas.local import Cloning, Collecting, LocalProgress
from compound.optimizers.search.candidates import JointProgress
from compound.optimizers.search.joint import JointSearch
from compound.optimizers.search.sources import CandidateSources
from compound.testing import OptimizerKit
from optimas_settings import guided_search, local_search, offline_rewards, optimas

REWARDS = optimas(
    model="none",
    samples=2,
    min_rollouts=1,
    max_rollouts=1,
    level=1,
    inputs=8,
    sufficient_accuracy=1.01,
)
SOURCES = CandidateSources(("demos", "edits", "reflect"))
TEXTS = ("first.prompt", "second.prompt")
SECOND = ("second.prompt", "second.demos")


class StateKit(OptimizerKit):
    """Checks of what the checkpoints of an optimizer hold, besides those of its role."""

    state: type[State]

    @pytest.mark.slow
    def test_every_checkpoint_is_read_as_what_it_was(self) -> None:
        states, _ = self.job().run(self.make())
        assert all(self.state.from_json(stored).to_json() == stored for stored in states)
        for field in self.state.model_fields if states else ():
            with pytest.raises(StateError, match=rf"cannot be read: {field}[.:]"):
                self.state.from_json({**states[-1], field: True})

    def test_a_checkpoint_of_another_version_is_refused_before_anything_is_run(self) -> None:
        job = self.job()
        job.task = replace(job.task, resume={"candidates": []})
        with pytest.raises(StateError, match=f"{self.state.__name__} has format None"):
            job.run(self.make())
        assert job.spent == 0


def kit_of(
    made: type[State], least: int, tuned: Sequence[str] | None, factory: Callable[[], Optimizer]
) -> type[StateKit]:
    class Kit(StateKit):
        state = made
        checkpoints = least

        def make(self) -> Optimizer:
            return factory()

        def keys(self) -> Sequence[str]:
            return super().keys() if tuned is None else tuned

    return Kit


EVERYTHING = (*TEXTS, "second.demos", "second.temperature", "second.max_tokens")
ALL_SOURCES = CandidateSources(("describe", "reflect", "demos", "edits"))
BOTH = MIPROSettings(proposers=("edits", "llm"), trials=6)
LIMITS = ("first.max_tokens", "second.max_tokens")
SEARCHED = (*SECOND, "first.prompt")

TestRandomSearch = kit_of(Halving, OptimizerKit.checkpoints, None, RandomSearch)
TestJointSearch = kit_of(JointProgress, 4, EVERYTHING, lambda: JointSearch(ALL_SOURCES))
TestMipro = kit_of(MIPROProgress, 2, (*TEXTS, "second.demos"), lambda: Mipro(BOTH))
TestMiproOfTexts = kit_of(MIPROProgress, 2, TEXTS, lambda: Mipro(MIPROSettings(trials=4)))
TestOPRO = kit_of(Generations, 3, TEXTS, OPRO)
TestTextGrad = kit_of(Descent, 5, TEXTS, TextGrad)
TestGEPA = kit_of(Evolution, 2, TEXTS, lambda: GEPA(GEPASettings(iterations=6)))
TestLLMSelector = kit_of(Selection, 2, LIMITS, LLMSelector)
TestDiagnoser = kit_of(Selection, 2, LIMITS, lambda: LLMSelector(alpha=1.0))
TestOfflineRewards = kit_of(Collecting, 2, SEARCHED, lambda: offline_rewards(REWARDS, SOURCES))
# local evaluations of the first component save calls; the second one is the last
TestGuidedSearch = kit_of(JointProgress, 4, SEARCHED, lambda: guided_search(REWARDS, SOURCES))
TestLocalSearch = kit_of(
    LocalProgress, 1, ("first.prompt",), lambda: local_search(REWARDS, SOURCES)
)
# without pairs there is nothing to imitate
TestCloning = kit_of(
    LocalProgress, 0, ("first.prompt",), lambda: local_search(REWARDS, SOURCES, scoring=Cloning)
)


@pytest.mark.parametrize(
    "optimizer",
    [
        GEPA(GEPASettings(iterations=3, lm="big")),
        Mipro(MIPROSettings(trials=1, lm="big")),
        OPRO("big"),
        TextGrad(TextGradSettings(steps=2, lm="big")),
    ],
    ids=lambda optimizer: type(optimizer).__name__,
)
def test_the_model_that_writes_is_the_one_that_was_named(optimizer: Optimizer) -> None:
    job = TestOPRO().job()
    job.run(optimizer)
    assert {lm for lm, _ in job.proposal_requests} == {"big"}


def test_every_optimizer_has_a_class_here() -> None:
    modules = [
        importlib.import_module(module.name)
        for module in pkgutil.walk_packages(compound.optimizers.__path__, "compound.optimizers.")
        if not module.ispkg
    ]
    found = {
        value
        for module in modules
        for value in vars(module).values()
        if inspect.isclass(value) and inspect.isasyncgenfunction(getattr(value, "propose", None))
    }
    tested = {type(kit().make()) for kit in globals().values() if _is_kit(kit)}
    weights = {"WeightTraining", "LocalTraining"}  # see test_recipe_conformance.py
    assert {kind.__name__ for kind in found - tested} == weights


def _is_kit(value: object) -> bool:
    return inspect.isclass(value) and issubclass(value, OptimizerKit) and hasattr(value, "state")
