"""Engines, which run the models that LLM components call."""

from compound.core.lazy import public_names

__getattr__, __dir__, __all__, _HOME = public_names(__name__, __file__)
