"""Conformance of the training recipe."""

from __future__ import annotations

from compound_example.top_share import TopShare, TopShareSettings

from compound.optimizers.weights.recipes.rollouts import RolloutSettings
from compound.testing import RecipeKit


class TestTopShare(RecipeKit):
    def make(self) -> TopShare:
        return TopShare(TopShareSettings(share=0.5, rollouts=RolloutSettings(runs=4)))
