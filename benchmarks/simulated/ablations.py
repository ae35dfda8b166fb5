"""Control of `optimas`: rewards learned from shuffled labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from compound.execution.rng import generator
from compound.graph.system import System
from compound.optimization.method import Method, Optimizer
from compound.optimization.registration import method
from compound.optimization.settings.optimize import OptimizeSettings
from compound.optimizers.optimas.methods import OptimasSettings, optimas
from compound.optimizers.search.joint import JointSearch
from compound.optimizers.search.local_gains import RewardGuide
from compound.rewards.buffer import Entry
from compound.rewards.features import Embedder, Template
from compound.rewards.gains import Critic, fit_critic
from compound.rewards.pairs import Draw


@dataclass(frozen=True)
class FitToShuffled:
    """Fits a critic to draws with shuffled scores and without gold answers."""

    def __call__(
        self, entries: Sequence[Entry], template: Template, backbone: Embedder, *, certain: bool
    ) -> Critic | None:
        """Shuffle, then fit."""
        shuffled = [replace(entry, draw=self._shuffled(entry.draw)) for entry in entries]
        return fit_critic(shuffled, template, backbone, certain=certain)

    def _shuffled(self, draw: Draw) -> Draw:
        rng = generator(0, "labels", draw.example, draw.address)
        order = rng.permutation(len(draw.candidates))
        rewards = [draw.candidates[i].rewards for i in order]
        pairs = zip(draw.candidates, rewards, strict=True)
        candidates = [replace(made, rewards=shuffled, signals={}) for made, shuffled in pairs]
        return replace(draw, candidates=tuple(candidates))


@method(settings=OptimasSettings)
def shuffled(system: System, optimize: OptimizeSettings, settings: OptimasSettings) -> Method:
    """Return the method `optimas` with rewards learned from shuffled scores."""
    made = optimas(system, optimize, settings)
    joint = made.optimizers["joint"]
    assert isinstance(joint, JointSearch)
    assert isinstance(joint.guide, RewardGuide)
    changed: Optimizer = replace(joint, guide=replace(joint.guide, fit=FitToShuffled()))
    return replace(made, optimizers={**made.optimizers, "joint": changed})
