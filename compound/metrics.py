"""Metrics, by name or made of a function, and agreement of a judge with labels."""

from compound.core.lazy import public_names

__getattr__, __dir__, __all__, _HOME = public_names(__name__, __file__)
