"""Every optimizer of this package passes the checks of its role, and reads back what its checkpoints hold."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Sequence
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


class TestRandomSearch(StateKit):
    state = Halving

    def make(self) -> Optimizer:
        return RandomSearch()


class TestJointSearch(StateKit):
    state = JointProgress
    checkpoints = 4

    def make(self) -> Optimizer:
        return JointSearch(CandidateSources(("describe", "reflect", "demos", "edits")))

    def keys(self) -> Sequence[str]:
        return (*TEXTS, "second.demos", "second.temperature", "second.max_tokens")


class TestMipro(StateKit):
    state = MIPROProgress
    checkpoints = 2

    def make(self) -> Optimizer:
        return Mipro(MIPROSettings(proposers=("edits", "llm"), trials=6))

    def keys(self) -> Sequence[str]:
        return (*TEXTS, "second.demos")


class TestMiproWithoutDemonstrations(TestMipro):
    def make(self) -> Optimizer:
        return Mipro(MIPROSettings(trials=4))

    def keys(self) -> Sequence[str]:
        return TEXTS


class TestOPRO(StateKit):
    state = Generations
    checkpoints = 3

    def make(self) -> Optimizer:
        return OPRO()

    def keys(self) -> Sequence[str]:
        return TEXTS


class TestTextGrad(StateKit):
    state = Descent
    checkpoints = 5

    def make(self) -> Optimizer:
        return TextGrad()

    def keys(self) -> Sequence[str]:
        return TEXTS


class TestGEPA(StateKit):
    state = Evolution
    checkpoints = 2

    def make(self) -> Optimizer:
        return GEPA(GEPASettings(iterations=6))

    def keys(self) -> Sequence[str]:
        return TEXTS


class TestLLMSelector(StateKit):
    state = Selection
    checkpoints = 2

    def make(self) -> Optimizer:
        return LLMSelector()

    def keys(self) -> Sequence[str]:
        return ("first.max_tokens", "second.max_tokens")


class TestLLMSelectorWithADiagnoser(TestLLMSelector):
    def make(self) -> Optimizer:
        return LLMSelector(alpha=1.0)


class TestOfflineRewards(StateKit):
    state = Collecting
    checkpoints = 2

    def make(self) -> Optimizer:
        return offline_rewards(REWARDS, SOURCES)

    def keys(self) -> Sequence[str]:
        return (*SECOND, "first.prompt")


class TestGuidedSearch(StateKit):
    """Local evaluations of the first component save calls; the second one is the last."""

    state = JointProgress
    checkpoints = 4

    def make(self) -> Optimizer:
        return guided_search(REWARDS, SOURCES)

    def keys(self) -> Sequence[str]:
        return (*SECOND, "first.prompt")


class TestLocalSearch(StateKit):
    state = LocalProgress
    checkpoints = 1

    def make(self) -> Optimizer:
        return local_search(REWARDS, SOURCES)

    def keys(self) -> Sequence[str]:
        return ("first.prompt",)


class TestCloning(TestLocalSearch):
    """Without pairs there is nothing to imitate."""

    checkpoints = 0

    def make(self) -> Optimizer:
        return local_search(REWARDS, SOURCES, scoring=Cloning)


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
