"""Conformance of the optimizer."""

from __future__ import annotations

from compound_example.hill_climb import HillClimb, HillClimbSettings

from compound.testing import OptimizerKit


class TestHillClimb(OptimizerKit):
    def make(self) -> HillClimb:
        return HillClimb(HillClimbSettings(step=0.5))

    def keys(self) -> list[str]:
        return ["second.temperature"]
