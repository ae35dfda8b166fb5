"""Bounds on what local rewards may save: the prices of global and of local evaluations of a component."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

__all__ = ["LocalSavings", "SavingsDocument", "SystemSavings", "SystemSavingsDocument"]


class SavingsDocument(TypedDict):
    """A `LocalSavings` as JSON types; ``at_most`` is ``None`` if a local evaluation costs nothing."""

    component: str
    global_price: float
    local_price: float
    at_most: float | None
    unused_reason: str


class SystemSavingsDocument(TypedDict):
    """A `SystemSavings` as JSON types; ``at_most`` is ``None`` if no evaluation of any job costs anything."""

    components: list[SavingsDocument]
    at_most: float | None


@dataclass(frozen=True)
class LocalSavings:
    """What the local reward of a component may save, by the prices of evaluations alone.

    Attributes:
        component: the component.
        global_price: system runs of a global evaluation of a change on one example.
        local_price: system runs of a local evaluation.
        unused_reason: why the component is searched by the global reward; ``""`` if it has a local one.

    >>> LocalSavings("a", 1.0, 0.25).at_most, LocalSavings("d", 0.25, 0.25, "the last one").at_most
    (4.0, 1.0)
    """

    component: str
    global_price: float
    local_price: float
    unused_reason: str = ""

    @property
    def price(self) -> float:
        """System runs of an evaluation by the reward that the component is searched with."""
        return self.global_price if self.unused_reason else self.local_price

    @property
    def at_most(self) -> float:
        """Factor by which evaluations may get cheaper; 1 for none, infinite if local ones are free."""
        return _ratio(self.global_price, self.price)

    def to_json(self) -> SavingsDocument:
        """Return the savings as JSON types."""
        return {
            "component": self.component,
            "global_price": self.global_price,
            "local_price": self.local_price,
            "at_most": _finite(self.at_most),
            "unused_reason": self.unused_reason,
        }

    @staticmethod
    def from_json(data: SavingsDocument) -> LocalSavings:
        """Return the savings that `to_json` wrote."""
        return LocalSavings(
            data["component"], data["global_price"], data["local_price"], data["unused_reason"]
        )

    def __str__(self) -> str:
        if self.unused_reason:
            return f"{self.component} none: {self.unused_reason}"
        factor = f"{self.at_most:.3g} times" if math.isfinite(self.at_most) else "without limit"
        prices = f"{self.global_price:.3g} of a run globally, {self.local_price:.3g} locally"
        return f"{self.component} {factor} ({prices})"


@dataclass(frozen=True)
class SystemSavings:
    """What the local rewards of a system may save.

    Attributes:
        jobs: the savings of each job, with its weight.

    >>> savings = [LocalSavings("a", 1.0, 0.25), LocalSavings("d", 0.25, 0.25, "the last one")]
    >>> SystemSavings([(each, 1.0) for each in savings]).at_most
    2.5
    """

    jobs: Sequence[tuple[LocalSavings, float]]

    @property
    def components(self) -> list[LocalSavings]:
        """The savings of each component."""
        return list({savings.component: savings for savings, _ in self.jobs}.values())

    @property
    def at_most(self) -> float:
        """Mean price of a global evaluation over the jobs, by that of an evaluation with local rewards."""
        return _ratio(
            sum(weight * savings.global_price for savings, weight in self.jobs),
            sum(weight * savings.price for savings, weight in self.jobs),
        )

    def to_json(self) -> SystemSavingsDocument:
        """Return the savings as JSON types."""
        return {
            "components": [savings.to_json() for savings in self.components],
            "at_most": _finite(self.at_most),
        }

    def __str__(self) -> str:
        found = self.at_most
        whole = f"at most {found:.3g} times" if math.isfinite(found) else "without limit"
        return (
            "local rewards may make an evaluation of a candidate cheaper: "
            f"{'; '.join(map(str, self.components))}; {whole} over all jobs"
        )


def _ratio(whole: float, part: float) -> float:
    if part:
        return whole / part
    return math.inf if whole else 1.0


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
