"""Objective of an optimization: the score to maximize, and limits of what a run of the system may take."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from compound.settings.base import Settings


class LimitSettings(Settings):
    """Limits on the mean of the runs of a configuration; calls from the cache count like executed ones."""

    usd_per_run: float | None = Field(default=None, gt=0)
    """US dollars of the system's calls. Every model of the system needs a price."""
    tokens_per_run: float | None = Field(default=None, gt=0)
    """Prompt and completion tokens of the system's calls."""
    seconds_per_run: float | None = Field(default=None, gt=0)
    """Seconds of the longest chain of dependent calls, as measured, with retries and waits."""

    def broken(self, *, usd: float | None, tokens: float, seconds: float) -> list[str]:
        """Return a phrase for each limit that means per run exceed; unknown dollars exceed their limit.

        >>> LimitSettings(usd_per_run=0.01, tokens_per_run=500).broken(usd=None, tokens=620, seconds=1)
        ['usd_per_run is unknown', 'tokens_per_run 620 > 500']
        """
        means = {"usd_per_run": usd, "tokens_per_run": tokens, "seconds_per_run": seconds}
        found: list[str] = []
        for name, limit in self.model_dump(exclude_none=True).items():
            if (mean := means[name]) is None:
                found.append(f"{name} is unknown")
            elif mean > limit:
                found.append(f"{name} {mean:.4g} > {limit:g}")
        return found


class ObjectiveSettings(Settings):
    """Objective of an optimization."""

    maximize: Literal["score"] = "score"
    """What to maximize: `score`, the mean of the metric."""
    limits: LimitSettings = LimitSettings()
    """Limits per run. A run returns no change that exceeds one, and prefers any configuration that meets all
    of them to one that does not."""
