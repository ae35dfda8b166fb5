"""Public names of `compound.testing`, for type checkers and for its ``__getattr__``."""

from compound.testing.checks import run_kit as run_kit
from compound.testing.component_kit import ComponentKit as ComponentKit
from compound.testing.doubles import PlainMemory as PlainMemory
from compound.testing.doubles import ScriptedLM as ScriptedLM
from compound.testing.engine_kit import EngineKit as EngineKit
from compound.testing.metric_kit import MetricKit as MetricKit
from compound.testing.optimizer_kit import OptimizerJob as OptimizerJob
from compound.testing.optimizer_kit import OptimizerKit as OptimizerKit
from compound.testing.recipe_kit import RecipeJob as RecipeJob
from compound.testing.recipe_kit import RecipeKit as RecipeKit

__all__: list[str]
