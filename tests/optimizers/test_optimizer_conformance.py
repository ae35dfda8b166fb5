"""Every optimizer of this package passes the checks of its role."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Sequence

import compound.optimizers
from compound.optimization.method import Optimizer
from compound.optimizers.baselines.evolution import GEPASettings
from compound.optimizers.baselines.gepa import GEPA
from compound.optimizers.baselines.llm_selector import LLMSelector
from compound.optimizers.baselines.mipro import Mipro, MIPROSettings
from compound.optimizers.baselines.opro import OPRO
from compound.optimizers.baselines.random import RandomSearch
from compound.optimizers.baselines.textgrad import TextGrad
from compound.optimizers.optimas.local import Cloning
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


class TestRandomSearch(OptimizerKit):
    def make(self) -> Optimizer:
        return RandomSearch()


class TestJointSearch(OptimizerKit):
    checkpoints = 4

    def make(self) -> Optimizer:
        return JointSearch(CandidateSources(("describe", "reflect", "demos", "edits")))

    def keys(self) -> Sequence[str]:
        return (*TEXTS, "second.demos", "second.temperature", "second.max_tokens")


class TestMipro(OptimizerKit):
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


class TestOPRO(OptimizerKit):
    checkpoints = 3

    def make(self) -> Optimizer:
        return OPRO()

    def keys(self) -> Sequence[str]:
        return TEXTS


class TestTextGrad(OptimizerKit):
    checkpoints = 5

    def make(self) -> Optimizer:
        return TextGrad()

    def keys(self) -> Sequence[str]:
        return TEXTS


class TestGEPA(OptimizerKit):
    checkpoints = 2

    def make(self) -> Optimizer:
        return GEPA(GEPASettings(iterations=6))

    def keys(self) -> Sequence[str]:
        return TEXTS


class TestLLMSelector(OptimizerKit):
    checkpoints = 2

    def make(self) -> Optimizer:
        return LLMSelector()

    def keys(self) -> Sequence[str]:
        return ("first.max_tokens", "second.max_tokens")


class TestLLMSelectorWithADiagnoser(TestLLMSelector):
    def make(self) -> Optimizer:
        return LLMSelector(alpha=1.0)


class TestOfflineRewards(OptimizerKit):
    checkpoints = 2

    def make(self) -> Optimizer:
        return offline_rewards(REWARDS, SOURCES)

    def keys(self) -> Sequence[str]:
        return (*SECOND, "first.prompt")


class TestGuidedSearch(OptimizerKit):
    """Local evaluations of the first component save calls; the second one is the last."""

    checkpoints = 4

    def make(self) -> Optimizer:
        return guided_search(REWARDS, SOURCES)

    def keys(self) -> Sequence[str]:
        return (*SECOND, "first.prompt")


class TestLocalSearch(OptimizerKit):
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
    return inspect.isclass(value) and issubclass(value, OptimizerKit) and value is not OptimizerKit
