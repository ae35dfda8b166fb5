"""Count the prompt tokens that an engine processed, and those that it reused."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prefilled:
    """Prompt tokens so far, and those of them that were not computed, because a beginning was shared.

    >>> Prefilled(tokens=1000, cached=640).share
    0.64
    >>> Prefilled(10, 4) + Prefilled(20, 6)
    Prefilled(tokens=30, cached=10)
    """

    tokens: int = 0
    cached: int = 0

    @property
    def share(self) -> float:
        """The share of prompt tokens that was saved."""
        return self.cached / self.tokens if self.tokens else 0.0

    def __add__(self, other: Prefilled) -> Prefilled:
        return Prefilled(self.tokens + other.tokens, self.cached + other.cached)

    def __sub__(self, other: Prefilled) -> Prefilled:
        return Prefilled(self.tokens - other.tokens, self.cached - other.cached)
