"""Public names of `compound.interchange`, for type checkers and for its ``__getattr__``."""

from compound.interchange.dspy_import import from_dspy as from_dspy
from compound.interchange.dspy_import import from_dspy_metric as from_dspy_metric
from compound.interchange.dspy_import import to_dspy as to_dspy
from compound.interchange.exports import export as export
from compound.interchange.exports import to_optuna as to_optuna

__all__: list[str]
