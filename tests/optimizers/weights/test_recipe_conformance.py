"""Every recipe of this package passes the checks of its role, and so do the optimizers that train by them."""

from __future__ import annotations

import importlib.util
import inspect
import pkgutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import compound.optimizers
from compound import LLM, Example, Input, LoRA, System
from compound.core.example import CallValues, Values
from compound.engines.model_folder import load_tokenizer
from compound.ext import Engine, Metric, Optimizer, Recipe
from compound.metrics import custom
from compound.optimizers.optimas.methods import LocalTraining
from compound.optimizers.search.rewarding import Guidance, RunRewards
from compound.optimizers.weights.learner.updates import OptimizerSettings
from compound.optimizers.weights.recipes.distill import Distill, DistillSettings
from compound.optimizers.weights.recipes.local_draws import LocalDraws, LocalTrainingChoice
from compound.optimizers.weights.recipes.mhgpo import (
    MHGPO,
    MHGPORandomSettings,
    MHGPOSettings,
    RandomForkSettings,
)
from compound.optimizers.weights.recipes.mmgrpo import (
    MMGRPO,
    GRPOSettings,
    MMGRPOSettings,
    PromptR1,
    PromptR1Settings,
)
from compound.optimizers.weights.recipes.mygo import MyGO, MyGOSettings
from compound.optimizers.weights.recipes.ppo import PPO, PPOSettings
from compound.optimizers.weights.recipes.rollouts import RolloutSettings
from compound.optimizers.weights.training import WeightTraining
from compound.rewards.settings import RewardLearning
from compound.testing import OptimizerKit, RecipeJob, RecipeKit
from compound.testing.recipe_kit import ConstantCritic

RUNS = RolloutSettings(runs=4)


class TestMMGRPO(RecipeKit):
    def make(self) -> Recipe:
        return MMGRPO(MMGRPOSettings(rollouts=RUNS, group=3))


class TestForksAtEveryAgent(RecipeKit):
    def make(self) -> Recipe:
        return MHGPO(MHGPOSettings(rollouts=RUNS), "is")


class TestForksAtTheFirstAgent(RecipeKit):
    def make(self) -> Recipe:
        return MHGPO(MHGPOSettings(rollouts=RUNS), "fof")


class TestForksAtADrawnAgent(RecipeKit):
    def make(self) -> Recipe:
        return MHGPO(MHGPORandomSettings(rollouts=RandomForkSettings(runs=RUNS.runs)), "rr")


class TestPPO(RecipeKit):
    def make(self) -> Recipe:
        return PPO(PPOSettings(rollouts=RUNS))


class TestPromptR1(RecipeKit):
    def make(self) -> Recipe:
        return PromptR1(PromptR1Settings(rollouts=RUNS))


class TestMyGO(RecipeKit):
    def make(self) -> Recipe:
        return MyGO(MyGOSettings(attempts=6, keep=2, threshold=0.3))


class Tokenizing(ConstantCritic):
    tokenizer: Any = None


class TestDistill(RecipeKit):
    @pytest.fixture(autouse=True)
    def _tokenizer(self, model: Path) -> None:
        Tokenizing.tokenizer = load_tokenizer(model)

    def make(self) -> Recipe:
        return Distill(DistillSettings(rollouts=RUNS))

    def job(self, agents: Sequence[str] | None = None) -> RecipeJob:
        job = super().job(agents)
        job.critic = Tokenizing()
        return job


def likes(component: str, calls: Sequence[CallValues]) -> Any:
    return np.array([sum(map(ord, str(outputs["output"]))) % 97 / 97 for _, outputs in calls])


class Trusted(RunRewards):
    async def guidance(self, component: str) -> Guidance:
        return Guidance(likes)


class TestLocalDraws(RecipeKit):
    trained = ("b",)
    settings: Any = GRPOSettings(rollouts=RUNS)

    def make(self) -> Recipe:
        return LocalDraws(type(self).settings, likes)


class TestLocalDrawsWithACritic(TestLocalDraws):
    settings = PPOSettings(rollouts=RUNS)


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs torch and peft")
class TestWeightTraining(OptimizerKit):
    share = 24.0
    checkpoints = 2
    folder: Path

    @pytest.fixture(autouse=True)
    def _model(self, model: Path) -> None:
        self.folder = model

    def make(self) -> Optimizer:
        settings = MMGRPOSettings(
            steps=2,
            rollouts=RolloutSettings(runs=2, examples=2),
            optimizer=OptimizerSettings(lr=0.01),
        )
        return WeightTraining(MMGRPO(settings))

    def system(self) -> System:
        said = LLM("talker", prompt="Talk.", max_tokens=6, temperature=1.0, weights=LoRA(2))
        return System("talk", outputs={"answer": said(question=Input("question"))}, lm="lm")

    def metric(self) -> Metric:
        return custom(letters, bounds=(0, 1))

    def engine(self) -> Engine:
        from compound.engines.local.engine import TransformersEngine

        return TransformersEngine(str(self.folder), dtype="float32", deterministic=True)


class TestLocalTraining(TestWeightTraining):
    checkpoints = 1

    def make(self) -> Optimizer:
        settings = GRPOSettings(steps=1, rollouts=RolloutSettings(runs=2, examples=2))
        return LocalTraining(RewardLearning(), LocalTrainingChoice(grpo=settings), Trusted)


def letters(outputs: Values, example: Example) -> float:
    return min(1.0, len(set(str(outputs["answer"]))) / 60)


def test_every_recipe_has_a_class_here() -> None:
    modules = [
        importlib.import_module(module.name)
        for module in pkgutil.walk_packages(compound.optimizers.__path__, "compound.optimizers.")
        if not module.ispkg
    ]
    found = {
        value for module in modules for value in vars(module).values() if inspect.isclass(value)
    }
    recipes = {kind for kind in found if issubclass(kind, Recipe) and not inspect.isabstract(kind)}
    kits: list[Any] = [
        kit for kit in globals().values() if inspect.isclass(kit) and issubclass(kit, RecipeKit)
    ]
    assert recipes == {type(kit().make()) for kit in kits if kit is not RecipeKit}
