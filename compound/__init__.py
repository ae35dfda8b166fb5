"""`compound`: declare a compound AI system as a typed graph, and optimize it on data.

Public names are loaded on first use, so ``import compound`` loads neither torch,
transformers, optuna nor litellm.
"""

from compound.core.lazy import public_names

__version__ = "0.3.0"

__getattr__, __dir__, __all__, _HOME = public_names(__name__, __file__)
