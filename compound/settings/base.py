"""Base class of settings."""

from __future__ import annotations

from typing import TypeVar

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """Base of all settings: unknown keys are rejected, and values are immutable.

    Descriptions are the docstrings of the attributes.

    Example:
        >>> class AnnealingSettings(Settings):
        ...     temperature: float = 1.0
        >>> AnnealingSettings(temperature=0.5)
        AnnealingSettings(temperature=0.5)
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class NoSettings(Settings):
    """Settings of a method without options."""


S = TypeVar("S", bound=Settings)
