"""Counts of the prompt tokens that an engine processed and of those that it reused from a cache."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prefilled:
    """Number of prompt tokens so far, and how many of them were reused from a shared prefix.

    >>> Prefilled(tokens=1000, cached=640).share
    0.64
    >>> Prefilled(10, 4) + Prefilled(20, 6)
    Prefilled(tokens=30, cached=10)
    """

    tokens: int = 0
    cached: int = 0

    @property
    def share(self) -> float:
        """Fraction of prompt tokens that were reused."""
        return self.cached / self.tokens if self.tokens else 0.0

    def __add__(self, other: Prefilled) -> Prefilled:
        return Prefilled(self.tokens + other.tokens, self.cached + other.cached)

    def __sub__(self, other: Prefilled) -> Prefilled:
        return Prefilled(self.tokens - other.tokens, self.cached - other.cached)
