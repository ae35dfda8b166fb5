"""Every recipe of this package passes the checks of its role, and so do the optimizers that train by them."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Sequence
from typing import Any

import numpy as np

import compound.optimizers
from compound.example import CallValues
from compound.optimizers.optimas.weights import LocalDraws
from compound.optimizers.weights.recipes.mhgpo import MHGPO, MHGPORandomSettings, MHGPOSettings
from compound.optimizers.weights.recipes.mmgrpo import MMGRPO, GRPOSettings, MMGRPOSettings
from compound.optimizers.weights.recipes.mygo import MyGO, MyGOSettings
from compound.optimizers.weights.recipes.ppo import PPO, MAPPOSettings, PPOSettings
from compound.optimizers.weights.recipes.prompt_r1 import PromptR1, PromptR1Settings
from compound.optimizers.weights.recipes.recipe import Recipe
from compound.optimizers.weights.recipes.rollouts import RolloutSettings
from compound.testing import RecipeKit

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
        return MHGPO(MHGPORandomSettings(rollouts=RUNS), "rr")


class TestPPO(RecipeKit):
    def make(self) -> Recipe:
        return PPO(PPOSettings(rollouts=RUNS))


class TestMAPPO(RecipeKit):
    def make(self) -> Recipe:
        return PPO(MAPPOSettings(rollouts=RUNS))


class TestPromptR1(RecipeKit):
    def make(self) -> Recipe:
        return PromptR1(PromptR1Settings(rollouts=RUNS))


class TestMyGO(RecipeKit):
    def make(self) -> Recipe:
        return MyGO(MyGOSettings(attempts=6, keep=2, threshold=0.3))


class TestMyGOOffline(RecipeKit):
    def make(self) -> Recipe:
        return MyGO(MyGOSettings(attempts=6, keep=2, threshold=0.3, online=False))


class Likes:
    """A local reward: what is said last counts."""

    def rewards(self, component: str, calls: Sequence[CallValues]) -> np.ndarray[Any, np.dtype[np.float64]]:
        return np.array([int(str(outputs["output"])) / 10 for _, outputs in calls])


class TestLocalDraws(RecipeKit):
    """Answers of one component, by its local reward."""

    trained = ("b",)
    settings: Any = GRPOSettings(rollouts=RUNS)

    def make(self) -> Recipe:
        scores: Any = Likes()
        return LocalDraws(type(self).settings, scores)


class TestLocalDrawsWithACritic(TestLocalDraws):
    settings = PPOSettings(rollouts=RUNS)


def test_every_recipe_has_a_class_here() -> None:
    modules = [
        importlib.import_module(module.name)
        for module in pkgutil.walk_packages(compound.optimizers.__path__, "compound.optimizers.")
        if not module.ispkg
    ]
    found = {value for module in modules for value in vars(module).values() if inspect.isclass(value)}
    recipes = {kind for kind in found if issubclass(kind, Recipe) and not inspect.isabstract(kind)}
    kits: list[Any] = [
        kit for kit in globals().values() if inspect.isclass(kit) and issubclass(kit, RecipeKit)
    ]
    assert recipes == {type(kit().make()) for kit in kits if kit is not RecipeKit}
