"""Test doubles, and conformance kits for implementations of a role.

A kit is a plain class. Subclass it in a test module under a name that starts with ``Test``, and override its
hooks; pytest then collects its checks. `run_kit` runs them without pytest. The kits are loaded on first use,
so that importing the doubles is fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from compound.testing.doubles import PlainMemory as PlainMemory
from compound.testing.doubles import ScriptedLM as ScriptedLM

if TYPE_CHECKING:  # type checkers cannot follow `__getattr__`
    from compound.testing.checks import run_kit as run_kit
    from compound.testing.component_kit import ComponentKit as ComponentKit
    from compound.testing.engine_kit import EngineKit as EngineKit
    from compound.testing.metric_kit import MetricKit as MetricKit
    from compound.testing.optimizer_job import OptimizerJob as OptimizerJob
    from compound.testing.optimizer_kit import OptimizerKit as OptimizerKit
    from compound.testing.recipe_job import RecipeJob as RecipeJob
    from compound.testing.recipe_kit import RecipeKit as RecipeKit

_HOME = {
    "ComponentKit": "compound.testing.component_kit",
    "EngineKit": "compound.testing.engine_kit",
    "MetricKit": "compound.testing.metric_kit",
    "OptimizerJob": "compound.testing.optimizer_job",
    "OptimizerKit": "compound.testing.optimizer_kit",
    "RecipeJob": "compound.testing.recipe_job",
    "RecipeKit": "compound.testing.recipe_kit",
    "run_kit": "compound.testing.checks",
}

__all__ = sorted([*_HOME, "PlainMemory", "ScriptedLM"])  # noqa: PLE0605 - the kits are loaded lazily


if not TYPE_CHECKING:  # with a module-level `__getattr__`, type checkers would accept any name

    def __getattr__(name: str) -> object:
        if name not in _HOME:
            raise AttributeError(f"module 'compound.testing' has no attribute {name!r}")
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return __all__
